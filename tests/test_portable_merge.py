"""The merge kernel on a CPU, through Triton's interpreter, against torch's formula."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

import onchip
from onchip import ops
from onchip.kernels.portable import merge

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="tests/gpu covers it where there is a GPU"
)


def parts(count, shape, dtype, device="cpu"):
    """Outputs and LSEs; some rows saw nothing in the first part, some in none."""
    g = torch.Generator().manual_seed(count)
    outs = [torch.randn(shape, generator=g).to(dtype) for _ in range(count)]
    *batch, length, heads, _ = shape
    lses = [3 * torch.randn(*batch, heads, length, generator=g) for _ in range(count)]
    lses[0][..., 0] = -torch.inf
    outs[0].transpose(-2, -3)[..., 0, :] = torch.nan
    for lse in lses:
        lse[..., -1] = -torch.inf
    return [x.to(device) for x in outs], [x.to(device) for x in lses]


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (9, 2, 16)], ids=str)
def test_merges_as_torch_does(count, shape, dtype):
    outs, lses = parts(count, shape, dtype)
    want, want_lse = onchip.merge_states(outs, lses)
    out, lse = merge.launch(outs, lses)
    torch.testing.assert_close(out, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=1e-6)
    assert bool((out.transpose(-2, -3)[..., -1, :] == 0).all())


@interpreted
def test_values_without_features_still_have_lses():
    outs, lses = parts(2, (2, 3, 5, 0), torch.float32)
    want, want_lse = onchip.merge_states(outs, lses)
    out, lse = merge.launch(outs, lses)
    assert out.shape == want.shape == (2, 3, 5, 0)
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=1e-6)


def test_one_bound_for_kernel_and_caller():
    assert ops._MAX_MERGED == merge.MAX_PARTS
    assert ops.merge(*parts(2, (2, 3, 5, 7), torch.float16)) is None  # on a CPU
