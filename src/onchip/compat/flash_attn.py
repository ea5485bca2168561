"""FlashAttention-2's functions over onchip's: names, order, defaults and returns of version 2.8.4.

What differs from `flash_attn` is more: any float dtype and head dimension that a kernel takes,
D_v != D, any page size, CPUs, and gradients through the LSE (flash_attn drops them). What is not
supported raises. `docs/compat.md` lists every parameter.

The LSE follows FlashAttention-2: float32, natural log, (B, H, S_q) or packed (H, T_q), +inf for a
query that sees no key (onchip's own is -inf), and with causal ALiBi that of the scores plus
slope * j, which FlashAttention-2 computes instead of -slope * (i + S_k - S_q - j).

Legend: B batch, S_q / S_k lengths, T_q / T_k packed tokens, H query heads, H_kv key and value
heads, D head dimension, P pages, N page size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onchip import api
from onchip.compat.spelling import (
    cache_lengths,
    longest,
    num_splits_of,
    ranked,
    rotates_all_new,
    spelled,
    unpacked,
    unsupported,
)

__version__ = "2.8.4"
__all__ = [  # noqa: RUF022 (the library's order)
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_kvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_with_kvcache",
]

# For the table in docs/compat.md: of a parameter, or of a function's parameter, whether it is
# supported, a hint or raises, and what there is to know. What is not here is supported.
STATUS = {
    "q": ("supported", "float32 and float64, D over 256 and D_v != D too, where a kernel does"),
    "dropout_p": ("supported", "GPU kernels; raises where no kernel drops out, as on a CPU"),
    "return_attn_probs": (
        "supported",
        "returns (out, softmax_lse, S_dmask), S_dmask empty; raises with dropout_p > 0",
    ),
    "window_size": ("supported", "-1 is unbounded; numbers below raise"),
    "max_seqlen_q": ("supported", "of a tensor the value is read, and the host waits for it"),
    "max_seqlen_k": ("supported", "as max_seqlen_q"),
    "max_seqlen": ("supported", "as max_seqlen_q"),
    "block_table": ("supported", "any page size; with cache_batch_idx it raises"),
    "flash_attn_with_kvcache.q": ("supported", "no gradient: raises if one is asked for"),
    "rotary_cos": ("supported", "raises unless q has as many tokens as k; any rotary_dim"),
    "rotary_sin": ("supported", "as rotary_cos"),
    "cache_leftpad": ("supported", "with block_table too"),
    "num_splits": ("supported", "0 lets the kernel choose; more than it can raises"),
}

_spelled = spelled(scale="softmax_scale", window="window_size", return_lse="return_attn_probs")


@_spelled
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`onchip.attention` as FlashAttention-2 spells it.

    Args:
        q: (B, S_q, H, D).
        k: (B, S_k, H_kv, D).
        v: (B, S_k, H_kv, D).
        dropout_p: probability that an entry of P is dropped.
        softmax_scale: factor on Q K^T; D ** -0.5 when None.
        causal: query i sees key j iff j <= i + S_k - S_q.
        window_size: (left, right), inclusive, -1 unbounded.
        softcap: softcap * tanh(S / softcap); 0 for none.
        alibi_slopes: (H,) or (B, H) float32; adds -slope * |i + S_k - S_q - j|.
        deterministic: gradients bitwise equal from run to run.
        return_attn_probs: also return the LSE and an empty S_dmask.

    Returns:
        out (B, S_q, H, D), or (out, softmax_lse, S_dmask) with softmax_lse (B, H, S_q).

    Raises:
        ValueError, TypeError: for an argument out of its range, naming it.
        NotImplementedError: if no kernel takes the problem, or for S_dmask with dropout.
    """
    _refuse_mask_of_dropout(return_attn_probs, dropout_p)
    out, lse = api.attention(
        q,
        k,
        v,
        causal=causal,
        window=window_size,
        scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_lse=True,
        deterministic=deterministic,
        dropout_p=dropout_p,
    )
    if not return_attn_probs:
        return out
    if alibi_slopes is not None and _is_causal(causal, window_size, k.shape[1]):
        rows = torch.arange(q.shape[1], device=q.device) + (k.shape[1] - q.shape[1])
        lse = lse + alibi_slopes[..., None] * rows
    return out, _infinite_where_empty(lse), _no_mask(q)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of q, k and v in one tensor.

    Args:
        qkv: (B, S, 3, H, D).
        dropout_p, softmax_scale, causal, window_size, softcap: as `flash_attn_func`.
        alibi_slopes, deterministic, return_attn_probs: as `flash_attn_func`.

    Returns:
        As `flash_attn_func`.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flash_attn_func`.
    """
    q, k, v = unpacked("qkv", qkv, "(B, S, 3, H, D)", 5, 3)
    rest = (window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, *rest)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of k and v in one tensor.

    Args:
        q: (B, S_q, H, D).
        kv: (B, S_k, 2, H_kv, D).
        dropout_p, softmax_scale, causal, window_size, softcap: as `flash_attn_func`.
        alibi_slopes, deterministic, return_attn_probs: as `flash_attn_func`.

    Returns:
        As `flash_attn_func`.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flash_attn_func`.
    """
    k, v = unpacked("kv", kv, "(B, S_k, 2, H_kv, D)", 5, 2)
    rest = (window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, *rest)


@_spelled
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """`onchip.attention_varlen` as FlashAttention-2 spells it.

    Args:
        q: (T_q, H, D).
        k: (T_k, H_kv, D), or pages (P, N, H_kv, D) with block_table.
        v: as k.
        cu_seqlens_q: (B + 1,) int32.
        cu_seqlens_k: (B + 1,) int32.
        max_seqlen_q: at least the longest query length.
        max_seqlen_k: at least the longest key length.
        dropout_p, softmax_scale, causal, window_size, softcap: as `flash_attn_func`.
        alibi_slopes, deterministic, return_attn_probs: as `flash_attn_func`.
        block_table: (B, max_pages) int32, page ids. No gradient through pages.

    Returns:
        out (T_q, H, D), or (out, softmax_lse, S_dmask) with softmax_lse (H, T_q).

    Raises:
        ValueError, TypeError: for an argument out of its range, naming it.
        NotImplementedError: if no kernel takes the problem, or for S_dmask with dropout.
    """
    _refuse_mask_of_dropout(return_attn_probs, dropout_p)
    max_seqlen_q, max_seqlen_k = longest(max_seqlen_q), longest(max_seqlen_k)
    out, lse = api.attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        block_table=block_table,
        causal=causal,
        window=window_size,
        scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_lse=True,
        deterministic=deterministic,
        dropout_p=dropout_p,
    )
    if not return_attn_probs:
        return out
    if alibi_slopes is not None and _is_causal(causal, window_size, max_seqlen_k):
        lse = lse + _packed_bias(alibi_slopes, cu_seqlens_q, cu_seqlens_k, q.shape[0])
    return out, _infinite_where_empty(lse), _no_mask(q)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of q, k and v in one tensor.

    Args:
        qkv: (T, 3, H, D).
        cu_seqlens: (B + 1,) int32.
        max_seqlen: at least the longest length.
        dropout_p, softmax_scale, causal, window_size, softcap: as `flash_attn_func`.
        alibi_slopes, deterministic, return_attn_probs: as `flash_attn_func`.

    Returns:
        As `flash_attn_varlen_func`.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flash_attn_varlen_func`.
    """
    q, k, v = unpacked("qkv", qkv, "(T, 3, H, D)", 4, 3)
    max_seqlen = longest(max_seqlen)
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    rest = (window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, *lengths, dropout_p, softmax_scale, causal, *rest)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of k and v in one tensor.

    Args:
        q: (T_q, H, D).
        kv: (T_k, 2, H_kv, D).
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as `flash_attn_varlen_func`.
        dropout_p, softmax_scale, causal, window_size, softcap: as `flash_attn_func`.
        alibi_slopes, deterministic, return_attn_probs: as `flash_attn_func`.

    Returns:
        As `flash_attn_varlen_func`.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flash_attn_varlen_func`.
    """
    k, v = unpacked("kv", kv, "(T_k, 2, H_kv, D)", 4, 2)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    rest = (window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, *lengths, dropout_p, softmax_scale, causal, *rest)


@_spelled
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """`onchip.attention_with_kvcache` as FlashAttention-2 spells it.

    Args:
        q: (B, S_q, H, D).
        k_cache: rows (B_cache, S_max, H_kv, D), or pages (P, N, H_kv, D) with block_table.
        v_cache: as k_cache.
        k: (B, S_new, H_kv, D), appended after cache_seqlens tokens and attended too.
        v: as k.
        rotary_cos: (S_ro, rotary_dim / 2); rotates q and k by their positions, S_q == S_new.
        rotary_sin: as rotary_cos.
        cache_seqlens: (B,) int32, or an int for all; None: the caches are full.
        cache_batch_idx: (B,) int32, rows of the cache.
        cache_leftpad: (B,) int32, first valid key.
        block_table: (B, max_pages) int32.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as `flash_attn_func`.
        rotary_interleaved: rotate pairs (0, 1), (2, 3), ... instead of halves.
        num_splits: splits of the keys; 0 lets the kernel choose.
        return_softmax_lse: also return the LSE.

    Returns:
        out (B, S_q, H, D), or (out, softmax_lse) with softmax_lse (B, H, S_q).

    Mutates:
        k_cache, v_cache: the slots of the appended tokens, when k and v are given.

    Raises:
        ValueError, TypeError: for an argument out of its range, naming it; nothing was appended.
        NotImplementedError: if no kernel takes the problem; nothing was appended.
    """
    legend = "(B, max_pages)"
    ranked(q=(q, 4, "(B, S_q, H, D)"), block_table=(block_table, 2, legend))
    rotates_all_new(q, k, rotary_cos)
    lengths = cache_lengths(cache_seqlens, len(q), k_cache, block_table, k is not None)
    out, lse = api.attention_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=lengths,
        block_table=block_table,
        k=k,
        v=v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=False if rotary_cos is None else rotary_interleaved,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        causal=causal,
        window=window_size,
        scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_lse=True,
        num_splits=num_splits_of(num_splits),
    )
    if not return_softmax_lse:
        return out
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if alibi_slopes is not None and _is_causal(causal, window_size, capacity):
        seen = lengths if k is None else lengths + k.shape[1]
        seen = seen if cache_leftpad is None else seen - cache_leftpad
        rows = torch.arange(q.shape[1], device=q.device) + (seen - q.shape[1])[:, None]
        lse = lse + alibi_slopes[..., None] * rows[:, None]
    return out, _infinite_where_empty(lse)


def _refuse_mask_of_dropout(return_attn_probs: bool, dropout_p: float) -> None:
    if return_attn_probs and dropout_p:
        fix = "Use onchip.attention(..., dropout_p=..., return_lse=True) for the LSE."
        unsupported("return_attn_probs", f"True with dropout_p = {dropout_p}", "no dropout", fix)


def _no_mask(q: Tensor) -> Tensor:
    """S_dmask without dropout: empty, in q's dtype."""
    return q.new_empty(0)


def _infinite_where_empty(lse: Tensor) -> Tensor:
    """The LSE with +inf instead of -inf; the other rows keep their gradient."""
    return lse.where(lse != -torch.inf, torch.inf)  # NaN stays


def _is_causal(causal: bool, window_size: tuple[int, int], max_seqlen_k: int) -> bool:
    """Whether FlashAttention-2 takes its causal kernel, whose ALiBi is slope * j in every row."""
    left, right = window_size
    return (causal or right == 0) and not 0 <= left < max_seqlen_k


def _packed_bias(slopes: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total: int) -> Tensor:
    """slope * (i + S_k - S_q) of every packed query, (H, T_q) or (1, H, T_q) broadcastable."""
    tokens = torch.arange(total, device=slopes.device)
    sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), tokens, right=True)
    sequence = sequence.clamp(max=max(0, cu_seqlens_q.shape[0] - 2))
    # i + S_k - S_q counts back from the sequence's last query.
    last = cu_seqlens_q[1:] - cu_seqlens_k.diff()
    rows = tokens - last[sequence]  # (T_q,)
    per_token = slopes[:, None] if slopes.dim() == 1 else slopes[sequence].T
    return per_token * rows
