"""The quantising kernel does what its model in torch does, bit by bit (in the interpreter)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from onchip.kernels import fp8_quantise
from onchip.kernels.fp8_layout import FLOAT8, Quantiser, Source
from onchip.kernels.portable import quantise

QUANTISERS = [Quantiser(), Quantiser("head"), Quantiser("tensor", hadamard=False)]
TURNING = [Quantiser(), Quantiser(rotary_interleaved=True)]
LENGTHS = {
    "cu_seqlens_q": torch.tensor([0, 0, 5, 40, 70], dtype=torch.int32),
    "cu_seqlens_k": torch.tensor([0, 7, 7, 140, 150], dtype=torch.int32),
}
USED = torch.tensor([5, 0, 133, 1], dtype=torch.int32)


def _qkv(dim: int, dtype=torch.float32) -> list[torch.Tensor]:
    q, k, v = torch.randn(2, 70, 4, dim), torch.randn(2, 150, 2, dim), torch.randn(2, 150, 2, 48)
    q[0, 3, 1, 2] = torch.nan
    k[1, 4, 0, 3] = torch.inf
    v[0, 77, 1, 5] = -torch.inf
    v[1, :128, 0] = 0
    q[1, 5, 2] *= 1e4
    v[1, 140, 1] *= 1e-30
    return [x.to(dtype) for x in (q, k, v)]


def _hold(source: Source, how: Quantiser) -> None:
    """Bit for bit; but the transform's sums come in the order of the machine's matrix library, so
    that last bits of scales differ between processors, and a code in 1,000 by one step."""
    found, wanted = quantise.quantise(source, how), fp8_quantise.quantise(source, how)
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        is_code = got.dtype == torch.float8_e4m3fn
        got, want = got.float(), want.float()
        rtol, atol = (0.125, 2**-9) if is_code else (1e-6, 0.0)
        if not how.hadamard:
            rtol = atol = 0.0
        elif is_code:
            unlike = (got != want) & ~(got.isnan() & want.isnan())
            assert unlike.sum() <= max(1, unlike.numel() // 1000)
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("how", QUANTISERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_dense(how, dtype):
    _hold(Source(*_qkv(64, dtype)), how)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in _qkv(80, dtype)]
    _hold(Source(*strided), how)


@pytest.mark.parametrize("how", QUANTISERS, ids=str)
def test_packed(how):
    q, k, v = (x[0] for x in _qkv(64))
    _hold(Source(q, k, v, **LENGTHS), how)
    _hold(Source(q, k, v, **LENGTHS, seqused_k=USED), how)


@pytest.mark.parametrize("how", TURNING, ids=str)
def test_rotary(how):
    q, k, v = _qkv(64)
    tables = {"rotary_cos": torch.randn(200, 16), "rotary_sin": torch.randn(200, 16)}
    _hold(Source(q, k, v, **tables), how)
    _hold(Source(q[0], k[0], v[0], **LENGTHS, **tables), how)


def test_float8_is_only_laid_out():
    q, k, v = (x.to(FLOAT8) for x in _qkv(64))
    packed = Source(q[0], k[0], v[0], **LENGTHS)
    for source in (Source(q, k, v), packed):
        pairs = zip(quantise.relaid(source), fp8_quantise.relaid(source), strict=True)
        for got, want in pairs:
            torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=0, equal_nan=True)


def test_every_code_is_the_nearest():
    """All float16 numbers, in rows of their own, against torch's conversion."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    numbers = numbers[numbers.isfinite() & (numbers.abs() <= 448)]
    rows = torch.nn.functional.pad(numbers, (0, -numbers.numel() % 15)).view(1, -1, 1, 15)
    rows = torch.cat([torch.full_like(rows[..., :1], 448.0), rows], -1)  # every scale is 1
    found = quantise.quantise(Source(rows, rows, rows), Quantiser(hadamard=False))
    assert torch.equal(found[0].float(), rows.to(FLOAT8).float())


def test_nothing_to_do():
    q, k, v = _qkv(64)
    _hold(Source(q[:, :0], k, v), Quantiser())
    _hold(Source(q, k[:, :0], v[:, :0]), Quantiser("tensor"))
