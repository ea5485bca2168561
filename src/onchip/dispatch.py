"""Which kernel runs a Problem, and why the others do not.

One walk over the capability records of `onchip.kernels` gives the choice, the error and the
explanation. Nothing here imports a kernel or a kernel language.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from onchip.analysis import cost
from onchip.analysis.hardware import Hardware
from onchip.analysis.predict import Prediction, predict
from onchip.analysis.words import human
from onchip.kernels import KERNELS, NAMES, Kernel
from onchip.problem import Op, Problem


class NoKernelError(NotImplementedError):
    """No kernel takes a valid problem; the message lists every kernel with its reasons."""

    def __init__(self, problem: Problem, rejected: dict[str, list[str]], forced: str | None):
        self.problem = problem
        self.rejected = rejected
        self.forced = forced
        super().__init__(_no_kernel_message(problem, rejected, forced))

    def __reduce__(self):
        return type(self), (self.problem, self.rejected, self.forced)


def _no_kernel_message(problem: Problem, rejected: dict[str, list[str]], forced: str | None) -> str:
    if forced is None:
        head, advice = "no kernel takes", "Change what a kernel's reasons name"
    else:
        head, advice = f"kernel={forced!r} does not take", "Leave kernel=None to let onchip choose"
    lines = [f"{head} this problem: {problem.describe()}"]
    lines += [f"  {name}: {'; '.join(reasons)}" for name, reasons in rejected.items()]
    lines.append(f"{advice}; onchip.explain() with the same arguments shows the choice.")
    return "\n".join(lines)


def candidates(problem: Problem, kernel: str | None = None) -> list[Kernel]:
    """Records for the problem's op, in order; only the forced one's when a kernel is named."""
    return [k for k in KERNELS if k.op is problem.op and kernel in (None, k.name)]


def rejections(problem: Problem, kernel: str | None = None) -> dict[str, list[str]]:
    """Every reason of every kernel that can't take the problem.

    Args:
        problem: the call.
        kernel: only this kernel.

    Returns:
        kernel name -> reasons; kernels that take the problem are absent.
    """
    why = {k.name: _reasons(k, problem, kernel) for k in candidates(problem, kernel)}
    if kernel is not None and not why:
        why[kernel] = [f"has no {problem.op.value}"]
    return {name: reasons for name, reasons in why.items() if reasons}


def _reasons(record: Kernel, problem: Problem, kernel: str | None) -> list[str]:
    """Why the record is not for the problem, or not without being named."""
    why = record.rejections(problem)
    if record.by_name and kernel != record.name:
        why.append(f"runs only when named (kernel={record.name!r}): {record.by_name}")
    return why


def choose(problem: Problem, kernel: str | None = None) -> Kernel:
    """The first kernel without a reason to reject the problem.

    Args:
        problem: the call.
        kernel: force this one; never falls back to another.

    Raises:
        NoKernelError: if no kernel (or not the forced one) takes the problem.
    """
    for record in candidates(problem, kernel):
        if not _reasons(record, problem, kernel):
            return record
    raise NoKernelError(problem, rejections(problem, kernel), kernel)


@dataclass(frozen=True)
class Explanation:
    """What a call would do and cost. Prints well; `to_dict()` for JSON.

    Args:
        problem: the call.
        chosen: name of the kernel that would run, None when none takes it.
        rejected: kernel name -> reasons.
        skipped: kernels that take the problem too, but come later in the order.
        flops: FLOPs of the matrix products that the mask lets through.
        traffic_bytes: compulsory bytes: inputs read once, outputs written once.
        three_step_bytes: bytes that S and P would move if they were kept in memory.
        upper_bound: whether lengths are known only as maxima.
        prediction: time and config on the present GPU or a named one; None without a GPU.
        why_no_prediction: what stands in the way of one; empty where nothing does.
        backward: the same for the backward, when an input requires a gradient.
        forced: the kernel that the call forces, if any.
    """

    problem: Problem
    chosen: str | None
    rejected: dict[str, list[str]]
    skipped: list[str]
    flops: int
    traffic_bytes: int
    three_step_bytes: int
    upper_bound: bool
    prediction: Prediction | None = None
    why_no_prediction: str = ""
    backward: Explanation | None = None
    forced: str | None = None

    @property
    def copies(self) -> tuple[str, ...]:
        """Inputs that are copied first."""
        return self.problem.copies

    def on(self, gpu: str) -> Explanation:
        """The same call explained for a GPU that need not be here.

        Args:
            gpu: a name that `onchip.analysis.hardware.Hardware.named` knows, e.g. "H200".

        Raises:
            ValueError: if no record has that name.
        """
        hardware = Hardware.named(gpu)
        place = {"device": "cuda", "arch": hardware.arch}
        backward = replace(self.backward.problem, **place) if self.backward else None
        return explain(replace(self.problem, **place), self.forced, backward, hardware)

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return {
            "problem": self.problem.to_dict(),
            "chosen": self.chosen,
            "rejected": self.rejected,
            "skipped": self.skipped,
            "flops": self.flops,
            "traffic_bytes": self.traffic_bytes,
            "three_step_bytes": self.three_step_bytes,
            "upper_bound": self.upper_bound,
            "copies": list(self.copies),
            "prediction": self.prediction.to_dict() if self.prediction else None,
            "why_no_prediction": self.why_no_prediction,
            "backward": self.backward.to_dict() if self.backward else None,
        }

    def __str__(self) -> str:
        bound = "at most " if self.upper_bound else ""
        lines = [self.problem.describe(), f"  kernel    {self.chosen or 'none takes this problem'}"]
        lines += [f"  rejected  {n}: {'; '.join(why)}" for n, why in self.rejected.items()]
        lines += [f"  skipped   {name}: takes it too, comes later" for name in self.skipped]
        lines.append(f"  FLOPs     {bound}{human(self.flops, 'FLOP', 1000)}")
        lines.append(f"  memory    {bound}{human(self.traffic_bytes)}, inputs and outputs once")
        lines.append(f"  avoided   {bound}{human(self.three_step_bytes)} of S and P traffic")
        copied = ", ".join(self.copies)
        lines.append(
            f"  copies    {copied} (last stride is not 1)" if copied else "  copies    none"
        )
        if self.prediction:
            lines += [f"  {line}" for line in self.prediction.lines()]
            if self.upper_bound:
                lines.append("  lengths   known only as maxima: times are for those")
        elif self.why_no_prediction:
            lines.append(f"  no time   {self.why_no_prediction}")
        text = "\n".join(lines)
        return f"{text}\n{self.backward}" if self.backward else text


def explain(
    problem: Problem,
    kernel: str | None = None,
    backward: Problem | None = None,
    hardware: Hardware | None = None,
) -> Explanation:
    """Explains a Problem without running anything.

    Args:
        problem: the call.
        kernel: the kernel that the call forces, if any.
        backward: the backward's Problem, to be explained along.
        hardware: the GPU to predict for; the present one unless given.
    """
    rejected = rejections(problem, kernel)
    taking = [k.name for k in candidates(problem, kernel) if k.name not in rejected]
    chosen = taking[0] if taking else None
    prediction, why = _predicted(problem, chosen, hardware)
    return Explanation(
        problem=problem,
        chosen=chosen,
        rejected=rejected,
        skipped=taking[1:],
        flops=cost.flops(problem),
        traffic_bytes=cost.traffic_bytes(problem),
        three_step_bytes=cost.three_step_bytes(problem),
        upper_bound=cost.is_upper_bound(problem),
        prediction=prediction,
        why_no_prediction=why,
        backward=explain(backward, kernel, None, hardware) if backward else None,
        forced=kernel,
    )


def _predicted(
    problem: Problem, chosen: str | None, hardware: Hardware | None
) -> tuple[Prediction | None, str]:
    """A prediction, or why there is none."""
    if problem.device != "cuda" or chosen is None:
        return None, ""
    try:
        hardware = hardware or Hardware.detect()
        if problem.arch != hardware.arch:
            here = f"the GPU here is {hardware.arch}"
            return None, f"{problem.arch or 'no architecture'} is asked for, {here}; name one"
        return predict(problem, hardware, _config(problem, chosen, hardware)), ""
    except (ValueError, RuntimeError) as error:
        return None, str(error)


# Where the choice of a config lives: pure functions, in modules without a kernel language.
_CONFIGS = {
    ("portable", Op.FORWARD): ("onchip.kernels.portable.config", "choose_forward"),
    ("portable", Op.BACKWARD): ("onchip.kernels.portable.backward_config", "choose_backward"),
    ("hopper", Op.FORWARD): ("onchip.kernels.hopper.config", "choose_forward"),
    ("hopper", Op.BACKWARD): ("onchip.kernels.hopper.backward_config", "choose_backward"),
    ("fp8_hopper", Op.FORWARD): ("onchip.kernels.hopper.fp8_config", "choose_fp8"),
    ("decode", Op.FORWARD): ("onchip.kernels.portable.decode_config", "choose_decode"),
}


def _config(problem: Problem, chosen: str, hardware: Hardware) -> Any:
    """The config that the chosen kernel would take, None where it has none."""
    if (chosen, problem.op) not in _CONFIGS:
        return None
    module, name = _CONFIGS[chosen, problem.op]
    choose_config = getattr(importlib.import_module(module), name)
    if chosen == "decode":
        return choose_config(problem, hardware.num_sms)
    return choose_config(problem)


def kernel_names() -> Sequence[str]:
    """Names that `kernel=` accepts."""
    return NAMES
