"""The portable forward: FlashAttention-2 in plain Triton, for any GPU that Triton compiles for.

Method: one program per block of BM queries and head. It walks over the keys in tiles of BN,
keeps a running row maximum m, denominator l and unnormalised output acc in registers, and
divides once at the end (Dao 2023, FlashAttention-2, algorithm 1; the online softmax is
Milakov and Gimelshein 2018). Logits are held in base 2: scale * log2(e) is folded into the one
multiplication that the exponent needs anyway. The walk has up to three parts: tiles that the
mask's left edge crosses, tiles that every row sees in full, which are never masked, and tiles
that the right edge or the end of the keys crosses. Tiles that no row sees are not visited.

Memory: q, out (B, S_q, H, D) or (T_q, H, D); k, v (B, S_k, H_kv, D), (T_k, H_kv, D) or pages
(P, N, H_kv, D) found through block_table; lse (B, H, S_q) or (H, T_q). Any strides with the
last one 1. Head dimensions are padded to a power of two by masks, never by copies. Lengths,
strides and the window's size are run-time values: a change of them compiles nothing.

Dropout leaves out some of P after the denominator has summed all of it. User functions change
and hide logits; a block list replaces the three walks by one over the tiles that it names.

Float8 keys and values are widened to q's dtype, which holds them exactly; their scales join the
logits' scale and the last division. It does not do: split keys (decode). Whatever changes a logit
belongs in `logits`, whatever hides one in `masked` (both in forward_tiles.py).

Legend: B batch, S_q / S_k lengths, T packed tokens, H query heads, H_kv key and value heads,
D / D_v head dimensions, N page size, BM / BN rows and columns of a tile, m / l running maximum
and denominator.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip import env
from onchip.kernels.launcher import Launch
from onchip.kernels.portable import dropout, masks, mods
from onchip.kernels.portable.arguments import (
    Lengths,
    lengths_of,
    numbers_of,
    sources_of,
    spec_of,
)
from onchip.kernels.portable.config import Config, choose_forward, forward_candidates
from onchip.kernels.portable.context import context_of
from onchip.kernels.portable.extras import extras_of
from onchip.kernels.portable.forward_tiles import (
    Rows,
    inside,
    is_finite,
    load_tile,
    logits,
    masked,
    rows_of,
)
from onchip.kernels.portable.masks import Band, Terms
from onchip.kernels.portable.resolved import Resolved, keep, kept, signature
from onchip.problem import Layout, Problem, Tensors

LN2 = masks.LN2
LOG2E = masks.LOG2E


class Stats(NamedTuple):
    """What a program carries from tile to tile."""

    acc: object  # (BM, D_v) float32
    maximum: object  # (BM,) float32, base 2
    denominator: object  # (BM,) float32


@triton.jit
def _locate(num_blocks, num_sequences, num_heads, heads_per_group, SPEC: tl.constexpr):
    """This program's query block, sequence and head.

    Heads come in groups whose keys and values fit in the L2 cache together; in a group all
    heads' first blocks come before all heads' second ones.
    """
    program = tl.program_id(0)
    group = program // (heads_per_group * num_blocks)
    first = group * heads_per_group
    rest = program - first * num_blocks
    size = tl.minimum(heads_per_group, num_sequences * num_heads - first)
    block = rest // size
    index = first + rest % size
    if SPEC.longest_first:
        block = num_blocks - 1 - block
    return block, index // num_heads, index % num_heads


@triton.jit
def _walk(
    stats: Stats, q, row_start, start, stop, keys: Rows, values: Rows, band: Band, terms: Terms,
    SPEC: tl.constexpr, MASKED: tl.constexpr, SCRUBBED: tl.constexpr,
):  # fmt: skip
    """Adds the keys [start, stop), whole tiles, to the statistics of the rows.

    MASKED hides what the rows do not see, SCRUBBED takes values that are not finite for 0. With
    a block list, keys are counted along the list.
    """
    acc, maximum, denominator = stats.acc, stats.maximum, stats.denominator
    first, limit = band.first_key, band.seqlen_k
    PAGED: tl.constexpr = SPEC.page_size > 0
    factor = terms.scale if SPEC.fold_scale else 1.0
    line = mods.list_line(terms.context, row_start, SPEC.list_m, SPEC.list_n)
    for at in tl.range(start, stop, SPEC.block_n, num_stages=1 if SCRUBBED else None):
        n = at
        if SPEC.list_n > 0:
            n = mods.listed(line, at, SPEC.list_n)
        k = load_tile(
            keys, n, first, limit, SPEC.block_n, SPEC.dim, SPEC.width, SPEC, PAGED, MASKED
        )
        if SPEC.is_float8:
            k = k.to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=SPEC.precision)  # (BM, BN)
        if not SPEC.fold_scale:
            scores = logits(scores, row_start, n, terms, band, SPEC)
        if MASKED:
            scores = masked(scores, row_start, n, band, terms, SPEC)
        maximum_now = tl.maximum(maximum, tl.max(scores, 1) * factor)
        base = maximum_now
        # A row that saw nothing so far would subtract -inf from -inf.
        if MASKED or SPEC.functions.score is not None:
            base = tl.where(maximum_now == float("-inf"), 0.0, maximum_now)
        weights = tl.exp2(scores * factor - base[:, None])
        rescale = tl.exp2(maximum - base)
        maximum = maximum_now
        denominator = denominator * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        if SPEC.has_dropout:
            kept = dropout.kept(row_start, n, terms.context, SPEC.block_m, SPEC.block_n)
            weights = tl.where(kept, weights, 0.0)
        v = load_tile(
            values, n, first, limit, SPEC.block_n, SPEC.dim_v, SPEC.width_v, SPEC, PAGED, MASKED
        )
        if SPEC.is_float8:
            v = v.to(q.dtype)
        if MASKED and SPEC.has_foreign:  # 0 * NaN would leak
            index = n + tl.arange(0, SPEC.block_n)
            v = tl.where(inside(index, first, limit, SPEC)[:, None], v, 0.0)
        if SCRUBBED:
            v = tl.where(is_finite(v), v, 0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=SPEC.precision)
    return Stats(acc, maximum, denominator)


@triton.jit
def _has_leak(stats: Stats):
    """Whether an output is not finite though its row's weights are: some value was not."""
    spoilt = (tl.sum(stats.acc * 0.0, 1) != 0.0) & (stats.denominator == stats.denominator)
    return tl.max(spoilt.to(tl.int32), 0) > 0


