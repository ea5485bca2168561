"""The device code of the Hopper backward that clears dQ's sum ahead and rounds it behind.

The sum is as large as two dQ, and moving it takes as long as some matrix products; so a warp of
its own does that for other heads while this CTA's multiply. A unit is a head of K of a sequence:
the queries that read it, and the tiles of keys that add to their sums. Tiles of keys begin in the
order of units, or of blocks of up to `lag` units: `lag` units before its own a tile's CTA has
cleared its share of the sum, `lag` units behind one rounds it. The kernels before and behind
(`backward_stats`) do the same for the first and the last `lag` units.

A unit's counter goes up by one for each tile of keys whose share is cleared, and again for each
that has added to it. Nobody waits for a tile that begins later. Functions take
`backward_pair.Shared` as S.

Legend: D head dimension padded to what is compiled, BM rows of a tile of queries.
"""

from triton.experimental import gluon

from onchip.kernels.hopper.backward_sums import COLUMNS, in_order
from onchip.kernels.hopper.backward_walk import Sizes, item_of, piece_of, rows_of, unit_of
from onchip.kernels.hopper.gluon_backward import fence_async, pass_turn, wait_turn
from onchip.kernels.hopper.gluon_names import (
    fence_async_shared,
    gl,
    mbarrier,
    tma_load,
    tma_store,
    wait_for_all,
)

#: What is taken out of a tile in shared memory at a time: the warp has 32 registers.
_ROWS = gl.constexpr(16)
_WIDTH = gl.constexpr(32)


@gluon.jit
def round_dq(sum_desc, dq, counters, S, sizes: Sizes, scale, SPEC: gl.constexpr):
    """The warp that clears a share of a later unit's sum and rounds one of an earlier unit's."""
    if not SPEC.persistent:
        _round_tile(gl.program_id(0), 0, sum_desc, dq, counters, S, sizes, scale, SPEC)
    else:
        item = item_of(0, sizes)
        loads = 0
        n = 0
        while item >= 0:
            _round_tile(item, loads, sum_desc, dq, counters, S, sizes, scale, SPEC)
            loads += _loads_of(item, sizes, SPEC)
            n += 1
            item = item_of(n, sizes)


@gluon.jit
def _round_tile(
    item, loads, sum_desc, dq, counters, S, sizes: Sizes, scale, SPEC: gl.constexpr
):  # fmt: skip
    """The shares of a tile of keys; `loads` of parts of sums came before."""
    unit = unit_of(item, sizes, SPEC)
    later = unit.index + sizes.lag
    if later < sizes.units:
        _clear(sum_desc, later, unit, S, sizes, SPEC)
        pass_turn(counters + later, 0)
    earlier = unit.index - sizes.lag
    if earlier >= 0:
        wait_turn(counters + earlier, 2 * unit.ctas)
        fence_async()
        _round(sum_desc, dq, earlier, item, loads, scale, S, sizes, SPEC)


@gluon.jit
def _loads_of(item, sizes, SPEC: gl.constexpr):
    """Parts of sums that a tile of keys rounds."""
    PARTS: gl.constexpr = SPEC.dim // COLUMNS
    unit = unit_of(item, sizes, SPEC)
    earlier = unit.index - sizes.lag
    rows = rows_of(gl.maximum(earlier, 0), sizes, SPEC)
    first, end = _share(rows.tiles * sizes.group, item, sizes, SPEC)
    return gl.where(earlier >= 0, end - first, 0) * PARTS


@gluon.jit
def _clear(sum_desc, index, unit, S, sizes, SPEC: gl.constexpr):
    """Starts to clear this CTA's share of a unit's sum."""
    BM: gl.constexpr = SPEC.block_m
    PARTS: gl.constexpr = SPEC.dim // COLUMNS
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [1, 1], [1, 0])
    rows = rows_of(index, sizes, SPEC)
    zeros = S.summed.index(0)
    zeros.store(gl.zeros([BM, COLUMNS], gl.float32, L))
    fence_async_shared()
    wait_for_all()
    for i in range(unit.place, rows.tiles * sizes.group, unit.ctas):
        head = i // rows.tiles
        line = rows.line + head * rows.stride + (i - head * rows.tiles) * BM
        for c in gl.static_range(PARTS):
            tma_store(sum_desc, [line, c * COLUMNS], zeros)


