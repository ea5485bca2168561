"""The GPU append on a CPU, through Triton's interpreter: what is stored, and what is not."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from onchip import cache_ops, dispatch
from onchip.kernels import cpu_cache
from onchip.kernels.portable import cache

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="tests/gpu covers it where there is a GPU"
)


def _data(dim, dim_v, dtype, cache_dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(7, 3, d, generator=g).to(dtype) for d in (dim, dim_v))
    caches = [torch.zeros(4, 5, 3, d).to(cache_dtype) for d in (dim, dim_v)]
    slots = torch.randperm(20, generator=g)[:7]
    slots[2] = -1
    return k, v, *caches, slots


@interpreted
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dims", [(8, 8), (5, 3), (40, 72)], ids=str)
@pytest.mark.parametrize("scaled", [False, True])
def test_stores_what_the_cpu_stores(dims, slot_dtype, scaled):
    for dtype, cache_dtype in (
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
    ):
        k, v, k_cache, v_cache, slots = _data(*dims, dtype, cache_dtype)
        scales = (torch.tensor([0.5, 2.0, 4.0]), torch.tensor([1.0, 0.25, 8.0]))
        scales = scales if scaled else (None, None)
        problem = cache_ops.store_problem(k, v, k_cache, scaled)
        wanted = [k_cache.clone(), v_cache.clone()]
        cpu_cache.launch(problem, k, v, *wanted, slots, *scales)
        cache.launch(problem, k, v, k_cache, v_cache, slots.to(slot_dtype), *scales)
        assert torch.equal(k_cache, wanted[0]) and torch.equal(v_cache, wanted[1])
        assert int((k_cache != 0).flatten(2).any(2).sum()) == 6  # slot -1 stored nothing


def test_the_record_stores_on_a_gpu():
    k, v, k_cache, _, _ = _data(8, 8, torch.bfloat16, torch.bfloat16)
    problem = replace(cache_ops.store_problem(k, v, k_cache, False), device="cuda", arch="sm_90")
    record = dispatch.choose(problem)
    assert record.name == "portable" and record.module.endswith("portable.cache")
