"""Bad input: each error names the argument, what came, what is allowed; nothing half-written."""

from __future__ import annotations

import math

import pytest
import torch

import onchip
from onchip import env
from tests import problems

Q, K, V = problems.qkv()
F8 = torch.float8_e4m3fn

BAD_DENSE = [
    ("q", TypeError, (None, K, V), {}),
    ("k", TypeError, (Q, [1.0], V), {}),
    ("q", ValueError, (Q[0], K, V), {}),
    ("k", ValueError, (Q, K[0], V), {}),
    ("v", ValueError, (Q, K, V[None]), {}),
    ("q", TypeError, (Q.int(), K, V), {}),
    ("q", TypeError, (Q.to(F8), K.to(F8), V.to(F8)), {}),
    ("k", TypeError, (Q, K.double(), V), {}),
    ("v", TypeError, (Q, K, V.half()), {}),
    ("k", ValueError, (Q, K[:1], V[:1]), {}),
    ("v", ValueError, (Q, K, V[:, :3]), {}),
    ("k", ValueError, (Q[:, :, :3], K, V), {}),
    ("k", ValueError, (Q, K[:, :, :0], V[:, :, :0]), {}),
    ("k", ValueError, (Q, K[..., :4], V), {}),
    ("q", ValueError, (Q[..., :0], K[..., :0], V), {}),
    ("v", ValueError, (Q, K, V[..., :0]), {}),
    ("k", ValueError, (Q, K.to("meta"), V.to("meta")), {}),
    ("causal", TypeError, (Q, K, V), {"causal": 1}),
    ("causal", TypeError, (Q, K, V), {"causal": None}),
    ("window", ValueError, (Q, K, V), {"window": (-2, 0)}),
    ("window", TypeError, (Q, K, V), {"window": 5}),
    ("window", TypeError, (Q, K, V), {"window": (None, None)}),
    ("window", TypeError, (Q, K, V), {"window": (1.0, 2)}),
    ("window", TypeError, (Q, K, V), {"window": (1, 2, 3)}),
    ("scale", ValueError, (Q, K, V), {"scale": math.nan}),
    ("scale", ValueError, (Q, K, V), {"scale": math.inf}),
    ("scale", TypeError, (Q, K, V), {"scale": "1"}),
    ("softcap", ValueError, (Q, K, V), {"softcap": -1.0}),
    ("softcap", ValueError, (Q, K, V), {"softcap": math.nan}),
    ("softcap", TypeError, (Q, K, V), {"softcap": None}),
    ("alibi_slopes", ValueError, (Q, K, V), {"alibi_slopes": torch.rand(3)}),
    ("alibi_slopes", ValueError, (Q, K, V), {"alibi_slopes": torch.rand(3, 4)}),
    ("alibi_slopes", TypeError, (Q, K, V), {"alibi_slopes": torch.rand(4).half()}),
    ("alibi_slopes", TypeError, (Q, K, V), {"alibi_slopes": [0.1] * 4}),
    ("alibi_slopes", ValueError, (Q, K, V), {"alibi_slopes": torch.rand(4).requires_grad_()}),
    ("sinks", ValueError, (Q, K, V), {"sinks": torch.rand(2)}),
    ("sinks", TypeError, (Q, K, V), {"sinks": torch.zeros(4, dtype=torch.int64)}),
    ("num_splits", ValueError, (Q, K, V), {"num_splits": 0}),
    ("num_splits", TypeError, (Q, K, V), {"num_splits": 1.5}),
    ("kernel", ValueError, (Q, K, V), {"kernel": "warp"}),
    ("kernel", ValueError, (Q, K, V), {"kernel": 3}),
    ("deterministic", TypeError, (Q, K, V), {"deterministic": "no"}),
    ("return_lse", TypeError, (Q, K, V), {"return_lse": 1}),
]


@pytest.mark.parametrize(("name", "error", "qkv", "options"), BAD_DENSE)
def test_dense_arguments(name, error, qkv, options):
    for _ in range(2):  # an error is not remembered as a success
        with pytest.raises(error, match=rf"^{name}: got .*; allowed: .*\. .+"):
            onchip.attention(*qkv, **options)
    with pytest.raises(error, match=f"^{name}: "):
        onchip.explain(*qkv, **options)


def test_an_argument_alike_but_of_another_type_is_checked_too():
    onchip.attention(Q, K, V, causal=True, num_splits=1)
    with pytest.raises(TypeError, match="causal"):
        onchip.attention(Q, K, V, causal=1, num_splits=1)
    with pytest.raises(TypeError, match="num_splits"):
        onchip.attention(Q, K, V, causal=True, num_splits=True)
    with pytest.raises(TypeError, match="window"):
        onchip.attention(Q, K, V, window=(False, True))


