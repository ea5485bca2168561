"""The oracle against formulas written another way, autograd and central differences."""

from __future__ import annotations

import math

import pytest
import torch

from onchip import reference
from tests import problems
from tests.tolerance import NAMES, assert_close_to_oracle, check_forward, check_gradients

FEATURES = [*problems.DENSE_FEATURES, "everything"]
SHAPES = [(5, 7), (7, 5), (1, 6), (4, 1)]


def features_of(name: str) -> dict:
    generator = torch.Generator().manual_seed(3)
    if name != "everything":
        return problems.features(name, generator)
    given = problems.features("alibi_batch", generator) | problems.features("sinks", generator)
    return given | {"softcap": 1.5, "window": (3, -1), "scale": 0.7}


def inputs_of(seqlen_q: int, seqlen_k: int, **options):
    return problems.qkv(
        seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim_v=6, dtype=torch.float64, **options
    )


def one_row(q, k, v, b, h, i, f):
    """out and LSE of one query, with Python's math, key by key in contract.md's order."""
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    kv_head = h // (q.shape[2] // k.shape[2])
    position = i + seqlen_k - seqlen_q
    left, right = f.get("window", (-1, -1))
    right = 0 if f.get("causal") else right
    slopes, sinks = f.get("alibi_slopes"), f.get("sinks")
    weights = {}
    for j in range(seqlen_k):
        score = f.get("scale", q.shape[-1] ** -0.5) * float(q[b, i, h].dot(k[b, j, kv_head]))
        if f.get("softcap", 0) > 0:
            score = f["softcap"] * math.tanh(score / f["softcap"])
        if slopes is not None:
            slope = float(slopes[h] if slopes.dim() == 1 else slopes[b, h])
            score -= slope * abs(position - j)
        hidden = (left >= 0 and j < position - left) or (right >= 0 and j > position + right)
        if not hidden:
            weights[j] = math.exp(score)
    total = sum(weights.values()) + (0 if sinks is None else math.exp(float(sinks[h])))
    out = sum((w / total * v[b, j, kv_head] for j, w in weights.items()), torch.zeros(v.shape[-1]))
    return out.double(), math.log(total) if total else -math.inf


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FEATURES)
def test_forward_equals_the_scalar_formula(name, shape):
    q, k, v = inputs_of(*shape)
    f = features_of(name)
    out, lse = reference.attention(q, k, v, **f)
    assert out.dtype == lse.dtype == torch.float64
    for b in range(2):
        for h in range(4):
            for i in range(shape[0]):
                want, want_lse = one_row(q, k, v, b, h, i, f)
                torch.testing.assert_close(out[b, i, h], want, rtol=0, atol=1e-13)
                assert float(lse[b, h, i]) == pytest.approx(want_lse, abs=1e-13)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FEATURES)
def test_backward_equals_central_differences(name, shape):
    q, k, v = inputs_of(*shape, batch=1 if "batch" not in name and name != "everything" else 2)
    f = features_of(name)
    g = torch.Generator().manual_seed(1)
    out, lse = reference.attention(q, k, v, **f)
    dout = torch.randn(out.shape, generator=g, dtype=torch.float64)
    dlse = torch.randn(lse.shape, generator=g, dtype=torch.float64)
    grads = reference.attention_backward(q, k, v, dout, dlse, **f)

    def loss(moved):
        given = f | {"sinks": moved[3]} if "sinks" in f else f
        out, lse = reference.attention(*moved[:3], **given)
        return (out * dout).sum() + (lse.where(lse > -torch.inf, 0.0) * dlse).sum()

    inputs = [q, k, v, *([f["sinks"].double()] if "sinks" in f else [])]
    for n, x in enumerate(inputs):
        direction = torch.randn(x.shape, generator=g, dtype=torch.float64)
        step = 1e-5
        ahead, behind = list(inputs), list(inputs)
        ahead[n], behind[n] = x + step * direction, x - step * direction
        slope = (loss(ahead) - loss(behind)) / (2 * step)
        got = getattr(grads, NAMES[n])
        assert float((got * direction).sum()) == pytest.approx(float(slope), abs=2e-8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FEATURES)
def test_backward_equals_autograd(name, shape):
    q, k, v = inputs_of(*shape)
    call = lambda *x, return_lse, **f: reference.attention(*x, **f)  # noqa: E731
    # In float64 the eager error is rounding, so this holds the hand-written steps to ulps.
    f = features_of(name)
    if "sinks" in f:
        f["sinks"] = f["sinks"].double()
    check_gradients(call, q, k, v, **f)
    check_forward(call, q, k, v, **f)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -torch.inf])])
