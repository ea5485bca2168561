"""Float8 attention's arithmetic in torch, on any device: what the fast kernels must agree with.

Method: the online softmax of FlashAttention-2 over tiles of `BLOCK_K` keys, the last ones first,
as the Hopper kernel walks. Q K^T is summed in float32 and multiplied by its blocks' scales; P is
2^(logit - base), on straight lines between powers of two, rounded to float8_e4m3fn, and the row
sums are those of the rounded P. The base moves only where P would leave e4m3's range
(`fp8_layout`).
P V of a tile is summed from zero and then added to the float32 accumulator, which is held in
units of the tile's V scale (two-level accumulation).

`Accumulation.TENSOR_CORE` models how Hopper's tensor cores sum float8 (as MMA-Sim, arXiv
2511.10909, finds them): in steps of 32 products; each product and the accumulator are cut off 13
bits below the largest sum of two factors' exponents, or the accumulator's, and so is their sum
below its own leading bit.

Sequences of different length are padded to the longest: nothing is read on the host.

Legend: B batch, S_q / S_k longest lengths, T packed tokens, H query heads, H_kv key and value
heads, G query heads of one of them, D / D_v head dimensions, N blocks, R rows and K keys of a
tile.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.kernels.fp8_layout import (
    BLOCK_K,
    BLOCK_Q,
    FIRST_ROOM,
    FLOAT8,
    LIMIT,
    LINE_STEPS,
    LOWERED,
    NEVER,
    ROOM,
    first_blocks,
    key_of_column,
)
from onchip.problem import Layout, Problem, Tensors

_LOG2_E = math.log2(math.e)
_TILE_SCORES = 1 << 22
_BIAS = 15  # of float16's exponents
_STEP = 32  # products that one wgmma instruction sums
_FRACTION_BITS = 13


class Accumulation(enum.Enum):
    """How products are summed; P V of a tile is always added in float32 but with `TENSOR_CORE`."""

    FLOAT32 = "in float32"
    TWO_LEVEL = "Q K^T, and P V of a tile, as Hopper's tensor cores sum"
    TENSOR_CORE = "Q K^T, and P V of all tiles, as Hopper's tensor cores sum"


class _Padded(NamedTuple):
    """All sequences at one length; scales are part of the values of q."""

    q: Tensor  # (B, H_kv, G, S_q, D) float32 codes
    k: Tensor  # (B, H_kv, N * K, D) float32 codes
    v: Tensor  # (B, H_kv, N * K, D_v) float32 codes
    q_scale: Tensor  # (B, H_kv, G, S_q, 1)
    k_scale: Tensor  # (B, H_kv, N)
    v_scale: Tensor  # (B, H_kv, N)
    lengths_q: Tensor  # (B,)
    lengths_k: Tensor  # (B,)


class _Sums(NamedTuple):
    acc: Tensor  # (B, H_kv, G * R, D_v) in units of `unit`
    unit: Tensor  # (B, H_kv, 1, 1)
    total: Tensor  # (B, H_kv, G * R, 1)
    top: Tensor  # (B, H_kv, G * R, 1) base 2


def launch(
    problem: Problem, t: Tensors, accumulation: Accumulation = Accumulation.FLOAT32
) -> tuple[Tensor, Tensor]:
    """Runs the forward.

    Args:
        problem: what the call asks for.
        t: its data, as `onchip.quantize_qkv` makes them.
        accumulation: how products are summed.

    Returns:
        out as q with D_v, of `problem.out_dtype`; lse (B, H, S_q) or (H, T_q) float32.
    """
    x = _padded(problem, t)
    rows = [_attend(problem, t, x, part, accumulation) for part in _row_parts(problem)]
    shape = (problem.batch, problem.num_heads, problem.seqlen_q)
    if not rows:
        out = x.q.new_zeros(*shape, problem.head_dim_v)
        lse = x.q.new_full(shape, -torch.inf)
    else:
        out = torch.cat([out for out, _ in rows], 3).flatten(1, 2)  # (B, H, S_q, D_v)
        lse = torch.cat([lse for _, lse in rows], 3).flatten(1, 2)  # (B, H, S_q)
    out = out.transpose(1, 2).to(getattr(torch, problem.out_dtype))
    if problem.layout_q is Layout.DENSE:
        return out, lse
    return _packed(out, lse, t, problem.tokens_q)


def _packed(out: Tensor, lse: Tensor, t: Tensors, tokens: int) -> tuple[Tensor, Tensor]:
    """(B, S_q, H, D_v) and (B, H, S_q) as (T_q, H, D_v) and (H, T_q)."""
    assert t.cu_seqlens_q is not None
    token = torch.arange(tokens, device=out.device)
    ends = t.cu_seqlens_q[1:].long()
    sequence = torch.searchsorted(ends, token, right=True)
    place = token - t.cu_seqlens_q.long()[sequence]
    return out[sequence, place], lse.transpose(1, 2)[sequence, place].t()


def _row_parts(problem: Problem) -> Iterator[range]:
    step = max(16, _TILE_SCORES // max(1, problem.batch * problem.num_heads * BLOCK_K))
    for start in range(0, problem.seqlen_q, step):
        yield range(start, min(problem.seqlen_q, start + step))


def _padded(problem: Problem, t: Tensors) -> _Padded:
    q, q_scale, lengths_q = _padded_queries(problem, t)
    k, v, lengths_k = _padded_keys(problem, t)
    num = v.shape[2] // BLOCK_K
    k_scale, v_scale = t.scales[1], t.scales[2]
    if t.cu_seqlens_k is not None:
        block = first_blocks(t.cu_seqlens_k, BLOCK_K).long()[:, None]
        block = block + torch.arange(num, device=q.device)
        block = block.clamp(max=max(0, k_scale.shape[2] - 1))[:, None]
        k_scale, v_scale = (
            s.gather(2, block.expand(-1, s.shape[1], -1)) for s in (k_scale, v_scale)
        )
    return _Padded(q, k, v, q_scale, k_scale, v_scale, lengths_q, lengths_k)


def _padded_queries(problem: Problem, t: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    batch, device, length = problem.batch, t.q.device, problem.seqlen_q
    place = torch.arange(length, device=device)
    scale = t.scales[0]
    if t.cu_seqlens_q is None:
        rows, lengths = t.q.float(), torch.full((batch,), length, device=device)
        block = (place // BLOCK_Q).expand(batch, -1)
    else:
        starts = t.cu_seqlens_q.long()
        lengths = starts.diff()
        rows = _taken(t.q, starts[:-1, None] + place)
        block = first_blocks(t.cu_seqlens_q, BLOCK_Q).long()[:, None] + place // BLOCK_Q
        block = block.clamp(max=max(0, scale.shape[2] - 1))
    by_row = scale.gather(2, block[:, None].expand(-1, scale.shape[1], -1))  # (B, H, S_q)
    heads = (problem.num_kv_heads, problem.group)
    q = rows.unflatten(2, heads).permute(0, 2, 3, 1, 4)
    return q, by_row.unflatten(1, heads)[..., None], lengths


def _padded_keys(problem: Problem, t: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    batch, device, length = problem.batch, t.q.device, problem.seqlen_k
    padded = -(-length // BLOCK_K) * BLOCK_K
    place = torch.arange(padded, device=device)
    column = place // 16 * 16 + key_of_column(device).argsort()[place % 16]
    if t.cu_seqlens_k is None:
        lengths = torch.full((batch,), length, device=device)
        k = torch.nn.functional.pad(t.k.float(), (0, 0, 0, 0, 0, padded - length))
        v = t.v.float()[..., column] if padded else t.v.float()  # (B, H_kv, D_v, padded)
    else:
        starts = t.cu_seqlens_k.long()
        lengths = starts.diff()
        k = _taken(t.k, starts[:-1, None] + place)
        first = first_blocks(t.cu_seqlens_k, BLOCK_K).long()[:, None] * BLOCK_K
        columns = t.v.float().permute(2, 0, 1)  # (columns, H_kv, D_v)
        v = _taken(columns, first + column).permute(0, 2, 3, 1)
    if t.seqused_k is not None:
        lengths = t.seqused_k.long()
    return k.transpose(1, 2), v.transpose(2, 3), lengths


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """Rows of (T, ...) in float32; 0 past the last one."""
    if x.shape[0] == 0:
        return x.new_zeros(*index.shape, *x.shape[1:], dtype=torch.float32)
    return x.float()[index.clamp(max=x.shape[0] - 1)]


def _attend(
    problem: Problem, t: Tensors, x: _Padded, rows: range, accumulation: Accumulation
) -> tuple[Tensor, Tensor]:
    """out (B, H_kv, G, R, D_v) float32 and lse (B, H_kv, G, R) of some rows."""
    place = slice(rows.start, rows.stop)
    q = x.q[:, :, :, place].flatten(2, 3)  # (B, H_kv, G * R, D)
    factor = (x.q_scale[:, :, :, place] * problem.scale).flatten(2, 3)
    unit = q.new_ones(*q.shape[:2], 1, 1)
    top = q.new_full((*q.shape[:3], 1), NEVER)
    sums = _Sums(q.new_zeros(*q.shape[:3], x.v.shape[-1]), unit, torch.zeros_like(top), top)
    for block in reversed(range(x.k_scale.shape[2])):
        if _is_seen(problem, rows, block):
            scores = _scores(problem, t, x, q, factor, rows, block, accumulation)
            sums = _added(sums, scores, x, block, accumulation)
    return _finished(problem, t, sums, len(rows))


def _is_seen(problem: Problem, rows: range, block: int) -> bool:
    """Whether some row may see some key of a block; lengths on the device are not known."""
    if problem.layout_q is not Layout.DENSE or problem.seqused_k:
        return True
    keys = problem.mask.key_range(rows.start, rows.stop, problem.seqlen_q, problem.seqlen_k)
    return keys.start < (block + 1) * BLOCK_K and block * BLOCK_K < keys.stop


def _scores(
    problem: Problem, t: Tensors, x: _Padded, q: Tensor, factor: Tensor, rows: range, block: int,
    accumulation: Accumulation,
) -> Tensor:  # fmt: skip
    """(B, H_kv, G * R, K) logits of base 2, -inf where hidden."""
    keys = slice(block * BLOCK_K, (block + 1) * BLOCK_K)
    k = x.k[:, :, keys].transpose(2, 3)
    s = q @ k if accumulation is Accumulation.FLOAT32 else by_tensor_core(None, q, k)
    s = s * (factor * x.k_scale[:, :, block, None, None])
    if problem.softcap > 0:
        s = problem.softcap * (s / problem.softcap).tanh()
    row = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=q.device)
    shift = (x.lengths_k - x.lengths_q)[:, None, None]
    ahead = key - row - shift  # (B, R, K) from a row's own key
    s = s.unflatten(2, (problem.group, -1))
    if t.alibi_slopes is not None:
        slopes = t.alibi_slopes.expand(problem.batch, -1).unflatten(1, (x.k.shape[1], -1))
        s = s - slopes[..., None, None] * ahead.abs()[:, None, None]
    hidden = (key >= x.lengths_k[:, None, None]).expand_as(ahead)
    if problem.mask.left >= 0:
        hidden = hidden | (ahead < -problem.mask.left)
    if problem.mask.right >= 0:
        hidden = hidden | (ahead > problem.mask.right)
    return (s * _LOG2_E).masked_fill(hidden[:, None, None], -torch.inf).flatten(2, 3)


def _added(
    sums: _Sums, scores: Tensor, x: _Padded, block: int, accumulation: Accumulation
) -> _Sums:
    """The sums with one more tile of keys."""
    highest = scores.amax(-1, keepdim=True)
    room = torch.where(sums.top == NEVER, FIRST_ROOM, ROOM)
    top = (highest - room).where(highest - sums.top >= LIMIT, sums.top)
    shrink = (sums.top - top).exp2()
    rounded = weights(scores - top).to(FLOAT8).float()
    unit = x.v_scale[:, :, block, None, None]
    v = x.v[:, :, block * BLOCK_K : (block + 1) * BLOCK_K]
    acc = sums.acc * (shrink * (sums.unit / unit))
    total = rounded.sum(-1, keepdim=True)
    if accumulation is Accumulation.FLOAT32:
        acc = acc + rounded @ v
    else:
        total = by_tensor_core(None, rounded, torch.ones_like(v[..., :1]))
        if accumulation is Accumulation.TWO_LEVEL:
            acc = acc + by_tensor_core(None, rounded, v)
        else:
            acc = by_tensor_core(acc, rounded, v)
    return _Sums(acc, unit, sums.total * shrink + total, top)


def weights(x: Tensor) -> Tensor:
    """2^x as the kernel makes it of logits; see `fp8_layout.LOWERED`."""
    # One step of float16's subnormal numbers, which the conversion rounds to.
    steps = ((x + (_BIAS - LOWERED)) * LINE_STEPS).round().clamp(min=0)
    whole = (steps / LINE_STEPS).floor()
    return (1 + steps / LINE_STEPS - whole) * (whole - _BIAS).exp2()


def by_tensor_core(acc: Tensor | None, x: Tensor, y: Tensor) -> Tensor:
    """acc (0 if None) + x y as Hopper's tensor cores sum float8.

    Args:
        acc: (..., R, C) or None.
        x: (..., R, K), K a multiple of 32.
        y: (..., K, C).
    """
    for start in range(0, x.shape[-1], _STEP):
        step = slice(start, start + _STEP)
        left, right = x[..., step, None], y[..., step, :].unsqueeze(-3)
        terms = (left * right).double()  # (..., R, steps, columns)
        exponents = _exponent(left) + _exponent(right)
        if acc is not None:
            terms = torch.cat([terms, acc.double().unsqueeze(-2)], -2)
            exponents = torch.cat([exponents, _exponent(acc).unsqueeze(-2)], -2)
        total = _cut(terms, exponents.amax(-2, keepdim=True)).sum(-2)
        acc = _cut(total, _exponent(total)).float()
    assert acc is not None
    return acc


def _exponent(x: Tensor) -> Tensor:
    """floor(log2 |x|); far below all others where x = 0."""
    _, exponent = torch.frexp(x)  # x = m * 2^exponent, 0.5 <= |m| < 1
    return torch.where(x == 0, -1000, exponent - 1)


def _cut(x: Tensor, exponent: Tensor) -> Tensor:
    """x without what lies `_FRACTION_BITS` below 2^exponent."""
    # In two halves: a single factor would leave float64's range where all terms are 0.
    shift = _FRACTION_BITS - exponent.clamp(min=-500)
    return torch.ldexp(torch.ldexp(x, shift).trunc(), -shift)


def _finished(problem: Problem, t: Tensors, sums: _Sums, num_rows: int) -> tuple[Tensor, Tensor]:
    total, top, acc = sums.total, sums.top, sums.acc
    if t.sinks is not None:
        sink = (t.sinks.float() * _LOG2_E).view(1, -1, problem.group, 1, 1)
        sink = sink.expand(-1, -1, -1, num_rows, -1).flatten(2, 3)
        grown = torch.maximum(top, sink)
        base = grown.where(grown != -torch.inf, 0.0)
        shrink = (top - base).exp2()
        total, acc, top = total * shrink + (sink - base).exp2(), acc * shrink, grown
    out = acc * sums.unit / total
    out = out.where(total != 0, 0.0)
    lse = (top + total.log2()) / _LOG2_E
    shape = (problem.group, num_rows)
    return out.unflatten(2, shape), lse.squeeze(-1).unflatten(2, shape)
