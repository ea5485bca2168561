"""The portable backward: FlashAttention-2 in plain Triton, for any GPU that Triton compiles for.

Method: nothing but the LSE was kept, so S and P are computed again, tile by tile (Dao et al.
2022, FlashAttention, algorithm 4; Dao 2023, FlashAttention-2, algorithm 2):

    P = exp(S - LSE); dV = P^T dO; dP = dO V^T; dS = P * (dP - D);
    dQ = scale dS K; dK = scale dS^T Q;
    with D = rowsum(dO * O) - dLSE, and through the softcap dS *= 1 - (S / softcap)^2.

Three kernels. `attn_bwd_pre_portable` makes D, and a block's part of the sinks' gradient.
`attn_bwd_dkdv_portable` has a program per block of BN keys and head of K: it walks over the
queries of every head of its group in tiles of BM. `attn_bwd_dq_portable` has a program per
block of BM queries and head and walks over the keys. So every gradient is summed by one program
in one order: bitwise reproducible, without atomics, at the price of computing S and dP twice.
The dK/dV kernel holds S and dP transposed, so that P^T and dS^T are register operands of the
products that need them. A config may let it make dK alone and dV in a launch of its own (wide
heads: two accumulators leave no registers), or let it add dQ = dS K to a float32 tensor.
Logits are in base 2, as in the forward. Only tiles that an edge of the mask crosses are masked,
and tiles that it hides are not visited.

Memory: q, dout (B, S_q, H, D) or (T_q, H, D); k, v (B, S_k, H_kv, D) or (T_k, H_kv, D); any
strides with the last one 1. lse, dlse (B, H, S_q) or (H, T_q). Gradients are contiguous, and 0
where nothing is seen. Extra memory in bytes: 8 B H S_q (LSE in base 2, and D; S_q rounded up to
128), and with sinks 4 B H ceil(S_q / 128); 4 B S_q H D more if the dK/dV kernel adds up dQ.

Dropout makes the forward's choices again: dV = (Z * P)^T dO and dP = Z * dO V^T with Z = 1 / (1
- p) or 0, and D stays as it is. The user's functions run again, too; the sums of a score
function's own gradients are the only atomics then.

It does not do: pages. A value of K or V that is not finite
reaches the dQ of hidden rows in the tiles that the mask's edge crosses.

Legend: B batch, S_q / S_k lengths, T packed tokens, H query heads, H_kv key and value heads,
D / D_v head dimensions, BM / BN rows and columns of a tile.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.kernels.launcher import Launch
from onchip.kernels.portable import masks
from onchip.kernels.portable.abreast import in_turn_or_abreast
from onchip.kernels.portable.arguments import Lengths, lengths_of
from onchip.kernels.portable.backward_arguments import (
    Steps,
    heads_per_group,
    numbers_of,
    pre_spec_of,
    row_strides,
    sources_of,
    spec_of,
    stats_of,
    steps_of,
    sum_of,
)
from onchip.kernels.portable.backward_config import BackwardConfig
from onchip.kernels.portable.backward_tiles import (
    LOG2E,
    STATS_BLOCK,
    Band,
    Queries,
    Rows,
    Strides,
    Terms,
    head_slope,
    load_tile,
    locate,
    rows_of,
    stats_place,
    store_rows,
    walk_all_keys,
    walk_all_queries,
)
from onchip.kernels.portable.context import context_of
from onchip.kernels.portable.extras import extras_of
from onchip.kernels.portable.resolved import Resolved, keep, kept, signature
from onchip.problem import Layout, Problem, Saved, Tensors

# Triton specialises numbers inside tuples, whatever it is told; to compile once for all
# lengths and strides, the numbers must be parameters of their own. Hence so many.
_NUMBERS = (
    "stride_qb stride_qs stride_qh stride_kb stride_ks stride_kh stride_vb stride_vs stride_vh "
    "stride_ob stride_os stride_oh num_sequences seqlen_q seqlen_k tokens_q num_heads "
    "num_kv_heads heads_per_group stats_width left right"
).split()


@triton.jit(do_not_specialize=_NUMBERS)
def attn_bwd_pre_portable(
    out, dout, lse, dlse, sinks, cu_seqlens_q, lse_base2, delta, dsinks,
    stride_ob: tl.int64, stride_os: tl.int64, stride_oh: tl.int64,
    num_sequences, seqlen_q, tokens_q: tl.int64, num_heads, stats_width: tl.int64,
    SPEC: tl.constexpr,
):  # fmt: skip
    """One program: D and the LSE in base 2 of a block of one head's rows, and its part of dsinks.

    `out`, `lse` and `dlse` are contiguous; `dsinks` is (blocks, B, H) float32.
    """
    DIM_V: tl.constexpr = SPEC.dim_v
    num_blocks = tl.cdiv(seqlen_q, STATS_BLOCK)
    program = tl.program_id(0)
    block, index = program % num_blocks, program // num_blocks
    batch, head = index // num_heads, index % num_heads
    q_start, num_rows = masks.query_span(cu_seqlens_q, batch, seqlen_q)
    if block * STATS_BLOCK >= num_rows:
        if sinks is not None:
            tl.store(dsinks + (block * num_sequences + batch) * num_heads + head, 0.0)
        return
    rows = block * STATS_BLOCK + tl.arange(0, STATS_BLOCK)
    columns = tl.arange(0, SPEC.width_v)
    inside = rows < num_rows
    if SPEC.packed:
        first_row = tl.cast(q_start, tl.int64)
        at = head * tokens_q + q_start
    else:
        first_row = tl.cast(batch, tl.int64) * seqlen_q
        at = first_row * num_heads + tl.cast(head, tl.int64) * seqlen_q
    seen = inside[:, None] & (columns < DIM_V)[None, :]
    incoming = rows_of(dout, batch, head, q_start, Strides(stride_ob, stride_os, stride_oh), SPEC)
    index_64 = tl.cast(rows, tl.int64)[:, None]
    offsets = index_64 * incoming.stride_row + columns[None, :]
    gradient = tl.load(incoming.source + offsets, seen, 0.0)
    place = ((first_row + index_64) * num_heads + head) * DIM_V
    product = tl.load(out + place + columns[None, :], seen, 0.0).to(tl.float32)
    d = tl.sum(product * gradient.to(tl.float32), 1)
    if dlse is not None:
        d -= tl.load(dlse + at + rows, inside, 0.0)
    unit = 1.0 if SPEC.is_float32 else LOG2E
    row_lse = tl.load(lse + at + rows, inside, float("-inf")) * unit
    empty = row_lse == float("-inf")
    # Hidden from the first: exp2(S - inf) is 0, and a row without keys moves nothing.
    d = tl.where(empty, 0.0, d)
    line, start = stats_place(batch, head, q_start, num_heads, SPEC)
    to = line * stats_width + start
    tl.store(lse_base2 + to + rows, tl.where(empty, float("inf"), row_lse))
    tl.store(delta + to + rows, d)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * unit
        mass = tl.where(empty, 0.0, tl.exp2((sink - row_lse) * (LOG2E / unit)) * d)
        tl.store(dsinks + (block * num_sequences + batch) * num_heads + head, -tl.sum(mass, 0))


@triton.jit(do_not_specialize=_NUMBERS)
def attn_bwd_dkdv_portable(
    q, k, v, dout, lse, delta, dk, dv, dq_sum, lengths: Lengths, alibi_slopes,
    extras,
    stride_qb: tl.int64, stride_qs: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_ks: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vs: tl.int64, stride_vh: tl.int64,
    stride_ob: tl.int64, stride_os: tl.int64, stride_oh: tl.int64,
    num_sequences, seqlen_q, seqlen_k, stats_width: tl.int64, num_heads, num_kv_heads,
    heads_per_group, left, right,
    scale: tl.float32, softcap: tl.float32, grad_scale: tl.float32,
    SPEC: tl.constexpr,
):  # fmt: skip
    """One program: dK and dV of BN keys of one head of K, over all heads that read it.

    SPEC.makes says whether both ("dkdv") or one of them ("dk", "dv").
    """
    BN: tl.constexpr = SPEC.block_n
    WIDTH: tl.constexpr = SPEC.width
    WIDTH_V: tl.constexpr = SPEC.width_v
    num_blocks = tl.cdiv(seqlen_k, BN)
    block, batch, kv_head = locate(
        num_blocks, num_sequences, num_kv_heads, heads_per_group, SPEC.longest_last
    )
    q_start, num_rows = masks.query_span(lengths.cu_seqlens_q, batch, seqlen_q)
    k_start, length_k, first_key = masks.key_span(
        lengths.cu_seqlens_k, lengths.seqused_k, None, batch, seqlen_k
    )
    column_start = block * BN
    column_end = tl.minimum(column_start + BN, length_k)
    if SPEC.packed:
        if column_start >= length_k:
            return
        limit = length_k
        first_row = tl.cast(k_start, tl.int64)
    else:
        num_rows = tl.where(column_start < length_k, num_rows, 0)
        limit = seqlen_k
        first_row = tl.cast(batch, tl.int64) * seqlen_k
    band = Band(length_k, length_k - num_rows, first_key, left, right)
    keys = rows_of(k, batch, kv_head, k_start, Strides(stride_kb, stride_ks, stride_kh), SPEC)
    values = rows_of(v, batch, kv_head, k_start, Strides(stride_vb, stride_vs, stride_vh), SPEC)
    # Other sequences' keys make rows of dK and dV that are not stored; but they would reach dQ.
    CLEAN: tl.constexpr = SPEC.foreign_keys and SPEC.reduction != "none"
    k_tile = load_tile(keys, column_start, length_k, BN, SPEC.dim, SPEC.width, CLEAN, SPEC)
    acc_k, acc_v, v_tile = 0.0, 0.0, 0.0
    if SPEC.makes != "dv":
        v_tile = load_tile(
            values, column_start, length_k, BN, SPEC.dim_v, SPEC.width_v, CLEAN, SPEC
        )
        acc_k = tl.zeros([BN, WIDTH], tl.float32)
    if SPEC.makes != "dk":
        acc_v = tl.zeros([BN, WIDTH_V], tl.float32)
    group = num_heads // num_kv_heads if SPEC.has_group else 1
    for head in range(kv_head * group, (kv_head + 1) * group):
        line, start = stats_place(batch, head, q_start, num_heads, SPEC)
        at = line * stats_width + start
        queries = Queries(
            rows_of(q, batch, head, q_start, Strides(stride_qb, stride_qs, stride_qh), SPEC),
            rows_of(dout, batch, head, q_start, Strides(stride_ob, stride_os, stride_oh), SPEC),
            lse if SPEC.describes_stats else lse + at,
            delta if SPEC.describes_stats else delta + at,
            line,
            start,
            num_rows,
        )
        total = None
        if SPEC.reduction == "tma":
            total = Rows(dq_sum, batch, head, 0, 0)
        elif SPEC.reduction == "atomics":
            row = tl.cast(num_heads, tl.int64) * SPEC.dim
            q_row = tl.cast(q_start, tl.int64)
            if not SPEC.packed:
                q_row = tl.cast(batch, tl.int64) * seqlen_q
            total = Rows(dq_sum + q_row * row + head * SPEC.dim, 0, 0, 0, row)
        slope = head_slope(alibi_slopes, batch, head, num_heads, SPEC)
        context = None
        if extras is not None:
            context = context_of(
                batch, head, num_heads, num_rows, length_k, extras, SPEC.has_dropout
            )
        terms = Terms(scale, softcap, slope, context)
        acc_k, acc_v = walk_all_queries(
            acc_k, acc_v, k_tile, v_tile, column_start, column_end, queries, total, band, terms,
            SPEC,
        )  # fmt: skip
    if SPEC.has_dropout:
        acc_v *= 65536.0 / (65536.0 - extras.threshold)
    stride = tl.cast(num_kv_heads, tl.int64)
    place = first_row * num_kv_heads + kv_head
    used = (column_start + tl.arange(0, BN) < length_k)[:, None]
    if SPEC.makes != "dv":
        if lengths.seqused_k is not None:
            acc_k = tl.where(used, acc_k, 0.0)
        to = dk + place * SPEC.dim
        store_rows(to, acc_k * grad_scale, column_start, limit, stride * SPEC.dim, SPEC, False)
    if SPEC.makes != "dk":
        if lengths.seqused_k is not None:
            acc_v = tl.where(used, acc_v, 0.0)
        to = dv + place * SPEC.dim_v
        store_rows(to, acc_v, column_start, limit, stride * SPEC.dim_v, SPEC, True)


@triton.jit(do_not_specialize=_NUMBERS)
def attn_bwd_dq_portable(
    q, k, v, dout, lse, delta, dq, lengths: Lengths, alibi_slopes,
    extras,
    stride_qb: tl.int64, stride_qs: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_ks: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vs: tl.int64, stride_vh: tl.int64,
    stride_ob: tl.int64, stride_os: tl.int64, stride_oh: tl.int64,
    num_sequences, seqlen_q, seqlen_k, stats_width: tl.int64, num_heads, num_kv_heads,
    heads_per_group, left, right,
    scale: tl.float32, softcap: tl.float32, grad_scale: tl.float32,
    SPEC: tl.constexpr,
):  # fmt: skip
    """One program: dQ of BM queries of one head."""
    BM: tl.constexpr = SPEC.block_m
    num_blocks = tl.cdiv(seqlen_q, BM)
    block, batch, head = locate(
        num_blocks, num_sequences, num_heads, heads_per_group, SPEC.longest_last
    )
    q_start, num_rows = masks.query_span(lengths.cu_seqlens_q, batch, seqlen_q)
    row_start = block * BM
    if row_start >= num_rows:
        return
    k_start, length_k, first_key = masks.key_span(
        lengths.cu_seqlens_k, lengths.seqused_k, None, batch, seqlen_k
    )
    band = Band(length_k, length_k - num_rows, first_key, left, right)
    context = None
    if extras is not None:
        context = context_of(batch, head, num_heads, num_rows, length_k, extras, SPEC.has_dropout)
    slope = head_slope(alibi_slopes, batch, head, num_heads, SPEC)
    terms = Terms(scale, softcap, slope, context)
    kv_head = head // (num_heads // num_kv_heads) if SPEC.has_group else head
    queries = rows_of(q, batch, head, q_start, Strides(stride_qb, stride_qs, stride_qh), SPEC)
    grads = rows_of(dout, batch, head, q_start, Strides(stride_ob, stride_os, stride_oh), SPEC)
    keys = rows_of(k, batch, kv_head, k_start, Strides(stride_kb, stride_ks, stride_kh), SPEC)
    values = rows_of(v, batch, kv_head, k_start, Strides(stride_vb, stride_vs, stride_vh), SPEC)
    # Rows of another sequence end in rows of this block that are not stored.
    q_tile = load_tile(queries, row_start, num_rows, BM, SPEC.dim, SPEC.width, False, SPEC)
    do_tile = load_tile(grads, row_start, num_rows, BM, SPEC.dim_v, SPEC.width_v, False, SPEC)
    line, start = stats_place(batch, head, q_start, num_heads, SPEC)
    rows = line * stats_width + start + row_start + tl.arange(0, BM)
    row_lse = tl.load(lse + rows)
    row_delta = tl.load(delta + rows)
    row_end = tl.minimum(row_start + BM, num_rows)
    acc = walk_all_keys(
        q_tile, do_tile, row_lse[:, None], row_delta[:, None], row_start, row_end, keys, values,
        band, terms, SPEC,
    )  # fmt: skip
    first_row = tl.cast(q_start, tl.int64)
    if not SPEC.packed:
        first_row = tl.cast(batch, tl.int64) * seqlen_q
    dq += (first_row * num_heads + head) * SPEC.dim
    stride = tl.cast(num_heads, tl.int64) * SPEC.dim
    store_rows(dq, acc * grad_scale, row_start, num_rows, stride, SPEC, False)


def launch(
    problem: Problem, tensors: Tensors, saved: Saved
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Runs the backward with the config that `choose_backward` picks.

    Args:
        problem: what the call asks for.
        tensors: the forward's data; nothing here is written.
        saved: its output and LSE, and the gradients that arrived.

    Returns:
        dq, dk, dv as q, k, v, contiguous, and dsinks as sinks or None.
    """
    return launch_with(None, problem, tensors, saved)


