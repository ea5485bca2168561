"""The device code of the kernel that owns keys: dK, dV, and what they add to dQ.

A CTA owns BN keys in pieces of 64. One warpgroup makes S^T, P^T and dV, another one dP^T, dS^T
and dK, a third one dQ; the method is in backward.py.

Legend: D / D_v head dimensions padded to what is compiled, BM / BN rows of a tile of queries
and of keys.
"""

from triton.experimental import gluon
from triton.language.core import _aggregate as aggregate

from onchip.kernels.hopper.backward_walk import (
    Edges,
    Sizes,
    Sources,
    edge_index,
    load_own,
    load_tile,
    plan_keys,
    store_keys,
    tile_at,
    turn_of,
)
from onchip.kernels.hopper.gluon_backward import (
    capped,
    hide,
    new_barriers,
    pass_turn,
    wait_turn,
)
from onchip.kernels.hopper.gluon_names import (
    fence_async_shared,
    gl,
    mbarrier,
    tma,
    tma_reduce_add,
    warpgroup_mma,
    warpgroup_mma_wait,
)

PIECE = gl.constexpr(64)  # keys of a piece: rows of one wgmma
DS_BUFFERS = gl.constexpr(4)


@aggregate
class Shared:
    """Tiles and barriers in shared memory."""

    k: gl.shared_memory_descriptor  # (PIECES, 64, D); dK at the end
    v: gl.shared_memory_descriptor  # (PIECES, 64, D_v); dV at the end
    q: gl.shared_memory_descriptor  # (STAGES, BM, D)
    do: gl.shared_memory_descriptor  # (STAGES, BM, D_v)
    lse: gl.shared_memory_descriptor  # (STAGES, BM), -LSE in base 2
    delta: gl.shared_memory_descriptor  # (STAGES, BM), -D
    p: gl.shared_memory_descriptor  # (P_BUFFERS, 64, BM): P^T on its way from `score` to `gradient`
    ds: gl.shared_memory_descriptor  # (4, 64, BM): dS^T on its way to `make_dq`
    dq: gl.shared_memory_descriptor  # (D / 64, BM, 64) float32
    kv_full: gl.shared_memory_descriptor  # (2,) K, V have come
    q_full: gl.shared_memory_descriptor  # (STAGES,)
    do_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor  # (STAGES,) both have read it for the last time
    do_empty: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor  # (P_BUFFERS,)
    p_empty: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor  # (4,)
    ds_empty: gl.shared_memory_descriptor
    done: gl.shared_memory_descriptor  # (2,) dV, dK are there
    v_free: gl.shared_memory_descriptor  # (1,) V has been read for the last time
    k_free: gl.shared_memory_descriptor  # (1,) K has, by `make_dq`

    @gluon.constexpr_function
    def __init__(
        self, k, v, q, do, lse, delta, p, ds, dq, kv_full, q_full, do_full, q_empty, do_empty,
        p_full, p_empty, ds_full, ds_empty, done, v_free, k_free,
    ):  # fmt: skip
        self.k = k
        self.v = v
        self.q = q
        self.do = do
        self.lse = lse
        self.delta = delta
        self.p = p
        self.ds = ds
        self.dq = dq
        self.kv_full = kv_full
        self.q_full = q_full
        self.do_full = do_full
        self.q_empty = q_empty
        self.do_empty = do_empty
        self.p_full = p_full
        self.p_empty = p_empty
        self.ds_full = ds_full
        self.ds_empty = ds_empty
        self.done = done
        self.v_free = v_free
        self.k_free = k_free


@gluon.jit
def load(
    sources: Sources, dk_desc, dv_desc, S: Shared, sizes: Sizes, SPEC: gl.constexpr
):  # fmt: skip
    """The load warp: K and V once, then tiles of queries; at the end it stores dK and dV."""
    N: gl.constexpr = SPEC.pieces
    D: gl.constexpr = SPEC.dim
    DV: gl.constexpr = SPEC.dim_v
    walk = plan_keys(sizes, 0, SPEC)
    total = (walk.edges + walk.inner) * sizes.group
    load_own(sources.k, S.k, S.kv_full.index(0), 0, walk, PIECE, D, SPEC)
    if total > 0:  # S wants Q before dP wants V
        load_tile(sources, S, walk, 0, 0, sizes, SPEC)
    load_own(sources.v, S.v, S.kv_full.index(1), 0, walk, PIECE, DV, SPEC)
    for i in range(1, total):
        load_tile(sources, S, walk, i, i, sizes, SPEC)
    mbarrier.wait(S.done.index(0), 0)
    for h in gl.static_range(N):
        store_keys(dv_desc, walk, walk.head, walk.own + h * PIECE, S.v.index(h), PIECE, DV)
    mbarrier.wait(S.done.index(1), 0)
    for h in gl.static_range(N):
        store_keys(dk_desc, walk, walk.head, walk.own + h * PIECE, S.k.index(h), PIECE, D)
    tma.store_wait(0)


