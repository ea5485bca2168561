"""The device code of the Hopper backward that makes dQ and its sum in memory.

Functions take `backward_pair.Shared` as S.

Legend: D head dimension padded to what is compiled, BM rows of a tile of queries.
"""

from triton.experimental import gluon

from onchip.kernels.hopper.backward_walk import (
    Sizes,
    item_of,
    num_steps,
    plan_keys,
    tile_at,
    turn_of,
    unit_of,
)
from onchip.kernels.hopper.gluon_backward import fence_async, pass_turn, wait_turn
from onchip.kernels.hopper.gluon_names import (
    as_tile,
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
    if not SPEC.persistent:
        _make_tile(gl.program_id(0), 0, 0, S, sizes, SPEC)
    else:
        item = item_of(0, sizes)
        start = 0
        n = 0
        while item >= 0:
            start = _make_tile(item, n, start, S, sizes, SPEC)
            n += 1
            item = item_of(n, sizes)


@gluon.jit
def _make_tile(item, n, start, S, sizes: Sizes, SPEC: gl.constexpr):
    """dQ by the CTA's n-th tile of keys, from step `start` on; returns the step behind."""
    PARTS: gl.constexpr = SPEC.dim // COLUMNS
    end = start + num_steps(plan_keys(item, sizes, SPEC), sizes)[0]
    slot = n % SPEC.kv_buffers
    mbarrier.wait(S.kv_full.index(slot * 2), (n // SPEC.kv_buffers) & 1)
    for t in range(start, end):
        x = t % SPEC.ds_buffers
        mbarrier.wait(S.ds_full.index(x), (t // SPEC.ds_buffers) & 1)
        for c in gl.static_range(PARTS):
            u = t * PARTS + c
            y = u % SPEC.dq_buffers
            dq = _products(c, slot, x, S, SPEC)
            if c == PARTS - 1:
                mbarrier.arrive(S.ds_empty.index(x), count=1)
            mbarrier.wait(S.dq_empty.index(y), (u // SPEC.dq_buffers) & 1)
            store_halves(S.dq.index(y), dq)
            fence_async_shared()
            mbarrier.arrive(S.dq_full.index(y), count=1)
    mbarrier.arrive(S.k_free.index(slot), count=1)
    return end


@gluon.jit
def store_halves(to, x):
    """Stores a part of dQ in shared memory; of every 8 columns the even ones come first.

    So it is made of whole `stmatrix`, as pairs of 16-bit numbers. With the columns in order, two
    rows would meet in every bank.
    """
    ROWS: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    bits = gl.cast(x, gl.int32, bitcast=True)
    bits = bits.reshape([ROWS, C // 8, 4, 2]).permute((0, 1, 3, 2)).reshape([ROWS, C])
    halves = gl.join(bits.to(gl.int16), (bits >> 16).to(gl.int16)).reshape([ROWS, 2 * C])
    as_tile(to, gl.int16, [ROWS, 2 * C], gl.NVMMASharedLayout(128, 16, 2)).store(halves)


@gluon.jit
def in_order(x, L: gl.constexpr):
    """The columns of what `store_halves` stored, in order again; a thread has 8 of them."""
    ROWS: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    x = x.reshape([ROWS, C // 8, 2, 4]).permute((0, 1, 3, 2)).reshape([ROWS, C])
    return gl.convert_layout(x, L, assert_trivial=True)


@gluon.jit
def _products(c: gl.constexpr, slot, x, S, SPEC: gl.constexpr):
    """dQ's columns of part c by the CTA's keys."""
    BM: gl.constexpr = SPEC.block_m
    C: gl.constexpr = COLUMNS
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    dq = gl.zeros([BM, C], gl.float32, L)
    for h in gl.static_range(2):
        k = S.k.index(slot * 2 + h)
        if SPEC.dim > C:
            k = k.slice(c * C, C, dim=1)
        dq = warpgroup_mma(
            S.ds.index(x * 2 + h).permute((1, 0)), k, dq, use_acc=h > 0, is_async=True
        )
    return warpgroup_mma_wait(0, deps=[dq])


@gluon.jit
def add_dq(sum_desc, counters, S, sizes: Sizes, SPEC: gl.constexpr):
    """The warp that adds dQ to the float32 sum in memory, once that is cleared."""
    if SPEC.passes_at_once:
        BUFFERS: gl.constexpr = SPEC.dq_buffers
        for y in gl.static_range(BUFFERS):
            mbarrier.arrive(S.dq_empty.index(y), count=1)
    if not SPEC.persistent:
        _add_tile(gl.program_id(0), 0, sum_desc, counters, S, sizes, SPEC)
    else:
        item = item_of(0, sizes)
        start = 0
        n = 0
        while item >= 0:
            start = _add_tile(item, start, sum_desc, counters, S, sizes, SPEC)
            n += 1
            item = item_of(n, sizes)


@gluon.jit
def _add_tile(item, start, sum_desc, counters, S, sizes: Sizes, SPEC: gl.constexpr):
    """Adds a tile of keys' dQ, from step `start` on; returns the step behind its last one."""
    BM: gl.constexpr = SPEC.block_m
    PARTS: gl.constexpr = SPEC.dim // COLUMNS
    walk = plan_keys(item, sizes, SPEC)
    end = start + num_steps(walk, sizes)[0]
    unit = unit_of(item, sizes, SPEC)
    turns = counters + sizes.units
    before = 0  # the last step's counter
    wait_turn(counters + unit.index, unit.ctas)
    fence_async()
    for t in range(start, end):
        head, m = tile_at(walk, t - start, sizes.group)
        head += walk.head * sizes.group
        line = walk.line + head * walk.stride + m * BM
        _add(sum_desc, line, t, S, SPEC)
        if SPEC.passes_at_once:
            pass_turn(turns + line // BM, 0)
        elif SPEC.ordered:
            # A step later, when it has long been in memory.
            if t > start:
                pass_turn(turns + before, PARTS)
            before = line // BM
    if SPEC.ordered and not SPEC.passes_at_once:  # noqa: SIM102 (known when compiling)
        if end > start:
            pass_turn(turns + before, 0)
    pass_turn(counters + unit.index, 0)
    return end


@gluon.jit
def _add(sum_desc, line, t, S, SPEC: gl.constexpr):
    """A step of `add_dq`."""
    PARTS: gl.constexpr = SPEC.dim // COLUMNS
    for c in gl.static_range(PARTS):
        u = t * PARTS + c
        y = u % SPEC.dq_buffers
        if not SPEC.passes_at_once:
            tma.store_wait(SPEC.dq_buffers - 1)
            mbarrier.arrive(S.dq_empty.index(y), count=1)
        if SPEC.ordered and c == 0:
            x = t % TURNS
            mbarrier.wait(S.turn.index(x), (t // TURNS) & 1)
            mbarrier.arrive(S.turn_taken.index(x), count=1)
        mbarrier.wait(S.dq_full.index(y), (u // SPEC.dq_buffers) & 1)
        tma_reduce_add(sum_desc, [line, c * COLUMNS], S.dq.index(y))
        if SPEC.passes_at_once:
            # Before the turn is passed, which takes most of a step.
            tma.store_wait(0)
            mbarrier.arrive(S.dq_empty.index(y), count=1)


@gluon.jit
def wait_turns(counters, walk, start, S, sizes: Sizes, SPEC: gl.constexpr):
    """Waits for this CTA's turn at each tile of dQ, ahead of `add_dq`: the counter's way from
    memory takes half of a step."""
    for t in range(start, start + num_steps(walk, sizes)[0]):
        head, m = tile_at(walk, t - start, sizes.group)
        line = walk.line + (walk.head * sizes.group + head) * walk.stride + m * SPEC.block_m
        x = t % TURNS
        mbarrier.wait(S.turn_taken.index(x), ((t // TURNS) & 1) ^ 1)
        turn = turn_of(walk, m, sizes, SPEC)
        wait_turn(counters + sizes.units + line // SPEC.block_m, turn)
        mbarrier.arrive(S.turn.index(x), count=1)
