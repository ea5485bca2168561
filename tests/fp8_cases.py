"""What the tests of float8 share: inputs with outliers, errors, and what codes stand for."""

from __future__ import annotations

import torch

import onchip
from onchip import reference
from onchip.kernels.fp8_layout import BLOCK_K, BLOCK_Q, key_of_column


def with_outliers(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    """N(0, 1), and one entry in a thousand with N(0, 100) on top (FlashAttention-3, 4.3)."""
    g = torch.Generator().manual_seed(seed)
    outliers = torch.randn(shape, generator=g) * 10 * (torch.rand(shape, generator=g) < 1e-3)
    return (torch.randn(shape, generator=g) + outliers).to(dtype)


def inputs(
    seqlen_q=130, seqlen_k=300, heads=4, kv_heads=2, dim=64, dim_v=None, dtype=torch.float32
):
    """q, k and v of two sequences."""
    q = with_outliers(2, seqlen_q, heads, dim, seed=1, dtype=dtype)
    k = with_outliers(2, seqlen_k, kv_heads, dim, seed=2, dtype=dtype)
    v = with_outliers(2, seqlen_k, kv_heads, dim_v or dim, seed=3, dtype=dtype)
    return q, k, v


def meant(x: onchip.FP8QKV) -> tuple[torch.Tensor, ...]:
    """What a dense FP8QKV's codes stand for, in float64: q and k still transformed."""

    def rows(codes, scales, block):
        by_row = scales.double().repeat_interleave(block, 2)[:, :, : codes.shape[1]]
        return codes.double() * by_row.transpose(1, 2)[..., None]

    order = key_of_column(x.v.device).argsort()  # the column of each key of 16
    v = x.v.double().unflatten(-1, (-1, 16))[..., order].flatten(-2)
    v = v[..., : x.k.shape[1]].permute(0, 3, 1, 2)
    return (
        rows(x.q, x.q_scale, BLOCK_Q),
        rows(x.k, x.k_scale, BLOCK_K),
        rows(v, x.v_scale, BLOCK_K),
    )


def relative(x: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius error."""
    return float((x.double() - want.double()).norm() / want.double().norm())


def oracle(q, k, v, **features) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 attention of the inputs themselves."""
    cast = {n: x.double() if isinstance(x, torch.Tensor) else x for n, x in features.items()}
    return reference.attention(q.double(), k.double(), v.double(), **cast)
