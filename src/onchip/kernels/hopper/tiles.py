"""Where the forward's tiles lie, and which keys they see.

The mask is a band aligned to the bottom right corner: with ``shift = S_k - S_q`` query i sees
key j iff ``i + shift - left <= j <= i + shift + right``. A warpgroup walks its K/V tiles from
the last to the first. The right edge cuts the last one and, where ``shift + right`` is not a
multiple of 64, perhaps the one before; the left edge cuts the first ones. All others are seen
in full and are not masked.

Tiles are handed out in groups of heads whose keys fit in the L2 cache together, within a group
the longest first.

A tile's rows are the queries of one head or, where queries are few, the heads of a group side by
side, query after query: row r is query r // G and head r % G (`Code.heads` is then G, else 1).
With few sequences the keys of such a tile are cut into pieces, each a tile of its own; tiles of
one rows' pieces follow one another.

Legend: B batch, S_q / S_k lengths, H query heads, G heads of a group, BM / BN rows and columns
(keys) of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon

from onchip.kernels.hopper.gluon_names import gl, mbarrier


class Sizes(NamedTuple):
    """The run-time numbers of a launch."""

    seqlen_q: object  # longest, where sequences are packed
    seqlen_k: object
    tokens_q: object
    num_heads: object
    group: object  # query heads of a KV head
    num_sequences: object
    num_blocks: object  # tiles of one head, or group
    num_tiles: object
    heads_per_group: object  # heads that share the L2 cache
    left: object
    right: object


class Lengths(NamedTuple):
    """Where sequences lie; what a layout does not have is any pointer."""

    cu_seqlens_q: object  # (B + 1,)
    cu_seqlens_k: object  # (B + 1,)
    seqused_k: object  # (B,)
    block_table: object  # (B, max_pages)
    stride_table: object


class Tile(NamedTuple):
    """BM rows; positions count from the sequence's own first query and key."""

    row: object  # the first one
    head: object  # query head, or head of K where a tile has the heads of a group
    batch: object
    q_start: object  # where the sequence begins in memory
    k_start: object
    seqlen_q: object
    seqlen_k: object
    number: object  # among all tiles, where keys are cut into pieces


class Spot(NamedTuple):
    """How far a CTA has walked along packed sequences."""

    batch: object  # a sequence
    first: object  # number of its first tile; tiles of those before it come before
    start: object  # its first query in memory
    size: object  # its queries


class View(NamedTuple):
    """A warpgroup's rows of a tile, as it looks at the keys."""

    tile: object  # Tile
    row: object  # of the first query
    rows: object  # 0 to 63, in the layout of S
    slope: object  # ALiBi slope * log2(e)


class Notes(NamedTuple):
    """Shared memory through which the producer tells the consumers its tiles."""

    slots: object  # (2 * NOTE_SIZE, 1) int32
    full: object
    empty: object


NOTE_SIZE = gl.constexpr(8)
_FEWEST_TILES = gl.constexpr(2)  # of keys in a piece


@gluon.jit
def anew(x):
    """A number of the launch (int32), read where this stands.

    What follows from such numbers alone LLVM makes before the roles begin, and a consumer has no
    register to keep it in: 8 to 32 bytes were spilled at D = 256.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32,
                                     is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def _span(cu_seqlens, batch):
    start = gl.load(cu_seqlens + batch)
    return start, gl.load(cu_seqlens + batch + 1) - start


@gluon.jit
def keys_of(batch, n: Sizes, lengths: Lengths, C: gl.constexpr):
    """Where a sequence's keys begin in memory, and how many there are."""
    start = 0
    size = n.seqlen_k
    if C.packed_k:
        start, size = _span(lengths.cu_seqlens_k, batch)
        if C.page_size > 0:  # pages have no common start: the offsets only tell lengths
            start = 0
    if C.has_used:
        size = gl.load(lengths.seqused_k + batch)
    return start, size


@gluon.jit
def query_of(row, C: gl.constexpr):
    """The query that a row belongs to."""
    if C.heads > 1:
        return row // C.heads
    else:
        return row


@gluon.jit
def num_rows(num_queries, C: gl.constexpr):
    """Rows of so many queries."""
    if C.heads > 1:
        return anew(num_queries) * C.heads
    else:
        return num_queries


@gluon.jit
def num_units(n: Sizes, C: gl.constexpr):
    """Heads, or groups of heads, that a sequence's tiles belong to."""
    if C.heads > 1:
        return anew(n.num_heads) // C.heads
    else:
        return n.num_heads


@gluon.jit
def shift_of(tile: Tile):
    """How many more keys than queries a tile's sequence has."""
    return anew(tile.seqlen_k) - anew(tile.seqlen_q)


@gluon.jit
def last_seen(tile: Tile, n: Sizes):
    """The last key up to the right edge that a sequence's first query sees; may be negative."""
    return shift_of(tile) + anew(n.right)


@gluon.jit
def first_seen(tile: Tile, n: Sizes):
    """The first key from the left edge on that a sequence's first query sees; may be negative."""
    return shift_of(tile) - anew(n.left)


