"""Attention on a CPU, in torch alone.

Two ways to compute a rectangle of queries and keys:

* torch's fused operator (`_scaled_dot_product_flash_attention_for_cpu`), a blocked one-pass
  kernel that also returns the LSE. It knows no band but the square causal one, so other masks are
  cut into rectangles that it does know, merged by their LSE (Dao et al. 2022, FlashAttention,
  section 3.1). Given the LSE and output of the whole row, the backward of a rectangle needs
  nothing from its neighbours: gradients of rectangles add up.
* `onchip.kernels.cpu_tiled` for what the operator cannot say: softcap, ALiBi, float64.

Extra memory is O(S * D) and tiles. Sums are float32 (float64 for float64): where rectangles or
query heads share a key, their gradients are added in float32. What it does not do: backward
through pages.

Legend: B batch, S_q / S_k lengths, T packed tokens, H query heads, H_kv key and value heads, G
query heads of one of them, D / D_v head dimensions, P pages, N page size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.kernels import cpu_tiled
from onchip.problem import Layout, Mask, Problem, Saved, Tensors

_forward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_TILE_ROWS = 256  # query rows of a tile under a window; the operator is slower below 192
_NARROW = 64  # a window of fewer keys is masked, not cut into squares


def launch_fused(problem: Problem, t: Tensors) -> tuple[Tensor, Tensor]:
    """One call of the fused operator: dense, square if causal.

    Returns:
        out (B, S_q, H, D) and lse (B, H, S_q).
    """
    q, k, v = (x.transpose(1, 2) for x in (t.q, t.k, t.v))
    causal = problem.mask.causal
    out, lse = _forward_op(q, k, v, 0.0, causal, scale=problem.scale)
    out = out.transpose(1, 2)
    if causal and not _is_finite(out):
        return launch(problem, t)  # the operator lets NaN leak to rows that do not see it
    return out, lse


def launch_fused_backward(
    problem: Problem, t: Tensors, saved: Saved
) -> tuple[Tensor, Tensor, Tensor, None]:
    """The backward of `launch_fused`."""
    if saved.dlse is not None:
        return launch_backward(problem, t, saved)  # type: ignore[return-value]
    q, k, v, dout, out = (x.transpose(1, 2) for x in (t.q, t.k, t.v, saved.dout, saved.out))
    causal = problem.mask.causal
    grads = _backward_op(dout, q, k, v, out, saved.lse, 0.0, causal, scale=problem.scale)
    if causal and not all(map(_is_finite, grads)):
        return launch_backward(problem, t, saved)  # type: ignore[return-value]
    dq, dk, dv = (g.transpose(1, 2) for g in grads)
    return dq, dk, dv, None


def launch(problem: Problem, t: Tensors) -> tuple[Tensor, Tensor]:
    """Every layout and feature, one sequence (or dense batch) after the other.

    Returns:
        out as q with D_v; lse (B, H, S_q) or (H, T_q).
    """
    packed = problem.layout_q is Layout.PACKED
    if problem.layout_k is Layout.DENSE and problem.seqlen_k:
        out, lse = _attend(problem, next(_pieces(problem, t)))
        if t.sinks is not None:
            _add_sinks(out, lse, t.sinks)
        return out, lse
    out = t.q.new_zeros(*t.q.shape[:-1], t.v.shape[-1])
    heads = t.q.shape[-2]
    shape = (heads, t.q.shape[0]) if packed else (t.q.shape[0], heads, t.q.shape[1])
    lse = torch.full(shape, -torch.inf, dtype=cpu_tiled.sum_dtype(t.q.dtype))
    out4, lse3 = (out[None], lse[None]) if packed else (out, lse)
    for piece in _pieces(problem, t):
        if piece.k.shape[1] and piece.q.shape[1]:
            result = _attend(problem, piece)
            out4[piece.batch, piece.rows], lse3[piece.batch, :, piece.rows] = result
    if t.sinks is not None:
        _add_sinks(out4, lse3, t.sinks)
    return out, lse


def launch_backward(
    problem: Problem, t: Tensors, saved: Saved
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The backward of `launch`, for dense and packed keys.

    Returns:
        dq, dk, dv as q, k, v; dsinks (H,) or None.
    """
    packed = problem.layout_q is Layout.PACKED
    lift = (lambda x: x[None]) if packed else (lambda x: x)
    dout, out, lse = lift(saved.dout), lift(saved.out), lift(saved.lse)
    dlse = None if saved.dlse is None else lift(saved.dlse)
    dsinks = None
    if t.sinks is not None:
        dsinks = _sink_gradient(t.sinks, dout, dlse, out, lse)
    if not packed and problem.seqlen_k:
        grads = _attend_backward(problem, next(_pieces(problem, t)), saved)
        dq, dk, dv = (g.to(t.q.dtype) for g in grads)
        return dq, dk, dv, dsinks
    grads = [torch.zeros(x.shape, dtype=x.dtype) for x in (t.q, t.k, t.v)]
    dq, dk, dv = (lift(g) for g in grads)
    for piece in _pieces(problem, t):
        if piece.k.shape[1] and piece.q.shape[1]:
            rows = (piece.batch, piece.rows)
            of_rows = (piece.batch, slice(None), piece.rows)
            given = Saved(
                dout[rows], None if dlse is None else dlse[of_rows], out[rows], lse[of_rows]
            )
            result = _attend_backward(problem, piece, given)
            keys = (piece.batch, piece.keys)
            dq[rows], dk[keys], dv[keys] = result
    return (*grads, dsinks)  # type: ignore[return-value]


