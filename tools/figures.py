"""The documents' figures, each drawn by the library from a worked case.

Usage: python tools/figures.py FOLDER

`FIGURES` maps a figure's name to the function that returns it as SVG.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from html import escape
from pathlib import Path

import torch

from onchip.analysis import pipeline, roofline
from onchip.analysis.hardware import Hardware
from onchip.analysis.pipeline import Schedule, Span
from onchip.analysis.placement import placement
from onchip.bench import report
from onchip.paging import PagedKVCache
from onchip.problem import Layout, Mask, Op, Problem

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "h200"
_SMS = 6  # of the GPU in the figures of schedules


def problem(length: int, heads: int, mask: Mask, op: Op = Op.FORWARD) -> Problem:
    """A dense call in bfloat16, D = 128, for an H200."""
    return Problem(
        op=op, device="cuda", arch="sm_90", dtype=torch.bfloat16, kv_dtype=torch.bfloat16,
        layout_q=Layout.DENSE, layout_k=Layout.DENSE, batch=1, seqlen_q=length, seqlen_k=length,
        tokens_q=length, num_heads=heads, num_kv_heads=heads, head_dim=128, head_dim_v=128,
        mask=mask, scale=128**-0.5,
    )  # fmt: skip


def _plotted(draw: Callable[[Path], object]) -> str:
    """What a function writes to an .svg."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figure.svg"
        draw(path)
        return path.read_text(encoding="utf-8")


def bytes_against_length() -> str:
    """The bill of bytes of the forward's methods."""
    call = problem(4096, 8, Mask())
    return _plotted(lambda path: roofline.plot_bytes(call, Hardware.named("H200"), path))


def forward_roofline() -> str:
    """The forward's methods under the roof."""
    call = problem(4096, 8, Mask())
    return _plotted(lambda path: roofline.plot(call, Hardware.named("H200"), path))


def backward_roofline() -> str:
    """The backward's methods under the roof."""
    call = problem(4096, 8, Mask(), Op.BACKWARD)
    return _plotted(lambda path: roofline.plot(call, Hardware.named("H200"), path))


def by_heads() -> str:
    """Two heads on six SMs, a task a head."""
    return placement(problem(512, 2, Mask()), 128, 128, _SMS, by_heads=True).svg()


def by_tiles() -> str:
    """The same with query tiles."""
    return placement(problem(512, 2, Mask()), 128, 128, _SMS).svg()


def causal_in_order() -> str:
    """Causal programs in the order of their rows: the longest come last."""
    call = problem(1024, 2, Mask(right=0))
    return placement(call, 128, 128, _SMS, longest_first=False).svg()


def causal_longest_first() -> str:
    """The same, longest first."""
    return placement(problem(1024, 2, Mask(right=0)), 128, 128, _SMS).svg()


def _decoding(splits: int) -> str:
    """One sequence of 24 tiles, two heads of keys, on six SMs."""
    tiles, heads = 24, 2
    size = tiles // splits
    spans = [
        Span(f"SM {head * splits + part}", f"h{head} keys {part + 1}/{splits}", 0, size)
        for head in range(heads)
        for part in range(splits)
    ]
    spans += [Span(f"SM {sm}", "", 0, 0) for sm in range(heads * splits, _SMS)]
    if splits > 1:
        spans += [
            Span(f"SM {(head + 1) * splits - 1}", "+", size, size + 1) for head in range(heads)
        ]
    words = "one piece" if splits == 1 else f"{splits} pieces, the last to arrive merges"
    return Schedule(f"a sequence's keys in {words}", tuple(spans), "tiles").svg()


def decode_whole() -> str:
    """Decode without splits."""
    return _decoding(1)


def decode_split() -> str:
    """Decode in three pieces."""
    return _decoding(3)


def pages() -> str:
    """Sequences of 11, 5 and 9 tokens in pages of 4, after one in between was freed."""
    cache = PagedKVCache(1, 12, 4, 1, 1, torch.float32)
    first, gone, second = (cache.add_sequence() for _ in range(3))
    for sequence, tokens in ((first, 8), (gone, 7), (second, 5)):
        cache.append(sequence, tokens)
    cache.free_sequence(gone)
    third = cache.add_sequence()
    cache.append(first, 3)
    cache.append(third, 9)
    owners = {f"sequence {name}": (cache.pages(s), cache.length(s))
              for name, s in (("A", first), ("B", second), ("C", third))}  # fmt: skip
    return _pages_svg(owners, cache.num_pages, 4)


