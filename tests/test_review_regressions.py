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
