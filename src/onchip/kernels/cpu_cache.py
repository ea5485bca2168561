"""Append to a paged cache on a CPU: a scatter by index.

Slot s is token s % N of page s // N; slot -1 stores nothing. Stored values are divided by the
cache's scale, which reading multiplies by.

Legend: T tokens, H_kv key and value heads, D / D_v head dimensions, P pages, N page size.
"""

from __future__ import annotations

import torch

from onchip.problem import Problem


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