class _Piece(NamedTuple):
    """One sequence, or a dense batch of equally long ones."""

    q: Tensor  # (B, S_q, H, D)
    k: Tensor  # (B, S_k, H_kv, D)
    v: Tensor  # (B, S_k, H_kv, D_v)
    slopes: Tensor | None  # (H,) or (B, H)
    batch: slice
    rows: slice
    keys: slice


def _pieces(problem: Problem, t: Tensors) -> Iterator[_Piece]:
    everything = slice(None)
    if problem.layout_q is Layout.DENSE and problem.layout_k is Layout.DENSE:
        yield _Piece(t.q, t.k, t.v, t.alibi_slopes, everything, everything, everything)
        return
    offsets_q = None if t.cu_seqlens_q is None else t.cu_seqlens_q.tolist()
    starts, lengths = _key_lengths(t)
    pads = [0] * len(lengths) if t.leftpad_k is None else t.leftpad_k.tolist()
    for b, (start, length, pad) in enumerate(zip(starts, lengths, pads, strict=True)):
        if offsets_q is None:
            batch, rows, q = slice(b, b + 1), everything, t.q[b : b + 1]
        else:
            batch, rows = slice(0, 1), slice(offsets_q[b], offsets_q[b + 1])
            q = t.q[None, rows]
        if t.block_table is not None:
            keys = slice(pad, length)
            k, v = _gather(problem, t, b, length, pad)
        else:
            keys = slice(start + pad, start + length)
            k, v = t.k[None, keys], t.v[None, keys]
        slopes = t.alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[b : b + 1]
        yield _Piece(q, k, v, slopes, batch, rows, keys)


def _key_lengths(t: Tensors) -> tuple[list[int], list[int]]:
    """First key and number of keys of each sequence."""
    if t.cu_seqlens_k is None:
        assert t.seqused_k is not None
        lengths = t.seqused_k.tolist()
        return [0] * len(lengths), lengths
    offsets = t.cu_seqlens_k.tolist()
    lengths = [end - start for start, end in zip(offsets, offsets[1:], strict=False)]
    if t.seqused_k is not None:
        lengths = t.seqused_k.tolist()
    return offsets[:-1], lengths


def _gather(problem: Problem, t: Tensors, b: int, length: int, pad: int) -> tuple[Tensor, Tensor]:
    """Keys and values of sequence b, copied out of their pages: (1, S_k, H_kv, D)."""
    size = problem.page_size
    first, last = pad // size, -(-length // size)
    assert t.block_table is not None
    if last - first == 1:
        page = int(t.block_table[b, first])
        used = slice(pad - first * size, length - first * size)
        pair = [x[page : page + 1, used] for x in (t.k, t.v)]
    else:
        pages = t.block_table[b, first:last]
        used = slice(pad - first * size, length - first * size)
        pair = [x.index_select(0, pages).flatten(0, 1)[None, used] for x in (t.k, t.v)]
    if problem.kv_scales or problem.kv_dtype != problem.dtype:
        pair = [_dequantise(x, s) for x, s in zip(pair, (t.k_scale, t.v_scale), strict=True)]
    return pair[0], pair[1]


