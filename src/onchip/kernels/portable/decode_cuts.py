"""How the decodes in Gluon cut keys into pieces.

Legend: B sequences, padded to a power of two.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def pieces(tiles, wanted, SPEC: gl.constexpr):
    """Pieces that a sequence really gets, at least one."""
    size = gl.maximum(gl.cdiv(tiles, gl.maximum(wanted, 1)), SPEC.min_tiles)
    return gl.maximum(gl.cdiv(tiles, size), 1)


#: Rests are dealt in 2 to so many classes of lengths. H200, 2026-11-30: 3, 4 and 5 are alike.
_CLASS_BITS = gl.constexpr(4)
#: So many sequences at most: each warp has all of them. H200, 2026-11-30, 512 of up to 2k, whose
#: rests are one in eight of what runs at a time: 514 us, 518 with classes.
_MOST_IN_CLASSES = gl.constexpr(256)


@gluon.jit
def _of_class(place, short, rest, size):
    """Which rests are in the class that rest number `place` falls in, and its number there.

    Classes go by length, the longest first.

    Args:
        place: number of a rest.
        short: (B,) tiles of each rest.
        rest: (B,) 1 where there is one, else 0.
        size: tiles of a whole piece.
    """
    kind = gl.where(rest > 0, (short << _CLASS_BITS) // size, -1)
    own = place * 0
    for i in gl.static_range(_CLASS_BITS):
        longer = own + (1 << (_CLASS_BITS - 1 - i))
        own = gl.where(gl.sum((kind >= longer).to(gl.int32), 0) > place, longer, own)
    return (kind == own).to(gl.int32), place - gl.sum((kind > own).to(gl.int32), 0)


@gluon.jit
def dealt(every, tiles, num_sequences, splits, num_pieces, SPEC: gl.constexpr):
    """Which piece of which sequence this CTA takes where all pieces are as long, but for rests.

    CTAs of whole pieces come first, then those of sequences' rests, the longest first: short ones
    fill the gaps at the end of a launch, and a sequence of many pieces is merged before that. H200,
    2026-11-30, us, rests in the order of sequences and in this one: 64 of log-uniform lengths 307.4
    and 302.8 (a read 291.1), one of 128k beside 63 of 1k 200.2 and 189.4 (178.3).

    Args:
        every: (B,) numbers of sequences.
        tiles: (B,) tiles of each; 0 past the last one.
        num_sequences: how many there are.
        splits: pieces of each sequence where all are about as long.
        num_pieces: of all sequences, about, where they are not.
        SPEC: a `DecodeSpec`.

    Returns:
        Sequence, piece, pieces of that sequence, program of the first of them (among programs
        that are counted by sequences), tiles of a whole piece.
    """
    total = gl.sum(tiles, 0)
    longest = gl.max(tiles, 0)
    unequal = longest * num_sequences * 4 > total * 5
    share = gl.cdiv(total * gl.num_programs(0), num_pieces)
    size = gl.maximum(gl.where(unequal, share, gl.cdiv(longest, splits)), SPEC.min_tiles)
    seen = every < num_sequences
    whole = gl.where(seen, tiles // size, 0)
    # A sequence without tokens has an empty rest: someone writes its zeros.
    rest = (seen & ((tiles > whole * size) | (tiles == 0))).to(gl.int32)
    num_whole = gl.sum(whole, 0)
    is_whole = gl.program_id(1) < num_whole
    place = gl.program_id(1) - gl.where(is_whole, 0, num_whole)
    candidates, number = whole, place
    if SPEC.batch_padded > _MOST_IN_CLASSES:
        candidates = gl.where(is_whole, whole, rest)
    elif not is_whole:
        candidates, number = _of_class(place, tiles - whole * size, rest, size)
    ends = gl.associative_scan(candidates, 0, _add)
    batch = gl.sum((ends <= number).to(gl.int32), 0)
    own = every == batch
    whole_before = gl.sum(gl.where(every < batch, whole, 0), 0)
    rest_before = gl.sum(gl.where(every < batch, rest, 0), 0)
    own_whole = gl.sum(gl.where(own, whole, 0), 0)
    count = own_whole + gl.sum(gl.where(own, rest, 0), 0)
    index = gl.where(is_whole, place - whole_before, own_whole)
    return batch, index, count, whole_before + rest_before, size
