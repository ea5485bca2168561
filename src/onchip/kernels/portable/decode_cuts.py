"""How the decodes in Gluon cut keys into pieces; as `decode._shares` and `decode._locate` do.

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
