"""Quantises q, k and v to float8, in torch on any device; the layout is `fp8_layout`'s.

Method: rows of q and k are multiplied by one orthogonal matrix (random signs and a Hadamard
matrix), which leaves Q K^T as it is and spreads a large entry over its row (Chee et al. 2023,
QuIP; Shah et al. 2024, FlashAttention-3, section 3.3). Then each block is divided by its
largest entry and rounded to the nearest float8_e4m3fn.

What is not finite: a row of q or k with a NaN or Inf becomes NaN as a whole. Of v nothing
becomes NaN, since P V would spread it to rows that do not see it, as 0 * NaN: the *key* becomes
NaN instead, so every row that sees it is NaN and no other.

Legend: B batch, S sequence length, T packed tokens, H heads, H_kv key and value heads, D / D_v
head dimensions, N blocks, R rows of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onchip.kernels.common import apply_rotary
from onchip.kernels.fp8_layout import (
    BLOCK_K,
    BLOCK_Q,
    FLOAT8,
    LARGEST,
    SMALLEST,
    Quantiser,
    Source,
    expanded,
    first_blocks,
    key_of_column,
    num_blocks,
    transform,
    transform_gain,
)


class Blocks:
    """The rows of dense or packed sequences, cut into blocks.

    Args:
        x: (B, S, ...) or (T, ...).
        cu_seqlens: (B + 1,), packed only.
        used: (B,), rows that count; None for all of them.
        size: R.
    """

    def __init__(self, x: Tensor, cu_seqlens: Tensor | None, used: Tensor | None, size: int):
        self.is_packed = cu_seqlens is not None
        self.shape = x.shape[: 1 if self.is_packed else 2]
        steps = torch.arange(size, device=x.device)
        if cu_seqlens is None:
            self.batch, length = self.shape
            self.per_sequence = n = num_blocks(length, None, size)
            index = torch.arange(self.batch * n, device=x.device)
            self.sequence = index // max(1, n)  # (N,)
            firsts = torch.arange(self.batch, device=x.device) * n
            starts = torch.arange(self.batch, device=x.device) * length
            self.lengths = torch.full_like(starts, length)
        else:
            self.batch = cu_seqlens.shape[0] - 1
            firsts = first_blocks(cu_seqlens, size).long()
            index = torch.arange(num_blocks(x.shape[0], self.batch, size), device=x.device)
            self.sequence = (torch.searchsorted(firsts, index, right=True) - 1).clamp(min=0)
            starts, self.lengths = cu_seqlens[:-1].long(), cu_seqlens.long().diff()
        if used is not None:
            self.lengths = used.long()
        # (N, R), in its own sequence
        self.position = (index - firsts[self.sequence])[:, None] * size + steps
        self.holds = self.position < self.lengths[self.sequence][:, None]
        self.index = (starts[self.sequence][:, None] + self.position).where(self.holds, 0)

    def gather(self, x: Tensor) -> Tensor:
        """(N, R, H, D), 0 where a block holds no row."""
        rows = x if self.is_packed else x.flatten(0, 1)
        if rows.shape[0] == 0:
            return x.new_zeros(*self.index.shape, *rows.shape[1:])
        return rows[self.index].where(self.holds[..., None, None], 0)

    def scatter(self, blocks: Tensor) -> Tensor:
        """The rows of (N, R, H, D) where they were in x; rows that do not count are 0."""
        codes = blocks.view(torch.uint8)  # torch copies bytes on every device, float8 not quite
        rows = codes.new_zeros(self.shape.numel() + 1, *blocks.shape[2:])
        # Rows that a block does not hold go to one past the last.
        rows[self.index.where(self.holds, self.shape.numel())] = codes
        return rows[:-1].unflatten(0, self.shape).view(FLOAT8)

    def by_head(self, x: Tensor) -> Tensor:
        """(N, H) as (B, H, N of a sequence); (B, H, all N) expanded when packed."""
        if self.is_packed:
            return x.t().contiguous().expand(self.batch, -1, -1)
        shape = (self.batch, self.per_sequence, x.shape[1])
        return x.view(shape).transpose(1, 2).contiguous()


def scales_of(
    largest: Tensor, blocks: Blocks, kind: str, gain: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Scales of blocks from their largest entries (N, H).

    Returns:
        (N, H), and the same times `gain` as (B, H, N), of stride 0 where blocks share one.
    """
    if kind == "block":
        scales = _scale(largest)
        return scales, blocks.by_head(scales * gain)
    shared = shared_scales(largest, blocks, kind)  # (B, H)
    n = largest.shape[0] if blocks.is_packed else blocks.per_sequence
    return shared[blocks.sequence], expanded(shared * gain, n)


def shared_scales(largest: Tensor, blocks: Blocks, kind: str) -> Tensor:
    """Scales (B, H) of heads, or of all of a tensor, from largest entries (N, H)."""
    if kind == "head":
        tops = largest.new_zeros(max(1, blocks.batch), largest.shape[1])
        where = blocks.sequence[:, None].expand_as(largest)
        return _scale(tops.scatter_reduce(0, where, largest, "amax")[: blocks.batch])
    top = largest.amax() if largest.numel() else largest.new_zeros(())
    return _scale(top).expand(blocks.batch, largest.shape[1])


def _scale(largest: Tensor) -> Tensor:
    """The factor that gives a block back; 1 for a block of zeros."""
    return (largest.clamp(min=SMALLEST) / LARGEST).where(largest > 0, 1.0)


