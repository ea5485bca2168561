"""What several programs found for 64 rows, one for each piece of the keys, is put together.

Method: each program puts aside what it has and counts itself as come. Of two pieces the last
comer adds the other one to its own. Of more it merges all, 16 rows after 16 rows, and whoever
still waits then helps: rows are handed out by a second counter. Nobody must wait: a program that
has looked for the others some times in vain leaves, and where programs are more than run at once
none waits. Who comes last changes no bit of the result: several pieces are added in their order,
and the weights of two are powers of two, which are exact. The last to leave clears the counters.

The Hopper forward does that. `decode_tall` joins neighbours (`claim` to `with_neighbour`): pieces 0
and 1 become one, 2 and 3, then these two, and so on. Whoever claims a pair first hands over and is
done; the other one goes on with the sum. It waits only for a program that has claimed, so runs, and
waits for nobody. H200, 2026-11-30, us, the first way and this one: 8 sequences of 16k, four pieces
139.5 and 134.7, two 140.8 and 139.4; 3 of 16k, five pieces 68.1 and 65.5.

Legend: D_v head dimension, KEPT rows of a program that can exist, W number of a warpgroup.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon

from onchip.kernels.gluon_names import gl, wait_for_all

LOWEST = gl.constexpr(-3.0e38)  # the maximum of nothing
SLAB = gl.constexpr(16)  # rows that are merged at a time
SLABS = gl.constexpr(4)  # of a warpgroup
POLLS = 16  # how often a program looks for the others: about 10 us on an H200
_AT_ONCE = gl.constexpr(4)  # pieces whose loads are under way together
_SLAB_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))


class Partials(NamedTuple):
    """Where pieces are put aside, and counters that are zero before and after a launch."""

    out: object  # (pieces, KEPT, D_v) float32, not divided
    stats: object  # (pieces, KEPT, 2): maximum of the base 2 logits, sum
    counters: object  # (pieces, warpgroups, 2). In the first way a warpgroup has 4 numbers from the
    # first piece's place on: come, handed out, left. By neighbours a pair has the 2 of the piece
    # that its right half begins with: claims, and whether one has put itself aside


class Branch(NamedTuple):
    """A piece among those of its sequence."""

    first: object  # number of the sequence's first piece among all
    index: object  # of this one in the sequence
    count: object  # pieces of the sequence


@gluon.jit
def _counter(branch: Branch, to: Partials, W: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Three counters of a warpgroup's rows; there are two pieces at least."""
    return to.counters + branch.first * (2 * WARPGROUPS) + 4 * W


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
def come(branch: Branch, to: Partials, W: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Counts a piece that was put aside; how many have come."""
    wait_for_all()  # all threads' stores come before the one thread's count
    return gl.atomic_add(_counter(branch, to, W, WARPGROUPS), 1, sem="acq_rel") + 1


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
def with_other(
    acc, top, total, branch: Branch, num_rows, to: Partials, W: gl.constexpr,
    WARPGROUPS: gl.constexpr, KEPT: gl.constexpr,
):  # fmt: skip
    """The last comer's piece with the other one of two, both `in_whole_powers`."""
    gl.store(_counter(branch, to, W, WARPGROUPS), 0)
    return with_piece(acc, top, total, branch.first + 1 - branch.index, num_rows, to, W, KEPT)


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
def all_came(
    num_come, branch: Branch, to: Partials, W: gl.constexpr, WARPGROUPS: gl.constexpr,
    WAITS: gl.constexpr,
):  # fmt: skip
    """Whether all pieces of the sequence are there, now or after some waiting."""
    counter = _counter(branch, to, W, WARPGROUPS)
    tries = num_come * 0
    while (num_come < branch.count) & (tries < WAITS):
        num_come = gl.atomic_add(counter, 0, sem="acquire")
        tries += 1
    return num_come == branch.count


@gluon.jit
def next_slab(branch: Branch, to: Partials, W: gl.constexpr, WARPGROUPS: gl.constexpr):
    """The number of 16 rows that nobody has merged yet; from `SLABS` on there are none."""
    return gl.atomic_add(_counter(branch, to, W, WARPGROUPS) + 1, 1, sem="relaxed")


@gluon.jit
def leave(branch: Branch, to: Partials, W: gl.constexpr, WARPGROUPS: gl.constexpr):
    """The program is through with its piece; the last one clears the counters."""
    counter = _counter(branch, to, W, WARPGROUPS)
    if gl.atomic_add(counter + 2, 1, sem="acq_rel") == branch.count - 1:
        for i in gl.static_range(3):
            gl.store(counter + i, 0)


@gluon.jit
def merged(slab, branch: Branch, num_rows, to: Partials, W: gl.constexpr, KEPT: gl.constexpr,
           WIDTH: gl.constexpr):  # fmt: skip
    """16 rows of all pieces.

    Returns:
        Their outputs (16, D_v), maxima and sums (16,), and their numbers among the program's.
    """
    ROWS: gl.constexpr = gl.SliceLayout(1, _SLAB_LAYOUT)
    row = W * 64 + slab * SLAB + gl.arange(0, SLAB, ROWS)
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, _SLAB_LAYOUT))
    top = gl.full([SLAB], LOWEST, gl.float32, ROWS)
    total = gl.zeros([SLAB], gl.float32, ROWS)
    acc = gl.zeros([SLAB, WIDTH], gl.float32, _SLAB_LAYOUT)
    for start in range(0, branch.count, _AT_ONCE):
        tops, sums, outs = (), (), ()
        for i in gl.static_range(_AT_ONCE):
            seen = (row < num_rows) & (start + i < branch.count)
            at = gl.cast(branch.first + start + i, gl.int64) * KEPT + row
            tops = tops + (_from_l2(to.stats + at * 2, seen, LOWEST),)
            sums = sums + (_from_l2(to.stats + at * 2 + 1, seen, 0.0),)
            places = (at * WIDTH)[:, None] + column[None, :]
            outs = outs + (_from_l2(to.out + places, seen[:, None], 0.0),)
        now = top
        for i in gl.static_range(_AT_ONCE):
            now = gl.maximum(now, tops[i])
        weight = gl.exp2(top - now)
        acc = acc * weight[:, None]
        total = gl.where(total < float("inf"), total * weight, total)
        for i in gl.static_range(_AT_ONCE):
            weight = gl.exp2(tops[i] - now)
            acc += outs[i] * weight[:, None]
            total += gl.where(sums[i] < float("inf"), sums[i] * weight, sums[i])
        top = now
    return acc, top, total, row
