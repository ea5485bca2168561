"""Float8 on a GPU: the quantising kernel against torch, the Hopper kernel against the emulation."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch

import onchip
from onchip import ops
from onchip.bounded import Bounded
from onchip.kernels import fp8_emulated, fp8_quantise
from onchip.kernels.fp8_emulated import Accumulation
from onchip.kernels.fp8_layout import Quantiser, Source
from onchip.kernels.portable import quantise
from tests import fp8_cases, problems
from tests.fp8_cases import relative

pytestmark = pytest.mark.gpu
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs sm_90")


def _on_gpu(**shapes) -> list[torch.Tensor]:
    return [x.cuda() for x in fp8_cases.inputs(dtype=torch.bfloat16, **shapes)]


def _offsets(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().cuda()


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("scale", ["block", "head"])
def test_quantised_as_torch_does(dim, scale):
    q, k, v = _on_gpu(dim=dim)
    cos, sin = torch.randn(400, dim // 2).cuda(), torch.randn(400, dim // 2).cuda()
    offsets = {"cu_seqlens_q": _offsets(30, 0, 100), "cu_seqlens_k": _offsets(7, 200, 93)}
    for source in (
        Source(q, k, v, rotary_cos=cos, rotary_sin=sin),
        Source(q[0], k[0], v[0], **offsets),
    ):
        _hold_codes(quantise, source, Quantiser(scale))


def _hold_codes(module, source: Source, how: Quantiser) -> None:
    """Sums in another order: a code may fall to the other side, a scale differ in its last bits."""
    found = module.quantise(source, how)
    for got, want in zip(found, fp8_quantise.quantise(source, how), strict=True):
        assert got.shape == want.shape
        assert relative(got.float(), want.float()) < 2e-3
        close = torch.isclose(got.float(), want.float(), rtol=1e-5)
        assert close.double().mean() > 0.999


@needs_hopper
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("lengths", [(1, 1), (64, 130), (333, 450), (3000, 2048)])
def test_hopper_quantises_as_torch_does(dim, lengths):
    from onchip.kernels.hopper import fp8_quantise as on_hopper

    q, k, v = _on_gpu(dim=dim, seqlen_q=lengths[0], seqlen_k=lengths[1])
    sources = [Source(q, k, v), Source(*(x.half() for x in (q, k, v)))]
    # Heads before rows in memory, and k and v side by side.
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    sources += [Source(*turned), Source(q, *torch.cat([k, v], 2).split(k.shape[2], 2))]
    for source in sources:
        assert on_hopper.takes(source, Quantiser())
        _hold_codes(on_hopper, source, Quantiser())
    q[:, : lengths[0] // 2], k[0], v[1] = 0, 0, 0
    _hold_codes(on_hopper, Source(q, k, v), Quantiser())


@pytest.mark.parametrize("name", ["portable", pytest.param("hopper", marks=needs_hopper)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_what_is_not_finite_is_stored_as_torch_stores_it(name, dim):
    file = {"portable": "quantise", "hopper": "fp8_quantise"}[name]
    module = importlib.import_module(f"onchip.kernels.{name}.{file}")
    q, k, v = _on_gpu(dim=dim)
    q[0, 3, 1, 5], k[1, 70, 0, 0], v[1, 200, 1, 9] = torch.nan, torch.inf, -torch.inf
    v[0, 7, 0, 3] = torch.nan
    pairs = zip(module.quantise(Source(q, k, v), Quantiser()),
                fp8_quantise.quantise(Source(q, k, v), Quantiser()), strict=True)  # fmt: skip
    for got, want in pairs:
        assert torch.equal(got.float().isnan(), want.float().isnan())
        finite = want.float().isfinite()
        assert relative(got.float()[finite], want.float()[finite]) < 2e-3


def test_codes_of_float8_inputs_are_kept():
    q, k, v = (x.to(torch.float8_e4m3fn) for x in _on_gpu())
    for got, want in zip(quantise.relaid(Source(q, k, v)), fp8_quantise.relaid(Source(q, k, v)),
                         strict=True):  # fmt: skip
        assert torch.equal(got.float(), want.float())


@pytest.fixture
def as_hopper(monkeypatch):
    """The emulation sums products as the tensor cores do."""
    launch = functools.partial(fp8_emulated.launch, accumulation=Accumulation.TWO_LEVEL)
    monkeypatch.setattr(fp8_emulated, "launch", launch)
    monkeypatch.setattr(ops, "_plans", Bounded(64))  # which hold what was loaded before


def _hold(call) -> None:
    """Outputs within what P's rounding may do where a sum falls to another side of a code.

    In float32, S would be off by up to 13 bits below its largest partial sum, and an LSE by up to
    0.015 (H200, 2026-11-30): what remains is float32's own rounding. Sums are those of rounded
    weights: where one falls to another side, a row's LSE is off by 6 % over its number of keys.
    """
    (out, lse), (want, want_lse) = call(kernel="fp8_hopper"), call(kernel="fp8_emulated")
    assert torch.equal(out.isnan(), want.isnan())
    finite = want.isfinite()
    assert relative(out[finite].float(), want[finite].float()) < 6e-3
    seen = want_lse.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    off = (lse - want_lse)[seen].abs()
    assert off.max() < 0.07 and (off < 1e-4).double().mean() > 0.95


@needs_hopper
@pytest.mark.usefixtures("as_hopper")
@pytest.mark.parametrize(
    ("dim", "name"),
    [(128, name) for name in problems.DENSE_FEATURES]
    + [(dim, name) for dim in (64, 256) for name in ("plain", "window_causal", "alibi_batch")]
    + [(80, "softcap"), (80, "causal"), (256, "softcap")],
)
def test_dense(dim, name):
    q, k, v = _on_gpu(dim=dim, seqlen_q=333, seqlen_k=450)
    given = problems.features(name, torch.Generator().manual_seed(0))
    given = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    x = onchip.quantize_qkv(q, k, v)
    _hold(lambda kernel: onchip.attention(x, return_lse=True, kernel=kernel, **given))


@needs_hopper
@pytest.mark.usefixtures("as_hopper")
@pytest.mark.parametrize("seqlens", [(1, 1), (64, 128), (200, 64), (1000, 1000), (513, 2049)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_lengths(seqlens, causal, scale):
    q, k, v = _on_gpu(dim=128, seqlen_q=seqlens[0], seqlen_k=seqlens[1])
    x = onchip.quantize_qkv(q, k, v, scale=scale)
    _hold(lambda kernel: onchip.attention(x, causal=causal, return_lse=True, kernel=kernel))


@needs_hopper
@pytest.mark.usefixtures("as_hopper")
@pytest.mark.parametrize("seqlens", [(700, 1500), (1100, 1100)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dim", [64, 256])
def test_long_keys_of_other_head_dimensions(dim, causal, seqlens):
    q, k, v = _on_gpu(dim=dim, seqlen_q=seqlens[0], seqlen_k=seqlens[1])
    x = onchip.quantize_qkv(q, k, v)
    _hold(lambda kernel: onchip.attention(x, causal=causal, return_lse=True, kernel=kernel))


@needs_hopper
@pytest.mark.usefixtures("as_hopper")
@pytest.mark.parametrize("causal", [True, False])
def test_packed(causal):
    q, k, v = _on_gpu(dim=128, seqlen_q=700, seqlen_k=900)
    given = {"cu_seqlens_q": _offsets(1, 0, 300, 399), "cu_seqlens_k": _offsets(5, 100, 0, 795)}
    x = onchip.quantize_qkv(q[0], k[0], v[0], **given)
    longest = {"max_seqlen_q": 399, "max_seqlen_k": 795}
    _hold(
        lambda kernel: onchip.attention_varlen(
            x, **given, **longest, causal=causal, return_lse=True, kernel=kernel
        )
    )


@needs_hopper
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("has_sinks", [True, False])
def test_without_keys(causal, has_sinks):
    q, k, v = _on_gpu(dim=128, seqlen_q=70, seqlen_k=1)
    sinks = torch.randn(q.shape[2], device="cuda") if has_sinks else None
    given = {"causal": causal, "sinks": sinks, "return_lse": True}
    x = onchip.quantize_qkv(q, k[:, :0], v[:, :0])
    dense = onchip.attention(x, **given)
    offsets = {"cu_seqlens_q": _offsets(30, 40), "cu_seqlens_k": _offsets(0, 0)}
    x = onchip.quantize_qkv(q[0], k[0, :0], v[0, :0], **offsets)
    longest = {"max_seqlen_q": 40, "max_seqlen_k": 0}
    for out, lse in (dense, onchip.attention_varlen(x, **offsets, **longest, **given)):
        assert (out == 0).all()
        want = sinks[:, None] if has_sinks else torch.tensor(-torch.inf, device="cuda")
        torch.testing.assert_close(lse, want.expand_as(lse), rtol=0, atol=1e-6)


@needs_hopper
@pytest.mark.usefixtures("as_hopper")
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [True, False])
def test_bases_move_where_logits_rise(dim, causal):
    """Keys are walked from the last on; some rows' logits rise from tile to tile."""
    q, k, v = _on_gpu(dim=dim, seqlen_q=896, seqlen_k=896)
    rise = torch.tensor([92.0, 90, 30, 10, 9, 5, 0]).repeat_interleave(128).cuda()
    k[..., 0] = rise[:, None].to(k.dtype)
    q[..., 0] = 0
    q[:, ::3, :, 0] = 0.69 * dim**0.5
    x = onchip.quantize_qkv(q, k, v, hadamard=False)
    _hold(lambda kernel: onchip.attention(x, causal=causal, return_lse=True, kernel=kernel))


