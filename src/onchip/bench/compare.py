"""Attention beside its alternatives: time, spread, fraction of the roofline, memory, correctness.

Usage: onchip bench [--seqlen 1024,8192] [--published] [--json FILE] [--plot FILE] ...

Every row's results are held to the contract's error rule first; one that fails it gets no speed,
and one that cannot run says why. Rows take turns, each call meets a cold L2 cache, and times are
the GPU's (launches do not count): medians, with the 10th and 90th percentile beside them. The
fraction of the roofline is the time that the needed FLOPs, exponentials and bytes (inputs and
outputs once) take at the GPU's stated rates, over the measured time. Predictions for onchip's
kernels are at the rates that the GPU achieves in a matrix product and a copy.

Legend: B batch, N sequence length, H heads, D head dimension.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from onchip import dispatch, validate
from onchip.analysis import cost, roofline
from onchip.analysis.bill import Stage, once
from onchip.analysis.hardware import Achieved, Hardware
from onchip.analysis.hardware import measure as achieved_rates
from onchip.analysis.words import human
from onchip.bench import methods as rows
from onchip.bench import report, verify
from onchip.bench.cases import Case
from onchip.bench.methods import Run, attempted, prepared
from onchip.bench.timing import ColdTimer, Spread
from onchip.dispatch import NoKernelError
from onchip.problem import Op

#: Lengths of the published comparison: B = 1, H = 32, D = 128, float16.
PUBLISHED = (1024, 8192, 16384)
_DTYPES = ("float16", "bfloat16", "float32")
_CPU_CACHE_BYTES = 64 << 20
#: Of options that were not given.
_DEFAULTS = {
    "batch": 1, "seqlen": (1024, 4096), "heads": 16, "kv_heads": None, "head_dim": 128,
    "causal": False, "dtype": "bfloat16", "device": None, "parts": "forward,both",
    "methods": None, "rounds": 5, "published": False, "counters": False, "json": None,
    "plot": None,
}  # fmt: skip
_SIZES = frozenset(("batch", "seqlen", "heads", "kv_heads", "head_dim", "causal", "dtype"))
_STDOUT = Path("-")


@dataclass(frozen=True)
class Row:
    """One method in one case.

    Args:
        method: its name.
        why_not: why it has no time; empty if it has one.
        time: of a call; None without one.
        tflops: needed FLOPs over the median time.
        roofline_fraction: 1 at the roof; None where the GPU has no record.
        peak_bytes: memory that a call took beyond its inputs; None on a CPU.
        predicted_us: for onchip's kernels, time if all overlaps and if nothing does, at the
            rates that the GPU achieves.
    """

    method: str
    why_not: str = ""
    time: Spread | None = None
    tflops: float = 0.0
    roofline_fraction: float | None = None
    peak_bytes: int | None = None
    predicted_us: tuple[float, float] | None = None


@dataclass(frozen=True)
class Cell:
    """All rows of one case and part."""

    case: Case
    part: str
    bound_us: float | None
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def measure(
    case: Case,
    part: str,
    names: tuple[str, ...] | None = None,
    rounds: int = 5,
    hardware: Hardware | None = None,
    step: Callable[[str], None] = lambda what: None,
    achieved: Achieved | None = None,
) -> Cell:
    """Checks and times every method in one case.

    Args:
        case: the call.
        part: "forward", or "both" for forward and backward.
        names: which methods; all if None.
        rounds: turns of each.
        hardware: for the roofline; none without.
        step: is told what happens next.
        achieved: rates that the GPU was seen to achieve, for predictions; else the stated ones.
    """
    inputs = case.inputs()
    step("oracle")
    wanted = verify.expected(case, inputs, part)
    runs: dict[str, Run] = {}
    found: dict[str, Row] = {}
    peaks: dict[str, int | None] = {}
    for method in rows.methods(case, names):
        step(f"check {method.name}")
        run = prepared(method, case, inputs, part)
        why = _why_not(run, wanted, case)
        found[method.name] = Row(method.name, why)
        if not why:
            runs[method.name] = run
            peaks[method.name] = _peak_bytes(run, case)
    step("time")
    calls = {name: run.call for name, run in runs.items()}
    large = frozenset(name for name, peak in peaks.items() if _is_large(peak))
    times = _timer(case, hardware).interleaved(calls, rounds, large=large)
    bound_us = _bound_us(case, part, hardware)
    seen = hardware.achieving(achieved) if hardware and achieved else hardware
    for name, spread in times.items():
        found[name] = Row(
            name,
            time=spread,
            tflops=case.flops(part) / spread.median_us / 1e6,
            roofline_fraction=bound_us / spread.median_us if bound_us else None,
            peak_bytes=peaks[name],
            predicted_us=_predicted_us(name, case, part, seen),
        )
    return Cell(case, part, bound_us, tuple(found.values()))


def _why_not(run: Run, wanted: list[verify.Expected], case: Case) -> str:
    """Why a method gets no speed: it does not run, or its results break the error rule."""
    results, why = attempted(run)
    if results is None:
        return why
    wrong = verify.fault(results, wanted, case.heads // case.kv_heads)
    return f"wrong result: {wrong}" if wrong else ""


def _timer(case: Case, hardware: Hardware | None) -> ColdTimer:
    if case.device == "cpu":
        return ColdTimer("cpu", _CPU_CACHE_BYTES)
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return ColdTimer("cuda", 4 * max(l2_bytes, hardware.l2_bytes if hardware else 0))


def _peak_bytes(run: Run, case: Case) -> int | None:
    if case.device == "cpu":
        return None
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run.call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _is_large(peak_bytes: int | None) -> bool:
    """Whether a call leaves too little of the GPU's memory for what others keep cached."""
    if peak_bytes is None:
        return False
    return 4 * peak_bytes > torch.cuda.get_device_properties(0).total_memory


