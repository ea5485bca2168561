"""The append on a GPU: bit for bit, rotated, quantised, and past 2^31 elements."""

from __future__ import annotations

import pytest
import torch

import onchip
from onchip import repeats
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


def _append_case(seed, page=16, batch=3, num_new=2, num_queries=1, dim=128, pairs=32, dtype=BF16):
    g = torch.Generator(device="cuda").manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, device="cuda", dtype=dtype, generator=g)

    columns = 10 if page < 200 else 1
    pages = batch * columns + 2
    given = {
        "q": random(batch, num_queries, 8, dim),
        "k_cache": random(pages, page, 2, dim),
        "v_cache": random(pages, page, 2, dim),
        "cache_seqlens": torch.randint(
            0, 150, (batch,), device="cuda", generator=g, dtype=torch.int32
        ),
        "k": random(batch, num_new, 2, dim),
        "v": random(batch, num_new, 2, dim),
    }
    order = torch.randperm(pages, device="cuda", generator=g).int()
    if columns > 1:
        given["block_table"] = order[: batch * columns].view(batch, columns)
    else:
        given["cache_batch_idx"] = order[:batch].contiguous()
    if pairs:
        given["rotary_cos"], given["rotary_sin"] = (
            torch.randn(200, pairs, device="cuda", generator=g) for _ in range(2)
        )
    return given


APPENDS = {
    "pages": {},
    "dense": {"page": 200},
    "no_rotary": {"pairs": 0},
    "five_of_three_heads": {"num_new": 5, "num_queries": 3, "dim": 80, "pairs": 20},
    "one_page_many_tokens": {"num_new": 40, "num_queries": 17, "dtype": torch.float16},
}


@pytest.mark.parametrize("name", APPENDS)
@pytest.mark.parametrize("causal", [True, False])
def test_an_append_does_what_a_cpu_does_and_so_does_its_repetition(name, causal):
    for seed in range(3):
        given = _append_case(seed, **APPENDS[name])
        turns = causal and "rotary_cos" in given
        options = {"causal": causal, "return_lse": True, "rotary_interleaved": turns}
        on_cpu = {key: x.cpu() for key, x in given.items()}
        out, lse = onchip.attention_with_kvcache(**given, **options)
        want, want_lse = onchip.attention_with_kvcache(**on_cpu, **options)
        for cache in ("k_cache", "v_cache"):
            assert torch.equal(given[cache].cpu(), on_cpu[cache])
        torch.testing.assert_close(out.cpu(), want, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse.cpu(), want_lse, rtol=1e-3, atol=1e-2)


def test_repeated_calls_are_kept_and_bitwise_equal():
    given = _append_case(0)
    caches = {name: given.pop(name) for name in ("k_cache", "v_cache")}
    before = {name: x.clone() for name, x in caches.items()}
    first = onchip.attention_with_kvcache(**given, **caches, causal=True)
    kept = len(repeats._kept)
    again = {name: x.clone() for name, x in before.items()}
    second = onchip.attention_with_kvcache(**given, **again, causal=True)
    assert len(repeats._kept) == kept > 0
    assert torch.equal(first, second)
    assert all(torch.equal(caches[name], again[name]) for name in caches)
    assert torch.equal(second, onchip.attention_with_kvcache(**given, **again, causal=True))
    # What the key leaves out must not be taken for equal.
    with pytest.raises(TypeError, match="causal"):
        onchip.attention_with_kvcache(**given, **again, causal=1)
    with pytest.raises(ValueError, match="gradient"):
        q = given["q"].clone().requires_grad_()
        onchip.attention_with_kvcache(**{**given, "q": q}, **again, causal=True)
    short = {**given, "cache_seqlens": given["cache_seqlens"][:2]}
    with pytest.raises(ValueError, match="cache_seqlens"):
        onchip.attention_with_kvcache(**short, **again, causal=True)


def test_a_cuda_graph_appends_where_lengths_say():
    given = _append_case(0, num_new=1)

    def call():
        return onchip.attention_with_kvcache(**given, causal=True)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for length in (3, 77, 149):
        given["cache_seqlens"].fill_(length)
        given["q"].normal_()
        given["k"].normal_()
        graph.replay()
        replayed = out.clone()
        page = given["block_table"][1, length // 16].long()
        stored = given["k_cache"][page, length % 16].clone()
        given["k_cache"][page, length % 16] = 0
        assert torch.equal(replayed, call())
        assert torch.equal(given["k_cache"][page, length % 16], stored)
