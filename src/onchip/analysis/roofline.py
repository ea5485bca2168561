"""The roofline: what limits each stage of a method on a GPU, and the time it takes at best.

A stage can't be faster than its slow-memory bytes, its matrix products or its exponentials
allow (Williams et al. 2009, extended by the special-function units). At best all three overlap
and the slowest decides; a program that overlaps none of them needs their sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onchip.analysis import bill as bills
from onchip.analysis import cost
from onchip.analysis.bill import Bill, Cache, Stage
from onchip.analysis.hardware import Hardware
from onchip.problem import Op, Problem

#: Limits this close to the slowest count as limiters too.
_TIE = 0.05
#: Of the L2 cache, what K and V may hold; the rest is for everything that passes through.
_L2_SHARE = 0.5
SUFFIXES = (".svg", ".png")


@dataclass(frozen=True)
class Point:
    """A stage, or a whole method, under the roof of a GPU.

    Args:
        name: of the stage or method.
        flops: of its matrix products.
        slow_bytes: from and to slow memory.
        memory_us: time that the bytes take alone.
        products_us: time that the matrix products take alone.
        exps_us: time that the exponentials take alone.
        bound_us: time at best: the largest of the three; a method adds up its stages.
    """

    name: str
    flops: int
    slow_bytes: int
    memory_us: float
    products_us: float
    exps_us: float
    bound_us: float

    @property
    def intensity(self) -> float:
        """FLOP for each byte of slow memory."""
        return self.flops / self.slow_bytes if self.slow_bytes else 0.0

    @property
    def serial_us(self) -> float:
        """Time if nothing overlaps."""
        return self.memory_us + self.products_us + self.exps_us

    @property
    def tflops(self) -> float:
        """Attainable TFLOP/s."""
        return self.flops / self.bound_us / 1e6 if self.bound_us else 0.0

    @property
    def limiter(self) -> str:
        """What takes longest; several joined by "and" when they are within 5 %."""
        limits = {
            "memory": self.memory_us,
            "matrix products": self.products_us,
            "exponentials": self.exps_us,
        }
        slowest = max(limits.values())
        if not slowest:
            return "nothing"
        return " and ".join(n for n, us in limits.items() if us >= slowest * (1 - _TIE))


@dataclass(frozen=True)
class Roofline:
    """A method under the roof of a GPU.

    Args:
        method: its name.
        stages: its launches.
        total: all of them, one after the other.
    """

    method: str
    stages: tuple[Point, ...]
    total: Point


def point(stage: Stage, hardware: Hardware, dtype: object) -> Point:
    """A stage's limits on a GPU."""
    memory_us = stage.slow_bytes / hardware.bandwidth * 1e6
    products_us = stage.flops / hardware.flops(dtype) * 1e6
    exps_us = stage.exps / hardware.exps * 1e6
    return Point(
        stage.name,
        stage.flops,
        stage.slow_bytes,
        memory_us,
        products_us,
        exps_us,
        max(memory_us, products_us, exps_us),
    )


def roofline(bill: Bill, hardware: Hardware, dtype: object) -> Roofline:
    """A method's limits on a GPU, stage by stage and in total.

    Args:
        bill: what the method computes and moves.
        hardware: the GPU.
        dtype: of the matrix products.

    Raises:
        ValueError: if the bill is empty, or the GPU does not multiply that dtype.
    """
    points = tuple(point(stage, hardware, dtype) for stage in bill.stages)
    if not bill.slow_bytes:
        raise ValueError("problem: got one without work; allowed: at least one query, key and head")
    total = Point(
        bill.method,
        bill.flops,
        bill.slow_bytes,
        *(sum(getattr(p, f) for p in points) for f in ("memory_us", "products_us", "exps_us")),
        bound_us=sum(p.bound_us for p in points),
    )
    return Roofline(bill.method, points, total)


def cache_of(hardware: Hardware, blocks_per_sm: int = 1) -> Cache:
    """The L2 cache as K and V see it: half of it, shared by the blocks that run at one time."""
    return Cache(int(hardware.l2_bytes * _L2_SHARE), hardware.num_sms * blocks_per_sm)


def methods(
    problem: Problem,
    hardware: Hardware,
    block_m: int = 128,
    block_n: int = 64,
    lengths: Iterable[tuple[int, int]] | None = None,
) -> list[Bill]:
    """Bills of the methods that can run the problem, slow-memory bytes as this GPU's L2 lets.

    Forward: three-step, fused without online softmax, flash. Backward: three-step, recomputing.
    """
    lengths = None if lengths is None else list(lengths)
    cache, tile = cache_of(hardware), (block_m, block_n)
    steps = bills.three_step(problem, lengths)
    if problem.op is Op.BACKWARD:
        return [steps, bills.backward(problem, tile, tile, lengths, cache)]
    unfused = bills.fused_without_online_softmax(problem, *tile, lengths, cache)
    return [steps, unfused, bills.flash(problem, *tile, lengths, cache)]