def _bound_us(case: Case, part: str, hardware: Hardware | None) -> float | None:
    """Time at the roof, whatever the method."""
    if hardware is None:
        return None
    total = 0.0
    for op in _ops(part):
        problem = case.problem(op)
        pairs = cost.num_pairs(problem) * case.heads
        moved = (once("all", cost.traffic_bytes(problem)),)
        stage = Stage(op.value, cost.flops(problem), pairs, moved, ())
        total += roofline.point(stage, hardware, case.torch_dtype).bound_us
    return total


def _predicted_us(name: str, case: Case, part: str, hardware) -> tuple[float, float] | None:
    if not name.startswith("onchip") or hardware is None:
        return None
    kernel = name.removeprefix("onchip ")
    asked = (dispatch.explain(case.problem(op), kernel, None, hardware) for op in _ops(part))
    told = [answer.prediction for answer in asked]
    if None in told:
        return None
    return sum(p.fastest_us for p in told if p), sum(p.slowest_us for p in told if p)


def _ops(part: str) -> tuple[Op, ...]:
    return (Op.FORWARD, Op.BACKWARD) if part == "both" else (Op.FORWARD,)


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    cases: tuple[Case, ...]
    parts: tuple[str, ...]
    methods: tuple[str, ...] | None
    rounds: int
    json: Path | None
    plot: Path | None


def cells(
    options: Options,
    progress: report.Progress,
    hardware: Hardware | None = None,
    achieved: Achieved | None = None,
) -> Iterator[Cell]:
    """Every cell, as it is done."""
    for part in options.parts:
        for case in options.cases:
            progress.begin(f"N = {case.length}, {part}")
            yield measure(
                case, part, options.methods, options.rounds, hardware, progress.step, achieved
            )


def _hardware(device: str) -> tuple[Hardware | None, str]:
    if device == "cpu":
        return None, ""
    try:
        return Hardware.detect(), ""
    except ValueError as error:
        return None, f"no roofline: {error}"


def _integers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: numbers from 1 on, with commas")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="onchip bench",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
        argument_default=argparse.SUPPRESS,  # the result has what was given, no more
    )
    add = parser.add_argument
    add("--batch", type=int, help="B")
    add("--seqlen", type=_integers, help="N, several with commas")
    add("--heads", type=int, help="H, query heads")
    add("--kv-heads", type=int, help="H_kv; H unless given")
    add("--head-dim", type=int, help="D")
    add("--causal", action="store_true", help="no query sees a later key")
    add("--dtype", choices=_DTYPES, help="of q, k and v")
    add("--device", choices=("cuda", "cpu"), help="cuda if there is a GPU")
    add("--parts", help="forward, both (forward and backward)")
    add("--methods", help=f"onchip, {', '.join(rows.PEER_NAMES)}; all unless given")
    add("--rounds", type=int, help="turns of each method")
    add("--published", action="store_true", help="B 1, H 32, D 128, float16, N 1k, 8k, 16k")
    add("--counters", action="store_true", help="run under Nsight Compute: bytes and utilisation")
    add("--json", type=Path, help="write the report there; - for stdout instead of the tables")
    add("--plot", type=Path, help="draw times against N there, .svg or .png")
    return parser


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line, every option in it of use.

    Raises:
        ValueError: for one that another makes meaningless.
    """
    given = vars(_parser().parse_args(argv))
    for which, others in (("counters", _DEFAULTS.keys() - {"json"}), ("published", _SIZES)):
        extra = [name for name in given if name in others and name != which]
        if which in given and extra:
            option = f"--{extra[0].replace('_', '-')}"
            allowed = "--json alone" if which == "counters" else "none of the calls' sizes"
            fix = f"Leave one of the two out: --{which} measures calls of its own."
            validate.reject(option, f"it beside --{which}", allowed, fix)
    args = argparse.Namespace(**{**_DEFAULTS, **given})
    if args.counters and args.json == _STDOUT:
        validate.reject("--json", "- with --counters", "a file", "Tables go to stdout there.")
    if args.json not in (None, _STDOUT):
        report.check_file("--json", args.json)
    return args


def _memory_bytes(device: str) -> int:
    """Memory of the GPU, or of this machine."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_memory(case: Case) -> None:
    """Refuses inputs that the device can't hold; what a method needs beyond, it finds out."""
    memory = _memory_bytes(case.device)
    if case.input_bytes > memory:
        got = f"{case.length}, whose inputs take {human(case.input_bytes)}"
        fix = "Take a smaller --seqlen, --batch, --heads or --head-dim."
        validate.reject("--seqlen", got, f"what fits in {human(memory)} of memory", fix)


