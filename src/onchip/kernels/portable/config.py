"""Tile sizes of the portable kernels: a frozen Config and the pure function that picks it.

No kernel language is imported here, so that `explain` can show a config anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onchip.problem import Layout, Problem

#: Bytes of K and V that the programs running at one time should share in the L2 cache.
L2_BUDGET_BYTES = 24 << 20


@dataclass(frozen=True)
class Config:
    """How the forward cuts its work.

    Args:
        block_m: query rows of a program, a power of two >= 16.
        block_n: keys of a tile, a power of two >= 16.
        num_warps: warps of a program, a power of two.
        num_stages: K/V tiles in flight, the current one included.
        descriptors: whether q, k and v are read through tensor descriptors (TMA on sm_90 and
            later) where `can_describe` allows it, else through pointers.
        group_heads: whether programs of several heads run interleaved, longest rows first,
            instead of one head after the other.
        max_registers: limit on registers of a thread, 0 for none (NVIDIA only).

    Raises:
        ValueError: if a size is not one that Triton can compile.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    descriptors: bool = False
    group_heads: bool = False
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


def padded(head_dim: int) -> int:
    """The power of two >= 16 that holds a head dimension."""
    return max(16, 1 << (head_dim - 1).bit_length())


def can_describe(problem: Problem) -> bool:
    """Whether tensor descriptors can read this layout: rows of 16 bytes or more, no pages."""
    if problem.layout_k is Layout.PAGED or problem.kv_dtype != problem.dtype:
        return False
    return problem.arch.startswith("sm_") and int(problem.arch[3:]) >= 90


def choose_forward(problem: Problem) -> Config:
    """The forward's config for a problem: a pure function, no device is asked."""
    width = max(64, padded(max(problem.head_dim, problem.head_dim_v)))
    if problem.dtype == torch.float32:
        return _FLOAT32[width]
    if problem.seqlen_q <= 32:
        return _SHORT[width]
    if problem.arch == "sm_90":
        banded = problem.mask.right >= 0 or problem.mask.left >= 0
        short = banded and problem.seqlen_k <= 2048
        return _SM90_SHORT[width] if short else _SM90[width, banded]
    return (_SM80 if problem.arch == "sm_80" else _SAFE)[width]


# Full precision has no tensor cores, and its operands live in registers: small tiles.
_FLOAT32 = {64: Config(32, 32, 4, 2), 128: Config(32, 32, 8, 1), 256: Config(16, 16, 4, 1)}

# A few rows only: a larger block would compute rows that do not exist.
_SHORT = {64: Config(32, 64, 4, 2), 128: Config(32, 64, 4, 2), 256: Config(32, 32, 4, 1)}

# H200, 2026-11-29, bf16, 16k tokens, best of two sweeps in interleaved rounds (TFLOP/s at
# 4k, full / causal): 64x128 with 4 warps 468 / 408 at D = 64 against 282 / 258 of 128x128 with
# 8; 64x64 with 4 warps, 3 stages 510 / 473 at D = 128 against 422 / 370: two programs of 4
# warps on an SM overlap one's softmax with the other's products. At D = 256 only one program
# fits, and 128x64 with 8 warps is best (495 / 437).
_SM90 = {
    (64, False): Config(64, 128, 4, 2, descriptors=True),
    (64, True): Config(64, 128, 4, 2, descriptors=True, group_heads=True),
    (128, False): Config(64, 64, 4, 3, descriptors=True),
    (128, True): Config(64, 64, 4, 3, descriptors=True),
    (256, False): Config(128, 64, 8, 2, descriptors=True),
    (256, True): Config(128, 64, 8, 2, descriptors=True, group_heads=True),
}

# Short causal sequences are mostly diagonal: narrower tiles, and pointers, whose set-up is
# cheaper (same runs, 1k: 296 against 275 at D = 64, 285 against 258 at D = 256).
_SM90_SHORT = {
    64: Config(64, 64, 4, 3),
    128: Config(64, 64, 4, 3, descriptors=True),
    256: Config(128, 64, 8, 2),
}

_SM80 = {64: Config(128, 64, 4, 3), 128: Config(128, 32, 8, 2), 256: Config(64, 32, 8, 2)}

# These fit 64 KiB of shared memory, which the smallest GPUs have (gfx942, sm_75).
_SAFE = {64: Config(64, 64, 4, 2), 128: Config(64, 64, 4, 1), 256: Config(64, 32, 8, 1)}
