"""The algorithm ladder: the same attention computed four ways, from three steps to one pass.

Each rung is one head in plain PyTorch, in the inputs' dtype, written to be read. Slow memory
holds q, k, v, the results and whatever a rung keeps between its steps; `Traffic` counts the
elements that cross to and from it. Everything else stays on the chip: a block of query rows with
its statistics and output, and one tile of keys and values.

| rung | reads K | S and P in slow memory | source |
|---|---|---|---|
| three_step | once | S and P, each written and read | Dao et al. 2022, algorithm 0 |
| safe_three_pass | three times a row block | none | Milakov & Gimelshein 2018, algorithm 2 |
| online_two_pass | twice a row block | none | Milakov & Gimelshein 2018, algorithm 3 |
| tiled_one_pass | once a row block | none | Rabe & Staats 2021; Dao et al. 2022, algorithm 1 |

Sources: Milakov & Gimelshein, "Online normalizer calculation for softmax" (2018); Rabe & Staats,
"Self-attention does not need O(n^2) memory" (2021); Dao et al., "FlashAttention" (2022); Dao,
"FlashAttention-2" (2023).

Legend: S_q / S_k lengths, D / D_v head dimensions, R rows of a block, C keys of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.problem import Mask


@dataclass(slots=True)
class Traffic:
    """Elements that crossed between slow memory and the chip.

    Args:
        reads: elements read from slow memory.
        writes: elements written to it.
    """

    reads: int = 0
    writes: int = 0

    @property
    def total(self) -> int:
        """Elements moved either way."""
        return self.reads + self.writes

    def read(self, x: Tensor) -> Tensor:
        """Counts x as read; returns it."""
        self.reads += x.numel()
        return x

    def write(self, x: Tensor) -> Tensor:
        """Counts x as written; returns it."""
        self.writes += x.numel()
        return x


class Result(NamedTuple):
    """What a rung returns."""

    out: Tensor  # (S_q, D_v)
    lse: Tensor  # (S_q,), natural log
    traffic: Traffic


class State(NamedTuple):
    """What the one-pass method holds for a block of rows after some tiles of keys."""

    keys: slice  # the tile absorbed last
    m: Tensor  # (R,) largest score so far
    l: Tensor  # (R,) sum of exp(s - m) so far
    o: Tensor  # (R, D_v) sum of exp(s - m) v so far, not yet divided by l


@dataclass(frozen=True)
class Head:
    """One head's inputs and the steps that the rungs share.

    Args:
        q: (S_q, D).
        k: (S_k, D).
        v: (S_k, D_v).
        scale: factor on Q K^T, D ** -0.5 by default.
        mask: which keys a query sees.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None = None
    mask: Mask = field(default_factory=Mask)

    @property
    def factor(self) -> float:
        """The scale of the scores."""
        return self.q.shape[1] ** -0.5 if self.scale is None else self.scale

    @property
    def gradient_factor(self) -> float:
        """The scale in dQ and dK: dS / d(q k) once more."""
        return self.factor

    def row_blocks(self, size: int) -> Iterator[slice]:
        """The query rows in blocks; the last one may be short."""
        return _tiles(0, self.q.shape[0], size)

    def key_tiles(self, rows: slice, size: int) -> list[slice]:
        """Tiles of keys, aligned to key 0, that hold a key which some of the rows see."""
        seen = self.mask.key_range(rows.start, rows.stop, self.q.shape[0], self.k.shape[0])
        # Whole tiles, as a kernel loads them: the mask hides the rest of the first and the last.
        first, stop = seen.start // size * size, -(-seen.stop // size) * size
        return list(_tiles(first, min(stop, self.k.shape[0]), size)) if seen else []

    def visible(self, rows: slice, keys: slice) -> Tensor:
        """(R, C) bool: which of the tile's keys each row sees."""
        shift = self.k.shape[0] - self.q.shape[0]
        i = torch.arange(rows.start, rows.stop, device=self.q.device)[:, None] + shift
        j = torch.arange(keys.start, keys.stop, device=self.q.device)
        seen = torch.ones(i.shape[0], j.shape[0], dtype=torch.bool, device=self.q.device)
        if self.mask.left >= 0:
            seen &= j >= i - self.mask.left
        if self.mask.right >= 0:
            seen &= j <= i + self.mask.right
        return seen

    def scores(self, q: Tensor, k: Tensor, rows: slice, keys: slice) -> Tensor:
        """(R, C) scale q k^T, -inf for hidden keys."""
        return (self.factor * (q @ k.T)).masked_fill(~self.visible(rows, keys), -torch.inf)

    def start(self, rows: slice) -> State:
        """The state before the first tile."""
        m = self.q.new_full((rows.stop - rows.start,), -torch.inf)
        return State(
            slice(0, 0), m, torch.zeros_like(m), self.v.new_zeros(*m.shape, self.v.shape[1])
        )

    def absorb(self, state: State, keys: slice, s: Tensor, v: Tensor) -> State:
        """The recurrence: what was summed under the old maximum is rescaled to the new one.

        m' = max(m, max s); a = exp(m - m'); l' = a l + sum exp(s - m'); o' = a o + exp(s - m') v
        (Dao 2023, FlashAttention-2, section 3.1, which divides by l only at the end).
        """
        m = torch.maximum(state.m, s.amax(1))
        alpha = (state.m - _shift(m)).exp()
        p = (s - _shift(m)[:, None]).exp()
        return State(keys, m, alpha * state.l + p.sum(1), alpha[:, None] * state.o + p @ v)


