"""Device functions of the tall decode: how pieces are joined and results are written.

Where all pieces run at a time and are as long, each is put aside and merges a share of the rows of
all. Others are joined in pairs of neighbours, then these, and so on: whoever is done first hands
over to the other one, which goes on. Nobody else waits, and who is first changes no bit, since the
pairs are the same and a sum of two is the same in both orders.

Legend: W number of a consumer warpgroup; see `decode_tall`.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon

from onchip.kernels.gluon_names import gl
from onchip.kernels.gluon_pieces import (
    Branch,
    arrive,
    claim,
    hand_over,
    has_neighbour,
    in_whole_powers,
    is_mine,
    is_second,
    leave,
    merged,
    put_aside,
    with_neighbour,
)
from onchip.kernels.portable.decode_tall_cuts import Piece

_LOG2E = gl.constexpr(1.4426950408889634)
_LN2 = gl.constexpr(0.6931471805599453)


class Numbers(NamedTuple):
    """Run-time numbers."""

    stride_qb: object
    stride_qs: object
    stride_qh: object
    stride_vb: object
    stride_vs: object
    stride_vh: object
    seqlen_q: object
    tokens_q: object
    num_heads: object
    right: object
    scale: object  # times log2(e)


class Results(NamedTuple):
    """Where results go, and the sinks."""

    out: object
    lse: object
    sinks: object
    partials: object  # Partials


@gluon.jit
def _branch(piece: Piece):
    return Branch(piece.first, piece.index, piece.count)


@gluon.jit
def claimed_of(piece: Piece, to: Results, W: gl.constexpr, SPEC: gl.constexpr):
    """The first `gluon_pieces.claim` of several pieces, a tile before its answer is needed."""
    claimed = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    if SPEC.merges and SPEC.joins:
        branch = _branch(piece)
        joins = has_neighbour(branch, piece.index, 1)
        if SPEC.shares > 0:
            joins = joins & (piece.alike == 0)
        if joins:
            claimed = claim(branch, piece.index, 1, to.partials, W, SPEC.rows // 64)
    return claimed


@gluon.jit
def put_together(
    acc, top, l, claimed, row, to: Results, piece: Piece, n: Numbers, W: gl.constexpr,
    HAS_SINKS: gl.constexpr, SPEC: gl.constexpr,
):  # fmt: skip
    """Joins a piece with its sequence's others, or leaves that to the launch that merges."""
    branch = _branch(piece)
    # Where the sequence's rows end.
    end = gl.minimum(piece.num_queries * SPEC.group - piece.row_start, SPEC.kept)
    if SPEC.merged_rows > 0:
        acc, top, l = in_whole_powers(acc, top, l)
        put_aside(acc, top, l, branch.first + branch.index, end, to.partials, W, SPEC.kept)
    elif SPEC.shares == 0:
        _join(acc, top, l, claimed, row, branch, end, to, piece, n, W, HAS_SINKS, SPEC)
    elif SPEC.joins:
        if piece.alike:
            _share_out(acc, top, l, branch, end, to, piece, n, W, HAS_SINKS, SPEC)
        else:
            _join(acc, top, l, claimed, row, branch, end, to, piece, n, W, HAS_SINKS, SPEC)
    else:
        _share_out(acc, top, l, branch, end, to, piece, n, W, HAS_SINKS, SPEC)


@gluon.jit
def _share_out(
    acc, top, l, branch: Branch, end, to: Results, piece: Piece, n: Numbers, W: gl.constexpr,
    HAS_SINKS: gl.constexpr, SPEC: gl.constexpr,
):  # fmt: skip
    """Puts a piece aside; each of them merges and writes a share of the rows before `end`."""
    WARPGROUPS: gl.constexpr = SPEC.rows // 64
    put_aside(acc, top, l, branch.first + branch.index, end, to.partials, W, SPEC.kept)
    SLAB: gl.constexpr = 64 // SPEC.shares
    rank, state = arrive(branch, to.partials, W, WARPGROUPS, SPEC.polls)
    leave(state, branch, to.partials, W, WARPGROUPS, SPEC.shares)
    slabs = gl.minimum(gl.cdiv(gl.maximum(end - W * 64, 0), SLAB), SPEC.shares)
    for share in range(branch.count):
        start = gl.where(is_mine(share, rank, state, branch), share, slabs)
        for slab in range(start, slabs, branch.count):
            sums, maxima, totals, rows = merged(slab, branch, end, to.partials, W, SPEC.kept,
                                                SPEC.width, SPEC.shares)  # fmt: skip
            finish(sums, maxima, totals, piece.row_start + rows, to, piece, n, HAS_SINKS, SPEC)


@gluon.jit
def _join(
    acc, top, l, claimed, row, branch: Branch, end, to: Results, piece: Piece, n: Numbers,
    W: gl.constexpr, HAS_SINKS: gl.constexpr, SPEC: gl.constexpr,
):  # fmt: skip
    """Joins neighbours; the last of the pieces writes."""
    WARPGROUPS: gl.constexpr = SPEC.rows // 64
    acc, top, l = in_whole_powers(acc, top, l)
    start, span, stop = piece.index, piece.index * 0 + 1, piece.count
    while span < stop:
        if has_neighbour(branch, start, span):
            if span > 1:
                claimed = claim(branch, start, span, to.partials, W, WARPGROUPS)
            if is_second(claimed):
                acc, top, l = with_neighbour(acc, top, l, branch, start, span, end, to.partials, W,
                                             WARPGROUPS, SPEC.kept)  # fmt: skip
            else:
                hand_over(acc, top, l, branch, start, span, end, to.partials, W, WARPGROUPS,
                          SPEC.kept)  # fmt: skip
                stop = 0
        start = start & ~span
        span *= 2
    if stop > 0:
        finish(acc, top, l, row, to, piece, n, HAS_SINKS, SPEC)


@gluon.jit
def finish(acc, top, l, row, to: Results, piece: Piece, n: Numbers, HAS_SINKS: gl.constexpr,
            SPEC: gl.constexpr):  # fmt: skip
    """Adds the sink, divides and writes; see `decode_results.finish`."""
    ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    head = piece.kv_head * SPEC.group + row % SPEC.group
    inside = row < piece.num_queries * SPEC.group
    factor = 1.0
    if HAS_SINKS:
        sink = gl.load(to.sinks + head, mask=inside, other=float("-inf")).to(gl.float32) * _LOG2E
        both = gl.maximum(top, sink)
        factor = gl.exp2(top - both)
        l = l * factor + gl.exp2(sink - both)
        top = both
    inverse = gl.where(l == 0.0, 0.0, factor / l)
    query = row // SPEC.group
    token = (piece.q_start + query).to(gl.int64)
    if SPEC.packed_q:
        at = head * n.tokens_q + token
    else:
        at = (gl.cast(piece.batch * n.num_heads, gl.int64) + head) * n.seqlen_q + query
        token += gl.cast(piece.batch, gl.int64) * n.seqlen_q
    value = gl.where(l == 0.0, float("-inf"), (top + gl.log2(l)) * _LN2)
    gl.store(to.lse + at, value, mask=inside)
    result = (acc * gl.convert_layout(inverse, ROWS)[:, None]).to(to.out.dtype.element_ty)
    place = gl.convert_layout((token * n.num_heads + head) * acc.shape[1], ROWS)
    WIDTH: gl.constexpr = acc.shape[1]
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, acc.type.layout))
    seen = gl.convert_layout(inside, ROWS)
    gl.store(to.out + place[:, None] + column[None, :], result, mask=seen[:, None])
