"""The portable decode's kernels: a piece's walk, and the merge of pieces in its own launch.

Method and memory are told in `decode`, which launches them.

Legend: B batch, S_q queries of a sequence, D head dimension, BN keys of a tile, ROWS rows of a
program.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from onchip.kernels.portable import masks
from onchip.kernels.portable.decode_results import finish, finish_merged, merged, put_aside
from onchip.kernels.portable.decode_spec import NUMBERS
from onchip.kernels.portable.decode_tiles import (
    Keys,
    Terms,
    attend,
    merge_groups,
    row_edges,
)
from onchip.kernels.portable.masks import LOG2E


class Piece(NamedTuple):
    """Which keys of which sequence a program walks."""

    batch: object  # sequence
    index: object  # piece of it
    count: object  # pieces that it has
    first_program: object  # program of its first piece


@triton.jit
def _tiles(length, num_queries, first, left, SPEC: tl.constexpr):
    """First tile that any row of a sequence sees and how many follow; works on vectors too."""
    BN: tl.constexpr = SPEC.block_n
    start = length * 0
    if SPEC.has_first:
        start = tl.maximum(start, first)
    if SPEC.has_left:
        start = tl.maximum(start, length - num_queries - left)
    tile = start // BN
    return tile, tl.where(start < length, tl.cdiv(length, BN) - tile, 0)


@triton.jit
def _pieces(tiles, wanted, SPEC: tl.constexpr):
    """Pieces that a sequence really gets, at least one."""
    size = tl.maximum(tl.cdiv(tiles, tl.maximum(wanted, 1)), SPEC.min_tiles)
    return tl.maximum(tl.cdiv(tiles, size), 1)


@triton.jit
def _num_queries(cu_seqlens_q, batch, seen, seqlen_q, SPEC: tl.constexpr):
    if SPEC.packed_q:
        start = tl.load(cu_seqlens_q + batch, mask=seen, other=0)
        return tl.load(cu_seqlens_q + batch + 1, mask=seen, other=0) - start
    else:
        return seqlen_q


@triton.jit
def _all_tiles(
    cu_seqlens_q, seqused_k, leftpad_k, num_sequences, seqlen_q, left, SPEC: tl.constexpr
):
    """Tiles of every sequence, 0 past the last one."""
    every = tl.arange(0, SPEC.batch_padded)
    seen = every < num_sequences
    lengths = tl.load(seqused_k + every, mask=seen, other=0)
    first = 0
    if SPEC.has_first:
        first = tl.load(leftpad_k + every, mask=seen, other=0)
    queries = _num_queries(cu_seqlens_q, every, seen, seqlen_q, SPEC)
    _, tiles = _tiles(lengths, queries, first, left, SPEC)
    return tl.where(seen, tiles, 0)


@triton.jit
def _shares(
    cu_seqlens_q, seqused_k, leftpad_k, num_sequences, seqlen_q, left, splits, num_sms, units,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Pieces of every sequence, and their running sum.

    Equal lengths: `splits` pieces each. Unequal ones: pieces in proportion, about `sm_pieces` for
    each SM.
    """
    every = tl.arange(0, SPEC.batch_padded)
    tiles = _all_tiles(cu_seqlens_q, seqused_k, leftpad_k, num_sequences, seqlen_q, left, SPEC)
    total = tl.sum(tiles, 0)
    unequal = tl.max(tiles, 0) * num_sequences * 4 > total * 5
    work = tl.maximum(total * units, 1)
    # With 3 pieces an SM the product would overflow at 2^31 only beyond 2^22 tiles of one sequence
    wanted = tl.where(unequal, tl.cdiv(tiles * num_sms * SPEC.sm_pieces, work), splits)
    counts = tl.where(every < num_sequences, _pieces(tiles, wanted, SPEC), 0)
    return counts, tl.cumsum(counts, 0)


@triton.jit
def _locate(
    cu_seqlens_q, seqused_k, leftpad_k, num_sequences, seqlen_q, left, splits, num_sms,
    SPEC: tl.constexpr,
):  # fmt: skip
    """This program's sequence and how its keys are cut, from `_shares`; see `Piece`.

    A program finds its sequence from the running sum; those left over come last.
    """
    program = tl.program_id(1)
    every = tl.arange(0, SPEC.batch_padded)
    counts, ends = _shares(cu_seqlens_q, seqused_k, leftpad_k, num_sequences, seqlen_q, left,
                           splits, num_sms, tl.num_programs(0), SPEC)  # fmt: skip
    batch = tl.sum((ends <= program).to(tl.int32), 0)
    end = tl.min(tl.where(ends > program, ends, 2147483647), 0)
    count = tl.sum(tl.where(every == batch, counts, 0), 0)
    first = end - count
    return Piece(batch, program - first, count, first)


