"""Speed, memory and host overhead of the CPU kernels.

Usage: python -m onchip.bench.cpu [--json PATH] [--quick] [--overhead] [--only NAME]

First every case is checked against the oracle on a smaller problem. Then onchip and
`F.scaled_dot_product_attention` run in turns on the same tensors. Where torch can express the
call it runs that very call; elsewhere it runs the square one of the same N, causal if the case
is, and its time is scaled to the FLOPs that the case's mask lets through.

Legend: N sequence length, B = 1 batch, H heads, D head dimension.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from onchip import reference
from onchip.api import attention, attention_varlen
from onchip.bench.timing import interleaved_us, median_ratio
from onchip.problem import Mask

HEADS, HEAD_DIM = 8, 64
TARGET_SAME, TARGET_ELSEWHERE = 0.97, 0.55
TARGET_MEMORY_MB, TARGET_OVERHEAD_US = 200.0, 40.0
MEMORY_LENGTH = 16384
DTYPES = (torch.float32, torch.bfloat16)
DEFAULT_PATH = Path("benchmarks/results/cpu/attention.json")


@dataclass(frozen=True)
class Case:
    """One kind of call, for any N.

    Args:
        name: for people.
        features: keywords of `onchip.attention`.
        window: shares of N left and right of a query's own key.
        queries: share of N that S_q is.
        parts: shares of N of packed sequences; empty for a dense call.
        same: whether torch's function computes the same, causal or not.
    """

    name: str
    features: dict = field(default_factory=dict)
    window: tuple[float, float] | None = None
    queries: float = 1.0
    parts: tuple[float, ...] = ()
    same: bool = False

    def lengths(self, n: int) -> list[tuple[int, int]]:
        """(S_q, S_k) of each sequence."""
        if self.parts:
            return [(int(n * share), int(n * share)) for share in self.parts]
        return [(int(n * self.queries), n)]

    def arguments(self, n: int) -> dict:
        """Keywords of `onchip.attention`."""
        if self.window is None:
            return self.features
        return {**self.features, "window": tuple(int(n * share) for share in self.window)}

    def share(self, n: int) -> float:
        """FLOPs of this call over those of the full square one."""
        mask = Mask.of(self.causal, self.arguments(n).get("window", (-1, -1)))
        return sum(mask.num_visible(*pair) for pair in self.lengths(n)) / n**2

    @property
    def causal(self) -> bool:
        """Whether no query sees a later key."""
        return self.features.get("causal", False)

    def share_of_torch(self, n: int) -> float:
        """FLOPs of this call over those of the call that torch runs beside it."""
        return self.share(n) / Mask(-1, 0 if self.causal else -1).num_visible(n, n) * n**2

    def target(self) -> float:
        """Least speed wanted, as a share of torch's."""
        return TARGET_SAME if self.same else TARGET_ELSEWHERE


CAUSAL = {"causal": True}
CASES = (
    Case("full", same=True),
    Case("causal", CAUSAL, same=True),
    Case("window N/4, causal", CAUSAL, window=(0.25, 0.0)),
    Case("window N/8 + N/8", window=(0.125, 0.125)),
    Case("softcap", {"softcap": 30.0}),
    Case("softcap, causal", {**CAUSAL, "softcap": 30.0}),
    Case("S_q = N/2, causal", CAUSAL, queries=0.5),
    Case("varlen, causal", CAUSAL, parts=(0.5, 0.25, 0.125, 0.125)),
    Case("varlen", parts=(0.5, 0.25, 0.125, 0.125)),
)


@dataclass
class Call:
    """A case's tensors and the function that attends over them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    run: Callable[[], Any]


def onchip_call(case: Case, n: int, dtype: torch.dtype, grad: bool) -> Call:
    """The case through the public call."""
    arguments = case.arguments(n)
    generator = torch.Generator().manual_seed(n)
    lengths = case.lengths(n)
    total_q, total_k = (sum(side) for side in zip(*lengths, strict=True))
    shape = (HEADS, HEAD_DIM)
    q, k, v = (
        torch.randn(1, total, *shape, generator=generator).to(dtype)
        for total in (total_q, total_k, total_k)
    )
    if not case.parts:
        q, k, v = (x.requires_grad_(grad) for x in (q, k, v))
        return Call(q, k, v, lambda: attention(q, k, v, **arguments))
    q, k, v = (x[0].requires_grad_(grad) for x in (q, k, v))
    longest = max(length for length, _ in lengths)
    offsets = torch.tensor([0] + [length for length, _ in lengths]).cumsum(0).int()
    limits = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    limits |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return Call(q, k, v, lambda: attention_varlen(q, k, v, **limits, **arguments))


def torch_call(case: Case, n: int, dtype: torch.dtype, grad: bool) -> Call:
    """torch's function: the same call where it can express it, else the square one."""
    generator = torch.Generator().manual_seed(n)
    inputs = [torch.randn(1, n, HEADS, HEAD_DIM, generator=generator).to(dtype) for _ in range(3)]
    q, k, v = (x.requires_grad_(grad) for x in inputs)

    def run():
        q_h, k_h, v_h = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q_h, k_h, v_h, is_causal=case.causal)
        return out.transpose(1, 2)

    return Call(q, k, v, run)


