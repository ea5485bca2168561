"""Independent launches side by side, so that one's last programs run beside another's first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


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
    sides = [_side_stream(device, i) for i in range(len(launches) - 1)]
    for side in sides:
        side.wait_stream(current)
    launches[0]()
    for side, launch in zip(sides, launches[1:], strict=True):
        with torch.cuda.stream(side):
            launch()
    for side in sides:
        current.wait_stream(side)


def _side_stream(device: int, index: int) -> torch.cuda.Stream:
    found = _streams.get((device, index))
    if found is None:
        found = _streams[device, index] = torch.cuda.Stream(device)
    return found
