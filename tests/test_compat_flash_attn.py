"""`onchip.compat`'s FlashAttention-2 and 3: signatures, values, in-place caches, errors.

Values are held against the oracle; conventions (shapes, LSE, tuples, positions) against the
formulas of the imitated libraries, spelled out here.
"""

from __future__ import annotations

import inspect
import re

import pytest
import torch

import onchip
from onchip import reference
from onchip.compat import flash_attn as fa2
from onchip.compat import flash_attn_3 as fa3
from tests import problems, tolerance
from tests.compat_cases import INF, spelled

SHARED = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
FP8 = "q_descale=None, k_descale=None, v_descale=None"
SIGNATURES = {
    fa2: {
        "flash_attn_func": f"q, k, v, {SHARED}",
        "flash_attn_qkvpacked_func": f"qkv, {SHARED}",
        "flash_attn_kvpacked_func": f"q, kv, {SHARED}",
        "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {SHARED}, block_table=None",
        "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {SHARED}",
        "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {SHARED}",
        "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, "
        "rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, "
        "block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False",
    },
    fa3: {
        "flash_attn_func": f"q, k, v, softmax_scale=None, causal=False, qv=None, {FP8}, "
        "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, "
        "deterministic=False, sm_margin=0, return_attn_probs=False",
        "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, seqused_q=None, seqused_k=None, "
        f"softmax_scale=None, causal=False, qv=None, {FP8}, window_size=(-1, -1), "
        "attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
        "sm_margin=0, return_attn_probs=False",
        "flash_attn_qkvpacked_func": f"qkv, softmax_scale=None, causal=False, {FP8}, "
        "window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, "
        "num_heads_q=None, sm_margin=0, return_attn_probs=False",
        "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, "
        "rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, "
        "cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
        f"max_seqlen_q=None, rotary_seqlens=None, {FP8}, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
        "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
        "return_softmax_lse=False",
        "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    },
}


@pytest.mark.parametrize("module", SIGNATURES, ids=["fa2", "fa3"])
def test_names_order_and_defaults(module):
    assert module.__all__ == list(SIGNATURES[module])
    for name, wanted in SIGNATURES[module].items():
        parameters = inspect.signature(getattr(module, name)).parameters.values()
        plain = [str(p.replace(annotation=p.empty)) for p in parameters]
        assert ", ".join(plain) == wanted, name
        assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def pair(call):
    """A FlashAttention function as one that returns (out, lse) for onchip's keywords.

    The LSE becomes onchip's: -inf where there is no key.
    """

    def attention(q, k, v, *, return_lse, **features):
        given = call(q, k, v, return_attn_probs=True, **spelled(features))
        return given[0], given[1].where(given[1] < INF, -INF)

    return attention


FEATURES = [n for n in problems.DENSE_FEATURES if n != "sinks"]


@pytest.mark.parametrize("name", FEATURES)
def test_fa2_dense(name):
    q, k, v = problems.qkv(seqlen_q=5, seqlen_k=5)
    features = problems.features(name, torch.Generator().manual_seed(1))
    if name == "alibi_batch":  # causal, whose LSE is FlashAttention-2's own
        features["causal"] = False
    tolerance.check_forward(pair(fa2.flash_attn_func), q, k, v, **features)
    tolerance.check_gradients(pair(fa2.flash_attn_func), q, k, v, **features)


@pytest.mark.parametrize("name", [n for n in FEATURES if "alibi" not in n])
def test_fa3_dense(name):
    q, k, v = problems.qkv(dtype=torch.bfloat16)
    features = problems.features(name, torch.Generator())
    tolerance.check_forward(pair(fa3.flash_attn_func), q, k, v, **features)
    tolerance.check_gradients(pair(fa3.flash_attn_func), q, k, v, **features)


def test_positional_arguments_mean_what_they_mean_there():
    q, k, v = problems.qkv()
    slopes = torch.rand(4)
    out, _, _ = fa2.flash_attn_func(q, k, v, 0.0, 0.3, True, (3, -1), 2.0, slopes, True, True)
    want = {"scale": 0.3, "causal": True, "window": (3, -1), "softcap": 2.0}
    assert torch.equal(out, onchip.attention(q, k, v, alibi_slopes=slopes, **want))
    out, _ = fa3.flash_attn_func(
        q, k, v, 0.3, True, None, None, None, None, (3, -1), 0, 2.0, 1, None, True, 0, True
    )
    assert torch.equal(out, onchip.attention(q, k, v, **want))


def test_return_values_dense():
    q, k, v = problems.qkv()  # (2, 5, 4, 8)
    for module, extra in ((fa2, 1), (fa3, 0)):
        out = module.flash_attn_func(q, k, v)
        assert out.shape == q.shape
        given = module.flash_attn_func(q, k, v, return_attn_probs=True)
        assert isinstance(given, tuple) and len(given) == 2 + extra
        assert given[1].shape == (2, 4, 5) and given[1].dtype == torch.float32
        assert torch.equal(given[0], out)
    assert fa2.flash_attn_func(q, k, v, return_attn_probs=True)[2].shape == (0,)


def test_rows_without_keys_follow_the_library():
    q, k, v = problems.qkv(seqlen_q=4, seqlen_k=2)
    out, lse, _ = fa2.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert bool((lse[:, :, :2] == INF).all()) and bool(lse[:, :, 2:].isfinite().all())
    assert not out[:, :2].any()
    _, lse = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert bool((lse[:, :, :2] == -INF).all())
    packed, kp, vp, lengths = problems.packed([2, 3], [0, 3])
    _, lse, _ = fa2.flash_attn_varlen_func(packed, kp, vp, **lengths, return_attn_probs=True)
    assert bool((lse[:, :2] == INF).all()) and bool(lse[:, 2:].isfinite().all())
    cache = torch.zeros(2, 3, 2, 8)
    given = fa2.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=0, return_softmax_lse=True)
    assert bool((given[1] == INF).all())


