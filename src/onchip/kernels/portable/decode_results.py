"""Device functions of the decode behind the walk: pieces merged, sums divided, results written.

Legend: B batch, S_q queries, H query heads, D_v head dimension, ROWS rows of a program; see
`decode`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onchip.kernels.portable.decode_tiles import LOWEST, Stats
from onchip.kernels.portable.masks import LN2, LOG2E


@triton.jit
def finish(
    stats: Stats, out, lse, sinks, batch, q_start, kv_head, row, num_rows, num_heads, seqlen_q,
    tokens_q, v_factor, SPEC: tl.constexpr,
):  # fmt: skip
    """Adds the sink, divides and writes. `stats.acc` is (ROWS, D_v), or (D_v, ROWS) if narrow."""
    head = kv_head * SPEC.group + row % SPEC.group
    query = row // SPEC.group
    inside = row < num_rows
    maximum, denominator, acc = stats.maximum, stats.denominator, stats.acc
    axis: tl.constexpr = 1 if SPEC.groups == 0 else 0
    if sinks is not None:
        sink = tl.load(sinks + head, mask=inside, other=float("-inf")).to(tl.float32) * LOG2E
        top = tl.maximum(maximum, sink)
        rescale = tl.exp2(maximum - top)
        denominator = denominator * rescale + tl.exp2(sink - top)
        acc = acc * tl.expand_dims(rescale, axis)
        maximum = top
    inverse = tl.where(denominator == 0.0, 0.0, v_factor / denominator)
    result = (acc * tl.expand_dims(inverse, axis)).to(out.dtype.element_ty)
    token = (q_start + query).to(tl.int64)
    if not SPEC.packed_q:
        token += batch * seqlen_q
    place = (token * num_heads + head) * SPEC.dim_v
    columns = tl.arange(0, SPEC.width_v)
    fits = columns < SPEC.dim_v
    if SPEC.groups == 0:
        pointers, seen = place[:, None] + columns[None, :], inside[:, None] & fits[None, :]
    else:
        pointers, seen = place[None, :] + columns[:, None], inside[None, :] & fits[:, None]
    tl.store(out + pointers, result, mask=seen)
    if SPEC.packed_q:
        at = head * tokens_q + q_start + query
    else:
        at = (batch * num_heads + head) * seqlen_q + query
    result = tl.where(denominator == 0.0, float("-inf"), (maximum + tl.log2(denominator)) * LN2)
    tl.store(lse + at, result, mask=inside)


@triton.jit
def put_aside(stats: Stats, partial_out, partial_stats, place, SPEC: tl.constexpr):
    """Stores a piece's statistics as number `place`."""
    row = tl.arange(0, SPEC.rows)
    columns = tl.arange(0, SPEC.width_v)
    seen = row < SPEC.kept
    at = place * SPEC.kept + row
    if SPEC.groups == 0:
        pointers = at[:, None] * SPEC.width_v + columns[None, :]
        tl.store(partial_out + pointers, stats.acc, mask=seen[:, None])
    else:
        pointers = at[None, :] * SPEC.width_v + columns[:, None]
        tl.store(partial_out + pointers, stats.acc, mask=seen[None, :])
    tl.store(partial_stats + at * 2, stats.maximum, mask=seen)
    tl.store(partial_stats + at * 2 + 1, stats.denominator, mask=seen)


@triton.jit
def merged(
    partial_out, partial_stats, place, count, first_row, ROWS: tl.constexpr, SPEC: tl.constexpr
):
    """Some rows of `count` pieces from number `place` on: (ROWS * D_v), (ROWS,), (ROWS,).

    Rows and columns are one dimension, which covers all threads: a sum over pieces stays
    inside a thread. Their order is that of the keys, so the result does not depend on time.
    """
    WIDTH_V: tl.constexpr = SPEC.width_v
    SIZE: tl.constexpr = ROWS * SPEC.width_v
    AT_ONCE: tl.constexpr = 8192 // SIZE if SIZE < 8192 else 1
    row = first_row + tl.arange(0, ROWS)
    piece = tl.arange(0, AT_ONCE)[:, None]
    entry = first_row * WIDTH_V + tl.arange(0, SIZE)[None, :]
    maximum = tl.full([ROWS], LOWEST, tl.float32)
    denominator = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([SIZE], tl.float32)
    for start in range(0, count, AT_ONCE):
        seen = start + piece < count
        first = place + start + piece
        outs = tl.load(partial_out + first * (SPEC.kept * WIDTH_V) + entry, mask=seen, other=0.0,
                       cache_modifier=".cg")  # fmt: skip
        at = (first * SPEC.kept + row[None, :]) * 2
        tops = tl.load(partial_stats + at, mask=seen, other=LOWEST, cache_modifier=".cg")
        sums = tl.load(partial_stats + at + 1, mask=seen, other=0.0, cache_modifier=".cg")
        now = tl.maximum(maximum, tl.max(tops, 0))
        rescale = tl.exp2(maximum - now)
        weights = tl.exp2(tops - now[None, :])
        denominator = denominator * rescale + tl.sum(sums * weights, 0)
        wide = tl.broadcast_to(rescale[:, None], [ROWS, WIDTH_V])
        acc = acc * tl.reshape(wide, [SIZE])
        wide = tl.broadcast_to(weights[:, :, None], [AT_ONCE, ROWS, WIDTH_V])
        acc += tl.sum(outs * tl.reshape(wide, [AT_ONCE, SIZE]), 0)
        maximum = now
    return acc, maximum, denominator


@triton.jit
def finish_merged(
    acc, maximum, denominator, out, lse, sinks, batch, q_start, kv_head, row_start, num_rows,
    num_heads, seqlen_q, tokens_q, v_factor, ROWS: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """`finish` of what `merged` returns."""
    WIDTH_V: tl.constexpr = SPEC.width_v
    SIZE: tl.constexpr = ROWS * SPEC.width_v
    row = row_start + tl.arange(0, ROWS)
    head = kv_head * SPEC.group + row % SPEC.group
    inside = row < num_rows
    rescale = tl.full([ROWS], 1.0, tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=inside, other=float("-inf")).to(tl.float32) * LOG2E
        top = tl.maximum(maximum, sink)
        rescale = tl.exp2(maximum - top)
        denominator = denominator * rescale + tl.exp2(sink - top)
        maximum = top
    inverse = tl.where(denominator == 0.0, 0.0, v_factor * rescale / denominator)
    wide = tl.broadcast_to(inverse[:, None], [ROWS, WIDTH_V])
    result = (acc * tl.reshape(wide, [SIZE])).to(out.dtype.element_ty)
    entry = tl.arange(0, SIZE)
    entry_row = row_start + entry // SPEC.width_v
    column = entry % SPEC.width_v
    token = (q_start + entry_row // SPEC.group).to(tl.int64)
    if not SPEC.packed_q:
        token += batch * seqlen_q
    place = (token * num_heads + kv_head * SPEC.group + entry_row % SPEC.group) * SPEC.dim_v
    tl.store(out + place + column, result, mask=(entry_row < num_rows) & (column < SPEC.dim_v))
    query = row // SPEC.group
    if SPEC.packed_q:
        at = head * tokens_q + q_start + query
    else:
        at = (batch * num_heads + head) * seqlen_q + query
    result = tl.where(denominator == 0.0, float("-inf"), (maximum + tl.log2(denominator)) * LN2)
    tl.store(lse + at, result, mask=inside)