def backward_of(call: Call) -> Callable[[], object]:
    """The backward of one forward, to be run again and again."""
    out = call.run()
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    inputs = (call.q, call.k, call.v)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def measure(case: Case, n: int, dtype: torch.dtype, part: str, rounds: int) -> dict:
    """One cell: times, ratio of speeds, pass or fail."""
    backward = part == "backward"
    ours, theirs = (make(case, n, dtype, backward) for make in (onchip_call, torch_call))
    if backward:
        calls = {"onchip": backward_of(ours), "torch": backward_of(theirs)}
    else:
        calls = {"onchip": ours.run, "torch": theirs.run}
    times_us = interleaved_us(calls, rounds)
    share = case.share_of_torch(n)
    shape = "square causal" if case.causal else "square"
    ratio = share * median_ratio(times_us["torch"], times_us["onchip"])
    return {
        "name": f"{case.name}, N = {n}",
        "case": case.name,
        "n": n,
        "dtype": _name(dtype),
        "part": part,
        "onchip_us": statistics.median(times_us["onchip"]),
        "torch_us": share * statistics.median(times_us["torch"]),
        "torch_call": "the same" if case.same else f"{shape}, scaled to the same FLOPs",
        "ratio": ratio,
        "target": case.target(),
        "passed": ratio >= case.target(),
    }


def check(case: Case, dtype: torch.dtype, n: int = 384) -> None:
    """Holds output and gradients to contract.md's rule.

    Raises:
        AssertionError: if a result is farther from the oracle than twice eager's error.
    """
    call = onchip_call(case, n, dtype, grad=True)
    inputs = (call.q, call.k, call.v)
    out = call.run()
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours = (out, *torch.autograd.grad(out, inputs, dout))
    double = [x.detach().double().requires_grad_() for x in inputs]
    oracle = _eager(case, n, double, dout.double())
    eager = _eager(case, n, [x.detach().requires_grad_() for x in inputs], dout)
    for name, x, want, plain in zip(("out", "dq", "dk", "dv"), ours, oracle, eager, strict=True):
        error = (x.double() - want).abs().max()
        allowed = 2 * (plain.double() - want).abs().max()
        allowed += 4 * torch.finfo(dtype).eps * want.abs().max()
        assert error <= allowed, f"{case.name}, {dtype}, {name}: {error:.2e} > {allowed:.2e}"


def _eager(case: Case, n: int, inputs, dout) -> tuple[torch.Tensor, ...]:
    """Output and gradients of plain attention, one sequence after the other."""
    q, k, v = (x if x.dim() == 4 else x[None] for x in inputs)
    outs, start = [], 0
    for seqlen_q, seqlen_k in case.lengths(n):
        rows, keys = slice(start, start + seqlen_q), slice(start, start + seqlen_k)
        outs.append(reference.eager(q[:, rows], k[:, keys], v[:, keys], **case.arguments(n))[0])
        start += seqlen_q
    out = torch.cat(outs, dim=1).view(dout.shape)
    return (out, *torch.autograd.grad(out, inputs, dout))


def peak_growth_mb(n: int = MEMORY_LENGTH) -> float:
    """How much a fresh process grows in a causal forward and backward of S = n, H = 1, MB."""
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY_PROGRAM, str(n)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


_MEMORY_PROGRAM = """
import sys, torch
from onchip.bench.cpu import grown_mb
print(grown_mb(int(sys.argv[1])))
"""


def grown_mb(n: int) -> float:
    """Growth of this process's peak memory over its present size, MB; for a fresh process."""
    inputs = [torch.randn(1, n, 1, HEAD_DIM, requires_grad=True) for _ in range(3)]

    def step(q, k, v):
        out: Any = attention(q, k, v, causal=True)
        out.sum().backward()

    step(*(x[:, :64] for x in inputs))  # loads the kernels
    before = _status_mb("VmRSS")
    step(*inputs)
    return _status_mb("VmHWM") - before


