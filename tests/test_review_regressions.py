"""Values of defects found in review of the GPU features, each kept as a test."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import onchip
from onchip import ops, prepare
from onchip.dispatch import explain
from onchip.problem import Op, Params, Problem, Tensors
from tests import problems, user_mods


def _reads(tensors: Tensors) -> Tensors:
    return ops._readable(tensors)


def test_small_tensors_with_strides_are_made_contiguous_for_kernels():
    q, k, v = problems.qkv()
    wide = torch.tensor([[0, 9], [5, 9], [7, 9]], dtype=torch.int32)
    tensors = Tensors(
        q, k, v,
        cu_seqlens_q=wide[:, 0], cu_seqlens_k=wide[:, 0], seqused_k=wide[1:, 0],
        leftpad_k=wide[:2, 1], alibi_slopes=torch.rand(4).expand(2, 4), sinks=torch.rand(8)[::2],
        block_table=torch.zeros(2, 6, dtype=torch.int32)[:, ::2],
    )  # fmt: skip
    kept = replace(tensors)
    read = _reads(tensors)
    for name in (*ops._SMALL, "block_table"):
        assert getattr(read, name).is_contiguous(), name
        assert torch.equal(getattr(read, name), getattr(kept, name)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slopes_have_the_precision_of_the_lse(dtype):
    q, k, v = problems.qkv(dtype=dtype)
    tensors = Tensors(q, k, v, alibi_slopes=torch.rand(4, dtype=torch.float64))
    assert _reads(tensors).alibi_slopes.dtype == dtype


def test_a_call_without_gradients_does_not_vouch_for_one_with():
    pytest.importorskip("triton")
    bias = torch.zeros(4, 33, requires_grad=True)
    score = onchip.ScoreMod(user_mods.relative_bias, aux=(bias,))
    q, k, v = problems.qkv()
    with torch.no_grad(), pytest.raises(onchip.NoKernelError):
        onchip.attention(q, k, v, score_mod=score)
    with pytest.raises(ValueError, match="score_mod"):
        onchip.attention(q, k, v, score_mod=score)


def test_meta_tensors_train():
    q, k, v = (torch.empty(1, 4, 2, 16, device="meta", requires_grad=True) for _ in range(3))
    out = onchip.attention(q, k, v)
    assert out.is_meta and out.requires_grad


def test_a_negated_lse_gradient_takes_the_dispatcher():
    x = torch.randn(3)
    assert ops.is_plain(x)
    assert not ops.is_plain(x, torch._neg_view(x))
    assert not ops.is_plain(x, torch._efficientzerotensor(3))


def test_calls_of_other_global_state_share_no_memo():
    q, k, v = problems.qkv()
    options = prepare.Options(False, (-1, -1), None, 0.0, False, False, None, None)
    first = prepare.dense(Tensors(q, k, v), options).memo
    assert prepare.dense(Tensors(q, k, v), options).memo is first
    torch.use_deterministic_algorithms(True)
    try:
        other = prepare.dense(Tensors(q, k, v), options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert other.memo is not first and other.params.deterministic


def test_huge_lengths_are_explained_at_once():
    from onchip.analysis.hardware import Hardware

    q = torch.empty(1, 8, 2, 64, device="meta", dtype=torch.bfloat16)
    params = Params(8, 8, -1, 0, 0.125, 0.0, False, 0, "")
    problem = Problem.of(Op.FORWARD, Tensors(q, q, q), params)
    length = 10**12
    problem = replace(
        problem, device="cuda", arch="sm_90", seqlen_q=length, seqlen_k=length, tokens_q=length
    )
    told = explain(problem, hardware=Hardware.named("H200"))
    assert told.prediction is None and "1000000000000" in told.why_no_prediction


def test_a_gpu_is_named_by_a_string():
    from onchip.analysis.hardware import Hardware

    with pytest.raises(TypeError, match="gpu: got int; allowed: a name"):
        Hardware.named(3)  # type: ignore[arg-type]


def dense_cache(batch: int):
    """q, caches and lengths of a decode over a dense cache, without a table."""
    q, cache = torch.randn(batch, 1, 2, 16), torch.randn(batch, 8, 2, 16)
    return q, cache, cache.clone(), torch.full((batch,), 5, dtype=torch.int32)


def decoded(q, k_cache, v_cache, lengths, **new):
    return onchip.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, **new)


def test_a_dense_cache_is_traced_after_a_real_call():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    decoded(*dense_cache(3))
    with FakeTensorMode():
        out = decoded(*dense_cache(3))
    assert out.shape == (3, 1, 2, 16)
    for mode in ("fake", "symbolic"):
        # A function without **new, whose arguments make_fx counts.
        traced = make_fx(lambda q, k, v, n: decoded(q, k, v, n), tracing_mode=mode)(*dense_cache(3))
        given = dense_cache(3)
        assert torch.equal(traced(*given), decoded(*given))


def test_batches_of_a_dense_cache_share_a_graph():
    from torch._dynamo.testing import CompileCounter

    graphs = CompileCounter()
    call = torch.compile(decoded, backend=graphs, dynamic=True)
    for batch in range(2, 7):
        call(*dense_cache(batch))
    assert graphs.frame_count <= 2


def test_tensors_are_explained_for_a_gpu_that_reads_them_by_tma():
    odd = torch.randn(1, 128, 2, 65, dtype=torch.bfloat16)[..., 1:]
    few = torch.randn(1, 128, 1, 64, dtype=torch.bfloat16).expand(1, 128, 2, 64)
    for x in (odd, few):
        assert onchip.explain(x, x, x).on("H200").chosen == "portable"
        y = x.contiguous()
        assert onchip.explain(y, y, y).on("H200").chosen == "hopper"


def test_parameters_are_launched_by_their_address():
    pytest.importorskip("triton")
    from onchip.kernels.launcher import Launch

    sinks = torch.nn.Parameter(torch.zeros(4))
    assert Launch(None, (1,), -1)._flat((sinks, 3, None)) == [sinks.data_ptr(), 3, None]


def test_an_append_past_the_dispatcher_is_seen_by_autograd():
    q, k_cache, v_cache, lengths = dense_cache(2)
    new = torch.randn(2, 1, 2, 16)
    saved = torch.ones_like(k_cache, requires_grad=True) * k_cache
    decoded(q, k_cache, v_cache, lengths, k=new, v=new)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_hopper_is_explained_with_its_own_tiles():
    x = torch.empty(1, 4096, 16, 128, dtype=torch.bfloat16, device="meta")
    told = str(onchip.explain(x, x, x).on("H200"))
    assert "hopper" in told and "warpgroups=2, block_n=128" in told
    assert "not known" not in told


def test_the_decode_leaves_more_pieces_than_a_grid_holds_to_others():
    x = torch.zeros(1, 1, 1, 16, dtype=torch.float16)
    many, keys = x.expand(70_000, -1, -1, -1), x.expand(70_000, 1024, -1, -1)
    told = onchip.explain(many, keys, keys).on("H200")
    assert told.chosen not in (None, "decode")
    assert told.rejected["decode"] == ["takes up to 65535 pieces of sequences, not 70000"]
    few = onchip.explain(many[:512], keys[:512], keys[:512], num_splits=128).on("H200")
    assert few.rejected["decode"] == ["takes up to 65535 pieces of sequences, not 65536"]


@pytest.mark.parametrize("gpu", ["H200", "A100 80GB", "MI300X"])
@pytest.mark.parametrize("shape", [(0, 1), (2, 0)], ids=str)
def test_calls_without_work_are_explained(gpu, shape):
    batch, length = shape
    q = torch.zeros(batch, length, 2, 64, dtype=torch.float16)
    k = torch.zeros(batch, 1024, 2, 64, dtype=torch.float16)
    told = onchip.explain(q, k, k).on(gpu)
    assert told.chosen and told.prediction is None and told.why_no_prediction


def _heads(length: int, batch: int | None = 1) -> torch.Tensor:
    lead = (length,) if batch is None else (batch, length)
    return torch.randn(*lead, 2, 16, dtype=torch.float16)


def test_rotary_tables_reach_every_key_that_is_quantised():
    table = torch.rand(8, 4)
    q = _heads(8)
    for rows in (0, 3):
        short = {"rotary_cos": table[:rows], "rotary_sin": table[:rows]}
        with pytest.raises(ValueError, match=f"rotary_cos: got {rows} positions; .* at least 8"):
            onchip.quantize_qkv(q, q, q, **short)
    with pytest.raises(ValueError, match="q: got 8 queries; allowed: up to 5, the keys"):
        k = _heads(5)
        onchip.quantize_qkv(q, k, k, rotary_cos=table, rotary_sin=table)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"cu_seqlens_q": [0, 2, 50]}, "cu_seqlens_q"),
        ({"cu_seqlens_q": [0, 5, 3]}, "cu_seqlens_q"),
        ({"cu_seqlens_q": [1, 2, 8]}, "cu_seqlens_q"),
        ({"cu_seqlens_q": [0, 3, 7]}, "cu_seqlens_q"),
        ({"cu_seqlens_k": [0, 4, 9]}, "cu_seqlens_k"),
        ({"seqused_k": [6, 4]}, "seqused_k"),
        ({"seqused_k": [-4, 5]}, "seqused_k"),
    ],
    ids=str,
)
def test_offsets_of_quantised_sequences_are_checked(given, name):
    x = _heads(8, None)
    offsets = {"cu_seqlens_q": [0, 3, 8], "cu_seqlens_k": [0, 4, 8], **given}
    tensors = {key: torch.tensor(value, dtype=torch.int32) for key, value in offsets.items()}
    with pytest.raises(ValueError, match=name):
        onchip.quantize_qkv(x, x, x, **tensors)


@pytest.mark.parametrize("scale", ["block", "head", "tensor"])
def test_no_sequences_can_be_quantised(scale):
    x = _heads(8, 0)
    assert onchip.attention(onchip.quantize_qkv(x, x, x, scale=scale)).shape == x.shape


def test_fields_of_a_quantised_call_must_fit_each_other():
    x = _heads(200)
    found = onchip.quantize_qkv(x, x, x)
    wrong = replace(found, q_scale=found.q_scale[:, :1])
    with pytest.raises(ValueError, match="q: got an FP8QKV with q_scale of shape"):
        onchip.attention(wrong)


def test_modules_are_attributes_of_the_package():
    assert onchip.reference.visible(2, 2, causal=True).tolist() == [[True, False], [True, True]]
    assert onchip.ladder and onchip.nn and onchip.paging and onchip.compat
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = onchip.nothing