def test_a_window_may_be_a_list():
    want = onchip.attention(Q, K, V, window=(1, 1))
    assert torch.equal(onchip.attention(Q, K, V, window=[1, 1]), want)


def _varlen(**changes):
    q, k, v, lengths = problems.packed([3, 2], [6, 5])
    arguments = {"q": q, "k": k, "v": v, **lengths, **changes}
    return onchip.attention_varlen(**arguments)


def _int(*values):
    return torch.tensor(values, dtype=torch.int32)


BAD_VARLEN = [
    ("cu_seqlens_q", TypeError, {"cu_seqlens_q": _int(0, 3, 5).long()}),
    ("cu_seqlens_q", TypeError, {"cu_seqlens_q": [0, 3, 5]}),
    ("cu_seqlens_q", ValueError, {"cu_seqlens_q": _int(1, 3, 5)}),
    ("cu_seqlens_q", ValueError, {"cu_seqlens_q": _int(0, 4, 3)}),
    ("cu_seqlens_q", ValueError, {"cu_seqlens_q": _int(0, 3, 4)}),
    ("cu_seqlens_q", ValueError, {"cu_seqlens_q": _int(0, 3, 6)}),
    ("cu_seqlens_q", ValueError, {"cu_seqlens_q": _int()}),
    ("cu_seqlens_q", ValueError, {"cu_seqlens_q": _int(0, 3, 5)[None]}),
    ("cu_seqlens_k", ValueError, {"cu_seqlens_k": _int(0, 6)}),
    ("cu_seqlens_k", ValueError, {"cu_seqlens_k": _int(0, 6, 12)}),
    ("cu_seqlens_k", ValueError, {"cu_seqlens_k": _int(0, 6, 2)}),
    ("cu_seqlens_k", TypeError, {"cu_seqlens_k": None}),
    ("max_seqlen_q", ValueError, {"max_seqlen_q": 2}),
    ("max_seqlen_q", ValueError, {"max_seqlen_q": -1}),
    ("max_seqlen_q", TypeError, {"max_seqlen_q": 3.0}),
    ("max_seqlen_k", ValueError, {"max_seqlen_k": 5}),
    ("seqused_k", ValueError, {"seqused_k": _int(7, 1)}),
    ("seqused_k", ValueError, {"seqused_k": _int(-1, 1)}),
    ("seqused_k", ValueError, {"seqused_k": _int(1)}),
    ("q", ValueError, {"q": torch.zeros(1, 5, 4, 8)}),
    ("block_table", TypeError, {"block_table": torch.zeros(2, 2), "k": torch.zeros(3, 4, 2, 8),
                                "v": torch.zeros(3, 4, 2, 8)}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "error", "changes"), BAD_VARLEN)
def test_varlen_arguments(name, error, changes):
    _varlen()
    with pytest.raises(error, match=f"^{name}: got .*; allowed: "):
        _varlen(**changes)


def _cache_call(**changes):
    k_cache, v_cache, table, used = problems.paged([5, 2], 4)
    q, k, v = problems.qkv(seqlen_q=1, seqlen_k=1)
    arguments = {
        "q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": used,
        "block_table": table, "k": k, "v": v, "causal": True, **changes,
    }  # fmt: skip
    before = arguments["k_cache"].clone(), arguments["v_cache"].clone()
    return arguments, before


