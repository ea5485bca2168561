"""How the decodes in Gluon cut keys into pieces; `located` as `decode._shares` and `_locate` do.

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


@gluon.jit
def located(every, tiles, num_sequences, splits, num_pieces, SPEC: gl.constexpr):
    """Which piece of which sequence this CTA takes.

    Args:
        every: (B,) numbers of sequences.
        tiles: (B,) tiles of each; 0 past the last one.
        num_sequences: how many there are.
        splits: pieces of each sequence where all are about as long.
        num_pieces: of all sequences, about, where they are not.
        SPEC: a `DecodeSpec`.

    Returns:
        Sequence, piece, pieces of that sequence, program of the first of them.
    """
    program = gl.program_id(1)
    total = gl.sum(tiles, 0)
    unequal = gl.max(tiles, 0) * num_sequences * 4 > total * 5
    work = gl.maximum(total * gl.num_programs(0), 1)
    wanted = gl.where(unequal, gl.cdiv(tiles * num_pieces, work), splits)
    counts = gl.where(every < num_sequences, pieces(tiles, wanted, SPEC), 0)
    ends = gl.associative_scan(counts, 0, _add)
    batch = gl.sum((ends <= program).to(gl.int32), 0)
    end = gl.min(gl.where(ends > program, ends, 2147483647), 0)
    count = gl.sum(gl.where(every == batch, counts, 0), 0)
    return batch, program - (end - count), count, end - count


@gluon.jit
def dealt(every, tiles, num_sequences, splits, num_pieces, SPEC: gl.constexpr):
    """Which piece of which sequence this CTA takes where all pieces are as long, but for rests.

    CTAs of whole pieces come first, and those of sequences' rests last: the short ones then fill
    the gaps at the end of a launch.

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
    ends = gl.associative_scan(gl.where(is_whole, whole, rest), 0, _add)
    batch = gl.sum((ends <= place).to(gl.int32), 0)
    own = every == batch
    whole_before = gl.sum(gl.where(every < batch, whole, 0), 0)
    rest_before = gl.sum(gl.where(every < batch, rest, 0), 0)
    own_whole = gl.sum(gl.where(own, whole, 0), 0)
    count = own_whole + gl.sum(gl.where(own, rest, 0), 0)
    index = gl.where(is_whole, place - whole_before, own_whole)
    return batch, index, count, whole_before + rest_before, size
