"""`onchip.compat.flash_attn_3` beside FlashAttention-3 itself: same arguments, same results.

Legend: B batch, S_q queries of a sequence, H query heads, H_kv key and value heads, N page size.
"""

from __future__ import annotations

import pytest
import torch

from onchip.compat import flash_attn_3

theirs = pytest.importorskip("flash_attn_interface")
pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
B, H, H_KV, D = 3, 8, 2, 128


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, generator=g, device="cuda", dtype=BF16)


def both(name: str, *args, **kwargs):
    """What the two libraries return, and the caches that they were given, if any."""
    results = []
    for module in (flash_attn_3, theirs):
        own = {key: x.clone() if key in ("k_cache", "v_cache") else x for key, x in kwargs.items()}
        try:
            result = getattr(module, name)(*args, **own)
        except (RuntimeError, TypeError) as error:
            if module is theirs:
                pytest.skip(f"not in this build of FlashAttention-3: {str(error)[:80]}")
            raise
        results.append((result, [own[key] for key in ("k_cache", "v_cache") if key in own]))
    (ours, our_caches), (want, their_caches) = results
    return ours, want, zip(our_caches, their_caches, strict=True)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Two bfloat16 results, or two LSEs, of the same numbers added up in another order."""
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1e-2)


CACHED = {
    "dense": {},
    "rows": {"cache_batch_idx": [2, 0, 1]},
    "left_padded": {"cache_leftpad": [3, 0, 70]},
    "pages_of_16": {"page": 16},
    "pages_of_256": {"page": 256},
    "window": {"page": 16, "window_size": (100, 0), "queries": 3},
    "softcap": {"page": 16, "softcap": 20.0},
    "speculative": {"page": 16, "queries": 16, "causal": True},
    "one_split": {"page": 16, "num_splits": 1, "queries": 2, "causal": True},
    "appended": {"new": 1, "rotary": 64},
    "appended_to_pages": {"page": 16, "new": 2, "queries": 2, "causal": True, "rotary": 32},
    "halves": {"page": 256, "new": 1, "rotary": 64, "rotary_interleaved": False},
}


@pytest.mark.parametrize("name", CACHED)
def test_kvcache(name):
    given = dict(CACHED[name])
    page, queries = given.pop("page", 0), given.pop("queries", 1)
    num_new, pairs = given.pop("new", 0), given.pop("rotary", 0)
    for key in ("cache_batch_idx", "cache_leftpad"):
        if key in given:
            given[key] = torch.tensor(given[key], dtype=torch.int32, device="cuda")
    room = 1024
    if page:
        shape = (B * room // page, page, H_KV, D)
        order = torch.randperm(shape[0], device="cuda").int()
        given["page_table"] = order.view(B, room // page)
    else:
        shape = (B, room, H_KV, D)
    if num_new:
        given["k"], given["v"] = (random(B, num_new, H_KV, D, seed=s) for s in (3, 4))
    if pairs:
        angles = torch.rand(room, pairs, device="cuda") * 6
        given["rotary_cos"], given["rotary_sin"] = angles.cos().to(BF16), angles.sin().to(BF16)
    lengths = torch.tensor([900, 17, 333], dtype=torch.int32, device="cuda")
    if "cache_leftpad" in given:
        lengths[1:] = torch.tensor([40, 333])
    ours, want, caches = both(
        "flash_attn_with_kvcache",
        random(B, queries, H, D),
        k_cache=random(*shape, seed=1),
        v_cache=random(*shape, seed=2),
        cache_seqlens=lengths,
        return_softmax_lse=True,
        **given,
    )
    assert isinstance(ours, tuple) and len(ours) == 2 and isinstance(want, tuple)
    for got, expected in zip(ours, want, strict=False):
        close(got, expected)
    for got, expected in caches:
        close(got, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("returns", [False, True])
def test_dense(causal, returns):
    q, k, v = random(2, 200, H, D), random(2, 300, H_KV, D, seed=1), random(2, 300, H_KV, D, seed=2)
    ours, want, _ = both("flash_attn_func", q, k, v, causal=causal, return_attn_probs=returns)
    assert isinstance(ours, tuple) == isinstance(want, tuple) == returns
    for got, expected in zip(*((x if returns else (x,)) for x in (ours, want)), strict=True):
        close(got, expected)


def test_packed():
    starts = torch.tensor([0, 100, 100, 333], dtype=torch.int32, device="cuda")
    q, k, v = random(333, H, D), random(333, H_KV, D, seed=1), random(333, H_KV, D, seed=2)
    ours, want, _ = both(
        "flash_attn_varlen_func", q, k, v, starts, starts, 233, 233, causal=True,
        return_attn_probs=True,
    )  # fmt: skip
    for got, expected in zip(ours, want, strict=True):
        close(got, expected)


def test_merged():
    outs = torch.randn(4, 2, 9, H, D, device="cuda")
    lses = torch.randn(4, 2, 9, H, device="cuda")
    ours, want, _ = both("flash_attn_combine", outs, lses.transpose(-1, -2).contiguous().mT)
    for got, expected in zip(ours, want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
