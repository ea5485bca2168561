"""Device functions that forward and backward share: lengths, bounds, visibility, score terms.

The mask is a band aligned to the bottom right corner, as in `onchip.problem.Mask`: with
``shift = S_k - S_q``, query i sees key j iff ``i + shift - left <= j <= i + shift + right``,
and besides ``first_key <= j < S_k``. `left` and `right` are read only where HAS_LEFT or
HAS_RIGHT is true, so that a change of the window's size compiles nothing anew. Every bound
here is an int32 scalar that counts from its own sequence's first query or key.

Legend: S_q / S_k lengths of this sequence, BM rows (queries) and BN columns (keys) of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class Band(NamedTuple):
    """The mask of one sequence; see the module's docstring."""

    seqlen_k: object
    shift: object
    first_key: object
    left: object
    right: object


class Terms(NamedTuple):
    """What turns Q K^T into logits: of base 2, natural in the float32 backward (no log2(e))."""

    scale: object  # scale * log2(e); with a softcap, scale / softcap
    softcap: object  # softcap * log2(e)
    slope: object  # ALiBi slope * log2(e)
    context: object  # `Context` of dropout and user functions; None without them


@triton.jit
def query_span(cu_seqlens_q, batch, seqlen_q):
    """First row in memory and number of queries of a sequence (the dense ones when None)."""
    if cu_seqlens_q is None:
        return 0, seqlen_q
    else:
        start = tl.load(cu_seqlens_q + batch)
        return start, tl.load(cu_seqlens_q + batch + 1) - start


@triton.jit
def key_span(cu_seqlens_k, seqused_k, leftpad_k, batch, seqlen_k):
    """First row in memory, length S_k, and first valid key of a sequence.

    Pages have no first row: it is 0 there, and `cu_seqlens_k` (where given) only tells lengths.
    """
    start = 0
    length = seqlen_k
    first_key = 0
    if cu_seqlens_k is not None:
        start = tl.load(cu_seqlens_k + batch)
        length = tl.load(cu_seqlens_k + batch + 1) - start
    if seqused_k is not None:
        length = tl.load(seqused_k + batch)
    if leftpad_k is not None:
        first_key = tl.load(leftpad_k + batch)
    return start, length, first_key


@triton.jit
def keys_seen_by_any(
    row_start,
    row_end,
    seqlen_k,
    shift,
    first_key,
    left,
    right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Keys [start, end) that at least one of the rows [row_start, row_end) sees; end >= start."""
    start = first_key
    end = seqlen_k
    if HAS_LEFT:
        start = tl.maximum(start, row_start + shift - left)
    if HAS_RIGHT:
        end = tl.minimum(end, row_end + shift + right)
    return start, tl.maximum(start, end)


@triton.jit
def keys_seen_by_all(
    row_start,
    row_end,
    seqlen_k,
    shift,
    first_key,
    left,
    right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Keys [start, end) that every one of the rows [row_start, row_end) sees; may be empty."""
    start = first_key
    end = seqlen_k
    if HAS_LEFT:
        start = tl.maximum(start, row_end - 1 + shift - left)
    if HAS_RIGHT:
        end = tl.minimum(end, row_start + 1 + shift + right)
    return start, end


@triton.jit
def rows_seeing_any(
    key_start,
    key_end,
    seqlen_q,
    shift,
    left,
    right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Rows [start, end) that see at least one of the keys [key_start, key_end); end >= start."""
    start = 0
    end = seqlen_q
    if HAS_RIGHT:
        start = tl.maximum(start, key_start - shift - right)
    if HAS_LEFT:
        end = tl.minimum(end, key_end - shift + left)
    return start, tl.maximum(start, end)


@triton.jit
def rows_seeing_all(
    key_start,
    key_end,
    seqlen_q,
    shift,
    left,
    right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Rows [start, end) that see every one of the keys [key_start, key_end); may be empty."""
    start = 0
    end = seqlen_q
    if HAS_RIGHT:
        start = tl.maximum(start, key_end - 1 - shift - right)
    if HAS_LEFT:
        end = tl.minimum(end, key_start + 1 - shift + left)
    return start, end


@triton.jit
def visible(
    rows,
    cols,
    seqlen_k,
    shift,
    first_key,
    left,
    right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Which keys of a tile each row sees; rows past S_q are not masked.

    `rows` and `cols` broadcast: (BM, 1) and (1, BN) for a tile S, swapped for S transposed.
    """
    seen = (cols >= first_key) & (cols < seqlen_k)
    if HAS_LEFT:
        seen = seen & (cols >= rows + (shift - left))
    if HAS_RIGHT:
        seen = seen & (cols <= rows + (shift + right))
    return seen


@triton.jit
def alibi(rows, cols, shift, slope):
    """The ALiBi term ``-slope * |i + S_k - S_q - j|``; `rows` and `cols` broadcast."""
    return -slope * tl.abs(rows + shift - cols).to(tl.float32)


@triton.jit
def alibi_slope(alibi_slopes, batch, head, num_heads, PER_BATCH: tl.constexpr):
    """The slope of a head, from contiguous (H,) or (B, H) float32."""
    row = batch * num_heads if PER_BATCH else 0
    return tl.load(alibi_slopes + row + head)


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """tanh(x) = 1 - 2 / (exp(2x) + 1), which cannot overflow: exp(2x) = inf gives 1.

    The difference loses the last bits near 0. That is far below the rounding of 16-bit
    inputs; PRECISE (float32 inputs) takes the Taylor series to x^9 there instead.
    """
    far = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    if not PRECISE:
        return far
    else:
        y = x * x
        series = y * (0.13333333333333333 + y * (-0.05396825396825397 + y * 0.021869488536155203))
        near = x + x * (y * (-0.3333333333333333 + series))
        return tl.where(y < 0.09, near, far)
