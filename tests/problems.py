"""Small calls for tests: inputs of every layout, and features that fit them."""

from __future__ import annotations

import torch

DENSE_FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "window_causal": {"causal": True, "window": (3, -1)},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.3},
    "alibi": {"alibi_slopes": (4,)},
    "alibi_batch": {"alibi_slopes": (2, 4), "causal": True},
    "sinks": {"sinks": (4,)},
}


def features(name: str, generator: torch.Generator) -> dict:
    """Keyword arguments of `onchip.attention` for B = 2, H = 4; shapes become tensors."""
    given = dict(DENSE_FEATURES[name])
    for key in ("alibi_slopes", "sinks"):
        if key in given:
            given[key] = torch.rand(given[key], generator=generator)
    return given


def qkv(
    batch=2, seqlen_q=5, seqlen_k=7, heads=4, kv_heads=2, head_dim=8, head_dim_v=None,
    dtype=torch.float32, seed=0,
):  # fmt: skip
    """q (B, S_q, H, D), k (B, S_k, H_kv, D), v (B, S_k, H_kv, D_v)."""
    g = torch.Generator().manual_seed(seed)
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    q = torch.randn(batch, seqlen_q, heads, head_dim, generator=g)
    k = torch.randn(batch, seqlen_k, kv_heads, head_dim, generator=g)
    v = torch.randn(batch, seqlen_k, kv_heads, head_dim_v, generator=g)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def offsets(lengths) -> torch.Tensor:
    """cu_seqlens of some lengths."""
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed(lengths_q, lengths_k, heads=4, kv_heads=2, head_dim=8, dtype=torch.float32, seed=0):
    """q, k, v and the keywords of `onchip.attention_varlen`."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(sum(lengths_q), heads, head_dim, generator=g).to(dtype)
    k = torch.randn(sum(lengths_k), kv_heads, head_dim, generator=g).to(dtype)
    v = torch.randn(sum(lengths_k), kv_heads, head_dim, generator=g).to(dtype)
    lengths = {
        "cu_seqlens_q": offsets(lengths_q),
        "cu_seqlens_k": offsets(lengths_k),
        "max_seqlen_q": max(lengths_q, default=0),
        "max_seqlen_k": max(lengths_k, default=0),
    }
    return q, k, v, lengths


def paged(lengths, page_size, kv_heads=2, head_dim=8, dtype=torch.float32, seed=0, spare=3):
    """Poisoned caches, shuffled pages: k_cache, v_cache, block_table, seqlens.

    Everything that no sequence owns is NaN; the table's tails are -1, stale or out of range.
    """
    g = torch.Generator().manual_seed(seed)
    counts = [-(-n // page_size) for n in lengths]
    num_pages = sum(counts) + spare
    order = torch.randperm(num_pages, generator=g).tolist()
    caches = [torch.full((num_pages, page_size, kv_heads, head_dim), torch.nan) for _ in range(2)]
    junk = [-1, 0, num_pages + 7, -(2**31)]
    table = torch.tensor(
        [[junk[(b + c) % 4] for c in range(max(counts) + 2)] for b in range(len(lengths))]
    )
    for b, length in enumerate(lengths):
        for j in range(length):
            column = j // page_size
            if j % page_size == 0:
                table[b, column] = order.pop()
            for cache in caches:
                cache[table[b, column], j % page_size] = torch.randn(
                    kv_heads, head_dim, generator=g
                )
    k_cache, v_cache = (c.to(dtype) for c in caches)
    return k_cache, v_cache, table.int(), torch.tensor(lengths, dtype=torch.int32)
