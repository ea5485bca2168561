"""The producer of the Hopper float8 forward: as `producer.py`, but V comes in columns.

Legend: BN keys of a K/V tile, n sizes, C code.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon

from onchip.kernels import fp8_layout
from onchip.kernels.hopper.barriers import wait_for_slot
from onchip.kernels.hopper.gluon_names import gl, mbarrier, tma_load
from onchip.kernels.hopper.producer import first_tile, next_tile
from onchip.kernels.hopper.shared import Inputs, Shared, place_of
from onchip.kernels.hopper.tiles import Sizes, Tile, end_of_keys, post, start_of_keys

BLOCK_K = gl.constexpr(fp8_layout.BLOCK_K)


class Due(NamedTuple):
    """A tile of V whose K is loaded already."""

    is_due: object
    column: object
    head: object
    batch: object


@gluon.jit
def first_block(start, tile: Tile, BLOCK: gl.constexpr, PACKED: gl.constexpr):
    """Where a sequence's blocks begin; `start` is its first row in memory."""
    block = 0
    if PACKED:
        block = start // BLOCK + tile.batch
    return block


@gluon.jit
def _load_v(source: Inputs, at: Shared, count, due: Due, C: gl.constexpr):
    """Loads V's tile number `count - 1`, if it is due, as soon as its slot is free."""
    if due.is_due:
        slot = (count - 1) % C.stages
        wait_for_slot(count - 1, 1, C)
        mbarrier.expect(at.v_full.index(slot), C.block_n * C.width_v)
        place = [due.batch, due.head, 0, due.column]
        tma_load(source.v, place, at.v_full.index(slot), at.v.index(slot))


@gluon.jit
def _load_k(source: Inputs, at: Shared, count, key, head, batch, C: gl.constexpr):
    """Loads K's tile number `count` as soon as its slot is free."""
    slot = count % C.stages
    wait_for_slot(count, 0, C)
    mbarrier.expect(at.k_full.index(slot), C.block_n * C.width)
    tma_load(source.k, [batch, head, key, 0], at.k_full.index(slot), at.k.index(slot))


@gluon.jit
def _load_q(source: Inputs, at: Shared, done, tile: Tile, C: gl.constexpr):
    """Loads each warpgroup's rows of Q as soon as its buffer is free."""
    WARPGROUPS: gl.constexpr = C.warpgroups
    for w in gl.static_range(WARPGROUPS):
        i = (done % C.q_buffers) * C.warpgroups + w
        mbarrier.wait(at.q_empty.index(i), ((done // C.q_buffers) & 1) ^ 1)
        mbarrier.expect(at.q_full.index(i), 64 * C.width)
        place = [place_of(tile, C.packed_q), tile.head, tile.q_start + tile.row + w * 64, 0]
        tma_load(source.q, place, at.q_full.index(i), at.q.index(i))


@gluon.jit
def fp8_producer(source: Inputs, at: Shared, n: Sizes, C: gl.constexpr):
    """Loads what the consumers will read, in their order; V one K/V tile behind K."""
    done = 0  # tiles of queries
    count = 0  # K/V tiles
    due = Due(False, 0, 0, 0)
    more, spot, tile = first_tile(source, n, C)
    if C.is_uneven:
        post(tile, more, done, at.notes, C)
    while more:
        head = tile.head // n.group
        batch = place_of(tile, C.packed_k)
        start = start_of_keys(tile.row, tile, n, C)
        end = end_of_keys(tile.row + C.block_m, tile, n, C)
        columns = first_block(tile.k_start, tile, BLOCK_K, C.packed_k) * BLOCK_K
        _load_q(source, at, done, tile, C)
        for i in range(end - start):
            key = (end - 1 - i) * C.block_n
            _load_k(source, at, count, tile.k_start + key, head, batch, C)
            _load_v(source, at, count, due, C)
            due = Due(True, columns + key, head, batch)
            count += 1
        done += 1
        more, spot, tile = next_tile(done, spot, source, n, C)
        if C.is_uneven:
            post(tile, more, done, at.notes, C)
    _load_v(source, at, count, due, C)
