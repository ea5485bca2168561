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
