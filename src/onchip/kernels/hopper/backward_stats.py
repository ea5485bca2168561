"""Kernels around the Hopper backward: LSE and D of rows, dQ's last step, rows of no sequence.

Bound by memory, so in plain Triton.

Legend: B batch, S_q length, T packed tokens, H query heads, D / D_v head dimensions.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
#: Rows of LSE, D and the float32 dQ that belong to one sequence only.
STATS_BLOCK = tl.constexpr(128)
#: Rows of a program of the launches before and behind, of two warps: with 64 rows of four, whose
#: last programs run alone, they take 43.7 and 12.5 us, with these 42.8 and 6.6 of 461 and 453 of a
#: causal call at 1k, D = 128; at D = 256 38.7 and 36.0 (H200, 2026-11-30).
ROWS = tl.constexpr(16)
#: Rows of a tile of dQ.
_TILE = tl.constexpr(64)
#: Numbers that a program of `attn_bwd_rest_hopper` sets to 0 at a time.
REST_BLOCK = tl.constexpr(1024)

_SIZES = "num_blocks num_heads seqlen_q tokens_q stats_width".split()
_NUMBERS = [*_SIZES, "stride_ob", "stride_os", "stride_oh", "num_sequences"]
_NUMBERS += ["group", "units", "lag", "ctas", "shared"]


@triton.jit
def _locate(
    cu_seqlens_q, first_head, num_blocks, num_heads, seqlen_q, tokens_q, stats_width,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Row block, sequence, head, length; first row in (T, H) and (H, T) order and in the stats."""
    program = tl.program_id(0)
    index = program // num_blocks
    block = program - index * num_blocks
    index += first_head
    batch = index // num_heads
    head = index % num_heads
    if PACKED:
        start = tl.load(cu_seqlens_q + batch)
        length = tl.load(cu_seqlens_q + batch + 1) - start
        first = tl.cast(start, tl.int64)
        in_lse = tl.cast(head, tl.int64) * tokens_q + start
        line = tl.cast(head, tl.int64) * stats_width
        in_stats = line + (start // STATS_BLOCK + batch) * STATS_BLOCK
    else:
        length = seqlen_q
        first = tl.cast(batch, tl.int64) * seqlen_q
        in_lse = tl.cast(index, tl.int64) * seqlen_q
        in_stats = tl.cast(index, tl.int64) * stats_width
    return block, batch, head, length, first, in_lse, in_stats


@triton.jit(do_not_specialize=_NUMBERS)
def attn_bwd_pre_hopper(
    out, dout, lse, dlse, sinks, cu_seqlens_q, stats, delta, dq_sum, counters, dsinks,
    stride_ob: tl.int64, stride_os: tl.int64, stride_oh: tl.int64,
    num_blocks, num_sequences, num_heads, seqlen_q, tokens_q: tl.int64, stats_width: tl.int64,
    group, units, lag, ctas, shared,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    lse_unit: tl.float32, UNIT: tl.constexpr, PACKED: tl.constexpr, ORDERED: tl.constexpr,
    FOURS: tl.constexpr,
):  # fmt: skip
    """One program: -LSE in `lse_unit`, -D and a cleared dQ of 16 rows of a head.

    dQ's sum is cleared for the first `lag` units only, and counted as cleared by all their `ctas`
    CTAs (`backward_round`); `counters` go on with those of the tiles of dQ, where it is ordered,
    or with `shared` of `backward_pieces`, up to 512.

    With FOURS the rows of every 16 lie as `backward_pair.of_queries` takes them.

    `out`, `lse` and `dlse` are contiguous; strides of dout come in UNIT elements; `dsinks` is
    (blocks, B, H) float32, the rows' part of the sinks' gradient.
    """
    block, batch, head, length, first, in_lse, in_stats = _locate(
        cu_seqlens_q, 0, num_blocks, num_heads, seqlen_q, tokens_q, stats_width, PACKED
    )
    start = block * ROWS
    slot = (block * num_sequences + batch) * num_heads + head
    unit = (batch * num_heads + head) // group
    if counters is not None and block == 0:
        tl.store(counters + unit, tl.where(unit < lag, ctas, 0))
    if counters is not None and tl.program_id(0) == 0:
        i = tl.arange(0, 512)
        tl.store(counters + units + i, 0, i < shared)
    if start >= tl.cdiv(length, STATS_BLOCK) * STATS_BLOCK:
        if sinks is not None:
            tl.store(dsinks + slot, 0.0)
        return
    rows = start + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH_V)[None, :]
    inside = rows < length
    row_lse = tl.load(lse + in_lse + rows, inside, float("-inf"))
    seen = inside[:, None]
    if DIM_V < WIDTH_V:
        seen = seen & (columns < DIM_V)
    row = tl.cast(rows, tl.int64)[:, None]
    base = dout + head * (stride_oh * UNIT)
    if PACKED:
        base += first * (stride_os * UNIT)
    else:
        base += batch * (stride_ob * UNIT)
    gradient = tl.load(base + row * (stride_os * UNIT) + columns, seen, 0.0)
    value = tl.load(out + ((first + row) * num_heads + head) * DIM_V + columns, seen, 0.0)
    d = tl.sum(value.to(tl.float32) * gradient.to(tl.float32), 1)
    if dlse is not None:
        d -= tl.load(dlse + in_lse + rows, inside, 0.0)
    empty = row_lse == float("-inf")
    # Hidden from the first: exp2(S - inf) is 0, and a row without keys moves nothing.
    d = tl.where(empty, 0.0, d)
    places = in_stats + rows
    if FOURS:
        # Row 8 g + 2 i + e of 16 to place 4 i + 2 g + e.
        places = in_stats + ((rows & ~14) | ((rows & 6) << 1) | ((rows & 8) >> 2))
    tl.store(
        stats + places,
        tl.where(empty, tl.where(lse_unit > 0, float("-inf"), float("inf")), -row_lse * lse_unit),
    )
    tl.store(delta + places, -d)
    if dq_sum is not None and unit < lag:
        to = dq_sum + (in_stats + row) * WIDTH + tl.arange(0, WIDTH)[None, :]
        tl.store(to, tl.zeros([ROWS, WIDTH], tl.float32))
    if ORDERED:
        tl.store(counters + units + (in_stats + start) // _TILE, 0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        mass = tl.where(empty, 0.0, tl.exp2(sink - row_lse * LOG2E) * d)
        tl.store(dsinks + slot, -tl.sum(mass, 0))


@triton.jit(do_not_specialize=[*_SIZES, "first_head"])
def attn_bwd_post_hopper(
    dq_sum, dq, cu_seqlens_q, first_head, num_blocks, num_heads, seqlen_q,
    tokens_q: tl.int64, stats_width: tl.int64, scale: tl.float32,
    DIM: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One program: dQ of 16 rows of a head, from its float32 sum."""
    block, _, head, length, first, _, in_stats = _locate(
        cu_seqlens_q, first_head, num_blocks, num_heads, seqlen_q, tokens_q, stats_width, PACKED
    )
    start = block * ROWS
    if start >= length:
        return
    rows = start + tl.arange(0, ROWS)
    row = tl.cast(rows, tl.int64)[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    # Of every 8 columns the even ones come first, see `backward_sums.store_halves`.
    eights = 8 * tl.arange(0, WIDTH // 8)[None, :, None] + tl.arange(0, 4)[None, None, :]
    source = dq_sum + (in_stats + row[:, :, None]) * WIDTH + eights
    x = tl.reshape(tl.join(tl.load(source), tl.load(source + 4)), [ROWS, WIDTH]) * scale
    seen = (rows < length)[:, None]
    if DIM < WIDTH:
        seen = seen & (columns < DIM)
    to = dq + ((first + row) * num_heads + head) * DIM + columns
    tl.store(to, x.to(dq.dtype.element_ty), seen)


@triton.jit
def _clear_rest(x, cu_seqlens, longest, tokens: tl.int64, width: tl.int64, parts):
    """Sets this program's part of the rows of (tokens, width) behind a sequence to 0."""
    batch = tl.program_id(0) - 1
    start = tl.cast(0, tl.int64)
    if batch >= 0:
        first = tl.load(cu_seqlens + batch)
        length = tl.load(cu_seqlens + batch + 1) - first
        start = tl.cast(first, tl.int64) + tl.minimum(length, longest)
    end = tl.cast(tokens, tl.int64)
    if batch + 1 < tl.num_programs(0) - 1:
        end = tl.minimum(tl.load(cu_seqlens + batch + 1), end)
    place = start * width + tl.program_id(1) * REST_BLOCK
    for at in range(place, end * width, parts * REST_BLOCK):
        i = at + tl.arange(0, REST_BLOCK)
        tl.store(x + i, tl.zeros([REST_BLOCK], x.dtype.element_ty), i < end * width)


@triton.jit(do_not_specialize=["longest_q", "longest_k", "parts"])
def attn_bwd_rest_hopper(
    dq, dk, dv, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, tokens_q: tl.int64,
    tokens_k: tl.int64, width_q: tl.int64, width_k: tl.int64, width_v: tl.int64, parts,
):  # fmt: skip
    """Program (b, i): the gradients of rows behind sequence b - 1, which no other kernel writes.

    They are 0: rows before the first sequence and behind the last one (and those of a sequence
    past the longest length that the call names, which is wrong and gives any gradients, but not
    what other memory held). Where there are none, as mostly, this reads a few numbers; to set all
    of three gradients of 133k tokens to 0 took 0.4 of 10 ms (H200, 2026-11-30).
    """
    _clear_rest(dq, cu_seqlens_q, longest_q, tokens_q, width_q, parts)
    _clear_rest(dk, cu_seqlens_k, longest_k, tokens_k, width_k, parts)
    _clear_rest(dv, cu_seqlens_k, longest_k, tokens_k, width_v, parts)
