"""Times configs of the portable forward side by side with torch's attention on one GPU.

Usage: python benchmarks/sweep_portable_forward.py [--dims 64,128,256] [--lengths 1024,4096,16384]
           [--peers flash,cudnn,flex] [--rounds 5] [--budget 220]

16k tokens in all, H * D = 2048, bf16. Every config is first held against the float64 oracle
under the contract's rule; one that fails or does not compile is named and left out. Then all
configs and peers of a cell run in turn, round after round, since the clock follows power and
temperature; figures are medians in TFLOP/s of 4 B H S^2 D (half of it when causal). A JSON
goes to $OUT where that is set.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import astuple, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from onchip import reference
from onchip.kernels.portable import forward
from onchip.kernels.portable.config import Config, choose_forward
from onchip.problem import Mask, Op, Params, Problem, Tensors

TOKENS, WIDTH = 16384, 2048
START = time.monotonic()

CONFIGS = {
    64: [
        Config(64, 128, 4, 2, True),
        Config(64, 64, 4, 3, True),
        Config(128, 64, 8, 3),
        Config(64, 128, 4, 3, True),
        Config(64, 128, 4, 2),
        Config(64, 64, 4, 2),
        Config(64, 64, 4, 3),
        Config(64, 128, 4, 1, True),
        Config(128, 64, 4, 2),
    ],
    128: [
        Config(64, 64, 4, 3, True),
        Config(64, 64, 4, 4, True),
        Config(64, 64, 4, 3),
        Config(64, 128, 4, 3, True),
        Config(64, 32, 4, 4, True),
        Config(64, 64, 4, 1, True),
        Config(128, 64, 8, 2, True, max_registers=128),
    ],
    256: [
        Config(128, 64, 8, 2),
        Config(128, 64, 8, 2, True),
        Config(64, 64, 4, 1, True),
        Config(64, 64, 4, 1),
        Config(64, 32, 4, 2),
        Config(64, 32, 4, 3, True),
        Config(128, 32, 8, 2),
        Config(64, 64, 8, 2),
    ],
}


def variants(dim: int, causal: bool) -> list[Config]:
    """The configs of a head dimension; causal ones also with heads in groups."""
    found = CONFIGS[dim]
    return found + [replace(c, group_heads=True) for c in found[:3]] if causal else found


def name_of(config: Config) -> str:
    m, n, warps, stages, descriptors, groups, registers = astuple(config)
    flags = ("d" if descriptors else "p") + ("g" if groups else "")
    return f"{m}x{n}w{warps}s{stages}{flags}" + (f"r{registers}" if registers else "")


def problem_of(q, k, v, causal: bool) -> tuple[Problem, Tensors]:
    mask, tensors = Mask.of(causal, (-1, -1)), Tensors(q, k, v)
    lengths = (q.shape[1], k.shape[1])
    params = Params(*lengths, mask.left, mask.right, q.shape[-1] ** -0.5, 0.0, False, 0, "")
    return Problem.of(Op.FORWARD, tensors, params), tensors


def check(config: Config, dim: int, causal: bool) -> str:
    """Empty if the config holds the rule of the contract on a small ragged problem."""
    g = torch.Generator(device="cuda").manual_seed(dim)
    shapes = ((2, 333, 4, dim), (2, 421, 2, dim), (2, 421, 2, dim))
    q, k, v = (torch.randn(s, device="cuda", generator=g).bfloat16() for s in shapes)
    try:
        actual = forward.launch_with(config, *problem_of(q, k, v, causal))
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:90]}"
    oracle = reference.attention(q, k, v, causal=causal)
    eager = reference.eager(q, k, v, causal=causal)
    for label, x, want, plain in zip(("out", "lse"), actual, oracle, eager, strict=True):
        error = (x.double() - want).abs().max().item()
        allowed = 2 * (plain.double() - want).abs().max().item() + 4 * torch.finfo(x.dtype).eps
        if not error <= allowed:
            return f"{label} is off by {error:.2e}, allowed {allowed:.2e}"
    return ""


def sdpa(backend, q, k, v, causal):
    with sdpa_kernel(backends=[backend]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


@functools.lru_cache(None)
def flex(length: int, causal: bool):
    import torch._dynamo
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 200
    mask = None
    if causal:
        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, length, length, device="cuda"
        )
    return functools.partial(torch.compile(flex_attention, dynamic=False), block_mask=mask)


def peers(names: list[str], q, k, v, causal: bool) -> dict:
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    known = {
        "flash": lambda: sdpa(SDPBackend.FLASH_ATTENTION, *heads_first, causal),
        "cudnn": lambda: sdpa(SDPBackend.CUDNN_ATTENTION, *heads_first, causal),
        "flex": lambda: flex(q.shape[1], causal)(*heads_first),
    }
    return {name: known[name] for name in names}


def milliseconds(run, repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def time_cell(dim: int, length: int, causal: bool, usable: list[Config], options) -> dict:
    """TFLOP/s of every config and peer in one cell."""
    heads, batch = WIDTH // dim, TOKENS // length
    q, k, v = (
        torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16)
        for _ in range(3)
    )
    problem, tensors = problem_of(q, k, v, causal)
    runs = {name_of(c): functools.partial(forward.launch_with, c, problem, tensors) for c in usable}
    runs["chosen"] = functools.partial(
        forward.launch_with, choose_forward(problem), problem, tensors
    )
    late = time.monotonic() - START > options.budget
    names = [n for n in options.peers.split(",") if n and not (n == "flex" and late)]
    runs |= peers(names, q, k, v, causal)
    flops = 4 * batch * heads * length**2 * dim * (0.5 if causal else 1.0)
    repeats, times = {}, {}
    for name, run in list(runs.items()):
        try:
            run()
            repeats[name] = max(3, math.ceil(8 / milliseconds(run, 2)))
            times[name] = []
        except Exception as error:
            print(f"{name}: {type(error).__name__} {str(error)[:120]}", flush=True)
            del runs[name]
    for _ in range(options.rounds):
        for name, run in runs.items():
            milliseconds(run, 1)
            times[name].append(milliseconds(run, repeats[name]))
    medians = {name: sorted(ts)[len(ts) // 2] for name, ts in times.items()}
    return {name: round(flops / ms / 1e9, 1) for name, ms in medians.items()}


def precompile(dims: list[int]) -> None:
    """Fills Triton's cache, one process for each (dim, causal)."""
    script = str(Path(__file__).resolve())
    children = [
        subprocess.Popen(
            [sys.executable, script, "--compile", f"{dim},{causal}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for dim in dims
        for causal in (0, 1)
    ]
    for child in children:
        try:
            child.wait(timeout=100)
        except subprocess.TimeoutExpired:
            child.kill()


def report(rows: list[dict]) -> None:
    """The short table: the best config of each cell against the peers."""
    print(
        "\n  d     n causal  best                 TFLOP/s chosen   flash cudnn  flex  x_fa2 x_flex"
    )
    for row in rows:
        cell = dict(row["tflops"])
        named = {n: cell.pop(n, 0.0) for n in ("chosen", "flash", "cudnn", "flex")}
        best = max(cell, key=cell.get, default="none")
        top = cell.get(best, 0.0)
        over = [top / named[n] if named[n] else 0.0 for n in ("flash", "flex")]
        print(
            f"{row['dim']:3d} {row['length']:5d} {row['causal']:6d}  {best:20s} {top:7.1f} "
            f"{named['chosen']:6.1f}  {named['flash']:6.1f} {named['cudnn']:5.1f} "
            f"{named['flex']:5.1f}  {over[0]:6.2f}  {over[1]:5.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--lengths", default="4096,16384,1024")
    parser.add_argument("--peers", default="flash,cudnn,flex")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=170)
    parser.add_argument("--compile", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        dim, causal = map(int, options.compile.split(","))
        for config in variants(dim, bool(causal)):
            check(config, dim, bool(causal))
        return
    torch.manual_seed(0)
    dims = [int(d) for d in options.dims.split(",")]
    precompile(dims)
    print(f"compiled after {time.monotonic() - START:.0f} s", flush=True)
    usable = {}
    for dim in dims:
        for causal in (False, True):
            usable[dim, causal] = []
            for config in variants(dim, causal):
                fault = check(config, dim, causal)
                if fault:
                    print(f"left out: d={dim} causal={causal:d} {name_of(config)}: {fault}")
                else:
                    usable[dim, causal].append(config)
    print(f"checked after {time.monotonic() - START:.0f} s", flush=True)
    rows = []
    for length in map(int, options.lengths.split(",")):
        for dim, causal in usable:
            tflops = time_cell(dim, length, causal, usable[dim, causal], options)
            rows.append({"dim": dim, "length": length, "causal": causal, "tflops": tflops})
            print(json.dumps(rows[-1]), flush=True)
    report(rows)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
          f"{time.monotonic() - START:.0f} s in all")  # fmt: skip
    if os.environ.get("OUT"):
        path = Path(os.environ["OUT"]) / "sweep_portable_forward.json"
        path.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
