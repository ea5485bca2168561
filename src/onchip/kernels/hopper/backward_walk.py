"""Which tiles a CTA of the Hopper backward meets, and where their rows lie.

Legend: B batch, S_q / S_k lengths, T packed tokens, H query heads, H_kv key and value heads,
D / D_v head dimensions, BM / BN rows and columns of a tile.
"""

from typing import NamedTuple

from triton.experimental import gluon

from onchip.kernels.hopper.gluon_names import as_tiles, gl, mbarrier, tma_load, tma_store

#: Rows of LSE, D and the float32 dQ that belong to one sequence only.
STATS_BLOCK = gl.constexpr(128)
#: Rows of a packed tensor's descriptor: see `place`.
RAGGED = gl.constexpr(1 << 30)


class Sizes(NamedTuple):
    """Numbers of a call, and where packed sequences begin."""

    cu_seqlens_q: gl.tensor | None
    cu_seqlens_k: gl.tensor | None
    seqlen_q: gl.tensor  # the longest ones, when packed
    seqlen_k: gl.tensor
    num_heads: gl.tensor
    num_kv_heads: gl.tensor
    group: gl.tensor
    stats_width: gl.tensor  # rows of a line of LSE, D and the float32 dQ
    left: gl.tensor
    right: gl.tensor
    units: gl.tensor  # heads of K of all sequences
    lag: gl.tensor  # see `backward_round`
    table: gl.tensor | None  # tiles of keys of each CTA
    slots: gl.tensor  # tiles of a CTA in the table
    whole: gl.tensor  # tiles of keys that have one CTA; further ones are shared
    width: gl.tensor  # D in units of 8, not padded


class Sources(NamedTuple):
    """Descriptors of what a CTA reads."""

    q: gl.tensor
    k: gl.tensor
    v: gl.tensor
    do: gl.tensor
    lse: gl.tensor  # -LSE in base 2
    delta: gl.tensor  # -D


class Walk(NamedTuple):
    """One CTA's way: tiles that an edge of the mask crosses first, then those seen in full.

    Tiles [first, full) and [full_end, end) are crossed by an edge; of every query head that
    reads these keys, where the CTA owns keys.
    """

    own: gl.tensor  # first key, or query, of the CTA's own tile
    head: gl.tensor  # its head: of K, or of Q
    first: gl.tensor
    full: gl.tensor
    full_end: gl.tensor
    end: gl.tensor
    edges: gl.tensor  # tiles of a head that are masked
    inner: gl.tensor  # tiles of a head that are not
    shift: gl.tensor  # S_k - S_q
    length_k: gl.tensor
    # The sequence's queries and keys for a descriptor, see `place`.
    q_batch: gl.tensor
    q_end: gl.tensor
    q_row: gl.tensor
    k_batch: gl.tensor
    k_end: gl.tensor
    k_row: gl.tensor
    line: gl.tensor  # row of the statistics where the sequence's head 0 begins
    stride: gl.tensor  # their rows from head to head
    back: gl.tensor  # whether it goes from the last queries down, masked tiles last


@gluon.jit
def span(cu_seqlens, batch, seqlen, PACKED: gl.constexpr):
    """A sequence's length, and its coordinates for a descriptor made by `described`.

    Dense tensors are (1, B, S, H, D). Packed ones have two more dimensions whose strides undo
    each other modulo 2^64, so that the bound of the rows stands at the sequence's end: TMA then
    gives 0 for other sequences' rows and does not write them (as triton.tools.ragged_tma).
    """
    if PACKED:
        start = gl.load(cu_seqlens + batch)
        end = gl.load(cu_seqlens + batch + 1)
        length = end - start
        return length, start, RAGGED, end, RAGGED - length
    else:
        return seqlen, 0, 0, batch, 0