def test_nan_stays_nan():
    q, k, v = problems.qkv()
    q[0, 1] = torch.nan
    _, lse, _ = fa2.flash_attn_func(q, k, v, return_attn_probs=True)
    assert bool(lse[0, :, 1].isnan().all()) and int(lse.isnan().sum()) == 4


def column_biased_lse(q, k, slopes):
    """The LSE of FlashAttention-2's causal kernel with ALiBi: the bias is slope * j."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1).double()  # (S_k, H, D)
    s = torch.einsum("ihd,jhd->hij", q.double() * q.shape[-1] ** -0.5, k)
    i, j = torch.arange(len(q))[:, None], torch.arange(len(k))
    s = s + slopes.double()[:, None, None] * j
    return s.masked_fill(j > i + len(k) - len(q), -INF).logsumexp(-1)


@pytest.mark.parametrize("batched", [False, True])
def test_fa2_lse_of_causal_alibi(batched):
    q, k, v = problems.qkv(seqlen_q=3, seqlen_k=6)
    slopes = torch.rand(2, 4) if batched else torch.rand(4)
    per_row = slopes.expand(2, 4)
    want = torch.stack([column_biased_lse(q[b], k[b], per_row[b]) for b in range(2)])
    given = {"causal": True, "alibi_slopes": slopes}
    out, lse, _ = fa2.flash_attn_func(q, k, v, **given, return_attn_probs=True)
    torch.testing.assert_close(lse.double(), want, atol=2e-6, rtol=2e-6)
    assert torch.equal(out, onchip.attention(q, k, v, **given))
    _, lse = fa2.flash_attn_with_kvcache(q, k, v, **given, return_softmax_lse=True)
    torch.testing.assert_close(lse.double(), want, atol=2e-6, rtol=2e-6)
    # A window that hides keys takes the other kernel, whose bias has the row in it.
    given |= {"window_size": (2, 0)}
    _, lse, _ = fa2.flash_attn_func(q, k, v, **given, return_attn_probs=True)
    _, plain = reference.attention(q, k, v, causal=True, window=(2, 0), alibi_slopes=slopes)
    torch.testing.assert_close(lse.double(), plain, atol=2e-6, rtol=2e-6)


def test_fa2_lse_of_causal_alibi_packed_and_padded_left():
    q, k, v, lengths = problems.packed([2, 0, 3], [4, 2, 5])
    slopes = torch.rand(3, 4)
    given = {"causal": True, "return_attn_probs": True}
    _, lse, _ = fa2.flash_attn_varlen_func(q, k, v, **lengths, alibi_slopes=slopes, **given)
    parts = [column_biased_lse(q[:2], k[:4], slopes[0]), column_biased_lse(q[2:], k[6:], slopes[2])]
    torch.testing.assert_close(lse.double(), torch.cat(parts, 1), atol=2e-6, rtol=2e-6)
    _, lse, _ = fa2.flash_attn_varlen_func(q, k, v, **lengths, alibi_slopes=slopes[0], **given)
    torch.testing.assert_close(lse[:, :2].double(), parts[0], atol=2e-6, rtol=2e-6)
    q, k, v = problems.qkv(batch=1, seqlen_q=2, seqlen_k=6)
    _, lse = fa2.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=5, cache_leftpad=torch.tensor([2]).int(), alibi_slopes=slopes[0],
        causal=True, return_softmax_lse=True,
    )  # fmt: skip
    want = column_biased_lse(q[0], k[0, 2:5], slopes[0])
    torch.testing.assert_close(lse[0].double(), want, atol=2e-6, rtol=2e-6)


def varlen_pair(module):
    def call(q, k, v, *, return_lse, **features):
        given = module.flash_attn_varlen_func(q, k, v, return_attn_probs=True, **spelled(features))
        return given[0], given[1].where(given[1] < INF, -INF)

    return call


@pytest.mark.parametrize("module", [fa2, fa3], ids=["fa2", "fa3"])
def test_varlen(module):
    q, k, v, lengths = problems.packed([3, 1, 0, 4], [5, 0, 2, 4])
    features = {"causal": True, "window": (3, 0), "softcap": 3.0}
    out, lse = varlen_pair(module)(q, k, v, return_lse=True, **lengths, **features)
    wanted = {n: x for n, x in lengths.items() if n.startswith("cu")} | features
    oracle, oracle_lse = reference.attention_varlen(q, k, v, **wanted)
    tolerance.assert_close_to_oracle(out, oracle, oracle, "out", ulps=16)
    tolerance.assert_close_to_oracle(lse, oracle_lse, oracle_lse, "lse", ulps=16)
    assert lse.shape == (4, 8) and lse.dtype == torch.float32
    as_tensors = {n: torch.tensor(x) if isinstance(x, int) else x for n, x in lengths.items()}
    again = module.flash_attn_varlen_func(q, k, v, **as_tensors, **spelled(features))
    assert torch.equal(again, out)


def test_varlen_over_pages():
    k_cache, v_cache, table, seqlens = problems.paged([5, 3], 4)
    q, lengths = torch.randn(4, 4, 8), problems.offsets([3, 1])
    out, lse, _ = fa2.flash_attn_varlen_func(
        q, k_cache, v_cache, lengths, problems.offsets([5, 3]), 3, 5,
        causal=True, return_attn_probs=True, block_table=table,
    )  # fmt: skip
    oracle, oracle_lse = reference.attention_varlen(
        q, k_cache, v_cache, cu_seqlens_q=lengths, block_table=table, seqused_k=seqlens, causal=True
    )
    tolerance.assert_close_to_oracle(out, oracle, oracle, "out", ulps=16)
    tolerance.assert_close_to_oracle(lse, oracle_lse, oracle_lse, "lse", ulps=16)


def test_fa3_varlen_seqused_k():
    q, k, v, lengths = problems.packed([2, 2], [4, 5])
    used = torch.tensor([3, 1], dtype=torch.int32)
    out = fa3.flash_attn_varlen_func(q, k, v, **lengths, seqused_k=used)
    cu = {n: x for n, x in lengths.items() if n.startswith("cu")}
    oracle, _ = reference.attention_varlen(q, k, v, **cu, seqused_k=used)
    tolerance.assert_close_to_oracle(out, oracle, oracle, "out", ulps=16)


def test_packed_forms_and_their_gradients():
    qkv = torch.randn(2, 5, 3, 4, 8, requires_grad=True)
    want = fa2.flash_attn_func(*qkv.unbind(2), causal=True)
    (grad,) = torch.autograd.grad(want.sum() + want.square().sum(), qkv)
    kv = qkv[:, :, 1:]
    flat = qkv.flatten(0, 1)
    cu = problems.offsets([5, 5])
    outs = [
        fa2.flash_attn_qkvpacked_func(qkv, causal=True),
        fa2.flash_attn_kvpacked_func(qkv[:, :, 0], kv, causal=True),
        fa2.flash_attn_varlen_qkvpacked_func(flat, cu, 5, causal=True).view(2, 5, 4, 8),
        fa2.flash_attn_varlen_kvpacked_func(
            flat[:, 0], flat[:, 1:], cu, cu, 5, 5, causal=True
        ).view(2, 5, 4, 8),
        fa3.flash_attn_qkvpacked_func(qkv, causal=True),
        fa3.flash_attn_qkvpacked_func(qkv.flatten(2, 3), causal=True, num_heads_q=4),
    ]
    for out in outs:
        torch.testing.assert_close(out, want)
        (other,) = torch.autograd.grad(out.sum() + out.square().sum(), qkv)
        torch.testing.assert_close(other, grad)
    gqa = torch.randn(2, 5, 8, 8)
    out = fa3.flash_attn_qkvpacked_func(gqa, num_heads_q=4)
    assert torch.equal(out, fa3.flash_attn_func(gqa[:, :, :4], gqa[:, :, 4:6], gqa[:, :, 6:]))
    given = fa2.flash_attn_varlen_qkvpacked_func(flat, cu, 5, return_attn_probs=True)
    assert [tuple(x.shape) for x in given] == [(10, 4, 8), (4, 10), (0,)]


def test_fa3_combine():
    q, k, v = problems.qkv()
    want, want_lse = reference.attention(q, k, v)
    parts = [
        onchip.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(3), slice(3, 7))
    ]
    outs = torch.stack([out for out, _ in parts])
    lses = torch.stack([lse.transpose(1, 2) for _, lse in parts])
    out, lse = fa3.flash_attn_combine(outs, lses)
    torch.testing.assert_close(out.double(), want, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse.double(), want_lse.transpose(1, 2), atol=2e-6, rtol=2e-6)
    assert fa3.flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    given = torch.empty_like(out, dtype=torch.float16)
    assert fa3.flash_attn_combine(outs, lses, out=given)[0] is given
    assert torch.equal(given, out.half())
    with pytest.raises(ValueError, match="^out:"):
        fa3.flash_attn_combine(outs, lses, out=given[:1])


@pytest.mark.parametrize("module", [fa2, fa3], ids=["fa2", "fa3"])
def test_deterministic_gradients(module):
    q, k, v = (x.requires_grad_() for x in problems.qkv(batch=3, seqlen_q=40, seqlen_k=50))
    runs = [
        torch.autograd.grad(
            module.flash_attn_func(q, k, v, causal=True, deterministic=True).square().sum(),
            (q, k, v),
        )
        for _ in range(3)
    ]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_hints_change_nothing():
    q, k, v = problems.qkv()
    want = fa3.flash_attn_func(q, k, v)
    assert torch.equal(fa3.flash_attn_func(q, k, v, pack_gqa=True, sm_margin=8), want)
    given = {"pack_gqa": False, "sm_margin": 8, "max_seqlen_q": 5}
    hinted = fa3.flash_attn_with_kvcache(q, k, v, scheduler_metadata=torch.zeros(4), **given)
    assert torch.equal(hinted, fa3.flash_attn_with_kvcache(q, k, v))


ONE = torch.ones(2, 2)
REFUSED = [
    ("flash_attn_func", {"qv": ONE}),
    ("flash_attn_func", {"attention_chunk": 4}),
    ("flash_attn_varlen_func", {"qv": ONE}),
    ("flash_attn_varlen_func", {"attention_chunk": 4}),
    ("flash_attn_varlen_func", {"seqused_q": ONE}),
    ("flash_attn_qkvpacked_func", {"attention_chunk": 4}),
    ("flash_attn_with_kvcache", {"qv": ONE}),
    ("flash_attn_with_kvcache", {"q_descale": ONE}),
    ("flash_attn_with_kvcache", {"attention_chunk": 4}),
    ("flash_attn_with_kvcache", {"cu_seqlens_k_new": ONE}),
    ("flash_attn_with_kvcache", {"rotary_seqlens": ONE}),
]


def three(function: str):
    """Positional tensors of FlashAttention-3's functions."""
    q, k, v = problems.qkv()
    if "varlen" in function:
        packed = problems.packed([2, 1], [2, 1])
        return (*packed[:3], *packed[3].values())
    return (torch.randn(2, 5, 3, 4, 8),) if "qkv" in function else (q, k, v)


