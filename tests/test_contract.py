"""The contract, point by point: each test is named after the point it holds."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import onchip
from onchip import reference
from tests import problems
from tests.tolerance import assert_close_to_oracle, check_forward, check_gradients

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", problems.DENSE_FEATURES)
def test_point_1_scores(name, dtype):
    for seed in (0, 1):
        features = problems.features(name, torch.Generator().manual_seed(seed))
        qkv = problems.qkv(seqlen_q=33, seqlen_k=70, head_dim=24, dtype=dtype, seed=seed)
        check_forward(onchip.attention, *qkv, **features)
        check_gradients(onchip.attention, *qkv, **features)


def test_point_1_softcap_comes_before_alibi_and_mask():
    q, k, v = problems.qkv(dtype=torch.float64)
    slopes = torch.full((4,), 2.0)
    out = onchip.attention(q, k, v, softcap=0.5, alibi_slopes=slopes, causal=True)
    heads = k.repeat_interleave(2, dim=2), v.repeat_interleave(2, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q, heads[0]) * 8**-0.5
    scores = 0.5 * torch.tanh(scores / 0.5)
    i, j = torch.arange(5)[:, None] + 2, torch.arange(7)
    scores = (scores - 2.0 * (i - j).abs()).masked_fill(j > i, -torch.inf)
    want = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), heads[1])
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)


def test_point_1_sinks_join_the_denominator_only():
    q, k, v = problems.qkv(dtype=torch.float64)
    sinks = torch.tensor([0.0, 1.0, -50.0, 50.0], dtype=torch.float64)
    plain, lse = onchip.attention(q, k, v, return_lse=True)
    out, with_sink = onchip.attention(q, k, v, sinks=sinks, return_lse=True)
    want = torch.logaddexp(lse, sinks[None, :, None])
    torch.testing.assert_close(with_sink, want, rtol=0, atol=1e-12)
    share = (lse - want).exp().transpose(1, 2)[..., None]
    torch.testing.assert_close(out, plain * share, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "features", "seen"),
    [
        (2, 5, {"causal": True}, ["11110", "11111"]),
        (5, 2, {"causal": True}, ["00", "00", "00", "10", "11"]),
        (3, 3, {"window": (0, 0)}, ["100", "010", "001"]),
        (3, 4, {"window": (1, -1)}, ["1111", "0111", "0011"]),
        (3, 4, {"window": (-1, 0)}, ["1100", "1110", "1111"]),
        (3, 4, {"causal": True, "window": (0, 9)}, ["0100", "0010", "0001"]),
    ],
)
def test_point_2_alignment(seqlen_q, seqlen_k, features, seen):
    q = torch.zeros(1, seqlen_q, 1, 4, dtype=torch.float64)
    k = torch.zeros(1, seqlen_k, 1, 4, dtype=torch.float64)
    v = torch.eye(seqlen_k, dtype=torch.float64)[None, :, None]
    out = onchip.attention(q, k, v, **features)[0, :, 0]
    rows = ["".join("01"[int(p > 0)] for p in row) for row in out.tolist()]
    assert rows == seen


@pytest.mark.parametrize("seqlen_k", [0, 2])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_point_3_rows_that_see_nothing(seqlen_k, sink, softcap):
    q, k, v = (x.requires_grad_() for x in problems.qkv(seqlen_q=5, seqlen_k=seqlen_k))
    sinks = torch.rand(4, requires_grad=True) if sink else None
    out, lse = onchip.attention(q, k, v, causal=True, sinks=sinks, softcap=softcap, return_lse=True)
    empty = 5 - seqlen_k
    assert bool((out[:, :empty] == 0).all())
    want = torch.full((4,), -torch.inf) if sinks is None else sinks.detach()
    torch.testing.assert_close(lse[:, :, :empty], want[None, :, None].expand(2, 4, empty))
    (out.sum() + lse[lse > -torch.inf].sum()).backward()
    assert bool((q.grad[:, :empty] == 0).all())
    for x in (q, k, v):
        assert bool(x.grad.isfinite().all())
    if sinks is not None:
        assert bool((sinks.grad > 0).all())


def test_point_4_the_gradient_of_the_lse_is_used():
    q, k, v = (x.requires_grad_() for x in problems.qkv(dtype=torch.float64))
    _, lse = onchip.attention(q, k, v, return_lse=True)
    lse.sum().backward()
    dlse = torch.ones(2, 4, 5, dtype=torch.float64)
    dout = torch.zeros(2, 5, 4, 8, dtype=torch.float64)
    want = reference.attention_backward(q.detach(), k.detach(), v.detach(), dout, dlse)
    torch.testing.assert_close(q.grad, want.dq, rtol=0, atol=1e-12)
    torch.testing.assert_close(k.grad, want.dk, rtol=0, atol=1e-12)
    assert bool((v.grad == 0).all())
    assert bool((q.grad != 0).any())


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("features", [{}, {"causal": True}, {"causal": True, "window": (4, -1)}])
def test_point_5_unused_memory_never_matters(page_size, features):
    lengths = [17, 0, 1, 6]
    k_cache, v_cache, table, used = problems.paged(lengths, page_size)
    q = torch.randn(4, 2, 4, 8)
    call = dict(cache_seqlens=used, block_table=table, return_lse=True, **features)
    out, lse = onchip.attention_with_kvcache(q, k_cache, v_cache, **call)
    want, want_lse = reference.attention_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=used, block_table=table, **features
    )
    torch.testing.assert_close(out.double(), want, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=2e-6)
    assert bool((out[1] == 0).all())


def test_point_5_padding_of_packed_keys_never_matters():
    q, k, v, lengths = problems.packed([3, 2], [6, 5])
    used = torch.tensor([4, 5], dtype=torch.int32)
    k[4:6], v[4:6] = torch.nan, torch.inf
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = onchip.attention_varlen(*inputs, seqused_k=used, causal=True, **lengths)
    out.sum().backward()
    for x in (out, q.grad, k.grad, v.grad):
        assert bool(x.isfinite().all())
    assert bool((k.grad[4:6] == 0).all())


@pytest.mark.parametrize("features", [{}, {"softcap": 3.0}, {"window": (1, 1)}])
def test_point_5_nan_that_is_attended_to_reaches_exactly_the_rows_that_see_it(features):
    q, k, v = problems.qkv(seqlen_q=40, seqlen_k=40, dtype=torch.float64)
    v[0, 20, 0] = torch.nan
    out = onchip.attention(q, k, v, causal=True, **features)
    last = 40 if "window" not in features else 22
    poisoned = out.isnan().any(-1)
    want = torch.zeros(2, 40, 4, dtype=torch.bool)
    want[0, 20:last, :2] = True
    assert torch.equal(poisoned, want)


@pytest.mark.parametrize("features", [{}, {"softcap": 30.0}, {"causal": True}])
def test_point_6_sums_are_float32_in_16_bit(features):
    # 4096 equal keys whose values are 1: a running sum in bfloat16 would stop at 256.
    ones = torch.ones(1, 4096, 1, 8, dtype=torch.bfloat16)
    q = torch.zeros(1, 4096, 1, 8, dtype=torch.bfloat16).requires_grad_()
    k, v = ones.clone().requires_grad_(), ones.clone().requires_grad_()
    out, lse = onchip.attention(q, k, v, return_lse=True, **features)
    assert bool((out == 1).all())
    if not features.get("causal"):
        torch.testing.assert_close(lse, torch.full_like(lse, 8.317766), rtol=0, atol=1e-4)
    out.sum().backward()
    if not features.get("causal"):
        torch.testing.assert_close(v.grad, torch.ones_like(v), rtol=0, atol=2**-7)


@pytest.mark.parametrize("features", [{}, {"causal": True, "softcap": 4.0}])
def test_point_7_bitwise_from_run_to_run(features):
    def run():
        inputs = [x.requires_grad_() for x in problems.qkv(seqlen_q=200, seqlen_k=300)]
        out = onchip.attention(*inputs, deterministic=True, **features)
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    first = run()
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_point_7_determinism_follows_torch():
    seen = []
    q, k, v = problems.qkv()
    torch.use_deterministic_algorithms(True)
    try:
        from onchip.prepare import Options, dense
        from onchip.problem import Tensors

        options = Options(False, (-1, -1), None, 0.0, False, False, None, None)
        seen.append(dense(Tensors(q, k, v), options).params.deterministic)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_point_7_one_split_is_batch_invariant(dtype):
    lengths = [300, 1, 77, 513, 0, 64]
    k_cache, v_cache, table, used = problems.paged(lengths, 16, dtype=dtype, head_dim=64)
    q = torch.randn(6, 1, 4, 64).to(dtype)
    call = {"causal": True, "num_splits": 1}
    together = onchip.attention_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=used, block_table=table, **call
    )
    for b in range(6):
        alone = onchip.attention_with_kvcache(
            q[b : b + 1], k_cache, v_cache, cache_seqlens=used[b : b + 1],
            block_table=table[b : b + 1], **call,
        )  # fmt: skip
        assert torch.equal(alone[0], together[b])


def test_point_9_offsets_are_64_bit():
    # One page past 2^31 elements: virtual memory that is never touched costs nothing.
    page = 2**31 // 8 + 5
    k_cache = torch.empty(page + 1, 1, 1, 8, dtype=torch.float16)
    v_cache = torch.empty(page + 1, 1, 1, 8, dtype=torch.float16)
    new = torch.randn(2, 1, 8).half()
    slots = torch.tensor([page, 2])
    onchip.store_kvcache(new, new + 1, k_cache, v_cache, slots)
    table = torch.tensor([[page, 2]], dtype=torch.int32)
    q = torch.randn(1, 1, 2, 8).half()
    used = torch.tensor([2], dtype=torch.int32)
    out = onchip.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=used, block_table=table)
    want, _ = reference.attention(q, new[None], new[None] + 1)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=4e-3)


def _views():
    q, k, v = problems.qkv(kv_heads=4, seqlen_k=5)
    yield "transposed", [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    fused = torch.randn(2, 5, 3, 4, 8)
    yield "fused", list(fused.unbind(2))
    yield "expanded batch", [q, k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1)]
    yield "expanded heads", [q, k[:, :, :1].expand(-1, -1, 4, -1), v]
    yield "strided", [x.repeat_interleave(2, dim=1)[:, ::2] for x in (q, k, v)]
    yield "copied", [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v)]


@pytest.mark.parametrize(
    ("name", "views"), list(_views()), ids=lambda x: x if isinstance(x, str) else ""
)
@pytest.mark.parametrize("features", [{}, {"causal": True, "softcap": 2.0}])
def test_point_10_strides(name, views, features):
    check_forward(onchip.attention, *views, **features)
    check_gradients(onchip.attention, *views, **features)
    copies = onchip.explain(*views, **features).copies
    assert copies == (("q", "k", "v") if name == "copied" else ())


def test_point_11_inputs_are_never_written():
    inputs = [x.requires_grad_() for x in problems.qkv(seqlen_q=7)]
    before = [x.detach().clone() for x in inputs]
    sinks = torch.rand(4)
    slopes = torch.rand(4)
    kept = sinks.clone(), slopes.clone()
    out, lse = onchip.attention(
        *inputs, causal=True, sinks=sinks, alibi_slopes=slopes, return_lse=True
    )
    (out.sum() + lse.sum()).backward()
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert torch.equal(sinks, kept[0]) and torch.equal(slopes, kept[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_append_rotate_attend(dtype, interleaved):
    k_cache, v_cache, table, used = problems.paged([5, 0, 9], 4, dtype=dtype)
    q, k, v = problems.qkv(batch=3, seqlen_q=2, seqlen_k=2, dtype=dtype)
    angles = torch.rand(16, 3)
    table[1, 0] = int((~torch.isin(torch.arange(8), table)).nonzero()[0])
    rotary = {
        "rotary_cos": angles.cos(),
        "rotary_sin": angles.sin(),
        "rotary_interleaved": interleaved,
    }
    table[0, 2] = table[0, 1]  # not reached: 7 tokens fit two pages
    out = onchip.attention_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=used, block_table=table, k=k, v=v, causal=True, **rotary
    )
    used = used + 2
    rotated = _rotate(q, angles, used, interleaved)
    want = reference.attention_with_kvcache(
        rotated, k_cache, v_cache, cache_seqlens=used, block_table=table, causal=True
    )[0]
    plain = reference.eager(rotated[:1], k_cache[:1, :2], v_cache[:1, :2])[0]
    assert plain.dtype == dtype
    scale = 4 * torch.finfo(dtype).eps if dtype != torch.float64 else 1e-12
    torch.testing.assert_close(out.double(), want, rtol=0, atol=4 * scale)
    stored = k_cache[table[1, 0], 0]
    torch.testing.assert_close(stored, _rotate(k, angles, used, interleaved)[1, 0])
    assert torch.equal(v_cache[table[1, 0], 1], v[1, 1])


def _rotate(x, angles, seqlens, interleaved):
    out = x.double().clone()
    for b in range(x.shape[0]):
        for s in range(x.shape[1]):
            row = angles[int(seqlens[b]) - x.shape[1] + s]
            cos, sin = row.cos().double(), row.sin().double()
            for r in range(3):
                one, two = (2 * r, 2 * r + 1) if interleaved else (r, r + 3)
                a, c = x[b, s, :, one].double(), x[b, s, :, two].double()
                out[b, s, :, one] = a * cos[r] - c * sin[r]
                out[b, s, :, two] = c * cos[r] + a * sin[r]
    return out.to(x.dtype)


def test_dense_cache_with_rows_and_left_padding():
    g = torch.Generator().manual_seed(0)
    k_cache, v_cache = (torch.randn(5, 12, 2, 8, generator=g) for _ in range(2))
    rows = torch.tensor([3, 0], dtype=torch.int32)
    pads = torch.tensor([2, 0], dtype=torch.int32)
    used = torch.tensor([7, 11], dtype=torch.int32)
    k_cache[3, :2], v_cache[3, 7:], k_cache[0, 11:] = torch.nan, torch.nan, torch.inf
    q = torch.randn(2, 3, 4, 8, generator=g)
    out, lse = onchip.attention_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=used, cache_batch_idx=rows, cache_leftpad=pads,
        causal=True, return_lse=True,
    )  # fmt: skip
    for b, (row, start, end) in enumerate([(3, 2, 7), (0, 0, 11)]):
        keys = k_cache[row : row + 1, start:end], v_cache[row : row + 1, start:end]
        want, want_lse = reference.attention(q[b : b + 1], *keys, causal=True)
        torch.testing.assert_close(out[b : b + 1].double(), want, rtol=0, atol=2e-6)
        torch.testing.assert_close(lse[b : b + 1].double(), want_lse, rtol=0, atol=2e-6)


def test_float8_cache():
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(6, 2, 8, generator=g) for _ in range(2))
    caches = [torch.zeros(2, 4, 2, 8, dtype=torch.float8_e4m3fn) for _ in range(2)]
    k_scale, v_scale = torch.tensor([0.02, 0.5]), torch.tensor(0.01)
    onchip.store_kvcache(k, v, *caches, torch.arange(6), k_scale, v_scale)
    stored_k = caches[0].float().flatten(0, 1)[:6] * k_scale[:, None]
    stored_v = caches[1].float().flatten(0, 1)[:6] * v_scale
    torch.testing.assert_close(stored_k, k, rtol=0.07, atol=0.02)
    q = torch.randn(1, 2, 4, 8, generator=g)
    table, used = torch.tensor([[0, 1]]).int(), torch.tensor([6]).int()
    out = onchip.attention_with_kvcache(
        q, *caches, cache_seqlens=used, block_table=table, k_scale=k_scale, v_scale=v_scale
    )
    want, _ = reference.attention(q, stored_k[None], stored_v[None])
    torch.testing.assert_close(out.double(), want, rtol=0, atol=2e-6)


def test_float8_stores_saturate():
    k = torch.full((1, 1, 8), 1e4)
    cache = torch.zeros(1, 1, 1, 8, dtype=torch.float8_e4m3fn)
    onchip.store_kvcache(k, -k, cache, (other := cache.clone()), torch.tensor([0]))
    assert bool((cache.float() == 448).all()) and bool((other.float() == -448).all())


def test_merge_states_equals_one_call():
    q, k, v = problems.qkv(seqlen_k=9, dtype=torch.float64)
    whole, lse = onchip.attention(q, k, v, return_lse=True)
    cuts = [(0, 4), (4, 4), (4, 9)]
    parts = [onchip.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in cuts]
    out, merged = onchip.merge_states(*zip(*parts, strict=True))
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-13)
    torch.testing.assert_close(merged, lse, rtol=0, atol=1e-13)
    nothing = onchip.merge_states([parts[1][0]] * 2, [parts[1][1]] * 2)
    assert bool((nothing[0] == 0).all()) and bool((nothing[1] == -torch.inf).all())


@settings(max_examples=60, deadline=None)
@given(
    seqlen_q=st.integers(0, 40),
    seqlen_k=st.integers(0, 70),
    batch=st.integers(0, 3),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 3]),
    head_dim=st.sampled_from([1, 3, 8, 40, 64]),
    head_dim_v=st.sampled_from([1, 5, 8, 64]),
    causal=st.booleans(),
    window=st.tuples(st.integers(-1, 20), st.integers(-1, 20)),
    softcap=st.sampled_from([0.0, 0.0, 1.5, 80.0]),
    alibi=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_dense_shape(
    seqlen_q, seqlen_k, batch, kv_heads, group, head_dim, head_dim_v, alibi, seed, **features
):
    heads = kv_heads * group
    qkv = problems.qkv(
        batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, head_dim_v, torch.float64, seed
    )
    if alibi:
        features["alibi_slopes"] = torch.rand(heads)
    inputs = [x.requires_grad_() for x in qkv]
    out, lse = onchip.attention(*inputs, return_lse=True, **features)
    want, want_lse = reference.attention(*(x.detach() for x in inputs), **features)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-12)
    g = torch.Generator().manual_seed(seed)
    dout = torch.randn(out.shape, generator=g, dtype=torch.float64)
    dlse = torch.randn(lse.shape, generator=g, dtype=torch.float64)
    grads = torch.autograd.grad([out, lse], inputs, [dout, dlse])
    wanted = reference.attention_backward(*(x.detach() for x in inputs), dout, dlse, **features)
    for got, name in zip(grads, ("dq", "dk", "dv"), strict=True):
        torch.testing.assert_close(got, getattr(wanted, name), rtol=0, atol=1e-11, msg=name)


@settings(max_examples=25, deadline=None)
@given(
    seqlen_q=st.integers(1, 1200),
    seqlen_k=st.integers(1, 1200),
    batch=st.integers(1, 2),
    kv_heads=st.sampled_from([1, 2]),
    window=st.tuples(st.sampled_from([0, 5, 100, 256]), st.sampled_from([-1, 0, 7, 130])),
    causal=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_window_of_long_sequences(seqlen_q, seqlen_k, batch, kv_heads, window, causal, dtype):
    qkv = problems.qkv(batch, seqlen_q, seqlen_k, 2, kv_heads, 16, dtype=dtype)
    check_forward(onchip.attention, *qkv, window=window, causal=causal)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40)), max_size=4),
    page_size=st.sampled_from([1, 2, 5, 16, 256]),
    features=st.sampled_from([{}, {"causal": True}, {"window": (3, 2)}, {"softcap": 1.0}]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_any_packed_and_paged_lengths(lengths, page_size, features, dtype):
    lengths_q, lengths_k = [a for a, _ in lengths], [b for _, b in lengths]
    q, k, v, given_lengths = problems.packed(lengths_q, lengths_k, dtype=dtype)
    atol = 1e-12 if dtype == torch.float64 else 3e-6
    offsets = {"cu_seqlens_q": given_lengths["cu_seqlens_q"]}
    out, lse = onchip.attention_varlen(q, k, v, return_lse=True, **given_lengths, **features)
    want, want_lse = reference.attention_varlen(
        q, k, v, **offsets, cu_seqlens_k=given_lengths["cu_seqlens_k"], **features
    )
    torch.testing.assert_close(out.double(), want, rtol=0, atol=atol)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=atol)
    if not lengths:
        return
    k_cache, v_cache, table, used = problems.paged(lengths_k, page_size, dtype=dtype)
    longest = {"max_seqlen_q": max(lengths_q), "max_seqlen_k": max(lengths_k)}
    paged = dict(block_table=table, seqused_k=used, **offsets)
    out = onchip.attention_varlen(
        q, k_cache, v_cache, cu_seqlens_k=None, **paged, **longest, **features
    )
    want, _ = reference.attention_varlen(q, k_cache, v_cache, **paged, **features)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_16_bit_is_as_close_as_each_sequence_alone(dtype):
    lengths = [(130, 130), (0, 5), (7, 300), (64, 1)]
    q, k, v, given_lengths = problems.packed(*zip(*lengths, strict=True), head_dim=64, dtype=dtype)
    out = onchip.attention_varlen(q, k, v, causal=True, **given_lengths)
    row, key = 0, 0
    for n, m in lengths:
        one = (q[None, row : row + n], k[None, key : key + m], v[None, key : key + m])
        oracle, _ = reference.attention(*one, causal=True)
        eager, _ = reference.eager(*one, causal=True)
        assert_close_to_oracle(out[None, row : row + n], oracle, eager, f"lengths {n}, {m}")
        row, key = row + n, key + m


def test_explain_imports_no_kernel():
    code = (
        "import sys, torch, onchip; q = torch.randn(1, 4, 2, 8); print(onchip.explain(q, q, q));"
        "bad = [m for m in sys.modules if m.startswith(('triton', 'onchip.kernels.cpu'))];"
        "assert not bad, bad"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "cpu_fused" in run.stdout
