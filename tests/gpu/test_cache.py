"""The append on a GPU: bit for bit, rotated, quantised, and past 2^31 elements."""

from __future__ import annotations

import pytest
import torch

import onchip
from onchip.kernels.common import apply_rotary

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.mark.parametrize("dims", [(128, 128), (80, 48), (5, 3)], ids=str)
@pytest.mark.parametrize("cache_dtype", [BF16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
def test_append_then_read_back_bit_for_bit(dims, cache_dtype, slot_dtype):
    k, v = (torch.randn(40, 3, d, device="cuda", dtype=BF16) for d in dims)
    caches = [torch.zeros(9, 16, 3, d, device="cuda").to(cache_dtype) for d in dims]
    slots = torch.randperm(9 * 16, device="cuda")[:40].to(slot_dtype)
    slots[3] = -1
    onchip.store_kvcache(k, v, *caches, slots)
    kept = slots >= 0
    for cache, new in zip(caches, (k, v), strict=True):
        stored = cache.flatten(0, 1)[slots[kept].long()].float()
        assert torch.equal(stored, new[kept].to(cache_dtype).float())
        assert int((cache.float() != 0).flatten(2).any(2).sum()) == 39


def test_slots_past_2_31_elements():
    page, heads, dim = 256, 64, 128
    num_pages = (1 << 31) // (page * heads * dim) + 4
    k_cache, v_cache = (
        torch.empty(num_pages, page, heads, dim, device="cuda", dtype=BF16) for _ in range(2)
    )
    k, v = (torch.randn(2, heads, dim, device="cuda", dtype=BF16) for _ in range(2))
    slots = torch.tensor([num_pages * page - 1, 0], device="cuda")
    onchip.store_kvcache(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache[-1, -1], k[0]) and torch.equal(v_cache[-1, -1], v[0])
    assert torch.equal(k_cache[0, 0], k[1]) and torch.equal(v_cache[0, 0], v[1])


@pytest.mark.parametrize("interleaved", [False, True])
def test_attention_appends_rotated_keys(interleaved):
    lengths = torch.tensor([5, 100, 0, 150], device="cuda", dtype=torch.int32)
    k_cache, v_cache = (torch.randn(40, 16, 2, 128, device="cuda", dtype=BF16) for _ in range(2))
    table = torch.randperm(40, device="cuda").int().view(4, 10)
    q = torch.randn(4, 1, 8, 128, device="cuda", dtype=BF16)
    k, v = (torch.randn(4, 1, 2, 128, device="cuda", dtype=BF16) for _ in range(2))
    cos, sin = (torch.randn(200, 32, device="cuda") for _ in range(2))
    rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
    onchip.attention_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lengths, block_table=table, k=k, v=v, **rotary
    )
    places = lengths.long()[:, None]
    pages = table.long().gather(1, places // 16)
    want = apply_rotary(k, cos, sin, places, interleaved)
    assert torch.equal(k_cache[pages, places % 16], want)
    assert torch.equal(v_cache[pages, places % 16], v)
