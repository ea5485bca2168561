"""What several programs found for 64 rows, one for each piece of the keys, is put together.

Method: the pieces of a sequence are the leaves of a tree whose nodes have up to four children.
Each puts aside what it has and counts itself at its node. The last to come merges all of the
node's, in their order, and goes on to the next node with that; the others are done. Who comes
last changes no bit of the result. Counters are zero again when all are through.

One program that merged 32 pieces would read 1 MiB, which takes it 10 us; the tree has three
levels of 128 KiB.

Legend: D_v head dimension, KEPT rows of a program that can exist, W number of a warpgroup.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon

from onchip.kernels.gluon_names import gl, wait_for_all

_CHILDREN = gl.constexpr(4)
LOWEST = gl.constexpr(-3.0e38)  # the maximum of nothing


class Partials(NamedTuple):
    """Where pieces are put aside, and counters that are zero before and after a launch."""

    out: object  # (pieces, KEPT, D_v) float32, not divided
    stats: object  # (pieces, KEPT, 2): maximum of the base 2 logits, sum
    counters: object  # (pieces, warpgroups)


class Branch(NamedTuple):
    """A piece's place in its sequence's tree."""

    first: object  # number of the sequence's first piece among all
    index: object  # of this one in the sequence
    count: object  # pieces of the sequence


@gluon.jit
def _places(piece, W: gl.constexpr, KEPT: gl.constexpr, LAYOUT: gl.constexpr):
    """A warpgroup's rows among those of all pieces, and which of them are kept."""
    row = W * 64 + gl.arange(0, 64, LAYOUT)
    return gl.cast(piece, gl.int64) * KEPT + row, row < KEPT


@gluon.jit
def _put_aside(acc, top, total, piece, to: Partials, W: gl.constexpr, KEPT: gl.constexpr):
    LAYOUT: gl.constexpr = acc.type.layout
    STATS: gl.constexpr = top.type.layout
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    WIDTH: gl.constexpr = acc.shape[1]
    at, kept = _places(piece, W, KEPT, STATS)
    gl.store(to.stats + at * 2, top, mask=kept)
    gl.store(to.stats + at * 2 + 1, total, mask=kept)
    at, kept = _places(piece, W, KEPT, ROWS)
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    gl.store(to.out + (at * WIDTH)[:, None] + column[None, :], acc, mask=kept[:, None])


@gluon.jit
def _merged(
    first, step, size, like, top, to: Partials, W: gl.constexpr, KEPT: gl.constexpr
):  # fmt: skip
    """`size` pieces, `step` apart: outputs laid out as `like`, maxima and sums as `top`."""
    LAYOUT: gl.constexpr = like.type.layout
    STATS: gl.constexpr = top.type.layout
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    WIDTH: gl.constexpr = like.shape[1]
    top = gl.full([64], LOWEST, gl.float32, STATS)
    for i in gl.static_range(_CHILDREN):
        at, kept = _places(first + i * step, W, KEPT, STATS)
        found = gl.load(to.stats + at * 2, mask=kept & (i < size), other=LOWEST,
                        cache_modifier=".cg")  # fmt: skip
        top = gl.maximum(top, found)
    total = gl.zeros([64], gl.float32, STATS)
    acc = gl.zeros([64, WIDTH], gl.float32, LAYOUT)
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    for i in range(size):
        at, kept = _places(first + i * step, W, KEPT, STATS)
        # Straight from L2: other SMs wrote it.
        weight = gl.load(to.stats + at * 2, mask=kept, other=LOWEST, cache_modifier=".cg")
        weight = gl.exp2(weight - top)
        found = gl.load(to.stats + at * 2 + 1, mask=kept, other=0.0, cache_modifier=".cg")
        total += gl.where(found < float("inf"), found * weight, found)
        row, seen = _places(first + i * step, W, KEPT, ROWS)
        out = gl.load(to.out + (row * WIDTH)[:, None] + column[None, :], mask=seen[:, None],
                      other=0.0, cache_modifier=".cg")  # fmt: skip
        acc += out * gl.convert_layout(weight, ROWS)[:, None]
    return acc, top, total


@gluon.jit
def joined(
    acc, top, total, branch: Branch, to: Partials, W: gl.constexpr, WARPGROUPS: gl.constexpr,
    KEPT: gl.constexpr,
):  # fmt: skip
    """Joins a piece's outputs (64, D_v), maxima and sums (64,) with those of its sequence's others.

    Returns:
        Outputs, maxima and sums of all pieces, and whether it is this program that has them.
    """
    index = branch.index
    count = branch.count
    is_last = index >= 0
    step = 1
    level = 0
    going = count > 1
    while going:
        _put_aside(acc, top, total, branch.first + index * step, to, W, KEPT)
        node = index // _CHILDREN
        size = gl.minimum(count - node * _CHILDREN, _CHILDREN)
        first = branch.first + node * _CHILDREN * step
        come = 0
        # With two children a node has `step` pieces and more, `level` are fewer.
        counter = to.counters + (first + level) * WARPGROUPS + W
        if size > 1:
            wait_for_all()  # all threads' stores come before the one thread's count
            come = gl.atomic_add(counter, 1, sem="acq_rel")
        is_last = come == size - 1
        if is_last & (size > 1):
            gl.store(counter, 0)
            acc, top, total = _merged(first, step, size, acc, top, to, W, KEPT)
        index = node
        count = (count + _CHILDREN - 1) // _CHILDREN
        step = step * _CHILDREN
        level += 1
        going = is_last & (count > 1)
    return acc, top, total, is_last