@pytest.mark.parametrize("function, given", REFUSED)
def test_what_is_not_supported_raises(function, given):
    (name,) = given
    with pytest.raises(NotImplementedError, match=f"^{name}: got .*; allowed: "):
        getattr(fa3, function)(*three(function), **given)


def test_the_table_says_what_raises():
    """Each parameter that docs/compat.md says raises is one of those that were seen to raise."""
    seen = {(function, name) for function, given in REFUSED for name in given}
    says = set()
    for function in fa3.__all__:
        for name in inspect.signature(getattr(fa3, function)).parameters:
            status = fa3.STATUS.get(f"{function}.{name}", fa3.STATUS.get(name, ("supported", "")))
            if status[0] == "raises":
                says.add((function, name))
    assert says == seen
    assert "raises" not in {status for status, _ in fa2.STATUS.values()}


def test_errors_name_the_library_s_arguments():
    q, k, v = problems.qkv()
    refused = [
        (fa2.flash_attn_func, (q, k, v), {"window_size": (-2, 0)}, "window_size"),
        (fa2.flash_attn_func, (q, k, v), {"softmax_scale": float("nan")}, "softmax_scale"),
        (fa3.flash_attn_func, (q, k, v), {"window_size": (None, None)}, "window_size"),
        (fa2.flash_attn_qkvpacked_func, (q,), {}, "qkv"),
        (fa2.flash_attn_kvpacked_func, (q, torch.randn(2, 7, 3, 2, 8)), {}, "kv"),
        (fa3.flash_attn_qkvpacked_func, (q,), {"num_heads_q": 3}, "num_heads_q"),
        (
            fa3.flash_attn_with_kvcache,
            (q, k, v),
            {"page_table": torch.zeros(3, 1).int()},
            "page_table",
        ),
        (fa2.flash_attn_with_kvcache, (q, k, v), {"cache_seqlens": 8}, "cache_seqlens"),
        (fa2.flash_attn_with_kvcache, (q, k, v), {"cache_seqlens": 1.5}, "cache_seqlens"),
    ]
    for call, tensors, given, name in refused:
        with pytest.raises((ValueError, TypeError), match=f"^{name}: got .*; allowed: "):
            call(*tensors, **given)


def test_dropout_is_dropped_out_or_refused():
    q, k, v = problems.qkv(seqlen_q=16, seqlen_k=32)
    with pytest.raises(NotImplementedError, match="return_attn_probs"):
        fa2.flash_attn_func(q, k, v, 0.5, return_attn_probs=True)
    with pytest.raises(ValueError, match="dropout_p"):
        fa2.flash_attn_func(q, k, v, 1.5)
    ones = torch.ones_like(v)
    try:
        torch.manual_seed(3)
        out = fa2.flash_attn_func(q, k, ones, 0.5)
    except onchip.NoKernelError as error:
        assert re.search("dropout", str(error))
        return
    assert out.std() > 0.05 and abs(out.mean() - 1) < 0.2
    torch.manual_seed(3)
    assert torch.equal(fa2.flash_attn_func(q, k, ones, 0.5), out)
