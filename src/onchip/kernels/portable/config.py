"""Tile sizes of the portable kernels: a frozen Config and the pure function that picks it.

No kernel language is imported here, so that `explain` can show a config anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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


def padded(head_dim: int, is_aligned: bool = True) -> int:
    """The power of two >= 16 that holds a head dimension; >= 64 where rows are not aligned.

    Rows that do not begin at multiples of 16 bytes gave wrong results and illegal addresses at
    D_v = 16 (H200, triton 3.6, 2026-11-29, random problems), never from 64 on; the PTX shows no
    cause.
    """
    return max(16 if is_aligned else 64, 1 << (head_dim - 1).bit_length())


def can_describe(problem: Problem) -> bool:
    """Whether tensor descriptors can read this layout: rows of 16 bytes or more, no pages."""
    if problem.layout_k is Layout.PAGED or problem.kv_dtype != problem.dtype:
        return False
    return problem.arch.startswith("sm_") and int(problem.arch[3:]) >= 90


def fitted(size: int, block: int) -> int:
    """The largest tile, up to `size`, that divides a block of a block list."""
    return min(size, block & -block)


def _within_blocks(config: Config, problem: Problem) -> Config:
    """The config with tiles that divide the blocks of the problem's list, if it has one."""
    if not problem.block_list:
        return config
    block_q, block_k = problem.block_list
    block_m, block_n = fitted(config.block_m, block_q), fitted(config.block_n, block_k)
    # As many rows for a warp as before, but four warps at least.
    warps = max(min(config.num_warps, 4), config.num_warps * block_m // config.block_m)
    return replace(config, block_m=block_m, block_n=block_n, num_warps=warps)


def choose_forward(problem: Problem) -> Config:
    """The forward's config for a problem: a pure function, no device is asked."""
    return _within_blocks(_choose(problem), problem)


def _choose(problem: Problem) -> Config:
    width = max(64, padded(max(problem.head_dim, problem.head_dim_v)))
    if problem.dtype == torch.float32:
        return _FLOAT32[width]
    if problem.seqlen_q <= 32:
        return _SHORT[width]
    laden = bool(problem.score_mod) or problem.dropout_p > 0
    if problem.arch == "sm_80":
        return _SM80_LADEN_64 if laden and width == 64 else _SM80[width]
    if problem.arch == "sm_90":
        if laden and width >= 128:
            return _SM90_LADEN[width]
        banded = problem.mask.right >= 0 or problem.mask.left >= 0
        if problem.mask.left >= 0 and width == 64:
            return _SM90_WINDOW_64
        short = banded and problem.seqlen_k <= 2048
        return _SM90_SHORT[width] if short else _SM90[width, banded]
    return _SAFE[width]


def forward_candidates(problem: Problem) -> list[Config]:
    """Configs that ONCHIP_AUTOTUNE=1 measures beside the chosen one."""
    if problem.dtype == torch.float32 or problem.seqlen_q <= 32:
        return []
    sizes = ((64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 8, 2), (128, 32, 8, 3))
    described = can_describe(problem)
    found = [Config(*size, descriptors=described) for size in sizes]
    return [_within_blocks(config, problem) for config in found]


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

# Short causal sequences are mostly diagonal: narrower tiles. Kernels alone, 1k causal, same
# machine: D = 64 0.230 ms, against 0.243 with 64x128; D = 256 0.208, against 0.215 without
# groups, 0.235 through pointers and 0.213 with 64x64, 4 warps, 1 stage.
_SM90_SHORT = {
    64: Config(64, 64, 4, 2, descriptors=True, group_heads=True),
    128: Config(64, 64, 4, 3, descriptors=True),
    256: Config(128, 64, 8, 2, descriptors=True, group_heads=True),
}

# A window of 1024 at 16k, same machine: 0.40 ms, against 0.42 with 64x128. D = 128 and 256 keep
# the tiles above (0.34 ms each).
_SM90_WINDOW_64 = Config(64, 64, 4, 2, descriptors=True)

# Dropout's bits and a score function's loads go through shared memory: with 3 stages at D = 128
# (117 KiB with dropout, 145 with a learned bias) only one program of 4 warps fits on an SM, and
# at D = 256 the bias left 3 KiB of 227 (compiled for sm_90, bf16; not yet timed).
_SM90_LADEN = {
    128: Config(64, 64, 4, 2, descriptors=True),
    256: Config(128, 32, 8, 3, descriptors=True, group_heads=True),
}

_SM80 = {64: Config(128, 64, 4, 3), 128: Config(128, 32, 8, 2), 256: Config(64, 32, 8, 2)}

# 56 instructions of the loop spill with dropout and 128 rows, none with these (compiled only).
_SM80_LADEN_64 = Config(64, 64, 4, 2)

# These fit 64 KiB of shared memory, which the smallest GPUs have (gfx942, sm_75).
_SAFE = {64: Config(64, 64, 4, 2), 128: Config(64, 64, 4, 1), 256: Config(64, 32, 8, 1)}