def _tiles(start: int, stop: int, size: int) -> Iterator[slice]:
    return (slice(i, min(i + size, stop)) for i in range(start, stop, size))


def _shift(m: Tensor) -> Tensor:
    """What to subtract from the scores: 0 for rows that saw no key, since -inf - -inf is NaN."""
    return m.masked_fill(m == -torch.inf, 0.0)


def _normaliser(l: Tensor) -> Tensor:
    """l as a column to divide by; 1 for rows that saw no key, whose sums are 0."""
    return l.masked_fill(l == 0, 1.0)[:, None]


def three_step(head: Head) -> Result:
    """S = scale Q K^T, P = softmax(S), O = P V, with S and P in slow memory in between.

    The softmax holds a whole row of S on the chip, so it reads S once.
    """
    traffic = Traffic()
    rows, keys = slice(0, head.q.shape[0]), slice(0, head.k.shape[0])
    s = traffic.write(head.scores(traffic.read(head.q), traffic.read(head.k), rows, keys))
    traffic.read(s)
    m = s.amax(1) if s.shape[1] else head.start(rows).m
    exp = (s - _shift(m)[:, None]).exp()
    l = exp.sum(1)
    p = traffic.write(exp / _normaliser(l))
    out = traffic.read(p) @ traffic.read(head.v)
    return Result(traffic.write(out), traffic.write(_shift(m) + l.log()), traffic)


def safe_three_pass(head: Head, block_q: int = 1, block_k: int = 1) -> Result:
    """Three passes over the keys: the maximum, then the denominator, then the output.

    Subtracting the maximum keeps exp in range; each pass computes its scores again from K.
    Milakov & Gimelshein 2018, algorithm 2, with P V in the last pass.

    Args:
        head: the inputs.
        block_q: R, query rows that are held on the chip at a time.
        block_k: C, keys of a tile.
    """
    run = _Streaming(head, block_q, block_k)
    for rows, q, tiles in run.blocks():
        m, l, o = head.start(rows)[1:]
        for keys in tiles:
            m = torch.maximum(m, run.scores(q, rows, keys).amax(1))
        for keys in tiles:
            l = l + (run.scores(q, rows, keys) - _shift(m)[:, None]).exp().sum(1)
        for keys in tiles:
            p = (run.scores(q, rows, keys) - _shift(m)[:, None]).exp() / _normaliser(l)
            o = o + p @ run.values(keys)
        run.store(rows, o, _shift(m) + l.log())
    return run.result()


def online_two_pass(head: Head, block_q: int = 1, block_k: int = 1) -> Result:
    """Two passes over the keys: maximum and denominator together, then the output.

    When the maximum grows, the denominator so far is rescaled by exp(m - m').
    Milakov & Gimelshein 2018, algorithm 3, with P V in the second pass.

    Args:
        head: the inputs.
        block_q: R, query rows that are held on the chip at a time.
        block_k: C, keys of a tile.
    """
    run = _Streaming(head, block_q, block_k)
    for rows, q, tiles in run.blocks():
        m, l, o = head.start(rows)[1:]
        for keys in tiles:
            s = run.scores(q, rows, keys)
            old, m = m, torch.maximum(m, s.amax(1))
            l = (old - _shift(m)).exp() * l + (s - _shift(m)[:, None]).exp().sum(1)
        for keys in tiles:
            p = (run.scores(q, rows, keys) - _shift(m)[:, None]).exp() / _normaliser(l)
            o = o + p @ run.values(keys)
        run.store(rows, o, _shift(m) + l.log())
    return run.result()


def tiled_one_pass(head: Head, block_q: int = 1, block_k: int = 1) -> Result:
    """One pass over the keys: the output is carried along and rescaled with the denominator.

    Rabe & Staats 2021, section 2, for one query; Dao et al. 2022, algorithm 1, for blocks; the
    loops in the order of Dao 2023, algorithm 1.

    Args:
        head: the inputs.
        block_q: R, query rows that are held on the chip at a time.
        block_k: C, keys of a tile.
    """
    run = _Streaming(head, block_q, block_k)
    for rows in head.row_blocks(block_q):
        state = head.start(rows)
        for state in one_pass_states(head, rows, block_k, run.traffic):  # noqa: B007
            pass
        run.store(rows, state.o / _normaliser(state.l), _shift(state.m) + state.l.log())
    return run.result()


