"""Which kernel runs a Problem, and why the others do not.

One walk over the capability records of `onchip.kernels` gives the choice, the error and the
explanation. Nothing here imports a kernel or a kernel language.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onchip.analysis import cost
from onchip.kernels import KERNELS, NAMES, Kernel
from onchip.problem import Problem


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
    why = {k.name: k.rejections(problem) for k in candidates(problem, kernel)}
    if kernel is not None and not why:
        why[kernel] = [f"has no {problem.op.value}"]
    return {name: reasons for name, reasons in why.items() if reasons}


def choose(problem: Problem, kernel: str | None = None) -> Kernel:
    """The first kernel without a reason to reject the problem.

    Args:
        problem: the call.
        kernel: force this one; never falls back to another.

    Raises:
        NoKernelError: if no kernel (or not the forced one) takes the problem.
    """
    for record in candidates(problem, kernel):
        if not record.rejections(problem):
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
        backward: the same for the backward, when an input requires a gradient.
    """

    problem: Problem
    chosen: str | None
    rejected: dict[str, list[str]]
    skipped: list[str]
    flops: int
    traffic_bytes: int
    three_step_bytes: int
    upper_bound: bool
    backward: Explanation | None = None

    @property
    def copies(self) -> tuple[str, ...]:
        """Inputs that are copied first."""
        return self.problem.copies

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
        text = "\n".join(lines)
        return f"{text}\n{self.backward}" if self.backward else text


def human(amount: float, unit: str = "B", base: int = 1024) -> str:
    """An amount with a readable prefix: 1536 -> '1.5 KiB'."""
    infix = "i" if base == 1024 else ""
    if amount < base:
        return f"{amount:.0f} {unit}"
    for prefix in "KMGTPE":
        amount /= base
        if amount < base:
            return f"{amount:.1f} {prefix}{infix}{unit}"
    return f"{amount:.1f} E{infix}{unit}"


def explain(
    problem: Problem, kernel: str | None = None, backward: Problem | None = None
) -> Explanation:
    """Explains a Problem without running anything.

    Args:
        problem: the call.
        kernel: the kernel that the call forces, if any.
        backward: the backward's Problem, to be explained along.
    """
    rejected = rejections(problem, kernel)
    taking = [k.name for k in candidates(problem, kernel) if k.name not in rejected]
    return Explanation(
        problem=problem,
        chosen=taking[0] if taking else None,
        rejected=rejected,
        skipped=taking[1:],
        flops=cost.flops(problem),
        traffic_bytes=cost.traffic_bytes(problem),
        three_step_bytes=cost.three_step_bytes(problem),
        upper_bound=cost.is_upper_bound(problem),
        backward=explain(backward, kernel) if backward else None,
    )


def kernel_names() -> Sequence[str]:
    """Names that `kernel=` accepts."""
    return NAMES
