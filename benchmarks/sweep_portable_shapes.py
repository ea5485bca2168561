"""Times configs of the portable kernels where shapes differ from the plain dense one.

Usage: python benchmarks/sweep_portable_shapes.py [--groups wide,window,varlen,short,table,tight]
           [--peers flash,flex] [--rounds 5] [--budget 80]

Groups: `wide` is the backward at D = 256; `window` a causal window of 1024 at N = 16k against
full causal; `varlen` 64 sequences of 64 to 4096 tokens against a dense batch of their mean
length; `short` the forward at N = 1k; `table` the chosen configs in all 18 cells; `tight` some
of them beside FlexAttention, which no other group runs. bf16, H * D = 2048, 16k tokens in all
where dense. Everything runs from CUDA graphs, so that the time is that of the kernels alone.
Every candidate is first held against the chosen config's result; one that differs or does not
compile is named and left out. Candidates run in turn, round after round, since the clock
follows power and temperature; figures are medians. FLOPs are counted exactly: 4 (forward) or
10 (backward) D for each pair that the mask lets through.
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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from onchip.kernels.portable import backward, forward
from onchip.kernels.portable.backward_config import BackwardConfig, Tiles, choose_backward
from onchip.kernels.portable.config import Config, choose_forward
from onchip.problem import Mask, Op, Params, Problem, Saved, Tensors

TOKENS, WIDTH, WINDOW = 16384, 2048, 1024
START = time.monotonic()
CHILDREN = 12


@dataclass(frozen=True)
class Shape:
    """A problem of H * D = 2048; `lengths` are one for each sequence."""

    dim: int
    lengths: tuple[int, ...]
    causal: bool
    window: int = 0
    packed: bool = False

    @property
    def heads(self) -> int:
        return WIDTH // self.dim

    def pairs(self) -> int:
        """Pairs (query, key) that the mask lets through, over all sequences."""
        total = 0
        for n in self.lengths:
            reach = min(n, self.window or n)
            total += n * reach - reach * (reach - 1) // 2 if self.causal else n * n
        return total

    def flops(self, part: str) -> int:
        return (4 if part == "fwd" else 10) * self.heads * self.dim * self.pairs()

    def small(self) -> Shape:
        """The same kernels, little work."""
        return replace(self, lengths=(min(self.lengths[0], 256),) * 2)


def dense(dim: int, length: int, causal: bool, window: int = 0) -> Shape:
    return Shape(dim, (length,) * (TOKENS // length), causal, window)


def ragged_lengths() -> tuple[int, ...]:
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randint(64, 4097, (64,), generator=g).tolist())


@functools.lru_cache(1)
def pose(shape: Shape) -> tuple[Problem, Tensors, Saved]:
    """Random data, and the chosen forward's output."""
    g = torch.Generator(device="cuda").manual_seed(1)
    n, batch = shape.lengths[0], len(shape.lengths)
    lead = (sum(shape.lengths),) if shape.packed else (batch, n)
    full = (*lead, shape.heads, shape.dim)
    q, k, v, dout = (
        torch.randn(full, device="cuda", generator=g, dtype=torch.bfloat16) for _ in range(4)
    )
    tensors = Tensors(q, k, v)
    if shape.packed:
        ends = torch.tensor([0, *shape.lengths]).cumsum(0).to("cuda", torch.int32)
        tensors.cu_seqlens_q = tensors.cu_seqlens_k = ends
    mask = Mask.of(shape.causal, (shape.window - 1 if shape.window else -1, -1))
    longest = max(shape.lengths)
    params = Params(
        longest, longest, mask.left, mask.right, shape.dim**-0.5, 0.0, False, 0, ""
    )  # fmt: skip
    problem = Problem.of(Op.FORWARD, tensors, params)
    saved = Saved(dout, None, *forward.launch(problem, tensors))
    return problem, tensors, saved