@triton.jit
def _load_rows(
    q, batch, q_start, kv_head, row, num_rows, stride_qb, stride_qs, stride_qh, SPEC: tl.constexpr
):
    """Rows of q, rows last in the narrow walk: (D, ROWS), and first in the wide one: (ROWS, D)."""
    columns = tl.arange(0, SPEC.width)
    head = kv_head * SPEC.group + row % SPEC.group
    token = q_start + row // SPEC.group
    place = batch * (stride_qb * SPEC.vector) + token.to(tl.int64) * (stride_qs * SPEC.vector)
    place += head * (stride_qh * SPEC.vector)
    if SPEC.groups == 0:
        inside = (row < num_rows)[:, None] & (columns < SPEC.dim)[None, :]
        return tl.load(q + place[:, None] + columns[None, :], mask=inside, other=0.0)
    else:
        inside = (row < num_rows)[None, :] & (columns < SPEC.dim)[:, None]
        return tl.load(q + place[None, :] + columns[:, None], mask=inside, other=0.0)


@triton.jit
def _fit_float16(q, SPEC: tl.constexpr):
    """q times a power of two for each row, so that its largest entry is near 1, and its inverse."""
    axis: tl.constexpr = 1 if SPEC.groups == 0 else 0
    top = tl.max(tl.abs(q.to(tl.float32)), axis)
    exponent = tl.where(top > 0.0, tl.floor(tl.log2(tl.maximum(top, 1e-30))), 0.0)
    shrink = tl.exp2(-exponent)
    return (q.to(tl.float32) * tl.expand_dims(shrink, axis)).to(tl.float16), tl.exp2(exponent)


#: Run-time numbers of the launch that merges.
MERGE_NUMBERS = (
    "num_sequences seqlen_q seqlen_k tokens_q num_heads splits left num_sms num_pieces"
).split()


