"""Decode of sequences with a shared beginning on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.test_cascade import compare, forked

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seqlen_q", [1, 2])
@pytest.mark.parametrize("batch", [3, 16, 37])
def test_same_as_without(batch, seqlen_q):
    cache, ids = forked(600, range(2, 2 + batch), 16, "cuda", torch.bfloat16)
    assert compare(cache, ids, seqlen_q, rtol=2e-2).num_shared == 592
