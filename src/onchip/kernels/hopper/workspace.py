"""Counters that a launch finds at zero and leaves at zero.

Eager calls on a stream run one after another and share them. A launch captured in a CUDA graph
may later run beside any other: it gets its own. Those were zeroed before, where there are some
left, since a captured fill would be a launch more in each replay.

Counters: 0 the next tile of queries, 1 whether a row needs repair, 2 programs that repaired.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_SIZE = 4  # 16 bytes: every launch's counters begin at a multiple of them
_CAPTURED = 1 << 14  # launches of graphs that find counters ready, on each device
_by_stream: dict[tuple[int, int], Tensor] = {}
_ready: dict[int, Iterator[Tensor]] = {}


def take(device: torch.device) -> Tensor:
    """Counters for one launch on the current stream."""
    if device.type != "cuda":
        return torch.zeros(_SIZE, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        found = next(_ready.get(device.index, iter(())), None)
        return torch.zeros(_SIZE, dtype=torch.int32, device=device) if found is None else found
    key = (device.index, torch._C._cuda_getCurrentRawStream(device.index))
    found = _by_stream.get(key)
    if found is None:
        if device.index not in _ready:
            _ready[device.index] = _zeroed(device)
        found = _by_stream[key] = torch.zeros(_SIZE, dtype=torch.int32, device=device)
    return found


def _zeroed(device: torch.device) -> Iterator[Tensor]:
    """Counters for launches of graphs, one after another."""
    memory = torch.zeros(_CAPTURED, _SIZE, dtype=torch.int32, device=device)
    torch.cuda.current_stream(device).synchronize()  # graphs may run on any stream
    return map(memory.__getitem__, range(_CAPTURED))
