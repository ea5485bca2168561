"""The device code of the Hopper backward that makes dQ and its sum in memory.

Functions take `backward_pair.Shared` as S.

Legend: D head dimension padded to what is compiled, BM rows of a tile of queries.
"""

from triton.experimental import gluon

from onchip.kernels.hopper.backward_walk import (
    Sizes,
    num_steps,
    own_unit,
    plan_keys,
    tile_at,
    turn_of,
)
from onchip.kernels.hopper.gluon_backward import fence_async, pass_turn, wait_turn
from onchip.kernels.hopper.gluon_names import (
    fence_async_shared,
    gl,
    mbarrier,
    tma,
    tma_reduce_add,
    warpgroup_mma,
    warpgroup_mma_wait,
)

#: Columns of dQ that are made and added at a time: with all 128 the warpgroup would need 96
#: registers, which leaves less than the 208 that the others need.
COLUMNS = gl.constexpr(64)
#: Steps for which `wait_turns` may be ahead.
TURNS = gl.constexpr(2)


@gluon.jit
def make_dq(S, sizes: Sizes, SPEC: gl.constexpr):
    """The warpgroup of dQ = dS K, which it hands to `add_dq`."""
    PARTS: gl.constexpr = SPEC.dim // COLUMNS
    end, _ = num_steps(plan_keys(sizes, SPEC), sizes)
    mbarrier.wait(S.kv_full.index(0), 0)
    for t in range(end):
        x = t % SPEC.ds_buffers
        mbarrier.wait(S.ds_full.index(x), (t // SPEC.ds_buffers) & 1)
        for c in gl.static_range(PARTS):
            u = t * PARTS + c
            y = u % SPEC.dq_buffers
            dq = _products(c, x, S, SPEC)
            if c == PARTS - 1:
                mbarrier.arrive(S.ds_empty.index(x), count=1)
            mbarrier.wait(S.dq_empty.index(y), (u // SPEC.dq_buffers) & 1)
            S.dq.index(y).store(dq)
            fence_async_shared()
            mbarrier.arrive(S.dq_full.index(y), count=1)
    mbarrier.arrive(S.k_free.index(0), count=1)


@gluon.jit
def _products(c: gl.constexpr, x, S, SPEC: gl.constexpr):
    """dQ's columns of part c by the CTA's keys."""
    BM: gl.constexpr = SPEC.block_m
    C: gl.constexpr = COLUMNS
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    dq = gl.zeros([BM, C], gl.float32, L)
    for h in gl.static_range(2):
        k = S.k.index(h)
        if SPEC.dim > C:
            k = k.slice(c * C, C, dim=1)
        dq = warpgroup_mma(
            S.ds.index(x * 2 + h).permute((1, 0)), k, dq, use_acc=h > 0, is_async=True
        )
    return warpgroup_mma_wait(0, deps=[dq])


@gluon.jit
def add_dq(sum_desc, counters, S, sizes: Sizes, SPEC: gl.constexpr):
    """The warp that adds dQ to the float32 sum in memory, once that is cleared."""
    BM: gl.constexpr = SPEC.block_m
    PARTS: gl.constexpr = SPEC.dim // COLUMNS
    walk = plan_keys(sizes, SPEC)
    end, _ = num_steps(walk, sizes)
    unit = own_unit(sizes, SPEC)
    turns = counters + sizes.units
    before = 0  # the last step's counter
    wait_turn(counters + unit.index, unit.ctas)
    fence_async()
    for t in range(end):
        head, m = tile_at(walk, t, sizes.group)
        head += walk.head * sizes.group
        line = walk.line + head * walk.stride + m * BM
        _add(sum_desc, line, t, S, SPEC)
        if SPEC.ordered:
            # A step later, when it has long been in memory.
            if t > 0:
                pass_turn(turns + before, PARTS)
            before = line // BM
    if SPEC.ordered:  # noqa: SIM102 (known when compiling)
        if end > 0:
            pass_turn(turns + before, 0)
    pass_turn(counters + unit.index, 0)


@gluon.jit
def _add(sum_desc, line, t, S, SPEC: gl.constexpr):
    """A step of `add_dq`."""
    PARTS: gl.constexpr = SPEC.dim // COLUMNS
    for c in gl.static_range(PARTS):
        u = t * PARTS + c
        y = u % SPEC.dq_buffers
        tma.store_wait(SPEC.dq_buffers - 1)
        mbarrier.arrive(S.dq_empty.index(y), count=1)
        if SPEC.ordered and c == 0:
            x = t % TURNS
            mbarrier.wait(S.turn.index(x), (t // TURNS) & 1)
            mbarrier.arrive(S.turn_taken.index(x), count=1)
        mbarrier.wait(S.dq_full.index(y), (u // SPEC.dq_buffers) & 1)
        tma_reduce_add(sum_desc, [line, c * COLUMNS], S.dq.index(y))


@gluon.jit
def wait_turns(counters, walk, S, sizes: Sizes, SPEC: gl.constexpr):
    """Waits for this CTA's turn at each tile of dQ, ahead of `add_dq`: the counter's way from
    memory takes half of a step."""
    end, _ = num_steps(walk, sizes)
    for t in range(end):
        head, m = tile_at(walk, t, sizes.group)
        line = walk.line + (walk.head * sizes.group + head) * walk.stride + m * SPEC.block_m
        x = t % TURNS
        mbarrier.wait(S.turn_taken.index(x), ((t // TURNS) & 1) ^ 1)
        turn = turn_of(walk, m, sizes, SPEC)
        wait_turn(counters + sizes.units + line // SPEC.block_m, turn)
        mbarrier.arrive(S.turn.index(x), count=1)