def one_pass_states(
    head: Head, rows: slice, block_k: int, traffic: Traffic | None = None
) -> Iterator[State]:
    """The one-pass method for a block of rows, tile by tile.

    Args:
        head: the inputs.
        rows: the query rows, ``slice(i, i + 1)`` for one.
        block_k: C, keys of a tile.
        traffic: counts what is read.

    Yields:
        The state after each tile that holds a key which some of the rows see. At any time
        out = o / l and LSE = m + log l over the keys so far.
    """
    traffic = Traffic() if traffic is None else traffic
    q = traffic.read(head.q[rows])
    state = head.start(rows)
    for keys in head.key_tiles(rows, block_k):
        s = head.scores(q, traffic.read(head.k[keys]), rows, keys)
        state = head.absorb(state, keys, s, traffic.read(head.v[keys]))
        yield state


class _Streaming:
    """Slow memory of a streaming rung: counted reads of tiles, counted stores of results."""

    def __init__(self, head: Head, block_q: int, block_k: int):
        assert block_q > 0 and block_k > 0, "a block holds at least one row"
        self.head, self.block_q, self.block_k = head, block_q, block_k
        self.traffic = Traffic()
        seqlen_q = head.q.shape[0]
        self.out = head.v.new_empty(seqlen_q, head.v.shape[1])
        self.lse = head.q.new_empty(seqlen_q)

    def blocks(self) -> Iterator[tuple[slice, Tensor, list[slice]]]:
        """Each block's rows, its queries and the tiles of keys that it needs."""
        for rows in self.head.row_blocks(self.block_q):
            tiles = self.head.key_tiles(rows, self.block_k)
            yield rows, self.traffic.read(self.head.q[rows]), tiles

    def scores(self, q: Tensor, rows: slice, keys: slice) -> Tensor:
        return self.head.scores(q, self.traffic.read(self.head.k[keys]), rows, keys)

    def values(self, keys: slice) -> Tensor:
        return self.traffic.read(self.head.v[keys])

    def store(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        self.out[rows], self.lse[rows] = self.traffic.write(out), self.traffic.write(lse)

    def result(self) -> Result:
        return Result(self.out, self.lse, self.traffic)


class Backward(NamedTuple):
    """What `tiled_backward` returns."""

    dq: Tensor  # (S_q, D)
    dk: Tensor  # (S_k, D)
    dv: Tensor  # (S_k, D_v)
    traffic: Traffic


def rebuilt_probabilities(head: Head, rows: slice, keys: slice, lse: Tensor) -> Tensor:
    """(R, C) tile of P from the inputs and the LSE alone: P = exp(S - LSE).

    This is why the forward saves one number a row and not the matrix P.
    """
    s = head.scores(head.q[rows], head.k[keys], rows, keys)
    return (s - _shift(lse[rows])[:, None]).exp()


def tiled_backward(
    head: Head,
    forward: Result,
    dout: Tensor,
    dlse: Tensor | None = None,
    block_q: int = 1,
    block_k: int = 1,
) -> Backward:
    """dQ, dK and dV tile by tile, with P rebuilt from the LSE.

    A tile of keys stays on the chip while the row blocks pass by; dQ is added up in slow memory.
    D = rowsum(dO * O) - dLSE; dV += P^T dO; dS = P * (dO V^T - D); dQ += scale dS K;
    dK += scale dS^T Q. Dao et al. 2022, algorithm 4; Dao 2023, algorithm 2.

    Args:
        head: the inputs.
        forward: its out and LSE.
        dout: (S_q, D_v).
        dlse: (S_q,) or None.
        block_q: R.
        block_k: C.
    """
    traffic = Traffic()
    delta = (traffic.read(dout) * traffic.read(forward.out)).sum(1)  # (S_q,)
    if dlse is not None:
        delta = delta - traffic.read(dlse)
    traffic.write(delta)
    dq, dk, dv = (torch.zeros_like(x) for x in (head.q, head.k, head.v))
    traffic.write(dq)
    factor = head.gradient_factor
    for keys in _tiles(0, head.k.shape[0], block_k):
        k, v = traffic.read(head.k[keys]), traffic.read(head.v[keys])
        for rows in head.row_blocks(block_q):
            if not bool(head.visible(rows, keys).any()):
                continue
            q, do = traffic.read(head.q[rows]), traffic.read(dout[rows])
            traffic.read(forward.lse[rows])
            p = rebuilt_probabilities(head, rows, keys, forward.lse)
            dv[keys] += p.T @ do
            ds = p * (do @ v.T - traffic.read(delta[rows])[:, None])
            dq[rows] = traffic.write(traffic.read(dq[rows]) + factor * ds @ k)
            dk[keys] += factor * ds.T @ q
        traffic.write(dk[keys])
        traffic.write(dv[keys])
    return Backward(dq, dk, dv, traffic)
