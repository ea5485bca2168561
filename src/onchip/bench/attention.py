"""Speed of the GPU kernels beside torch's own attention, in one process, in turns.

Usage: python -m onchip.bench attention [--json PATH] [--rounds 7] [--peers torch] [--kernel NAME]

Peers: flash, cudnn and flex (together: torch), and fa3 and fa4 where their packages are installed
(the latter compiles at its first call). A window, packed sequences, memory and the layer of a long
sequence are measured too (`onchip.bench.varied`).

16k tokens in all, H * D = 2048, bf16, D 64, 128 and 256, N 1k, 4k and 16k, causal and not.
TFLOP/s count 4 B H N^2 D for the forward and 10 B H N^2 D for the backward, half of it when
causal. Figures are medians over rounds; a peer that fails in a cell is left out of it.

Legend: B batch, N sequence length, H heads, D head dimension.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from onchip import reference
from onchip.api import attention
from onchip.bench import timing, varied

TOKENS, WIDTH = varied.TOKENS, varied.WIDTH
DIMS, LENGTHS = varied.DIMS, varied.LENGTHS
RESULTS = Path("benchmarks/results/h200")

Call = Callable[..., torch.Tensor]  # (q, k, v, causal) -> out, all (B, N, H, D)


def onchip_call(q, k, v, causal: bool, kernel: str | None = None) -> torch.Tensor:
    """(B, N, H, D) in and out."""
    return attention(q, k, v, causal=causal, kernel=kernel)  # type: ignore[return-value]


def _eager_call(q, k, v, causal: bool) -> torch.Tensor:
    return reference.eager(q, k, v, causal=causal)[0]


def sdpa_call(backend_name: str, q, k, v, causal: bool) -> torch.Tensor:
    """torch's scaled_dot_product_attention through one backend."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(backends=[getattr(SDPBackend, backend_name)]):
        inputs = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*inputs, is_causal=causal).transpose(1, 2)


def _sees(b, h, i, j):
    return i >= j


@functools.lru_cache(None)
def _compiled_flex(length: int, causal: bool):
    from torch._functorch import config as functorch_config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 200
    functorch_config.donated_buffer = False  # a backward is timed again and again
    mask = None
    if causal:
        mask = create_block_mask(_sees, None, None, length, length, device="cuda")
    return functools.partial(torch.compile(flex_attention, dynamic=False), block_mask=mask)


