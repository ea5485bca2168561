"""The device code of the kernel that owns keys and makes all gradients of heads up to 128.

A CTA owns 128 keys, each of two warpgroups 64 of them; a third one makes dQ (`backward_sums`).
The method is in backward.py.

Legend: D / D_v head dimensions padded to what is compiled, BM / BN rows of a tile of queries
and of keys.
"""

from triton.experimental import gluon
from triton.language.core import _aggregate as aggregate

from onchip.kernels.hopper.backward_pieces import Pieces, merge
from onchip.kernels.hopper.backward_sums import COLUMNS, TURNS, wait_turns
from onchip.kernels.hopper.backward_walk import (
    Edges,
    Sizes,
    Sources,
    is_whole,
    item_of,
    load_own,
    load_queries,
    num_steps,
    plan_keys,
    store_keys,
    tile_at,
)
from onchip.kernels.hopper.gluon_backward import capped, hide, widened
from onchip.kernels.hopper.gluon_names import (
    fence_async_shared,
    gl,
    mbarrier,
    new_barriers,
    tma,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)

PIECE = gl.constexpr(64)  # keys of a warpgroup


@aggregate
class Shared:
    """Tiles and barriers in shared memory."""

    k: gl.shared_memory_descriptor  # (2, 64, D); dK at the end
    v: gl.shared_memory_descriptor  # (2, 64, D_v); dV at the end
    q: gl.shared_memory_descriptor  # (STAGES, BM, D)
    do: gl.shared_memory_descriptor  # (STAGES, BM, D_v)
    lse: gl.shared_memory_descriptor  # (STAGES, BM), -LSE in base 2
    delta: gl.shared_memory_descriptor  # (STAGES, BM), -D
    ds: gl.shared_memory_descriptor  # (2 * DS_BUFFERS, 64, BM): dS^T of both warpgroups
    dq: gl.shared_memory_descriptor  # (DQ_BUFFERS, BM, 64) float32
    summed: gl.shared_memory_descriptor  # (2, BM, 64) float32: sums of dQ to be rounded
    kv_full: gl.shared_memory_descriptor  # (2,) K, V have come
    rows_full: gl.shared_memory_descriptor  # (STAGES,) Q, dO, LSE and D have come
    rows_empty: gl.shared_memory_descriptor  # (STAGES,) both have read them for the last time
    ds_full: gl.shared_memory_descriptor  # (DS_BUFFERS,)
    ds_empty: gl.shared_memory_descriptor
    dq_full: gl.shared_memory_descriptor  # (DQ_BUFFERS,)
    dq_empty: gl.shared_memory_descriptor
    k_free: gl.shared_memory_descriptor  # (1,) dQ has read K for the last time
    done: gl.shared_memory_descriptor  # (2 * KV_BUFFERS,) dK, dV are there
    sum_full: gl.shared_memory_descriptor  # (2,)
    turn: gl.shared_memory_descriptor  # (TURNS,) the sums before this CTA's are in memory
    turn_taken: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, k, v, q, do, lse, delta, ds, dq, summed, kv_full, rows_full, rows_empty,
        ds_full, ds_empty, dq_full, dq_empty, k_free, done, sum_full, turn, turn_taken,
    ):  # fmt: skip
        self.k = k
        self.v = v
        self.q = q
        self.do = do
        self.lse = lse
        self.delta = delta
        self.ds = ds
        self.dq = dq
        self.summed = summed
        self.kv_full = kv_full
        self.rows_full = rows_full
        self.rows_empty = rows_empty
        self.ds_full = ds_full
        self.ds_empty = ds_empty
        self.dq_full = dq_full
        self.dq_empty = dq_empty
        self.k_free = k_free
        self.done = done
        self.sum_full = sum_full
        self.turn = turn
        self.turn_taken = turn_taken