def forward_candidates(dim: int, group: str) -> list[Config]:
    """Forward configs besides the chosen one."""
    D = {"descriptors": True}
    if dim == 64:
        found = [
            Config(64, 128, 4, 2, **D),
            Config(64, 64, 4, 3, **D),
            Config(64, 64, 4, 3),
            Config(64, 64, 4, 2, **D),
            Config(64, 64, 4, 2, **D, group_heads=True),
        ]
    elif dim == 128:
        found = [
            Config(64, 64, 4, 3, **D, group_heads=True),
            Config(64, 64, 4, 2, **D),
            Config(64, 64, 4, 2, **D, max_registers=160),
            Config(64, 64, 4, 2),
            Config(64, 128, 4, 1, **D),
            Config(128, 64, 8, 2, **D),
        ]
        if group == "short":
            found += [Config(64, 32, 4, 3, **D), Config(64, 64, 4, 1, **D)]
    else:
        found = [
            Config(64, 64, 4, 1, **D),
            Config(64, 32, 4, 2, **D),
            Config(64, 32, 4, 2),
            Config(128, 64, 8, 2, **D),
            Config(128, 64, 8, 2),
            Config(128, 32, 8, 3, **D),
        ]
        if group == "short":
            found += [
                Config(128, 64, 8, 2, **D, group_heads=True),
                Config(128, 64, 8, 1, **D),
                Config(64, 64, 4, 1, **D, group_heads=True),
                Config(128, 32, 8, 4, **D),
            ]
    return found


def backward_candidates(dim: int) -> Sequence[tuple[str, Config | BackwardConfig]]:
    """(part, config) of launches that are timed on their own."""
    if dim == 256:
        tiles = {
            "dv": [Tiles(64, 128, 8, 2), Tiles(32, 128, 8, 4), Tiles(32, 128, 8, 3)],
            "dk": [Tiles(32, 128, 8, 3), Tiles(32, 128, 8, 2)],
            "dq": [Tiles(128, 32, 8, 3), Tiles(128, 32, 8, 2)],
            "dkdv": [Tiles(32, 64, 8, 2)],
        }
    elif dim == 128:
        tiles = {
            "dkdv": [Tiles(64, 64, 4, 2), Tiles(64, 128, 8, 2), Tiles(32, 64, 4, 2)],
            "dq": [Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 3)],
        }
    else:
        tiles = {
            "dkdv": [Tiles(64, 64, 4, 3), Tiles(64, 128, 8, 2), Tiles(64, 64, 4, 2)],
            "dq": [Tiles(64, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2)],
        }
    first = {part: choices[0] for part, choices in tiles.items()}
    found = []
    for part, choices in tiles.items():
        for t in choices:
            use = {**first, part: t}
            apart = part in ("dk", "dv")
            owner, dv = (use["dk"], use["dv"]) if apart else (use["dkdv"], None)
            config = BackwardConfig(owner, use["dq"], descriptors=True, dv=dv)
            found.append((part, config))
            if t is choices[0]:
                found.append((part, replace(config, group_heads=True)))
    return found


def name_of(config: Config | BackwardConfig, part: str) -> str:
    t = config if isinstance(config, Config) else config.tiles_of(part)
    extra = f"r{t.max_registers}" if t.max_registers else ""
    extra += "" if config.descriptors else "p"
    extra += "g" if config.group_heads else ""
    return f"{part}:{t.block_m}x{t.block_n}w{t.num_warps}s{t.num_stages}{extra}"


def outputs_of(part: str, config, posed) -> tuple[torch.Tensor, ...]:
    """What a candidate computes, to be compared."""
    problem, tensors, saved = posed
    if part == "fwd":
        return forward.launch_with(config, problem, tensors)
    which = {"dq": [0], "dk": [1], "dv": [2], "dkdv": [1, 2], "bwd": [0, 1, 2]}[part]
    gradients = backward.launch_with(config, replace(problem, op=Op.BACKWARD), tensors, saved)
    return tuple(gradients[i] for i in which)


@functools.lru_cache(8)
def expected(shape: Shape, part: str) -> tuple[torch.Tensor, ...]:
    posed = pose(shape)
    choose = choose_forward if part == "fwd" else choose_backward
    return outputs_of(part, choose(posed[0]), posed)


def fault_of(shape: Shape, part: str, config) -> str:
    """Empty if the candidate gives what the chosen config gives."""
    try:
        actual = outputs_of(part, config, pose(shape))
        torch.cuda.synchronize()
        for x, want in zip(actual, expected(shape, part), strict=True):
            error = (x.float() - want.float()).abs().max().item()
            if not error <= 0.02 * want.float().abs().max().item():
                return f"off by {error:.2e}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:90]}"
    return ""


