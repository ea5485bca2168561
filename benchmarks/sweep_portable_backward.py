"""Times configs of the portable backward side by side with torch's attention on one GPU.

Usage: python benchmarks/sweep_portable_backward.py [--dims 64,128,256]
           [--lengths 4096,16384,1024] [--peers flash,cudnn,flex] [--rounds 3] [--budget 200]

16k tokens in all, H * D = 2048, bf16. Every config is first held against the float64 oracle
under the contract's rule; one that fails or does not compile is named and left out. Each of the
three kernels is timed on its own for every tiling, then whole backwards (the best pair of
tilings, every config that adds up dQ atomically, and the chosen one) and peers run in turn,
round after round, since the clock follows power and temperature; figures are medians in
TFLOP/s of 10 B H S^2 D (half of it when causal). A JSON goes to $OUT where that is set.
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
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from onchip import reference
from onchip.kernels.portable import backward, forward
from onchip.kernels.portable.backward_config import BackwardConfig, Tiles, choose_backward
from onchip.problem import Mask, Op, Params, Problem, Saved, Tensors

TOKENS, WIDTH = 16384, 2048
START = time.monotonic()

DKDV = {
    64: [
        Tiles(64, 128, 8, 2),
        Tiles(64, 128, 8, 3),
        Tiles(64, 64, 4, 2),
        Tiles(64, 64, 4, 3),
        Tiles(128, 64, 8, 2),
        Tiles(64, 128, 8, 2, 128),
    ],
    128: [
        Tiles(64, 128, 8, 2),
        Tiles(64, 128, 8, 3),
        Tiles(64, 64, 4, 2),
        Tiles(32, 128, 8, 3),
        Tiles(32, 64, 4, 2),
        Tiles(128, 64, 8, 2),
    ],
    256: [
        Tiles(64, 64, 8, 2),
        Tiles(64, 64, 8, 1),
        Tiles(32, 64, 8, 2),
        Tiles(64, 32, 4, 1),
        Tiles(32, 64, 8, 1),
    ],
}
DQ = {
    64: [
        Tiles(128, 64, 8, 3),
        Tiles(128, 128, 8, 2),
        Tiles(64, 64, 4, 3),
        Tiles(64, 128, 4, 2),
        Tiles(128, 64, 4, 2),
    ],
    128: [
        Tiles(128, 64, 8, 2),
        Tiles(128, 64, 8, 3),
        Tiles(128, 128, 8, 2),
        Tiles(64, 64, 4, 2),
        Tiles(64, 64, 4, 3),
        Tiles(128, 32, 8, 3),
    ],
    256: [
        Tiles(128, 32, 8, 2),
        Tiles(128, 32, 8, 3),
        Tiles(64, 64, 8, 1),
        Tiles(64, 32, 4, 2),
        Tiles(64, 64, 4, 1),
        Tiles(128, 64, 8, 1),
    ],
}
# Tiles of launches that make dV or dK alone.
APART = {
    256: {
        "dv": [Tiles(64, 128, 8, 2), Tiles(32, 128, 8, 4), Tiles(64, 64, 4, 1)],
        "dk": [
            Tiles(32, 128, 8, 3),
            Tiles(32, 128, 8, 2),
            Tiles(64, 128, 8, 1),
            Tiles(32, 64, 4, 1),
        ],
    },
}
# Configs that add up dQ from the dK/dV kernel: (tiles, reduction).
FUSED = {
    64: [(Tiles(64, 128, 8, 2), "tma"), (Tiles(64, 64, 4, 2), "tma")],
    128: [
        (Tiles(64, 128, 8, 2), "tma"),
        (Tiles(64, 64, 4, 2), "tma"),
        (Tiles(32, 128, 8, 2), "tma"),
    ],
    256: [
        (Tiles(64, 64, 8, 1), "tma"),
        (Tiles(32, 64, 8, 2), "tma"),
        (Tiles(32, 64, 8, 1), "tma"),
        (Tiles(64, 64, 8, 1), "atomics"),
    ],
}


def variants(dim: int, causal: bool) -> list[tuple[str, str, BackwardConfig]]:
    """(part, name, config) of everything that is timed; part is dkdv, dv, dk, dq or all."""
    dkdv, dq = DKDV[dim][0], DQ[dim][0]
    found = []
    for tiles in DKDV[dim]:
        found.append(("dkdv", name_of(tiles), BackwardConfig(tiles, dq, descriptors=True)))
    for tiles in DQ[dim]:
        found.append(("dq", name_of(tiles), BackwardConfig(dkdv, tiles, descriptors=True)))
    apart = APART.get(dim, {})
    for which, choices in apart.items():
        for tiles in choices:
            use = {part: first[0] for part, first in apart.items()} | {which: tiles}
            config = BackwardConfig(use["dk"], dq, descriptors=True, dv=use["dv"])
            found.append((which, name_of(tiles), config))
    first = BackwardConfig(dkdv, dq)
    found += [("dkdv", "pointers", first), ("dq", "pointers", first)]
    if causal:
        grouped = replace(first, descriptors=True, group_heads=True)
        found += [("dkdv", "grouped", grouped), ("dq", "grouped", grouped)]
    for tiles, reduction in FUSED[dim]:
        config = BackwardConfig(tiles, dq, reduction, descriptors=True)
        found.append(("all", f"{reduction}_{name_of(tiles)}", config))
    return found


def name_of(tiles: Tiles) -> str:
    registers = f"r{tiles.max_registers}" if tiles.max_registers else ""
    return f"{tiles.block_m}x{tiles.block_n}w{tiles.num_warps}s{tiles.num_stages}{registers}"


def problem_of(q, k, v, causal: bool) -> tuple[Problem, Tensors]:
    mask, tensors = Mask.of(causal, (-1, -1)), Tensors(q, k, v)
    lengths = (q.shape[1], k.shape[1])
    params = Params(*lengths, mask.left, mask.right, q.shape[-1] ** -0.5, 0.0, False, 0, "")
    return Problem.of(Op.BACKWARD, tensors, params), tensors


@functools.lru_cache(None)
def small_case(dim: int, causal: bool):
    """A ragged problem with grouped heads, the oracle's gradients and what eager would give."""
    g = torch.Generator(device="cuda").manual_seed(dim)
    shapes = ((2, 333, 4, dim), (2, 421, 2, dim), (2, 421, 2, dim), (2, 333, 4, dim))
    q, k, v, dout = (torch.randn(s, device="cuda", generator=g).bfloat16() for s in shapes)
    out, lse = reference.attention(q, k, v, causal=causal)
    oracle = reference.attention_backward(q, k, v, dout, causal=causal)[:3]
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    plain = reference.eager(*inputs, causal=causal)[0]
    eager = torch.autograd.grad(plain, inputs, dout)
    saved = Saved(dout, None, out.bfloat16(), lse.float())
    return *problem_of(q, k, v, causal), saved, oracle, eager


