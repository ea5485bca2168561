"""The producer of the Hopper forward: one warp that loads tiles by TMA as slots become free.

Legend: BN rows of a K/V tile, n sizes, C code.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon

from onchip.kernels.hopper.barriers import meet_other_launches, settle, wait_for_slot
from onchip.kernels.hopper.gluon_names import gl, in_pieces, mbarrier, tma_load
from onchip.kernels.hopper.order import longest_first, sequence_at
from onchip.kernels.hopper.shared import Inputs, Shared, corner_of, place_of
from onchip.kernels.hopper.tiles import (
    Lengths,
    Sizes,
    Spot,
    Tile,
    anew,
    end_of_tile,
    exists,
    keys_of,
    kv_head_of,
    number_of,
    onward,
    post,
    row_of,
    start_of_keys,
    start_of_walk,
    tile_at,
    tile_of,
)


class Due(NamedTuple):
    """A K/V tile; for V, one whose K is loaded already."""

    is_due: object
    key: object
    head: object
    batch: object
    seqlen_k: object
    page: object


@gluon.jit
def _page_of(key, batch, lengths: Lengths, C: gl.constexpr):
    """The page of a tile that lies in one; asked for before the wait for a slot, which hides it."""
    page = 0
    if C.page_size > 0 and C.block_n == C.box[0]:
        page = gl.load(lengths.block_table + batch * lengths.stride_table + key // C.page_size)
    return page


@gluon.jit
def _load_tile(
    desc, barrier, tiles, slot, key, head, batch, page, lengths: Lengths, seqlen_k,
    WIDTH: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Starts to copy BN rows of K or V, from row `key` on, to a slot.

    A page that holds less than a tile is copied by instructions of its own, 64 columns each: in
    shared memory 64 columns of a tile lie together, row after row.
    """
    ROWS: gl.constexpr = C.box[0]
    mbarrier.expect(barrier, C.block_n * WIDTH * 2)
    if C.page_size == 0:
        tma_load(desc, [batch, head, key, 0], barrier, tiles.index(slot))
    elif C.block_n == ROWS:
        tma_load(desc, [page, head, key % C.page_size, 0], barrier, tiles.index(slot))
    else:
        PAGES: gl.constexpr = C.block_n // ROWS
        PANELS: gl.constexpr = WIDTH // 64
        NUMBER: gl.constexpr = C.stages * PAGES * PANELS
        pieces = in_pieces(tiles, desc, NUMBER, ROWS)
        table = lengths.block_table + batch * lengths.stride_table + key // ROWS
        for i in gl.static_range(PAGES):
            # Entries past the last page are not read; a page that does not exist is zeros.
            page = gl.load(table + i, mask=key + i * ROWS < seqlen_k, other=1 << 30)
            for j in gl.static_range(PANELS):
                piece = pieces.index((slot * PANELS + j) * PAGES + i)
                tma_load(desc, [page, head, 0, j * 64], barrier, piece)


@gluon.jit
def _load_v(source: Inputs, at: Shared, count, due: Due, C: gl.constexpr):
    """Loads V's tile number `count - 1`, if it is due, as soon as its slot is free."""
    if due.is_due:
        slot = (count - 1) % C.stages
        wait_for_slot(count - 1, 1, C)
        _load_tile(source.v, at.v_full.index(slot), at.v, slot, due.key, due.head, due.batch,
                   due.page, source.lengths, due.seqlen_k, C.width_v, C)  # fmt: skip


@gluon.jit
def _load_k(source: Inputs, at: Shared, count, due: Due, C: gl.constexpr):
    """Loads K's tile number `count` as soon as its slot is free."""
    slot = count % C.stages
    wait_for_slot(count, 0, C)
    _load_tile(source.k, at.k_full.index(slot), at.k, slot, due.key, due.head, due.batch,
               due.page, source.lengths, due.seqlen_k, C.width, C)  # fmt: skip


