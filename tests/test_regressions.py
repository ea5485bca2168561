"""Values that were once wrong: each stays as a test of its kind."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

import onchip
from onchip import dispatch, reference
from onchip.kernels import KERNELS
from onchip.paging.cache import PagedKVCache
from onchip.paging.pool import OutOfPages
from onchip.problem import Op
from tests import problems
from tests.tolerance import check_forward, check_gradients

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def _int(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [-0.5, 0.0])
@pytest.mark.parametrize("lengths", [(2, 2), (5, 9), (40, 40)])
def test_scales_of_zero_and_less_with_causal(dtype, scale, lengths):
    qkv = problems.qkv(seqlen_q=lengths[0], seqlen_k=lengths[1], kv_heads=4, dtype=dtype)
    check_forward(onchip.attention, *qkv, scale=scale, causal=True)
    check_gradients(onchip.attention, *qkv, scale=scale, causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seqlen_k", [1, 2, 7, 16, 33])
@pytest.mark.parametrize("features", [{}, {"causal": True}])
def test_rows_whose_scores_are_all_nan(dtype, seqlen_k, features):
    for kv_heads in (2, 4):
        q, k, v = problems.qkv(seqlen_k=seqlen_k, seqlen_q=1, kv_heads=kv_heads, dtype=dtype)
        nan = torch.full_like(q, torch.nan)
        assert bool(onchip.attention(nan, k, v, **features).isnan().all())
        nan = torch.full_like(k, torch.nan)
        out, lse = onchip.attention(q, nan, v, return_lse=True, **features)
        assert bool(out.isnan().all()) and bool(lse.isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_feature_in_channels_last_order(dtype):
    def channels_last(x):
        return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)

    q, k, v = problems.qkv(seqlen_q=9, seqlen_k=9, head_dim=1, head_dim_v=8, dtype=dtype)
    check_forward(onchip.attention, channels_last(q), channels_last(k), v)
    q, k, v = (channels_last(x) for x in problems.qkv(seqlen_k=7, head_dim=1, dtype=dtype))
    check_gradients(onchip.attention, q, k, v)


def test_forward_derivatives_are_refused_not_zero():
    q, k, v = problems.qkv()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: onchip.attention(q, k, v), (q,), (torch.ones_like(q),))


@pytest.mark.parametrize("features", [{"causal": True}, {"window": (1, 0)}])
def test_nan_in_the_gradient_of_the_lse_stays_with_keys_that_its_row_sees(features):
    q, k, v = (x.requires_grad_() for x in problems.qkv(1, 6, 6, 2, 2))
    _, lse = onchip.attention(q, k, v, return_lse=True, **features)
    dlse = torch.zeros_like(lse)
    dlse[0, 0, 2] = torch.nan
    (dk,) = torch.autograd.grad(lse, k, dlse)
    zeros = torch.zeros_like(q.detach())
    want = reference.attention_backward(*(x.detach() for x in (q, k, v)), zeros, dlse, **features)
    assert torch.equal(dk.isnan(), want.dk.isnan())


def test_a_sink_of_minus_infinity_has_no_gradient():
    sinks = torch.tensor([-torch.inf, 1.0], requires_grad=True)
    k = torch.zeros(1, 0, 2, 8)
    _, lse = onchip.attention(torch.randn(1, 3, 2, 8), k, k, sinks=sinks, return_lse=True)
    lse.sum().backward()
    assert sinks.grad.tolist() == [0.0, 3.0]


def test_float64_stays_float64_with_cache_scales():
    cache = torch.randn(1, 6, 2, 8, dtype=torch.float64)
    q = torch.randn(1, 1, 4, 8, dtype=torch.float64)
    scale = torch.tensor(0.3)
    call = {"cache_seqlens": _int(6), "k_scale": scale, "v_scale": scale}
    out = onchip.attention_with_kvcache(q, cache, cache, **call)
    keys = cache * scale.double()
    want, _ = reference.attention(q, keys, keys)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)


def test_small_scales_of_a_float16_store():
    keys = (torch.randn(8, 2, 8) * 1e-4).half()
    caches = [torch.zeros(2, 4, 2, 8, dtype=torch.float8_e4m3fn) for _ in range(2)]
    scale = keys.float().abs().max() / 448
    onchip.store_kvcache(keys, keys * 0, *caches, torch.arange(8), scale, torch.tensor(1e-8))
    stored = caches[0].float().flatten(0, 1) * scale
    assert (stored - keys.float()).norm() / keys.float().norm() < 0.03
    assert bool((caches[1].float() == 0).all())


def _cache_call(**changes):
    arguments = {
        "q": torch.randn(1, 1, 4, 8),
        "k_cache": torch.zeros(4, 4, 2, 8),
        "v_cache": torch.zeros(4, 4, 2, 8),
        "cache_seqlens": _int(2),
        "block_table": _int(0, 1)[None],
        "k": torch.randn(1, 1, 2, 8),
        "v": torch.randn(1, 1, 2, 8),
        **changes,
    }
    return arguments, lambda: onchip.attention_with_kvcache(**arguments)


@pytest.mark.parametrize("name", ["q", "k", "v", "k_cache", "v_cache", "rotary_cos", "k_scale"])
def test_a_gradient_asked_of_a_cache_call_appends_nothing(name):
    rotary = {"rotary_cos": torch.ones(9, 4), "rotary_sin": torch.zeros(9, 4)}
    arguments, call = _cache_call(**rotary, k_scale=torch.ones(()))
    with torch.no_grad():
        call()  # alike but for the grad mode
    arguments["k_cache"].zero_()
    arguments["v_cache"].zero_()
    arguments[name].requires_grad_()
    with pytest.raises(ValueError, match=f"^{name}: got a tensor that requires a gradient"):
        call()
    assert not bool(arguments["k_cache"].any()) and not bool(arguments["v_cache"].any())


def test_an_inference_tensor_is_refused_before_anything_is_stored():
    with torch.inference_mode():
        v_cache = torch.zeros(4, 4, 2, 8)
    arguments, call = _cache_call(v_cache=v_cache)
    with pytest.raises(ValueError, match="^v_cache: got an inference tensor"):
        call()
    assert not bool(arguments["k_cache"].any())


def test_a_fork_that_fails_leaks_no_page():
    with torch.inference_mode():
        cache = PagedKVCache(1, 4, 4, 2, 8, torch.float32)
    sequence = cache.add_sequence()
    cache.append(sequence, 6)
    with pytest.raises(RuntimeError):
        cache.fork(sequence)
    assert cache.pool.num_used == 2
    cache.check_integrity()


def test_the_default_dtype_changes_nothing():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            for features in ({}, {"causal": True}, {"window": (3, 1)}, {"softcap": 2.0}):
                qkv = problems.qkv(seqlen_q=300, seqlen_k=300, dtype=dtype)
                out, lse = onchip.attention(*qkv, return_lse=True, **features)
                assert out.dtype == dtype and lse.dtype == torch.float32
    finally:
        torch.set_default_dtype(before)
    onchip.attention(*problems.qkv(seqlen_q=300, seqlen_k=300, dtype=dtype), window=(3, 1))


def test_types_inside_a_window_are_checked_after_a_good_call():
    q, k, v = problems.qkv()
    onchip.attention(q, k, v, window=(2, 1))
    for window in ((2, True), (2.0, 1)):
        with pytest.raises(TypeError, match="^window: "):
            onchip.attention(q, k, v, window=window)


def test_states_of_other_dtypes():
    out, lse = torch.ones(1, 2, 2, 4), torch.zeros(1, 2, 2)
    with pytest.raises(TypeError, match="^outs: got dtype int64"):
        onchip.merge_states([out.long()], [lse])
    with pytest.raises(TypeError, match="^lses: got dtype int64"):
        onchip.merge_states([out], [lse.long()])
    with pytest.raises(TypeError, match="^outs: got dtype float64"):
        onchip.merge_states([out, out.double()], [lse, lse])
    with pytest.raises(ValueError, match="^outs: got shape"):
        onchip.merge_states([out[0, 0]], [lse])


def test_a_part_without_mass_counts_for_nothing():
    out, lse = torch.ones(1, 2, 2, 4), torch.zeros(1, 2, 2)
    nothing = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    merged, merged_lse = onchip.merge_states([out, nothing[0]], [lse, nothing[1]])
    assert torch.equal(merged, out) and torch.equal(merged_lse, lse)


def test_meta_tensors_have_shapes_and_no_kernel():
    q = torch.empty(1, 4, 2, 8, device="meta")
    assert onchip.explain(q, q, q).chosen is None
    assert onchip.attention(q, q, q).shape == q.shape


def test_rotated_queries_are_the_last_of_the_new_tokens():
    angles = torch.rand(12, 4)
    rotary = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "causal": True}
    k, v, q = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 2, 8), torch.randn(1, 3, 4, 8)
    _, call = _cache_call(q=q, k=k, v=v, **rotary)
    _, last = _cache_call(q=q[:, -1:], k=k, v=v, **rotary)
    torch.testing.assert_close(last(), call()[:, -1:])
    with pytest.raises(ValueError, match=r"^q: got S_q = 4; allowed: at most S_new = 3"):
        _cache_call(q=torch.randn(1, 4, 4, 8), k=k, v=v, **rotary)[1]()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("window", {"window": (2**63, 0)}),
        ("num_splits", {"num_splits": 2**63}),
        ("scale", {"scale": 10**400}),
        ("softcap", {"softcap": 1e-300}),
    ],
)
def test_numbers_beyond_every_range(name, options):
    with pytest.raises(ValueError, match=f"^{name}: got "):
        onchip.attention(*problems.qkv(), **options)


def test_sparse_tensors_are_refused():
    q, k, v = problems.qkv()
    onchip.attention(q, k, v)  # alike but for the layout
    with pytest.raises(TypeError, match="^k: got layout torch.sparse"):
        onchip.attention(q, k.to_sparse(), v)


def test_splits_that_no_kernel_makes_are_not_ignored():
    most = max(k.max_splits for k in KERNELS)
    with pytest.raises(onchip.NoKernelError, match="splits keys at most"):
        onchip.attention(*problems.qkv(), num_splits=most + 1)


def test_errors_can_be_pickled():
    q = torch.randn(1, 2, 2, 1100)
    with pytest.raises(onchip.NoKernelError) as caught:
        onchip.attention(q, q, q)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.rejected == caught.value.rejected
    assert pickle.loads(pickle.dumps(OutOfPages(3, 1))).wanted == 3


@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
def test_float8_caches_before_sm_89_are_refused_with_a_reason(arch):
    """Triton has no float8_e4m3fn there: it was a CompilationError."""
    q = torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16)
    k, v = torch.zeros(2, 2, 16, 2, 64, dtype=torch.float8_e4m3fn)
    table, lengths = _int(0, 1)[None], _int(20)
    more = {"block_table": table, "cache_seqlens": lengths, "causal": True}
    problem = onchip.explain(q, k, v, **more).problem
    for op, names in ((Op.FORWARD, ("decode", "portable")), (Op.STORE, ("portable",))):
        there = replace(problem, op=op, device="cuda", arch=arch)
        for name in names:
            assert f"float8 from sm_89 on, not on {arch}" in str(dispatch.rejections(there)[name])
        newer = dispatch.rejections(replace(there, arch="sm_89"))
        assert not set(names) & set(newer)