@pytest.mark.parametrize("seqlen_k", [0, 2])
def test_rows_that_see_nothing(seqlen_k, sinks):
    q, k, v = problems.qkv(1, 5, seqlen_k, heads=2, kv_heads=1, dtype=torch.float64)
    f = {"causal": True, "sinks": sinks}
    out, lse = reference.attention(q, k, v, **f)
    empty = 5 - seqlen_k
    assert bool((out[:, :empty] == 0).all())
    want = torch.full((2,), -torch.inf).double() if sinks is None else sinks.double()
    assert torch.equal(lse[0, :, :empty], want[:, None].expand(2, empty))
    dout = torch.full_like(out, torch.nan)
    dout[:, empty:] = 1.0
    grads = reference.attention_backward(q, k, v, dout, **f)
    assert bool((grads.dq[:, :empty] == 0).all())
    for x in (grads.dq, grads.dk, grads.dv):
        assert bool(x.isfinite().all())
    if sinks is not None:
        # An empty row's LSE is the sink itself, so its gradient goes there; -inf has none.
        dlse = torch.ones_like(lse)
        dlse[:, :, empty:] = 0.0
        dsinks = reference.attention_backward(q, k, v, dout.nan_to_num() * 0, dlse, **f).dsinks
        assert dsinks is not None and dsinks.tolist() == [empty, 0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
def test_nan_reaches_exactly_who_sees_it(which, bad):
    q, k, v = problems.qkv(1, 6, 6, heads=2, kv_heads=2, dtype=torch.float64)
    dout = torch.randn(1, 6, 2, 8, dtype=torch.float64)
    clean = reference.attention(q, k, v, causal=True)[0]
    clean_grads = reference.attention_backward(q, k, v, dout, causal=True)
    {"q": q, "k": k, "v": v, "dout": dout}[which][0, 3, 0, 1] = bad
    out, lse = reference.attention(q, k, v, causal=True)
    grads = reference.attention_backward(q, k, v, dout, causal=True)
    rows = {"q": [3], "k": [3, 4, 5], "v": [3, 4, 5], "dout": []}[which]
    other = [i for i in range(6) if i not in rows]
    assert torch.equal(out[0, other], clean[0, other])
    assert torch.equal(out[:, :, 1], clean[:, :, 1])
    if bad != -torch.inf or which != "k":  # a score of -inf only hides its key
        assert not bool(out[0, rows, 0].isfinite().all(-1).any())
    # Queries before row 3 see nothing bad; keys after 3 are not seen by row 3 itself.
    assert torch.equal(grads.dq[0, :3], clean_grads.dq[0, :3])
    if which in ("q", "dout"):
        assert torch.equal(grads.dk[0, 4:], clean_grads.dk[0, 4:])
        assert torch.equal(grads.dv[0, 4:], clean_grads.dv[0, 4:])
    assert bool(lse[0, 1].isfinite().all())


def test_dtype_is_where_it_computes():
    q, k, v = problems.qkv(dtype=torch.bfloat16)
    out, lse = reference.attention(q, k, v, dtype=torch.float32)
    assert out.dtype == lse.dtype == torch.float32
    want, _ = reference.attention(q.float(), k.float(), v.float())
    assert 0 < float((out.double() - want).abs().max()) < 1e-6
    plain, plain_lse = reference.eager(q, k, v)
    assert plain.dtype == plain_lse.dtype == torch.bfloat16
    assert 1e-5 < float((plain.double() - want).abs().max()) < 5e-2


LENGTHS = [(3, 5), (0, 4), (4, 0), (2, 2)]


def concatenated(q, k, v, dout, f, keys):
    """Forward and gradients of each sequence alone, with keys[b] a slice of k."""
    row = 0
    for b, (n, _) in enumerate(LENGTHS):
        own = f | {"alibi_slopes": f["alibi_slopes"][b]} if "alibi_slopes" in f else f
        rows = slice(row, row + n)
        one = q[None, rows], k[None, keys[b]], v[None, keys[b]]
        yield (
            rows,
            reference.attention(*one, **own),
            reference.attention_backward(*one, dout[None, rows], **own),
        )
        row += n


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("leftpad", [None, [1, 0, 0, 2]])
def test_varlen_is_each_sequence_alone(paged, leftpad):
    lengths_q, lengths_k = zip(*LENGTHS, strict=True)
    q, k, v, offsets = problems.packed(lengths_q, lengths_k, dtype=torch.float64)
    f = {"causal": True, "alibi_slopes": torch.rand(4, 4), "sinks": torch.rand(4)}
    dout = torch.randn_like(q)
    starts = offsets["cu_seqlens_k"].tolist()
    pad = leftpad or [0] * 4
    keys = [slice(starts[b] + pad[b], starts[b + 1]) for b in range(4)]
    call = {"cu_seqlens_q": offsets["cu_seqlens_q"]}
    if leftpad is not None:
        call["leftpad"] = torch.tensor(leftpad)
    given_k, given_v = k, v
    if paged:
        (given_k, given_v), call["block_table"], slots = paginate(k, v, [n for _, n in LENGTHS])
        call["seqused_k"] = torch.tensor([n for _, n in LENGTHS])
    else:
        call["cu_seqlens_k"] = offsets["cu_seqlens_k"]
        slots = torch.arange(k.shape[0])
    out, lse = reference.attention_varlen(q, given_k, given_v, **call, **f)
    grads = reference.attention_varlen_backward(q, given_k, given_v, dout, **call, **f)
    dk, dv = (x.flatten(0, 1) if paged else x for x in (grads.dk, grads.dv))
    dsinks = torch.zeros(4, dtype=torch.float64)
    wanted_dk, wanted_dv = torch.zeros_like(k), torch.zeros_like(v)
    alone = concatenated(q, k, v, dout, f, keys)
    for b, (rows, (want, want_lse), want_grads) in enumerate(alone):
        assert torch.equal(out[rows], want[0])
        assert torch.equal(lse[:, rows], want_lse[0])
        assert torch.equal(grads.dq[rows], want_grads.dq[0])
        wanted_dk[keys[b]], wanted_dv[keys[b]] = want_grads.dk[0], want_grads.dv[0]
        assert want_grads.dsinks is not None
        dsinks += want_grads.dsinks
    assert torch.equal(dk[slots], wanted_dk)
    assert torch.equal(dv[slots], wanted_dv)
    assert grads.dsinks is not None and torch.equal(grads.dsinks, dsinks)


def paginate(k, v, lengths, page_size=2):
    """Caches full of NaN but for the sequences' tokens, a table with a wild tail, their slots."""
    pages = torch.randperm(10)
    table = torch.full((4, 5), -1)
    slots, used = [], 0
    for b, n in enumerate(lengths):
        num_pages = -(-n // page_size)
        table[b, :num_pages] = pages[used : used + num_pages]
        used += num_pages
        slots += [int(table[b, j // page_size]) * page_size + j % page_size for j in range(n)]
    slots = torch.tensor(slots)
    caches = [torch.full((10 * page_size, 2, 8), torch.nan).double() for _ in range(2)]
    caches[0][slots], caches[1][slots] = k, v
    return [c.unflatten(0, (10, page_size)) for c in caches], table, slots


def test_shared_pages_add_up():
    q, k, v = problems.qkv(2, 3, 4, dtype=torch.float64)
    k, v = k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1)
    dout = torch.randn_like(q)
    want = reference.attention_backward(q, k, v, dout, causal=True)
    got = reference.attention_varlen_backward(
        q.flatten(0, 1), k[0].unflatten(0, (2, 2)), v[0].unflatten(0, (2, 2)), dout.flatten(0, 1),
        cu_seqlens_q=torch.tensor([0, 3, 6]), seqused_k=torch.tensor([4, 4]),
        block_table=torch.tensor([[0, 1], [0, 1]]), causal=True,
    )  # fmt: skip
    torch.testing.assert_close(got.dk.flatten(0, 1), want.dk.sum(0), rtol=0, atol=1e-14)
    torch.testing.assert_close(got.dv.flatten(0, 1), want.dv.sum(0), rtol=0, atol=1e-14)


@pytest.mark.parametrize("layout", ["rows", "batch_idx", "pages"])
def test_kvcache_is_dense_attention_over_the_valid_tokens(layout):
    q, k, v = problems.qkv(2, 3, 9, dtype=torch.float64)
    used, pad = [9, 6], [0, 2]
    k[1, 6:], v[1, 6:], v[1, :2] = torch.nan, torch.inf, torch.nan
    call = {"cache_seqlens": torch.tensor(used), "cache_leftpad": torch.tensor(pad)}
    caches = (k, v)
    if layout == "batch_idx":
        caches = tuple(torch.stack([x[1], x[0] * torch.nan, x[0]]) for x in (k, v))
        call["cache_batch_idx"] = torch.tensor([2, 0])
    if layout == "pages":
        order = torch.tensor([4, 1, 0, 5, 3, 2])
        caches = tuple(x.reshape(6, 3, 2, 8)[order.argsort()] for x in (k, v))
        call["block_table"] = order.reshape(2, 3)
    out, lse = reference.attention_with_kvcache(q, *caches, causal=True, **call)
    for b in range(2):
        keys = k[b : b + 1, pad[b] : used[b]], v[b : b + 1, pad[b] : used[b]]
        want, want_lse = reference.attention(q[b : b + 1], *keys, causal=True)
        torch.testing.assert_close(out[b : b + 1], want, rtol=0, atol=1e-14)
        torch.testing.assert_close(lse[b : b + 1], want_lse, rtol=0, atol=1e-14)


def test_gather_pages_reads_no_further_than_the_length():
    cache = torch.arange(24.0).reshape(4, 3, 1, 2)
    row = torch.tensor([2, 0, -1, 10**9])
    got = reference.gather_pages(cache, row, 4)
    assert torch.equal(got, torch.cat([cache[2], cache[0, :1]]))
    assert reference.gather_pages(cache, row, 0).shape == (0, 1, 2)


def test_empty_batches():
    nothing = torch.zeros(1, dtype=torch.int32)
    q, k, v = problems.qkv(batch=0)
    assert reference.attention(q, k, v)[0].shape == (0, 5, 4, 8)
    out, lse = reference.attention_varlen(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        cu_seqlens_q=nothing,
        cu_seqlens_k=nothing,
    )
    assert out.shape == (0, 4, 8) and lse.shape == (4, 0)
    used = torch.zeros(0, dtype=torch.int32)
    out, lse = reference.attention_with_kvcache(q, k, v, cache_seqlens=used)
    assert out.shape == (0, 5, 4, 8) and lse.shape == (0, 4, 5)


def test_the_tolerance_can_fail():
    want = torch.tensor([1.0, 2.0], dtype=torch.float64)
    close = (want * (1 + 1e-7)).float()
    assert_close_to_oracle(close, want, want.float(), "x")
    for wrong in (close * (1 + 1e-5), torch.tensor([torch.nan, 2.0]), torch.tensor([1, torch.inf])):
        with pytest.raises(AssertionError, match="x: "):
            assert_close_to_oracle(wrong, want, want.float(), "x")
    with pytest.raises(AssertionError, match="Inf"):
        infinite = torch.tensor([torch.inf, 2.0])
        assert_close_to_oracle(-infinite, infinite.double(), infinite, "x")
    with pytest.raises(AssertionError, match="shape"):
        assert_close_to_oracle(close[:1], want, want, "x")


def fused(q, k, v, *, return_lse, **f):
    """How a good kernel rounds: float32 inside, one rounding of the output."""
    out, lse = reference.attention(q, k, v, dtype=torch.promote_types(q.dtype, torch.float32), **f)
    return out.to(q.dtype), lse


def forgetful(lost: str):
    """A kernel that accepts a feature and ignores it, or drops the gradient of the LSE."""

    def call(q, k, v, *, return_lse, **f):
        f.pop(lost, None)
        out, lse = fused(q, k, v, return_lse=True, **f)
        return out, lse.detach() + 0 * out.sum() if lost == "dlse" else lse

    return call


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FEATURES)
def test_the_tolerance_passes_a_good_kernel(name, dtype):
    qkv = problems.qkv(seqlen_q=9, seqlen_k=12, head_dim_v=6, dtype=dtype)
    check_forward(fused, *qkv, **features_of(name))
    check_gradients(fused, *qkv, **features_of(name))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("lost", ["causal", "window", "softcap", "scale", "alibi_slopes", "dlse"])
def test_the_tolerance_notices_what_a_kernel_drops(lost: str, dtype):
    qkv = problems.qkv(seqlen_q=9, seqlen_k=12, dtype=dtype)
    names: dict[str, str] = {"alibi_slopes": "alibi", "dlse": "plain"}
    name = names.get(lost, lost)
    if lost != "dlse":
        with pytest.raises(AssertionError, match="max error"):
            check_forward(forgetful(lost), *qkv, **features_of(name))
    with pytest.raises(AssertionError, match="max error"):
        check_gradients(forgetful(lost), *qkv, **features_of(name))
