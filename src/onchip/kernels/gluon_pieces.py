"""What several programs found for 64 rows, one for each piece of the keys, is put together.

Two ways. In the Hopper forward, and in `decode_tall` where pieces are alike and all run, each
program puts aside what it has, counts itself as come, and waits some time for the others (`arrive`
to `leave`); when all are there each merges a share of the rows of all pieces, in their order. A
program that waits in vain leaves, since the others may not even run yet, and the last one takes its
share too; where programs are more than run at once none waits. The last to be through clears the
counters.

Else `decode_tall` joins neighbours (`claim` to `with_neighbour`): pieces 0 and 1 become one, 2 and
3, then these two, and so on. Whoever claims a pair first hands over and is done; the other one goes
on with the sum. It waits only for a program that has claimed, so runs, and waits for nobody.

Who comes last changes no bit of the result: pieces are added in one order, and the weights of two
neighbours are powers of two, which are exact.

Legend: D_v head dimension, KEPT rows of a program that can exist, W number of a warpgroup.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon

from onchip.kernels.gluon_names import gl, wait_for_all

LOWEST = gl.constexpr(-3.0e38)  # the maximum of nothing
# How often a program looks for the others: about 130 us, more than pieces end apart. H200,
# 2026-12-01, D = 256, one sequence of 32k, 16 heads, us, with 16 and 200: 141.7 and 132.0.
POLLS = 200
_COME = gl.constexpr(0xFF)  # of a state: how many have come; above them who has left, by rank
_GONE = gl.constexpr(8)
_SLAB_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))


class Partials(NamedTuple):
    """Where pieces are put aside, and counters that are zero before and after a launch."""

    out: object  # (pieces, KEPT, D_v) float32, not divided
    stats: object  # (pieces, KEPT, 2): maximum of the base 2 logits, sum
    counters: object  # (pieces, warpgroups, 2). In the first way a warpgroup has 2 numbers from
    # the first piece's place on: its state, and how many are through. By neighbours a pair has
    # the 2 of the piece that its right half begins with: claims, and whether one put itself aside


class Branch(NamedTuple):
    """A piece among those of its sequence."""

    first: object  # number of the sequence's first piece among all
    index: object  # of this one in the sequence
    count: object  # pieces of the sequence


@gluon.jit
def _counter(branch: Branch, to: Partials, W: gl.constexpr, WARPGROUPS: gl.constexpr):
    """A warpgroup's two counters of its sequence."""
    return to.counters + branch.first * (2 * WARPGROUPS) + 2 * W


@gluon.jit
def _from_l2(place, mask, other):
    """What another SM wrote."""
    return gl.load(place, mask=mask, other=other, cache_modifier=".cg")


@gluon.jit
def _ceiling(x):
    return gl.inline_asm_elementwise("cvt.rpi.f32.f32 $0, $1;", "=f,f", [x], dtype=gl.float32,
                                     is_pure=True, pack=1)  # fmt: skip


@gluon.jit
def in_whole_powers(acc, top, total):
    """The same outputs (64, D_v) and sums (64,) with a maximum that is a whole number."""
    ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    ceiling = _ceiling(top)
    factor = gl.exp2(top - ceiling)
    return acc * gl.convert_layout(factor, ROWS)[:, None], ceiling, total * factor


@gluon.jit
def put_aside(acc, top, total, piece, num_rows, to: Partials, W: gl.constexpr,
              KEPT: gl.constexpr):  # fmt: skip
    """Stores what is known of the first `num_rows` rows from piece number `piece` of all."""
    LAYOUT: gl.constexpr = acc.type.layout
    WIDTH: gl.constexpr = acc.shape[1]
    row = W * 64 + gl.arange(0, 64, top.type.layout)
    at = gl.cast(piece, gl.int64) * KEPT + row
    gl.store(to.stats + at * 2, top, mask=row < num_rows)
    gl.store(to.stats + at * 2 + 1, total, mask=row < num_rows)
    out_row = W * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    place = (gl.cast(piece, gl.int64) * KEPT + out_row) * WIDTH
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    gl.store(to.out + place[:, None] + column[None, :], acc, mask=(out_row < num_rows)[:, None])


