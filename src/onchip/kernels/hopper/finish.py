"""How a consumer of the Hopper forward ends a tile: pieces joined, sums divided, rows stored.

Legend: D_v head dimension, W number of a warpgroup, n sizes, C code.
"""

from __future__ import annotations

from triton.experimental import gluon

from onchip.kernels.gluon_pieces import (
    LOWEST,
    Branch,
    arrive,
    is_mine,
    leave,
    merged,
    put_aside,
)
from onchip.kernels.hopper.gluon_names import gl
from onchip.kernels.hopper.results import note_leaks, store_lse, store_rows, store_tile
from onchip.kernels.hopper.shared import Outputs
from onchip.kernels.hopper.softmax import Terms, with_sink
from onchip.kernels.hopper.tiles import Sizes, View, num_rows, piece_of


@gluon.jit
def finish(
    walk, o, unmasked, view: View, terms: Terms, to: Outputs, n: Sizes, W: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Divides and stores the rows of a `consumer.Walk`; without keys they give 0 and LSE -inf.

    `unmasked`: whether there was a tile that its rows see in full. Without maxima a row's sum may
    then have grown too far, or have begun without a maximum, where a masked tile gave -inf: its
    LSE becomes inf.
    """
    S_ROWS: gl.constexpr = gl.SliceLayout(
        1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.block_n, 16])
    )
    l = gl.convert_layout(gl.sum(walk.l, 1), S_ROWS, assert_trivial=True)
    top = gl.convert_layout(gl.max(walk.m, 1), S_ROWS, assert_trivial=True)
    overflows = (l > 2.0**100) | ((top == float("-inf")) & unmasked)
    if C.in_pieces:
        index, _, count = piece_of(view.tile, n, C)
        branch = Branch(view.tile.number - index, index, count)
        if count > 1:
            top = gl.where(l == 0.0, LOWEST, top)
            if not C.maxima:
                top = gl.where(overflows, 0.0, top)
                l = gl.where(overflows, float("inf"), l)
            _put_together(walk.acc, top, l, branch, o, view, terms, to, n, W, C)
        else:
            _hand_over(walk.acc, top, l, overflows, o, view, terms, to, n, C)
    else:
        _hand_over(walk.acc, top, l, overflows, o, view, terms, to, n, C)


@gluon.jit
def _put_together(
    acc, top, l, branch: Branch, o, view: View, terms: Terms, to: Outputs, n: Sizes,
    W: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Merges a piece with the others of its keys and stores rows of which all are there."""
    WARPGROUPS: gl.constexpr = C.warpgroups
    KEPT: gl.constexpr = C.block_m
    SHARES: gl.constexpr = C.shares
    put_aside(acc, top, l, branch.first + branch.index, KEPT, to.partials, W, KEPT)
    rank, state = arrive(branch, to.partials, W, WARPGROUPS, C.waits)
    leave(state, branch, to.partials, W, WARPGROUPS, SHARES)
    for share in range(branch.count):
        start = gl.where(is_mine(share, rank, state, branch), share, SHARES)
        for slab in range(start, SHARES, branch.count):
            sums, maxima, total, rows = merged(
                slab, branch, KEPT, to.partials, W, KEPT, C.width_v, SHARES
            )
            first = W * 64 + slab * (64 // SHARES)
            part = View(view.tile, view.tile.row + first, rows - first, view.slope)
            out = _divided(sums, maxima, total, total == float("inf"), part, terms, to, n, C)
            store_rows(out.to(o.dtype), part, to, n, C)


@gluon.jit
def _divided(
    acc, top, l, overflows, view: View, terms: Terms, to: Outputs, n: Sizes, C: gl.constexpr
):
    """Outputs of rows whose keys have all been seen; stores the LSE."""
    ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    top, l, factor = with_sink(top, l, view, terms, C)
    if not C.maxima:
        top = gl.where(overflows, 0.0, top)
        l = gl.where(overflows, float("inf"), l)
    store_lse(top, l, view, to, n, C)
    inverse = factor / l
    if C.may_be_empty:
        inverse = gl.where(l == 0.0, 0.0, inverse)
    out = acc * gl.convert_layout(inverse, ROWS)[:, None]
    if C.may_leak:
        note_leaks(out, l, view, to, C)
    return out


@gluon.jit
def _hand_over(
    acc, top, l, overflows, o, view: View, terms: Terms, to: Outputs, n: Sizes, C: gl.constexpr
):
    """Divides and stores a warpgroup's rows."""
    out = _divided(acc, top, l, overflows, view, terms, to, n, C)
    out = out.to(o.dtype)
    if C.packed_q:
        if view.row + 64 <= num_rows(view.tile.seqlen_q, C):
            store_tile(out, o, view, to, C)
        else:
            store_rows(out, view, to, n, C)
    else:
        if view.row < num_rows(view.tile.seqlen_q, C):
            store_tile(out, o, view, to, C)
