"""Tile sizes of the portable backward: a frozen Config and the pure function that picks it.

No kernel language is imported here, so that `explain` can show a config anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onchip.kernels.portable.config import can_describe, padded
from onchip.problem import Problem

REDUCTIONS = ("none", "atomics", "tma")


@dataclass(frozen=True)
class Tiles:
    """How one kernel cuts its work.

    Args:
        block_m: query rows of a tile, a power of two >= 16.
        block_n: keys of a tile, a power of two >= 16.
        num_warps: warps of a program, a power of two.
        num_stages: tiles of the walked side in flight, the current one included.
        max_registers: limit on registers of a thread, 0 for none (NVIDIA only).

    Raises:
        ValueError: if a size is not one that Triton can compile.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int = 0

    def __post_init__(self):
        for name in ("block_m", "block_n"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name}: got {size}; allowed: powers of two from 16 on")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"num_warps: got {self.num_warps}; allowed: 1, 2, 4, 8 or 16")
        if self.num_stages < 1:
            raise ValueError(f"num_stages: got {self.num_stages}; allowed: 1 or more")


@dataclass(frozen=True)
class BackwardConfig:
    """How the backward is made.

    Args:
        dkdv: tiles of the kernel that owns keys.
        dq: tiles of the kernel that owns queries; unused when `reduction` is not "none".
        reduction: "none" computes dQ in a kernel of its own, which is deterministic; "atomics"
            and "tma" add it up in float32 from the dK/dV kernel, 5 matrix products rather than
            7, through pointers or through a tensor descriptor (dense queries only).
        descriptors: whether q, k, v and dout are read through tensor descriptors (TMA on sm_90
            and later) where `can_describe` allows it, else through pointers.
        group_heads: whether programs of several heads run interleaved, longest walks first,
            instead of one head after the other.

    Raises:
        ValueError: if `reduction` is none of those.
    """

    dkdv: Tiles
    dq: Tiles
    reduction: str = "none"
    descriptors: bool = False
    group_heads: bool = False

    def __post_init__(self):
        if self.reduction not in REDUCTIONS:
            allowed = ", ".join(REDUCTIONS)
            raise ValueError(f"reduction: got {self.reduction!r}; allowed: {allowed}")


def choose_backward(problem: Problem) -> BackwardConfig:
    """The backward's config for a problem: a pure function, no device is asked."""
    width = padded(max(problem.head_dim, problem.head_dim_v))
    if problem.dtype == torch.float32:
        return _FLOAT32[width > 64]
    size = max(width, 64)
    if problem.arch in ("sm_90", "sm_100") and can_describe(problem):
        return _SM90[size]
    return _SM80[size] if problem.arch == "sm_80" else _SAFE[size]


# float32 tiles are twice as large, and full precision has no tensor cores: small tiles.
_FLOAT32 = {
    False: BackwardConfig(Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
    True: BackwardConfig(Tiles(16, 32, 4, 1), Tiles(32, 16, 4, 1)),
}

# H200, 2026-11-29, bf16, 16k tokens, each kernel's tiles timed on their own in interleaved
# rounds (ms at 16k causal, best / runner-up): dK/dV 64x64 with 4 warps 4.4 / 5.2 at D = 64 and
# 3.2 / 3.6 at D = 128; dQ 64x64 with 4 warps 2.7 / 3.0 at D = 64, 128x64 with 8 warps 2.6 / 2.8
# at D = 128. Together 379 and 464 TFLOP/s there. D = 256: 9.5 and 3.6 ms, 201 TFLOP/s.
# Adding dQ up from the dK/dV kernel (5 products, not 7) was slower in all 18 cells.
_SM90 = {
    64: BackwardConfig(Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 3), descriptors=True),
    128: BackwardConfig(Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 3), descriptors=True),
    256: BackwardConfig(Tiles(32, 64, 8, 2), Tiles(128, 32, 8, 2), descriptors=True),
}

_SM80 = {
    64: BackwardConfig(Tiles(64, 128, 8, 2), Tiles(128, 64, 8, 2)),
    128: BackwardConfig(Tiles(32, 128, 8, 2), Tiles(128, 32, 8, 2)),
    256: BackwardConfig(Tiles(32, 64, 8, 1), Tiles(64, 32, 8, 1)),
}

# 64 KiB of shared memory (sm_75, sm_86, CDNA) hold these.
_SAFE = {
    64: BackwardConfig(Tiles(64, 64, 4, 1), Tiles(64, 64, 4, 1)),
    128: BackwardConfig(Tiles(32, 64, 4, 1), Tiles(64, 32, 4, 1)),
    256: BackwardConfig(Tiles(16, 32, 4, 1), Tiles(32, 16, 4, 1)),
}