@gluon.jit
def arrive(
    branch: Branch, to: Partials, W: gl.constexpr, WARPGROUPS: gl.constexpr, WAITS: gl.constexpr
):
    """Counts a piece that was put aside, and waits for the others.

    Returns:
        How many came before, and the state: all have come, or this one leaves.
    """
    counter = _counter(branch, to, W, WARPGROUPS)
    wait_for_all()  # all threads' stores come before the one thread's count
    rank = gl.atomic_add(counter, 1, sem="acq_rel")
    state = rank + 1
    rank = rank & _COME
    tries = rank * 0
    while ((state & _COME) < branch.count) & (tries < WAITS):
        state = gl.atomic_add(counter, 0, sem="acquire")
        tries += 1
    leaves = rank < 0
    while ((state & _COME) < branch.count) & (leaves == 0):
        found = gl.atomic_cas(counter, state, state | (1 << (rank + _GONE)), sem="acq_rel")
        leaves = found == state
        state = found
    return rank, state


@gluon.jit
def is_mine(share, rank, state, branch: Branch):
    """Whether a program merges a share of the rows: its own, or that of one that has left."""
    gone = (state >> (share + _GONE)) & 1
    mine = (share == rank) | ((rank == branch.count - 1) & (gone > 0))
    return mine & ((state & _COME) == branch.count)


@gluon.jit
def leave(
    state, branch: Branch, to: Partials, W: gl.constexpr, WARPGROUPS: gl.constexpr,
    SHARES: gl.constexpr,
):  # fmt: skip
    """The program needs the counters no more; the last one clears them.

    One thread does that, and the others do not wait for its answer.
    """
    others = branch.count - 1
    for i in gl.static_range(SHARES - 1):
        others -= (state >> (i + _GONE)) & 1
    x = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    one = (x == 0) & ((state & _COME) == branch.count)
    counter = _counter(branch, to, W, WARPGROUPS) + x * 0
    through = gl.atomic_add(counter + 1, x * 0 + 1, mask=one, sem="relaxed")
    gl.store(counter, x * 0, mask=one & (through == others))
    gl.store(counter + 1, x * 0, mask=one & (through == others))


@gluon.jit
def with_piece(acc, top, total, other, num_rows, to: Partials, W: gl.constexpr,
               KEPT: gl.constexpr):  # fmt: skip
    """What a program has and what lies aside as piece number `other`, both `in_whole_powers`."""
    LAYOUT: gl.constexpr = acc.type.layout
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    WIDTH: gl.constexpr = acc.shape[1]
    row = W * 64 + gl.arange(0, 64, top.type.layout)
    at = gl.cast(other, gl.int64) * KEPT + row
    other_top = _from_l2(to.stats + at * 2, row < num_rows, LOWEST)
    other_total = _from_l2(to.stats + at * 2 + 1, row < num_rows, 0.0)
    out_row = W * 64 + gl.arange(0, 64, ROWS)
    place = (gl.cast(other, gl.int64) * KEPT + out_row) * WIDTH
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    out = _from_l2(to.out + place[:, None] + column[None, :], (out_row < num_rows)[:, None], 0.0)
    both = gl.maximum(top, other_top)
    weight = gl.exp2(top - both)
    other_weight = gl.exp2(other_top - both)
    # A sum that overflowed stays so, whatever its weight.
    own = gl.where(total < float("inf"), total * weight, total)
    others = gl.where(other_total < float("inf"), other_total * other_weight, other_total)
    acc = acc * gl.convert_layout(weight, ROWS)[:, None]
    acc += out * gl.convert_layout(other_weight, ROWS)[:, None]
    return acc, both, own + others