@gluon.jit
def _load_q(
    q_desc, at: Shared, done, tile: Tile, n: Sizes, FIRST: gl.constexpr, END: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Loads the rows of Q of some warpgroups as soon as their buffers are free."""
    buffer = done % C.q_buffers
    for w in gl.static_range(FIRST, END):
        i = buffer * C.warpgroups + w
        mbarrier.wait(at.q_empty.index(i), ((done // C.q_buffers) & 1) ^ 1)
        mbarrier.expect(at.q_full.index(i), 64 * C.width * 2)
        place = corner_of(tile, row_of(tile, w, n, C), 0, C)
        tma_load(q_desc, place, at.q_full.index(i), at.q.index(i))


@gluon.jit
def _in_order(tile: Tile, source: Inputs, n: Sizes, C: gl.constexpr):
    """The same rows of the sequence whose turn it is."""
    batch = sequence_at(tile.batch, source.order, C.sorts)
    k_start, seqlen_k = keys_of(batch, n, source.lengths, C)
    return Tile(tile.row, tile.head, batch, tile.q_start, k_start, tile.seqlen_q, seqlen_k,
                tile.number)  # fmt: skip


@gluon.jit
def _met(t, spot: Spot, source: Inputs, n: Sizes, C: gl.constexpr):
    """Tile `t`: (whether there is one, where the CTA's walk stands, the tile)."""
    if C.packed_q:
        spot = onward(t, spot, n, source.lengths, C)
        more = spot.batch < n.num_sequences
        return more, spot, tile_of(t, spot, n, source.lengths, C)
    else:
        tile = tile_at(gl.minimum(t, anew(n.num_tiles) - 1), n, source.lengths, C)
        if C.sorts > 0:
            tile = _in_order(tile, source, n, C)
        return t < n.num_tiles, spot, tile


@gluon.jit
def first_tile(source: Inputs, n: Sizes, C: gl.constexpr):
    """The CTA's first tile, as `_met` returns it."""
    if C.sorts > 0:
        num_sequences = anew(n.num_sequences)
        longest_first(source.order, source.lengths.seqused_k, num_sequences, C.sorts)
    return _met(gl.program_id(0), start_of_walk(source.lengths, C), source, n, C)


@gluon.jit
def first_with_keys(source: Inputs, n: Sizes, C: gl.constexpr):
    """`first_tile`, or a later one if that is a piece for which there are no keys."""
    more, spot, tile = first_tile(source, n, C)
    if C.in_pieces:
        if C.is_alone:
            more = more & exists(tile, n, C)
        elif more & (exists(tile, n, C) == 0):
            more, spot, tile = next_tile(0, spot, source, n, C)
    return more, spot, tile


@gluon.jit
def next_tile(done, spot: Spot, source: Inputs, n: Sizes, C: gl.constexpr):
    """A tile that no CTA has taken, as `_met` returns it."""
    if C.is_uneven:
        drawn = gl.atomic_add(source.counter, 1)
        more, spot, tile = _met(drawn + gl.num_programs(0), spot, source, n, C)
        if C.in_pieces:
            while more & (exists(tile, n, C) == 0):
                drawn = gl.atomic_add(source.counter, 1)
                more, spot, tile = _met(drawn + gl.num_programs(0), spot, source, n, C)
        total = n.num_tiles
        if C.packed_q:
            total = spot.first  # behind the last sequence: of all
        # Every CTA that had a tile draws once in vain: the launch's last draw.
        if (drawn == total - 1) & (more == 0):
            gl.store(source.counter, 0)
        return more, spot, tile
    else:
        return _met(number_of(done), spot, source, n, C)


@gluon.jit
def producer(source: Inputs, at: Shared, n: Sizes, C: gl.constexpr):
    """Loads what the consumers will read, in their order; V one K/V tile behind K."""
    WARPGROUPS: gl.constexpr = C.warpgroups
    BEFORE_K: gl.constexpr = 1 if C.foresees else C.warpgroups
    done = 0  # tiles of queries
    count = 0  # K/V tiles
    due = Due(False, 0, 0, 0, 0, 0)
    if not C.foresees:
        meet_other_launches(1)
    more, spot, tile = first_with_keys(source, n, C)
    if C.foresees:
        settle(tile.row + tile.head + tile.batch, 1)
        meet_other_launches(1)
    if C.is_uneven and C.num_known == 0:
        post(tile, more, 0, at.notes, C)
    while more:
        head = kv_head_of(tile, n, C)
        batch = place_of(tile, C.packed_k and C.page_size == 0)
        start = start_of_keys(tile.row, tile, n, C)
        end = end_of_tile(tile, n, C)
        if C.q_buffers == 1:  # a single buffer of Q is free only after the last V before it
            _load_v(source, at, count, due, C)
            due = Due(False, 0, 0, 0, 0, 0)
        _load_q(source.q, at, done, tile, n, 0, BEFORE_K, C)
        for i in range(end - start):
            key = tile.k_start + (end - 1 - i) * C.block_n
            page = _page_of(key, batch, source.lengths, C)
            following = Due(True, key, head, batch, tile.seqlen_k, page)
            _load_k(source, at, count, following, C)
            if i == 0:  # the first warpgroup can begin
                _load_q(source.q, at, done, tile, n, BEFORE_K, WARPGROUPS, C)
            _load_v(source, at, count, due, C)
            due = following
            count += 1
        done += 1
        if C.is_alone:
            more = done < 0
        else:
            more, spot, tile = next_tile(done, spot, source, n, C)
            if C.is_uneven:
                post(tile, more, done - C.num_known, at.notes, C)
    _load_v(source, at, count, due, C)