@gluon.jit
def _round(sum_desc, dq, index, item, loads, scale, S, sizes, SPEC: gl.constexpr):
    """Rounds a share of a unit's sum, the next part on its way meanwhile."""
    BM: gl.constexpr = SPEC.block_m
    PARTS: gl.constexpr = SPEC.dim // COLUMNS
    rows = rows_of(index, sizes, SPEC)
    first, end = _share(rows.tiles * sizes.group, item, sizes, SPEC)
    parts = (end - first) * PARTS
    if parts > 0:
        _load_part(sum_desc, rows, first, 0, loads, S, SPEC)
    for j in range(parts):
        if j + 1 < parts:
            _load_part(sum_desc, rows, first, j + 1, loads, S, SPEC)
        i = first + j // PARTS
        head = i // rows.tiles
        row = (i - head * rows.tiles) * BM
        x = (loads + j) % 2
        mbarrier.wait(S.sum_full.index(x), ((loads + j) // 2) & 1)
        line = (rows.start + row) * sizes.num_heads + rows.head + head
        to = dq + gl.cast(line, gl.int64) * (sizes.width * 8)
        column = j % PARTS * COLUMNS
        _store_rounded(to, S.summed.index(x), rows.length - row, column, scale, sizes, SPEC)
        wait_for_all()  # before the next but one is loaded over it


@gluon.jit
def _share(tiles, item, sizes, SPEC: gl.constexpr):
    """First and last but one of the tiles that are a CTA's share, in the measure of its walk."""
    unit = unit_of(item, sizes, SPEC)
    ctas = gl.cast(unit.ctas, gl.int64)
    first = gl.cast(unit.place, gl.int64)
    end = first + 1
    total = ctas
    if SPEC.has_right and not SPEC.has_left:
        if SPEC.ordered:
            first = gl.where(unit.last, first, ctas - end)
            end = first + 1
        # Walks are `ctas`, `ctas` - 1, ... long.
        first = first * ctas - first * (first - 1) // 2
        end = end * ctas - end * (end - 1) // 2
        total = ctas * (ctas + 1) // 2
    elif SPEC.pieces > 1:
        _, piece = piece_of(item, sizes, SPEC)
        shared = item >= sizes.whole
        first = gl.where(shared, first * SPEC.pieces + piece, first)
        end = gl.where(shared, first + 1, end)
        total = gl.where(shared, ctas * SPEC.pieces, ctas)
    return gl.cast(tiles * first // total, gl.int32), gl.cast(tiles * end // total, gl.int32)


@gluon.jit
def _load_part(sum_desc, rows, first, j, loads, S, SPEC: gl.constexpr):
    """Starts to load the j-th part of a share."""
    BM: gl.constexpr = SPEC.block_m
    PARTS: gl.constexpr = SPEC.dim // COLUMNS
    i = first + j // PARTS
    head = i // rows.tiles
    line = rows.line + head * rows.stride + (i - head * rows.tiles) * BM
    x = (loads + j) % 2
    full = S.sum_full.index(x)
    mbarrier.expect(full, BM * COLUMNS * 4)
    tma_load(sum_desc, [line, j % PARTS * COLUMNS], full, S.summed.index(x))


@gluon.jit
def _store_rounded(to, summed, length, column, scale, sizes, SPEC: gl.constexpr):
    """Rows of a part of a sum, scaled and rounded, to memory."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, _ROWS, gl.SliceLayout(1, L)), 1)
    at = gl.expand_dims(gl.arange(0, _WIDTH, gl.SliceLayout(0, L)), 0)
    stride = sizes.num_heads * sizes.width * 8
    for r in gl.static_range(SPEC.block_m // _ROWS):
        of = summed.slice(r * _ROWS, _ROWS, dim=0)
        for w in gl.static_range(COLUMNS // _WIDTH):
            x = in_order(of.slice(w * _WIDTH, _WIDTH, dim=1).load(L), L)
            c = column + w * _WIDTH + at
            seen = (row < length - r * _ROWS) & (c // 8 < sizes.width)
            gl.store(to + (row * stride + c), (x * scale).to(to.dtype.element_ty), seen)
        to += stride * _ROWS
