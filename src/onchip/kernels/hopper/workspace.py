"""Counters that a launch finds at zero and leaves at zero.

Eager calls on a stream run one after another and share them. A launch captured in a CUDA graph
may later run beside any other: it gets its own. Those were zeroed before, where there are some
left, since a captured fill would be a launch more in each replay.

Counters: 0 the next tile of queries, 1 whether a row needs repair, 2 programs that repaired; from
`NUM_COUNTERS` on pieces that are done, see `gluon_pieces`.

Where keys are cut into pieces, partial results have memory of the stream's or the graph's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Counters that every launch has, 16 bytes: all begin at a multiple of them.
NUM_COUNTERS = 4
_CAPTURED = 1 << 18  # counters for launches of graphs, on each device
_by_stream: dict[tuple[int, int], Tensor] = {}
_floats: dict[tuple[int, int], Tensor] = {}
_ready: dict[int, list] = {}  # device -> [zeroed counters, how many are taken]


def take(device: torch.device, size: int = NUM_COUNTERS) -> Tensor:
    """Counters for one launch on the current stream, a multiple of 4."""
    if device.type != "cuda":
        return _zeros(device, size)
    if torch.cuda.is_current_stream_capturing():
        return _of_graph(device, size)
    key = (device.index, torch._C._cuda_getCurrentRawStream(device.index))
    found = _by_stream.get(key)
    if found is None or len(found) < size:
        size = 1 << (size - 1).bit_length()
        if device.index not in _ready:
            _ready[device.index] = [_zeros(device, _CAPTURED), 0]
            torch.cuda.current_stream(device).synchronize()  # graphs may run on any stream
        found = _by_stream[key] = _zeros(device, size)
    return found


def floats(device: torch.device, size: int) -> Tensor:
    """Memory for one launch on the current stream, float32, not cleared."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.empty(size, dtype=torch.float32, device=device)
    key = (device.index, torch._C._cuda_getCurrentRawStream(device.index))
    found = _floats.get(key)
    if found is None or len(found) < size:
        # Launches that are repeated keep the memory they had: by powers of two all that a stream
        # outgrows is less than what it has.
        size = 1 << (size - 1).bit_length()
        found = _floats[key] = torch.empty(size, dtype=torch.float32, device=device)
    return found


def _of_graph(device: torch.device, size: int) -> Tensor:
    """Counters that nobody else has."""
    ready = _ready.get(device.index)
    if ready is None or ready[1] + size > len(ready[0]):
        return _zeros(device, size)
    start = ready[1]
    ready[1] += size
    return ready[0][start : start + size]


def _zeros(device: torch.device, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int32, device=device)