@triton.jit
def _nothing(SPEC: tl.constexpr):
    """Statistics of rows before their first key."""
    BM: tl.constexpr = SPEC.block_m
    WIDTH_V: tl.constexpr = SPEC.width_v
    return Stats(
        tl.zeros([BM, WIDTH_V], tl.float32),
        tl.full([BM], float("-inf"), tl.float32),
        tl.zeros([BM], tl.float32),
    )


@triton.jit
def _attend(
    q, row_start, row_end, keys: Rows, values: Rows, band: Band, terms: Terms, SPEC: tl.constexpr
):
    """Statistics of the rows over all the keys that they see, in up to three walks."""
    BN: tl.constexpr = SPEC.block_n
    if SPEC.in_one_walk:
        start, end = mods.keys_to_walk(row_start, row_end, band, terms, SPEC)
        return _walk(_nothing(SPEC), q, row_start, start, end, keys, values, band, terms,
                     SPEC, True, False)  # fmt: skip
    any_start, any_end = masks.keys_seen_by_any(
        row_start, row_end, *band, SPEC.has_left, SPEC.has_right
    )
    all_start, all_end = masks.keys_seen_by_all(
        row_start, row_end, *band, SPEC.has_left, SPEC.has_right
    )
    stats = _nothing(SPEC)
    full_start = any_start // BN * BN
    if SPEC.has_left or SPEC.has_first:
        start = full_start
        full_start = tl.minimum(tl.cdiv(all_start, BN), tl.cdiv(any_end, BN)) * BN
        stats = _walk(stats, q, row_start, start, full_start, keys, values, band, terms,
                      SPEC, True, False)  # fmt: skip
    full_end = tl.maximum(full_start, all_end // BN * BN)
    stats = _walk(stats, q, row_start, full_start, full_end, keys, values, band, terms,
                  SPEC, False, False)  # fmt: skip
    return _walk(stats, q, row_start, full_end, any_end, keys, values, band, terms,
                 SPEC, True, False)  # fmt: skip


@triton.jit
def _attend_finite(
    q, row_start, row_end, keys: Rows, values: Rows, band: Band, terms: Terms, SPEC: tl.constexpr
):
    """`_attend` where values that are not finite count as 0, in one walk."""
    start, end = mods.keys_to_walk(row_start, row_end, band, terms, SPEC)
    return _walk(_nothing(SPEC), q, row_start, start, end, keys, values, band, terms,
                 SPEC, True, True)  # fmt: skip


@triton.jit
def _with_sink(stats: Stats, sink):
    """Adds exp(sink) to the denominators only; `sink` is a base 2 logit."""
    maximum = tl.maximum(stats.maximum, sink)
    base = tl.where(maximum == float("-inf"), 0.0, maximum)
    rescale = tl.exp2(stats.maximum - base)
    denominator = stats.denominator * rescale + tl.exp2(sink - base)
    return Stats(stats.acc * rescale[:, None], maximum, denominator)


@triton.jit
def _store(
    stats: Stats, out, lse, rows, num_rows, stride_row, terms: Terms, v_factor,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Divides and writes; a row without keys has denominator 0: output 0, LSE -inf."""
    columns = tl.arange(0, SPEC.width_v)
    inside = rows < num_rows
    inverse = tl.where(stats.denominator == 0.0, 0.0, v_factor / stats.denominator)
    if SPEC.has_dropout:
        inverse *= dropout.keep_scale(terms.context)
    result = (stats.acc * inverse[:, None]).to(out.dtype.element_ty)
    pointers = out + tl.cast(rows, tl.int64)[:, None] * stride_row + columns[None, :]
    if SPEC.dim_v < SPEC.width_v:
        tl.store(pointers, result, mask=inside[:, None] & (columns < SPEC.dim_v)[None, :])
    else:
        tl.store(pointers, result, mask=inside[:, None])
    tl.store(lse + rows, (stats.maximum + tl.log2(stats.denominator)) * LN2, mask=inside)


@triton.jit
def _add_value(out, rows, seen, stride_row, values: Rows, j, SPEC: tl.constexpr):
    """Adds what is not finite of value j, some columns at a time to save registers."""
    CHUNK: tl.constexpr = 64 if SPEC.width_v > 64 else SPEC.width_v
    if SPEC.page_size > 0:
        page = tl.load(values.table + j // SPEC.page_size)
        source = values.source + page * values.stride_page
        source += (j % SPEC.page_size) * values.stride_row
    else:
        source = values.source + tl.cast(j, tl.int64) * values.stride_row
    for column in tl.range(0, SPEC.width_v, CHUNK, num_stages=1):
        columns = column + tl.arange(0, CHUNK)
        value = tl.load(source + columns, mask=columns < SPEC.dim_v, other=0.0).to(tl.float32)
        counts = seen[:, None] & (~is_finite(value))[None, :]
        pointers = out + tl.cast(rows, tl.int64)[:, None] * stride_row + columns[None, :]
        sums = tl.load(pointers, mask=counts, other=0.0).to(tl.float32) + value[None, :]
        tl.store(pointers, sums.to(out.dtype.element_ty), mask=counts)


@triton.jit
def _add_nonfinite(
    out, rows, num_rows, stride_row, row_start, row_end, values: Rows, band: Band, terms: Terms,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Adds every value that is not finite to the stored outputs of the rows that see it."""
    BN: tl.constexpr = SPEC.block_n
    PAGED: tl.constexpr = SPEC.page_size > 0
    first, limit = band.first_key, band.seqlen_k
    start, end = masks.keys_seen_by_any(row_start, row_end, *band, SPEC.has_left, SPEC.has_right)
    tl.debug_barrier()  # other threads stored what is loaded here
    for n in tl.range(start // BN * BN, end, BN, num_stages=1):
        v = load_tile(values, n, first, limit, BN, SPEC.dim_v, SPEC.width_v, SPEC, PAGED, True)
        if tl.max(tl.max((~is_finite(v)).to(tl.int32), 1), 0) > 0:
            for j in tl.range(tl.maximum(n, start), tl.minimum(n + BN, end), num_stages=1):
                seen = masks.visible(rows, j, limit, band.shift, first, band.left, band.right,
                                     SPEC.has_left, SPEC.has_right)  # fmt: skip
                if SPEC.hides_by_function:
                    seen &= mods.let_through(rows, j, terms.context, SPEC)
                _add_value(out, rows, seen & (rows < num_rows), stride_row, values, j, SPEC)


# Triton specialises numbers inside tuples, whatever it is told; to compile once for all
# lengths and strides, the numbers must be parameters of their own. Hence so many.
_NUMBERS = (
    "stride_qb stride_qs stride_qh stride_kb stride_ks stride_kh stride_vb stride_vs stride_vh "
    "stride_table num_sequences seqlen_q seqlen_k tokens_q num_heads group heads_per_group left "
    "right"
).split()


@triton.jit(do_not_specialize=_NUMBERS)
def attn_fwd_portable(
    q, k, v, k_pointer, v_pointer, out, lse, lengths: Lengths, alibi_slopes, sinks, k_scale,
    v_scale, extras,
    stride_qb: tl.int64, stride_qs: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_ks: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vs: tl.int64, stride_vh: tl.int64, stride_table: tl.int64,
    num_sequences, seqlen_q, seqlen_k, tokens_q: tl.int64, num_heads, group, heads_per_group,
    left, right, scale: tl.float32, softcap: tl.float32,
    SPEC: tl.constexpr,
):  # fmt: skip
    """One program: BM queries of one head against all the keys that they see."""
    num_blocks = tl.cdiv(seqlen_q, SPEC.block_m)
    block, batch, head = _locate(num_blocks, num_sequences, num_heads, heads_per_group, SPEC)
    q_start, num_rows = masks.query_span(lengths.cu_seqlens_q, batch, seqlen_q)
    row_start = block * SPEC.block_m
    if SPEC.packed_q and row_start >= num_rows:
        return
    k_start, length_k, first_key = masks.key_span(
        lengths.cu_seqlens_k, lengths.seqused_k, lengths.leftpad_k, batch, seqlen_k
    )
    table = 0
    if lengths.block_table is not None:
        table = lengths.block_table + batch * stride_table
        k_start = 0
    place = 0 if SPEC.packed_q else batch
    queries = rows_of(q, place, head, q_start, stride_qb, stride_qs, stride_qh, 0, SPEC, False)
    kv_head = head // group
    PAGED: tl.constexpr = SPEC.page_size > 0
    keys = rows_of(k, place, kv_head, k_start, stride_kb, stride_ks, stride_kh, table, SPEC, PAGED)
    values = rows_of(
        v, place, kv_head, k_start, stride_vb, stride_vs, stride_vh, table, SPEC, PAGED
    )

    slope = 0.0
    if SPEC.alibi_dim > 0:
        slope = masks.alibi_slope(alibi_slopes, batch, head, num_heads, SPEC.alibi_dim == 2)
        slope *= LOG2E
    context = None
    if extras is not None:
        context = context_of(batch, head, num_heads, num_rows, length_k, extras, SPEC.has_dropout)
    v_factor = 1.0
    if k_scale is not None:
        scale *= tl.load(k_scale + kv_head)
    if v_scale is not None:
        v_factor = tl.load(v_scale + kv_head)
    terms = Terms(scale, softcap, slope, context)
    band = Band(length_k, length_k - num_rows, first_key, left, right)
    tile = load_tile(
        queries, row_start, 0, num_rows, SPEC.block_m, SPEC.dim, SPEC.width, SPEC, False, True
    )
    row_end = tl.minimum(row_start + SPEC.block_m, num_rows)
    stats = _attend(tile, row_start, row_end, keys, values, band, terms, SPEC)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        stats = _with_sink(stats, sink)

    stride_out = tl.cast(num_heads, tl.int64) * SPEC.dim_v
    if SPEC.packed_q:
        first_row = tl.cast(q_start, tl.int64)
        lse += head * tokens_q + first_row
    else:
        first_row = tl.cast(batch, tl.int64) * seqlen_q
        lse += (first_row * num_heads) + tl.cast(head, tl.int64) * seqlen_q
    out += first_row * stride_out + head * SPEC.dim_v
    rows = row_start + tl.arange(0, SPEC.block_m)
    leak = _has_leak(stats) if SPEC.hides else False
    _store(stats, out, lse, rows, num_rows, stride_out, terms, v_factor, SPEC)

    # A tile that the mask crosses multiplies hidden values by 0, and 0 * NaN is NaN. To look
    # for that in every tile would cost time always; one look at the result costs next to none.
    if SPEC.hides:
        CAREFUL: tl.constexpr = SPEC.careful
        if leak:
            k_rows = rows_of(k_pointer, place, kv_head, k_start, stride_kb, stride_ks, stride_kh,
                              table, CAREFUL, PAGED)  # fmt: skip
            v_rows = rows_of(v_pointer, place, kv_head, k_start, stride_vb, stride_vs, stride_vh,
                              table, CAREFUL, PAGED)  # fmt: skip
            again = _attend_finite(tile, row_start, row_end, k_rows, v_rows, band, terms, CAREFUL)
            if sinks is not None:
                again = _with_sink(again, sink)
            _store(again, out, lse, rows, num_rows, stride_out, terms, v_factor, SPEC)
            _add_nonfinite(out, rows, num_rows, stride_out, row_start, row_end, v_rows, band,
                           terms, CAREFUL)  # fmt: skip


def launch(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Runs the forward with the config that `choose_forward` picks.

    Args:
        problem: what the call asks for.
        tensors: its data; nothing here is written.

    Returns:
        out (B, S_q, H, D_v) or (T_q, H, D_v) and lse (B, H, S_q) or (H, T_q) float32, both
        contiguous and written in every element.
    """
    return launch_with(None, problem, tensors)


def launch_with(config: Config | None, problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """`launch` with a given config, or the chosen one: for the tuner and the tests."""
    q, k, v = tensors.q, tensors.k, tensors.v
    packed = problem.layout_q is Layout.PACKED
    out = q.new_empty(*q.shape[:-1], problem.head_dim_v)
    rows = (problem.tokens_q,) if packed else (problem.batch, problem.seqlen_q)
    lse = q.new_empty(*rows[:-1], problem.num_heads, rows[-1], dtype=torch.float32)
    if out.numel() == 0 or problem.seqlen_q == 0:
        return out, lse
    extras = extras_of(problem, tensors)
    key = None
    if extras is None:
        key = signature("forward", config, problem, tensors, tensors.k_scale, tensors.v_scale)
    found = kept(key)
    resolved = found or _resolve(config or _choose(problem, tensors), problem, tensors)
    resolved.launch(
        *resolved.sources(q, k, v),
        k,
        v,
        out,
        lse,
        lengths_of(tensors),
        tensors.alibi_slopes,
        tensors.sinks,
        tensors.k_scale,
        tensors.v_scale,
        extras,
        *resolved.numbers,
        resolved.spec,
    )
    if found is None:
        keep(key, resolved)
    return out, lse


def _choose(problem: Problem, tensors: Tensors) -> Config:
    """The table's config, or the tuner's under ONCHIP_AUTOTUNE=1."""
    default = choose_forward(problem)
    if not env.AUTOTUNE.get():
        return default
    from onchip.kernels.portable.tuning import tuned

    return tuned(
        problem,
        default,
        forward_candidates(problem),
        lambda config: launch_with(config, problem, tensors),
    )


def _resolve(config: Config, problem: Problem, tensors: Tensors) -> Resolved:
    spec = spec_of(config, problem, tensors)
    sources = sources_of(config, spec, tensors)
    num_blocks = triton.cdiv(problem.seqlen_q, config.block_m)
    # Pages of 2-byte aligned rows gave wrong results with pipelined loads (H200, triton 3.6,
    # 2026-11-29), most likely ids that were read before they had arrived.
    stages = 1 if spec.page_size and spec.vector == 1 else config.num_stages
    options = {"maxnreg": config.max_registers} if config.max_registers else {}
    launch = Launch(
        attn_fwd_portable,
        (num_blocks * problem.batch * problem.num_heads,),
        tensors.q.get_device(),
        num_warps=config.num_warps,
        num_stages=stages,
        **options,
    )
    numbers = numbers_of(config, spec, problem, tensors)
    return Resolved(problem, launch, sources, numbers, spec)
