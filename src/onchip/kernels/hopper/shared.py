"""Shared memory of the Hopper forward, and what its roles hand to one another.

Legend: B batch, S_q / S_k lengths, H query heads, H_kv key and value heads, D / D_v head
dimensions, P pages, N page size, BN columns (keys) of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon

from onchip.kernels.hopper.gluon_names import gl, new_barriers
from onchip.kernels.hopper.tiles import NOTE_SIZE, Notes, Tile, query_of


class Shared(NamedTuple):
    """Shared memory: tiles, and the mbarriers that guard them."""

    q: object  # (q_buffers * warpgroups, 1, 1, 64, D), or (.., 1, 64 / G, G, D)
    k: object  # (stages, 1, 1, BN, D)
    v: object  # (stages, 1, 1, BN, D_v)
    o: object  # (warpgroups, 1, 1, 64, D_v / 2), or q
    q_full: object
    q_empty: object
    k_full: object
    v_full: object
    notes: object  # Notes


class Inputs(NamedTuple):
    """Where tiles come from."""

    q: object  # descriptors of (B, H, S_q, D), (B, H_kv, S_k, D) and (B, H_kv, S_k, D_v); B = 1
    k: object  # where packed, (P, H_kv, N, D) where paged; q (B, S_q, H, D) with heads of groups
    v: object
    lengths: object  # Lengths
    counter: object  # of tiles handed out
    order: object  # `order.Order`, where sequences are taken by their keys


class Outputs(NamedTuple):
    """Where results go."""

    tiles: object  # descriptor of (B, H, S_q, D_v), or as q's
    out: object  # the same memory
    lse: object
    leaks: object
    partials: object  # `gluon_pieces.Partials`, or any pointer


@gluon.jit
def plane(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """A (1, 1, rows, columns) tile of shared memory as a matrix."""
    return tile.reshape([ROWS, COLUMNS])


@gluon.jit
def place_of(tile: Tile, PACKED: gl.constexpr):
    """A sequence's index in a descriptor."""
    if PACKED:
        return 0
    else:
        return tile.batch


@gluon.jit
def corner_of(tile: Tile, row, column, C: gl.constexpr):
    """Where a warpgroup's rows begin in the descriptors of q and of the output."""
    place = place_of(tile, C.packed_q)
    query = tile.q_start + query_of(row, C)
    if C.heads > 1:
        return [place, query, tile.head * C.heads, column]
    else:
        return [place, tile.head, query, column]


@gluon.jit
def shared_memory(q_desc, k_desc, v_desc, o_desc, C: gl.constexpr):
    NUM_Q: gl.constexpr = C.q_buffers * C.warpgroups
    NUM_O: gl.constexpr = C.warpgroups
    STAGES: gl.constexpr = C.stages
    BN: gl.constexpr = C.block_n
    WIDTH: gl.constexpr = C.width
    WIDTH_V: gl.constexpr = C.width_v
    HALF: gl.constexpr = C.width_v // 2
    HEADS: gl.constexpr = C.heads
    # A warpgroup's 64 rows of q, as one TMA instruction copies them.
    QUERIES: gl.constexpr = 64 // HEADS if HEADS > 1 else 1
    REST: gl.constexpr = HEADS if HEADS > 1 else 64
    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [NUM_Q, 1, QUERIES, REST, WIDTH], q_desc.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, WIDTH], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, WIDTH_V], v_desc.layout)
    o = q
    if C.q_buffers == 1:
        o = gl.allocate_shared_memory(dtype, [NUM_O, 1, QUERIES, REST, HALF], o_desc.layout)
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    slots = gl.allocate_shared_memory(gl.int32, [2 * NOTE_SIZE, 1], layout)
    notes = Notes(slots, slots, slots)
    if not C.is_alone:  # a barrier that nobody uses must not begin, see `backward_pair.new_shared`
        notes = Notes(slots, new_barriers(2, 1), new_barriers(2, C.warpgroups))
    return Shared(
        q, k, v, o,
        new_barriers(NUM_Q, 1), new_barriers(NUM_Q, 1),
        new_barriers(STAGES, 1), new_barriers(STAGES, 1),
        notes,
    )  # fmt: skip