def runner(shape: Shape, part: str, config):
    """A function that runs the candidate."""
    problem, tensors, saved = pose(shape)
    if part == "fwd":
        return functools.partial(forward.launch_with, config, problem, tensors)
    problem = replace(problem, op=Op.BACKWARD)
    if part == "bwd":
        return functools.partial(backward.launch_with, config, problem, tensors, saved)
    return backward.only(part, config, problem, tensors, saved)


def _sees(b, h, i, j):
    return i >= j


@functools.lru_cache(None)
def flex(length: int, causal: bool):
    import torch._dynamo
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 200
    mask = None
    if causal:
        mask = create_block_mask(_sees, None, None, length, length, device="cuda")
    return functools.partial(torch.compile(flex_attention, dynamic=False), block_mask=mask)


def peer(name: str, shape: Shape, part: str):
    """A function that runs a peer's forward or backward."""
    _, tensors, saved = pose(shape)
    inputs = [x.detach().transpose(1, 2) for x in (tensors.q, tensors.k, tensors.v)]
    if part == "bwd":
        inputs = [x.requires_grad_() for x in inputs]

    def run():
        if name == "flex":
            return flex(shape.lengths[0], shape.causal)(*inputs)
        with sdpa_kernel(backends=[SDPBackend.FLASH_ATTENTION]):
            return F.scaled_dot_product_attention(*inputs, is_causal=shape.causal)

    if part == "fwd":
        return run
    out, gradient = run(), saved.dout.transpose(1, 2)
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def captured(run):
    """A CUDA graph's replay of the call; the call itself where it cannot be captured."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        run()
    return graph.replay


def milliseconds(run, repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def interleaved(runs: dict, rounds: int) -> dict[str, float]:
    """Median milliseconds of each run; one that raises is named and left out."""
    ready, repeats = {}, {}
    times: dict[str, list[float]] = {}
    for name, run in runs.items():
        try:
            ready[name] = captured(run)
            once = milliseconds(ready[name], 2)
            repeats[name] = min(50, max(2, math.ceil(6 / once)))
            times[name] = []
        except Exception as error:
            ready.pop(name, None)
            print(f"  {name}: {type(error).__name__} {str(error)[:100]}", flush=True)
    for _ in range(rounds):
        for name, run in ready.items():
            milliseconds(run, 1)
            times[name].append(milliseconds(run, repeats[name]))
    return {name: sorted(ts)[len(ts) // 2] for name, ts in times.items()}


def cells_of(groups: list[str]) -> list[tuple[str, str, Shape]]:
    """(group, "fwd" or "bwd", shape) of everything that is measured."""
    both, dims = (False, True), (64, 128, 256)
    cells = []
    if "wide" in groups:
        cells += [("wide", "bwd", dense(256, n, c)) for n in (1024, 4096, 16384) for c in both]
    if "window" in groups:
        cells += [
            ("window", part, dense(dim, TOKENS, True, WINDOW))
            for dim in dims for part in ("fwd", "bwd")
        ]  # fmt: skip
    if "varlen" in groups:
        cells += [
            ("varlen", part, Shape(dim, ragged_lengths(), c, packed=True))
            for dim in dims for part in ("fwd", "bwd") for c in both
        ]  # fmt: skip
    if "short" in groups:
        cells += [("short", "fwd", dense(dim, 1024, c)) for dim in dims for c in both]
    if "tight" in groups:
        cells += [("tight", "fwd", dense(*of, False)) for of in ((64, 1024), (128, 1024))]
        cells += [("tight", p, dense(128, n, False)) for n in (4096, 16384) for p in ("fwd", "bwd")]
    if "table" in groups:
        cells += [
            ("table", part, dense(dim, n, c))
            for part in ("fwd", "bwd") for dim in dims for n in (16384, 4096, 1024) for c in both
        ]  # fmt: skip
    return cells


def candidates_of(group: str, part: str, shape: Shape) -> list[tuple[str, Config | BackwardConfig]]:
    """(part, config) that are timed besides the chosen config."""
    if group in ("table", "tight"):
        return []
    if part == "fwd":
        return [("fwd", c) for c in forward_candidates(shape.dim, group)]
    return list(backward_candidates(shape.dim))


def baseline_of(group: str, shape: Shape) -> Shape | None:
    """The dense problem that a cell's speed is held against."""
    if group == "window":
        return replace(shape, window=0)
    if group == "varlen":
        mean = round(sum(shape.lengths) / len(shape.lengths))
        return replace(shape, lengths=(mean,) * len(shape.lengths), packed=False)
    return None