@gluon.jit
def num_pairs(n: Sizes, C: gl.constexpr):
    """Sequences times heads, or groups of heads."""
    return n.num_sequences * num_units(n, C)


@gluon.jit
def kv_head_of(tile: Tile, n: Sizes, C: gl.constexpr):
    """The tile's head of K and V."""
    if C.heads > 1:
        return tile.head
    else:
        return tile.head // n.group


@gluon.jit
def num_pieces(n: Sizes, C: gl.constexpr):
    """Most pieces of a tile's keys."""
    if C.in_pieces:
        return n.num_tiles // (num_pairs(n, C) * n.num_blocks)
    else:
        return 1


@gluon.jit
def _place(t, num_heads, num_blocks, n: Sizes):
    """Tile `t` of so many heads: (its head, its block); in groups, the longest tiles first."""
    num_blocks = anew(num_blocks)
    num_tiles = anew(n.heads_per_group) * num_blocks
    group = t // num_tiles
    rest = t - group * num_tiles
    size = gl.minimum(n.heads_per_group, num_heads - group * n.heads_per_group)
    return group * n.heads_per_group + rest % size, num_blocks - 1 - rest // size


@gluon.jit
def tile_at(t, n: Sizes, lengths: Lengths, C: gl.constexpr):
    """Tile number `t` where all sequences have as many queries."""
    if C.in_pieces:
        block = t // num_pieces(n, C) % n.num_blocks
        pair = t // num_pieces(n, C) // n.num_blocks
    elif C.is_cut and not C.is_folded:
        pair, block = _place(t, num_pairs(n, C), n.num_blocks, n)
    else:
        block = t % n.num_blocks
        pair = t // n.num_blocks
    units = num_units(n, C)
    batch = pair // units
    k_start, seqlen_k = keys_of(batch, n, lengths, C)
    row = block * C.block_m
    if C.is_folded:
        row = block * 64
    return Tile(row, pair % units, batch, 0, k_start, n.seqlen_q, seqlen_k, t)


@gluon.jit
def number_of(done):
    """A CTA's tile number `done` where none are drawn."""
    return done * gl.num_programs(0) + gl.program_id(0)


@gluon.jit
def start_of_walk(lengths: Lengths, C: gl.constexpr):
    """The first packed sequence."""
    if C.packed_q:
        start, size = _span(lengths.cu_seqlens_q, 0)
        return Spot(0, 0, start, size)
    else:
        return Spot(0, 0, 0, 0)


@gluon.jit
def onward(t, spot: Spot, n: Sizes, lengths: Lengths, C: gl.constexpr):
    """Walks on to the sequence of tile `t`, or past the last one."""
    units = num_units(n, C) * num_pieces(n, C)
    batch = spot.batch
    first = spot.first
    start = spot.start
    size = spot.size
    following = first + (num_rows(size, C) + C.block_m - 1) // C.block_m * units
    while (batch < n.num_sequences) & (t >= following):
        batch += 1
        first = following
        start += size
        size = gl.load(lengths.cu_seqlens_q + gl.minimum(batch + 1, n.num_sequences)) - start
        following = first + (num_rows(size, C) + C.block_m - 1) // C.block_m * units
    return Spot(batch, first, start, size)


