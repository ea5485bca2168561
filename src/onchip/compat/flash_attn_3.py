"""FlashAttention-3's functions over onchip's, as `flash_attn_interface` of 2026-08 spells them.

Functions return `out` alone unless return_attn_probs or return_softmax_lse asks for the LSE, then
(out, softmax_lse); earlier releases always returned both. `flash_attn_with_kvcache` follows
its documentation: a pair, where `flash_attn_interface` adds two scratch tensors (unpack with
`out, lse, *rest = ...` to be right with either).

The LSE follows FlashAttention-3: float32, natural log, (B, H, S_q) or packed (H, T_q), -inf for a
query that sees no key. (Where a whole call has no keys FlashAttention-3 fills it with +inf; here
it is -inf as elsewhere.) Gradients through it are used, not dropped.

Legend: B batch, S_q / S_k lengths, T_q / T_k packed tokens, H query heads, H_kv key and value
heads, D / D_v head dimensions, P pages, N page size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onchip import api
from onchip.compat import float8
from onchip.compat.packed_cache import attention_over_pages, cache_scale, page_ids
from onchip.compat.spelling import (
    cache_lengths,
    check_parts,
    longest,
    num_splits_of,
    ranked,
    refuse_given,
    rotates_all_new,
    spelled,
    unpacked,
    unsupported,
)
from onchip.validate import reject

__version__ = "3.0.0"
__all__ = [  # noqa: RUF022 (the library's order)
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flash_attn_combine",
]

_FLOAT8 = "(B, H_kv), with float8_e4m3fn inputs; elsewhere it raises"
_SCALE = "float8_e4m3fn caches under 16-bit q; (B, H_kv), one row expanded (stride 0) if B > 1"
# For the table in docs/compat.md; see `onchip.compat.flash_attn`.
STATUS = {
    "q": ("supported", "float8_e4m3fn (no gradient), 16-bit, float32, float64"),
    "qv": ("raises", "two-part scores (MLA) are not here"),
    "q_descale": ("supported", _FLOAT8),
    "k_descale": ("supported", _FLOAT8),
    "v_descale": ("supported", _FLOAT8),
    "flash_attn_with_kvcache.q_descale": ("raises", "float8 queries over a cache raise too"),
    "flash_attn_with_kvcache.k_descale": ("supported", _SCALE),
    "flash_attn_with_kvcache.v_descale": ("supported", "as k_descale"),
    "window_size": ("supported", "-1 is unbounded; numbers below raise"),
    "attention_chunk": ("raises", "only 0 is taken"),
    "num_splits": ("supported", "0 lets the kernel choose; more than it can raises"),
    "pack_gqa": ("hint", "kernels choose; results are the same"),
    "sm_margin": ("hint", "kernels use the whole GPU; results are the same"),
    "scheduler_metadata": ("hint", "nothing is scheduled ahead; results are the same"),
    "seqused_q": ("raises", "shorten cu_seqlens_q instead"),
    "max_seqlen_q": ("supported", "of a tensor the value is read, and the host waits for it"),
    "flash_attn_with_kvcache.max_seqlen_q": ("supported", "with cu_seqlens_q; a hint without"),
    "max_seqlen_k": ("supported", "as max_seqlen_q"),
    "flash_attn_with_kvcache.q": ("supported", "no gradient: raises if one is asked for"),
    "flash_attn_with_kvcache.k": ("supported", "raises with cu_seqlens_q"),
    "flash_attn_with_kvcache.v": ("supported", "as k"),
    "rotary_cos": ("supported", "raises unless q has as many tokens as k; any rotary_dim"),
    "rotary_sin": ("supported", "as rotary_cos"),
    "rotary_seqlens": ("raises", "positions are those in the cache"),
    "page_table": ("supported", "any page size; with cache_batch_idx it raises"),
    "cache_leftpad": ("supported", "raises with cu_seqlens_q"),
    "cu_seqlens_k_new": ("raises", "append packed tokens with onchip.store_kvcache"),
    "return_attn_probs": ("supported", "returns (out, softmax_lse)"),
    "return_softmax_lse": ("supported", "returns (out, softmax_lse)"),
}

_spelled = spelled(
    scale="softmax_scale",
    window="window_size",
    block_table="page_table",
    k_scale="k_descale",
    v_scale="v_descale",
    seqused_k="cache_seqlens",
)
_NO_FP8 = "Dequantise instead, e.g. (x.float() * descale).to(torch.bfloat16)."


@_spelled
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`onchip.attention` as FlashAttention-3 spells it.

    Args:
        q: (B, S_q, H, D); float8_e4m3fn too, k and v alike, then the output is bfloat16.
        k: (B, S_k, H_kv, D).
        v: (B, S_k, H_kv, D_v).
        softmax_scale: factor on Q K^T; D ** -0.5 when None.
        causal: query i sees key j iff j <= i + S_k - S_q.
        qv: not supported; None.
        q_descale, k_descale, v_descale: (B, H_kv) float32, what float8 inputs stand for is
            q * q_descale; None for 1.
        window_size: (left, right), inclusive, -1 unbounded.
        attention_chunk: not supported; 0.
        softcap: softcap * tanh(S / softcap); 0 for none.
        num_splits: splits of the keys; 0 lets the kernel choose.
        pack_gqa, sm_margin: hints, not used.
        deterministic: gradients bitwise equal from run to run, at every D.
        return_attn_probs: also return the LSE.

    Returns:
        out (B, S_q, H, D_v), or (out, softmax_lse) with softmax_lse (B, H, S_q).

    Raises:
        ValueError, TypeError: for an argument out of its range, naming it.
        NotImplementedError: for what is not supported, or if no kernel takes the problem.
    """
    _refuse(qv, attention_chunk)
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    q, k, v = float8.inputs(q, k, v, descales)
    out, lse = api.attention(
        q,
        k,
        v,
        causal=causal,
        window=window_size,
        scale=softmax_scale,
        softcap=softcap,
        return_lse=True,
        deterministic=deterministic,
        num_splits=num_splits_of(num_splits),
    )
    return (out, lse) if return_attn_probs else out


