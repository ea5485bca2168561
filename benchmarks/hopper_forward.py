"""Speed of the Hopper forward beside FlashAttention-3 on one GPU, kernels alone.

Usage: python benchmarks/hopper_forward.py [--json FILE] [--rounds 7] [--budget SECONDS]

Dense squares of 16k tokens in all, H * D = 2048, bf16, causal and not; then fewer key/value
heads, float16, other head dimensions, packed sequences, new tokens behind a paged cache, and
single sequences. Everything that a call launches counts, the repair included. Both take turns,
the GPU spins before each so that no host time counts, and single sequences are replayed from CUDA
graphs, since FlashAttention-3's host time would count; medians. Outputs of both are compared
first. TFLOP/s count 2 FLOPs for each multiplication with a visible key.

Legend: B batch, N sequence length, T packed tokens, H query heads, H_kv key and value heads,
D / D_v head dimensions.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from onchip.bench import timing, varied
from onchip.bench.attention import device_report, output_of
from onchip.kernels.hopper import forward
from onchip.problem import Mask, Op, Params, Problem, Tensors

TOKENS, WIDTH = varied.TOKENS, varied.WIDTH
DIMS, LENGTHS = (64, 128, 256), (16384, 4096, 1024)
NEW, CACHED, CACHES = 512, 8192, 8
CALLS_OF_A_GRAPH = 20
BF16, F16 = torch.bfloat16, torch.float16


class Call(NamedTuple):
    """One call, as onchip's kernel and as FlashAttention-3 take it."""

    problem: Problem
    tensors: Tensors
    peer: Callable[[], object]
    flops: float
    graph: bool = False  # whether it is short enough that host time would count


def _fa3():
    import flash_attn_interface

    return flash_attn_interface


def _random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def _posed(tensors: Tensors, seqlen_q: int, seqlen_k: int, causal: bool) -> Problem:
    mask = Mask.of(causal, (-1, -1))
    scale = tensors.q.shape[-1] ** -0.5
    params = Params(seqlen_q, seqlen_k, mask.left, mask.right, scale, 0.0, False, 0, "")
    return Problem.of(Op.FORWARD, tensors, params)


def dense(
    dim: int, length: int, causal: bool, heads: int = 0, kv_heads: int = 0, dim_v: int = 0,
    dtype: torch.dtype = BF16, batch: int = 0,
) -> Call:  # fmt: skip
    """Squares; 16k tokens in all unless `batch` says otherwise."""
    heads, dim_v = heads or WIDTH // dim, dim_v or dim
    kv_heads, size = kv_heads or heads, batch or TOKENS // length
    sizes = ((heads, dim), (kv_heads, dim), (kv_heads, dim_v))
    tensors = Tensors(*(_random(size, length, h, d, dtype=dtype) for h, d in sizes))
    q, k, v = tensors.q, tensors.k, tensors.v
    flops = 2 * size * heads * length**2 * (dim + dim_v) / (2 if causal else 1)
    peer = functools.partial(_fa3().flash_attn_func, q, k, v, causal=causal)
    return Call(_posed(tensors, length, length, causal), tensors, peer, flops, batch > 0)


def packed(causal: bool, heads: int, kv_heads: int, dim: int = 128) -> Call:
    """64 sequences of 64 to 4096 tokens."""
    lengths = varied.lengths()
    tensors = Tensors(*(_random(sum(lengths), h, dim) for h in (heads, kv_heads, kv_heads)))
    offsets = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    tensors.cu_seqlens_q = tensors.cu_seqlens_k = offsets
    longest = max(lengths)
    peer = functools.partial(
        _fa3().flash_attn_varlen_func, tensors.q, tensors.k, tensors.v, offsets, offsets, longest,
        longest, causal=causal,
    )  # fmt: skip
    flops = sum(4 * heads * n * n * dim for n in lengths) / (2 if causal else 1)
    return Call(_posed(tensors, longest, longest, causal), tensors, peer, flops)


