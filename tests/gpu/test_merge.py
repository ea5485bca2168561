"""Merging parts on a GPU: one launch, the same numbers as torch's formula."""

from __future__ import annotations

import pytest
import torch

import onchip
from onchip import ops
from tests.test_portable_merge import parts

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (900, 8, 128), (3, 4, 2, 256)], ids=str)
@pytest.mark.parametrize("count", [1, 2, 16])
def test_merges_as_a_cpu_does(count, shape, dtype):
    outs, lses = parts(count, shape, dtype, "cuda")
    out, lse = onchip.merge_states(outs, lses)
    want, want_lse = onchip.merge_states([x.cpu() for x in outs], [x.cpu() for x in lses])
    torch.testing.assert_close(out.cpu(), want, rtol=4 * torch.finfo(dtype).eps, atol=4e-6)
    torch.testing.assert_close(lse.cpu(), want_lse, rtol=1e-5, atol=1e-5)


def test_the_kernel_takes_what_has_no_gradient():
    outs, lses = parts(4, (64, 1, 32, 128), torch.bfloat16, "cuda")
    assert ops.merge(outs, lses) is not None
    assert ops.merge(outs, [x.requires_grad_() for x in lses]) is None
    with torch.no_grad():
        assert ops.merge(outs, lses) is not None


def test_gradients_go_through_torch():
    outs, lses = parts(2, (9, 2, 16), torch.float32, "cuda")
    lses[1].requires_grad_()
    onchip.merge_states(outs[1:] * 2, [lses[0], lses[1]])[0].nan_to_num().sum().backward()
    assert lses[1].grad is not None
