"""The device code that adds up dK and dV of tiles of keys that several CTAs share.

CTAs take equal tiles of keys where no mask is, wave after wave; where the last wave is not full,
its tiles are cut by queries, so that all SMs end together. A piece's sums go to memory in
float32, and the warpgroup that comes last adds all of them up, in their order.

Legend: D / D_v head dimensions padded to what is compiled.
"""

from typing import NamedTuple

from triton.experimental import gluon

from onchip.kernels.hopper.backward_walk import piece_of
from onchip.kernels.hopper.gluon_names import gl, wait_for_all

#: Columns that are added up at a time: as many loads as there are pieces are under way.
_COLUMNS = gl.constexpr(32)


class Pieces(NamedTuple):
    """Where the CTAs that share a tile meet; all None without such tiles."""

    sums: gl.tensor | None  # (tiles, 2, pieces, 64, D + D_v) float32: of warpgroups
    counters: gl.tensor | None  # (tiles, 2) pieces that are in memory
    dk: gl.tensor | None
    dv: gl.tensor | None


@gluon.jit
def merge(W: gl.constexpr, item, dk, dv, walk, shared, sizes, SPEC: gl.constexpr):
    """A piece's dK and dV of warpgroup W's keys: to memory, or, by the last comer, added up."""
    D: gl.constexpr = SPEC.dim
    DV: gl.constexpr = SPEC.dim_v
    tile, piece = piece_of(item, sizes, SPEC)
    place = (tile - sizes.whole) * 2 + W
    sums = shared.sums + gl.cast(place * SPEC.pieces, gl.int64) * (64 * (D + DV))
    own = sums + piece * (64 * (D + DV))
    gl.store(own + _within(D), dk)
    gl.store(own + 64 * D + _within(DV), dv)
    wait_for_all()
    before = gl.atomic_add(shared.counters + place, 1, sem="acq_rel")
    if before == SPEC.pieces - 1:
        wait_for_all()
        row = walk.k_end * sizes.seqlen_k + walk.own + W * 64
        line = gl.cast(row * sizes.num_kv_heads + walk.head, gl.int64)
        _add_up(sums, shared.dk + line * D, D, sizes, SPEC)
        _add_up(sums + 64 * D, shared.dv + line * DV, DV, sizes, SPEC)


@gluon.jit
def _within(WIDTH: gl.constexpr):
    """Offsets of a warpgroup's sums in (64, WIDTH)."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, L)), 1)
    column = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, L)), 0)
    return row * WIDTH + column


@gluon.jit
def _add_up(sums, to, WIDTH: gl.constexpr, sizes, SPEC: gl.constexpr):
    """The sum of all pieces, rounded, to memory."""
    PIECES: gl.constexpr = SPEC.pieces
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, L)), 1)
    column = gl.expand_dims(gl.arange(0, _COLUMNS, gl.SliceLayout(0, L)), 0)
    stride = sizes.num_kv_heads * WIDTH
    for c in gl.static_range(WIDTH // _COLUMNS):
        at = sums + (row * WIDTH + column + c * _COLUMNS)
        total = gl.zeros([64, _COLUMNS], gl.float32, L)
        for p in gl.static_range(PIECES):
            total += gl.load(at + p * (64 * (SPEC.dim + SPEC.dim_v)), cache_modifier=".cg")
        gl.store(to + (row * stride + column + c * _COLUMNS), total.to(to.dtype.element_ty))
