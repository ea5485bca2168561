"""Caches as FlashAttention-3 passes them: page ids, scales, and queries packed over pages.

Legend: B batch, T_q packed queries, H query heads, H_kv key and value heads, D head dimension,
S_max tokens of a dense cache's row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onchip import api, validate
from onchip.compat.spelling import unsupported
from onchip.validate import reject


def cache_scale(name: str, descale: Tensor | None, cache: Tensor) -> Tensor | None:
    """onchip's scale (H_kv,) of a descale (B, H_kv) that is the same for each sequence."""
    if descale is None:
        return None
    validate.tensor(name, descale)
    if cache.dtype != torch.float8_e4m3fn:
        fix = "Leave it out: only float8_e4m3fn caches are scaled."
        reject(name, f"given with a cache in {cache.dtype}", "None", fix)
    if descale.dim() != 2:
        return descale
    if descale.shape[0] != 1 and descale.stride(0) != 0:
        got = f"shape {tuple(descale.shape)}, strides {descale.stride()}"
        fix = "Scales of a cache are its own, not a sequence's: use scale.expand(B, H_kv)."
        unsupported(name, got, "one row, or one row expanded", fix)
    return descale[0]


def page_ids(page_table, cache_batch_idx, batch: int, k_cache: Tensor) -> Tensor:
    """Page ids of every cache: a row of a dense cache is a page of S_max tokens."""
    if page_table is not None:
        if cache_batch_idx is not None:
            fix = "Reorder the rows of page_table instead."
            reject("cache_batch_idx", "given with page_table", "one of the two", fix)
        return page_table
    if cache_batch_idx is not None:
        return cache_batch_idx[:, None]
    if k_cache.shape[0] != batch:
        fix = "Pass cache_batch_idx to choose rows of the cache."
        reject("k_cache", f"batch {k_cache.shape[0]}", f"cu_seqlens_q's {batch}", fix)
    return torch.arange(batch, dtype=torch.int32, device=k_cache.device)[:, None]


def attention_over_pages(q, k_cache, v_cache, lengths, table, queries: tuple, options: dict) -> Any:
    """Attention of packed queries over pages."""
    cu_seqlens_q, max_seqlen_q = queries
    if max_seqlen_q is None:
        fix = "Pass at least the longest query length."
        reject("max_seqlen_q", None, "an int with cu_seqlens_q", fix, TypeError)
    return api.attention_varlen(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=None,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=table.shape[1] * k_cache.shape[1],
        block_table=table,
        seqused_k=lengths,
        **options,
    )