def _dequantise(x: Tensor, scale: Tensor | None) -> Tensor:
    x = x.float()
    return x if scale is None else x * scale[:, None]


def _is_finite(x: Tensor) -> bool:
    # A sum is one pass and turns NaN and Inf into themselves; an overflow merely costs a rerun.
    return bool(x.sum(dtype=cpu_tiled.sum_dtype(x.dtype)).isfinite())


def _add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Puts exp(sink) into each denominator: out *= exp(lse - lse'), lse' = log(e^lse + e^sink)."""
    joined = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    # A sink of -inf on an empty row: -inf - -inf would be NaN.
    share = (lse - joined).exp().masked_fill(joined == -torch.inf, 0.0)
    out.copy_(out * share.transpose(1, 2).unsqueeze(-1))
    lse.copy_(joined)


def _sink_gradient(
    sinks: Tensor, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> Tensor:
    """dsink_h = -sum_i exp(sink_h - lse_i) D_i with D = rowsum(dO * O) - dLSE."""
    d = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)  # (B, H, S_q)
    if dlse is not None:
        d = d - dlse
    logits = sinks.to(lse.dtype)[:, None]
    mass = (logits - lse).exp().masked_fill(logits == -torch.inf, 0.0)
    return -(mass * d).sum((0, 2)).to(sinks.dtype)


def _uses_fused(problem: Problem) -> bool:
    return problem.softcap == 0 and not problem.alibi and problem.dtype != torch.float64


def _attend(problem: Problem, p: _Piece) -> tuple[Tensor, Tensor]:
    """Output and LSE of one piece, rows that see nothing included."""
    dtype = p.q.dtype
    q = p.q.to(p.k.dtype) if p.k.dtype != dtype else p.q  # a cache that was dequantised
    if _uses_fused(problem):
        out, lse = _forward_fused(problem, q, p.k, p.v)
        if problem.mask.is_full or _is_finite(out):
            return out.to(dtype), lse
    args = cpu_tiled.Features(problem.mask, problem.scale, problem.softcap, p.slopes)
    out, lse = cpu_tiled.forward(q, p.k, p.v, args)
    return out.to(dtype), lse


def _attend_backward(problem: Problem, p: _Piece, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    if _uses_fused(problem):
        grads = _backward_fused(problem, p.q, p.k, p.v, saved)
        if problem.mask.is_full or all(map(_is_finite, grads)):
            return grads
    args = cpu_tiled.Features(problem.mask, problem.scale, problem.softcap, p.slopes)
    return cpu_tiled.backward(p.q, p.k, p.v, saved, args)


class _Rectangle(NamedTuple):
    """Queries and keys that the fused operator takes in one call."""

    rows: slice
    keys: slice
    causal: bool = False  # square: row n sees keys up to n, both counted from the corner
    flipped: bool = False  # counted from the last row and key: row n sees keys from n on
    bias: Tensor | None = None  # (rows, keys), 0 or -inf


def _rectangles(mask: Mask, seqlen_q: int, seqlen_k: int) -> list[_Rectangle]:
    """Cuts the visible band into rectangles; rows that see nothing are in none.

    An edge of the band is the diagonal of squares: the right edge's are causal, the left edge's
    are causal when rows and keys are counted backwards. What lies between is seen in full.
    Rectangles of the same rows follow each other.
    """
    rows = mask.row_range(seqlen_q, seqlen_k)
    shift = seqlen_k - seqlen_q
    # Rows from `left_from` on have a left edge, rows before `right_until` a right one.
    left_from = rows.stop if mask.left < 0 else mask.left - shift
    right_until = rows.start if mask.right < 0 else seqlen_k - shift - mask.right
    cuts = sorted({rows.start, rows.stop, _within(left_from, rows), _within(right_until, rows)})
    width = mask.left + mask.right
    cut = []
    for first, last in zip(cuts, cuts[1:], strict=False):
        edges = first >= left_from, first < right_until
        narrow = all(edges) and width < _NARROW
        step = _NARROW if narrow else min(width, _TILE_ROWS) if all(edges) else last - first
        for start in range(first, last, step):
            tile = range(start, min(last, start + step))
            if narrow:
                cut.append(_masked_rectangle(mask, tile, seqlen_q, seqlen_k))
            else:
                cut += _tile_rectangles(mask, tile, shift, seqlen_k, edges)
    return cut


def _within(row: int, rows: range) -> int:
    return max(rows.start, min(rows.stop, row))


def _tile_rectangles(
    mask: Mask, tile: range, shift: int, seqlen_k: int, edges: tuple[bool, bool]
) -> Iterator[_Rectangle]:
    rows = slice(tile.start, tile.stop)
    start, end = 0, seqlen_k
    if edges[0]:
        first, start = (row + shift - mask.left for row in (tile.start, tile.stop))
        yield _Rectangle(rows, slice(first, start), causal=True, flipped=True)
    if edges[1]:
        end, last = (row + shift + mask.right for row in (tile.start, tile.stop))
        yield _Rectangle(rows, slice(end, last), causal=True)
    if start < end:
        yield _Rectangle(rows, slice(start, end))


def _masked_rectangle(mask: Mask, tile: range, seqlen_q: int, seqlen_k: int) -> _Rectangle:
    """A tile of a band too narrow for squares: every key that one of its rows sees, masked."""
    keys = mask.key_range(tile.start, tile.stop, seqlen_q, seqlen_k)
    first = keys.start - tile.start - seqlen_k + seqlen_q  # from row 0's own key to the first
    bias = _band(len(tile), len(keys), first, mask.left, mask.right)
    return _Rectangle(slice(tile.start, tile.stop), slice(keys.start, keys.stop), bias=bias)


@lru_cache(maxsize=8)
def _band(num_rows: int, num_keys: int, first: int, left: int, right: int) -> Tensor | None:
    """0 where row i sees key j (j + first is its distance to row 0's own key), -inf elsewhere."""
    distance = torch.arange(num_keys) + first - torch.arange(num_rows)[:, None]
    hidden = torch.zeros(num_rows, num_keys, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    if not bool(hidden.any()):
        return None
    return torch.zeros(num_rows, num_keys).masked_fill_(hidden, -torch.inf)


def _groups(x: Tensor, num_kv_heads: int) -> list[Tensor]:
    """Query heads by their place in the group, each (B, H_kv, S, D): no copy of k or v."""
    grouped = x.unflatten(2, (num_kv_heads, -1))  # (B, S, H_kv, G, D)
    return [grouped[:, :, :, g].transpose(1, 2) for g in range(grouped.shape[3])]


def _padded(x: Tensor, width: int) -> Tensor:
    """Zero columns up to `width`: they change no product (the scale is given explicitly)."""
    return x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1]))