def paged(page: int, heads: int, kv_heads: int, dim: int = 128) -> Call:
    """New tokens behind a cached prefix, causal; the cache has them already."""
    length = CACHED + NEW
    pages = -(-length // page)
    caches = (_random(CACHES * pages, page, kv_heads, dim) for _ in range(2))
    tensors = Tensors(_random(CACHES, NEW, heads, dim), *caches)
    order = torch.randperm(CACHES * pages, device="cuda").int()
    tensors.block_table = order.view(CACHES, pages)
    tensors.seqused_k = torch.full((CACHES,), length, device="cuda", dtype=torch.int32)
    peer = functools.partial(
        _fa3().flash_attn_with_kvcache, tensors.q, tensors.k, tensors.v,
        cache_seqlens=tensors.seqused_k, page_table=tensors.block_table, causal=True,
    )  # fmt: skip
    flops = 4 * CACHES * heads * dim * (NEW * CACHED + NEW * NEW / 2)
    return Call(_posed(tensors, NEW, pages * page, True), tensors, peer, flops)


def others() -> Iterator[tuple[dict, Callable[[], Call]]]:
    """What a row says of a call beside its speed, and the call."""
    for causal in (False, True):
        for heads in (8, 1):
            facts = {"case": f"32/{heads} heads", "dim": 128, "length": 4096, "causal": causal}
            yield facts, functools.partial(dense, 128, 4096, causal, 32, heads)
        for dim in DIMS:
            facts = {"case": "float16", "dim": dim, "length": 4096, "causal": causal}
            yield facts, functools.partial(dense, dim, 4096, causal, dtype=F16)
        for dim, dim_v in ((96, 96), (192, 128)):
            facts = {"case": "16 heads", "dim": dim, "dim_v": dim_v, "length": 4096,
                     "causal": causal}  # fmt: skip
            yield facts, functools.partial(dense, dim, 4096, causal, 16, 16, dim_v)
        facts = {"case": "64 packed sequences of 64 to 4096, 32/8 heads", "dim": 128,
                 "causal": causal}  # fmt: skip
        yield facts, functools.partial(packed, causal, 32, 8)
    for page in (16, 64, 256):
        what = f"8 x {NEW} tokens behind {CACHED} cached, pages of {page}, 32/8 heads"
        yield {"case": what, "dim": 128, "causal": True}, functools.partial(paged, page, 32, 8)
    for dim in (64, 128):
        for length in (1024, 2048):
            facts = {"case": "one sequence, 16 heads", "dim": dim, "length": length}
            yield facts | {"causal": True}, functools.partial(dense, dim, length, True, 16, batch=1)


def measured(call: Call, rounds: int) -> dict:
    """Speeds of both, TFLOP/s, and the median over rounds of their quotient."""
    runs: dict[str, Callable[[], object]] = {
        "onchip": lambda: forward.launch(call.problem, call.tensors),
        "fa3": call.peer,
    }
    ours, theirs = (output_of(run()).float() for run in runs.values())
    error = (ours - theirs).abs().max().item()
    if not error < 0.03:  # two roundings of outputs of up to 4 to bfloat16
        raise ValueError(f"outputs differ by {error}")
    count = 1
    if call.graph:
        count = CALLS_OF_A_GRAPH
        runs = {name: timing.graph_of(run, count).replay for name, run in runs.items()}
    times = timing.interleaved_device_ms(runs, rounds)
    speeds = {n: count * call.flops / statistics.median(ms) / 1e9 for n, ms in times.items()}
    ratio = timing.median_ratio(times["fa3"], times["onchip"])
    return {"tflops": {n: round(x, 1) for n, x in speeds.items()}, "of_fa3": round(ratio, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds")
    given = parser.parse_args()
    start = time.monotonic()
    report = device_report() | {
        "kernel": "hopper",
        "rounds": given.rounds,
        "cells": [],
        "others": [],
    }
    squares = (
        ({"part": "forward", "dim": d, "length": n, "causal": c}, functools.partial(dense, d, n, c))
        for d in DIMS
        for n in LENGTHS
        for c in (False, True)
    )
    for group, rows in (("cells", squares), ("others", others())):
        for facts, make in rows:
            if time.monotonic() - start > given.budget:
                print("out of time before", facts)
                break
            try:
                row = facts | measured(make(), given.rounds)
            except Exception as error:  # one call that fails is left out
                print(facts, type(error).__name__, str(error)[:200])
                continue
            report[group].append(row)
            print(*row.values(), flush=True)
            if given.json:
                given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
