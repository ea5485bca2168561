"""The hardware's own counters beside the cost model: `onchip bench --counters`.

Runs each call of `onchip.bench.counted` under Nsight Compute, one kernel after the other with
cold caches, and prints what slow memory moved, how busy memory and tensor cores were, bank
conflicts of shared memory, what warps waited for, and the bytes that the model predicts.
"""

from __future__ import annotations

import csv
import glob
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onchip.analysis.bill import Bill
from onchip.analysis.words import human, human_us

if TYPE_CHECKING:
    from onchip.analysis.hardware import Hardware
    from onchip.bench.counted import Counted

#: Where Nsight Compute and the CUDA toolkit install it, beside the PATH.
_PLACES = (
    "/opt/nvidia/nsight-compute/*/ncu",
    "/usr/local/cuda/bin/ncu",
    "/usr/local/cuda-*/bin/ncu",
    "/usr/local/cuda*/nsight-compute-*/ncu",
)
_TIME, _READ, _WRITTEN = "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum"
_DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
#: The tensor cores' counter has a name for each generation; the first that exists is taken.
_TENSOR = (
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_op_gmma_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
)
_STALLED, _PER_ISSUE = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"
_STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle",
    "long_scoreboard", "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction",
    "not_selected", "selected", "short_scoreboard", "sleeping", "tex_throttle", "wait",
    "warpgroup_arrive",
)  # fmt: skip
#: In the name of torch.cuda._sleep's kernel, which `counted` runs behind each call.
SEPARATOR = "spin_kernel"
_TIMEOUT_S = 300
_MOST_STALLS = 3
_CALLS_AT_ONCE = 3


class CountersError(RuntimeError):
    """The counters can't be read here; the message says why and what to do."""


@dataclass(frozen=True)
class Kernel:
    """What the counters say of one launch.

    Args:
        name: of the kernel.
        time_us: under the profiler, so a little slow.
        read_bytes: from slow memory.
        written_bytes: to slow memory.
        dram_percent: of slow memory's bandwidth.
        tensor_percent: of the tensor cores' cycles; None where no counter of theirs exists.
        bank_conflicts: of shared memory.
        stalls: reason -> warps that wait for it at each issued instruction, most first.
    """

    name: str
    time_us: float
    read_bytes: int
    written_bytes: int
    dram_percent: float
    tensor_percent: float | None
    bank_conflicts: int
    stalls: dict[str, float]


@dataclass(frozen=True)
class Count:
    """One call's kernels and the model's bytes.

    Args:
        name: of the call.
        words: for people.
        kernels: in the order of their launches.
        predicted: (bytes read, bytes written) by the model.
        pairs: of query and key, over all heads.
    """

    name: str
    words: str
    kernels: tuple[Kernel, ...]
    predicted: tuple[int, int]
    pairs: int

    @property
    def measured(self) -> tuple[int, int]:
        """(bytes read, bytes written) of all kernels."""
        reads = sum(kernel.read_bytes for kernel in self.kernels)
        return reads, sum(kernel.written_bytes for kernel in self.kernels)

    def __str__(self) -> str:
        lines = [self.words]
        both = (*zip(("read", "written"), self.measured, self.predicted, strict=True),)
        for what, measured, predicted in (
            *both,
            ("in all", sum(self.measured), sum(self.predicted)),
        ):
            gap = f"{measured / predicted - 1:+.1%}" if predicted else ""
            lines.append(
                f"  {what:<8}{human(measured):>11} measured "
                f"{human(predicted):>11} predicted {gap:>8}"
            )
        a_pair = f"{sum(self.measured) / self.pairs:.2g}"
        lines.append(f"  {a_pair} bytes for each pair of query and key, and head")
        return "\n".join([*lines, *map(_kernel_line, self.kernels)]) + "\n"


def _kernel_line(k: Kernel) -> str:
    tensor = "" if k.tensor_percent is None else f", tensor cores {k.tensor_percent:.0f} %"
    stalls = ", ".join(f"{n} {v:.1f}" for n, v in list(k.stalls.items())[:_MOST_STALLS])
    return (
        f"  {k.name[:40]:<40} {human_us(k.time_us):>8}  DRAM {k.dram_percent:.0f} %{tensor}, "
        f"{k.bank_conflicts} bank conflicts; waits: {stalls}"
    )


def find_ncu() -> str:
    """Nsight Compute's command.

    Raises:
        CountersError: if it is not installed.
    """
    found = shutil.which("ncu")
    for pattern in () if found else _PLACES:
        found = found or max(glob.glob(pattern), default=None)
    if found is None:
        raise CountersError(
            "ncu, the command of Nsight Compute, is neither on the PATH nor under "
            "/opt/nvidia/nsight-compute or /usr/local/cuda*. Install Nsight Compute "
            "(package nsight-compute of NVIDIA's repositories)."
        )
    return found


def available(ncu: str) -> set[str]:
    """Base names of the counters that this GPU has."""
    told = _run([ncu, "--query-metrics"])
    return {line.split()[0] for line in told.splitlines() if line.strip() and "__" in line}


def chosen(names: Iterable[str]) -> list[str]:
    """The metrics to ask for, of those whose base name exists.

    Raises:
        CountersError: if those of slow memory do not exist.
    """
    names = set(names)
    for metric in (_READ, _WRITTEN):
        if metric.split(".")[0] not in names:
            raise CountersError(f"this GPU has no counter {metric.split('.')[0]}")
    tensor = [metric for metric in _TENSOR if metric.split(".")[0] in names][:1]
    stalls = [f"{_STALLED}{reason}{_PER_ISSUE}" for reason in _STALLS]
    wanted = [_TIME, _READ, _WRITTEN, _DRAM, _CONFLICTS, *tensor, *stalls]
    return [metric for metric in wanted if metric.split(".")[0] in names]