@spelled(scale="softmax_scale", window="window_size")
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`onchip.attention_varlen` as FlashAttention-3 spells it.

    Args:
        q: (T_q, H, D).
        k: (T_k, H_kv, D).
        v: (T_k, H_kv, D_v).
        cu_seqlens_q: (B + 1,) int32.
        cu_seqlens_k: (B + 1,) int32.
        max_seqlen_q: at least the longest query length.
        max_seqlen_k: at least the longest key length.
        seqused_q: not supported; None.
        seqused_k: (B,) int32, only the first so many keys of each sequence count.
        softmax_scale, causal, qv, q_descale, k_descale, v_descale: as `flash_attn_func`.
        window_size, attention_chunk, softcap, num_splits, pack_gqa: as `flash_attn_func`.
        deterministic, sm_margin, return_attn_probs: as `flash_attn_func`.

    Returns:
        out (T_q, H, D_v), or (out, softmax_lse) with softmax_lse (H, T_q).

    Raises:
        ValueError, TypeError: for an argument out of its range, naming it.
        NotImplementedError: for what is not supported, or if no kernel takes the problem.
    """
    _refuse(qv, attention_chunk)
    refuse_given("Shorten cu_seqlens_q and q instead.", seqused_q=seqused_q)
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k}
    q, k, v = float8.inputs(q, k, v, descales, **lengths)
    out, lse = api.attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=longest(max_seqlen_q),
        max_seqlen_k=longest(max_seqlen_k),
        seqused_k=seqused_k,
        causal=causal,
        window=window_size,
        scale=softmax_scale,
        softcap=softcap,
        return_lse=True,
        deterministic=deterministic,
        num_splits=num_splits_of(num_splits),
    )
    return (out, lse) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of q, k and v in one tensor.

    Args:
        qkv: (B, S, 3, H, D), or (B, S, H + 2 H_kv, D) with num_heads_q.
        num_heads_q: H, for the second form.
        softmax_scale, causal, q_descale, k_descale, v_descale: as `flash_attn_func`.
        window_size, attention_chunk, softcap, deterministic: as `flash_attn_func`.
        sm_margin, return_attn_probs: as `flash_attn_func`.

    Returns:
        As `flash_attn_func`.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flash_attn_func`.
    """
    return flash_attn_func(
        *_split_heads(qkv, num_heads_q),
        softmax_scale=softmax_scale,
        causal=causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )


@_spelled
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """`onchip.attention_with_kvcache` as FlashAttention-3 spells it.

    Args:
        q: (B, S_q, H, D), or packed (T_q, H, D) with cu_seqlens_q.
        k_cache: rows (B_cache, S_max, H_kv, D), or pages (P, N, H_kv, D) with page_table; q's
            dtype or float8_e4m3fn.
        v_cache: as k_cache, with D_v.
        k, v: (B, S_new, H_kv, D) and D_v, appended after cache_seqlens tokens; not with packed q.
        rotary_cos, rotary_sin: (S_ro, rotary_dim / 2); rotate q and k, S_q == S_new.
        cache_seqlens: (B,) int32, or an int for all; None: the caches are full.
        cache_batch_idx: (B,) int32, rows of the cache.
        cache_leftpad: (B,) int32, first valid key; not with packed q.
        page_table: (B, max_pages) int32.
        cu_seqlens_q: (B + 1,) int32, packs the queries.
        max_seqlen_q: at least the longest query length, needed with cu_seqlens_q.
        k_descale, v_descale: (B, H_kv) float32, stored keys are k / k_descale; every sequence
            has the same.
        qv, cu_seqlens_k_new, rotary_seqlens, q_descale: not supported; None.
        softmax_scale, causal, window_size, attention_chunk, softcap: as `flash_attn_func`.
        rotary_interleaved: rotate pairs (0, 1), (2, 3), ... instead of halves.
        num_splits: splits of the keys; 0 lets the kernel choose.
        scheduler_metadata, pack_gqa, sm_margin: hints, not used.
        return_softmax_lse: also return the LSE.

    Returns:
        out as q with D_v, or (out, softmax_lse) with softmax_lse (B, H, S_q) or (H, T_q).

    Mutates:
        k_cache, v_cache: the slots of the appended tokens, when k and v are given.

    Raises:
        ValueError, TypeError: for an argument out of its range, naming it; nothing was appended.
        NotImplementedError: for what is not supported, or if no kernel takes the problem;
            nothing was appended.
    """
    _refuse(qv, attention_chunk, q_descale=q_descale)
    append = "Append packed tokens with onchip.store_kvcache."
    refuse_given(append, cu_seqlens_k_new=cu_seqlens_k_new)
    refuse_given("Positions are those in the cache.", rotary_seqlens=rotary_seqlens)
    _refuse_float8(q)
    rotates_all_new(q, k, rotary_cos)
    packed = cu_seqlens_q is not None
    ranked(
        q=(q, 3, "(T_q, H, D) with cu_seqlens_q") if packed else (q, 4, "(B, S_q, H, D)"),
        k_cache=(k_cache, 4, "(P, N, H_kv, D) or (B, S_max, H_kv, D)"),
        cu_seqlens_q=(cu_seqlens_q, 1, "(B + 1,)"),
        page_table=(page_table, 2, "(B, max_pages)"),
        cache_batch_idx=(cache_batch_idx, 1, "(B,)"),
    )
    if cu_seqlens_q is not None and not len(cu_seqlens_q):
        reject("cu_seqlens_q", "no offsets", "(B + 1,)", "A batch of none has the offset 0.")
    batch = len(cu_seqlens_q) - 1 if cu_seqlens_q is not None else len(q)
    lengths = cache_lengths(cache_seqlens, batch, k_cache, page_table, k is not None)
    options = {
        "causal": causal,
        "window": window_size,
        "scale": softmax_scale,
        "softcap": softcap,
        "num_splits": num_splits_of(num_splits),
        "return_lse": True,
    }
    if cu_seqlens_q is not None:
        fix = "Call onchip.store_kvcache first, or pass q as (B, S_q, H, D)."
        refuse_given(fix, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
        fix = "Pass q as (B, S_q, H, D)."
        refuse_given(fix, cache_leftpad=cache_leftpad, k_descale=k_descale, v_descale=v_descale)
        table = page_ids(page_table, cache_batch_idx, batch, k_cache)
        queries = (cu_seqlens_q, longest(max_seqlen_q))
        out, lse = attention_over_pages(q, k_cache, v_cache, lengths, table, queries, options)
    else:
        out, lse = api.attention_with_kvcache(
            q,
            k_cache,
            v_cache,
            cache_seqlens=lengths,
            block_table=page_table,
            k=k,
            v=v,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            rotary_interleaved=False if rotary_cos is None else rotary_interleaved,
            cache_batch_idx=cache_batch_idx,
            cache_leftpad=cache_leftpad,
            k_scale=cache_scale("k_descale", k_descale, k_cache),
            v_scale=cache_scale("v_descale", v_descale, v_cache),
            **options,
        )
    return (out, lse) if return_softmax_lse else out


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`onchip.merge_states` as FlashAttention-3 spells it.

    Args:
        out_partial: (splits, B, S_q, H, D_v).
        lse_partial: (splits, B, S_q, H), natural log.
        out: (B, S_q, H, D_v) to write into.
        out_dtype: of the result; out's, else out_partial's.

    Returns:
        out (B, S_q, H, D_v) and its LSE (B, S_q, H).

    Mutates:
        out: all of it, when given.

    Raises:
        ValueError, TypeError: if the parts do not fit each other or out.
    """
    check_parts(out_partial, lse_partial, out, out_dtype)
    parts = out_partial.unbind(0)
    merged, lse = api.merge_states(parts, [x.transpose(-1, -2) for x in lse_partial.unbind(0)])
    lse = lse.transpose(-1, -2)
    if out is None:
        return merged.to(out_dtype or merged.dtype), lse
    if out.shape != merged.shape or out_dtype not in (None, out.dtype):
        allowed = f"{tuple(merged.shape)} in out_dtype"
        reject("out", f"{tuple(out.shape)} {out.dtype}", allowed, "Leave out to get a new one.")
    return out.copy_(merged), lse


def _refuse(qv: Any, attention_chunk: Any, **descales: Any) -> None:
    refuse_given("Scores of two parts are not supported: concatenate q and qv, k and v.", qv=qv)
    refuse_given(_NO_FP8, **descales)
    if not isinstance(attention_chunk, int) or attention_chunk != 0:
        fix = "Use window_size, or one sequence of attention_varlen for each chunk."
        unsupported("attention_chunk", attention_chunk, "0", fix)


def _refuse_float8(q: Any) -> None:
    if isinstance(q, Tensor) and q.is_floating_point() and q.dtype.itemsize == 1:
        unsupported("q", f"dtype {q.dtype}", "16-bit, float32 or float64", _NO_FP8)


def _split_heads(qkv: Any, num_heads_q: int | None) -> tuple[Tensor, ...]:
    """q, k and v of either form of a packed tensor."""
    if num_heads_q is None:
        legend = "(B, S, 3, H, D), or (B, S, H + 2 H_kv, D) with num_heads_q"
        return unpacked("qkv", qkv, legend, 5, 3)
    if isinstance(qkv, Tensor) and qkv.dim() == 5:
        fix = "Leave num_heads_q out: the shape says it."
        reject("num_heads_q", f"{num_heads_q} with qkv {tuple(qkv.shape)}", "None", fix)
    if not isinstance(qkv, Tensor) or qkv.dim() != 4:
        got = tuple(qkv.shape) if isinstance(qkv, Tensor) else type(qkv).__name__
        reject("qkv", got, "(B, S, H + 2 H_kv, D) with num_heads_q", "Concatenate the heads.")
    kv_heads, odd = divmod(qkv.shape[2] - num_heads_q, 2)
    if odd or kv_heads < 1:
        allowed = "H, with as many key as value heads after it"
        reject("num_heads_q", f"{num_heads_q} of {qkv.shape[2]} heads", allowed, "Pass H.")
    return qkv.split([num_heads_q, kv_heads, kv_heads], dim=2)
