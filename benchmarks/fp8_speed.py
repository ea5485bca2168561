"""Speed of float8 attention on one Hopper GPU: forward, quantisation, other configs, peers.

Usage: python benchmarks/fp8_speed.py [--json OUT.json] [--sweep] [--rounds 7]

16k tokens in all, H * D = 2048, D 64, 128 and 256, N 16k, 4k and 1k, causal and not; inputs are
random. Peers: FlashAttention-3's float8, where its package is installed, on codes without scales
(values are then transposed in its kernel), and onchip's own bfloat16. The quantisation reads
bfloat16 q, k and v and writes scales of blocks, transformed; it is timed as a CUDA graph. --sweep
adds `CANDIDATES`. All take turns; figures are medians. TFLOP/s count 4 B H N^2 D, half of it when
causal.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

import onchip
from onchip.bench import timing
from onchip.kernels.hopper import fp8
from onchip.kernels.hopper.fp8_config import FP8Config, choose_fp8
from onchip.problem import Op, Params, Problem, Tensors

TOKENS, WIDTH = 16384, 2048
DIMS, LENGTHS = (128, 256, 64), (16384, 4096, 1024)

_TWO = functools.partial(FP8Config, warpgroups=2, stages=2, q_buffers=2, turns=True, registers=240)
_THREE = functools.partial(_TWO, warpgroups=3, registers=160)
_TALL = functools.partial(_TWO, parts=2)
CANDIDATES = {
    64: {"two": _TWO(), "three": _THREE(), "three, free": _THREE(turns=False),
         "one level": _THREE(two_level=False)},
    128: {"free": _TWO(turns=False), "one level": _TWO(two_level=False)},
    256: {"free": _TALL(turns=False), "turns": _TALL(), "one level": _TALL(two_level=False),
          "one buffer of Q": _TALL(q_buffers=1)},
}  # fmt: skip


def inputs(dim: int, length: int, dtype=torch.bfloat16) -> list[torch.Tensor]:
    """q, k and v (B, N, H, D)."""
    shape = (TOKENS // length, length, WIDTH // dim, dim)
    return [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3)]


def posed(q, k, v, causal: bool) -> tuple[Problem, Tensors]:
    """Quantised inputs as kernels take them."""
    x = onchip.quantize_qkv(q, k, v)
    tensors = Tensors(x.q, x.k, x.v, scales=(x.q_scale, x.k_scale, x.v_scale))
    lengths = (q.shape[1], k.shape[1])
    params = Params(*lengths, -1, 0 if causal else -1, q.shape[-1] ** -0.5, 0.0, False, 0, "",
                    out_dtype="bfloat16")  # fmt: skip
    return Problem.of(Op.FORWARD, tensors, params), tensors


def fa3_call(q, k, v, causal: bool) -> Callable[[], object]:
    """FlashAttention-3's float8 attention of the same numbers."""
    import flash_attn_interface  # type: ignore[import-not-found]

    codes = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    ones = torch.ones(q.shape[0], q.shape[2], device=q.device)
    scales = dict.fromkeys(("q_descale", "k_descale", "v_descale"), ones)
    return lambda: flash_attn_interface.flash_attn_func(*codes, causal=causal, **scales)


def replayed(call: Callable[[], object]) -> Callable[[], object]:
    """A call as a CUDA graph: the GPU's time where the host takes longer."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def calls_of(dim: int, length: int, causal: bool, sweep: bool) -> dict[str, Callable[[], object]]:
    """name -> what to time; those that fail are left out."""
    q, k, v = inputs(dim, length)
    problem, tensors = posed(q, k, v, causal)
    found = {
        "onchip": lambda: fp8.launch_with(None, problem, tensors),
        "bfloat16": lambda: onchip.attention(q, k, v, causal=causal),
        "quantise": replayed(lambda: onchip.quantize_qkv(q, k, v)),
    }
    with contextlib.suppress(ModuleNotFoundError):
        found["fa3"] = fa3_call(q, k, v, causal)
    for name, config in CANDIDATES[dim].items() if sweep else ():
        found[name] = functools.partial(fp8.launch_with, config, problem, tensors)
    for name in list(found):
        try:
            found[name]()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{name} left out: {str(error)[:100]!r}", flush=True)
            del found[name]
    return found


def cell(dim: int, length: int, causal: bool, sweep: bool, rounds: int) -> dict:
    """One row of results; times in milliseconds."""
    calls = calls_of(dim, length, causal, sweep)
    times = timing.interleaved_device_ms(calls, rounds, min_time_ms=2.0)
    ms = {name: statistics.median(x) for name, x in times.items()}
    flops = 4 * TOKENS * length * WIDTH / (2 if causal else 1)
    return {
        "dim": dim, "length": length, "causal": causal, "ms": ms,
        "tflops": {name: flops / x / 1e9 for name, x in ms.items() if name != "quantise"},
    }  # fmt: skip


def main() -> None:
    """Prints a line for each cell and writes JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    rows = []
    for length in LENGTHS:
        for dim in DIMS:
            for causal in (False, True):
                row = cell(dim, length, causal, options.sweep, options.rounds)
                rows.append(row)
                speeds = " ".join(f"{n}:{x:.0f}" for n, x in row["tflops"].items())
                print(dim, length, "causal" if causal else "full", speeds,
                      f"quantise:{1e3 * row['ms']['quantise']:.0f}us", flush=True)  # fmt: skip
                if options.json:
                    _write(options.json, rows)


def _write(path: Path, rows: list[dict]) -> None:
    chosen = {}
    for dim in DIMS:
        for causal in (False, True):
            problem = _problem(dim, causal)
            chosen[f"{dim} {'causal' if causal else 'full'}"] = asdict(choose_fp8(problem))
    candidates = {dim: {n: asdict(c) for n, c in each.items()} for dim, each in CANDIDATES.items()}
    found = {"gpu": torch.cuda.get_device_name(), "rows": rows, "chosen": chosen,
             "candidates": candidates}  # fmt: skip
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


@functools.lru_cache(None)
def _problem(dim: int, causal: bool) -> Problem:
    return posed(*inputs(dim, LENGTHS[-1]), causal)[0]


if __name__ == "__main__":
    main()