def check(config: BackwardConfig, dim: int, causal: bool) -> str:
    """Empty if the config holds the rule of the contract on a small ragged problem."""
    problem, tensors, saved, oracle, eager = small_case(dim, causal)
    try:
        actual = backward.launch_with(config, problem, tensors, saved)[:3]
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:90]}"
    for label, x, want, plain in zip(("dq", "dk", "dv"), actual, oracle, eager, strict=True):
        error = (x.double() - want).abs().max().item()
        slack = 4 * torch.finfo(x.dtype).eps * want.abs().max().item()
        allowed = 2 * (plain.double() - want).abs().max().item() + slack
        if not error <= allowed:
            return f"{label} is off by {error:.2e}, allowed {allowed:.2e}"
    return ""


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


def peer(name: str, q, k, v, dout, causal: bool):
    """A function that runs a peer's backward."""
    inputs = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    if name == "flex":
        out = flex(q.shape[1], causal)(*inputs)
    else:
        backend = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[name]
        with sdpa_kernel(backends=[backend]):
            out = F.scaled_dot_product_attention(*inputs, is_causal=causal)
    gradient = dout.transpose(1, 2)
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def part(name: str, config: BackwardConfig, problem, tensors, saved):
    """A function that runs one launch of the backward, or all of it."""
    if name == "all":
        return functools.partial(backward.launch_with, config, problem, tensors, saved)
    return backward.only(name, config, problem, tensors, saved)


