"""`flash_attn_with_kvcache` of both imitations: values against the oracle, caches in place."""

from __future__ import annotations

import pytest
import torch

from onchip import reference
from onchip.compat import flash_attn as fa2
from onchip.compat import flash_attn_3 as fa3
from tests import problems, tolerance
from tests.compat_cases import INF, spelled


def rotated(x, cos, sin, start, interleaved):
    """Rotary embedding by the plain formula, complex numbers, float64; x (S, H, D)."""
    half = cos.shape[1]
    turn = torch.complex(cos.double(), sin.double())[start : start + len(x), None]
    head, tail = x.double()[..., : 2 * half], x.double()[..., 2 * half :]
    if interleaved:
        turned = torch.view_as_real(
            torch.view_as_complex(head.unflatten(-1, (half, 2)).contiguous()) * turn
        )
        return torch.cat((turned.flatten(-2), tail), -1)
    turned = torch.complex(head[..., :half], head[..., half:]) * turn
    return torch.cat((turned.real, turned.imag, tail), -1)


@pytest.mark.parametrize("module", [fa2, fa3], ids=["fa2", "fa3"])
@pytest.mark.parametrize("interleaved", [None, False])
def test_kvcache_append_rotary_in_place(module, interleaved):
    lengths, rows = [2, 0], torch.tensor([2, 1], dtype=torch.int32)
    q, k, v = problems.qkv(seqlen_q=3, seqlen_k=3)
    cache_k, cache_v = torch.randn(3, 6, 2, 8), torch.randn(3, 6, 2, 8)
    before_k, before_v = cache_k.clone(), cache_v.clone()
    angles = torch.rand(6, 3) * 6
    cos, sin = angles.cos(), angles.sin()
    rotary = {} if interleaved is None else {"rotary_interleaved": interleaved}
    out = module.flash_attn_with_kvcache(
        q, cache_k, cache_v, k, v, rotary_cos=cos, rotary_sin=sin,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32), cache_batch_idx=rows,
        causal=True, **rotary,
    )  # fmt: skip
    turned = []
    for b, length in enumerate(lengths):
        pairs = interleaved is None  # the libraries' default
        before_k[rows[b], length : length + 3] = rotated(k[b], cos, sin, length, pairs).float()
        before_v[rows[b], length : length + 3] = v[b]
        turned.append(rotated(q[b], cos, sin, length, pairs))
    torch.testing.assert_close(cache_k, before_k)
    assert torch.equal(cache_v, before_v)
    seqlens = torch.tensor(lengths) + 3
    oracle, _ = reference.attention_with_kvcache(
        torch.stack(turned), before_k.double(), before_v.double(), cache_seqlens=seqlens,
        cache_batch_idx=rows, causal=True,
    )  # fmt: skip
    torch.testing.assert_close(out.double(), oracle, atol=2e-6, rtol=2e-6)


def test_rotary_without_order_stands_at_the_first_new_position():
    q, k, v = problems.qkv(batch=1, seqlen_q=2, seqlen_k=2, kv_heads=4)
    cache_k, cache_v = torch.randn(2, 1, 4, 4, 8).unbind(0)
    angles = torch.rand(4, 4)
    out = fa2.flash_attn_with_kvcache(
        q, cache_k, cache_v, k, v, angles.cos(), angles.sin(), cache_seqlens=2
    )
    turned = torch.stack([rotated(x[None], angles.cos(), angles.sin(), 2, True)[0] for x in q[0]])
    oracle, _ = reference.attention(turned[None], cache_k.double(), cache_v.double())
    torch.testing.assert_close(out.double(), oracle, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("module", [fa2, fa3], ids=["fa2", "fa3"])
def test_kvcache_paged(module):
    k_cache, v_cache, table, seqlens = problems.paged([5, 3, 0], 4)
    q = torch.randn(3, 2, 4, 8)
    name = "block_table" if module is fa2 else "page_table"
    features = {"causal": True, "window": (3, -1), "softcap": 2.0, "scale": 0.4}
    out, lse = module.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=seqlens, return_softmax_lse=True,
        **{name: table}, **spelled(features),
    )  # fmt: skip
    oracle, oracle_lse = reference.attention_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=seqlens, block_table=table, **features
    )
    if module is fa2:
        oracle_lse = oracle_lse.where(oracle_lse > -INF, INF)
    tolerance.assert_close_to_oracle(out, oracle, oracle, "out", ulps=16)
    tolerance.assert_close_to_oracle(lse, oracle_lse, oracle_lse, "lse", ulps=16)