def with_length(problem: Problem, length: int) -> Problem:
    """The same dense problem with S_q = S_k = length."""
    tokens = problem.batch * length
    return replace(problem, seqlen_q=length, seqlen_k=length, tokens_q=tokens)


def plot(
    problem: Problem,
    hardware: Hardware,
    path: str | Path,
    lengths: Sequence[int] = (1024, 4096, 16384, 65536),
) -> Path:
    """Draws the methods of a problem on the roofline of a GPU, for several lengths.

    Only FLOP that the problem needs count, so that computing again earns no height.

    Args:
        problem: its S_q and S_k are replaced by each of `lengths`.
        hardware: the GPU.
        path: where to write, .svg or .png.
        lengths: S_q = S_k of each point, 1 or more.

    Returns:
        The path.

    Raises:
        ValueError: if the path's suffix or a length is none of those.
        ModuleNotFoundError: if matplotlib is not installed.
    """
    path, figure, axes = _canvas(path, lengths)
    found: dict[str, list[Point]] = {}
    for length in lengths:
        posed = with_length(problem, length)
        for bill in methods(posed, hardware):
            total = roofline(bill, hardware, problem.dtype).total
            total = replace(total, flops=cost.flops(posed))
            found.setdefault(bill.method, []).append(total)
    widest = max(point.intensity for points in found.values() for point in points)
    _draw_roof(axes, problem, hardware, widest)
    for (method, points), marker in zip(found.items(), "os^", strict=False):
        _draw_method(axes, method, points, lengths, marker)
    dtype = str(problem.dtype).removeprefix("torch.")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="needed FLOP per byte of slow memory",
        ylabel="needed TFLOP/s, at best",
        title=f"{hardware.name}, {dtype}, D = {problem.head_dim}: N = {_joined(lengths)}",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize="small")
    figure.savefig(path)
    return path


def plot_bytes(
    problem: Problem,
    hardware: Hardware,
    path: str | Path,
    lengths: Sequence[int] = (1024, 4096, 16384, 65536),
) -> Path:
    """Draws the slow-memory bytes of a problem's methods against N.

    Args, returns and raises: as `plot`.
    """
    path, figure, axes = _canvas(path, lengths)
    found: dict[str, list[int]] = {}
    for length in lengths:
        for bill in methods(with_length(problem, length), hardware):
            found.setdefault(bill.method, []).append(bill.slow_bytes)
    for (method, amounts), marker in zip(found.items(), "os^", strict=False):
        axes.plot(lengths, amounts, marker=marker, label=method)
    axes.set(xscale="log", yscale="log", xlabel="N", ylabel="bytes of slow memory")
    axes.set(title=f"{hardware.name}, D = {problem.head_dim}, H = {problem.num_heads}")
    axes.set_xticks(lengths, [_joined([n]) for n in lengths], minor=False)
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path)
    return path


def _canvas(path: str | Path, lengths: Sequence[int]):
    """Where to draw, once it is known that it can be done."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"path: got {path.name}; allowed: a name in {' or '.join(SUFFIXES)}")
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths: got {tuple(lengths)}; allowed: one or more, each 1 or more")
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        advice = "matplotlib is not installed. Run: pip install '.[plot]' in onchip's folder"
        raise ModuleNotFoundError(advice, name=error.name) from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    return path, figure, figure.add_subplot()


def _joined(lengths: Sequence[int]) -> str:
    return ", ".join(f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths)


def _draw_roof(axes, problem: Problem, hardware: Hardware, widest: float) -> None:
    """The memory's slope, the matrix products' roof and the exponentials' lower one."""
    peak, ridge = hardware.flops(problem.dtype) / 1e12, hardware.ridge(problem.dtype)
    corners = [ridge / 64, ridge, max(widest, ridge) * 2]
    axes.plot(corners, [peak / 64, peak, peak], color="black", label="roof")
    if problem.op is Op.FORWARD:
        # One exponential for each pair, 2 (D + D_v) FLOP.
        level = 2 * (problem.head_dim + problem.head_dim_v) * hardware.exps / 1e12
        axes.axhline(level, color="gray", linestyle="--", label="exponentials of one pass")


def _draw_method(axes, method: str, points: list[Point], lengths, marker: str) -> None:
    x, y = [p.intensity for p in points], [p.tflops for p in points]
    axes.plot(x, y, marker=marker, linestyle=":", label=method)
    ends = {lengths[0]: (points[0], 6), lengths[-1]: (points[-1], -12)}
    for length, (end, below) in ends.items():
        at = (end.intensity, end.tflops)
        axes.annotate(_joined([length]), at, (4, below), textcoords="offset points", fontsize=7)