def _pages_svg(owners: dict[str, tuple[list[int], int]], num_pages: int, size: int) -> str:
    """Block tables above, pages with their owners below."""
    cell, left, colours = 46, 96, ("#4e79a7", "#f28e2b", "#59a14f")
    width, top = left + num_pages * cell + 10, 28 + 26 * len(owners)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top + 60}" '
        f'width="{width}" font-family="sans-serif" font-size="12" role="img">',
        "<title>block tables and pages</title>",
    ]
    for row, ((name, (table, length)), colour) in enumerate(
        zip(owners.items(), colours, strict=True)
    ):
        y = 18 + 26 * row
        words = f"{escape(name)}, {length} tokens: block table {table}"
        parts.append(f'<text x="4" y="{y}" fill="{colour}">{words}</text>')
        for place, page in enumerate(table):
            used = min(size, length - place * size)
            x = left + page * cell
            parts.append(
                f'<rect x="{x}" y="{top}" width="{(cell - 4) * used / size}" height="30" '
                f'fill="{colour}"/>'
            )
    parts.append(f'<text x="4" y="{top + 20}" fill="#888">pages</text>')
    for page in range(num_pages):
        x = left + page * cell
        parts.append(
            f'<rect x="{x}" y="{top}" width="{cell - 4}" height="30" fill="none" stroke="#888"/>'
            f'<text x="{x + (cell - 4) / 2}" y="{top + 46}" text-anchor="middle" '
            f'fill="#888">{page}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def published() -> str:
    """Times of the published comparison against N, from benchmarks/results."""
    path = RESULTS / "published.json"
    if not path.exists():
        return '<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"/>\n'
    told = json.loads(path.read_text(encoding="utf-8"))
    points: dict[str, dict[tuple[str, int], float]] = {}
    for cell in told["cells"]:
        times = points.setdefault(cell["part"], {})
        for row in cell["rows"]:
            if row["time"]:
                times[row["method"], cell["case"]["length"]] = row["time"]["median_us"]
    return _plotted(lambda path: report.draw_times(points, path))


_WAYS = {"onchip": ("tab:blue", "-"), "eager float32": ("tab:orange", "--")}


def training() -> str:
    """Loss of a small GPT, from benchmarks/train_gpt.py, with onchip's attention and without."""
    path = RESULTS / "training.json"
    if not path.exists():
        return '<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"/>\n'
    told = json.loads(path.read_text(encoding="utf-8"))
    return _plotted(lambda path: _draw_losses(told["losses"], path))


def _draw_losses(losses: dict[str, list[list[float]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5))
    axes = figure.add_subplot()
    for way, curves in losses.items():
        color, style = _WAYS[way]
        for i, curve in enumerate(curves):
            label = way if i == 0 else None
            axes.plot(curve, style, color=color, linewidth=0.8, label=label)
    axes.set(xlabel="step", ylabel="loss, nats a byte")
    axes.legend()
    figure.savefig(path, bbox_inches="tight")


FIGURES: dict[str, Callable[[], str]] = {
    "bytes": bytes_against_length,
    "roofline": forward_roofline,
    "roofline_backward": backward_roofline,
    "by_heads": by_heads,
    "by_tiles": by_tiles,
    "causal_in_order": causal_in_order,
    "causal_longest_first": causal_longest_first,
    "serial": lambda: pipeline.serial(2, 5, 4).svg(),
    "overlapped": lambda: pipeline.pipelined(2, 5, 4).svg(),
    "one_warpgroup": lambda: pipeline.ping_pong(2, 3, 2, 4, 1).svg(),
    "two_warpgroups": lambda: pipeline.ping_pong(2, 3, 2, 2, 2).svg(),
    "decode_whole": decode_whole,
    "decode_split": decode_split,
    "pages": pages,
    "published": published,
    "training": training,
}


if __name__ == "__main__":
    (folder,) = sys.argv[1:]
    for name, draw in FIGURES.items():
        (Path(folder) / f"{name}.svg").write_text(draw(), encoding="utf-8")