@gluon.jit
def keep(
    sources: Sources, dk_desc, dv_desc, counters, S: Shared, sizes: Sizes, SPEC: gl.constexpr
):  # fmt: skip
    """The warp that loads K and V, waits for turns where sums are ordered, and stores dK and dV."""
    if not SPEC.persistent:
        walk = plan_keys(gl.program_id(0), sizes, SPEC)
        _load_keys(sources, walk, 0, S, SPEC)
        if SPEC.ordered:
            wait_turns(counters, walk, 0, S, sizes, SPEC)
        if is_whole(gl.program_id(0), sizes, SPEC):
            _store_keys(dk_desc, dv_desc, walk, 0, S, SPEC)
    else:
        item = item_of(0, sizes)
        walk = plan_keys(item, sizes, SPEC)
        _load_keys(sources, walk, 0, S, SPEC)
        start = 0
        n = 0
        while item >= 0:
            walk = plan_keys(item, sizes, SPEC)
            item = item_of(n + 1, sizes)
            if SPEC.kv_buffers == 2:
                _load_keys_of(item, sources, n + 1, S, sizes, SPEC)
            if SPEC.ordered:
                wait_turns(counters, walk, start, S, sizes, SPEC)
                start += num_steps(walk, sizes)[0]
            _store_keys(dk_desc, dv_desc, walk, n, S, SPEC)
            n += 1
            if SPEC.kv_buffers == 1:
                _load_keys_of(item, sources, n, S, sizes, SPEC)


@gluon.jit
def _load_keys_of(item, sources, n, S, sizes, SPEC: gl.constexpr):
    """Starts to load K and V of the CTA's n-th tile, if there is one."""
    if item >= 0:
        walk = plan_keys(item, sizes, SPEC)
        _load_keys(sources, walk, n, S, SPEC)


@gluon.jit
def _load_keys(sources, walk, n, S, SPEC: gl.constexpr):
    """Starts to load K and V of the CTA's n-th tile."""
    x = n % SPEC.kv_buffers
    load_own(sources.k, S.k, S.kv_full.index(x * 2), x, walk, PIECE, SPEC.dim, SPEC)
    load_own(sources.v, S.v, S.kv_full.index(x * 2 + 1), x, walk, PIECE, SPEC.dim_v, SPEC)


