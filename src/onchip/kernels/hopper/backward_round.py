"""The device code of the Hopper backward that rounds dQ where its sum is complete.

A tile's counter is how many CTAs have added their part. The last one rounds the sum, which its
SM's L2 still holds, so that no launch behind has to read it again. Functions take
`backward_pair.Shared` as S.

Legend: D head dimension padded to what is compiled, BM / BN rows of a tile of queries / keys.
"""

from triton.experimental import gluon

from onchip.kernels.hopper.backward_sums import COLUMNS
from onchip.kernels.hopper.backward_walk import Sizes, plan_keys, tile_at
from onchip.kernels.hopper.gluon_backward import fence_async
from onchip.kernels.hopper.gluon_names import gl, mbarrier, tma_load

#: What can be taken out of a tile in shared memory, as it is laid out.
_ROWS = gl.constexpr(8)
_WIDTH = gl.constexpr(32)


@gluon.jit
def round_dq(sum_desc, dq, counters, S, sizes: Sizes, scale, SPEC: gl.constexpr):
    """The warp that counts a CTA's parts of dQ when they are in memory, and rounds full sums."""
    BM: gl.constexpr = SPEC.block_m
    PARTS: gl.constexpr = SPEC.dim // COLUMNS
    RING: gl.constexpr = SPEC.landings
    walk = plan_keys(sizes, 0, SPEC)
    rounded = 0  # tiles
    for t in range((walk.edges + walk.inner) * sizes.group):
        head, m = tile_at(walk, t, sizes.group)
        head += walk.head * sizes.group
        line = walk.line + head * walk.stride + m * BM
        mbarrier.wait(S.landed.index(t % RING), (t // RING) & 1)
        mbarrier.arrive(S.landed_empty.index(t % RING), count=1)
        others = gl.atomic_add(counters + line // BM, 1, sem="acq_rel")
        if others == _visitors(walk, m, sizes, SPEC) - 1:
            fence_async()
            for c in gl.static_range(PARTS):
                bar = S.round_full.index(c)
                mbarrier.expect(bar, BM * COLUMNS * 4)
                tma_load(sum_desc, [line, c * COLUMNS], bar, S.rounded.index(c))
            for c in gl.static_range(PARTS):
                mbarrier.wait(S.round_full.index(c), rounded & 1)
                _round(S.rounded.index(c), dq, walk, head, m * BM, c, scale, S, sizes, SPEC)
            rounded += 1


@gluon.jit
def _visitors(walk, m, sizes, SPEC: gl.constexpr):
    """CTAs that add to tile m of dQ."""
    last = (walk.length_k - 1) // SPEC.block_n
    if SPEC.has_right:
        reach = m * SPEC.block_m + SPEC.block_m - 1 + walk.shift + sizes.right
        last = gl.minimum(reach // SPEC.block_n, last)
    return last + 1


@gluon.jit
def _round(
    tile, dq, walk, head, row, c: gl.constexpr, scale, S, sizes, SPEC: gl.constexpr
):  # fmt: skip
    """Stores dQ (B, S_q, H, D) of a tile's part in the inputs' type."""
    ROWS: gl.constexpr = _ROWS
    WIDTH: gl.constexpr = _WIDTH
    L: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0])
    stride = sizes.num_heads * SPEC.head_dim
    first = gl.cast(walk.q_end * sizes.seqlen_q + row, gl.int64) * stride
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, L))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, L)) + c * COLUMNS
    to = dq + first + head * SPEC.head_dim
    places = (rows * stride)[:, None] + columns[None, :]
    for r in gl.static_range(SPEC.block_m // ROWS):
        seen = (rows + r * ROWS < sizes.seqlen_q - row)[:, None]
        for w in gl.static_range(COLUMNS // WIDTH):
            x = tile.slice(r * ROWS, ROWS, dim=0).slice(w * WIDTH, WIDTH, dim=1).load(L)
            inside = seen
            if SPEC.head_dim < SPEC.dim:
                inside = seen & (columns + w * WIDTH < SPEC.head_dim)[None, :]
            gl.store(to + places + w * WIDTH, (x * scale).to(S.k.dtype), inside)
        to += ROWS * stride
    gl.thread_barrier()  # before the tile is loaded into again
