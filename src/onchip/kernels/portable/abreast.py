"""Independent launches side by side, so that one's last programs run beside another's first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}  # by device, stream and index


def in_turn_or_abreast(launches: Sequence[Callable[[], None]], device: int) -> None:
    """Runs launches that do not read each other's results.

    On return the current stream waits for all of them, so memory that belongs to it stays safe.

    Args:
        launches: in the order in which they should start.
        device: index of the GPU whose streams to use; -1 runs them one after the other.
    """
    if device < 0 or len(launches) < 2:
        for launch in launches:
            launch()
        return
    current = torch.cuda.current_stream(device)
    sides = [_side_stream(current, i) for i in range(len(launches) - 1)]
    for side in sides:
        side.wait_stream(current)
    try:
        launches[0]()
        for side, launch in zip(sides, launches[1:], strict=True):
            with torch.cuda.stream(side):
                launch()
    finally:
        for side in sides:
            current.wait_stream(side)


def _side_stream(current: torch.cuda.Stream, index: int) -> torch.cuda.Stream:
    """One of a stream's own: while that is captured, others' launches stay out of the graph."""
    key = (current.device_index, current.cuda_stream, index)
    found = _streams.get(key)
    if found is None:
        found = _streams[key] = torch.cuda.Stream(current.device_index)
    return found
