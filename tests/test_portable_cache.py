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
from onchip.problem import NewTokens

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


APPENDS = {
    "pages": {},
    "heads_6_of_3": {"sizes": (6, 3, 16, 8), "pairs": 4},
    "odd_dims": {"sizes": (4, 4, 5, 5), "pairs": 2, "page": 16},
    "no_rotary": {"sizes": (2, 1, 8, 8), "pairs": 0},
    "given_slots": {"slots": True},
    "several": {"num_new": 3, "num_queries": 2},
    "scaled": {"scaled": True, "num_new": 2},
}


def _append_case(
    sizes=(4, 2, 16, 16), pairs=8, page=4, slots=False, num_new=1, num_queries=1, scaled=False
):
    """New tokens for three sequences, the last of which runs past its table."""
    heads, kv_heads, dim, dim_v = sizes
    g = torch.Generator().manual_seed(0)
    columns = 3 if page == 4 else 1
    table = torch.randperm(10, generator=g)[: 3 * columns].int().view(3, columns)
    new = NewTokens(
        torch.randn(3, num_queries, heads, dim, generator=g),
        torch.randn(3, num_new, kv_heads, dim, generator=g),
        torch.randn(3, num_new, kv_heads, dim_v, generator=g),
        torch.randn(10, page, kv_heads, dim, generator=g),
        torch.randn(10, page, kv_heads, dim_v, generator=g),
        torch.tensor([0, 5, 11], dtype=torch.int32),
        table,
    )
    if slots:
        new.slot_mapping = torch.randperm(10 * page, generator=g)[: 3 * num_new]
        new.slot_mapping[1] = -1
    if pairs:
        new.rotary_cos, new.rotary_sin = (torch.randn(40, pairs, generator=g) for _ in range(2))
    if scaled:
        new.k_scale, new.v_scale = (torch.rand(kv_heads, generator=g) + 0.5 for _ in range(2))
    return new


@interpreted
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("name", APPENDS)
def test_appends_what_the_cpu_appends(name, in_order, interleaved):
    results = []
    for kernel in (cpu_cache, cache):
        new = _append_case(**APPENDS[name])
        new.interleaved, new.in_order = interleaved, in_order
        problem = cache_ops.plan_append(new).problem
        results.append((*kernel.append(problem, new), new.k_cache, new.v_cache))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
    assert results[0][1].tolist() == [n + len(new.k[0]) for n in (0, 5, 11)]
