"""How comparisons are shown: tables, a progress bar, a plot, and what machine they ran on."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from onchip import validate
from onchip.analysis.words import human, human_us

if TYPE_CHECKING:
    from onchip.bench.compare import Cell, Row

_SUFFIXES = (".svg", ".png")
_BAR_WIDTH = 24
#: Steps of a cell that the bar counts: the oracle, some twelve methods, and the times.
_STEPS = 12


class Progress:
    """A bar on a terminal; nothing elsewhere.

    Args:
        stream: stderr, so that stdout carries results alone.
        num_cells: cells in all.
    """

    def __init__(self, stream: TextIO, num_cells: int):
        self._stream = stream if stream.isatty() else None
        self._num_cells, self._cell, self._steps, self._name = num_cells, -1, 0, ""

    def begin(self, name: str) -> None:
        """Goes on to the next cell."""
        self._cell, self._steps, self._name = self._cell + 1, 0, name

    def step(self, what: str) -> None:
        """Shows what happens next in the cell."""
        if self._stream is None:
            return
        within = min(self._steps / _STEPS, 0.95)
        self._steps += 1
        filled = round(_BAR_WIDTH * (self._cell + within) / self._num_cells)
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        self._stream.write(f"\r\x1b[K[{bar}] {self._name}: {what}")
        self._stream.flush()

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self._stream is not None:
            self._stream.write(f"\r\x1b[K{text}\n")

    def clear(self) -> None:
        """Takes the bar away."""
        if self._stream is not None:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def table(cell: Cell) -> str:
    """One cell's rows as text, the quickest first, those without a time last."""
    case = cell.case
    mask = "causal" if case.causal else "full"
    heads = f"{case.heads}" + (f"/{case.kv_heads}" if case.kv_heads != case.heads else "")
    part = {"forward": "forward", "both": "forward and backward"}[cell.part]
    title = (
        f"{part}: B = {case.batch}, N = {case.length}, H = {heads}, D = {case.head_dim}, "
        f"{case.dtype}, {mask}"
    )
    if cell.bound_us:
        title += f"; {human_us(cell.bound_us)} at the roof"
    head = (
        f"  {'method':<17}{'time':>9}  {'10 - 90 %':<21}{'TFLOP/s':>8}{'of roof':>9}{'memory':>11}"
    )
    if any(row.predicted_us for row in cell.rows):
        head += "  predicted"
    timed = sorted((r for r in cell.rows if r.time), key=lambda r: r.time.median_us)  # type: ignore
    rest = [f"  {r.method:<17}{'-':>9}  {r.why_not}" for r in cell.rows if not r.time]
    return "\n".join([title, head, *map(_line, timed), *rest]) + "\n"


def _line(row: Row) -> str:
    assert row.time is not None, "only rows with a time"
    spread = f"{human_us(row.time.low_us)} - {human_us(row.time.high_us)}"
    roof = "" if row.roofline_fraction is None else f"{row.roofline_fraction:.0%}"
    memory = "" if row.peak_bytes is None else human(row.peak_bytes)
    predicted = ""
    if row.predicted_us:
        predicted = "  " + " - ".join(map(human_us, row.predicted_us))
    return (
        f"  {row.method:<17}{human_us(row.time.median_us):>9}  {spread:<21}{row.tflops:>8.3g}"
        f"{roof:>9}{memory:>11}{predicted}"
    )


def machine(device: str) -> dict[str, Any]:
    """Device, versions and date, as a JSON result begins."""
    if device == "cuda":
        from onchip.bench.attention import device_report

        told = device_report()
        return {k: v for k, v in told.items() if k not in ("dtype", "unit")}
    return {
        "device": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


def check_file(option: str, path: Path) -> None:
    """Whether a file can be written there, asked before anything is measured.

    Raises:
        ValueError: if not.
    """
    if path.is_dir():
        validate.reject(option, path, "a file's name", f"Write e.g. {path / 'times'}.")
    if not path.parent.is_dir():
        validate.reject(option, path, "a file in a folder that exists", f"Make {path.parent}.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        validate.reject(option, path, "a file that may be written", "Choose another place.")


def check_plot(path: Path) -> None:
    """Whether a plot can be written there.

    Raises:
        ValueError: if the suffix is none that is known, or the file can't be written.
        ModuleNotFoundError: if matplotlib is not installed.
    """
    if path.suffix.lower() not in _SUFFIXES:
        allowed = f"a name in {' or '.join(_SUFFIXES)}"
        validate.reject("--plot", path.name, allowed, "Its ending says which to draw.")
    check_file("--plot", path)
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        advice = "matplotlib is not installed. Run: pip install '.[plot]' in onchip's folder"
        raise ModuleNotFoundError(advice, name=error.name) from error


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Median times against N, a line for each method, a panel for each part."""
    check_plot(path)
    points = {
        part: {
            (row.method, cell.case.length): row.time.median_us
            for cell in cells
            if cell.part == part
            for row in cell.rows
            if row.time
        }
        for part in dict.fromkeys(cell.part for cell in cells)
    }
    draw_times(points, path)


def draw_times(points: dict[str, dict[tuple[str, int], float]], path: Path) -> None:
    """Draws part -> (method, N) -> microseconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(points), 4.2), layout="constrained")
    panels = figure.subplots(1, len(points), squeeze=False)[0]
    names = list(dict.fromkeys(name for times in points.values() for name, _ in times))
    for axes, (part, times) in zip(panels, points.items(), strict=True):
        for index, name in enumerate(names):
            lengths = sorted(n for method, n in times if method == name)
            values = [times[name, n] / 1e3 for n in lengths]
            axes.plot(
                lengths, values, marker="osd^vPX*<>"[index % 10], label=name, color=f"C{index}"
            )
        every = sorted({n for _, n in times})
        title = {"forward": "forward", "both": "forward and backward"}[part]
        axes.set(xscale="log", yscale="log", xlabel="N", ylabel="ms", title=title)
        axes.set_xticks(every, [str(n) for n in every], minor=False)
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize="small")
    figure.savefig(path)
