"""Decode of sequences with a shared beginning, against the same call without one."""

from __future__ import annotations

import pytest
import torch

import onchip
from onchip.paging import PagedKVCache

HEADS, KV_HEADS, DIM = 4, 2, 16


def forked(prefix, tails, page_size, device="cpu", dtype=torch.float64):
    """A cache of sequences that begin with the same `prefix` tokens, and their ids."""
    cache = PagedKVCache(1, 200, page_size, KV_HEADS, DIM, dtype, device)
    first = cache.add_sequence()
    cache.append(first, prefix)
    ids = [cache.fork(first) for _ in tails]
    for seq_id, tail in zip(ids, tails, strict=True):
        cache.append(seq_id, tail)
    cache.k.normal_()
    cache.v.normal_()
    return cache, ids


def compare(cache, ids, seqlen_q, rtol=1e-10, **options):
    lengths = [cache.length(seq_id) for seq_id in ids]
    device, dtype = cache.k.device, cache.k.dtype
    q = torch.randn(len(ids), seqlen_q, HEADS, DIM, device=device, dtype=dtype)
    plan = cache.cascade(ids, seqlen_q)
    out, lse = plan.attention(q, cache.k[0], cache.v[0], return_lse=True, **options)
    want, want_lse = onchip.attention_with_kvcache(
        q,
        cache.k[0],
        cache.v[0],
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table=cache.block_table(ids),
        causal=True,
        return_lse=True,
        **options,
    )
    torch.testing.assert_close(out, want, rtol=rtol, atol=rtol)
    torch.testing.assert_close(lse, want_lse, rtol=rtol, atol=rtol)
    return plan


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_same_as_without(page_size, seqlen_q):
    cache, ids = forked(50, (9, 3, 30, 7, 5, 4, 3), page_size)
    plan = compare(cache, ids, seqlen_q)
    assert plan.num_shared == 50 // page_size * page_size
    assert plan.shared_table.shape == (1, 50 // page_size)


def test_options():
    cache, ids = forked(40, (2, 5), 8)
    sinks = torch.randn(HEADS, dtype=torch.float64)
    compare(cache, ids, 1, softcap=3.0, scale=0.7, sinks=sinks)


def test_many_sequences_and_none_shared():
    cache, ids = forked(24, range(1, 38), 8)
    assert compare(cache, ids, 1).num_shared == 24
    alone = cache.add_sequence()
    cache.append(alone, 30)
    assert compare(cache, [*ids, alone], 1).num_shared == 0


def test_the_last_token_of_a_sequence_is_never_shared():
    cache, ids = forked(24, (1, 4), 8)
    first = cache.seq_ids[0]  # the prefix alone: 24 tokens
    assert compare(cache, [first, *ids], 1).num_shared == 16


def test_no_sequences():
    cache, _ = forked(8, (1,), 8)
    with pytest.raises(ValueError, match="seq_ids"):
        cache.cascade([])
    with pytest.raises(ValueError, match="seq_id 99"):
        cache.cascade([99])
    with pytest.raises(ValueError, match="num_queries"):
        cache.cascade([0], 9)
    with pytest.raises(ValueError, match="num_queries=2"):
        cache.cascade([0]).attention(torch.zeros(1, 2, HEADS, DIM), cache.k[0], cache.v[0])


@pytest.mark.parametrize("prefix", [24, 3], ids=["shared", "none shared"])
def test_no_queries(prefix):
    cache, ids = forked(prefix, (2, 5), 8)
    q = torch.zeros(2, 0, HEADS, DIM, dtype=torch.float64)
    plan = cache.cascade(ids)
    out, lse = plan.attention(q, cache.k[0], cache.v[0], return_lse=True)
    assert out.shape == (2, 0, HEADS, DIM) and lse.shape == (2, HEADS, 0)
    assert plan.attention(q, cache.k[0], cache.v[0]).shape == out.shape


def test_arguments_of_a_wrong_type_are_named():
    cache, ids = forked(24, (2, 5), 8)
    for wrong in ("1", None, 1.5, True):
        with pytest.raises(TypeError, match=r"num_queries: got .*; allowed: an int"):
            cache.cascade(ids, num_queries=wrong)
    with pytest.raises(ValueError, match="num_queries: got 0"):
        cache.cascade(ids, 0)
    plan, q = cache.cascade(ids), torch.zeros(2, 1, HEADS, DIM, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"q: got str; allowed: a torch\.Tensor"):
        plan.attention("x", cache.k[0], cache.v[0])
    for wrong in ("no", 1):
        with pytest.raises(TypeError, match=f"return_lse: got {wrong!r}; allowed: True or False"):
            plan.attention(q, cache.k[0], cache.v[0], return_lse=wrong)
