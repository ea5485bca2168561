"""The Hopper forward's launches from addresses, for calls like one that ran: `onchip.repeats`.

Legend: B batch, S_q queries, H query heads, D_v head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onchip.kernels.hopper.arguments import Resolved
from onchip.kernels.hopper.workspace import floats, take
from onchip.kernels.outputs import contiguous, empty_of


class Repeated:
    """A resolved forward from addresses.

    Args:
        found: its launches.
        out: an output like those of all calls.
        wants_lse: whether the LSE is returned.
    """

    def __init__(self, found: Resolved, out: Tensor, wants_lse: bool):
        self._found = found
        self._wants_lse = wants_lse
        self._device = out.device
        self._empty = empty_of(out.device)
        self._out = (tuple(out.shape), contiguous(tuple(out.shape)), out.dtype)
        rows = (*out.shape[:-3], out.shape[-2], out.shape[-3])
        # Of each stream: addresses, and the tensors behind them.
        self._streams: dict[int, tuple[int, int, tuple]] = {}
        self._lse = (rows, contiguous(rows), torch.float32)

    @property
    def is_ready(self) -> bool:
        """Whether it may be called now."""
        return self._found.is_ready

    def __call__(self, q: Tensor, places: tuple) -> tuple[Tensor, Tensor | None]:
        out, lse = self._empty(*self._out), self._empty(*self._lse)
        counters, partials, _tensors = self._memory()
        q_at, k_at, v_at, table, packed, used, _, slopes, sinks, _, _ = places
        addresses = (
            q_at, k_at, v_at, out.data_ptr(), lse.data_ptr(), counters,
            packed or 0, 0, used or 0, table or 0, slopes or 0, sinks or 0, partials,
        )  # fmt: skip
        done = self._found.launch_at(addresses)
        assert done, "is_ready was asked before"
        return out, lse if self._wants_lse else None

    def _memory(self) -> tuple[int, int, tuple]:
        """Counters and memory for pieces, the stream's or the graph's: addresses, and tensors."""
        if self._device.type != "cuda" or torch._C._cuda_isCurrentStreamCapturing():
            return self._taken()
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        found = self._streams.get(stream)
        if found is None:
            found = self._streams[stream] = self._taken()
        return found

    def _taken(self) -> tuple[int, int, tuple]:
        counters = take(self._device, self._found.num_counters)
        if not self._found.num_floats:
            return counters.data_ptr(), 0, (counters,)
        partials = floats(self._device, self._found.num_floats)
        return counters.data_ptr(), partials.data_ptr(), (counters, partials)
