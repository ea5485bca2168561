"""Makes rows again that the forward could not finish.

The forward multiplies hidden values by P = 0, and 0 * NaN is NaN. And where it does without
maxima, a logit may stand so far above those before it that P is infinite. It notes in a counter
that something of the kind happened; in almost every call it did not, and the programs here end
at once.

Method: a row has overflowed if its LSE is inf; a pass over the visible keys, with maxima, gives
the LSE anew. A row is spoilt if its output is not finite but its LSE is (or is -inf: a row that
sees no key). With the LSE at hand, P is exp(S - LSE) and one pass over the visible keys gives the
output anew. Values that are not finite count as 0 there; whether a row sees a NaN, an Inf or a
-Inf is found by three more products, of the visibility with where those are. NaN in data is a
user's mistake that must be seen in exactly the right rows, not a case to be fast in.

Memory: as the forward's; counters as in `workspace.py`.

Legend: S_q / S_k lengths, H query heads, D / D_v head dimensions, BM / BN rows (queries) and
columns (keys) of a tile, C code.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onchip.kernels.hopper.arguments import Resolved, num_sms
from onchip.kernels.launcher import Launch
from onchip.problem import Problem, Tensors

LOG2E = tl.constexpr(1.4426950408889634)
_BLOCK_M, _BLOCK_N, _BLOCK_D = 16, 32, 64
_NUMBERS = (
    "stride_qb stride_qs stride_qh stride_kb stride_ks stride_kh stride_vb stride_vs stride_vh "
    "stride_table seqlen_q seqlen_k tokens_q num_heads group num_pairs left right"
).split()


class Sequence(NamedTuple):
    """Where a sequence lies and how long it is."""

    q_start: object
    k_start: object
    seqlen_q: object
    seqlen_k: object


class Rows(NamedTuple):
    """Where the rows of one head of a sequence's K or V lie."""

    source: object
    stride_page: object
    stride_row: object
    table: object


class Terms(NamedTuple):
    """See `softmax.Terms`; the slope is the head's own."""

    scale: object
    softcap: object
    slope: object
    left: object
    right: object


@triton.jit
def _is_finite(x):
    return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
