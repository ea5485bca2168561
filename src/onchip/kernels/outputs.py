"""Uninitialised outputs of launches from addresses, made without torch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

try:
    from torch._C._dynamo import guards as dynamo_guards
except ImportError:
    dynamo_guards = None


def empty_of(device: torch.device) -> Callable[..., Tensor]:
    """What makes an uninitialised tensor from shape, strides and dtype.

    The function of torch.compile's own code where it is there, on the current device: without
    torch's dispatcher an output takes 1 us less. It does not fill memory for those who ask for
    determinism.
    """
    direct = getattr(dynamo_guards, "_empty_strided_cuda", None)
    if device.type == "cuda" and direct and not torch._C._get_deterministic_algorithms():
        return direct
    return lambda shape, strides, dtype: torch.empty_strided(
        shape, strides, dtype=dtype, device=device
    )


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides)