# Triton specialises numbers inside tuples, whatever it is told; to compile once for all lengths and
# strides, the numbers are parameters of their own, so many.
@triton.jit(do_not_specialize=NUMBERS)
def attn_decode_portable(
    q, k, v, out, lse, block_table, cu_seqlens_q, seqused_k, leftpad_k, alibi_slopes, sinks,
    k_scale, v_scale, partial_out, partial_stats, counters,
    stride_qb: tl.int64, stride_qs: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_ks: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vs: tl.int64, stride_vh: tl.int64, stride_table: tl.int64,
    num_sequences, seqlen_q, seqlen_k, tokens_q: tl.int64, num_heads, splits, left, right,
    scale: tl.float32, softcap: tl.float32, num_sms,
    SPEC: tl.constexpr,
):  # fmt: skip
    """One program: the rows of one head of K and row block against a piece of a sequence."""
    unit = tl.program_id(0)
    kv_head, row_start = unit // SPEC.row_blocks, (unit % SPEC.row_blocks) * SPEC.rows
    if SPEC.batch_padded == 1:
        program = tl.program_id(1)
        batch = program // splits
        piece = Piece(batch, program % splits, splits, batch * splits)
    else:
        piece = _locate(cu_seqlens_q, seqused_k, leftpad_k, num_sequences, seqlen_q, left, splits,
                        num_sms, SPEC)  # fmt: skip
        if piece.batch >= num_sequences:
            return
    batch = piece.batch.to(tl.int64)
    _, length, first_key = masks.key_span(None, seqused_k, leftpad_k, batch, seqlen_k)
    q_start = 0
    num_queries = seqlen_q
    if SPEC.packed_q:
        q_start, num_queries = masks.query_span(cu_seqlens_q, batch, seqlen_q)
    first_tile, tiles = _tiles(length, num_queries, first_key, left, SPEC)
    count = piece.count
    if SPEC.batch_padded == 1:
        count = _pieces(tiles, splits, SPEC)
        if piece.index >= count:
            return
    size = tl.cdiv(tiles, count)
    start = first_tile + piece.index * size
    stop = tl.minimum(start + size, first_tile + tiles)

    row = row_start + tl.arange(0, SPEC.rows)
    num_rows = num_queries * SPEC.group
    queries = _load_rows(q, batch, q_start, kv_head, row, num_rows, stride_qb, stride_qs,
                         stride_qh, SPEC)  # fmt: skip
    factor = scale
    v_factor = 1.0
    if k_scale is not None:
        factor *= tl.load(k_scale + kv_head)
    if v_scale is not None:
        v_factor = tl.load(v_scale + kv_head)
    row_factor = factor
    if SPEC.is_float8:
        queries, unshrink = _fit_float16(queries, SPEC)
        row_factor = factor * unshrink
    slope = 0.0
    if SPEC.alibi_dim > 0:
        head = kv_head * SPEC.group + row % SPEC.group
        slopes = alibi_slopes + (batch * num_heads if SPEC.alibi_dim == 2 else 0)
        slope = tl.load(slopes + head, mask=row < num_rows, other=0.0) * LOG2E
    edges = row_edges(row // SPEC.group, length, num_queries, first_key, left, right, SPEC)
    table = block_table
    if block_table is not None:
        table = block_table + batch * stride_table
    keys = Keys(k + kv_head * (stride_kh * SPEC.vector), stride_kb, stride_ks)
    values = Keys(v + kv_head * (stride_vh * SPEC.vector), stride_vb, stride_vs)
    stats = attend(queries, keys, values, table, batch, start, stop, edges,
                   Terms(row_factor, softcap, slope), SPEC)  # fmt: skip
    if SPEC.groups > 0:
        stats = merge_groups(stats)
    if not SPEC.merges or count == 1:
        finish(stats, out, lse, sinks, batch, q_start, kv_head, row, num_rows, num_heads,
                seqlen_q, tokens_q, v_factor, SPEC)  # fmt: skip
    base = tl.cast(unit, tl.int64) * tl.num_programs(1) + piece.first_program
    if SPEC.merges:  # noqa: SIM102 (one is decided by the compiler, one at run time)
        if count > 1:
            put_aside(stats, partial_out, partial_stats, base + piece.index, SPEC)
    if SPEC.merges and SPEC.merged_rows == 0:  # noqa: SIM102
        if count > 1:
            tl.debug_barrier()  # all threads' stores come before the one thread's count
            counter = counters + batch * tl.num_programs(0) + unit
            if tl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
                KEPT: tl.constexpr = SPEC.kept
                acc, maximum, denominator = merged(partial_out, partial_stats, base, count, 0, KEPT,
                                                   SPEC)  # fmt: skip
                finish_merged(acc, maximum, denominator, out, lse, sinks, batch, q_start, kv_head,
                              row_start, num_rows, num_heads, seqlen_q, tokens_q, v_factor, KEPT,
                              SPEC)  # fmt: skip
                tl.store(counter, 0)


@triton.jit(do_not_specialize=MERGE_NUMBERS)
def attn_decode_merge_portable(
    out, lse, cu_seqlens_q, seqused_k, leftpad_k, sinks, v_scale, partial_out, partial_stats,
    num_sequences, seqlen_q, seqlen_k, tokens_q: tl.int64, num_heads, splits, left, num_sms,
    num_pieces, SPEC: tl.constexpr,
):  # fmt: skip
    """One program: some rows of one head of K and row block of a sequence, merged."""
    ROWS: tl.constexpr = SPEC.merged_rows
    BLOCKS: tl.constexpr = SPEC.kept // SPEC.merged_rows
    unit, first_row = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * ROWS
    kv_head, row_start = unit // SPEC.row_blocks, (unit % SPEC.row_blocks) * SPEC.rows
    batch = tl.program_id(1).to(tl.int64)
    q_start = 0
    num_queries = seqlen_q
    if SPEC.packed_q:
        q_start, num_queries = masks.query_span(cu_seqlens_q, batch, seqlen_q)
    num_rows = num_queries * SPEC.group
    if SPEC.batch_padded == 1:
        _, length, first_key = masks.key_span(None, seqused_k, leftpad_k, batch, seqlen_k)
        _, tiles = _tiles(length, num_queries, first_key, left, SPEC)
        count, first = _pieces(tiles, splits, SPEC), batch * splits
    else:
        counts, ends = _shares(cu_seqlens_q, seqused_k, leftpad_k, num_sequences, seqlen_q, left,
                               splits, num_sms, tl.num_programs(0) // BLOCKS, SPEC)  # fmt: skip
        own = tl.arange(0, SPEC.batch_padded) == batch
        count = tl.sum(tl.where(own, counts, 0), 0)
        first = (tl.sum(tl.where(own, ends, 0), 0) - count).to(tl.int64)
    if count == 1 or row_start + first_row >= num_rows:
        return
    v_factor = 1.0
    if v_scale is not None:
        v_factor = tl.load(v_scale + kv_head)
    place = tl.cast(unit, tl.int64) * num_pieces + first
    acc, maximum, denominator = merged(partial_out, partial_stats, place, count, first_row, ROWS,
                                       SPEC)  # fmt: skip
    finish_merged(acc, maximum, denominator, out, lse, sinks, batch, q_start, kv_head,
                  row_start + first_row, num_rows, num_heads, seqlen_q, tokens_q, v_factor, ROWS,
                  SPEC)  # fmt: skip
