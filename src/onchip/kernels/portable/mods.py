"""Device functions that call the user's score and mask functions, and walk block lists.

Positions handed to a user's function are clamped to the sequence, so that what it loads by them
exists; what it returns for a place past the end is never used.

Legend: S_q / S_k lengths of this sequence, BM / BN rows and columns of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onchip.kernels.portable import masks
from onchip.kernels.portable.context import Context
from onchip.kernels.portable.masks import Band, Terms


@triton.jit
def _inside(rows, columns, context: Context):
    i = tl.maximum(tl.minimum(rows, context.seqlen_q - 1), 0)
    j = tl.maximum(tl.minimum(columns, context.seqlen_k - 1), 0)
    return i, j


@triton.jit
def scored(scores, rows, columns, context: Context, SPEC: tl.constexpr):
    """The user's logits from natural ones; `rows` and `columns` broadcast to the tile."""
    i, j = _inside(rows, columns, context)
    aux = context.extras.score_aux
    return SPEC.functions.score(scores, context.batch, context.head, i, j, *aux)


@triton.jit
def score_gradient(gradient, scores, rows, columns, context: Context, SPEC: tl.constexpr):
    """The gradient of natural logits before the user's function, from that behind it."""
    i, j = _inside(rows, columns, context)
    aux = context.extras.score_aux
    return SPEC.functions.grad(gradient, scores, context.batch, context.head, i, j, *aux)


@triton.jit
def add_aux_gradients(gradient, scores, rows, columns, context: Context, SPEC: tl.constexpr):
    """Lets the user's function add to its sums; the gradient is 0 outside of the sequence."""
    exists = (rows < context.seqlen_q) & (columns < context.seqlen_k)
    gradient = tl.where(exists, gradient, 0.0)
    i, j = _inside(rows, columns, context)
    aux = context.extras.score_aux
    sums = context.extras.aux_sums
    SPEC.functions.aux_grad(gradient, scores, context.batch, context.head, i, j, *aux, *sums)


@triton.jit
def let_through(rows, columns, context: Context, SPEC: tl.constexpr):
    """Which pairs the user's mask function lets through."""
    i, j = _inside(rows, columns, context)
    return SPEC.functions.mask(context.batch, context.head, i, j, *context.extras.mask_aux)


@triton.jit
def keys_to_walk(row_start, row_end, band: Band, terms: Terms, SPEC: tl.constexpr):
    """[start, stop) of a walk over all keys that some row may see, along the list if any."""
    start, end = masks.keys_seen_by_any(row_start, row_end, *band, SPEC.has_left, SPEC.has_right)
    if SPEC.list_n > 0:
        return listed_span(
            terms.context, row_start, start, end, SPEC.list_m, SPEC.list_n, SPEC.block_n
        )
    else:
        return start // SPEC.block_n * SPEC.block_n, end


@triton.jit
def _list_line(context: Context, start, OWN: tl.constexpr):
    """A program's line in the counts."""
    batch, heads, blocks, _ = context.extras.list_shape
    heads = tl.cast(heads, tl.int32)
    line = (context.batch % tl.cast(batch, tl.int32)) * heads + context.head % heads
    return tl.cast(line, tl.int64) * tl.cast(blocks, tl.int32) + start // OWN


@triton.jit
def listed_span(
    context: Context, own_start, start, end, OWN: tl.constexpr, WALKED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Places [first, stop) of a program's list where rows or keys of [start, end) lie.

    The program's own block holds `own_start`; lists ascend. Blocks of WALKED that the ends cut
    are walked from and to the tile that holds the end.
    """
    CHUNK: tl.constexpr = 128
    width = tl.cast(context.extras.list_shape[3], tl.int32)
    line = _list_line(context, own_start, OWN)
    count = tl.minimum(tl.load(context.extras.block_counts + line), width)
    before, through = 0, 0
    first, last = end, 0  # where the first and the last block that counts begin
    for chunk in tl.range(0, count, CHUNK, num_stages=1):
        index = chunk + tl.arange(0, CHUNK)
        exists = index < count
        indices = context.extras.block_indices + line * width + index
        blocks = tl.load(indices, mask=exists, other=0) * WALKED
        passed = exists & (blocks + WALKED <= start)
        reached = exists & (blocks < end)
        before += tl.sum(passed.to(tl.int32), 0)
        through += tl.sum(reached.to(tl.int32), 0)
        first = tl.minimum(first, tl.min(tl.where(reached & ~passed, blocks, end), 0))
        last = tl.maximum(last, tl.max(tl.where(reached, blocks, 0), 0))
    begin = before * WALKED + tl.maximum(start - first, 0) // TILE * TILE
    stop = through * WALKED - tl.maximum(last + WALKED - end, 0) // TILE * TILE
    return begin, tl.where(through > before, stop, begin)


@triton.jit
def list_line(context: Context, start, OWN: tl.constexpr, WALKED: tl.constexpr):
    """Pointer to a program's own list, for `listed`; 0 without lists."""
    if WALKED > 0:
        width = tl.cast(context.extras.list_shape[3], tl.int32)
        return context.extras.block_indices + _list_line(context, start, OWN) * width
    else:
        return 0


@triton.jit
def listed(line, at, WALKED: tl.constexpr):
    """The row or key that comes `at` places along the list."""
    return tl.multiple_of(tl.load(line + at // WALKED) * WALKED + at % WALKED, 16)