BAD_CACHE = [
    ("block_table", TypeError, {"block_table": torch.zeros(2, 4)}),
    ("block_table", TypeError, {"block_table": torch.zeros(2, 4, dtype=torch.int64)}),
    ("block_table", ValueError, {"block_table": _int(0, 1)}),
    ("block_table", ValueError, {"block_table": _int(0, -1, 0, 0, 1, 0, 0, 0).view(2, 4)}),
    ("block_table", ValueError, {"block_table": _int(0, 99, 0, 0, 1, 0, 0, 0).view(2, 4)}),
    ("block_table", ValueError, {"block_table": _int(0, 1, 0, 0, 1, 0, 0, 0).view(2, 4)}),
    ("cache_seqlens", ValueError, {"cache_seqlens": _int(16, 2)}),
    ("cache_seqlens", ValueError, {"cache_seqlens": _int(-1, 2)}),
    ("cache_seqlens", TypeError, {"cache_seqlens": torch.tensor([5, 2])}),
    ("cache_seqlens", TypeError, {"cache_seqlens": 5}),
    ("v", TypeError, {"v": None, "k": torch.zeros(2, 1, 2, 8)}),
    ("k", TypeError, {"k": None}),
    ("slot_mapping", TypeError, {"k": None, "v": None, "slot_mapping": _int(0, 1)}),
    ("slot_mapping", ValueError, {"slot_mapping": _int(0, 1000)}),
    ("slot_mapping", ValueError, {"slot_mapping": _int(-2, 0)}),
    ("slot_mapping", ValueError, {"slot_mapping": _int(0)}),
    ("k", ValueError, {"k": torch.zeros(2, 1, 4, 8), "v": torch.zeros(2, 1, 4, 8)}),
    ("k", ValueError, {"k": torch.zeros(2, 1, 4, 8), "v": torch.zeros(2, 1, 2, 8)}),
    ("k", ValueError, {"k": torch.zeros(3, 1, 2, 8), "v": torch.zeros(2, 1, 2, 8)}),
    ("v", ValueError, {"k": torch.zeros(2, 1, 2, 8), "v": torch.zeros(3, 1, 2, 8)}),
    ("rotary_cos", TypeError, {"rotary_cos": torch.zeros(9, 4)}),
    ("rotary_interleaved", ValueError, {"rotary_interleaved": True}),
    ("rotary_cos", ValueError, {"rotary_cos": torch.zeros(9, 5), "rotary_sin": torch.zeros(9, 5)}),
    ("rotary_cos", ValueError, {"rotary_cos": torch.zeros(5, 4), "rotary_sin": torch.zeros(5, 4)}),
    ("cache_batch_idx", ValueError, {"cache_batch_idx": _int(0, 1)}),
    ("cache_leftpad", ValueError, {"cache_leftpad": _int(7, 0)}),
    ("k_scale", TypeError, {"k_scale": 0.5}),
    ("k_scale", ValueError, {"k_scale": torch.ones(3)}),
    ("kernel", ValueError, {"kernel": "hoper"}),
    ("q", ValueError, {"q": torch.zeros(2, 1, 4, 8, requires_grad=True)}),
]


@pytest.mark.parametrize(("name", "error", "changes"), BAD_CACHE)
def test_cache_arguments_and_nothing_is_appended(name, error, changes):
    arguments, before = _cache_call(**changes)
    with pytest.raises(error, match=f"^{name}.*: got .*; allowed: "):
        onchip.attention_with_kvcache(**arguments)
    for cache, kept in zip(("k_cache", "v_cache"), before, strict=True):
        torch.testing.assert_close(arguments[cache], kept, rtol=0, atol=0, equal_nan=True)


def test_sequences_in_one_row_of_a_cache_append_nothing():
    cache = torch.zeros(2, 16, 2, 8)
    q, k, v = problems.qkv(seqlen_q=1, seqlen_k=1)
    for used in ((5, 2), (5, 5)):
        with pytest.raises(ValueError, match="cache_batch_idx: got place .* sequence [01]"):
            onchip.attention_with_kvcache(
                q, cache, cache.clone(), cache_seqlens=_int(*used), k=k, v=v,
                cache_batch_idx=_int(0, 0),
            )  # fmt: skip
    assert not cache.any()
    shared = torch.randn(4, 8, 2, 8)  # a page that both read is no fault
    table = _int(0, 1, 0, 2).view(2, 2)
    onchip.attention_with_kvcache(
        q, shared, shared.clone(), cache_seqlens=_int(8, 10), block_table=table, k=k, v=v
    )


def test_a_kernel_that_does_not_take_it_appends_nothing():
    arguments, before = _cache_call(kernel="cpu_fused")
    with pytest.raises(onchip.NoKernelError, match="cpu_fused"):
        onchip.attention_with_kvcache(**arguments)
    torch.testing.assert_close(arguments["k_cache"], before[0], rtol=0, atol=0, equal_nan=True)


def test_a_dense_cache_of_another_batch():
    q = torch.zeros(2, 1, 4, 8)
    cache = torch.zeros(3, 6, 2, 8)
    with pytest.raises(ValueError, match="^k_cache: .*cache_batch_idx"):
        onchip.attention_with_kvcache(q, cache, cache, cache_seqlens=_int(1, 1))
    with pytest.raises(ValueError, match="^cache_batch_idx: got 3 for sequence 1"):
        onchip.attention_with_kvcache(
            q, cache, cache, cache_seqlens=_int(1, 1), cache_batch_idx=_int(0, 3)
        )


BAD_STORE = [
    ("slot_mapping", ValueError, {"slot_mapping": torch.tensor([0, 12])}),
    ("slot_mapping", ValueError, {"slot_mapping": torch.tensor([0, -2])}),
    ("slot_mapping", TypeError, {"slot_mapping": torch.tensor([0.0, 1.0])}),
    ("slot_mapping", ValueError, {"slot_mapping": torch.tensor([0])}),
    ("k", ValueError, {"k": torch.zeros(2, 1, 8), "v": torch.zeros(2, 1, 8)}),
    ("v", ValueError, {"v": torch.zeros(3, 2, 8)}),
    ("v", TypeError, {"v": torch.zeros(2, 2, 8).half()}),
    ("k_cache", TypeError, {"k_cache": torch.zeros(3, 4, 2, 8).half()}),
    ("v_cache", ValueError, {"v_cache": torch.zeros(2, 4, 2, 8)}),
    ("k_cache", ValueError, {"k_cache": torch.zeros(3, 4, 8, 2).transpose(2, 3)}),
]


