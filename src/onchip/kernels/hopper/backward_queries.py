"""The device code of the kernel that owns queries: dQ of wide heads.

A CTA owns BM queries, two consumer warpgroups with half of them each, and walks over the keys as
the forward does; the method is in backward.py.

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
    load_keys,
    load_queries,
    plan_queries,
    store_queries,
    tile_at,
)
from onchip.kernels.hopper.gluon_backward import capped, hide
from onchip.kernels.hopper.gluon_names import (
    fence_async_shared,
    gl,
    mbarrier,
    new_barriers,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@aggregate
class Shared:
    q: gl.shared_memory_descriptor  # (2, BM / 2, D)
    do: gl.shared_memory_descriptor  # (2, BM / 2, D_v)
    k: gl.shared_memory_descriptor  # (2, BN, D)
    v: gl.shared_memory_descriptor  # (BN, D_v)
    q_full: gl.shared_memory_descriptor  # 2: Q, dO
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    done: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, do, k, v, q_full, k_full, k_empty, v_full, v_empty, done):
        self.q = q
        self.do = do
        self.k = k
        self.v = v
        self.q_full = q_full
        self.k_full = k_full
        self.k_empty = k_empty
        self.v_full = v_full
        self.v_empty = v_empty
        self.done = done


@gluon.jit
def _load_step(desc, walk, head, i, bar, to, BN: gl.constexpr, D: gl.constexpr):
    _, n = tile_at(walk, i, 1)
    load_keys(desc, walk, head, n * BN, bar, to, BN, D)


@gluon.jit
def load(
    sources: Sources, dq_desc, S: Shared,
    sizes: Sizes, SPEC: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = SPEC.block_m // 2
    BN: gl.constexpr = SPEC.block_n
    D: gl.constexpr = SPEC.dim
    DV: gl.constexpr = SPEC.dim_v
    walk = plan_queries(sizes, SPEC)
    kv_head = walk.head // sizes.group
    total = walk.edges + walk.inner
    mbarrier.expect(S.q_full.index(0), 2 * HALF * D * 2)
    for w in gl.static_range(2):
        load_queries(
            sources.q,
            walk,
            walk.head,
            walk.own + w * HALF,
            S.q_full.index(0),
            S.q.index(w),
            HALF,
            D,
        )
    if total > 0:
        mbarrier.expect(S.k_full.index(0), BN * D * 2)
        _load_step(sources.k, walk, kv_head, 0, S.k_full.index(0), S.k.index(0), BN, D)
    mbarrier.expect(S.q_full.index(1), 2 * HALF * DV * 2)
    for w in gl.static_range(2):
        load_queries(
            sources.do,
            walk,
            walk.head,
            walk.own + w * HALF,
            S.q_full.index(1),
            S.do.index(w),
            HALF,
            DV,
        )
    for i in range(total):
        mbarrier.wait(S.v_empty.index(0), (i & 1) ^ 1)
        mbarrier.expect(S.v_full.index(0), BN * DV * 2)
        _load_step(sources.v, walk, kv_head, i, S.v_full.index(0), S.v, BN, DV)
        nxt = i + 1
        if nxt < total:
            x = nxt & 1
            mbarrier.wait(S.k_empty.index(x), ((nxt >> 1) & 1) ^ 1)
            mbarrier.expect(S.k_full.index(x), BN * D * 2)
            _load_step(sources.k, walk, kv_head, nxt, S.k_full.index(x), S.k.index(x), BN, D)
    for w in gl.static_range(2):
        mbarrier.wait(S.done.index(w), 0)
        store_queries(dq_desc, walk, walk.head, walk.own + w * HALF, S.q.index(w), HALF, D)
    tma.store_wait(0)


@gluon.jit
def compute(
    W: gl.constexpr, stats, delta, S: Shared, sizes: Sizes, scale,
    factor, cap, SPEC: gl.constexpr,
):  # fmt: skip
    """A warpgroup of 64 queries' dQ."""
    HALF: gl.constexpr = SPEC.block_m // 2
    BN: gl.constexpr = SPEC.block_n
    D: gl.constexpr = SPEC.dim
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    Q_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    walk = plan_queries(sizes, SPEC)
    total = walk.edges + walk.inner
    start = walk.own + W * HALF
    row = start + walk.shift - walk.first * BN
    limits = Edges(
        walk.edges, walk.full - walk.first, walk.inner, row + sizes.right, row - sizes.left,
        walk.length_k - walk.first * BN,
    )  # fmt: skip
    lines = walk.line + walk.head * walk.stride + start
    lines += gl.arange(0, HALF, gl.SliceLayout(1, S_L))
    # A tile past the end of a packed sequence has no statistics.
    inside = lines < gl.where(total > 0, 0x7FFFFFFF, 0)
    lse = gl.load(stats + lines, inside, 0.0)
    d = gl.load(delta + lines, inside, 0.0)
    dq = gl.zeros([HALF, D], gl.float32, Q_L)
    mbarrier.wait(S.q_full.index(0), 0)
    s = _scores(W, 0, total, S, SPEC)
    mbarrier.wait(S.q_full.index(1), 0)
    dp = _products(W, 0, total, S, SPEC)
    s, dp = warpgroup_mma_wait(0, deps=[s, dp])
    # One loop: with a loop of its own for masked tiles, the other one spills 28 (triton 3.6).
    for i in range(total):
        s, dp, dq = _step(W, s, dp, dq, lse, d, i, total, limits, factor, cap, S, SPEC)
    S.q.index(W).store((dq * scale).to(S.q.dtype))
    fence_async_shared()
    mbarrier.arrive(S.done.index(W), count=1)


