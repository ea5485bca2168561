"""Dropout on a GPU: values, reproducibility, torch's machinery."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

import onchip
from onchip import reference
from onchip.kernels.portable import dropout
from tests import problems
from tests.tolerance import assert_close_to_oracle

pytestmark = pytest.mark.gpu
P = 0.2


def inputs(dtype=torch.bfloat16, length=512, head_dim=64):
    shape = {"seqlen_q": length, "seqlen_k": length, "heads": 4, "kv_heads": 2}
    return [x.cuda() for x in problems.qkv(**shape, head_dim=head_dim, dtype=dtype)]


def drawn(seed: int) -> torch.Tensor:
    """The seed and offset that the call after torch.manual_seed(seed) draws."""
    torch.manual_seed(seed)
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_values_and_gradients_against_the_oracle_with_the_same_mask(dtype, head_dim):
    q, k, v = (x.requires_grad_() for x in inputs(dtype, 333, head_dim))
    keep = dropout.keep_mask(drawn(7), P, 2, 4, 333, 333)
    extras = reference.Extras(keep, dropout.rounded(P))
    torch.manual_seed(7)
    out, lse = onchip.attention(q, k, v, causal=True, dropout_p=P, return_lse=True)
    plain, plain_lse = reference.eager(q, k, v, causal=True, extras=extras)
    oracle, oracle_lse = reference.attention(q, k, v, causal=True, extras=extras)
    assert_close_to_oracle(out, oracle, plain, "out")
    assert_close_to_oracle(lse, oracle_lse, plain_lse, "lse")
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    eager = torch.autograd.grad(plain, (q, k, v), dout)
    want = reference.attention_backward(
        q.detach(), k.detach(), v.detach(), dout, causal=True, extras=extras
    )
    for name, got, exact, rough in zip("qkv", grads, want[:3], eager, strict=True):
        assert_close_to_oracle(got, exact, rough, f"d{name}")


def test_the_fraction_kept():
    keep = dropout.keep_mask(drawn(1), P, 2, 16, 1024, 1024)
    assert abs(float(keep.float().mean()) - (1 - P)) < 1e-3


def _gradients(call, *given):
    leaves = [x.detach().requires_grad_() for x in given]
    torch.manual_seed(3)
    out = call(*leaves)
    return out, *torch.autograd.grad(out.float().square().sum(), leaves)


def _attend(q, k, v):
    return onchip.attention(q, k, v, causal=True, dropout_p=P)


def test_manual_seed_and_checkpointing_repeat_it():
    given = inputs()
    first = _gradients(_attend, *given)
    for x, y in zip(first, _gradients(_attend, *given), strict=True):
        assert torch.equal(x, y)
    again = _gradients(lambda *x: checkpoint(_attend, *x, use_reentrant=False), *given)
    for x, y in zip(first, again, strict=True):
        assert torch.equal(x, y)
    assert not torch.equal(_attend(*given), _attend(*given))


def test_compiled_in_one_graph():
    given = inputs()
    compiled = torch.compile(_attend, fullgraph=True, backend="aot_eager")
    for x, y in zip(_gradients(_attend, *given), _gradients(compiled, *given), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_every_replay_of_a_graph_draws_anew():
    given = inputs()
    _attend(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = _attend(*given)
    results = []
    for _ in range(2):
        graph.replay()
        results.append(out.clone())
    assert not torch.equal(*results)
    assert all(bool(x.isfinite().all()) for x in results)


def test_packed_sequences_drop_what_each_drops_alone():
    """By its own batch index, so the first sequence of a pack equals the dense call."""
    q, k, v = (x[:1] for x in inputs(torch.float16, 200))
    cu = torch.tensor([0, 200, 200], dtype=torch.int32, device="cuda")
    torch.manual_seed(5)
    dense = onchip.attention(q, k, v, dropout_p=P)
    torch.manual_seed(5)
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 200, "max_seqlen_k": 200}
    packed = onchip.attention_varlen(q[0], k[0], v[0], dropout_p=P, **lengths)
    torch.testing.assert_close(packed, dense[0], rtol=0, atol=2e-3)