@gluon.jit
def stats_row(batch, q_start, sizes, PACKED: gl.constexpr):
    """Row of the statistics where a sequence's head 0 begins."""
    if PACKED:
        return (q_start // STATS_BLOCK + batch) * STATS_BLOCK
    else:
        return batch * sizes.num_heads * sizes.stats_width


class Unit(NamedTuple):
    """The CTAs of one head of K of a sequence, and this CTA's place among them."""

    index: gl.tensor
    ctas: gl.tensor
    place: gl.tensor
    last: gl.tensor  # whether it is one of the last units


@gluon.jit
def item_of(n, sizes):
    """The n-th tile of keys of a CTA with a list, among all tiles; -1 behind its last one."""
    return gl.load(sizes.table + gl.program_id(0) * sizes.slots + n)


@gluon.jit
def piece_of(item, sizes, SPEC: gl.constexpr):
    """(Tile of keys, piece of its walk) of a CTA's item; whole tiles come first."""
    if SPEC.pieces == 1:
        return item, 0
    else:
        behind = gl.maximum(item - sizes.whole, 0)
        shared = item >= sizes.whole
        tile = gl.where(shared, sizes.whole + behind // SPEC.pieces, item)
        return tile, gl.where(shared, behind % SPEC.pieces, 0)


@gluon.jit
def is_whole(item, sizes, SPEC: gl.constexpr):
    """Whether an item is a tile of keys that no other CTA shares."""
    if SPEC.pieces == 1:
        return True
    else:
        return item < sizes.whole


@gluon.jit
def unit_of(item, sizes, SPEC: gl.constexpr):
    """The unit of an item's tile of keys: tiles of several units begin side by side among the last
    `lag` ones, and where sums are ordered."""
    item, _ = piece_of(item, sizes, SPEC)
    ctas = (sizes.seqlen_k + SPEC.block_n - 1) // SPEC.block_n
    index = item // ctas
    place = item - index * ctas
    last = False
    if SPEC.has_right or not SPEC.apart:
        first = sizes.units - sizes.lag
        behind = item - first * ctas
        last = behind >= 0
        if SPEC.abreast > 0:
            width = gl.maximum(sizes.lag // SPEC.abreast, 1)
            base = gl.where(last, first, index - index % width)
            end = gl.where(last, sizes.units, first)
            width = gl.minimum(gl.where(last, sizes.lag, width), end - base)
            behind = item - base * ctas
            place = behind // width
            index = base + behind % width
        else:
            place = gl.where(last, behind // sizes.lag, place)
            index = gl.where(last, first + behind % sizes.lag, index)
    return Unit(index, ctas, place, last)


@gluon.jit
def plan_keys(item, sizes, SPEC: gl.constexpr):
    """The walk over queries of an item: a tile of keys, or a piece of one."""
    BM: gl.constexpr = SPEC.block_m
    BN: gl.constexpr = SPEC.block_n
    index, num_n, tile, last_unit = unit_of(item, sizes, SPEC)
    back = False
    if SPEC.ordered and SPEC.has_right:
        if SPEC.turns_back:
            back = last_unit
        tile = gl.where(back, tile, num_n - 1 - tile)
    key = tile * BN
    batch = index // sizes.num_kv_heads
    length_q, q_start, q_batch, q_end, q_row = span(
        sizes.cu_seqlens_q, batch, sizes.seqlen_q, SPEC.packed
    )
    length_k, _, k_batch, k_end, k_row = span(
        sizes.cu_seqlens_k, batch, sizes.seqlen_k, SPEC.packed
    )
    shift = length_k - length_q
    num_m = (length_q + BM - 1) // BM
    if SPEC.packed:
        num_m = gl.where(key < length_k, num_m, 0)
    first = 0
    full = 0
    end = num_m
    full_end = num_m
    last = gl.minimum(key + BN, length_k) - 1
    if SPEC.has_right:
        first = gl.minimum(gl.maximum(key - shift - sizes.right, 0) // BM, num_m)
        full = (gl.maximum(last - shift - sizes.right, 0) + BM - 1) // BM
    if SPEC.has_left:
        end = gl.minimum(gl.maximum(last - shift + sizes.left + BM, 0) // BM, num_m)
        full_end = gl.maximum(key - shift + sizes.left + 1, 0) // BM
    if SPEC.has_tail:
        # Keys past the end are 0 in shared memory, but exp2(0 - LSE) may be anything.
        full = gl.where(key + BN > length_k, num_m, full)
    if SPEC.pieces > 1:
        _, piece = piece_of(item, sizes, SPEC)
        shared = item >= sizes.whole
        first = gl.where(shared, num_m * piece // SPEC.pieces, 0)
        end = gl.where(shared, num_m * (piece + 1) // SPEC.pieces, num_m)
        full_end = end
    end = gl.maximum(end, first)
    full = gl.minimum(gl.maximum(full, first), end)
    full_end = gl.minimum(gl.maximum(full_end, full), end)
    return Walk(
        key, index - batch * sizes.num_kv_heads, first, full, full_end, end,
        (full - first) + (end - full_end), full_end - full, shift, length_k,
        q_batch, q_end, q_row, k_batch, k_end, k_row,
        stats_row(batch, q_start, sizes, SPEC.packed), sizes.stats_width, back,
    )  # fmt: skip


@gluon.jit
def num_steps(walk, sizes):
    """Steps of the CTA that owns keys, and how many of them, the first ones, are masked."""
    masked = walk.edges * sizes.group
    return masked + walk.inner * sizes.group, masked


class Rows(NamedTuple):
    """The queries of all heads that read one head of K, of one sequence."""

    head: gl.tensor  # the first of them
    tiles: gl.tensor  # of BM rows, of a head
    length: gl.tensor
    start: gl.tensor  # the sequence's first row in (T, H, D)
    q_batch: gl.tensor  # see `Walk`
    q_end: gl.tensor
    q_row: gl.tensor
    line: gl.tensor  # row of the float32 dQ where the first head begins
    stride: gl.tensor


@gluon.jit
def rows_of(unit, sizes, SPEC: gl.constexpr):
    """The queries of a unit."""
    batch = unit // sizes.num_kv_heads
    head = (unit - batch * sizes.num_kv_heads) * sizes.group
    length, q_start, q_batch, q_end, q_row = span(
        sizes.cu_seqlens_q, batch, sizes.seqlen_q, SPEC.packed
    )
    line = stats_row(batch, q_start, sizes, SPEC.packed) + head * sizes.stats_width
    tiles = (length + SPEC.block_m - 1) // SPEC.block_m
    start = q_start if SPEC.packed else batch * sizes.seqlen_q
    return Rows(head, tiles, length, start, q_batch, q_end, q_row, line, sizes.stats_width)


@gluon.jit
def plan_queries(sizes, SPEC: gl.constexpr):
    """The walk over keys of the CTA that owns a tile of queries."""
    BM: gl.constexpr = SPEC.block_m
    BN: gl.constexpr = SPEC.block_n
    num_m = (sizes.seqlen_q + BM - 1) // BM
    program = gl.program_id(0)
    index = program // num_m
    tile = program - index * num_m
    if SPEC.has_right:
        tile = num_m - 1 - tile  # the longest walks first
    row = tile * BM
    batch = index // sizes.num_heads
    length_q, q_start, q_batch, q_end, q_row = span(
        sizes.cu_seqlens_q, batch, sizes.seqlen_q, SPEC.packed
    )
    length_k, _, k_batch, k_end, k_row = span(
        sizes.cu_seqlens_k, batch, sizes.seqlen_k, SPEC.packed
    )
    shift = length_k - length_q
    last = gl.minimum(row + BM, length_q) - 1
    num_n = (length_k + BN - 1) // BN
    if SPEC.packed:
        num_n = gl.where(row < length_q, num_n, 0)
    first = 0
    full = 0
    end = num_n
    full_end = length_k // BN
    if SPEC.has_right:
        end = gl.minimum(gl.maximum(last + shift + sizes.right + BN, 0) // BN, num_n)
        full_end = gl.minimum(gl.maximum(row + shift + sizes.right + 1, 0) // BN, full_end)
    if SPEC.has_left:
        first = gl.minimum(gl.maximum(row + shift - sizes.left, 0) // BN, num_n)
        full = (gl.maximum(last + shift - sizes.left, 0) + BN - 1) // BN
    end = gl.maximum(end, first)
    full = gl.minimum(gl.maximum(full, first), end)
    full_end = gl.minimum(gl.maximum(full_end, full), end)
    return Walk(
        row, index - batch * sizes.num_heads, first, full, full_end, end,
        (full - first) + (end - full_end), full_end - full, shift, length_k,
        q_batch, q_end, q_row, k_batch, k_end, k_row,
        stats_row(batch, q_start, sizes, SPEC.packed), sizes.stats_width, False,
    )  # fmt: skip


@gluon.jit
def load_own(
    desc, to, bar, x, walk, PIECE: gl.constexpr, D: gl.constexpr, SPEC: gl.constexpr
):  # fmt: skip
    """Loads the pieces of K or V that a CTA owns into buffer x."""
    N: gl.constexpr = SPEC.block_n // PIECE
    mbarrier.expect(bar, SPEC.block_n * D * 2)
    for h in gl.static_range(N):
        load_keys(desc, walk, walk.head, walk.own + h * PIECE, bar, to.index(x * N + h), PIECE, D)


class Edges(NamedTuple):
    """Where the mask's edges run, of the first masked tile; one tile further is BLOCK further.

    Few numbers, since they stay in registers through the whole walk.
    """

    count: gl.tensor  # masked tiles of a head
    low: gl.tensor  # of those, tiles before the ones that are seen in full
    inner: gl.tensor  # tiles that are seen in full
    right: gl.tensor  # key - query, relative to the tile
    left: gl.tensor
    tail: gl.tensor  # keys of the tile


@gluon.jit
def edge_index(edges, i, SPEC: gl.constexpr):
    """Tile of the i-th masked step, counted from the head's first one."""
    j = i % gl.maximum(edges.count, 1)
    if SPEC.high_edges:
        j += gl.where(j < edges.low, 0, edges.inner)
    return j


@gluon.jit
def edge_tile(walk, i):
    """Head (of the group) and tile of the i-th masked step."""
    head = i // gl.maximum(walk.edges, 1)
    j = i - head * walk.edges
    low = walk.full - walk.first
    return head, walk.first + j + gl.where(j < low, 0, walk.inner)


@gluon.jit
def tile_at(walk, i, group):
    """Head (of the group) and tile of step i: the masked ones of all heads come first, or last
    where the walk goes back."""
    masked = walk.edges * group
    i = gl.where(walk.back, masked + walk.inner * group - 1 - i, i)
    edge_head, edge = edge_tile(walk, i)
    j = i - masked
    head = j // gl.maximum(walk.inner, 1)
    inner = walk.full + j - head * walk.inner
    return gl.where(i < masked, edge_head, head), gl.where(i < masked, edge, inner)


@gluon.jit
def turn_of(walk, m, sizes, SPEC: gl.constexpr):
    """How many CTAs add to tile m of dQ before this one, where that is ordered.

    With a right edge the last keys come first: a CTA begins where the mask's edge crosses it,
    and when it comes to a tile the CTAs of later keys have been there. Otherwise the first keys
    do, and every CTA follows behind the one before, which has begun some steps earlier where tiles
    of several heads begin side by side (`Spec.abreast`).
    """
    BM: gl.constexpr = SPEC.block_m
    BN: gl.constexpr = SPEC.block_n
    own = walk.own // BN
    if SPEC.has_right:
        last = (walk.length_k - 1) // BN
        reach = gl.maximum(m * BM + BM - 1 + walk.shift + sizes.right, 0)
        return gl.where(walk.back, own, gl.minimum(reach // BN, last) - own)
    elif SPEC.has_left:
        return own - gl.maximum(m * BM + walk.shift - sizes.left, 0) // BN
    else:
        return own


@gluon.jit
def load_queries(desc, walk, head, row, bar, to, ROWS: gl.constexpr, D: gl.constexpr):
    """Starts to read rows of one head of Q or dO."""
    SHAPE: gl.constexpr = [1, 1, ROWS, 1, D]
    place = [walk.q_batch, walk.q_end, walk.q_row + row, head, 0]
    tma_load(desc, place, bar, as_tiles(to, desc, SHAPE))


@gluon.jit
def load_tile(sources, S, walk, i, t, sizes, SPEC: gl.constexpr):
    """Loads tile i of a walk over queries, as step t: Q and LSE, then dO and D, each as soon as
    all have read what was there."""
    BM: gl.constexpr = SPEC.block_m
    D: gl.constexpr = SPEC.dim
    DV: gl.constexpr = SPEC.dim_v
    head, m = tile_at(walk, i, sizes.group)
    head += walk.head * sizes.group
    row = m * BM
    line = walk.line + head * walk.stride + row
    stage = t % SPEC.stages
    phase = ((t // SPEC.stages) & 1) ^ 1
    bar = S.q_full.index(stage)
    mbarrier.wait(S.q_empty.index(stage), phase)
    mbarrier.expect(bar, BM * D * 2 + BM * 4)
    load_queries(sources.q, walk, head, row, bar, S.q.index(stage), BM, D)
    tma_load(sources.lse, [line], bar, S.lse.index(stage))
    bar = S.do_full.index(stage)
    mbarrier.wait(S.do_empty.index(stage), phase)
    mbarrier.expect(bar, BM * DV * 2 + BM * 4)
    load_queries(sources.do, walk, head, row, bar, S.do.index(stage), BM, DV)
    tma_load(sources.delta, [line], bar, S.delta.index(stage))


@gluon.jit
def load_keys(desc, walk, head, row, bar, to, ROWS: gl.constexpr, D: gl.constexpr):
    """Starts to read rows of one head of K or V."""
    SHAPE: gl.constexpr = [1, 1, ROWS, 1, D]
    place = [walk.k_batch, walk.k_end, walk.k_row + row, head, 0]
    tma_load(desc, place, bar, as_tiles(to, desc, SHAPE))


@gluon.jit
def store_queries(desc, walk, head, row, source, ROWS: gl.constexpr, D: gl.constexpr):
    """Starts to write rows of one head of dQ."""
    SHAPE: gl.constexpr = [1, 1, ROWS, 1, D]
    place = [walk.q_batch, walk.q_end, walk.q_row + row, head, 0]
    tma_store(desc, place, as_tiles(source, desc, SHAPE))


@gluon.jit
def store_keys(desc, walk, head, row, source, ROWS: gl.constexpr, D: gl.constexpr):
    """Starts to write rows of one head of dK or dV."""
    SHAPE: gl.constexpr = [1, 1, ROWS, 1, D]
    place = [walk.k_batch, walk.k_end, walk.k_row + row, head, 0]
    tma_store(desc, place, as_tiles(source, desc, SHAPE))
