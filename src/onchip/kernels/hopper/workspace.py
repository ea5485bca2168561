"""Counters that a launch finds at zero and leaves at zero.

Eager calls on a stream run one after another and share them. A launch captured in a CUDA graph
may later run beside any other: it gets its own.

Counters: 0 the next tile of queries, 1 whether a row needs repair, 2 programs that repaired.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SIZE = 4  # 16 bytes: every launch's counters begin at a multiple of them
_by_stream: dict[tuple[int, int], Tensor] = {}


def take(device: torch.device) -> Tensor:
    """Counters for one launch on the current stream."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(_SIZE, dtype=torch.int32, device=device)
    key = (device.index, torch._C._cuda_getCurrentRawStream(device.index))
    found = _by_stream.get(key)
    if found is None:
        found = _by_stream[key] = torch.zeros(_SIZE, dtype=torch.int32, device=device)
    return found
