"""The Hopper quantiser: its matrices, what it takes, and that it compiles without a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from onchip.kernels.fp8_layout import Quantiser, Source, key_of_column, transform
from onchip.kernels.hopper import fp8_quantise
from tests import compile_only

SCRIPT = Path(__file__).with_name("hopper_quantise_compiles.py")
SHARED_BYTES = 227 << 10
CPU = torch.device("cpu")


def _stored(product: torch.Tensor) -> torch.Tensor:
    """A product's 64 columns as threads store them."""
    return product.unflatten(1, (8, 4, 2)).transpose(1, 2).flatten(1)


def _hadamard(number: int) -> torch.Tensor:
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < number:
        matrix = torch.kron(torch.tensor([[1.0, 1], [1, -1]]), matrix)
    return matrix


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_blocks_of_64_make_the_transform(dim):
    matrices = fp8_quantise.matrices(dim, torch.float32, CPU)
    x = torch.randn(128, dim)
    products = torch.stack([a @ b for a, b in zip(x.split(64, 1), matrices[:-1], strict=True)])
    parts = torch.einsum("ij,jrc->irc", _hadamard(dim // 64), products)
    got = torch.cat([_stored(part) for part in parts], 1)
    torch.testing.assert_close(got, x @ transform(dim, dim, torch.float32, CPU))


def test_the_permutation_puts_keys_in_the_order_of_columns():
    values = torch.randn(64, 32)
    product = values.T @ fp8_quantise.matrices(64, torch.float32, CPU)[-1]
    want = values.unflatten(0, (-1, 16))[:, key_of_column(CPU)].flatten(0, 1).T
    assert torch.equal(_stored(product), want)


def _source(dim=128, dim_v=None, dtype=torch.bfloat16) -> Source:
    return Source(*(torch.zeros(1, 200, 2, d, dtype=dtype) for d in (dim, dim, dim_v or dim)))


def test_what_it_takes():
    assert fp8_quantise.takes(_source(), Quantiser())
    offsets = torch.tensor([0, 200])
    packed = Source(*(x[0] for x in (_source().q, _source().k, _source().v)), offsets, offsets)
    turned = replace(_source(), rotary_cos=torch.ones(200, 64), rotary_sin=torch.ones(200, 64))
    others = [_source(80), _source(64, 128), _source(dtype=torch.float32), packed, turned]
    uneven = torch.zeros(1, 200, 2, 132, dtype=torch.bfloat16)[..., :128]
    others.append(replace(_source(), v=uneven))
    assert not any(fp8_quantise.takes(source, Quantiser()) for source in others)
    assert not fp8_quantise.takes(_source(), Quantiser("head"))
    assert not fp8_quantise.takes(_source(), Quantiser(hadamard=False))


def test_it_fits_and_threads_store_16_codes_at_once():
    for used in compile_only.run_script(SCRIPT):
        print(used)
        assert used["shared_bytes"] <= SHARED_BYTES, used
        assert used["warnings"] == [] and used["wgmma"] > 0 and used["tma_loads"] > 0, used
        # q's, k's and v's parts; codes change no thread.
        assert used["wide_stores"] >= 2 * used["dim"] // 64 and used["shuffles"] == 0, used
        assert used["spill_bytes"] <= (80 if used["dim"] == 256 else 0), used
