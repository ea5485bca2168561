"""What launches of one signature have in common, found once: see `onchip.kernels.launcher`.

A signature is everything of a call that its compiled code or its run-time numbers depend on:
the Problem, strides, and which pointers are aligned. Calls with user functions or dropout have
more than that and are not resolved.

Legend: D / D_v head dimensions.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from onchip.bounded import Bounded
from onchip.kernels.launcher import Described, Launch
from onchip.kernels.portable.arguments import precision_of
from onchip.problem import Problem, Tensors


class Resolved:
    """A launch with those of its arguments that stay.

    Args:
        problem: kept alive, since its identity is part of the signature.
        launch: the compiled kernel on its grid.
        sources: of the first launch: tensors, or descriptors of them.
        numbers: the run-time numbers.
        spec: what is compiled.
    """

    __slots__ = ("_first", "_shapes", "launch", "numbers", "problem", "spec")

    def __init__(self, problem: Problem, launch: Launch, sources, numbers: tuple, spec: Any):
        self.problem = problem
        self.launch = launch
        self.numbers = numbers
        self.spec = spec
        self._first = sources
        self._shapes = tuple(
            (x.shape, x.strides) if isinstance(x, TensorDescriptor) else None for x in sources
        )

    @property
    def is_resolved(self) -> bool:
        """Whether the launch has run once and can be repeated as it is."""
        return self.launch.is_resolved

    def sources(self, *tensors: Any) -> Any:
        """Tensors as the kernel reads them: as they are, or described."""
        if self._first is not None:
            first, self._first = self._first, None
            return first  # Triton looks at these, and only at the first launch
        return [
            x if shape is None else Described(x, *shape)
            for x, shape in zip(tensors, self._shapes, strict=True)
        ]


class Keepable(Protocol):
    """A launch, or several, that may be kept."""

    @property
    def is_resolved(self) -> bool: ...


_kept: Bounded[Hashable, Any] = Bounded(4096)


def signature(
    part: str, config: Any, problem: Problem, tensors: Tensors, *others: Tensor | None
) -> Hashable:
    """What must be equal for two calls to share a `Resolved`.

    Args:
        part: names the kernel.
        config: the one that was asked for; None for the chosen one.
        problem, tensors: the call; problems are told apart by identity, which is quick, since
            the operators keep one object for calls alike.
        others: further tensors that the kernel reads.
    """
    q, k, v = tensors.q, tensors.k, tensors.v
    table, sinks = tensors.block_table, tensors.sinks
    lengths = (tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.seqused_k, tensors.leftpad_k)
    return (
        part,
        config,
        id(problem),
        q.get_device(),
        q.stride(),
        k.stride(),
        v.stride(),
        k.shape,
        (q.data_ptr() & 15, k.data_ptr() & 15, v.data_ptr() & 15),
        None if table is None else table.stride(0),
        None if sinks is None else sinks.dtype,
        *[None if x is None else (x.stride(), x.data_ptr() & 15) for x in others],
        *[
            None if x is None else (x.dtype, x.data_ptr() & 15)
            for x in (*lengths, table, tensors.alibi_slopes, sinks)
        ],
        precision_of(problem),
    )


def kept(key: Hashable | None) -> Any:
    """What was kept for a signature, or None."""
    return None if key is None else _kept.get(key)


def keep(key: Hashable | None, resolved: Keepable) -> None:
    """Keeps launches that have run once; what can't be repeated as it is is left alone."""
    if key is None or not resolved.is_resolved:
        return
    _kept[key] = resolved