def _codes(x: Tensor, scales: Tensor, spoilt: Tensor | None = None) -> Tensor:
    """(N, R, H, D) float32 as float8; NaN in rows that are spoilt (N, R, H)."""
    scaled = (x / scales[:, None, :, None]).clamp(-LARGEST, LARGEST)
    if spoilt is not None:
        scaled = scaled.masked_fill(spoilt[..., None], torch.nan)
    return scaled.to(FLOAT8)


def _is_spoilt(x: Tensor) -> Tensor:
    return ~x.isfinite().all(-1)


def transformed(x: Tensor, hadamard: bool) -> Tensor:
    """(..., D) in float32, multiplied by `fp8_layout.transform`."""
    if not hadamard:
        return x.float()
    dim = x.shape[-1]
    return x.float() @ transform(dim, dim, torch.float32, x.device)


def _rows(x: Tensor, blocks: Blocks, shift: Tensor | int, source: Source, how: Quantiser):
    """Rotated and transformed rows (N, R, H, D) float32, 0 where spoilt, and which are."""
    rows = blocks.gather(x)
    if source.rotary_cos is not None and source.rotary_sin is not None:
        place = (blocks.position + shift).clamp(0, source.rotary_cos.shape[0] - 1)
        cos, sin = source.rotary_cos, source.rotary_sin
        rows = apply_rotary(rows, cos, sin, place, how.rotary_interleaved)
    spoilt = _is_spoilt(rows)
    rows = transformed(rows.masked_fill(spoilt[..., None], 0.0), how.hadamard)
    return rows, spoilt


def _largest(rows: Tensor) -> Tensor:
    """(N, H) of (N, R, H, D)."""
    return rows.abs().amax((1, 3))


def columns(codes: Tensor, blocks: Blocks) -> Tensor:
    """V's codes (N, BLOCK_K, H_kv, D_v) as (B, H_kv, D_v, columns) or (H_kv, D_v, columns)."""
    groups = codes.view(torch.uint8).unflatten(1, (-1, 16))[:, :, key_of_column(codes.device)]
    rows = groups.flatten(1, 2).permute(2, 3, 0, 1)  # (H_kv, D_v, N, R)
    if blocks.is_packed:
        return rows.flatten(2).contiguous().view(FLOAT8)
    by_batch = rows.unflatten(2, (blocks.batch, blocks.per_sequence)).permute(2, 0, 1, 3, 4)
    return by_batch.flatten(3).contiguous().view(FLOAT8)


def quantise(source: Source, how: Quantiser) -> tuple[Tensor, ...]:
    """Codes and scales of q, k and v.

    Returns:
        q as q and k as k, float8; v (B, H_kv, D_v, columns) or (H_kv, D_v, columns), float8; and
        their scales (B, H or H_kv, N) float32, of stride 0 where blocks share one.
    """
    q_blocks = Blocks(source.q, source.cu_seqlens_q, None, BLOCK_Q)
    k_blocks = Blocks(source.k, source.cu_seqlens_k, source.seqused_k, BLOCK_K)
    shift = _query_shift(source, q_blocks, k_blocks)
    q, q_spoilt = _rows(source.q, q_blocks, shift, source, how)
    k, k_spoilt = _rows(source.k, k_blocks, 0, source, how)
    v = k_blocks.gather(source.v).float()
    k_spoilt = k_spoilt | _is_spoilt(v)
    k = k.masked_fill(k_spoilt[..., None], 0.0)  # such a row has no part in its block's scale
    v = v.where(v.isfinite(), 0.0)
    gain = transform_gain(source.q.shape[-1], how.hadamard)
    q_scales, q_scale = scales_of(_largest(q), q_blocks, how.scale, gain)
    k_scales, k_scale = scales_of(_largest(k), k_blocks, how.scale, gain)
    v_scales, v_scale = scales_of(_largest(v), k_blocks, how.scale)
    return (
        q_blocks.scatter(_codes(q, q_scales, q_spoilt)),
        k_blocks.scatter(_codes(k, k_scales, k_spoilt)),
        columns(_codes(v, v_scales), k_blocks),
        q_scale,
        k_scale,
        v_scale,
    )


def _query_shift(source: Source, q_blocks: Blocks, k_blocks: Blocks) -> Tensor | int:
    """From a query's own position to the rotary table's: the last query stands at the last key."""
    if source.cu_seqlens_q is None and source.seqused_k is None:
        return source.k.shape[1] - source.q.shape[1]
    lengths_q, lengths_k = q_blocks.lengths, k_blocks.lengths
    return (lengths_k - lengths_q)[q_blocks.sequence][:, None]


def relaid(source: Source) -> tuple[Tensor, Tensor]:
    """Keys and values that are float8 already: NaN moved from v to k, v in its columns.

    Returns:
        k as k; v (B, H_kv, D_v, columns) or (H_kv, D_v, columns).
    """
    blocks = Blocks(source.k, source.cu_seqlens_k, source.seqused_k, BLOCK_K)
    k, v = blocks.gather(source.k.float()), blocks.gather(source.v.float())
    spoilt = _is_spoilt(k) | _is_spoilt(v)
    k = k.masked_fill(spoilt[..., None], torch.nan).to(FLOAT8)
    return blocks.scatter(k), columns(v.where(v.isfinite(), 0.0).to(FLOAT8), blocks)