@needs_hopper
@pytest.mark.usefixtures("as_hopper")
@pytest.mark.parametrize("part", [0, 1, 2])
def test_what_is_not_finite_reaches_the_rows_that_see_it(part):
    inputs = _on_gpu(dim=128, seqlen_q=300, seqlen_k=300)
    inputs[part][1, 170, 1, 5] = torch.nan
    x = onchip.quantize_qkv(*inputs)
    _hold(lambda kernel: onchip.attention(x, causal=True, return_lse=True, kernel=kernel))


@needs_hopper
def test_the_error_does_not_grow_with_the_keys():
    """Values with a mean: what the tensor cores' own accumulator would lose (docs/fp8.md).

    Without outliers, of which more keys bring more: the rows that a rare key dominates then
    decide, and float32 sums would fail (the emulation's error: 0.0070 at 4k keys, 0.0123 at 128k).
    """
    errors = []
    for seqlen in (4096, 131072):
        g = torch.Generator("cuda").manual_seed(seqlen)
        q, k, v = (
            torch.randn(2, n, 2, 128, device="cuda", dtype=torch.bfloat16, generator=g)
            for n in (64, seqlen, seqlen)
        )
        v += 1
        x = onchip.quantize_qkv(q, k, v)
        out = onchip.attention(x, kernel="fp8_hopper")
        s = torch.einsum("bshd,bthd->bhst", q.double(), k.double()) * 128**-0.5
        errors.append(relative(out, torch.einsum("bhst,bthd->bshd", s.softmax(-1), v.double())))
    assert errors[1] < 1.3 * errors[0], errors