@gluon.jit
def tile_of(t, spot: Spot, n: Sizes, lengths: Lengths, C: gl.constexpr):
    """Tile number `t`, of the packed sequence to which `onward` came; past the last, any tile."""
    units = num_units(n, C)
    num_blocks = gl.maximum((num_rows(spot.size, C) + C.block_m - 1) // C.block_m, 1)
    index = gl.minimum(t - spot.first, num_blocks * units * num_pieces(n, C) - 1)
    if C.in_pieces:
        block = index // num_pieces(n, C) % num_blocks
        head = index // num_pieces(n, C) // num_blocks
    else:
        head, block = _place(index, units, num_blocks, n)
    batch = gl.minimum(spot.batch, n.num_sequences - 1)
    k_start, seqlen_k = keys_of(batch, n, lengths, C)
    return Tile(block * C.block_m, head, batch, spot.start, k_start, spot.size, seqlen_k, t)


@gluon.jit
def post(tile: Tile, more, done, notes: Notes, C: gl.constexpr):
    """The producer tells the consumers its tile number `done`, or that there is none."""
    slot = done & 1
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(notes.empty.index(slot), ((done >> 1) & 1) ^ 1)
    base = slot * NOTE_SIZE
    notes.slots.index(base).store(gl.full([1], gl.cast(more, gl.int32), gl.int32, layout))
    notes.slots.index(base + 1).store(gl.full([1], tile.row, gl.int32, layout))
    notes.slots.index(base + 2).store(gl.full([1], tile.head, gl.int32, layout))
    notes.slots.index(base + 3).store(gl.full([1], tile.batch, gl.int32, layout))
    if C.packed_q:
        notes.slots.index(base + 4).store(gl.full([1], tile.q_start, gl.int32, layout))
        notes.slots.index(base + 5).store(gl.full([1], tile.seqlen_q, gl.int32, layout))
    if C.is_ragged:
        notes.slots.index(base + 6).store(gl.full([1], tile.seqlen_k, gl.int32, layout))
    if C.in_pieces:
        notes.slots.index(base + 7).store(gl.full([1], tile.number, gl.int32, layout))
    mbarrier.arrive(notes.full.index(slot), count=1)


@gluon.jit
def _number(slot):
    return gl.max(slot.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def read(done, n: Sizes, notes: Notes, C: gl.constexpr):
    """A consumer learns tile number `done`: (whether there is one, the tile)."""
    slot = done & 1
    mbarrier.wait(notes.full.index(slot), (done >> 1) & 1)
    base = slot * NOTE_SIZE
    more = _number(notes.slots.index(base)) != 0
    row = _number(notes.slots.index(base + 1))
    head = _number(notes.slots.index(base + 2))
    batch = _number(notes.slots.index(base + 3))
    q_start = 0
    seqlen_q = n.seqlen_q
    seqlen_k = n.seqlen_k
    if C.packed_q:
        q_start = _number(notes.slots.index(base + 4))
        seqlen_q = _number(notes.slots.index(base + 5))
    if C.is_ragged:
        seqlen_k = _number(notes.slots.index(base + 6))
    number = 0
    if C.in_pieces:
        number = _number(notes.slots.index(base + 7))
    mbarrier.arrive(notes.empty.index(slot), count=1)
    return more, Tile(row, head, batch, q_start, 0, seqlen_q, seqlen_k, number)


@gluon.jit
def row_of(tile: Tile, W: gl.constexpr, n: Sizes, C: gl.constexpr):
    """The first of warpgroup W's 64 rows of a tile."""
    if C.is_folded and W > 0:
        return n.num_blocks * 128 - 64 - tile.row
    else:
        return tile.row + W * 64


@gluon.jit
def end_of_keys(row_end, tile: Tile, n: Sizes, C: gl.constexpr):
    """K/V tiles up to the last one that a row before `row_end` sees; at least one."""
    end = anew(tile.seqlen_k)
    if C.has_right:
        end = gl.minimum(query_of(row_end, C) + last_seen(tile, n), end)
    return gl.maximum((end + C.block_n - 1) // C.block_n, 1)


@gluon.jit
def _end_of_rows(tile: Tile, n: Sizes, C: gl.constexpr):
    """`end_of_keys` of a whole tile of queries, whose last warpgroup sees most keys."""
    LAST: gl.constexpr = C.warpgroups - 1
    return end_of_keys(row_of(tile, LAST, n, C) + 64, tile, n, C)


@gluon.jit
def piece_of(tile: Tile, n: Sizes, C: gl.constexpr):
    """A tile's piece of the keys: (its number, K/V tiles in each, pieces that there are)."""
    end = _end_of_rows(tile, n, C)
    most = num_pieces(n, C)
    size = gl.maximum((end + most - 1) // most, _FEWEST_TILES)
    return tile.number % most, size, (end + size - 1) // size


@gluon.jit
def exists(tile: Tile, n: Sizes, C: gl.constexpr):
    """Whether there are keys for a tile's piece."""
    index, _, count = piece_of(tile, n, C)
    return index < count


@gluon.jit
def end_of_tile(tile: Tile, n: Sizes, C: gl.constexpr):
    """The end of the K/V tiles that a tile's warpgroups walk."""
    end = _end_of_rows(tile, n, C)
    if C.in_pieces:
        index, size, _ = piece_of(tile, n, C)
        end = gl.minimum(end, (index + 1) * size)
    return end


@gluon.jit
def start_of_keys(row, tile: Tile, n: Sizes, C: gl.constexpr):
    """The K/V tile with the first key that row `row` and later ones see, or walk."""
    start = 0
    if C.in_pieces:
        index, size, _ = piece_of(tile, n, C)
        start = index * size
    if C.has_left:
        start = gl.maximum(query_of(row, C) + first_seen(tile, n), 0) // C.block_n
    return start


@gluon.jit
def num_cut_on_the_right(row, end, tile: Tile, n: Sizes, C: gl.constexpr):
    """K/V tiles before `end` that the right edge cuts for row `row` or later ones; at least one.

    The tile with the row's own last key counts, even where it is the last of the tile: without
    maxima every row needs one from a masked tile.
    """
    cut = 1
    if C.cuts_two:
        last = query_of(row, C) + last_seen(tile, n)
        cut = gl.maximum(end - gl.maximum(last, 0) // C.block_n, 1)
    return cut


@gluon.jit
def num_before_the_left(row_end, end, tile: Tile, n: Sizes, C: gl.constexpr):
    """K/V tiles before `end` that the left edge does not cut for any row before `row_end`."""
    start = 0
    if C.has_left:
        first = query_of(row_end, C) - 1 + first_seen(tile, n)
        start = (gl.maximum(first, 0) + C.block_n - 1) // C.block_n
    return end - start