def flex_call(q, k, v, causal: bool) -> torch.Tensor:
    """Compiled FlexAttention."""
    flex = _compiled_flex(q.shape[1], causal)
    return flex(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def output_of(found) -> torch.Tensor:
    """What a release returns, alone or before the LSE."""
    return found[0] if isinstance(found, tuple) else found


def fa3_call(q, k, v, causal: bool) -> torch.Tensor:
    """FlashAttention-3, where its package is installed."""
    import flash_attn_interface  # type: ignore[import-not-found]

    return output_of(flash_attn_interface.flash_attn_func(q, k, v, causal=causal))


def fa4_call(q, k, v, causal: bool) -> torch.Tensor:
    """FlashAttention-4, where its package is installed."""
    from flash_attn.cute import interface  # type: ignore[import-not-found]

    return output_of(interface.flash_attn_func(q, k, v, causal=causal))


PEERS: dict[str, Call] = {
    "flash": functools.partial(sdpa_call, "FLASH_ATTENTION"),
    "cudnn": functools.partial(sdpa_call, "CUDNN_ATTENTION"),
    "flex": flex_call,
    "fa3": fa3_call,
    "fa4": fa4_call,
}
_TORCH_PEERS = "flash,cudnn,flex"


def chosen_peers(text: str) -> list[str]:
    """Names in a comma-separated list, where torch stands for its three backends.

    Raises:
        ArgumentTypeError: for a name that is no peer.
    """
    return _names(text.replace("torch", _TORCH_PEERS), (*PEERS, "torch"))


PARTS = ("forward", "backward", "varied")


def chosen_parts(text: str) -> list[str]:
    """Names in a comma-separated list of parts.

    Raises:
        ArgumentTypeError: for a name that is no part.
    """
    return _names(text, PARTS)


def _names(text: str, allowed: tuple[str, ...]) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in allowed:
            raise argparse.ArgumentTypeError(
                f"got {name!r}; allowed: {', '.join(allowed)}, separated by commas"
            )
    return names


def inputs_of(dim: int, length: int) -> list[torch.Tensor]:
    """Random q, k, v (B, N, H, D) that require a gradient."""
    shape = (TOKENS // length, length, WIDTH // dim, dim)
    return [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    ]


def check(call: Call, dim: int, causal: bool) -> None:
    """Holds one of onchip's kernels against the oracle on a small ragged problem.

    Raises:
        AssertionError: if an output or gradient is off by more than twice eager's own error.
    """
    q, k, v = (torch.randn(2, 333, 2, dim, device="cuda").bfloat16() for _ in range(3))
    dout = torch.randn_like(q)
    oracle = reference.attention_backward(q, k, v, dout, causal=causal)
    grads = []
    both: tuple[Call, Call] = (call, _eager_call)
    for each in both:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        grads.append(torch.autograd.grad(each(*leaves, causal), leaves, dout))
    for name, ours, eager in zip(("dq", "dk", "dv"), *grads, strict=True):
        want = getattr(oracle, name)
        error, allowed = ((x.double() - want).abs().max().item() for x in (ours, eager))
        assert error <= 2 * allowed + 0.03 * want.abs().max().item(), (dim, causal, name, error)


def _runs(calls: dict[str, Call], inputs, causal: bool, part: str) -> dict[str, Callable]:
    """What to time for each call; calls that fail are left out."""
    runs: dict[str, Callable] = {}
    for name, call in calls.items():
        try:
            if part == "forward":
                leaves = [x.detach() for x in inputs]
                runs[name] = functools.partial(call, *leaves, causal)
            else:
                out = call(*inputs, causal)
                dout = torch.randn_like(out)
                runs[name] = functools.partial(
                    torch.autograd.grad, out, inputs, dout, retain_graph=True
                )
            runs[name]()
        except Exception as error:
            runs.pop(name, None)
            print(f"{name} left out: {type(error).__name__}: {str(error)[:80]}", flush=True)
    return runs


def measure(calls: dict[str, Call], dim: int, length: int, causal: bool, part: str, rounds: int):
    """Median TFLOP/s of each call in one cell, measured in turns."""
    inputs = inputs_of(dim, length)
    runs = _runs(calls, inputs, causal, part)
    flops = (4 if part == "forward" else 10) * TOKENS * length * WIDTH / (2 if causal else 1)
    times = timing.interleaved_device_ms(runs, rounds)
    return {n: flops / statistics.median(t) / 1e9 for n, t in times.items()}


def device_report() -> dict:
    """Device, clocks, versions and date, as a JSON result begins."""
    query = "name,clocks.sm,clocks.mem,clocks.max.sm,power.limit,driver_version"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "nvidia_smi": dict(zip(query.split(","), found.stdout.strip().split(", "), strict=False)),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
        "dtype": "bfloat16",
        "unit": "TFLOP/s",
    }


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m onchip.bench attention", description=__doc__)
    parser.add_argument("--json", type=Path, help=f"default: {RESULTS}/KERNEL.json")
    parser.add_argument("--kernel", default="portable", help="a kernel's name, or auto")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each call (7)")
    parser.add_argument(
        "--peers", type=chosen_peers, default=chosen_peers("torch"),
        help=f"of {', '.join(PEERS)}, or torch (the default) for its three",
    )  # fmt: skip
    parser.add_argument(
        "--parts", type=chosen_parts, default=list(PARTS), help=f"of {', '.join(PARTS)} (all)"
    )
    args = parser.parse_args(argv)
    args.json = args.json or RESULTS / f"{args.kernel}.json"
    return args


def main(argv: list[str] | None = None) -> int:
    """Checks, measures every cell, prints a table, writes JSON after each cell."""
    args = _arguments(argv)
    if not torch.cuda.is_available():
        print("attention: got a machine without a GPU; run onchip.bench cpu here instead.")
        return 2
    kernel = None if args.kernel == "auto" else args.kernel
    ours = functools.partial(onchip_call, kernel=kernel)
    for dim in DIMS:
        for causal in (False, True):
            check(ours, dim, causal)
    calls = {"onchip": ours, **{name: PEERS[name] for name in args.peers}}
    report = {**device_report(), "kernel": args.kernel, "cells": [], "varied": []}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    cells = [(d, n, c) for n in reversed(LENGTHS) for d in DIMS for c in (False, True)]
    for part in (p for p in args.parts if p != "varied"):
        for dim, length, causal in cells:
            speed = measure(calls, dim, length, causal, part, args.rounds)
            cell = {"part": part, "dim": dim, "length": length, "causal": causal}
            report["cells"].append({**cell, "tflops": speed})
            _write(args.json, report)
            words = " ".join(f"{name} {value:4.0f}" for name, value in speed.items())
            print(f"{part:8} d{dim:<3} n{length:<5} {'causal' if causal else 'full':6} {words}")
    if "varied" in args.parts:
        for row in itertools.chain(varied.layer(calls), varied.measure(args.rounds, kernel)):
            report["varied"].append(row)
            words = (f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values())
            print(" ".join(words), flush=True)
            _write(args.json, report)
    return 0


def _write(path: Path, report: dict) -> None:
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
