"""A decode's launches from addresses, for calls like one that has run; see `onchip.repeats`.

Legend: B batch, S_q queries, H query heads, D_v head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from onchip.kernels.outputs import contiguous, empty_of
from onchip.kernels.portable import decode_workspace

if TYPE_CHECKING:
    from onchip.kernels.portable.decode import Plan


class _Place(NamedTuple):
    """What launches on one stream share, or those of one graph.

    Args:
        run: the compiled launcher.
        head: its arguments before addresses.
        tail: those after the call's own addresses: partial results, counters, numbers.
        merge: as run, head and tail, of the launch that merges.
        spare: address for an LSE that nobody asked for.
        room: the memory behind these addresses.
    """

    run: Callable
    head: tuple
    tail: tuple
    merge: tuple[Callable, tuple, tuple] | None
    spare: int
    room: decode_workspace.Workspace


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
        self._empty = empty_of(plan.device)
        self._out = (plan.out_shape, contiguous(plan.out_shape), plan.dtype)
        self._lse = (plan.lse_shape, contiguous(plan.lse_shape), torch.float32)
        num_rows, width, num_counters = plan.room if plan.spec.merges else (0, 1, 1)
        num_rows = -(-num_rows // 4) * 4  # all parts begin at multiples of 16 bytes
        self._num_partials = num_rows * width
        self._num_floats = num_rows * (width + 2)
        spare = 0 if wants_lse else math.prod(plan.lse_shape)
        self._room = (self._num_floats + spare, num_counters)
        self._like = plan.like  # of k and v, where the kernel reads them by TMA
        self._places: dict[int, _Place] = {}  # of each stream

    @property
    def is_ready(self) -> bool:
        """Whether it may be called now."""
        run, merge = self._plan.run, self._plan.merge
        if not (run.is_direct if self._like else run.takes_addresses):
            return False
        return merge is None or merge.takes_addresses

    def __call__(self, q: Tensor, places: tuple) -> tuple[Tensor, Tensor | None]:
        stream = torch._C._cuda_getCurrentRawStream(self._plan.device.index)
        place = None
        if not torch._C._cuda_isCurrentStreamCapturing():
            place = self._places.get(stream)
        if place is None:
            place = self._place(stream)
        run, head, tail, merge, spare, _ = place
        out, lse = self._empty(*self._out), None
        if self._wants_lse:
            lse = self._empty(*self._lse)
            spare = lse.data_ptr()
        at = out.data_ptr()
        q_at, k_at, v_at, *others = places
        if self._like:
            mapped = self._plan.run.mapped
            keys = (*mapped(0, k_at, self._like[0]), *mapped(1, v_at, self._like[1]), v_at)
        else:
            keys = (k_at, v_at)
        run(*head, q_at, *keys, at, spare, *others, *tail)
        if merge is not None:
            _, packed, used, pad, _, sinks, _, v_scale = others
            run, head, tail = merge
            run(*head, at, spare, packed, used, pad, sinks, v_scale, *tail)
        return out, lse

    def _place(self, stream: int) -> _Place:
        """The stream's, made at its first call, or that of the graph that it is recording."""
        plan = self._plan
        room = decode_workspace.room(plan.device, *self._room)
        start = room.floats.data_ptr()
        spare = start + 4 * self._num_floats
        partials = (None, None, None)
        if plan.spec.merges:
            partials = (start, start + 4 * self._num_partials, room.counters.data_ptr())
        merge = None
        if plan.merge is not None:
            merge = (*plan.merge.on(stream), (*partials[:2], *plan.merge_numbers))
        tail = (*plan.absent, *partials, *plan.numbers)
        place = _Place(*plan.run.on(stream), tail, merge, spare, room)
        if not torch._C._cuda_isCurrentStreamCapturing():
            self._places[stream] = place
        return place