def _status_mb(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {name}: memory is measured on Linux only")


def overhead_us(rounds: int = 30) -> dict[str, float]:
    """Host time of the public call on a tiny problem, and of the kernel's launch alone."""
    from onchip import prepare
    from onchip.ops import plan
    from onchip.problem import Op, Tensors

    q, k, v = (torch.randn(1, 4, 2, 8) for _ in range(3))
    options = prepare.Options(True, (-1, -1), None, 0.0, False, False, None, None)
    tensors, params, _ = prepare.dense(Tensors(q, k, v), options)
    problem, launch, *_ = plan(Op.FORWARD, tensors, params)
    with torch.no_grad():
        times_us = interleaved_us(
            {
                "call": lambda: attention(q, k, v, causal=True),
                "launch": lambda: launch(problem, tensors),
            },
            rounds,
            min_time_us=5000.0,
        )
    medians = {name: statistics.median(times) for name, times in times_us.items()}
    extra = statistics.median(
        a - b for a, b in zip(times_us["call"], times_us["launch"], strict=True)
    )
    return {
        "call_us": medians["call"],
        "launch_us": medians["launch"],
        "overhead_us": extra,
        "target_us": TARGET_OVERHEAD_US,
        "passed": extra <= TARGET_OVERHEAD_US,
    }


def cells(quick: bool, only: str | None) -> Iterator[tuple[Case, int, torch.dtype, str]]:
    """Every cell to measure; only N = 1024 when quick."""
    for case in CASES:
        if only is not None and only not in case.name:
            continue
        for n in (1024,) if quick else (1024, 4096):
            for dtype in DTYPES:
                for part in ("forward", "backward"):
                    yield case, n, dtype, part


def device_name() -> str:
    """The CPU's model, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _line(cell: dict) -> str:
    verdict = "ok" if cell["passed"] else "BELOW TARGET"
    return (
        f"{cell['name']:32} {cell['dtype']:9} {cell['part']:9} {cell['onchip_us'] / 1e3:9.2f} ms"
        f"  {cell['ratio']:5.2f}x of torch (target {cell['target']:.2f})  {verdict}"
    )


def run(quick: bool, only: str | None) -> dict:
    """Checks, then measures everything; prints as it goes."""
    for case in CASES:
        for dtype in DTYPES:
            check(case, dtype)
    print(f"correct: {len(CASES)} cases in {len(DTYPES)} dtypes, forward and backward", flush=True)
    report = {
        "device": device_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "batch": 1,
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "cases": [],
    }
    for case, n, dtype, part in cells(quick, only):
        cell = measure(case, n, dtype, part, rounds=9 if n <= 1024 else 5)
        print(_line(cell), flush=True)
        report["cases"].append(cell)
    growth_mb = peak_growth_mb()
    report["memory"] = {
        "n": MEMORY_LENGTH,
        "heads": 1,
        "growth_mb": growth_mb,
        "target_mb": TARGET_MEMORY_MB,
        "passed": growth_mb < TARGET_MEMORY_MB,
    }
    print(f"memory: grows by {growth_mb:.0f} MB at S = {MEMORY_LENGTH}, forward and backward")
    report["overhead"] = overhead_us()
    print(_overhead_line(report["overhead"]))
    return report


def _overhead_line(overhead: dict) -> str:
    return (
        f"overhead: {overhead['overhead_us']:.1f} us (call {overhead['call_us']:.1f}, "
        f"launch {overhead['launch_us']:.1f}, target {overhead['target_us']:.0f})"
    )


def main(argv: list[str] | None = None) -> int:
    """The command; 1 when a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m onchip.bench.cpu", description=__doc__)
    parser.add_argument("--json", type=Path, default=None, help=f"default {DEFAULT_PATH}")
    parser.add_argument("--quick", action="store_true", help="N = 1024 only; writes no default")
    parser.add_argument("--overhead", action="store_true", help="host overhead only")
    parser.add_argument("--only", help="cases whose name contains this; writes no default")
    args = parser.parse_args(argv)
    if args.only and not any(args.only in case.name for case in CASES):
        names = ", ".join(case.name for case in CASES)
        parser.error(f"--only: got {args.only!r}; allowed: a part of one of these names: {names}")
    if args.overhead:
        report = {"overhead": overhead_us()}
        print(_overhead_line(report["overhead"]))
        passed = report["overhead"]["passed"]
    else:
        report = run(args.quick, args.only)
        passed = all(c["passed"] for c in report["cases"])
        passed = passed and report["memory"]["passed"] and report["overhead"]["passed"]
    path = args.json
    if path is None and not (args.quick or args.overhead or args.only):
        path = DEFAULT_PATH
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"wrote {path}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