def _start(rows: Rows, index, inside, C: tl.constexpr):
    """Addresses of rows, one for each of `index`."""
    if C.page_size > 0:
        page = tl.load(rows.table + index // C.page_size, mask=inside, other=0).to(tl.int64)
        return rows.source + page * rows.stride_page + (index % C.page_size) * rows.stride_row
    else:
        return rows.source + index.to(tl.int64) * rows.stride_row


@triton.jit
def _sequence(cu_seqlens_q, cu_seqlens_k, seqused_k, batch, seqlen_q, seqlen_k, C: tl.constexpr):
    q_start = 0
    k_start = 0
    if C.packed_q:
        q_start = tl.load(cu_seqlens_q + batch)
        seqlen_q = tl.load(cu_seqlens_q + batch + 1) - q_start
    if C.packed_k:
        k_start = tl.load(cu_seqlens_k + batch)
        seqlen_k = tl.load(cu_seqlens_k + batch + 1) - k_start
        if C.page_size > 0:
            k_start = 0
    if C.has_used:
        seqlen_k = tl.load(seqused_k + batch)
    return Sequence(q_start, k_start, seqlen_q, seqlen_k)


@triton.jit
def _logits(
    q, stride_qs, k: Rows, rows, keys, sequence: Sequence, terms: Terms, BD: tl.constexpr,
    D: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Base 2 logits of some rows and keys (BM, BN) float32, -inf where a row does not see a key."""
    row_inside = (rows < sequence.seqlen_q)[:, None]
    inside = (keys < sequence.seqlen_k)[:, None]
    k_rows = _start(k, keys, keys < sequence.seqlen_k, C)[:, None]
    s = tl.zeros([rows.shape[0], keys.shape[0]], tl.float32)
    for d in tl.range(0, D, BD, num_stages=1):
        at = (d + tl.arange(0, BD))[None, :]
        row_index = rows.to(tl.int64)[:, None]
        q_tile = tl.load(q + row_index * stride_qs + at, row_inside & (at < D), 0.0)
        k_tile = tl.load(k_rows + at, inside & (at < D), 0.0)
        s = tl.dot(q_tile, tl.trans(k_tile), s)
    place = rows + (sequence.seqlen_k - sequence.seqlen_q)
    if C.has_softcap:
        s = terms.softcap - 2.0 * terms.softcap / (tl.exp2(s * terms.scale * 2.0 * LOG2E) + 1.0)
    else:
        s = s * terms.scale
    if C.alibi_dim > 0:
        s -= terms.slope * tl.abs(place[:, None] - keys[None, :]).to(tl.float32)
    visible = inside.trans(1, 0) & row_inside
    if C.has_right:
        visible = visible & (keys[None, :] <= place[:, None] + terms.right)
    if C.has_left:
        visible = visible & (keys[None, :] >= place[:, None] - terms.left)
    return tl.where(visible, s, float("-inf")), visible


@triton.jit
def _new_lse(
    q, stride_qs, k: Rows, rows, sequence: Sequence, terms: Terms, sink, BN: tl.constexpr,
    BD: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The rows' LSE by the online softmax, (BM,) float32."""
    m = tl.zeros([rows.shape[0]], tl.float32) + sink
    l = tl.where(m == float("-inf"), 0.0, 1.0)
    for n in tl.range(0, sequence.seqlen_k, BN, num_stages=1):
        keys = n + tl.arange(0, BN)
        s, _ = _logits(q, stride_qs, k, rows, keys, sequence, terms, BD, D, C)
        new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        l = l * tl.exp2(m - base) + tl.sum(tl.exp2(s - base[:, None]), 1)
        m = new
    return (m + tl.log2(l)) / LOG2E


@triton.jit
def _again(
    q, stride_qs, k: Rows, v: Rows, rows, lse, column, sequence: Sequence, terms: Terms,
    BN: tl.constexpr, BD: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """BD columns of the rows' outputs, from `column` on, (BM, BD) float32."""
    BM: tl.constexpr = rows.shape[0]
    columns = (column + tl.arange(0, BD))[None, :]
    acc = tl.zeros([BM, BD], tl.float32)
    nans = tl.zeros([BM, BD], tl.float32)
    highs = tl.zeros([BM, BD], tl.float32)
    lows = tl.zeros([BM, BD], tl.float32)
    for n in tl.range(0, sequence.seqlen_k, BN, num_stages=1):
        keys = n + tl.arange(0, BN)
        s, visible = _logits(q, stride_qs, k, rows, keys, sequence, terms, BD, D, C)
        p = tl.where(visible, tl.exp2(s - lse[:, None] * LOG2E), 0.0)
        v_rows = _start(v, keys, keys < sequence.seqlen_k, C)[:, None]
        inside = (keys < sequence.seqlen_k)[:, None]
        v_tile = tl.load(v_rows + columns, inside & (columns < C.dim_v), 0.0)
        seen = visible.to(v_tile.dtype)
        acc += tl.dot(p.to(v_tile.dtype), tl.where(_is_finite(v_tile), v_tile, 0.0))
        nans += tl.dot(seen, (v_tile != v_tile).to(v_tile.dtype))
        highs += tl.dot(seen, (v_tile == float("inf")).to(v_tile.dtype))
        lows += tl.dot(seen, (v_tile == float("-inf")).to(v_tile.dtype))
    acc = tl.where(highs > 0, acc + float("inf"), acc)
    acc = tl.where(lows > 0, acc - float("inf"), acc)
    return tl.where(nans > 0, float("nan"), acc)


@triton.jit(do_not_specialize=_NUMBERS)
def attn_repair_hopper(
    q, k, v, out, lse, counters, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, slopes,
    sinks,
    stride_qb: tl.int64, stride_qs: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_ks: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vs: tl.int64, stride_vh: tl.int64,
    scale: tl.float32, softcap: tl.float32, stride_table,
    seqlen_q, seqlen_k, tokens_q: tl.int64, num_heads, group, num_pairs, left, right,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A few programs, each over every so many tiles of BM rows and BD columns."""
    gdc_launch_dependents()  # this grid is launched while the forward still runs, and the next
    gdc_wait()
    if tl.load(counters + 1) == 0:
        return
    num_blocks = tl.cdiv(seqlen_q, BM)
    for t in tl.range(tl.program_id(0), num_blocks * num_pairs, tl.num_programs(0)):
        pair = t // num_blocks
        batch, head = (pair // num_heads).to(tl.int64), (pair % num_heads).to(tl.int64)
        sequence = _sequence(cu_seqlens_q, cu_seqlens_k, seqused_k, batch, seqlen_q, seqlen_k, C)
        rows = (t % num_blocks) * BM + tl.arange(0, BM)
        inside = rows < sequence.seqlen_q
        if C.packed_q:
            first = sequence.q_start.to(tl.int64)
            lse_start = head * tokens_q + first
        else:
            first = batch * seqlen_q
            lse_start = pair.to(tl.int64) * seqlen_q
        own_lse = tl.load(lse + lse_start + rows, mask=inside, other=0.0)
        kv_head = head // group
        batch_q = 0 if C.packed_q else batch
        batch_k = 0 if C.packed_k or C.page_size > 0 else batch
        queries = q + batch_q * stride_qb + sequence.q_start * stride_qs + head * stride_qh
        keys = k + batch_k * stride_kb + sequence.k_start * stride_ks + kv_head * stride_kh
        values = v + batch_k * stride_vb + sequence.k_start * stride_vs + kv_head * stride_vh
        table = block_table + batch * stride_table
        k_rows = Rows(keys, stride_kb, stride_ks, table)
        v_rows = Rows(values, stride_vb, stride_vs, table)
        slope = 0.0
        if C.alibi_dim > 0:
            slope = tl.load(slopes + (batch * num_heads if C.alibi_dim == 2 else 0) + head) * LOG2E
        terms = Terms(scale, softcap, slope, left, right)
        has_overflowed = inside & (own_lse == float("inf"))
        overflows = tl.max(has_overflowed.to(tl.int32), 0) > 0
        if overflows:
            sink = float("-inf")
            if C.has_sinks:
                sink = tl.load(sinks + head).to(tl.float32) * LOG2E
            new_lse = _new_lse(queries, stride_qs, k_rows, rows, sequence, terms, sink,
                               BN, BD, D, C)  # fmt: skip
            own_lse = tl.where(has_overflowed, new_lse, own_lse)
            tl.store(lse + lse_start + rows, own_lse, mask=has_overflowed)
        for column in tl.range(0, C.dim_v, BD, num_stages=1):
            columns = (column + tl.arange(0, BD))[None, :]
            pointers = out + ((first + rows) * num_heads + head)[:, None] * C.dim_v + columns
            mask = inside[:, None] & (columns < C.dim_v)
            own = tl.load(pointers, mask=mask, other=0.0)
            spoilt = (tl.max((~_is_finite(own)).to(tl.int32), 1) > 0) & (own_lse < float("inf"))
            spoilt = spoilt | has_overflowed
            if tl.max(spoilt.to(tl.int32), 0) > 0:
                new = _again(queries, stride_qs, k_rows, v_rows, rows, own_lse,
                             column, sequence, terms, BN, BD, D, C)  # fmt: skip
                tl.store(pointers, new.to(out.dtype.element_ty), mask=mask & spoilt[:, None])
    # All have read the note once the last one arrives here.
    if tl.atomic_add(counters + 2, 1) == tl.num_programs(0) - 1:
        tl.store(counters + 1, 0)
        tl.store(counters + 2, 0)


def resolve_repair(problem: Problem, forward: Resolved, tensors: Tensors) -> None:
    """Gives a forward the launch behind it, which mutates out and lse, if it has none yet.

    Args:
        problem, tensors: the forward's.
        forward: how it is launched.
    """
    if forward.repair is not None:
        return
    # Where tiles are few, fewer programs: each keeps the next forward from a multiprocessor until
    # it is done, 1 us (H200). Hidden values of lengths' tails may be anything, though.
    most, num_tiles = num_sms(tensors.q.device), forward.num_tiles
    num_programs = max(16, num_tiles // 16)
    if num_tiles <= 2 * most and not forward.code.is_ragged:
        num_programs = 4
    grid = (min(most, num_programs),)
    # As a dependent launch: 1 us less behind the forward.
    options = {"num_warps": 4, "launch_pdl": True}
    forward.repair = Launch(attn_repair_hopper, grid, tensors.q.get_device(), **options)
    strides = (s for x in (tensors.q, tensors.k, tensors.v) for s in strides_of(x))
    scale, softcap, stride_table, *sizes = forward.numbers
    forward.repair_numbers = (
        *strides, scale, softcap, stride_table, *sizes[:5], problem.batch * problem.num_heads,
        *sizes[9:],
        _BLOCK_M, _BLOCK_N, _BLOCK_D, problem.head_dim, forward.code,
    )  # fmt: skip


def strides_of(x: Tensor) -> tuple[int, ...]:
    """Strides of sequence, row and head in elements."""
    return (0, *x.stride()[:2]) if x.dim() == 3 else x.stride()[:3]