def _options(args: argparse.Namespace) -> Options:
    """Options from a command line.

    Raises:
        ValueError: for one that is out of range.
    """
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: got cuda, but torch sees no GPU here; allowed: cpu")
    if args.rounds < 1:
        raise ValueError(f"--rounds: got {args.rounds}; allowed: 1 or more")
    parts = tuple(args.parts.split(","))
    for part in parts:
        if part not in rows.PARTS:
            raise ValueError(f"--parts: got {part!r}; allowed: {', '.join(rows.PARTS)}")
    if args.plot:
        report.check_plot(args.plot)
    if args.kv_heads is not None:
        validate.count("--kv-heads", args.kv_heads, 1)
    kv_heads = args.heads if args.kv_heads is None else args.kv_heads
    case = Case(
        args.batch, args.seqlen[0], args.heads, kv_heads, args.head_dim, args.causal, args.dtype,
        device,
    )  # fmt: skip
    lengths = args.seqlen
    if args.published:
        case, lengths = Case(1, 1024, 32, 32, 128, False, "float16", device), PUBLISHED
    cases = tuple(dataclasses.replace(case, length=n) for n in lengths)
    for each in cases:
        _check_memory(each)
    names = tuple(args.methods.split(",")) if args.methods else None
    rows.methods(cases[0], names)  # refuses names and cases before anything runs
    return Options(cases, parts, names, args.rounds, args.json, args.plot)


def main(argv: list[str] | None = None) -> int:
    """Runs a comparison.

    Args:
        argv: the command line without the program's name.

    Returns:
        The exit status: 0 fine, 1 if an onchip kernel broke the error rule, 2 wrong arguments.
    """
    try:
        args = _arguments(argv)
        if args.counters:
            from onchip.bench import counters

            return counters.main(args.json)
        return _run(_options(args))
    except torch.cuda.OutOfMemoryError as error:
        print(f"onchip bench: {error} Take a smaller --seqlen.", file=sys.stderr)
        return 2
    except (ValueError, ModuleNotFoundError, NoKernelError, OSError) as error:
        print(f"onchip bench: {error}", file=sys.stderr)
        return 2


def _run(options: Options) -> int:
    done: list[Cell] = []
    to_stdout = options.json == _STDOUT
    progress = report.Progress(sys.stderr, len(options.cases) * len(options.parts))
    hardware, why = _hardware(options.cases[0].device)
    if why:
        progress.say(why)
    achieved = achieved_rates(options.cases[0].dtype) if hardware else None
    for cell in cells(options, progress, hardware, achieved):
        done.append(cell)
        progress.clear()
        if not to_stdout:
            print(report.table(cell), flush=True)
        if options.json and not to_stdout:
            options.json.write_text(_json(done, achieved), encoding="utf-8")
    if to_stdout:
        print(_json(done, achieved))
    if options.plot:
        report.plot(done, options.plot)
    own = [row for cell in done for row in cell.rows if row.method.startswith("onchip")]
    return int(any(row.why_not for row in own))


def _json(done: list[Cell], achieved: Achieved | None) -> str:
    told = {**report.machine(done[0].case.device), "cells": [cell.to_dict() for cell in done]}
    told["achieved"] = asdict(achieved) if achieved else None
    return json.dumps(told, indent=1) + "\n"


if __name__ == "__main__":
    sys.exit(main())