@gluon.jit
def _store_keys(dk_desc, dv_desc, walk, n, S, SPEC: gl.constexpr):
    """Stores dK and dV of the CTA's n-th tile, when they are there."""
    x = n % SPEC.kv_buffers
    phase = (n // SPEC.kv_buffers) & 1
    mbarrier.wait(S.done.index(x * 2 + 1), phase)
    for h in gl.static_range(2):
        key = walk.own + h * PIECE
        store_keys(dv_desc, walk, walk.head, key, S.v.index(x * 2 + h), PIECE, SPEC.dim_v)
    mbarrier.wait(S.done.index(x * 2), phase)
    for h in gl.static_range(2):
        key = walk.own + h * PIECE
        store_keys(dk_desc, walk, walk.head, key, S.k.index(x * 2 + h), PIECE, SPEC.dim)
    tma.store_wait(0)


@gluon.jit
def load(sources: Sources, S: Shared, sizes: Sizes, SPEC: gl.constexpr):
    """The warp that loads tiles of queries."""
    if not SPEC.persistent:
        walk = plan_keys(gl.program_id(0), sizes, SPEC)
        end, _ = num_steps(walk, sizes)
        for t in range(end):
            _load_rows(sources, S, walk, t, t, sizes, SPEC)
    else:
        item = item_of(0, sizes)
        start = 0
        n = 0
        while item >= 0:
            walk = plan_keys(item, sizes, SPEC)
            end = start + num_steps(walk, sizes)[0]
            for t in range(start, end):
                _load_rows(sources, S, walk, t - start, t, sizes, SPEC)
            start = end
            n += 1
            item = item_of(n, sizes)


@gluon.jit
def _load_rows(sources, S, walk, i, t, sizes, SPEC: gl.constexpr):
    """Loads Q, dO, LSE and D of a walk's i-th step, step t of all, when the last ones were read."""
    BM: gl.constexpr = SPEC.block_m
    D: gl.constexpr = SPEC.dim
    DV: gl.constexpr = SPEC.dim_v
    head, m = tile_at(walk, i, sizes.group)
    head += walk.head * sizes.group
    row = m * BM
    line = walk.line + head * walk.stride + row
    x = t % SPEC.stages
    bar = S.rows_full.index(x)
    mbarrier.wait(S.rows_empty.index(x), ((t // SPEC.stages) & 1) ^ 1)
    mbarrier.expect(bar, BM * (D + DV) * 2 + 2 * BM * 4)
    load_queries(sources.q, walk, head, row, bar, S.q.index(x), BM, D)
    tma_load(sources.lse, [line], bar, S.lse.index(x))
    load_queries(sources.do, walk, head, row, bar, S.do.index(x), BM, DV)
    tma_load(sources.delta, [line], bar, S.delta.index(x))


@gluon.jit
def of_queries(line, L: gl.constexpr, SPEC: gl.constexpr):
    """LSE or D of a tile's 64 queries, the columns of a product in layout L."""
    if SPEC.fours:
        # A thread has columns 2 i and 2 i + 1 of every 8: those of two 8s lie together, so that
        # 4 loads of 16 bytes do what 8 of 8 bytes would, and a load takes shared memory a clock.
        STORED: gl.constexpr = gl.DistributedLinearLayout(
            [[1], [2], [16], [32]], [[4], [8], [0], [0], [0]], [[0], [0]], [], [64]
        )
        x = line.load(STORED).reshape([4, 4, 2, 2]).permute((0, 2, 1, 3)).reshape([64])
        return gl.convert_layout(x, gl.SliceLayout(0, L), assert_trivial=True)
    else:
        return line.load(gl.SliceLayout(0, L))


@gluon.jit
def _product(own, tile, line, STARTS: gl.constexpr, SPEC: gl.constexpr):
    """own tile^T (64, BM), begun: from the line's numbers on if it STARTS there, else from 0."""
    BM: gl.constexpr = SPEC.block_m
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    if STARTS:
        first = of_queries(line, L, SPEC)
        start = gl.expand_dims(first, 0).broadcast_to([PIECE, BM])
    else:
        start = gl.zeros([PIECE, BM], gl.float32, L)
    return warpgroup_mma(own, tile.permute((1, 0)), start, use_acc=STARTS, is_async=True)


@gluon.jit
def compute(
    W: gl.constexpr, S: Shared, sizes: Sizes, shared: Pieces, scale, factor, cap,
    SPEC: gl.constexpr,
):  # fmt: skip
    """A warpgroup of 64 keys: their dK and dV, and dS for dQ."""
    if not SPEC.persistent:
        _tile(W, gl.program_id(0), 0, 0, S, sizes, shared, scale, factor, cap, SPEC)
    else:
        item = item_of(0, sizes)
        start = 0
        n = 0
        while item >= 0:
            start = _tile(W, item, n, start, S, sizes, shared, scale, factor, cap, SPEC)
            n += 1
            item = item_of(n, sizes)


@gluon.jit
def _tile(
    W: gl.constexpr, item, n, start, S: Shared, sizes: Sizes, shared, scale, factor, cap,
    SPEC: gl.constexpr,
):  # fmt: skip
    """The CTA's n-th tile of keys, from step `start` on; returns the step behind its last one."""
    D: gl.constexpr = SPEC.dim
    DV: gl.constexpr = SPEC.dim_v
    BM: gl.constexpr = SPEC.block_m
    K_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    V_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    walk = plan_keys(item, sizes, SPEC)
    end, masked = num_steps(walk, sizes)
    row = walk.first * BM + walk.shift - walk.own - W * PIECE
    limits = Edges(
        walk.edges, walk.full - walk.first, walk.inner, row + sizes.right, row - sizes.left,
        walk.length_k - walk.own - W * PIECE,
    )  # fmt: skip
    x = n % SPEC.kv_buffers
    phase = (n // SPEC.kv_buffers) & 1
    k_tile = S.k.index(x * 2 + W)
    v_tile = S.v.index(x * 2 + W)
    dk = gl.zeros([PIECE, D], gl.float32, K_L)
    dv = gl.zeros([PIECE, DV], gl.float32, V_L)
    mbarrier.wait(S.kv_full.index(x * 2), phase)
    mbarrier.wait(S.kv_full.index(x * 2 + 1), phase)
    if SPEC.holds_keys:
        S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
        k = k_tile.load(gl.DotOperandLayout(0, S_L, 2))
        v = v_tile.load(gl.DotOperandLayout(0, S_L, 2))
    else:
        k = k_tile
        v = v_tile
    first = start
    behind = start + masked
    end += start
    if SPEC.turns_back:
        first = gl.where(walk.back, end - masked, start)
        behind = gl.where(walk.back, end, behind)
        for t in range(start, first):
            dk, dv = _step(W, k, v, 0, limits, dk, dv, t, factor, cap, S, SPEC, False)
    if SPEC.masks:
        for h in range(sizes.group):
            base = first + h * walk.edges
            hidden = _hidden(walk, W, sizes, SPEC)
            before = gl.where(walk.back, 0, hidden)
            seen = walk.edges - gl.where(walk.back, hidden, 0)
            for j in range(before):
                _idle(W, base + j, S, SPEC)
            for j in range(before, seen):
                at = gl.where(walk.back, walk.edges - 1 - j, j)
                dk, dv = _step(W, k, v, at, limits, dk, dv, base + j, factor, cap, S, SPEC, True)
            if SPEC.turns_back:
                for j in range(seen, walk.edges):
                    _idle(W, base + j, S, SPEC)
    for t in range(behind, end):
        dk, dv = _step(W, k, v, 0, limits, dk, dv, t, factor, cap, S, SPEC, False)
    if is_whole(item, sizes, SPEC):
        _hand_over(k_tile, v_tile, dk * scale, dv, x, phase, S)
    elif SPEC.pieces > 1:
        merge(W, item, dk * scale, dv, walk, shared, sizes, SPEC)
    return end


@gluon.jit
def _hand_over(k_tile, v_tile, dk, dv, x, phase, S):
    """dK and dV of a warpgroup's keys to `keep`, over its K and V."""
    # V's piece is this warpgroup's own; `make_dq` reads all of K.
    v_tile.store(dv.to(S.v.dtype))
    fence_async_shared()
    mbarrier.arrive(S.done.index(x * 2 + 1), count=1)
    mbarrier.wait(S.k_free.index(x), phase)
    k_tile.store(dk.to(S.k.dtype))
    fence_async_shared()
    mbarrier.arrive(S.done.index(x * 2), count=1)


@gluon.jit
def _hidden(walk, W: gl.constexpr, sizes, SPEC: gl.constexpr):
    """Masked steps of a head, the first ones, of which the piece's keys see nothing."""
    key = walk.own + W * PIECE
    hidden = 0
    if SPEC.has_right:
        first = gl.maximum(key - walk.shift - sizes.right, 0) // SPEC.block_m
        hidden = gl.minimum(gl.maximum(first - walk.first, 0), walk.edges)
    if SPEC.has_tail:
        hidden = gl.where(key >= walk.length_k, walk.edges, hidden)
    return hidden


@gluon.jit
def _idle(W: gl.constexpr, t, S, SPEC: gl.constexpr):
    """A step whose queries see none of the piece's keys."""
    BM: gl.constexpr = SPEC.block_m
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    stage = t % SPEC.stages
    x = t % SPEC.ds_buffers
    mbarrier.wait(S.rows_full.index(stage), (t // SPEC.stages) & 1)
    mbarrier.arrive(S.rows_empty.index(stage), count=1)
    mbarrier.wait(S.ds_empty.index(x), ((t // SPEC.ds_buffers) & 1) ^ 1)
    S.ds.index(x * 2 + W).store(gl.zeros([PIECE, BM], S.k.dtype, L))
    fence_async_shared()
    mbarrier.arrive(S.ds_full.index(x), count=1)


@gluon.jit
def _step(
    W: gl.constexpr, k, v, j, limits, dk, dv, t, factor, cap, S, SPEC: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """One tile of queries."""
    BM: gl.constexpr = SPEC.block_m
    DT: gl.constexpr = S.k.dtype
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    A_L: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    stage = t % SPEC.stages
    x = t % SPEC.ds_buffers
    q = S.q.index(stage)
    do = S.do.index(stage)
    lse = S.lse.index(stage)
    delta = S.delta.index(stage)
    mbarrier.wait(S.rows_full.index(stage), (t // SPEC.stages) & 1)
    s_new = _product(k, q, lse, SPEC.starts_at_lse, SPEC)
    if SPEC.late:
        s = warpgroup_mma_wait(0, deps=[s_new])
    else:
        dp_new = _product(v, do, delta, False, SPEC)
        s = warpgroup_mma_wait(1, deps=[s_new])
    if SPEC.has_softcap:
        s, slope = capped(s, factor)
        s = s * cap
    else:
        s = s * factor
    if not SPEC.starts_at_lse:
        s += of_queries(lse, S_L, SPEC)[None, :]
    if MASKED:
        if SPEC.high_edges:
            j += gl.where(j < limits.low, 0, limits.inner)
        row = j * BM
        right, left = limits.right + row, limits.left + row
        if SPEC.late:
            # Behind the exponentials LLVM would mask P's 16-bit numbers: 40 instructions more.
            s = hide(s, right, left, limits.tail, float("-inf"), 1, S_L, SPEC)
    p = gl.exp2(s)
    if MASKED and not SPEC.late:
        p = hide(p, right, left, limits.tail, 0.0, 1, S_L, SPEC)
    p16 = p.to(DT)
    if SPEC.late:
        dp_new = _product(v, do, delta, True, SPEC)
    dv_new = warpgroup_mma(gl.convert_layout(p16, A_L), do, dv, is_async=True)
    if SPEC.has_softcap:
        p = p * slope
    if SPEC.late:
        p = widened(p.to(DT))
    dp = warpgroup_mma_wait(1, deps=[dp_new])
    if not SPEC.late:
        dp += of_queries(delta, S_L, SPEC)[None, :]
    ds = (p * dp).to(DT)
    dk_new = warpgroup_mma(gl.convert_layout(ds, A_L), q, dk, is_async=True)
    mbarrier.wait(S.ds_empty.index(x), ((t // SPEC.ds_buffers) & 1) ^ 1)
    S.ds.index(x * 2 + W).store(ds)
    fence_async_shared()
    mbarrier.arrive(S.ds_full.index(x), count=1)
    dk, dv = warpgroup_mma_wait(0, deps=[dk_new, dv_new])
    mbarrier.arrive(S.rows_empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def new_shared(lse_desc, dq_desc, DT: gl.constexpr, SPEC: gl.constexpr):
    """Shared memory of a CTA, its barriers ready."""
    BM: gl.constexpr = SPEC.block_m
    D: gl.constexpr = SPEC.dim
    DV: gl.constexpr = SPEC.dim_v
    ST: gl.constexpr = SPEC.stages
    DS: gl.constexpr = SPEC.ds_buffers
    DQ: gl.constexpr = SPEC.dq_buffers
    KB: gl.constexpr = SPEC.kv_buffers
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # A barrier that nobody uses must not begin: Triton (3.6) gives its memory to scratch, and PTX
    # wants it ended before. A counter that went through there came out as the barrier's state.
    sum_full = new_barriers(2, 1)
    turn = sum_full
    turn_taken = sum_full
    if SPEC.ordered:
        turn = new_barriers(TURNS, 1)
        turn_taken = new_barriers(TURNS, 1)
    S = Shared(
        gl.allocate_shared_memory(DT, [2 * KB, PIECE, D], TILE),
        gl.allocate_shared_memory(DT, [2 * KB, PIECE, DV], TILE),
        gl.allocate_shared_memory(DT, [ST, BM, D], TILE),
        gl.allocate_shared_memory(DT, [ST, BM, DV], TILE),
        gl.allocate_shared_memory(gl.float32, [ST, BM], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [ST, BM], lse_desc.layout),
        gl.allocate_shared_memory(DT, [2 * DS, PIECE, BM], TILE),
        gl.allocate_shared_memory(gl.float32, [DQ, BM, COLUMNS], dq_desc.layout),
        gl.allocate_shared_memory(gl.float32, [2, BM, COLUMNS], dq_desc.layout),
        new_barriers(2 * KB, 1),
        new_barriers(ST, 1),
        new_barriers(ST, 2),
        new_barriers(DS, 2),
        new_barriers(DS, 1),
        new_barriers(DQ, 1),
        new_barriers(DQ, 1),
        new_barriers(KB, 1),
        new_barriers(2 * KB, 2),
        sum_full,
        turn,
        turn_taken,
    )
    fence_async_shared()
    return S
