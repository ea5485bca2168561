"""The device code of the Hopper backward that makes dQ and its sum in memory.

Functions take `backward_pair.Shared` as S.

Legend: D head dimension padded to what is compiled, BM rows of a tile of queries.
"""

from triton.experimental import gluon

from onchip.kernels.hopper.backward_walk import Sizes, meet_keys, num_tiles, tile_at, turn_of
from onchip.kernels.hopper.gluon_backward import pass_turn, settle, wait_turn
from onchip.kernels.hopper.gluon_names import (
    as_tile,
    as_tiles,
    fence_async_shared,
    gl,
    mbarrier,
    tma,
    tma_load,
    tma_reduce_add,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)

#: Columns of dQ that are made and added at a time: with all 128 the warpgroup would need 96
#: registers, which leaves less than the 208 that the others need.
COLUMNS = gl.constexpr(64)


@gluon.jit
def _ends(t, keys, SPEC: gl.constexpr):
    """Whether the keys of step t are the last ones that its tile of queries sees."""
    if SPEC.has_right:
        return t < keys.edges
    else:
        return keys.n == keys.tiles - 1


@gluon.jit
def make_dq(S, sizes: Sizes, scale, SPEC: gl.constexpr):
    """The warpgroup of dQ = dS K, which it hands to `add_dq`."""
    PARTS: gl.constexpr = SPEC.dim // COLUMNS
    start = 0
    for n in range(num_tiles(sizes, SPEC)):
        _, keys = meet_keys(sizes, n, start, SPEC)
        mbarrier.wait(S.kv_full.index(keys.slot * 2), (n // SPEC.kv_buffers) & 1)
        for t in range(keys.start, keys.end):
            x = t % SPEC.ds_buffers
            mbarrier.wait(S.ds_full.index(x), (t // SPEC.ds_buffers) & 1)
            for c in gl.static_range(PARTS):
                u = t * PARTS + c
                y = u % SPEC.dq_buffers
                dq = _products(c, keys, x, S, SPEC)
                if c == PARTS - 1:
                    mbarrier.arrive(S.ds_empty.index(x), count=1)
                mbarrier.wait(S.dq_empty.index(y), (u // SPEC.dq_buffers) & 1)
                _put_dq(dq, S.dq.index(y), t, keys, scale, S, SPEC)
                fence_async_shared()
                mbarrier.arrive(S.dq_full.index(y), count=1)
        mbarrier.arrive(S.k_free.index(0), count=1)
        start = keys.end


@gluon.jit
def _products(c: gl.constexpr, keys, x, S, SPEC: gl.constexpr):
    """dQ's columns of part c by the CTA's keys."""
    BM: gl.constexpr = SPEC.block_m
    C: gl.constexpr = COLUMNS
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    dq = gl.zeros([BM, C], gl.float32, L)
    for h in gl.static_range(2):
        k = S.k.index(keys.slot * 2 + h)
        if SPEC.dim > C:
            k = k.slice(c * C, C, dim=1)
        dq = warpgroup_mma(
            S.ds.index(x * 2 + h).permute((1, 0)), k, dq, use_acc=h > 0, is_async=True
        )
    return warpgroup_mma_wait(0, deps=[dq])


@gluon.jit
def _put_dq(dq, to, t, keys, scale, S, SPEC: gl.constexpr):
    """dQ of these keys in float32, or the sum of all, rounded, with the keys that end it."""
    DT: gl.constexpr = S.k.dtype
    SHAPE: gl.constexpr = [SPEC.block_m, SPEC.dim]
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SPEC.dim, 16])
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if SPEC.whole:
        if _ends(t, keys, SPEC):
            if keys.n > 0:
                dq += to.load(L)
            rounded = (dq * scale).to(DT)
            gl.thread_barrier()
            as_tile(to, DT, SHAPE, TILE).store(rounded)
        else:
            to.store(dq)
    else:
        to.store(dq)


@gluon.jit
def add_dq(sum_desc, dq_desc, counters, S, sizes: Sizes, SPEC: gl.constexpr):
    """The warp that adds dQ to the float32 sum in memory.

    In a CTA that owns all keys of a head it stores the first ones' part, fetches the sum for
    the last ones, and stores dQ.
    """
    BM: gl.constexpr = SPEC.block_m
    PARTS: gl.constexpr = SPEC.dim // COLUMNS
    start = 0
    before = 0  # the last step's counter
    for n in range(num_tiles(sizes, SPEC)):
        walk, keys = meet_keys(sizes, n, start, SPEC)
        for t in range(keys.start, keys.end):
            head, m = tile_at(walk, t - keys.start, sizes.group)
            head += walk.head * sizes.group
            line = walk.line + head * walk.stride + m * BM
            if SPEC.whole:
                y = t % SPEC.dq_buffers
                tma.store_wait(SPEC.dq_buffers - 1)
                _add_own(sum_desc, dq_desc, walk, keys, head, m * BM, line, t, y, S, SPEC)
            else:
                _add(sum_desc, counters, walk, m, line, t, S, sizes, SPEC)
                if SPEC.ordered:
                    # A step later, when it has long been in memory.
                    if t > keys.start:
                        pass_turn(counters + before, PARTS)
                    before = line // BM
        if SPEC.ordered and not SPEC.whole:  # noqa: SIM102 (known when compiling)
            if keys.end > keys.start:
                pass_turn(counters + before, 0)
        if SPEC.whole:
            settle()  # the next keys add to these sums
        start = keys.end
    tma.store_wait(0)


@gluon.jit
def _add(sum_desc, counters, walk, m, line, t, S, sizes: Sizes, SPEC: gl.constexpr):
    """A step of `add_dq` where other CTAs add to the sum."""
    PARTS: gl.constexpr = SPEC.dim // COLUMNS
    for c in gl.static_range(PARTS):
        u = t * PARTS + c
        y = u % SPEC.dq_buffers
        tma.store_wait(SPEC.dq_buffers - 1)
        mbarrier.arrive(S.dq_empty.index(y), count=1)
        if SPEC.ordered and c == 0:
            turn = turn_of(walk, m, sizes, SPEC)
            wait_turn(counters + line // SPEC.block_m, turn)
        mbarrier.wait(S.dq_full.index(y), (u // SPEC.dq_buffers) & 1)
        tma_reduce_add(sum_desc, [line, c * COLUMNS], S.dq.index(y))


@gluon.jit
def _add_own(sum_desc, dq_desc, walk, keys, head, row, line, t, y, S, SPEC: gl.constexpr):
    """A step of `add_dq` where nobody else adds to the sum."""
    BM: gl.constexpr = SPEC.block_m
    D: gl.constexpr = SPEC.dim
    SHAPE: gl.constexpr = [1, 1, BM, 1, D]
    empty = S.dq_empty.index(y)
    ends = _ends(t, keys, SPEC)
    if ends & (keys.n > 0):
        mbarrier.expect(empty, BM * D * 4)
        tma_load(sum_desc, [line, 0], empty, S.dq.index(y))
    else:
        mbarrier.arrive(empty, count=1)
    mbarrier.wait(S.dq_full.index(y), (t // SPEC.dq_buffers) & 1)
    if ends:
        place = [walk.q_batch, walk.q_end, walk.q_row + row, head, 0]
        tma_store(dq_desc, place, as_tiles(S.dq.index(y), dq_desc, SHAPE))
    elif keys.n == 0:
        tma_store(sum_desc, [line, 0], S.dq.index(y))
    else:
        tma_reduce_add(sum_desc, [line, 0], S.dq.index(y))
