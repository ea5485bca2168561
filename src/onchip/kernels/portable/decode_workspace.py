"""Memory that the decode's programs meet in: partial results and counters.

Counters are zero before and after every launch. Eager calls on a stream run one after another
and share one workspace. A launch captured in a CUDA graph may later run beside any other: it
has counters of its own, from an arena that was zeroed before the capture, and partial results
in the graph's own memory.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

_ARENA_COUNTERS = 1 << 20
_FEWEST_COUNTERS = 1 << 12
_FEWEST_FLOATS = 1 << 20


class Workspace(NamedTuple):
    """What one stream's launches share."""

    floats: Tensor
    counters: Tensor


_by_stream: dict[tuple[int, int], Workspace] = {}
_arenas: dict[int, list] = {}  # device -> [counters, how many are taken]


@lru_cache(maxsize=None)
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few where there is none (the interpreter)."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def take(device: torch.device, num_rows: int, width: int, num_counters: int):
    """Room for num_rows partial rows: (num_rows * width), (num_rows * 2), and zeroed counters."""
    num_rows = -(-num_rows // 4) * 4  # both parts begin at multiples of 16 bytes
    floats, counters = room(device, num_rows * (width + 2), num_counters)
    return floats, floats[num_rows * width :], counters


def room(device: torch.device, num_floats: int, num_counters: int) -> Workspace:
    """Memory of the current stream, or of the graph that it is recording."""
    if device.type != "cuda":
        floats = torch.empty(num_floats, dtype=torch.float32, device=device)
        return Workspace(floats, torch.zeros(num_counters, dtype=torch.int32, device=device))
    if torch.cuda.is_current_stream_capturing():
        floats = torch.empty(num_floats, dtype=torch.float32, device=device)
        return Workspace(floats, _from_arena(device, num_counters))
    return _of_stream(device, num_floats, num_counters)


def _of_stream(device: torch.device, num_floats: int, num_counters: int) -> Workspace:
    key = (device.index, torch._C._cuda_getCurrentRawStream(device.index))
    found = _by_stream.get(key)
    if found is None or found.floats.numel() < num_floats or found.counters.numel() < num_counters:
        if device.index not in _arenas:
            _arenas[device.index] = [_zeros(device, _ARENA_COUNTERS), 0]
        size = max(_FEWEST_FLOATS, 1 << (num_floats - 1).bit_length())
        floats = torch.empty(size, dtype=torch.float32, device=device)
        count = max(_FEWEST_COUNTERS, 1 << (num_counters - 1).bit_length())
        found = _by_stream[key] = Workspace(floats, _zeros(device, count))
    return found


def _from_arena(device: torch.device, num_counters: int) -> Tensor:
    arena = _arenas.get(device.index)
    if arena is None or arena[1] + num_counters > arena[0].numel():
        return _zeros(device, num_counters)  # one more node in the graph
    start = arena[1]
    arena[1] = start + -(-num_counters // 4) * 4
    return arena[0][start : start + num_counters]


def _zeros(device: torch.device, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)