def test_kvcache_paged_append():
    k_cache, v_cache, table, seqlens = problems.paged([5, 3], 4)
    table[1, 1] = (
        0
        if 0 not in (set(table[0, :2].tolist()) | {int(table[1, 0])})
        else max(set(range(len(k_cache))) - set(table[0, :2].tolist()) - {int(table[1, 0])})
    )
    q, k, v = problems.qkv(seqlen_q=2, seqlen_k=2)
    fa2.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=seqlens, block_table=table)
    for b, length in enumerate([5, 3]):
        for t in range(2):
            page, offset = table[b, (length + t) // 4], (length + t) % 4
            assert torch.equal(k_cache[page, offset], k[b, t])
            assert torch.equal(v_cache[page, offset], v[b, t])


@pytest.mark.parametrize("module", [fa2, fa3], ids=["fa2", "fa3"])
def test_kvcache_lengths_and_left_padding(module):
    q, k, v = problems.qkv(seqlen_q=2, seqlen_k=6)
    full, _ = reference.attention(q, k, v, causal=True)
    out = module.flash_attn_with_kvcache(q, k, v, causal=True)  # None: all that the cache holds
    tolerance.assert_close_to_oracle(out, full, full, "out", ulps=16)
    four, _ = reference.attention(q, k[:, :4], v[:, :4])
    out = module.flash_attn_with_kvcache(q, k, v, cache_seqlens=4)
    tolerance.assert_close_to_oracle(out, four, four, "out", ulps=16)
    pad = torch.tensor([1, 3], dtype=torch.int32)
    out = module.flash_attn_with_kvcache(q, k, v, cache_seqlens=5, cache_leftpad=pad, causal=True)
    for b in range(2):
        keys = slice(int(pad[b]), 5)
        want, _ = reference.attention(
            q[b : b + 1], k[b : b + 1, keys], v[b : b + 1, keys], causal=True
        )
        tolerance.assert_close_to_oracle(out[b : b + 1], want, want, "out", ulps=16)


@pytest.mark.parametrize("paged", [True, False])
def test_fa3_kvcache_packed_queries(paged):
    cu = problems.offsets([3, 1])
    q = torch.randn(4, 4, 8)
    if paged:
        k_cache, v_cache, table, seqlens = problems.paged([5, 3], 2)
        where, given = {"block_table": table}, {"page_table": table}
    else:
        k_cache, v_cache = torch.randn(2, 3, 6, 2, 8).unbind(0)
        rows = torch.tensor([2, 0], dtype=torch.int32)
        seqlens, given = torch.tensor([5, 3], dtype=torch.int32), {"cache_batch_idx": rows}
        where = {"block_table": rows[:, None]}
    out, lse = fa3.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=seqlens, cu_seqlens_q=cu, max_seqlen_q=3,
        causal=True, return_softmax_lse=True, **given,
    )  # fmt: skip
    oracle, oracle_lse = reference.attention_varlen(
        q, k_cache, v_cache, cu_seqlens_q=cu, seqused_k=seqlens, causal=True, **where
    )
    tolerance.assert_close_to_oracle(out, oracle, oracle, "out", ulps=16)
    tolerance.assert_close_to_oracle(lse, oracle_lse, oracle_lse, "lse", ulps=16)


def test_fa3_float8_cache_with_descales():
    q, k, v = problems.qkv(dtype=torch.bfloat16, seqlen_q=1)
    k_cache, v_cache = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    descale = torch.tensor([0.5, 2.0])
    out = fa3.flash_attn_with_kvcache(
        q, k_cache, v_cache, k_descale=descale.expand(2, 2), v_descale=descale.expand(2, 2)
    )
    keys, values = (x.float() * descale[:, None] for x in (k_cache, v_cache))
    oracle, _ = reference.attention(q.float(), keys, values)
    eager, _ = reference.eager(q, keys.bfloat16(), values.bfloat16())
    tolerance.assert_close_to_oracle(out, oracle, eager, "out")
    with pytest.raises(NotImplementedError, match="k_descale"):
        fa3.flash_attn_with_kvcache(q, k_cache, v_cache, k_descale=torch.rand(2, 2))
    with pytest.raises(ValueError, match="v_descale"):
        fa3.flash_attn_with_kvcache(q, k, v, v_descale=descale.expand(2, 2))


