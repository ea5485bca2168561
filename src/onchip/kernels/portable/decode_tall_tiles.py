"""Device functions of the tall decode's consumers: 64 rows against the tiles of a piece.

A row that sees no key has the maximum -inf; where pieces are joined it is `LOWEST` instead.

Legend: BN keys of a tile, W number of a consumer warpgroup; see `decode_tall`.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon

from onchip.kernels.gluon_names import (
    as_tile,
    fence_async_shared,
    gl,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from onchip.kernels.gluon_pieces import LOWEST
from onchip.kernels.gluon_rows import (
    base_of,
    operand,
    packed,
    rescaled,
    row_maximum,
    row_sums,
    scaled_sums,
)
from onchip.kernels.portable.decode_tall_cuts import Piece
from onchip.kernels.portable.decode_tall_results import (
    Numbers,
    Results,
    claimed_of,
    finish,
    put_together,
)


class Source(NamedTuple):
    """Where a CTA's queries and values are read without TMA."""

    q: object
    v: object
    table: object  # None where a sequence's index is its place
    stride_table: object


@gluon.jit
def place_of(source: Source, batch, SPEC: gl.constexpr):
    """A sequence's row of the table or, where its keys lie in one piece, their index."""
    if SPEC.page_size > 0:
        return source.table + gl.cast(batch, gl.int64) * source.stride_table
    elif source.table is not None:
        return gl.load(source.table + gl.cast(batch, gl.int64) * source.stride_table)
    else:
        return batch


class Ring(NamedTuple):
    """Shared memory."""

    q: object  # (W, 64, D)
    k: object  # (stages, BN, D)
    v: object
    k_full: object
    v_full: object
    k_empty: object
    v_empty: object


class Rows(NamedTuple):
    """A warpgroup's rows, as S and O have them."""

    row: object  # (64,), of the sequence and head of K
    high: object  # (64,) first key that the row does not see
    columns: object  # (BN,)


class Walk(NamedTuple):
    """What goes from tile to tile."""

    p: object  # (64, BN) weights of the last S, as `gluon_rows.packed` gives them
    acc: object  # (64, D) without the last P V
    m: object  # (64,) maximum of Q K^T
    l: object  # (64, 4) sums of P
    odd: object  # whether `_clean` met a value that is not finite


