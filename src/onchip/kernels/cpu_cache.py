"""Append to a paged cache on a CPU: a scatter by index.

Slot s is token s % N of page s // N; slot -1 stores nothing. Stored values are divided by the
cache's scale, which reading multiplies by.

Legend: B batch, S_new appended tokens of a sequence, T tokens, H_kv key and value heads, D / D_v
head dimensions, P pages, N page size.
"""

from __future__ import annotations

import torch

from onchip.kernels.common import apply_rotary
from onchip.problem import NewTokens, Problem


def launch(
    problem: Problem,
    k: torch.Tensor,  # (T, H_kv, D)
    v: torch.Tensor,  # (T, H_kv, D_v)
    k_cache: torch.Tensor,  # (P, N, H_kv, D)
    v_cache: torch.Tensor,  # (P, N, H_kv, D_v)
    slot_mapping: torch.Tensor,  # (T,)
    k_scale: torch.Tensor | None,  # (H_kv,)
    v_scale: torch.Tensor | None,  # (H_kv,)
) -> None:
    """Writes each token into its slot.

    Mutates:
        k_cache, v_cache: the slots named by slot_mapping.
    """
    slots = slot_mapping.long()
    kept = slots >= 0
    if not bool(kept.all()):
        slots, k, v = slots[kept], k[kept], v[kept]
    pages, offsets = slots // problem.page_size, slots % problem.page_size
    for cache, new, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        if scale is not None:
            wide = torch.promote_types(new.dtype, torch.float32)  # a small scale is 0 in float16
            new = new.to(wide) / scale.to(wide)[:, None]
        cache.index_put_((pages, offsets), _saturate(new, cache.dtype))


def _saturate(new: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Casts, clamping to float8's range (a plain cast would give NaN)."""
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        new = new.clamp(-limit, limit)
    return new.to(dtype)


def append(problem: Problem, new: NewTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes new tokens after each sequence's own, rotated if there are tables.

    Returns:
        q, rotated where there are tables, else q itself; and the new lengths (B,) int32.

    Mutates:
        new.k_cache, new.v_cache: the slots of the new tokens.
    """
    num_new, num_queries = new.k.shape[1], new.q.shape[1]
    start = new.cache_seqlens[:, None].long()
    positions = start + torch.arange(num_new, device=start.device)  # (B, S_new)
    slots = new.slot_mapping
    if slots is None:
        table, page_size = new.block_table.long(), problem.page_size
        columns = positions // page_size
        fits = columns < table.shape[1]
        slots = table.gather(1, columns.where(fits, 0)) * page_size + positions % page_size
        # Past the table nothing is stored, rather than something overwritten.
        slots = slots.where(fits, -1).flatten()
    q, k = new.q, new.k
    if new.rotary_cos is not None and new.rotary_sin is not None:
        rotary = (new.rotary_cos, new.rotary_sin)
        k = apply_rotary(k, *rotary, positions, new.interleaved)
        # The queries are the last of the new tokens.
        rows = positions[:, num_new - num_queries :] if new.in_order else start
        q = apply_rotary(q, *rotary, rows.expand(-1, num_queries), new.interleaved)
    caches = (new.k_cache, new.v_cache)
    launch(problem, k.flatten(0, 1), new.v.flatten(0, 1), *caches, slots, new.k_scale, new.v_scale)
    return q, new.cache_seqlens + num_new