def _run(command: list[str]) -> str:
    """Output of a command.

    Raises:
        CountersError: if it fails.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=os.environ
        )
    except subprocess.TimeoutExpired as error:
        raise CountersError(f"ncu was not done after {_TIMEOUT_S} s") from error
    text = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in text:
        raise CountersError(
            "the driver keeps the counters from this user (ERR_NVGPUCTRPERM). Run as root, or "
            "load the driver with NVreg_RestrictProfilingToAdminUsers=0: "
            "https://developer.nvidia.com/ERR_NVGPUCTRPERM"
        )
    if "Failed to initialize the profiler" in text or "LibraryNotLoaded" in text:
        raise CountersError(
            "ncu can't reach the counters of this machine (it failed to initialise the "
            "profiler): a container or virtual machine without them, most likely."
        )
    if done.returncode or "==ERROR==" in text:
        lines = [x for x in text.splitlines() if "==ERROR==" in x or "Error" in x]
        raise CountersError(f"ncu failed: {'; '.join(lines[-3:]) or text[-300:]}")
    return done.stdout


def parse(text: str) -> list[Kernel]:
    """Kernels in ncu's CSV of raw values: a line of names, one of units, one for each launch."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    return [_kernel(row) for row in rows[1:]]


def _kernel(row: dict[str, str]) -> Kernel:
    def value(metric: str) -> float:
        return float((row.get(metric) or "0").replace(",", ""))

    tensor = [value(metric) for metric in _TENSOR if row.get(metric)]
    stalls = {reason: value(f"{_STALLED}{reason}{_PER_ISSUE}") for reason in _STALLS}
    return Kernel(
        name=row["Kernel Name"],
        time_us=value(_TIME) / 1e3,
        read_bytes=int(value(_READ)),
        written_bytes=int(value(_WRITTEN)),
        dram_percent=value(_DRAM),
        tensor_percent=tensor[0] if tensor else None,
        bank_conflicts=int(value(_CONFLICTS)),
        stalls=dict(sorted(((n, v) for n, v in stalls.items() if v), key=lambda x: -x[1])),
    )


def predicted_bytes(bill: Bill) -> tuple[int, int]:
    """Bytes of slow memory that a bill reads and writes."""
    reads = sum(t.slow_bytes for stage in bill.stages for t in stage.reads)
    return reads, sum(t.slow_bytes for stage in bill.stages for t in stage.writes)


def count(ncu: str, metrics: list[str], calls: list[Counted], hardware: Hardware) -> list[Count]:
    """Runs calls under Nsight Compute, in one process.

    Args:
        ncu: its command.
        metrics: to read.
        calls: what to run.
        hardware: what the model predicts for.

    Raises:
        CountersError: if the counters can't be read.
    """
    command = [
        ncu, "--profile-from-start", "off", "--target-processes", "application-only",
        "--clock-control", "none", "--cache-control", "all", "--csv", "--page", "raw",
        "--print-units", "base", "--metrics", ",".join(metrics),
        sys.executable, "-m", "onchip.bench.counted", *(call.name for call in calls),
    ]  # fmt: skip
    found = apart(parse(_run(command)))
    if len(found) != len(calls) or not all(found):
        names = ", ".join(call.name for call in calls)
        raise CountersError(f"ncu saw kernels of {sum(map(bool, found))} calls, not of {names}")
    return [
        Count(c.name, c.words, kernels, predicted_bytes(c.bill(hardware)), c.pairs)
        for c, kernels in zip(calls, found, strict=True)
    ]


def apart(kernels: list[Kernel]) -> list[tuple[Kernel, ...]]:
    """Kernels of each call: `SEPARATOR` ends one."""
    found: list[tuple[Kernel, ...]] = []
    one: list[Kernel] = []
    for kernel in kernels:
        if SEPARATOR in kernel.name:
            found.append(tuple(one))
            one = []
        else:
            one.append(kernel)
    return found


def main(json_path: Path | None = None, show: Callable[[str], None] = print) -> int:
    """Counts every call, prints it beside the model, and writes JSON.

    Returns:
        The exit status: 0, or 2 where the counters can't be read.
    """
    import torch

    try:
        if not torch.cuda.is_available():
            raise CountersError("there is no GPU here")
        from onchip.analysis.hardware import Hardware
        from onchip.bench import report
        from onchip.bench.counted import CALLS

        hardware, ncu = Hardware.detect(), find_ncu()
        metrics = chosen(available(ncu))
        counts: list[Count] = []
        every = list(CALLS.values())
        # A few at a time: starting a process takes longer than counting a call.
        for calls in (every[i : i + _CALLS_AT_ONCE] for i in range(0, len(every), _CALLS_AT_ONCE)):
            new = count(ncu, metrics, calls, hardware)
            torch.cuda.empty_cache()
            show("\n".join(map(str, new)))
            counts += new
            if json_path:
                told = {**report.machine("cuda"), "calls": [asdict(c) for c in counts]}
                json_path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    except CountersError as error:
        print(f"onchip bench --counters: {error}", file=sys.stderr)
        return 2
    return 0
