"""Device functions of the portable forward: rows in memory, tiles, logits and their mask.

The kernel, and the method, are in forward.py.

Legend: B batch, S_q / S_k lengths, T packed tokens, H query heads, H_kv key and value heads,
D / D_v head dimensions, N page size, BM / BN rows and columns of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from onchip.kernels.portable import masks, mods
from onchip.kernels.portable.masks import Band, Terms


class Rows(NamedTuple):
    """Where one head's rows of q, k or v of one sequence lie.

    Behind a descriptor they are found by coordinates, else by pointer and strides.
    """

    source: object  # descriptor, or pointer to the sequence's first row (its head's first page)
    batch: object
    head: object
    first: object
    stride_row: object
    stride_page: object
    table: object  # pointer to the sequence's row of block_table, 0 when not paged


@triton.jit
def rows_of(
    source, batch, head, first, stride_batch, stride_row, stride_head, table,
    SPEC: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """`Rows` of one head of one sequence; offsets are 64-bit from here on."""
    row = stride_row * SPEC.vector
    page = stride_batch * SPEC.vector
    if not SPEC.described:
        source += head * (stride_head * SPEC.vector) + tl.cast(first, tl.int64) * row
        if not PAGED:
            source += batch * page
    return Rows(source, batch, head, first, row, page, table)


@triton.jit
def inside(index, first, limit, SPEC: tl.constexpr):
    """Which rows of memory hold the sequence's own data."""
    if SPEC.has_first:
        return (index >= first) & (index < limit)
    else:
        return index < limit


@triton.jit
def load_tile(
    rows: Rows, start, first, limit, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    SPEC: tl.constexpr, PAGED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(BLOCK, WIDTH) of q, k or v from row `start` on.

    Columns past D are 0; so are, if MASKED, rows outside [first, limit). A descriptor gives 0
    outside of the whole tensor only, and other sequences' rows as they are.
    """
    index = start + tl.arange(0, BLOCK)
    columns = tl.arange(0, WIDTH)
    if SPEC.described:
        tile = rows.source.load([rows.batch, rows.head, rows.first + start, 0])
        return tile.reshape(BLOCK, WIDTH)
    else:
        if not PAGED:
            base = rows.source + tl.cast(start, tl.int64) * rows.stride_row
            offsets = tl.arange(0, BLOCK) * rows.stride_row
        else:
            base = rows.source
            seen = inside(index, first, limit, SPEC)
            pages = tl.load(rows.table + index // SPEC.page_size, mask=seen, other=0)
            offsets = pages * rows.stride_page + (index % SPEC.page_size) * rows.stride_row
        pointers = base + offsets[:, None] + columns[None, :]
        if MASKED and DIM < WIDTH:
            seen = inside(index, first, limit, SPEC)[:, None] & (columns < DIM)[None, :]
            return tl.load(pointers, mask=seen, other=0.0)
        elif MASKED:
            return tl.load(pointers, mask=inside(index, first, limit, SPEC)[:, None], other=0.0)
        elif DIM < WIDTH:
            return tl.load(pointers, mask=(columns < DIM)[None, :], other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def logits(products, row_start, start, terms: Terms, band: Band, SPEC: tl.constexpr):
    """Base 2 logits of a tile from Q K^T, before the mask: scale, softcap, ALiBi, the user's."""
    scores = products * terms.scale
    if SPEC.has_softcap:
        scores = terms.softcap * masks.tanh(scores, SPEC.is_float32)
    if SPEC.alibi_dim > 0:
        rows = row_start + tl.arange(0, SPEC.block_m)
        columns = start + tl.arange(0, SPEC.block_n)
        scores += masks.alibi(rows[:, None], columns[None, :], band.shift, terms.slope)
    if SPEC.functions.score is not None:
        rows = (row_start + tl.arange(0, SPEC.block_m))[:, None]
        columns = (start + tl.arange(0, SPEC.block_n))[None, :]
        scores = masks.LOG2E * mods.scored(scores * masks.LN2, rows, columns, terms.context, SPEC)
    return scores


@triton.jit
def masked(scores, row_start, start, band: Band, terms: Terms, SPEC: tl.constexpr):
    """-inf where the row does not see the key."""
    rows = row_start + tl.arange(0, SPEC.block_m)[:, None]
    columns = start + tl.arange(0, SPEC.block_n)[None, :]
    seen = masks.visible(
        rows,
        columns,
        band.seqlen_k,
        band.shift,
        band.first_key,
        band.left,
        band.right,
        SPEC.has_left,
        SPEC.has_right,
    )
    if SPEC.hides_by_function:
        seen &= mods.let_through(rows, columns, terms.context, SPEC)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def is_finite(x):
    return tl.abs(x.to(tl.float32)) < float("inf")