def compile_share(share: int, groups: list[str]) -> None:
    """Compiles every CHILDREN-th candidate by running it on little data."""
    jobs = {}
    for group, part, shape in cells_of(groups):
        small = shape.small()
        for which, config in [*candidates_of(group, part, shape), (part, None)]:
            jobs[small, which, config] = None
        if base := baseline_of(group, shape):
            jobs[base.small(), part, None] = None
    for small, which, config in list(jobs)[share::CHILDREN]:
        posed = pose(small)
        choose = choose_forward if which == "fwd" else choose_backward
        outputs = functools.partial(outputs_of, which, config or choose(posed[0]), posed)
        try:
            outputs()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"compile {which} {config}: {str(error)[:100]}")


def precompile(groups: str) -> None:
    command = [sys.executable, str(Path(__file__).resolve()), "--groups", groups, "--compile"]
    sink = subprocess.DEVNULL
    children = [
        subprocess.Popen([*command, str(i)], stdout=sink, stderr=sink) for i in range(CHILDREN)
    ]
    for child in children:
        try:
            child.wait(timeout=60)
        except subprocess.TimeoutExpired:
            child.kill()


def measure(group: str, part: str, shape: Shape, options) -> dict:
    """Milliseconds and TFLOP/s of one cell's candidates, baseline and peers."""
    problem = pose(shape)[0]
    chosen = choose_forward(problem) if part == "fwd" else choose_backward(problem)
    runs = {"chosen": runner(shape, part, chosen)}
    for which, config in candidates_of(group, part, shape):
        name = name_of(config, which)
        fault = fault_of(shape, which, config)
        if fault:
            print(f"  left out {name}: {fault}", flush=True)
        else:
            runs[name] = runner(shape, which, config)
    expected.cache_clear()
    for name in options.peers.split(",") if group not in ("window", "varlen") else ():
        late = time.monotonic() - START > options.budget
        if name and not (name == "flex" and (late or group != "tight")):
            try:
                runs[name] = peer(name, shape, part)
            except Exception as error:
                print(f"  {name}: {type(error).__name__} {str(error)[:100]}", flush=True)
    base = baseline_of(group, shape)
    if base:
        base_problem = pose(base)[0]
        choose = choose_forward if part == "fwd" else choose_backward
        runs["base"] = runner(base, part, choose(base_problem))
    ms = interleaved(runs, options.rounds)
    whole = {n: t for n, t in ms.items() if n in ("chosen", "flash", "flex") or n[:3] == "fwd"}
    tflops = {n: round(shape.flops(part) / t / 1e9, 1) for n, t in whole.items()}
    if base and "base" in ms:
        tflops["base"] = round(base.flops(part) / ms["base"] / 1e9, 1)
    row = {
        "group": group, "part": part, "dim": shape.dim, "length": max(shape.lengths),
        "causal": shape.causal, "ms": {n: round(t, 4) for n, t in ms.items()}, "tflops": tflops,
    }  # fmt: skip
    if group == "window":
        row["of_full"] = {n: round(t / ms["base"], 3) for n, t in whole.items()}
    if group == "varlen":
        row["of_dense"] = {n: round(t / tflops["base"], 3) for n, t in tflops.items()}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--groups", default="wide,window,varlen,short,table")
    parser.add_argument("--peers", default="flash")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=80)
    parser.add_argument("--compile", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    groups = options.groups.split(",")
    torch.cuda.set_stream(torch.cuda.Stream())  # graphs cannot capture the default stream
    if options.compile >= 0:
        compile_share(options.compile, groups)
        return
    precompile(options.groups)
    print(f"compiled after {time.monotonic() - START:.0f} s", flush=True)
    rows = []
    for group, part, shape in cells_of(groups):
        if time.monotonic() - START > options.budget:
            print("out of time", flush=True)
            break
        try:
            rows.append(measure(group, part, shape, options))
            print(json.dumps(rows[-1]), flush=True)
        except Exception as error:
            print(f"{group} {part} {shape.dim}: {type(error).__name__} {str(error)[:200]}")
        pose.cache_clear()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
          f"{time.monotonic() - START:.0f} s in all")  # fmt: skip
    if os.environ.get("OUT"):
        path = Path(os.environ["OUT"]) / "sweep_portable_shapes.json"
        path.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
