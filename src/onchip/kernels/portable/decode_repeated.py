"""A decode's launches from addresses, for calls like one that has run; see `onchip.repeats`.

Legend: B batch, S_q queries, H query heads, D_v head dimension.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onchip.kernels.portable import decode_workspace

if TYPE_CHECKING:
    from onchip.kernels.portable.decode import Plan


class Repeated:
    """A plan's launch from addresses.

    Args:
        plan: the plan.
        q: queries like those of all calls.
        wants_lse: whether the LSE is returned; else it is written to where nobody looks.
    """

    def __init__(self, plan: Plan, q: Tensor, wants_lse: bool):
        self._plan = plan
        self._wants_lse = wants_lse
        self._is_like_q = q.shape == plan.out_shape
        self._outputs = (plan.out_shape, _contiguous(plan.out_shape))
        self._lse = (plan.lse_shape, _contiguous(plan.lse_shape))
        num_rows, width, num_counters = plan.room if plan.spec.merges else (0, 1, 1)
        num_rows = -(-num_rows // 4) * 4  # all parts begin at multiples of 16 bytes
        self._num_partials = num_rows * width
        self._num_floats = num_rows * (width + 2)
        spare = 0 if wants_lse else math.prod(plan.lse_shape)
        self._room = (self._num_floats + spare, num_counters)
        self._rooms: dict[int, tuple] = {}  # of each stream

    @property
    def is_ready(self) -> bool:
        """Whether it may be called now."""
        merge = self._plan.merge
        return self._plan.run.takes_addresses and (merge is None or merge.takes_addresses)

    def __call__(self, q: Tensor, places: tuple) -> tuple[Tensor, Tensor | None]:
        plan = self._plan
        if self._is_like_q:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        else:
            out = torch.empty_strided(*self._outputs, dtype=plan.dtype, device=plan.device)
        room, spare, *partials = self._memory()
        lse = None
        if self._wants_lse:
            lse = torch.empty_strided(*self._lse, dtype=torch.float32, device=plan.device)
            spare = lse.data_ptr()
        at = out.data_ptr()
        plan.run.at(*places[:3], at, spare, *places[3:], *partials, *plan.numbers)
        if plan.merge is not None:
            _, packed, used, pad, _, sinks, _, v_scale = places[3:]
            plan.merge.at(
                at, spare, packed, used, pad, sinks, v_scale, *partials[:2], *plan.merge_numbers
            )
        del room
        return out, lse

    def _memory(self) -> tuple:
        """What to keep until the launch, an address for the LSE, and those of the workspace."""
        if torch._C._cuda_isCurrentStreamCapturing():
            return self._addresses(decode_workspace.room(self._plan.device, *self._room))
        stream = torch._C._cuda_getCurrentRawStream(self._plan.device.index)
        found = self._rooms.get(stream)
        if found is None:
            found = self._addresses(decode_workspace.room(self._plan.device, *self._room))
            self._rooms[stream] = found
        return found

    def _addresses(self, room: decode_workspace.Workspace) -> tuple:
        start = room.floats.data_ptr()
        spare = start + 4 * self._num_floats
        if not self._plan.spec.merges:
            return room, spare, None, None, None
        return room, spare, start, start + 4 * self._num_partials, room.counters.data_ptr()


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides)