class Work(NamedTuple):
    """Tensors that the launches of one backward share."""

    lse: Tensor  # (lines, width), base 2; see `stats_shape`
    delta: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dq_sum: Tensor | None  # float32, where dQ is added up


def launch_with(
    config: BackwardConfig | None, problem: Problem, tensors: Tensors, saved: Saved
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`launch` with a given config, None for the chosen one: for the tuner and the tests."""
    # Rows between or behind packed sequences are no program's; their gradient is 0.
    new = torch.zeros_like if problem.layout_q is Layout.PACKED else torch.empty_like
    dq, dk, dv = (
        new(x, memory_format=torch.contiguous_format) for x in (tensors.q, tensors.k, tensors.v)
    )
    key = None
    if extras_of(problem, tensors) is None:
        key = signature(
            "bwd", config, problem, tensors, saved.dout, saved.dlse, saved.out, saved.lse
        )
    found = kept(key)
    steps = found or steps_of(config, problem, tensors, saved.dout)
    *stats, dsinks = _prepare(steps, problem, tensors, saved)
    dq_sum = None
    if steps.config.reduction != "none":
        dq_sum = torch.zeros_like(dq, dtype=torch.float32)
    work = Work(*stats, dq, dk, dv, dq_sum)
    launches = [
        functools.partial(_run, part, steps, problem, tensors, saved, work) for part in steps.parts
    ]
    in_turn_or_abreast(launches, tensors.q.get_device() if steps.config.abreast else -1)
    if found is None:
        keep(key, steps)
    if dq_sum is not None:
        torch.mul(dq_sum, problem.scale, out=dq)
    return dq, dk, dv, dsinks


def only(part: str, config: BackwardConfig, problem: Problem, tensors: Tensors, saved: Saved):
    """A function that runs one of the config's launches, again and again: for the tuner."""
    dq, dk, dv = (torch.empty_like(x) for x in (tensors.q, tensors.k, tensors.v))
    steps = Steps(replace(config, reduction="none"), problem)
    *stats, _ = _prepare(steps, problem, tensors, saved)
    work = Work(*stats, dq, dk, dv, None)
    return lambda: _run(part, steps, problem, tensors, saved, work)


def _prepare(
    steps: Steps, problem: Problem, tensors: Tensors, saved: Saved
) -> tuple[Tensor, Tensor, Tensor | None]:
    """LSE in base 2, D, and the sinks' gradient. Mutates: steps, which learn the launch."""
    out, lse, sinks = saved.out.contiguous(), saved.lse.contiguous(), tensors.sinks
    stats = torch.empty(steps.stats_shape, device=lse.device)
    lse_base2, delta = stats[0], stats[1]
    parts = None
    if sinks is not None:
        num_blocks = triton.cdiv(problem.seqlen_q, STATS_BLOCK.value)
        parts = lse.new_empty(num_blocks, problem.batch, problem.num_heads)
    dlse = None if saved.dlse is None else saved.dlse.contiguous()
    resolved = steps.launches.get("pre")
    if resolved is None:
        resolved = _resolve_pre(lse_base2.shape[1], problem, saved.dout)
        steps.launches["pre"] = resolved
    resolved.launch(
        out, saved.dout, lse, dlse, sinks, tensors.cu_seqlens_q, lse_base2, delta, parts,
        *resolved.numbers, resolved.spec,
    )  # fmt: skip
    return lse_base2, delta, None if parts is None else parts.sum((0, 1)).to(sinks.dtype)


def _resolve_pre(stats_width: int, problem: Problem, dout: Tensor) -> Resolved:
    num_blocks = triton.cdiv(problem.seqlen_q, STATS_BLOCK.value)
    grid = (num_blocks * problem.batch * problem.num_heads,)
    launch = Launch(attn_bwd_pre_portable, grid, dout.get_device(), num_warps=8)
    numbers = (
        *row_strides(dout)[0],
        problem.batch,
        problem.seqlen_q,
        problem.tokens_q,
        problem.num_heads,
        stats_width,
    )
    return Resolved(problem, launch, (), numbers, pre_spec_of(problem, dout))


def _run(
    part: str, steps: Steps, problem: Problem, tensors: Tensors, saved: Saved, work: Work
) -> None:
    """Launches the kernel that makes `part`, see `BackwardConfig.parts`.

    Mutates: steps, which learn the launch.
    """
    extras = extras_of(problem, tensors, saved.aux_sums, part != "dq")
    resolved = steps.launches.get(part)
    if resolved is None:
        resolved = _resolve(part, steps.config, problem, tensors, saved.dout, work)
        steps.launches[part] = resolved
    inputs = (tensors.q, tensors.k, tensors.v, saved.dout)
    if part == "dq":
        sources = resolved.sources(*inputs)
        outputs = (work.lse, work.delta, work.dq)
    else:
        *sources, lse, delta, dq_sum = resolved.sources(*inputs, work.lse, work.delta, work.dq_sum)
        outputs = (lse, delta, work.dk, work.dv, dq_sum)
    resolved.launch(
        *sources,
        *outputs,
        lengths_of(tensors),
        tensors.alibi_slopes,
        extras,
        *resolved.numbers,
        resolved.spec,
    )


def _resolve(
    part: str, config: BackwardConfig, problem: Problem, tensors: Tensors, dout: Tensor, work: Work
) -> Resolved:
    kernel = attn_bwd_dq_portable if part == "dq" else attn_bwd_dkdv_portable
    tiles = config.tiles_of(part)
    spec = spec_of(config, part, problem, tensors, dout)
    sources = sources_of(spec, tensors, dout)
    if part == "dq":
        num_heads, owned, walked = problem.num_heads, problem.seqlen_q, problem.seqlen_k
        num_blocks = triton.cdiv(owned, spec.block_m)
    else:
        sources += (stats_of(spec, work.lse), stats_of(spec, work.delta), sum_of(spec, work.dq_sum))
        num_heads, owned, walked = problem.num_kv_heads, problem.seqlen_k, problem.seqlen_q
        num_blocks = triton.cdiv(owned, spec.block_n)
    group = heads_per_group(config, problem, walked, num_heads)
    options = {"maxnreg": tiles.max_registers} if tiles.max_registers else {}
    launch = Launch(
        kernel,
        (num_blocks * problem.batch * num_heads,),
        tensors.q.get_device(),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **options,
    )
    numbers = numbers_of(spec, problem, tensors, dout, group)
    return Resolved(problem, launch, sources, numbers, spec)
