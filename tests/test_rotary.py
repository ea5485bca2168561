"""Fused rotation of appended tokens against transformers' own.

Legend: B sequences, S new tokens, H query heads, H_kv key and value heads, D head dimension.
"""

from __future__ import annotations

import pytest
import torch

import onchip

B, S, H, H_KV, D = 3, 2, 4, 2, 32


def by_transformers(x: torch.Tensor, positions: torch.Tensor, pairs: int, interleaved: bool):
    """x (B, S, heads, D), its first 2 * pairs features rotated as Llama or as GPT-J does."""
    frequencies = 10000.0 ** (-torch.arange(pairs, device=x.device) / pairs)
    angles = positions[..., None] * frequencies  # (B, S, pairs)
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if interleaved:
        gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj")
        turned = gptj.apply_rotary_pos_emb(turned, angles.sin(), angles.cos())
    else:
        llama = pytest.importorskip("transformers.models.llama.modeling_llama")
        cos, sin = (torch.cat((x, x), -1) for x in (angles.cos(), angles.sin()))
        turned, _ = llama.apply_rotary_pos_emb(turned, turned, cos, sin, unsqueeze_dim=2)
    return torch.cat((turned, rest), -1)


def compare(device: str, dtype: torch.dtype, pairs: int, interleaved: bool, **tolerance) -> None:
    """Appends to pages, and holds keys and outputs against what transformers rotates."""
    g = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=g).to(device, dtype)

    q, k, v = random(B, S, H, D), random(B, S, H_KV, D), random(B, S, H_KV, D)
    caches = [random(9, 4, H_KV, D) for _ in range(2)]
    table = torch.randperm(9, generator=g).to(device, torch.int32).view(B, 3)
    lengths = torch.tensor([0, 5, 9], device=device, dtype=torch.int32)
    positions = lengths[:, None] + torch.arange(S, device=device)
    angles = torch.arange(12, device=device)[:, None] * 10000.0 ** (
        -torch.arange(pairs, device=device) / pairs
    )
    paged = {"cache_seqlens": lengths, "block_table": table, "causal": True}
    own = [x.clone() for x in caches]
    rotary = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    out = onchip.attention_with_kvcache(
        q, *own, k=k, v=v, **rotary, rotary_interleaved=interleaved, **paged
    )
    rotated = [by_transformers(x.float(), positions, pairs, interleaved).to(dtype) for x in (q, k)]
    want = onchip.attention_with_kvcache(rotated[0], *caches, k=rotated[1], v=v, **paged)
    for got, expected in ((out, want), *zip(own, caches, strict=True)):
        torch.testing.assert_close(got, expected, **tolerance)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("pairs", [16, 6])
def test_same_as_transformers(pairs, interleaved):
    compare("cpu", torch.float32, pairs, interleaved, rtol=1e-5, atol=1e-5)
