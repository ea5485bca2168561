"""The device code of the Hopper backward that clears dQ's sum ahead and rounds it behind.

The sum is as large as two dQ, and moving it takes as long as some matrix products; so a warp of
its own does that for other heads while this CTA's multiply. A unit is a head of K of a sequence:
the queries that read it, and the CTAs that add to their sums. CTAs start in the order of units,
`lag` units before its own start a CTA has cleared its share of the sum, `lag` units behind one
rounds it. The kernels before and behind (`backward_stats`) do the same for the first and the
last `lag` units.

A unit's counter goes up by one for each CTA that has cleared its share, and again for each that
has added to it. Nobody waits for a CTA that starts later. Functions take `backward_pair.Shared`
as S.

Legend: D head dimension padded to what is compiled, BM rows of a tile of queries.
"""

from triton.experimental import gluon

from onchip.kernels.hopper.backward_sums import COLUMNS
from onchip.kernels.hopper.backward_walk import Sizes, own_unit, rows_of, store_queries
from onchip.kernels.hopper.gluon_backward import fence_async, pass_turn, wait_turn
from onchip.kernels.hopper.gluon_names import (
    fence_async_shared,
    gl,
    mbarrier,
    tma,
    tma_load,
    tma_store,
    wait_for_all,
)

#: What is taken out of a tile in shared memory at a time: the warp has 24 registers.
_ROWS = gl.constexpr(8)
_WIDTH = gl.constexpr(32)


@gluon.jit
def round_dq(sum_desc, dq_desc, counters, S, sizes: Sizes, scale, SPEC: gl.constexpr):
    """The warp that clears a share of a later unit's sum and rounds one of an earlier unit's."""
    unit = own_unit(sizes, SPEC)
    later = unit.index + sizes.lag
    if later < sizes.units:
        _clear(sum_desc, later, unit, S, sizes, SPEC)
        pass_turn(counters + later, 0)
    earlier = unit.index - sizes.lag
    if earlier >= 0:
        wait_turn(counters + earlier, 2 * unit.ctas)
        fence_async()
        _round(sum_desc, dq_desc, earlier, unit, scale, S, sizes, SPEC)


@gluon.jit
def _clear(sum_desc, index, unit, S, sizes, SPEC: gl.constexpr):
    """Starts to clear this CTA's share of a unit's sum."""
    BM: gl.constexpr = SPEC.block_m
    PARTS: gl.constexpr = SPEC.dim // COLUMNS
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [1, 1], [1, 0])
    rows = rows_of(index, sizes, SPEC)
    S.summed.store(gl.zeros([BM, COLUMNS], gl.float32, L))
    fence_async_shared()
    wait_for_all()
    for i in range(unit.place, rows.tiles * sizes.group, unit.ctas):
        head = i // rows.tiles
        line = rows.line + head * rows.stride + (i - head * rows.tiles) * BM
        for c in gl.static_range(PARTS):
            tma_store(sum_desc, [line, c * COLUMNS], S.summed)


@gluon.jit
def _round(sum_desc, dq_desc, index, unit, scale, S, sizes, SPEC: gl.constexpr):
    """Rounds this CTA's share of a unit's sum."""
    BM: gl.constexpr = SPEC.block_m
    D: gl.constexpr = SPEC.dim
    PARTS: gl.constexpr = SPEC.dim // COLUMNS
    rows = rows_of(index, sizes, SPEC)
    full = S.sum_full.index(0)
    loads = 0
    for i in range(unit.place, rows.tiles * sizes.group, unit.ctas):
        head = i // rows.tiles
        row = (i - head * rows.tiles) * BM
        tma.store_wait(0)
        for c in gl.static_range(PARTS):
            mbarrier.expect(full, BM * COLUMNS * 4)
            tma_load(sum_desc, [rows.line + head * rows.stride + row, c * COLUMNS], full, S.summed)
            mbarrier.wait(full, loads & 1)
            _convert(c, scale, S, SPEC)
            loads += 1
        store_queries(dq_desc, rows, rows.head + head, row, S.rounded, BM, D)
    tma.store_wait(0)


@gluon.jit
def _convert(c: gl.constexpr, scale, S, SPEC: gl.constexpr):
    """Columns of part c of a sum, scaled and rounded."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0])
    for r in gl.static_range(SPEC.block_m // _ROWS):
        of = S.summed.slice(r * _ROWS, _ROWS, dim=0)
        to = S.rounded.slice(r * _ROWS, _ROWS, dim=0)
        for w in gl.static_range(COLUMNS // _WIDTH):
            x = of.slice(w * _WIDTH, _WIDTH, dim=1).load(L)
            x = (x * scale).to(S.rounded.dtype)
            to.slice(c * COLUMNS + w * _WIDTH, _WIDTH, dim=1).store(x)
    fence_async_shared()
    wait_for_all()  # before the sum is loaded over, and what is rounded is stored
