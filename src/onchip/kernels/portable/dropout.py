"""Dropout of the portable kernels: which entries of P stay is a function of their place alone.

Entry (b, h, i, j) stays if 16 random bits are at least p * 2^16. The bits come from Philox4x32
(Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; 7 rounds pass their tests)
with the seed as its key and (j // 8, i, b * H + h, offset) as its counter: one draw of 128 bits
serves 8 neighbouring keys. So forward and backward agree whatever their tiles are, nothing is
stored, and p is rounded to a multiple of 2^-16.

Legend: B batch, S_q / S_k lengths, H query heads, BM / BN rows and columns of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.kernels.portable.context import Context, Extras, context_of

ROUNDS = tl.constexpr(7)
_LEVELS = 1 << 16


def threshold_of(dropout_p: float) -> int:
    """The least 16 bits that stay; between 1 and 2^16 - 1."""
    return min(max(round(dropout_p * _LEVELS), 1), _LEVELS - 1)


def rounded(dropout_p: float) -> float:
    """The probability that the kernels drop with: the nearest multiple of 2^-16 in (0, 1)."""
    return threshold_of(dropout_p) / _LEVELS


@triton.jit
def kept(row_start, start, context: Context, BM: tl.constexpr, BN: tl.constexpr):
    """(BM, BN) bool: which entries of the tile stay; `start` is a multiple of 8."""
    rows = (row_start + tl.arange(0, BM))[:, None]
    groups = (start // 8 + tl.arange(0, BN // 8))[None, :]
    stream = tl.full([1, 1], 0, tl.int32) + context.stream
    offset = tl.full([1, 1], 0, tl.int32) + context.offset
    a, b, c, d = tl.philox(context.seed, groups, rows, stream, offset, ROUNDS)
    limit = tl.full([1, 1], context.extras.threshold, tl.float32).to(tl.uint32)
    low = tl.join(tl.join(_low(a, limit), _low(b, limit)), tl.join(_low(c, limit), _low(d, limit)))
    high = tl.join(
        tl.join(_high(a, limit), _high(b, limit)), tl.join(_high(c, limit), _high(d, limit))
    )
    return tl.join(low, high).reshape(BM, BN)


@triton.jit
def keep_scale(context: Context):
    """1 / (1 - p), for the rounded p."""
    return 65536.0 / (65536.0 - context.extras.threshold)


@triton.jit
def _low(bits, limit):
    return (bits & 0xFFFF) >= limit


@triton.jit
def _high(bits, limit):
    return (bits >> 16) >= limit


@triton.jit
def _write_kept(
    out, extras, num_heads, seqlen_q, seqlen_k, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """One program: a tile of one head's mask."""
    stream = tl.program_id(0)
    batch, head = stream // num_heads, stream % num_heads
    row_start, start = tl.program_id(1) * BM, tl.program_id(2) * BN
    context = context_of(batch, head, num_heads, seqlen_q, seqlen_k, extras, True)
    rows, columns = row_start + tl.arange(0, BM)[:, None], start + tl.arange(0, BN)[None, :]
    at = (tl.cast(stream, tl.int64) * seqlen_q + rows) * seqlen_k + columns
    seen = (rows < seqlen_q) & (columns < seqlen_k)
    tl.store(out + at, kept(row_start, start, context, BM, BN), mask=seen)


def keep_mask(
    dropout_rng: Tensor, dropout_p: float, batch: int, num_heads: int, seqlen_q: int, seqlen_k: int
) -> Tensor:
    """The entries of P that a call with these seed and offset keeps: for tests.

    Args:
        dropout_rng: (2,) int64, seed and offset.
        dropout_p: probability to drop.
        batch, num_heads, seqlen_q, seqlen_k: B, H, and the longest lengths when packed.

    Returns:
        (B, H, S_q, S_k) bool, True where an entry stays.
    """
    out = dropout_rng.new_empty(batch, num_heads, seqlen_q, seqlen_k, dtype=torch.bool)
    grid = (batch * num_heads, triton.cdiv(seqlen_q, 32), triton.cdiv(seqlen_k, 64))
    if out.numel():
        threshold = float(threshold_of(dropout_p))
        extras = Extras(dropout_rng, threshold, (), (), (), (), (), ())
        _write_kept[grid](out, extras, num_heads, seqlen_q, seqlen_k, BM=32, BN=64)
    return out
