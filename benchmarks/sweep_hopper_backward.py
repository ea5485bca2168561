"""Times configs of the Hopper backward beside cuDNN and the portable kernels.

Usage: python benchmarks/sweep_hopper_backward.py [--dims 128,64,256] [--lengths 16384,4096,1024]
           [--rounds 5] [--budget 60] [--json FILE]

bf16, H * D = 2048, 16k tokens in all, kernels before and behind included, TFLOP/s as 10 B H N^2
D, half when causal. Then, at N = 16k causal: a window of 1024, deterministic sums, and 32 heads
of Q over 8 of K (D = 128). Candidates run in turn, round after round, since the clock follows
power and temperature; the GPU spins before each so that no host time counts; medians. Hold the
results first: tests/gpu/test_hopper_backward.py.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from onchip.kernels.hopper import backward
from onchip.kernels.hopper.backward_config import BackwardConfig
from onchip.kernels.portable import backward as portable
from onchip.problem import Op, Params, Problem, Saved, Tensors

TOKENS, WIDTH = 16384, 2048
START = time.monotonic()
CONFIGS = {
    "chosen": None,
    "apart": BackwardConfig(block_n=64, apart=True),
    "from -LSE": BackwardConfig(stages=3, starts_at_lse=True, ds_buffers=3),
    "late": BackwardConfig(late=True),
    "late, 3 dS": BackwardConfig(late=True, ds_buffers=3),
}


def pose(
    dim: int, length: int, causal: bool, heads: int = 0, kv_heads: int = 0, **options
) -> tuple[Problem, Tensors, Saved]:
    """Random data, and torch's output and LSE."""
    heads = heads or WIDTH // dim
    kv_heads = kv_heads or heads
    batch = TOKENS // length
    q, k, v, dout = (
        torch.randn(batch, length, n, dim, device="cuda", dtype=torch.bfloat16)
        for n in (heads, kv_heads, kv_heads, heads)
    )
    wide = [x.repeat_interleave(heads // kv_heads, 2) for x in (k, v)]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
        *(x.transpose(1, 2) for x in (q, *wide)), 0.0, causal
    )[:2]
    tensors = Tensors(q, k, v)
    left, deterministic = options.get("left", -1), options.get("deterministic", False)
    params = Params(
        length, length, left, 0 if causal else -1, dim**-0.5, 0.0, deterministic, 0, ""
    )  # fmt: skip
    saved = Saved(dout, None, out.transpose(1, 2).contiguous(), lse.contiguous())
    return Problem.of(Op.BACKWARD, tensors, params), tensors, saved


def cudnn(tensors: Tensors, saved: Saved, causal: bool) -> Callable[[], object]:
    leaves = [x.detach().requires_grad_() for x in (tensors.q, tensors.k, tensors.v)]
    with sdpa_kernel(backends=[SDPBackend.CUDNN_ATTENTION]):
        out = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in leaves), is_causal=causal
        ).transpose(1, 2)
    return lambda: torch.autograd.grad(out, leaves, saved.dout, retain_graph=True)


def once_ms(call: Callable[[], object], count: int) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)
    first.record()
    for _ in range(count):
        call()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / count


def tflops_of(calls: dict[str, Callable], flops: float, rounds: int) -> dict[str, int]:
    """Medians; a candidate that fails is named and left out."""
    times: dict[str, list[float]] = {}
    for name, call in calls.items():
        try:
            once_ms(call, 1)
            times[name] = []
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:160]}")
    count = max(1, int(3e-3 / (flops / 5e14)))
    for _ in range(rounds):
        for name, taken in times.items():
            taken.append(once_ms(calls[name], count))
    return {name: round(flops / sorted(t)[len(t) // 2] / 1e9) for name, t in times.items()}


def can_take(config: BackwardConfig, dim: int) -> bool:
    return dim <= 64 or (dim <= 128 and config.late) or config.apart


def of(config: BackwardConfig | None, posed) -> Callable[[], object]:
    return lambda: backward.launch_with(config, *posed)


def cell(dim: int, length: int, causal: bool, rounds: int) -> dict:
    posed = pose(dim, length, causal)
    problem, tensors, saved = posed
    calls = {
        "cudnn": cudnn(tensors, saved, causal),
        "portable": lambda: portable.launch(problem, tensors, saved),
    }
    calls |= {n: of(c, posed) for n, c in CONFIGS.items() if c is None or can_take(c, dim)}
    flops = 10 * TOKENS * length * WIDTH * (0.5 if causal else 1)
    return {"dim": dim, "length": length, "causal": causal} | tflops_of(calls, flops, rounds)


def others(dim: int, rounds: int) -> dict:
    """In the FLOPs of full causal, so that a window's figure is its speed-up."""
    calls = {
        "causal": of(None, pose(dim, TOKENS, True)),
        "window": of(None, pose(dim, TOKENS, True, left=1023)),
        "deterministic": of(None, pose(dim, TOKENS, True, deterministic=True)),
    }
    found = {"dim": dim} | tflops_of(calls, 5 * TOKENS**2 * WIDTH, rounds)
    if dim == 128:
        grouped = {"32 over 8": of(None, pose(dim, TOKENS, True, heads=32, kv_heads=8))}
        found |= tflops_of(grouped, 5 * TOKENS**2 * 32 * dim, rounds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", default="128,64,256")
    parser.add_argument("--lengths", default="16384,4096,1024")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    dims = [int(x) for x in given.dims.split(",")]
    jobs = [
        lambda d=d, n=int(n), c=c: cell(d, n, c, given.rounds)
        for n in given.lengths.split(",")
        for d in dims
        for c in (False, True)
    ]
    jobs += [lambda d=d: others(d, given.rounds) for d in dims]
    rows = []
    for job in jobs:
        if time.monotonic() - START < given.budget:
            rows.append(job())
            print(rows[-1], f"{time.monotonic() - START:.0f} s", flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