@gluon.jit
def _match(branch: Branch, start, span, to: Partials, W: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Two counters of the node of `span` pieces from `start` on and its neighbour."""
    return to.counters + (branch.first + (start | span)) * (2 * WARPGROUPS) + 2 * W


@gluon.jit
def has_neighbour(branch: Branch, start, span):
    return (start ^ span) < branch.count


@gluon.jit
def claim(branch: Branch, start, span, to: Partials, W: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Asks which of two neighbours is done first; `is_second` waits for the answer."""
    x = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    place = _match(branch, start, span, to, W, WARPGROUPS) + x * 0
    found = gl.atomic_add(place, x * 0 + 1, mask=x == 0, sem="relaxed")
    return gl.where(x == 0, found, 0)


@gluon.jit
def is_second(claimed):
    """Whether the neighbour puts itself aside, so that this one need not."""
    return gl.sum(claimed, 0) > 0


@gluon.jit
def hand_over(
    acc, top, total, branch: Branch, start, span, num_rows, to: Partials, W: gl.constexpr,
    WARPGROUPS: gl.constexpr, KEPT: gl.constexpr,
):  # fmt: skip
    """Puts a node aside, for the neighbour that is done later."""
    put_aside(acc, top, total, branch.first + start, num_rows, to, W, KEPT)
    wait_for_all()  # all threads' stores come before the one thread's count
    gl.atomic_add(_match(branch, start, span, to, W, WARPGROUPS) + 1, 1, sem="acq_rel")


@gluon.jit
def with_neighbour(
    acc, top, total, branch: Branch, start, span, num_rows, to: Partials, W: gl.constexpr,
    WARPGROUPS: gl.constexpr, KEPT: gl.constexpr,
):  # fmt: skip
    """A node and its neighbour, whose program runs and hands over without waiting for anyone."""
    counters = _match(branch, start, span, to, W, WARPGROUPS)
    while gl.atomic_add(counters + 1, 0, sem="acquire") == 0:
        pass
    gl.store(counters, 0)
    gl.store(counters + 1, 0)
    other = branch.first + (start ^ span)
    return with_piece(acc, top, total, other, num_rows, to, W, KEPT)


@gluon.jit
def _loaded(piece, seen, row, to: Partials, KEPT: gl.constexpr, WIDTH: gl.constexpr):
    """Maxima, sums (rows,) and outputs (rows, D_v) of some rows of a piece, if it is `seen`."""
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, _SLAB_LAYOUT))
    at = gl.cast(piece, gl.int64) * KEPT + row
    top = _from_l2(to.stats + at * 2, seen, LOWEST)
    total = _from_l2(to.stats + at * 2 + 1, seen, 0.0)
    places = (at * WIDTH)[:, None] + column[None, :]
    return top, total, _from_l2(to.out + places, seen[:, None], 0.0)


@gluon.jit
def merged(slab, branch: Branch, num_rows, to: Partials, W: gl.constexpr, KEPT: gl.constexpr,
           WIDTH: gl.constexpr, SHARES: gl.constexpr):  # fmt: skip
    """Slab number `slab` of 64 / SHARES rows of all pieces, whose loads are under way together.

    Returns:
        Their outputs (rows, D_v), maxima and sums (rows,), and their numbers among the program's.
    """
    SLAB: gl.constexpr = 64 // SHARES
    ROWS: gl.constexpr = gl.SliceLayout(1, _SLAB_LAYOUT)
    row = W * 64 + slab * SLAB + gl.arange(0, SLAB, ROWS)
    tops, sums, outs = (), (), ()
    for i in gl.static_range(SHARES):
        seen = (row < num_rows) & (i < branch.count)
        top, total, out = _loaded(branch.first + i, seen, row, to, KEPT, WIDTH)
        tops = tops + (top,)
        sums = sums + (total,)
        outs = outs + (out,)
    top = tops[0]
    for i in gl.static_range(1, SHARES):
        top = gl.maximum(top, tops[i])
    total = gl.zeros([SLAB], gl.float32, ROWS)
    acc = gl.zeros([SLAB, WIDTH], gl.float32, _SLAB_LAYOUT)
    for i in gl.static_range(SHARES):
        weight = gl.exp2(tops[i] - top)
        acc += outs[i] * weight[:, None]
        # A sum that overflowed stays so, whatever its weight.
        total += gl.where(sums[i] < float("inf"), sums[i] * weight, sums[i])
    return acc, top, total, row