@gluon.jit
def _scores(W: gl.constexpr, i, total, S, SPEC: gl.constexpr):
    """S of step i, under way; of whatever is there when there is no such step."""
    HALF: gl.constexpr = SPEC.block_m // 2
    BN: gl.constexpr = SPEC.block_n
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    zero = gl.zeros([HALF, BN], gl.float32, L)
    mbarrier.wait(S.k_full.index(i & 1), (i >> 1) & 1, pred=i < total)
    return warpgroup_mma(
        S.q.index(W), S.k.index(i & 1).permute((1, 0)), zero, use_acc=False, is_async=True
    )


@gluon.jit
def _products(W: gl.constexpr, i, total, S, SPEC: gl.constexpr):
    """dP of step i, as `_scores`."""
    HALF: gl.constexpr = SPEC.block_m // 2
    BN: gl.constexpr = SPEC.block_n
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    zero = gl.zeros([HALF, BN], gl.float32, L)
    mbarrier.wait(S.v_full.index(0), i & 1, pred=i < total)
    return warpgroup_mma(S.do.index(W), S.v.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _step(
    W: gl.constexpr, s, dp, dq, lse, d, i, total, limits, factor, cap, S, SPEC: gl.constexpr
):  # fmt: skip
    """One tile of keys, whose S and dP are there: dQ += dS K, and the next tile's S and dP."""
    BN: gl.constexpr = SPEC.block_n
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    A_L: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    mbarrier.arrive(S.v_empty.index(0), count=1)
    if SPEC.has_softcap:
        s, slope = capped(s, factor)
        p = slope * gl.exp2(s * cap + lse[:, None])
    else:
        p = gl.exp2(s * factor + lse[:, None])
    if SPEC.masks:  # noqa: SIM102 (known when compiling)
        if i < limits.count:
            key = edge_index(limits, i, SPEC) * BN
            right, left = limits.right - key, limits.left - key
            p = hide(p, right, left, limits.tail - key, 0.0, 0, S_L, SPEC)
    ds = (p * (dp + d[:, None])).to(S.k.dtype)
    dq_new = warpgroup_mma(gl.convert_layout(ds, A_L), S.k.index(i & 1), dq, is_async=True)
    s_new = _scores(W, i + 1, total, S, SPEC)
    dp_new = _products(W, i + 1, total, S, SPEC)
    dq = warpgroup_mma_wait(2, deps=[dq_new])
    mbarrier.arrive(S.k_empty.index(i & 1), count=1)
    s, dp = warpgroup_mma_wait(0, deps=[s_new, dp_new])
    return s, dp, dq


@gluon.jit
def new_shared(DT: gl.constexpr, SPEC: gl.constexpr):
    """Shared memory of a CTA of the dQ kernel, its barriers ready."""
    HALF: gl.constexpr = SPEC.block_m // 2
    BN: gl.constexpr = SPEC.block_n
    D: gl.constexpr = SPEC.dim
    DV: gl.constexpr = SPEC.dim_v
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    S = Shared(
        gl.allocate_shared_memory(DT, [2, HALF, D], TILE),
        gl.allocate_shared_memory(DT, [2, HALF, DV], TILE),
        gl.allocate_shared_memory(DT, [2, BN, D], TILE),
        gl.allocate_shared_memory(DT, [BN, DV], TILE),
        new_barriers(2, 1),
        new_barriers(2, 1),
        new_barriers(2, 2),
        new_barriers(1, 1),
        new_barriers(1, 2),
        new_barriers(2, 1),
    )
    fence_async_shared()
    return S