def _forward_fused(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    (batch, seqlen_q, num_heads, _), (_, seqlen_k, num_kv_heads, dim_v) = q.shape, v.shape
    if seqlen_q == 1 and problem.group > 1 and not problem.mask.is_full:
        keys = problem.mask.key_range(0, 1, 1, seqlen_k)
        k, v = k[:, keys.start : keys.stop], v[:, keys.start : keys.stop]
    if seqlen_q == 1 and problem.group > 1:
        return _decode_fused(problem, q, k, v)
    width = max(q.shape[-1], dim_v)
    out = q.new_zeros(batch, seqlen_q, num_heads, dim_v)
    lse = torch.full((batch, num_heads, seqlen_q), -torch.inf)
    out_groups = _groups(out, num_kv_heads)
    lse_groups = lse.unflatten(1, (num_kv_heads, -1)).unbind(2)
    q_groups = [_padded(x, width) for x in _groups(q, num_kv_heads)]
    k, v = (_padded(x, width).transpose(1, 2) for x in (k, v))
    cut = _rectangles(problem.mask, seqlen_q, seqlen_k)
    for q_g, out_g, lse_g in zip(q_groups, out_groups, lse_groups, strict=True):
        seen = 0
        for r in cut:
            part = _call(problem, q_g, k, v, r)
            part = (part[0][..., :dim_v], part[1])
            if r.rows.start < seen:  # these rows have met other keys already
                _merge(out_g[:, :, r.rows], lse_g[..., r.rows], part)
            else:
                out_g[:, :, r.rows], lse_g[..., r.rows] = part
            seen = r.rows.stop
    return out, lse


def _decode_fused(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """One query a sequence: the heads of a group are the rows of one rectangle."""
    batch, _, num_heads, _ = q.shape
    width = max(q.shape[-1], v.shape[-1])
    rows = (
        q.view(batch, k.shape[2], problem.group, -1)
        if q.is_contiguous()
        else q.reshape(batch, k.shape[2], problem.group, -1)
    )
    args = (_padded(x, width) for x in (rows, k.transpose(1, 2), v.transpose(1, 2)))
    out, lse = _forward_op(*args, 0.0, False, scale=problem.scale)
    return out[..., : v.shape[-1]].reshape(batch, 1, num_heads, -1), lse.reshape(batch, -1, 1)


def _call(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, r: _Rectangle
) -> tuple[Tensor, Tensor]:
    inputs = _corner(r, q[:, :, r.rows], k[:, :, r.keys], v[:, :, r.keys])
    out, lse = _forward_op(*inputs, 0.0, r.causal, attn_mask=r.bias, scale=problem.scale)
    return (out.flip(2), lse.flip(2)) if r.flipped else (out, lse)


def _call_backward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, given: tuple[Tensor, ...], r: _Rectangle
) -> tuple[Tensor, ...]:
    """dq, dk, dv of one rectangle; given: dout, out, lse of all rows."""
    dout, out, lse = _corner(r, *(x[:, :, r.rows] for x in given))
    q, k, v = _corner(r, q[:, :, r.rows], k[:, :, r.keys], v[:, :, r.keys])
    grads = _backward_op(
        dout, q, k, v, out, lse, 0.0, r.causal, attn_mask=r.bias, scale=problem.scale
    )
    return _corner(r, *grads)


def _corner(r: _Rectangle, *xs: Tensor) -> tuple[Tensor, ...]:
    """Rows or keys as the rectangle counts them; (B, H, S, ...)."""
    return tuple(x.flip(2) for x in xs) if r.flipped else xs


def _merge(out: Tensor, lse: Tensor, part: tuple[Tensor, Tensor]) -> None:
    """Joins attention over further keys by its LSE. Mutates: out, lse."""
    weight = (part[1] - lse).sigmoid_().unsqueeze(-1)
    if out.dtype == weight.dtype:
        out.lerp_(part[0], weight)
    else:
        out.copy_(out.float().lerp_(part[0].float(), weight))
    lse.copy_(torch.logaddexp(lse, part[1]))


def _backward_fused(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, saved: Saved
) -> tuple[Tensor, Tensor, Tensor]:
    num_kv_heads, dim, dim_v = k.shape[2], q.shape[-1], v.shape[-1]
    # Shares of rectangles and heads are computed and added in float32.
    q, k, v, dout, out = (x.float() for x in (q, k, v, saved.dout, saved.out))
    if saved.dlse is not None:
        dout, out, v = _with_lse_gradient(dout, out, v, saved.dlse)
    width = max(dim, v.shape[-1])
    dq, dk = torch.zeros(q.shape), torch.zeros(k.shape)
    dv = torch.zeros(*v.shape[:-1], dim_v)
    k, v = (_padded(x, width).transpose(1, 2) for x in (k, v))
    groups = [_groups(x, num_kv_heads) for x in (q, dout, out, dq)]
    lse_groups = saved.lse.unflatten(1, (num_kv_heads, -1)).unbind(2)
    cut = _rectangles(problem.mask, q.shape[1], k.shape[2])
    for q_g, dout_g, out_g, dq_g, lse_g in zip(*groups, lse_groups, strict=True):
        q_g, dout_g, out_g = (_padded(x, width) for x in (q_g, dout_g, out_g))
        for r in cut:
            grads = _call_backward(problem, q_g, k, v, (dout_g, out_g, lse_g), r)
            dq_g[:, :, r.rows] += grads[0][..., :dim]
            dk[:, r.keys] += grads[1][..., :dim].transpose(1, 2)
            dv[:, r.keys] += grads[2][..., :dim_v].transpose(1, 2)
    return dq, dk, dv


def _with_lse_gradient(
    dout: Tensor, out: Tensor, v: Tensor, dlse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dout, out and v such that the operator's dP - rowsum(dO * O) becomes dP - D.

    The operator knows no gradient of the LSE. A column of ones beside v, with the LSE's gradient
    in the same column of dout and zeros in that of out, adds it to every dP of the row.
    """
    extra = dlse.transpose(1, 2).unsqueeze(-1)  # (B, S_q, H, 1)
    return (
        torch.cat((dout, extra), dim=-1),
        torch.cat((out, torch.zeros_like(extra)), dim=-1),
        torch.cat((v, v.new_ones(*v.shape[:-1], 1)), dim=-1),
    )
