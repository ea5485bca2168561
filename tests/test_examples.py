"""The worked numbers, each through the function that answers it."""

from __future__ import annotations

import math

import pytest
import torch

from onchip import merge_states, reference
from onchip.ladder import (
    Head,
    one_pass_states,
    online_two_pass,
    safe_three_pass,
    three_step,
    tiled_one_pass,
)
from onchip.problem import Mask

RUNGS = [three_step, safe_three_pass, online_two_pass, tiled_one_pass]


def column(values, dtype=torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)[:, None]


def head_of_scores(scores, v, dtype=torch.float64) -> Head:
    """One query whose scores are given."""
    return Head(column([1.0], dtype), column(scores, dtype), v.to(dtype), scale=1.0)


def four_d(x: torch.Tensor) -> torch.Tensor:
    return x[None, :, None]


def backward(keys, values, dout):
    """One query of 1, D = 1, scale 1."""
    inputs = [four_d(column(x)) for x in ([1.0], keys, values, [dout])]
    grads = reference.attention_backward(*inputs, scale=1.0)
    out, _ = reference.attention(*inputs[:3], scale=1.0)
    return out.item(), *(x.flatten() for x in grads[:3])


@pytest.mark.parametrize("rung", RUNGS, ids=lambda f: f.__name__)
def test_safe_softmax(rung):
    scores = torch.tensor([700.0, 710.0, 705.0], dtype=torch.float64)
    assert scores.exp().sum() == torch.inf
    p = rung(head_of_scores(scores.tolist(), torch.eye(3))).out[0]
    assert float(f"{p[0]:.3e}") == 4.509e-5
    assert round(p[1].item(), 6) == 0.993262
    assert math.floor(p[2].item() * 1e6) == 6692  # 0.0066925..., cut after six digits
    assert float(p.sum()) == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize("rung", RUNGS, ids=lambda f: f.__name__)
def test_float16_range(rung):
    edge = math.log(torch.finfo(torch.float16).max)
    assert round(edge, 2) == 11.09
    naive = torch.tensor([11.08, 11.1], dtype=torch.float16).exp()
    assert naive.isfinite().tolist() == [True, False]
    head = head_of_scores([12.0, 11.1, 12.0], torch.tensor([[1.0], [1.0], [1.0]]), torch.float16)
    assert float(rung(head).out) == pytest.approx(1, abs=2**-9)


def test_online_softmax_running():
    head = head_of_scores([10.0, 0.0, 8.0, 12.0, 5.0], torch.zeros(5, 1))
    states = one_pass_states(head, slice(0, 1), block_k=1)
    assert [(s.m.item(), round(s.l.item(), 6)) for s in states] == [
        (10, 1), (10, 1.000045), (10, 1.135381), (12, 1.153657), (12, 1.154569),
    ]  # fmt: skip


def test_one_pass_two_tiles():
    head = head_of_scores([1.0, 2.0, 3.0, 0.0], column([2.0, 8.0, 4.0, 10.0]))
    first, second = one_pass_states(head, slice(0, 1), block_k=2)
    assert (first.m.item(), second.m.item()) == (2, 3)
    own_l, own_o = 1 + math.exp(-3), 4 + 10 * math.exp(-3)
    shrink = math.exp(-1)
    assert second.l.item() == pytest.approx(shrink * first.l.item() + own_l, abs=1e-14)
    assert second.o.item() == pytest.approx(shrink * first.o.item() + own_o, abs=1e-14)
    assert round((second.o / second.l).item(), 3) == 4.966


def test_merging_tiles_needs_their_mass():
    tiles = [
        reference.attention(*(four_d(column([x])) for x in (1.0, score, value)), scale=1.0)
        for score, value in ((0.0, 10.0), (math.log(3), 2.0))
    ]
    outs, lses = zip(*tiles, strict=True)
    merged, lse = merge_states(outs, lses)
    assert merged.item() == pytest.approx(4, abs=1e-14)
    assert lse.item() == pytest.approx(math.log(4), abs=1e-14)
    assert torch.stack(outs).mean().item() == 6
    whole = head_of_scores([0.0, math.log(3)], column([10.0, 2.0]))
    assert tiled_one_pass(whole).out.item() == pytest.approx(4, abs=1e-14)


def test_backward_of_one_query():
    out, dq, dk, dv = backward([0.0, math.log(3)], [2.0, 6.0], 2.0)
    assert out == pytest.approx(5, abs=1e-14)
    assert dv.tolist() == pytest.approx([0.5, 1.5], abs=1e-14)  # P dO, so P = [1/4, 3/4]
    assert round(dq.item(), 6) == 1.647918
    assert dk.tolist() == pytest.approx([-1.5, 1.5], abs=1e-14)


def test_backward_given_p():
    p = [0.2, 0.3, 0.5]
    out, _, dk, dv = backward([math.log(x) for x in p], [1.0, 3.0, 5.0], 2.0)
    assert out == pytest.approx(3.6, abs=1e-14)
    # The query is 1, so dK is dS.
    assert dk.tolist() == pytest.approx([-1.04, -0.36, 1.4], abs=1e-14)
    assert sum(dk.tolist()) == pytest.approx(0, abs=1e-14)
    assert dv.tolist() == pytest.approx([0.4, 0.6, 1.0], abs=1e-14)


@pytest.mark.parametrize("seed", range(3))
def test_softmax_shift(seed):
    g = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(6, generator=g).tolist() for _ in range(2))
    _, _, dk, _ = backward(keys, values, 1.7)
    assert float(dk.abs().max()) > 1e-3
    assert float(dk.sum()) == pytest.approx(0, abs=1e-14)


def test_tail_and_causal():
    x = torch.randn(5, 2, dtype=torch.float64)
    head = Head(x, x, x, mask=Mask.of(causal=True, window=(-1, -1)))
    for row in range(5):
        tiles = [s.keys for s in one_pass_states(head, slice(row, row + 1), block_k=4)]
        assert tiles == [slice(0, 4), slice(4, 5)][: 1 + (row == 4)]
    assert head.visible(slice(4, 5), slice(4, 5)).tolist() == [[True]]


def test_alignment():
    def rows(seqlen_q, seqlen_k):
        return reference.visible(seqlen_q, seqlen_k, causal=True).int().tolist()

    assert rows(2, 5) == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert rows(5, 2) == [[0, 0]] * 3 + [[1, 0], [1, 1]]
    for seqlen_q, seqlen_k in ((2, 5), (5, 2)):
        q, k = torch.zeros(seqlen_q, 1), torch.zeros(seqlen_k, 1)
        out, _ = reference.attention(four_d(q), four_d(k), four_d(torch.eye(seqlen_k)), causal=True)
        assert (out[0, :, 0] > 0).int().tolist() == rows(seqlen_q, seqlen_k)
