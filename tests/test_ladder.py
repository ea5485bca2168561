"""The ladder: every rung equals the oracle and moves exactly the elements it says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip import reference
from onchip.ladder import (
    Head,
    Traffic,
    one_pass_states,
    online_two_pass,
    rebuilt_probabilities,
    safe_three_pass,
    three_step,
    tiled_backward,
    tiled_one_pass,
)
from onchip.problem import Mask

STREAMING = {safe_three_pass: 3, online_two_pass: 2, tiled_one_pass: 1}  # passes over K


def head_of(seqlen_q=5, seqlen_k=7, head_dim=3, head_dim_v=2, seed=0, **options) -> Head:
    g = torch.Generator().manual_seed(seed)
    shapes = [(seqlen_q, head_dim), (seqlen_k, head_dim), (seqlen_k, head_dim_v)]
    q, k, v = (torch.randn(s, generator=g, dtype=torch.float64) for s in shapes)
    return Head(q, k, v, **options)


def oracle(head: Head):
    qkv = (x[None, :, None] for x in (head.q, head.k, head.v))
    window = (head.mask.left, head.mask.right)
    out, lse = reference.attention(*qkv, window=window, scale=head.scale)
    return out[0, :, 0], lse[0, 0]


def assert_same(result, head: Head) -> None:
    out, lse = oracle(head)
    torch.testing.assert_close(result.out, out, rtol=0, atol=1e-13)
    torch.testing.assert_close(result.lse, lse, rtol=0, atol=1e-13)


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    blocks=st.tuples(st.integers(1, 11), st.integers(1, 11)),
    mask=st.builds(Mask, left=st.integers(-1, 4), right=st.integers(-1, 4)),
    scale=st.sampled_from([None, 0.3, 40.0]),
    seed=st.integers(0, 50),
)
def test_every_rung_and_the_backward_equal_the_oracle(lengths, blocks, mask, scale, seed):
    head = head_of(*lengths, seed=seed, mask=mask, scale=scale)
    assert_same(three_step(head), head)
    for rung in STREAMING:
        assert_same(rung(head, *blocks), head)
    g = torch.Generator().manual_seed(seed)
    dout = torch.randn(lengths[0], 2, generator=g, dtype=torch.float64)
    dlse = torch.randn(lengths[0], generator=g, dtype=torch.float64)
    grads = tiled_backward(head, tiled_one_pass(head, *blocks), dout, dlse, *blocks)
    q, k, v, do = (x[None, :, None] for x in (head.q, head.k, head.v, dout))
    window = (mask.left, mask.right)
    want = reference.attention_backward(q, k, v, do, dlse[None, None], window=window, scale=scale)
    for name in ("dq", "dk", "dv"):
        expected = getattr(want, name)[0, :, 0]
        torch.testing.assert_close(getattr(grads, name), expected, rtol=1e-11, atol=1e-11, msg=name)


def test_backward_without_a_gradient_on_the_lse():
    head = head_of()
    forward, dout = three_step(head), torch.ones(5, 2, dtype=torch.float64)
    none, zero = (
        tiled_backward(head, forward, dout),
        tiled_backward(head, forward, dout, dout[:, 0] * 0),
    )
    assert torch.equal(none.dk, zero.dk) and torch.equal(none.dq, zero.dq)
    assert zero.traffic.reads - none.traffic.reads == 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_rungs_work_in_the_inputs_dtype(dtype):
    head = head_of(mask=Mask(right=0))
    low = Head(head.q.to(dtype), head.k.to(dtype), head.v.to(dtype), mask=head.mask)
    for rung in (three_step, *STREAMING):
        result = rung(low)
        assert result.out.dtype == result.lse.dtype == dtype
        error = (result.out.double() - oracle(low)[0]).abs().max()
        assert error < 8 * torch.finfo(dtype).eps


def test_three_step_moves_s_and_p_four_times():
    n, m, d, dv = 5, 7, 3, 2
    got = three_step(head_of(n, m, d, dv)).traffic
    inputs, outputs = n * d + m * d + m * dv, n * dv + n
    assert got == Traffic(reads=inputs + 2 * n * m, writes=outputs + 2 * n * m)
    assert got.total - inputs - outputs == 4 * n * m


@pytest.mark.parametrize("block_q", [1, 2, 5, 8])
@pytest.mark.parametrize("block_k", [1, 3, 9])
@pytest.mark.parametrize("rung", STREAMING, ids=lambda f: f.__name__)
def test_streaming_rungs_read_the_keys_once_a_pass_and_row_block(rung, block_q, block_k):
    n, m, d, dv = 5, 7, 3, 2
    num_blocks = -(-n // block_q)
    reads = n * d + num_blocks * (STREAMING[rung] * m * d + m * dv)
    got = rung(head_of(n, m, d, dv), block_q, block_k).traffic
    assert got == Traffic(reads, n * dv + n)


def test_causal_tiles_that_no_row_sees_are_never_read():
    head = head_of(6, 6, mask=Mask(right=0))
    got = tiled_one_pass(head, 2, 2).traffic
    keys = 2 + 4 + 6  # of the three row blocks
    assert got.reads == 6 * 3 + keys * (3 + 2)


def test_poison_in_tiles_that_no_row_sees_changes_nothing():
    head = head_of(4, 8, mask=Mask(left=1, right=0))
    clean = tiled_one_pass(head, 2, 2)
    head.k[:2], head.v[:2] = torch.nan, torch.nan
    poisoned = tiled_one_pass(head, 2, 2)
    assert torch.equal(clean.out, poisoned.out) and torch.equal(clean.lse, poisoned.lse)


@pytest.mark.parametrize("block_k", [1, 2, 3, 7, 10])
def test_each_state_is_attention_over_the_keys_so_far(block_k):
    head = head_of()
    states = list(one_pass_states(head, slice(1, 3), block_k))
    assert [s.keys.stop for s in states] == [
        min(e, 7) for e in range(block_k, 7 + block_k, block_k)
    ]
    for state in states:
        out, lse = oracle(
            Head(head.q, head.k[: state.keys.stop], head.v[: state.keys.stop], 3**-0.5)
        )
        torch.testing.assert_close(state.o / state.l[:, None], out[1:3], rtol=0, atol=1e-13)
        torch.testing.assert_close(state.m + state.l.log(), lse[1:3], rtol=0, atol=1e-13)
        scores = head.factor * head.q[1:3] @ head.k[: state.keys.stop].T
        torch.testing.assert_close(state.m, scores.amax(1), rtol=0, atol=1e-14)


def test_probabilities_come_back_from_the_lse():
    head = head_of(mask=Mask(right=1))
    lse = tiled_one_pass(head).lse
    rows, keys = slice(1, 4), slice(2, 7)
    scores = (head.factor * head.q @ head.k.T).masked_fill(
        ~reference.visible(5, 7, window=(-1, 1)), -torch.inf
    )
    want = scores.softmax(1)[rows, keys]
    got = rebuilt_probabilities(head, rows, keys, lse)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)


def test_no_tile_no_state():
    head = head_of(5, 2, mask=Mask(right=0))
    assert list(one_pass_states(head, slice(0, 3), 1)) == []
    result = tiled_one_pass(head, 3, 1)
    assert bool((result.out[:3] == 0).all()) and bool((result.lse[:3] == -torch.inf).all())


def test_tiles_are_aligned_to_key_0_and_whole_but_for_the_last():
    head = head_of(6, 8, mask=Mask(left=1, right=0))  # row 3 sees keys 4 and 5, row 5 keys 6, 7
    assert head.key_tiles(slice(3, 4), 3) == [slice(3, 6)]
    assert head.key_tiles(slice(3, 6), 3) == [slice(3, 6), slice(6, 8)]