@gluon.jit
def _start(stats, on: gl.constexpr, BM: gl.constexpr, L: gl.constexpr):
    """Statistics of BM queries as an accumulator (64, BM), or zeros."""
    if on:
        return gl.expand_dims(stats.load(gl.SliceLayout(0, L)), 0).broadcast_to([PIECE, BM])
    else:
        return gl.zeros([PIECE, BM], gl.float32, L)


@gluon.jit
def _against(
    own, other, stats, full, h: gl.constexpr, i, total, ON: gl.constexpr, SPEC: gl.constexpr
):  # fmt: skip
    """Own piece h times step i's tile of queries, under way; of whatever is there when there is no
    such step."""
    BM: gl.constexpr = SPEC.block_m
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    stage = i % SPEC.stages
    if h == 0:
        mbarrier.wait(full.index(stage), (i // SPEC.stages) & 1, pred=i < total)
    start = _start(stats.index(stage), ON, BM, L)
    return warpgroup_mma(
        own.index(h), other.index(stage).permute((1, 0)), start, use_acc=ON, is_async=True
    )


@gluon.jit
def _scores(h: gl.constexpr, i, total, S, SPEC: gl.constexpr):
    """S^T of a piece and step i."""
    return _against(S.k, S.q, S.lse, S.q_full, h, i, total, SPEC.starts_at_lse, SPEC)


@gluon.jit
def _products(h: gl.constexpr, i, total, S, SPEC: gl.constexpr):
    """dP^T of a piece and step i."""
    return _against(S.v, S.do, S.delta, S.do_full, h, i, total, SPEC.starts_at_delta, SPEC)


@gluon.jit
def score(S: Shared, sizes: Sizes, factor, cap, SPEC: gl.constexpr):
    """The warpgroup of S and P: dV += P^T dO; P goes to the next one."""
    DV: gl.constexpr = SPEC.dim_v
    BM: gl.constexpr = SPEC.block_m
    V_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    walk = plan_keys(sizes, 0, SPEC)
    edges = walk.edges * sizes.group
    total = edges + walk.inner * sizes.group
    row = walk.first * BM + walk.shift - walk.own
    limits = Edges(
        walk.edges, walk.full - walk.first, walk.inner, row + sizes.right, row - sizes.left,
        walk.length_k - walk.own,
    )  # fmt: skip
    dv0 = gl.zeros([PIECE, DV], gl.float32, V_L)
    dv1 = dv0
    mbarrier.wait(S.kv_full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=[_scores(0, 0, total, S, SPEC)])
    if SPEC.masks:
        # A loop of their own: a mask in the one loop spills 25 registers at D = 128 (triton 3.6).
        for i in range(edges):
            s, dv0 = _score_piece(0, s, dv0, i, total, limits, factor, cap, S, SPEC, True)
            if SPEC.pieces == 2:
                s, dv1 = _score_piece(1, s, dv1, i, total, limits, factor, cap, S, SPEC, True)
    for i in range(edges, total):
        s, dv0 = _score_piece(0, s, dv0, i, total, limits, factor, cap, S, SPEC, False)
        if SPEC.pieces == 2:
            s, dv1 = _score_piece(1, s, dv1, i, total, limits, factor, cap, S, SPEC, False)
    mbarrier.wait(S.v_free.index(0), 0)
    S.v.index(0).store(dv0.to(S.v.dtype))
    if SPEC.pieces == 2:
        S.v.index(1).store(dv1.to(S.v.dtype))
    fence_async_shared()
    mbarrier.arrive(S.done.index(0), count=1)


@gluon.jit
def _score_piece(
    h: gl.constexpr, s, dv, i, total, limits, factor, cap, S, SPEC: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    BM: gl.constexpr = SPEC.block_m
    DT: gl.constexpr = S.k.dtype
    LAST: gl.constexpr = h == SPEC.pieces - 1
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    A_L: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    stage = i % SPEC.stages
    j = i * SPEC.pieces + h
    x = j % SPEC.p_buffers
    if SPEC.has_softcap:
        s, slope = capped(s, factor)
        s = s * cap
    else:
        s = s * factor
    if not SPEC.starts_at_lse:
        s += S.lse.index(stage).load(gl.SliceLayout(0, S_L))[None, :]
    p = gl.exp2(s)
    if MASKED:
        row = edge_index(limits, i, SPEC) * BM - h * PIECE
        p = hide(p, limits.right + row, limits.left + row, limits.tail - h * PIECE, 1, S_L, SPEC)
    p16 = p.to(DT)
    if h == 0:
        mbarrier.wait(S.do_full.index(stage), (i // SPEC.stages) & 1)
    dv_new = warpgroup_mma(gl.convert_layout(p16, A_L), S.do.index(stage), dv, is_async=True)
    if SPEC.has_softcap:
        p16 = (p * slope).to(DT)
    mbarrier.wait(S.p_empty.index(x), ((j // SPEC.p_buffers) & 1) ^ 1)
    S.p.index(x).store(p16)
    mbarrier.arrive(S.p_full.index(x), count=1)
    if LAST:
        mbarrier.arrive(S.q_empty.index(stage), count=1)
    s_new = _scores(0 if LAST else h + 1, i + 1 if LAST else i, total, S, SPEC)
    dv = warpgroup_mma_wait(1, deps=[dv_new])
    if LAST:
        mbarrier.arrive(S.do_empty.index(stage), count=1)
    s = warpgroup_mma_wait(0, deps=[s_new])
    return s, dv


@gluon.jit
def gradient(S: Shared, sizes: Sizes, scale, SPEC: gl.constexpr):
    """The warpgroup of dP and dS: dK += dS^T Q; dS goes to the next one."""
    D: gl.constexpr = SPEC.dim
    K_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    walk = plan_keys(sizes, 0, SPEC)
    total = (walk.edges + walk.inner) * sizes.group
    dk0 = gl.zeros([PIECE, D], gl.float32, K_L)
    dk1 = dk0
    mbarrier.wait(S.kv_full.index(1), 0)
    dp = warpgroup_mma_wait(0, deps=[_products(0, 0, total, S, SPEC)])
    for i in range(total):
        dp, dk0 = _gradient_piece(0, dp, dk0, i, total, S, SPEC)
        if SPEC.pieces == 2:
            dp, dk1 = _gradient_piece(1, dp, dk1, i, total, S, SPEC)
    mbarrier.arrive(S.v_free.index(0), count=1)
    mbarrier.wait(S.kv_full.index(0), 0)
    if SPEC.adds_dq:
        mbarrier.wait(S.k_free.index(0), 0)
    # `score` has read K before it gave its last P; its S of a step past the end may read on,
    # and what that reads does not matter.
    S.k.index(0).store((dk0 * scale).to(S.k.dtype))
    if SPEC.pieces == 2:
        S.k.index(1).store((dk1 * scale).to(S.k.dtype))
    fence_async_shared()
    mbarrier.arrive(S.done.index(1), count=1)


@gluon.jit
def _gradient_piece(h: gl.constexpr, dp, dk, i, total, S, SPEC: gl.constexpr):
    BM: gl.constexpr = SPEC.block_m
    DT: gl.constexpr = S.k.dtype
    LAST: gl.constexpr = h == SPEC.pieces - 1
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    A_L: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    stage = i % SPEC.stages
    j = i * SPEC.pieces + h
    x = j % SPEC.p_buffers
    if not SPEC.starts_at_delta:
        dp += S.delta.index(stage).load(gl.SliceLayout(0, S_L))[None, :]
    if LAST:
        mbarrier.arrive(S.do_empty.index(stage), count=1)
    mbarrier.wait(S.p_full.index(x), (j // SPEC.p_buffers) & 1)
    p = S.p.index(x).load(S_L)
    mbarrier.arrive(S.p_empty.index(x), count=1)
    ds = (p.to(gl.float32) * dp).to(DT)
    if h == 0:
        mbarrier.wait(S.q_full.index(stage), (i // SPEC.stages) & 1)
    dk_new = warpgroup_mma(gl.convert_layout(ds, A_L), S.q.index(stage), dk, is_async=True)
    if SPEC.adds_dq:
        y = j % DS_BUFFERS
        mbarrier.wait(S.ds_empty.index(y), ((j // DS_BUFFERS) & 1) ^ 1)
        S.ds.index(y).store(ds)
        fence_async_shared()
        mbarrier.arrive(S.ds_full.index(y), count=1)
    dp_new = _products(0 if LAST else h + 1, i + 1 if LAST else i, total, S, SPEC)
    dk = warpgroup_mma_wait(1, deps=[dk_new])
    if LAST:
        mbarrier.arrive(S.q_empty.index(stage), count=1)
    dp = warpgroup_mma_wait(0, deps=[dp_new])
    return dp, dk


@gluon.jit
def make_dq(dq_desc, counters, S: Shared, sizes: Sizes, SPEC: gl.constexpr):
    """The warpgroup of dQ = dS K, which it adds to the float32 sum in memory."""
    N: gl.constexpr = SPEC.pieces
    BM: gl.constexpr = SPEC.block_m
    D: gl.constexpr = SPEC.dim
    C: gl.constexpr = 64  # columns at a time: D of them would need 64 registers
    PARTS: gl.constexpr = D // C
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    walk = plan_keys(sizes, 0, SPEC)
    zero = gl.zeros([BM, C], gl.float32, L)
    before = walk.line * 0  # place of the last tile's counter
    mbarrier.wait(S.kv_full.index(0), 0)
    for i in range((walk.edges + walk.inner) * sizes.group):
        head, m = tile_at(walk, i, sizes.group)
        line = walk.line + (walk.head * sizes.group + head) * walk.stride + m * BM
        if SPEC.ordered:
            if i > 0:
                pass_turn(counters + before)
            before = line // BM
        for c in gl.static_range(PARTS):
            dq = zero
            for h in gl.static_range(N):
                j = i * N + h
                y = j % DS_BUFFERS
                if c == 0:
                    mbarrier.wait(S.ds_full.index(y), (j // DS_BUFFERS) & 1)
                dq = warpgroup_mma(
                    S.ds.index(y).permute((1, 0)), S.k.index(h).slice(c * C, C, dim=1), dq,
                    use_acc=h > 0, is_async=True,
                )  # fmt: skip
            dq = warpgroup_mma_wait(0, deps=[dq])
            if c == PARTS - 1:
                for h in gl.static_range(N):
                    mbarrier.arrive(S.ds_empty.index((i * N + h) % DS_BUFFERS), count=1)
            if not SPEC.ordered:
                tma.store_wait(PARTS - 1)
            S.dq.index(c).store(dq)
            fence_async_shared()
            if SPEC.ordered and c == 0:
                wait_turn(counters + before, turn_of(walk, m, sizes, SPEC))
            tma_reduce_add(dq_desc, [line, c * C], S.dq.index(c))
    mbarrier.arrive(S.k_free.index(0), count=1)
    if SPEC.ordered:  # noqa: SIM102 (known when compiling)
        if walk.edges + walk.inner > 0:
            pass_turn(counters + before)
    tma.store_wait(0)


@gluon.jit
def new_shared(lse_desc, dq_desc, DT: gl.constexpr, SPEC: gl.constexpr):
    """Shared memory of a CTA, its barriers ready."""
    BM: gl.constexpr = SPEC.block_m
    D: gl.constexpr = SPEC.dim
    DV: gl.constexpr = SPEC.dim_v
    ST: gl.constexpr = SPEC.stages
    N: gl.constexpr = SPEC.pieces
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    p = gl.allocate_shared_memory(DT, [SPEC.p_buffers, PIECE, BM], TILE)
    if SPEC.adds_dq:
        ds = gl.allocate_shared_memory(DT, [DS_BUFFERS, PIECE, BM], TILE)
        dq = gl.allocate_shared_memory(gl.float32, [D // 64, BM, 64], dq_desc.layout)
    else:
        ds = p
        dq = p
    S = Shared(
        gl.allocate_shared_memory(DT, [N, PIECE, D], TILE),
        gl.allocate_shared_memory(DT, [N, PIECE, DV], TILE),
        gl.allocate_shared_memory(DT, [ST, BM, D], TILE),
        gl.allocate_shared_memory(DT, [ST, BM, DV], TILE),
        gl.allocate_shared_memory(gl.float32, [ST, BM], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [ST, BM], lse_desc.layout),
        p,
        ds,
        dq,
        new_barriers(2, 1),
        new_barriers(ST, 1),
        new_barriers(ST, 1),
        new_barriers(ST, 2),
        new_barriers(ST, 2),
        new_barriers(SPEC.p_buffers, 1),
        new_barriers(SPEC.p_buffers, 1),
        new_barriers(DS_BUFFERS, 1),
        new_barriers(DS_BUFFERS, 1),
        new_barriers(2, 1),
        new_barriers(1, 1),
        new_barriers(1, 1),
    )
    fence_async_shared()
    return S