def milliseconds(run, repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def interleaved(runs: dict, rounds: int) -> dict:
    """Median milliseconds of each run; one that raises is named and left out."""
    repeats, times = {}, {}
    for name, run in list(runs.items()):
        try:
            run()
            repeats[name] = max(2, math.ceil(6 / milliseconds(run, 2)))
            times[name] = []
        except Exception as error:
            print(f"{name}: {type(error).__name__} {str(error)[:120]}", flush=True)
            del runs[name]
    for _ in range(rounds):
        for name, run in runs.items():
            milliseconds(run, 1)
            times[name].append(milliseconds(run, repeats[name]))
    return {name: sorted(ts)[len(ts) // 2] for name, ts in times.items()}


def time_cell(dim: int, length: int, causal: bool, usable: list, options) -> dict:
    """Milliseconds of the parts and TFLOP/s of whole backwards and peers in one cell."""
    heads, batch = WIDTH // dim, TOKENS // length
    q, k, v, dout = (
        torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16)
        for _ in range(4)
    )
    problem, tensors = problem_of(q, k, v, causal)
    saved = Saved(dout, None, *forward.launch(replace(problem, op=Op.FORWARD), tensors))
    parts = {
        f"{which}:{name}": part(which, config, problem, tensors, saved)
        for which, name, config in usable
        if which != "all"
    }
    times = interleaved(parts, options.rounds)
    whole = {}
    best = {}
    for which in ("dkdv", "dq", "dv", "dk"):
        prefix = which + ":"
        mine = {n: t for n, t in times.items() if n.startswith(prefix)}
        best[which] = min(mine, key=lambda n: mine[n], default="")
    configs = {f"{which}:{name}": config for which, name, config in usable}
    if best["dkdv"] and best["dq"]:
        pair = replace(configs[best["dkdv"]], dq=configs[best["dq"]].dq)
        apart = (best["dv"], best["dk"])
        if all(apart) and times[apart[0]] + times[apart[1]] < times[best["dkdv"]]:
            dv, dk = (configs[name] for name in apart)
            pair = replace(dv, dkdv=dk.dkdv, dq=pair.dq)
        whole["pair"] = part("all", pair, problem, tensors, saved)
    whole["chosen"] = part("all", choose_backward(problem), problem, tensors, saved)
    for which, name, config in usable:
        if which == "all":
            whole[name] = part("all", config, problem, tensors, saved)
    late = time.monotonic() - START > options.budget
    for name in options.peers.split(","):
        if name and not (name == "flex" and late):
            try:
                whole[name] = peer(name, q, k, v, dout, causal)
            except Exception as error:
                print(f"{name}: {type(error).__name__} {str(error)[:120]}", flush=True)
    flops = 10 * batch * heads * length**2 * dim * (0.5 if causal else 1.0)
    tflops = {
        name: round(flops / ms / 1e9, 1) for name, ms in interleaved(whole, options.rounds).items()
    }
    return {
        "dim": dim,
        "length": length,
        "causal": causal,
        "tflops": tflops,
        "best": best,
        "part_ms": {name: round(ms, 3) for name, ms in times.items()},
    }


def precompile(dims: list[int]) -> None:
    """Fills Triton's cache, one process for each (dim, causal, half of the configs)."""
    script = str(Path(__file__).resolve())
    children = [
        subprocess.Popen(
            [sys.executable, script, "--compile", f"{dim},{causal},{half}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for dim in dims
        for causal in (0, 1)
        for half in (0, 1)
    ]
    for child in children:
        try:
            child.wait(timeout=80)
        except subprocess.TimeoutExpired:
            child.kill()


def report(rows: list[dict]) -> None:
    """The short table: the best whole backward of each cell against the peers."""
    print(
        "\n  d     n causal  pair chosen  best fused              flash cudnn  flex  x_fa2 x_flex"
    )
    for row in rows:
        cell = dict(row["tflops"])
        named = {n: cell.pop(n, 0.0) for n in ("pair", "chosen", "flash", "cudnn", "flex")}
        fused = max(cell, key=lambda n: cell[n], default="none")
        top = max(cell.get(fused, 0.0), named["pair"], named["chosen"])
        over = [top / named[n] if named[n] else 0.0 for n in ("flash", "flex")]
        print(
            f"{row['dim']:3d} {row['length']:5d} {row['causal']:6d} {named['pair']:6.1f} "
            f"{named['chosen']:6.1f} {cell.get(fused, 0.0):6.1f} {fused:18s}"
            f"{named['flash']:6.1f} {named['cudnn']:5.1f} {named['flex']:5.1f} "
            f"{over[0]:6.2f}  {over[1]:5.2f}  {row['best']['dkdv']} {row['best']['dq']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--lengths", default="4096,16384,1024")
    parser.add_argument("--peers", default="flash,cudnn,flex")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=200)
    parser.add_argument("--compile", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        dim, causal, half = map(int, options.compile.split(","))
        for _, _, config in variants(dim, bool(causal))[half::2]:
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
            for which, name, config in variants(dim, causal):
                fault = check(config, dim, causal)
                if fault:
                    print(f"left out: d={dim} causal={causal:d} {which}:{name}: {fault}")
                else:
                    usable[dim, causal].append((which, name, config))
    print(f"checked after {time.monotonic() - START:.0f} s", flush=True)
    rows = []
    for length in map(int, options.lengths.split(",")):
        for dim, causal in usable:
            rows.append(time_cell(dim, length, causal, usable[dim, causal], options))
            print(json.dumps(rows[-1]), flush=True)
    report(rows)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
          f"{time.monotonic() - START:.0f} s in all")  # fmt: skip
    if os.environ.get("OUT"):
        path = Path(os.environ["OUT"]) / "sweep_portable_backward.json"
        path.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