@gluon.jit
def _meet(SPEC: gl.constexpr):
    """The consumers wait for each other, at a named barrier; ids under 6 are Triton's."""
    if SPEC.rows == 128:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        x = gl.full([128], 15, gl.int32, LAYOUT)
        gl.inline_asm_elementwise("bar.sync $1, 256; mov.b32 $0, $1;", "=r,r", [x],
                                  dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@gluon.constexpr_function
def tile_layout(rows, width, bits, whole_rows):
    """How (rows, `width` columns of 16 bits) lie in shared memory, in elements of 16 or 32 bits.

    16 bytes of a row are moved by the row's number, as TMA and wgmma do. Rows of 64 columns lie
    one after the other, or where `whole_rows` 8 of them and then the same rows' next columns.
    """
    if not whole_rows:
        return gl.NVMMASharedLayout(128, bits, 2)
    chunk = 128 // bits
    bases = [[0, 1 << i] for i in range(chunk.bit_length() - 1)]
    bases += [[0, chunk << i] for i in range(3)] + [[1 << i, chunk << i] for i in range(3)]
    bases += [[0, chunk * 8 << i] for i in range((width // 64).bit_length() - 1)]
    bases += [[8 << i, 0] for i in range(rows.bit_length() - 4)]
    return gl.SharedLinearLayout(bases, [], 1024)


@gluon.jit
def _queries(W: gl.constexpr, q, piece: Piece, at: Ring, n: Numbers, SPEC: gl.constexpr):
    """The warpgroup's rows of Q as wgmma's operand."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SPEC.block_n, 16])
    row = piece.row_start + W * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    WIDTH: gl.constexpr = SPEC.width
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    head = piece.kv_head * SPEC.group + row % SPEC.group
    token = piece.q_start + row // SPEC.group
    place = gl.cast(piece.batch, gl.int64) * (n.stride_qb * SPEC.vector)
    place += token.to(gl.int64) * (n.stride_qs * SPEC.vector) + head * (n.stride_qh * SPEC.vector)
    inside = row < piece.num_queries * SPEC.group
    x = gl.load(q + place[:, None] + column[None, :], mask=inside[:, None], other=0.0)
    tile = at.q.index(W)
    tile.store(x)
    if SPEC.q_in_registers:
        return tile.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
    else:
        fence_async_shared()
        return tile


@gluon.jit
def _rows(W: gl.constexpr, piece: Piece, n: Numbers, SPEC: gl.constexpr):
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SPEC.block_n, 16])
    row = piece.row_start + W * 64 + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
    high = row * 0 + piece.length
    if SPEC.has_right:
        position = row // SPEC.group + (piece.length - piece.num_queries)
        high = gl.minimum(high, position + n.right + 1)
    return Rows(row, high, gl.arange(0, SPEC.block_n, gl.SliceLayout(0, S_LAYOUT)))


@gluon.jit
def _num_cut(piece: Piece, n: Numbers, SPEC: gl.constexpr):
    """Tiles of the piece that some row does not see in full."""
    whole = piece.length
    if SPEC.has_right:
        whole = gl.minimum(whole, piece.length - piece.num_queries + n.right + 1)
    whole = gl.maximum(whole, 0) // SPEC.block_n
    return gl.maximum(piece.stop - gl.maximum(whole, piece.start), 0)


@gluon.jit
def _wait_for(full, count, STAGES: gl.constexpr):
    """Waits until tile number `count` is there."""
    mbarrier.wait(full.index(count % STAGES), (count // STAGES) & 1)


@gluon.jit
def _release(count, at: Ring, SPEC: gl.constexpr, STAGES: gl.constexpr):
    """O is ready, and V of tile number `count` has been read; K of it was before."""
    if SPEC.is_joint:
        mbarrier.arrive(at.k_empty.index(count % STAGES), count=1)
    else:
        mbarrier.arrive(at.v_empty.index(count % STAGES), count=1)


@gluon.jit
def _scores(queries, count, at: Ring, SPEC: gl.constexpr, STAGES: gl.constexpr):
    """Issues S = Q K^T of tile number `count`."""
    BN: gl.constexpr = SPEC.block_n
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    k = at.k.index(count % STAGES).permute((1, 0))
    s = gl.zeros([64, BN], gl.float32, S_LAYOUT)
    return warpgroup_mma(queries, k, s, use_acc=False, is_async=True)


@gluon.jit
def _product(walk: Walk, count, at: Ring, SPEC: gl.constexpr, STAGES: gl.constexpr):
    """Issues O += P V of tile number `count`."""
    v = at.v.index(count % STAGES)
    return warpgroup_mma(operand(walk.p, at.q.dtype, SPEC), v, walk.acc, is_async=True)


@gluon.jit
def _masked(s, key, rows: Rows):
    """S with what its rows do not see at -inf; `key` is the tile's first."""
    return gl.where((rows.high - key)[:, None] > rows.columns[None, :], s, float("-inf"))


@gluon.jit
def _or(a, b):
    return a | b


@gluon.jit
def _marks(words, DTYPE: gl.constexpr):
    """Bits 15 and 31 of words of two values: whether the value is not finite; others are noise.

    1 added to an exponent of ones carries into the sign's place.
    """
    if DTYPE.is_bf16():
        return (words & 0x7F807F80) + 0x00800080
    else:
        return (words & 0x7C007C00) + 0x04000400


@gluon.jit
def _clean(count, key, piece: Piece, at: Ring, SPEC: gl.constexpr, STAGES: gl.constexpr):
    """Makes values of a tile that some rows do not see fit to be multiplied by 0.

    What lies past the sequence's end and what is not finite becomes 0. Consumers that find such
    values wait for each other before they write, so that all find them; they write the same.

    Returns:
        Whether a value was not finite.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    BN: gl.constexpr = SPEC.block_n
    WORDS: gl.constexpr = tile_layout(BN, SPEC.width, 32, SPEC.whole_rows)
    SHAPE: gl.constexpr = [STAGES, BN, SPEC.width // 2]
    _wait_for(at.v_full, count, STAGES)
    tile = as_tile(at.v, gl.int32, SHAPE, WORDS).index(count % STAGES)
    token = key + gl.arange(0, BN, gl.SliceLayout(1, LAYOUT))
    inside = (token < piece.length)[:, None]
    marks = _marks(gl.where(inside, tile.load(LAYOUT), 0), at.q.dtype)
    odd = (gl.reduce(gl.reduce(marks, 1, _or), 0, _or) & -0x7FFF8000) != 0
    if odd | (key + BN > piece.length):
        words = gl.where(inside, tile.load(LAYOUT), 0)  # again, rather than to hold it so long
        _meet(SPEC)
        marks = _marks(words, at.q.dtype)
        tile.store(words & ~(((marks >> 15) & 0x00010001) * 0xFFFF))
        fence_async_shared()
    return gl.where(odd, 1, 0)


@gluon.jit
def _with_nonfinite(acc, cut, rows: Rows, piece: Piece, source: Source, n: Numbers,
                    SPEC: gl.constexpr):  # fmt: skip
    """Adds values that `_clean` took for 0 to exactly the rows that see them.

    Key by key, since 0 times such a value is NaN. Behind all products: a branch among them that
    changes O serialises wgmma (C7514).
    """
    WIDTH: gl.constexpr = SPEC.width
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    high = gl.convert_layout(rows.high, gl.SliceLayout(1, O_LAYOUT))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, O_LAYOUT))
    head = source.v + piece.kv_head * (n.stride_vh * SPEC.vector)
    stop = gl.minimum(piece.length, piece.stop * SPEC.block_n)
    table = place_of(source, piece.batch, SPEC)
    for key in range((piece.stop - cut) * SPEC.block_n, stop):
        page, row = table, key
        if SPEC.page_size > 0:
            page, row = gl.load(table + key // SPEC.page_size), key % SPEC.page_size
        place = gl.cast(page, gl.int64) * n.stride_vb + gl.cast(row, gl.int64) * n.stride_vs
        value = gl.load(head + place * SPEC.vector + column).to(gl.float32)
        value = gl.where(gl.abs(value) < float("inf"), 0.0, value)
        acc += gl.where((high > key)[:, None], value[None, :], 0.0)
    return acc


@gluon.jit
def _first(queries, is_cut, rows: Rows, piece: Piece, at: Ring, n: Numbers, SPEC: gl.constexpr,
           STAGES: gl.constexpr):  # fmt: skip
    """The walk after the piece's last tile, which comes first."""
    WIDTH: gl.constexpr = SPEC.width
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    key = (piece.stop - 1) * SPEC.block_n
    _wait_for(at.k_full, 0, STAGES)
    s = _scores(queries, 0, at, SPEC, STAGES)
    s = warpgroup_mma_wait(0, deps=[s])
    if not SPEC.is_joint:
        mbarrier.arrive(at.k_empty.index(0), count=1)
    s = _masked(s, key, rows)
    m = row_maximum(s)
    weights = gl.exp2(s * n.scale - (base_of(m, True) * n.scale)[:, None])
    l = row_sums(weights)
    p = packed(weights, at.q.dtype, SPEC)
    odd = 0
    if is_cut:
        odd = _clean(0, key, piece, at, SPEC, STAGES)
    return Walk(p, gl.zeros([64, WIDTH], gl.float32, O_LAYOUT), m, l, odd)


@gluon.jit
def _step(
    queries, walk: Walk, count, rows: Rows, piece: Piece, at: Ring, n: Numbers,
    MASKED: gl.constexpr, SPEC: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """P V of tile number `count`, and the weights of the next."""
    key = (piece.stop - 2 - count) * SPEC.block_n
    # Side by side: of two waits apart from each other each costs a barrier of the warpgroup.
    _wait_for(at.v_full, count, STAGES)
    _wait_for(at.k_full, count + 1, STAGES)
    s = _scores(queries, count + 1, at, SPEC, STAGES)
    acc = _product(walk, count, at, SPEC, STAGES)
    s = warpgroup_mma_wait(1, deps=[s])
    if MASKED:
        s = _masked(s, key, rows)
    m = gl.maximum(walk.m, row_maximum(s))
    base = base_of(m, MASKED) * n.scale
    alpha = gl.exp2(walk.m * n.scale - base)
    # Behind the maximum: a release keeps the wait for O below what stands above it.
    if not SPEC.is_joint:
        mbarrier.arrive(at.k_empty.index((count + 1) % STAGES), count=1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    _release(count, at, SPEC, STAGES)
    acc = rescaled(acc, alpha)
    weights = gl.exp2(s * n.scale - base[:, None])
    l = scaled_sums(walk.l, alpha) + row_sums(weights)
    p = packed(weights, at.q.dtype, SPEC)
    odd = walk.odd
    if MASKED:
        odd = gl.maximum(odd, _clean(count + 1, key, piece, at, SPEC, STAGES))
    return Walk(p, acc, m, l, odd)


@gluon.jit
def attend(
    W: gl.constexpr, source: Source, to: Results, piece: Piece, at: Ring, n: Numbers,
    HAS_SINKS: gl.constexpr, SPEC: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: its 64 rows against the tiles of a piece, the last ones first."""
    queries = _queries(W, source.q, piece, at, n, SPEC)
    rows = _rows(W, piece, n, SPEC)
    tiles = piece.stop - piece.start
    cut = _num_cut(piece, n, SPEC)
    walk = _first(queries, cut > 0, rows, piece, at, n, SPEC, STAGES)
    for count in range(cut - 1):
        walk = _step(queries, walk, count, rows, piece, at, n, True, SPEC, STAGES)
    for count in range(gl.maximum(cut - 1, 0), tiles - 1):
        walk = _step(queries, walk, count, rows, piece, at, n, False, SPEC, STAGES)
    claimed = claimed_of(piece, to, W, SPEC)
    _wait_for(at.v_full, tiles - 1, STAGES)
    acc = warpgroup_mma_wait(0, deps=[_product(walk, tiles - 1, at, SPEC, STAGES)])
    if walk.odd > 0:
        acc = _with_nonfinite(acc, cut, rows, piece, source, n, SPEC)
    l = gl.convert_layout(gl.sum(walk.l, 1), walk.m.type.layout, assert_trivial=True)
    top = gl.where(l == 0.0, LOWEST, walk.m * n.scale)
    if SPEC.merges:
        if piece.count == 1:
            finish(acc, top, l, rows.row, to, piece, n, HAS_SINKS, SPEC)
        else:
            put_together(acc, top, l, claimed, rows.row, to, piece, n, W, HAS_SINKS, SPEC)
    else:
        finish(acc, top, l, rows.row, to, piece, n, HAS_SINKS, SPEC)