def test_refusals_append_nothing():
    q, k, v = problems.qkv(seqlen_q=2, seqlen_k=2)
    cache = torch.randn(2, 2, 6, 2, 8)
    before = cache.clone()
    angles = torch.rand(6, 4)
    rotary = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    cu = problems.offsets([2, 2])
    for module, queries, given, name in [
        (fa2, q, {}, "cache_seqlens"),  # how long the sequences are is not said
        (fa2, q, {"cache_seqlens": 5}, "cache_seqlens"),
        (fa2, q[:, :1], {"cache_seqlens": 1, **rotary}, "q"),
        (fa3, q, {"cache_seqlens": 1, "attention_chunk": 2}, "attention_chunk"),
        (fa3, q.flatten(0, 1), {"cache_seqlens": 1, "cu_seqlens_q": cu, "max_seqlen_q": 2}, "k"),
        (fa3, q.to(torch.float8_e4m3fn), {"cache_seqlens": 1}, "q"),
    ]:
        with pytest.raises((ValueError, NotImplementedError), match=f"^{name}: got"):
            module.flash_attn_with_kvcache(queries, *cache, k, v, **given)
        assert torch.equal(cache, before)
    with pytest.raises(TypeError, match="^max_seqlen_q: got"):
        fa3.flash_attn_with_kvcache(q.flatten(0, 1), *cache, cu_seqlens_q=cu)


def _bad_calls():
    from onchip.compat import bert_padding, flash_attn, flash_attn_3

    q, cache = torch.randn(2, 1, 2, 8), torch.randn(4, 16, 2, 8)
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    paged = {"cache_seqlens": lengths}
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32)
    packed = {"cu_seqlens_q": offsets, "max_seqlen_q": 1, **paged}
    two, three = flash_attn.flash_attn_with_kvcache, flash_attn_3.flash_attn_with_kvcache
    combine = flash_attn_3.flash_attn_combine
    parts, lses = torch.randn(2, 1, 3, 2, 8), torch.randn(2, 1, 3, 2)
    return {
        "q: ": lambda: two(torch.tensor(1.0), cache, cache, **paged),
        "cache_seqlens: ": lambda: two(q, cache, cache, cache_seqlens=2**40),
        "block_table: ": lambda: two(q, cache, cache, block_table=[[0], [1]], **paged),
        "block_table: got 1 dim": lambda: two(q, cache, cache, block_table=lengths),
        "page_table: ": lambda: three(q, cache, cache, page_table=[[0], [1]], **paged),
        "k_descale: ": lambda: three(q, cache, cache, k_descale=1.0, **paged),
        "cu_seqlens_q: got no": lambda: three(
            q[:, 0], cache, cache, **{**packed, "cu_seqlens_q": offsets[:0]}
        ),
        "cu_seqlens_q: got 0 dim": lambda: three(
            q[:, 0], cache, cache, **{**packed, "cu_seqlens_q": torch.tensor(0)}
        ),
        "cache_batch_idx: ": lambda: three(q[:, 0], cache, cache, cache_batch_idx=[0, 1], **packed),
        "out_partial: ": lambda: combine([parts], lses),
        "lse_partial: ": lambda: combine(parts, None),
        "lse_partial: got shape": lambda: combine(parts, lses[0]),
        "out: got dtype": lambda: combine(parts, lses, out=torch.zeros(1, 3, 2, 8).int()),
        "out_dtype: ": lambda: combine(parts, lses, out_dtype="x"),
        "attention_mask: ": lambda: bert_padding.unpad_input(torch.randn(1, 2, 3), [[1, 0]]),
    }


@pytest.mark.parametrize("start", _bad_calls())
def test_bad_arguments_are_named(start):
    with pytest.raises((ValueError, TypeError), match=f"^{start}"):
        _bad_calls()[start]()
