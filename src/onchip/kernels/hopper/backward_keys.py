"""The device code of the kernel that makes dK and dV of heads over 128, in a chain.

A CTA owns 64 keys. One warpgroup makes S^T, P^T and dV, another one dP^T, dS^T and dK: the sums
of a warpgroup leave no registers for more. The method is in backward.py.

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
)
from onchip.kernels.hopper.gluon_backward import (
    capped,
    hide,
)
from onchip.kernels.hopper.gluon_names import (
    fence_async_shared,
    gl,
    mbarrier,
    new_barriers,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

PIECE = gl.constexpr(64)  # keys of a piece: rows of one wgmma
P_BUFFERS = gl.constexpr(2)


@aggregate
class Shared:
    """Tiles and barriers in shared memory."""

    k: gl.shared_memory_descriptor  # (1, 64, D); dK at the end
    v: gl.shared_memory_descriptor  # (1, 64, D_v); dV at the end
    q: gl.shared_memory_descriptor  # (STAGES, BM, D)
    do: gl.shared_memory_descriptor  # (STAGES, BM, D_v)
    lse: gl.shared_memory_descriptor  # (STAGES, BM), -LSE in base 2
    delta: gl.shared_memory_descriptor  # (STAGES, BM), -D
    p: gl.shared_memory_descriptor  # (2, 64, BM): P^T on its way from `score` to `gradient`
    kv_full: gl.shared_memory_descriptor  # (2,) K, V have come
    q_full: gl.shared_memory_descriptor  # (STAGES,)
    do_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor  # (STAGES,) both have read it for the last time
    do_empty: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor  # (P_BUFFERS,)
    p_empty: gl.shared_memory_descriptor
    done: gl.shared_memory_descriptor  # (2,) dV, dK are there
    v_free: gl.shared_memory_descriptor  # (1,) V has been read for the last time

    @gluon.constexpr_function
    def __init__(
        self, k, v, q, do, lse, delta, p, kv_full, q_full, do_full, q_empty, do_empty, p_full,
        p_empty, done, v_free,
    ):  # fmt: skip
        self.k = k
        self.v = v
        self.q = q
        self.do = do
        self.lse = lse
        self.delta = delta
        self.p = p
        self.kv_full = kv_full
        self.q_full = q_full
        self.do_full = do_full
        self.q_empty = q_empty
        self.do_empty = do_empty
        self.p_full = p_full
        self.p_empty = p_empty
        self.done = done
        self.v_free = v_free


@gluon.jit
def load(
    sources: Sources, dk_desc, dv_desc, S: Shared, sizes: Sizes, SPEC: gl.constexpr
):  # fmt: skip
    """The load warp: K and V once, then tiles of queries; at the end it stores dK and dV."""
    D: gl.constexpr = SPEC.dim
    DV: gl.constexpr = SPEC.dim_v
    walk = plan_keys(gl.program_id(0), sizes, SPEC)
    total = (walk.edges + walk.inner) * sizes.group
    load_own(sources.k, S.k, S.kv_full.index(0), 0, walk, PIECE, D, SPEC)
    if total > 0:  # S wants Q before dP wants V
        load_tile(sources, S, walk, 0, 0, sizes, SPEC)
    load_own(sources.v, S.v, S.kv_full.index(1), 0, walk, PIECE, DV, SPEC)
    for i in range(1, total):
        load_tile(sources, S, walk, i, i, sizes, SPEC)
    mbarrier.wait(S.done.index(0), 0)
    store_keys(dv_desc, walk, walk.head, walk.own, S.v.index(0), PIECE, DV)
    mbarrier.wait(S.done.index(1), 0)
    store_keys(dk_desc, walk, walk.head, walk.own, S.k.index(0), PIECE, D)
    tma.store_wait(0)


@gluon.jit
def _against(own, other, full, i, total, SPEC: gl.constexpr):
    """Own keys' rows times step i's tile of queries, under way; of whatever is there when there is
    no such step."""
    BM: gl.constexpr = SPEC.block_m
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    stage = i % SPEC.stages
    mbarrier.wait(full.index(stage), (i // SPEC.stages) & 1, pred=i < total)
    zero = gl.zeros([PIECE, BM], gl.float32, L)
    return warpgroup_mma(
        own.index(0), other.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
    )


@gluon.jit
def score(S: Shared, sizes: Sizes, factor, cap, SPEC: gl.constexpr):
    """The warpgroup of S and P: dV += P^T dO; P goes to the next one."""
    DV: gl.constexpr = SPEC.dim_v
    BM: gl.constexpr = SPEC.block_m
    V_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    walk = plan_keys(gl.program_id(0), sizes, SPEC)
    edges = walk.edges * sizes.group
    total = edges + walk.inner * sizes.group
    row = walk.first * BM + walk.shift - walk.own
    limits = Edges(
        walk.edges, walk.full - walk.first, walk.inner, row + sizes.right, row - sizes.left,
        walk.length_k - walk.own,
    )  # fmt: skip
    dv = gl.zeros([PIECE, DV], gl.float32, V_L)
    mbarrier.wait(S.kv_full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=[_against(S.k, S.q, S.q_full, 0, total, SPEC)])
    if SPEC.masks:
        # A loop of their own: a mask in the one loop spills 25 registers at D = 128 (triton 3.6).
        for i in range(edges):
            s, dv = _score_step(s, dv, i, total, limits, factor, cap, S, SPEC, True)
    for i in range(edges, total):
        s, dv = _score_step(s, dv, i, total, limits, factor, cap, S, SPEC, False)
    mbarrier.wait(S.v_free.index(0), 0)
    S.v.index(0).store(dv.to(S.v.dtype))
    fence_async_shared()
    mbarrier.arrive(S.done.index(0), count=1)


@gluon.jit
def _score_step(
    s, dv, i, total, limits, factor, cap, S, SPEC: gl.constexpr, MASKED: gl.constexpr
):  # fmt: skip
    BM: gl.constexpr = SPEC.block_m
    DT: gl.constexpr = S.k.dtype
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    A_L: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    stage = i % SPEC.stages
    x = i % P_BUFFERS
    if SPEC.has_softcap:
        s, slope = capped(s, factor)
        s = s * cap
    else:
        s = s * factor
    s += S.lse.index(stage).load(gl.SliceLayout(0, S_L))[None, :]
    p = gl.exp2(s)
    if MASKED:
        row = edge_index(limits, i, SPEC) * BM
        p = hide(p, limits.right + row, limits.left + row, limits.tail, 0.0, 1, S_L, SPEC)
    p16 = p.to(DT)
    mbarrier.wait(S.do_full.index(stage), (i // SPEC.stages) & 1)
    dv_new = warpgroup_mma(gl.convert_layout(p16, A_L), S.do.index(stage), dv, is_async=True)
    if SPEC.has_softcap:
        p16 = (p * slope).to(DT)
    mbarrier.wait(S.p_empty.index(x), ((i // P_BUFFERS) & 1) ^ 1)
    S.p.index(x).store(p16)
    mbarrier.arrive(S.p_full.index(x), count=1)
    mbarrier.arrive(S.q_empty.index(stage), count=1)
    s_new = _against(S.k, S.q, S.q_full, i + 1, total, SPEC)
    dv = warpgroup_mma_wait(1, deps=[dv_new])
    mbarrier.arrive(S.do_empty.index(stage), count=1)
    s = warpgroup_mma_wait(0, deps=[s_new])
    return s, dv


@gluon.jit
def gradient(S: Shared, sizes: Sizes, scale, SPEC: gl.constexpr):
    """The warpgroup of dP and dS: dK += dS^T Q."""
    D: gl.constexpr = SPEC.dim
    K_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    walk = plan_keys(gl.program_id(0), sizes, SPEC)
    total = (walk.edges + walk.inner) * sizes.group
    dk = gl.zeros([PIECE, D], gl.float32, K_L)
    mbarrier.wait(S.kv_full.index(1), 0)
    dp = warpgroup_mma_wait(0, deps=[_against(S.v, S.do, S.do_full, 0, total, SPEC)])
    for i in range(total):
        dp, dk = _gradient_step(dp, dk, i, total, S, SPEC)
    mbarrier.arrive(S.v_free.index(0), count=1)
    mbarrier.wait(S.kv_full.index(0), 0)
    # `score` has read K before it gave its last P; its S of a step past the end may read on,
    # and what that reads does not matter.
    S.k.index(0).store((dk * scale).to(S.k.dtype))
    fence_async_shared()
    mbarrier.arrive(S.done.index(1), count=1)


@gluon.jit
def _gradient_step(dp, dk, i, total, S, SPEC: gl.constexpr):
    BM: gl.constexpr = SPEC.block_m
    DT: gl.constexpr = S.k.dtype
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    A_L: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    stage = i % SPEC.stages
    x = i % P_BUFFERS
    dp += S.delta.index(stage).load(gl.SliceLayout(0, S_L))[None, :]
    mbarrier.arrive(S.do_empty.index(stage), count=1)
    mbarrier.wait(S.p_full.index(x), (i // P_BUFFERS) & 1)
    p = S.p.index(x).load(S_L)
    mbarrier.arrive(S.p_empty.index(x), count=1)
    ds = (p.to(gl.float32) * dp).to(DT)
    mbarrier.wait(S.q_full.index(stage), (i // SPEC.stages) & 1)
    dk_new = warpgroup_mma(gl.convert_layout(ds, A_L), S.q.index(stage), dk, is_async=True)
    dp_new = _against(S.v, S.do, S.do_full, i + 1, total, SPEC)
    dk = warpgroup_mma_wait(1, deps=[dk_new])
    mbarrier.arrive(S.q_empty.index(stage), count=1)
    dp = warpgroup_mma_wait(0, deps=[dp_new])
    return dp, dk


@gluon.jit
def new_shared(lse_desc, DT: gl.constexpr, SPEC: gl.constexpr):
    """Shared memory of a CTA, its barriers ready."""
    BM: gl.constexpr = SPEC.block_m
    ST: gl.constexpr = SPEC.stages
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    S = Shared(
        gl.allocate_shared_memory(DT, [1, PIECE, SPEC.dim], TILE),
        gl.allocate_shared_memory(DT, [1, PIECE, SPEC.dim_v], TILE),
        gl.allocate_shared_memory(DT, [ST, BM, SPEC.dim], TILE),
        gl.allocate_shared_memory(DT, [ST, BM, SPEC.dim_v], TILE),
        gl.allocate_shared_memory(gl.float32, [ST, BM], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [ST, BM], lse_desc.layout),
        gl.allocate_shared_memory(DT, [P_BUFFERS, PIECE, BM], TILE),
        new_barriers(2, 1),
        new_barriers(ST, 1),
        new_barriers(ST, 1),
        new_barriers(ST, 2),
        new_barriers(ST, 2),
        new_barriers(P_BUFFERS, 1),
        new_barriers(P_BUFFERS, 1),
        new_barriers(2, 1),
        new_barriers(1, 1),
    )
    fence_async_shared()
    return S