@pytest.mark.parametrize(("name", "error", "changes"), BAD_STORE)
def test_store_arguments_and_nothing_is_stored(name, error, changes):
    arguments = {
        "k": torch.ones(2, 2, 8), "v": torch.ones(2, 2, 8), "k_cache": torch.zeros(3, 4, 2, 8),
        "v_cache": torch.zeros(3, 4, 2, 8), "slot_mapping": torch.tensor([0, 1]), **changes,
    }  # fmt: skip
    with pytest.raises(error, match=f"^{name}: got .*; allowed: "):
        onchip.store_kvcache(**arguments)
    assert bool((arguments["k_cache"] == 0).all()) and bool((arguments["v_cache"] == 0).all())


BAD_STATES = [
    ("outs", TypeError, [], []),
    ("outs", TypeError, None, None),
    ("lses", ValueError, [Q, Q], [torch.zeros(2, 4, 5)]),
    ("lses", ValueError, [Q], [torch.zeros(2, 5, 4)]),
    ("outs", ValueError, [Q, Q[:1]], [torch.zeros(2, 4, 5)] * 2),
]


@pytest.mark.parametrize(("name", "error", "outs", "lses"), BAD_STATES)
def test_states(name, error, outs, lses):
    with pytest.raises(error, match=f"^{name}: got .*; allowed: "):
        onchip.merge_states(outs, lses)


def test_no_kernel_error_lists_every_kernel_with_its_reasons():
    q = torch.randn(1, 3, 2, 1100)
    with pytest.raises(onchip.NoKernelError) as caught:
        onchip.attention(q, q, q, softcap=1.0)
    text = str(caught.value)
    assert "cpu_fused: takes D up to 1024, not 1100" in text and "has no softcap" in text
    assert "cpu: takes D up to 1024, not 1100" in text
    assert isinstance(caught.value, NotImplementedError)
    explained = onchip.explain(q, q, q, softcap=1.0)
    assert explained.chosen is None and explained.rejected == caught.value.rejected


def test_a_forced_kernel_never_falls_back():
    with pytest.raises(onchip.NoKernelError, match="kernel='cpu_fused' does not take"):
        onchip.attention(Q, K, V, softcap=1.0, kernel="cpu_fused")
    forced = onchip.attention(Q, K, V, kernel="cpu")
    torch.testing.assert_close(forced, onchip.attention(Q, K, V))


def test_a_backward_that_no_kernel_takes_is_refused_before_the_forward():
    k_cache, v_cache, table, used = problems.paged([5, 2], 4)
    q = torch.randn(2, 4, 8, requires_grad=True)
    with pytest.raises(onchip.NoKernelError, match="backward.*paged"):
        onchip.attention_varlen(
            q, k_cache, v_cache, cu_seqlens_q=_int(0, 1, 2), cu_seqlens_k=None,
            max_seqlen_q=1, max_seqlen_k=8, block_table=table, seqused_k=used,
        )  # fmt: skip


def test_explain_agrees_with_the_call():
    explained = onchip.explain(Q, K, V, causal=True)
    assert explained.chosen == "cpu" and "cpu_fused" in explained.rejected
    assert explained.flops == 2 * 4 * 2 * (8 + 8) * sum(i + 3 for i in range(5))
    assert explained.backward is None
    trained = onchip.explain(Q.clone().requires_grad_(), K, V)
    assert trained.backward is not None and trained.backward.chosen == "cpu"
    words = str(trained)
    assert "rejected  cpu_fused" in words and "copies    none" in words
    assert trained.to_dict()["backward"]["problem"]["op"] == "backward"


def test_explain_of_a_cache_call_writes_nothing():
    arguments, before = _cache_call()
    explained = onchip.explain(**arguments)
    assert explained.chosen == "cpu" and explained.upper_bound
    torch.testing.assert_close(arguments["k_cache"], before[0], rtol=0, atol=0, equal_nan=True)


def test_explain_refuses_an_unknown_argument():
    with pytest.raises(TypeError, match="dropout"):
        onchip.explain(Q, K, V, dropout=0.1)


def test_environment_variables(monkeypatch):
    monkeypatch.setenv("ONCHIP_CHECK", "1")
    assert env.CHECK.get() is True
    monkeypatch.setenv("ONCHIP_CHECK", "yes")
    with pytest.raises(ValueError, match="ONCHIP_CHECK: got 'yes'; allowed: 0 or 1"):
        env.CHECK.get()
    assert all(v.name.startswith("ONCHIP_") and v.doc for v in env.VARIABLES)
