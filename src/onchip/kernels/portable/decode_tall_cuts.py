"""Device functions of the tall decode: which tiles of which sequence a CTA walks.

A unit is a head of K and a block of rows; program 1 counts the pieces of sequences.

Legend: B sequences, padded to a power of two.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon

from onchip.kernels.gluon_names import gl
from onchip.kernels.portable.decode_cuts import dealt, pieces


class Lengths(NamedTuple):
    """Where sequences lie, how many there are, and how they are cut."""

    cu_seqlens_q: object
    seqused_k: object
    num_sequences: object
    seqlen_q: object
    seqlen_k: object
    splits: object
    num_sms: object


class Piece(NamedTuple):
    """What a CTA walks; a sequence without keys is one tile of which no row sees a key."""

    batch: object
    kv_head: object
    row_start: object  # first row
    q_start: object  # first query of the sequence in memory
    num_queries: object
    length: object  # keys of the sequence
    start: object  # tiles
    stop: object
    count: object  # pieces of the sequence
    index: object  # which of them this is
    first: object  # number of the first of them among all pieces
    exists: object  # whether there is such a piece
    alike: object  # whether all sequences are cut into as many pieces, unless keys are fewer


@gluon.jit
def _uniform(x):
    """A number that all lanes have alike; of what shuffles gave the assembler does not know it."""
    return gl.inline_asm_elementwise("redux.sync.max.s32 $0, $1, 0xffffffff;", "=r,r", [x],
                                     dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def _cut(number, lengths: Lengths, SPEC: gl.constexpr):
    """Sequence, piece, pieces of that sequence, the first one's number, tiles of a piece, `alike`.

    Unequal lengths are cut so that each program that runs at a time gets one whole piece, or rests.
    """
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    splits, num_sequences = lengths.splits, lengths.num_sequences
    every = gl.arange(0, SPEC.batch_padded, FLAT)
    used = gl.load(lengths.seqused_k + every, mask=every < num_sequences, other=0)
    tiles = gl.cdiv(used, SPEC.block_n)
    batch = number // splits
    index = number % splits
    first = batch * splits
    own = gl.sum(gl.where(every == batch, tiles, 0), 0)
    count = pieces(own, splits, SPEC)
    size = gl.cdiv(own, count)
    alike = _uniform(gl.max(tiles, 0)) * num_sequences * 4 <= _uniform(gl.sum(tiles, 0)) * 5
    if alike == 0:
        shares = SPEC.sm_pieces * lengths.num_sms
        batch, index, count, first, size = dealt(every, tiles, num_sequences, splits, shares, SPEC)
    return (_uniform(batch), _uniform(index), _uniform(count), _uniform(first), _uniform(size),
            alike)  # fmt: skip


@gluon.jit
def piece_of(lengths: Lengths, SPEC: gl.constexpr):
    """What this CTA walks."""
    number = gl.program_id(1)
    num_sequences = lengths.num_sequences
    size = 0
    if SPEC.batch_padded == 1:
        batch = number // lengths.splits
        index = number % lengths.splits
        first = batch * lengths.splits
        count = lengths.splits
        alike = number >= 0
    else:
        batch, index, count, first, size, alike = _cut(number, lengths, SPEC)
    exists = (batch < num_sequences) & (index < count)
    batch = gl.minimum(batch, num_sequences - 1)
    length = lengths.seqlen_k
    if lengths.seqused_k is not None:
        length = gl.load(lengths.seqused_k + batch)
    q_start = 0
    num_queries = lengths.seqlen_q
    if SPEC.packed_q:
        q_start = gl.load(lengths.cu_seqlens_q + batch)
        num_queries = gl.load(lengths.cu_seqlens_q + batch + 1) - q_start
    tiles = gl.cdiv(length, SPEC.block_n)
    if SPEC.batch_padded == 1:
        count = pieces(tiles, lengths.splits, SPEC)
        exists = exists & (index < count)
        size = gl.cdiv(tiles, count)
    unit = gl.program_id(0)
    row_start = (unit % SPEC.row_blocks) * SPEC.rows
    exists = exists & (row_start < num_queries * SPEC.group)
    start = index * size
    stop = gl.maximum(gl.minimum(start + size, tiles), start + 1)
    first += unit * gl.num_programs(1)
    return Piece(batch, unit // SPEC.row_blocks, row_start, q_start, num_queries, length, start,
                 stop, count, index, first, exists, alike)  # fmt: skip
