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
    BM: gl.constexpr = SPEC.block_m
    D: gl.constexpr = SPEC.dim
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    start = 0
    for n in range(num_tiles(sizes, SPEC)):
        _, keys = meet_keys(sizes, n, start, SPEC)
        mbarrier.wait(S.kv_full.index(keys.slot * 2), (n // SPEC.kv_buffers) & 1)
        for t in range(keys.start, keys.end):
            x = t % SPEC.ds_buffers
            y = t % SPEC.dq_buffers
            mbarrier.wait(S.ds_full.index(x), (t // SPEC.ds_buffers) & 1)
            dq = gl.zeros([BM, D], gl.float32, L)
            for h in gl.static_range(2):
                dq = warpgroup_mma(
                    S.ds.index(x * 2 + h).permute((1, 0)), S.k.index(keys.slot * 2 + h), dq,
                    use_acc=h > 0, is_async=True,
                )  # fmt: skip
            dq = warpgroup_mma_wait(0, deps=[dq])
            mbarrier.arrive(S.ds_empty.index(x), count=1)
            mbarrier.wait(S.dq_empty.index(y), (t // SPEC.dq_buffers) & 1)
            _put_dq(dq, S.dq.index(y), t, keys, scale, S, SPEC)
            fence_async_shared()
            mbarrier.arrive(S.dq_full.index(y), count=1)
        mbarrier.arrive(S.k_free.index(0), count=1)
        start = keys.end


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
    start = 0
    for n in range(num_tiles(sizes, SPEC)):
        walk, keys = meet_keys(sizes, n, start, SPEC)
        for t in range(keys.start, keys.end):
            head, m = tile_at(walk, t - keys.start, sizes.group)
            head += walk.head * sizes.group
            line = walk.line + head * walk.stride + m * BM
            y = t % SPEC.dq_buffers
            tma.store_wait(SPEC.dq_buffers - 1)
            if SPEC.whole:
                _add_own(sum_desc, dq_desc, walk, keys, head, m * BM, line, t, y, S, SPEC)
            else:
                mbarrier.arrive(S.dq_empty.index(y), count=1)
                if SPEC.ordered:
                    wait_turn(counters + line // BM, turn_of(walk, m, sizes, SPEC))
                mbarrier.wait(S.dq_full.index(y), (t // SPEC.dq_buffers) & 1)
                tma_reduce_add(sum_desc, [line, 0], S.dq.index(y))
                if SPEC.ordered:
                    pass_turn(counters + line // BM)
        if SPEC.whole:
            settle()  # the next keys add to these sums
        start = keys.end
    tma.store_wait(0)


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
