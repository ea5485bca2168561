"""Loads and computation over time: one after the other, overlapped, and two warpgroups in turns.

Each schedule is a list of spans, so that times, fill and drain follow from it, and so that it
can be drawn, as text and as an SVG.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import NamedTuple


class Span(NamedTuple):
    """Something that a unit does."""

    lane: str
    label: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Schedule:
    """What each unit does when. Prints as a chart.

    Args:
        name: of the schedule.
        spans: in no particular order.
        unit: of their times.
    """

    name: str
    spans: tuple[Span, ...]
    unit: str = "us"

    @property
    def total_us(self) -> float:
        """When the last span ends."""
        return max(span.end_us for span in self.spans)

    @property
    def lanes(self) -> list[str]:
        """Units, in the order of their first span in `spans`."""
        return list(dict.fromkeys(span.lane for span in self.spans))

    def lane(self, name: str) -> list[Span]:
        """What one unit does, by time."""
        return sorted((s for s in self.spans if s.lane == name), key=lambda s: s.start_us)

    def busy_us(self, name: str) -> float:
        """How long a unit works."""
        return sum(span.end_us - span.start_us for span in self.lane(name))

    def fill_us(self, name: str) -> float:
        """How long a unit waits for its first work."""
        return self.lane(name)[0].start_us

    def drain_us(self, name: str) -> float:
        """How long a unit has nothing left to do."""
        return self.total_us - self.lane(name)[-1].end_us

    def gantt(self, width: int = 72) -> str:
        """The chart as text: one line for each unit, each span filled with its label.

        Args:
            width: characters of the time axis, 8 or more.

        Raises:
            ValueError: if the width is less.
        """
        if width < 8:
            raise ValueError(f"width: got {width}; allowed: 8 or more")
        margin = max(map(len, self.lanes))
        lines = [f"{self.name}: {self.total_us:g} {self.unit}"]
        for lane in self.lanes:
            row = ["."] * width
            for span in self.lane(lane):
                start, end = (
                    round(t / self.total_us * width) for t in (span.start_us, span.end_us)
                )
                for at in range(start, max(end, min(start + 1, width))):
                    row[at] = span.label[(at - start) % len(span.label)]
            lines.append(f"{lane:<{margin}} {''.join(row)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.gantt()

    def svg(self, width: int = 720) -> str:
        """The chart as an SVG that stands alone, readable on dark and on light pages.

        Args:
            width: of the picture in pixels, 200 or more.

        Raises:
            ValueError: if the width is less.
        """
        if width < 200:
            raise ValueError(f"width: got {width}; allowed: 200 or more")
        margin, row, gap = 130, 26, 6
        scale = (width - margin - 10) / self.total_us
        height = 30 + len(self.lanes) * (row + gap) + 20
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" font-size="12" '
            'role="img">',
            f"<title>{escape(self.name)}</title>",
            f'<text x="4" y="18" fill="#888">{escape(self.name)}: '
            f"{self.total_us:g} {escape(self.unit)}</text>",
        ]
        for index, lane in enumerate(self.lanes):
            top = 30 + index * (row + gap)
            parts.append(f'<text x="4" y="{top + 17}" fill="#888">{escape(lane)}</text>')
            for span in self.lane(lane):
                if span.end_us == span.start_us:
                    continue  # a unit that idles
                left = margin + span.start_us * scale
                width_us = span.end_us - span.start_us
                parts += _box(span, self.unit, left, top, width_us * scale, row, index)
        parts.append(_axis(margin, scale, self.total_us, height))
        return "\n".join([*parts, "</svg>\n"])


_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2")


def _box(
    span: Span, unit: str, left: float, top: float, width: float, height: float, index: int
) -> list[str]:
    colour = _COLOURS[index % len(_COLOURS)]
    tip = f"{span.lane}: {span.label}, {span.start_us:g} to {span.end_us:g} {unit}"
    return [
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{max(width - 1, 0.5):.1f}" '
        f'height="{height}" rx="2" fill="{colour}"><title>{escape(tip)}</title></rect>',
        f'<text x="{left + width / 2:.1f}" y="{top + 17:.1f}" text-anchor="middle" '
        f'fill="#fff">{escape(span.label)}</text>',
    ]


def _axis(margin: float, scale: float, total_us: float, height: float) -> str:
    ticks = [total_us * part / 4 for part in range(5)]
    return "\n".join(
        f'<text x="{margin + t * scale:.1f}" y="{height - 6}" text-anchor="middle" '
        f'fill="#888">{t:g}</text>'
        for t in ticks
    )


def _check(num_tiles: int, num_stages: int = 1, **times_us: float) -> None:
    for name, count in (("num_tiles", num_tiles), ("num_stages", num_stages)):
        if count < 1:
            raise ValueError(f"{name}: got {count}; allowed: 1 or more")
    for name, time_us in times_us.items():
        if not time_us > 0:
            raise ValueError(f"{name}: got {time_us}; allowed: more than 0")


def pipelined(load_us: float, compute_us: float, num_tiles: int, num_stages: int = 2) -> Schedule:
    """Loads run ahead of the computation by as many tiles as there are buffers.

    A load starts when the one before it is done and a buffer is free: buffer i mod num_stages,
    once tile i - num_stages is computed. One stage is the serial schedule,
    num_tiles (load + compute); more give load + num_tiles * compute where computing takes
    longer, else num_tiles * load + compute.

    Args:
        load_us: time of one tile's load.
        compute_us: time of one tile's computation.
        num_tiles: tiles, 1 or more.
        num_stages: buffers, 1 or more.

    Raises:
        ValueError: if a time is not positive or a number is less than 1.
    """
    _check(num_tiles, num_stages, load_us=load_us, compute_us=compute_us)
    loads: list[Span] = []
    computed: list[Span] = []
    for tile in range(num_tiles):
        free = computed[tile - num_stages].end_us if tile >= num_stages else 0.0
        start = max(free, loads[-1].end_us if loads else 0.0)
        loads.append(Span("load", str(tile), start, start + load_us))
        start = max(loads[-1].end_us, computed[-1].end_us if computed else 0.0)
        computed.append(Span("compute", str(tile), start, start + compute_us))
    name = "serial" if num_stages == 1 else f"overlapped, {num_stages} stages"
    return Schedule(name, (*loads, *computed))


def serial(load_us: float, compute_us: float, num_tiles: int) -> Schedule:
    """Load, compute, load, compute: one buffer."""
    return pipelined(load_us, compute_us, num_tiles, 1)


def ping_pong(
    scores_us: float, softmax_us: float, values_us: float, num_tiles: int, num_groups: int = 2
) -> Schedule:
    """Warpgroups that share the tensor cores and the exponential unit (Shah et al. 2024, fig. 1).

    Each walks over its own tiles: scores (tensor cores), softmax (exponentials), values (tensor
    cores). A unit serves one at a time, whoever is ready first, so that the softmax of one runs
    under the products of another.

    Args:
        scores_us: Q K^T of one tile.
        softmax_us: of one tile.
        values_us: P V of one tile.
        num_tiles: tiles of each warpgroup.
        num_groups: warpgroups; 1 shows what is lost without a partner.

    Raises:
        ValueError: if a time is not positive or a number is less than 1.
    """
    _check(num_tiles, 1, scores_us=scores_us, softmax_us=softmax_us, values_us=values_us)
    if num_groups < 1:
        raise ValueError(f"num_groups: got {num_groups}; allowed: 1 or more")
    steps = (("tensor cores", "S", scores_us), ("exponentials", "x", softmax_us))
    steps = (*steps, ("tensor cores", "O", values_us))
    spans: list[Span] = []
    free = {"tensor cores": 0.0, "exponentials": 0.0}
    ready, done = [0.0] * num_groups, [0] * num_groups
    last = num_tiles * len(steps)
    while min(done) < last:
        unit, label, time_us, group = min(
            ((*steps[done[g] % len(steps)], g) for g in range(num_groups) if done[g] < last),
            key=lambda step: (max(ready[step[3]], free[step[0]]), ready[step[3]], step[3]),
        )
        start = max(ready[group], free[unit])
        ready[group] = free[unit] = start + time_us
        done[group] += 1
        spans.append(Span(unit, f"{label}{group + 1}", start, start + time_us))
    return Schedule(f"{num_groups} warpgroups in turns", tuple(spans))
