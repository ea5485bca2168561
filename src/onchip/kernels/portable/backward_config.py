"""Tile sizes of the portable backward: a frozen Config and the pure function that picks it.

No kernel language is imported here, so that `explain` can show a config anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from onchip.kernels.portable.config import can_describe, fitted, padded
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
        dkdv: tiles of the kernel that owns keys; of the one that makes dK alone if `dv` is given.
        dq: tiles of the kernel that owns queries; unused when `reduction` is not "none".
        reduction: "none" computes dQ in a kernel of its own, which is deterministic; "atomics"
            and "tma" add it up in float32 from the dK/dV kernel, 5 matrix products rather than
            7, through pointers or through a tensor descriptor (dense queries only).
        descriptors: whether q, k, v and dout are read through tensor descriptors (TMA on sm_90
            and later) where `can_describe` allows it, else through pointers.
        group_heads: whether programs of several heads run interleaved, longest walks first,
            instead of one head after the other.
        dv: tiles of a launch that makes dV alone, 8 products in all rather than 7; None to make
            it beside dK. For wide heads, whose dK and dV leave no registers for more.

    Raises:
        ValueError: if `reduction` is none of those.
    """

    dkdv: Tiles
    dq: Tiles
    reduction: str = "none"
    descriptors: bool = False
    group_heads: bool = False
    dv: Tiles | None = None
    abreast: bool = False

    def __post_init__(self):
        if self.reduction not in REDUCTIONS:
            allowed = ", ".join(REDUCTIONS)
            raise ValueError(f"reduction: got {self.reduction!r}; allowed: {allowed}")

    def parts(self) -> tuple[str, ...]:
        """Names of the launches, in order."""
        keys = ("dkdv",) if self.dv is None else ("dv", "dk")
        return keys if self.reduction != "none" else (*keys, "dq")

    def tiles_of(self, part: str) -> Tiles:
        """Tiles of a launch: "dkdv", "dk", "dv" or "dq"."""
        if part == "dv":
            assert self.dv is not None
            return self.dv
        return self.dq if part == "dq" else self.dkdv


def _within_blocks(config: BackwardConfig, problem: Problem) -> BackwardConfig:
    """The config with tiles that divide the blocks of the problem's list, if it has one."""
    if not problem.block_list:
        return config

    def cut(tiles: Tiles, own: str) -> Tiles:
        blocks = zip(("block_m", "block_n"), problem.block_list, strict=True)
        sizes = {name: fitted(getattr(tiles, name), block) for name, block in blocks}
        # As many rows for a warp as before, but four warps at least.
        warps = max(min(tiles.num_warps, 4), tiles.num_warps * sizes[own] // getattr(tiles, own))
        return replace(tiles, num_warps=warps, **sizes)

    dv = None if config.dv is None else cut(config.dv, "block_n")
    return replace(config, dkdv=cut(config.dkdv, "block_n"), dq=cut(config.dq, "block_m"), dv=dv)


def choose_backward(problem: Problem) -> BackwardConfig:
    """The backward's config for a problem: a pure function, no device is asked."""
    return _within_blocks(_choose(problem), problem)


def _choose(problem: Problem) -> BackwardConfig:
    width = padded(max(problem.head_dim, problem.head_dim_v))
    if problem.dtype == torch.float32:
        return _FLOAT32[width > 64]
    size = max(width, 64)
    laden = bool(problem.score_mod) or problem.dropout_p > 0
    if problem.arch in ("sm_90", "sm_100") and can_describe(problem):
        if problem.score_mod or (size > 64 and laden) or (size == 256 and problem.block_list):
            return (_SM90_SUMS if problem.aux_grad else _SM90_LADEN)[size]
        if problem.mask_mod and size == 256:
            return _SM90_MASKED_256
        return (_SM90_WINDOW if problem.mask.left >= 0 else _SM90)[size]
    if problem.arch == "sm_80":
        return (_SM80_LADEN if laden else _SM80)[size]
    return _SAFE[size]


# float32 tiles are twice as large, and full precision has no tensor cores: small tiles.
_FLOAT32 = {
    False: BackwardConfig(Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
    True: BackwardConfig(Tiles(16, 32, 4, 1), Tiles(32, 16, 4, 1)),
}

# H200, 2026-11-29, bf16, 16k tokens, each kernel's tiles timed on their own in interleaved
# rounds (ms at 16k causal, best / runner-up): dK/dV 64x64 with 4 warps 4.4 / 5.2 at D = 64 and
# 3.2 / 3.6 at D = 128; dQ 64x64 with 4 warps 2.7 / 3.0 at D = 64, 128x64 with 8 warps 2.6 / 2.8
# at D = 128. Together 379 and 464 TFLOP/s there.
# D = 256: dK and dV of 64 keys side by side leave 8 warps no way to cut S but across P's rows,
# so P and dS go through shared memory: 21.0 ms at 16k full. One launch for each takes 128 keys,
# and P^T and dS^T stay in registers: dV 3.9 ms, dK 6.0 with 3 stages (7.8 with 2), for one
# product more. dQ 5.5 ms with 3 stages, 7.4 with 2. Together 1.8 times as fast. The three abreast
# rather than in turn: 0.708 / 0.769 ms at 1k causal, 2.11 / 2.28 at 4k causal, 1.10 / 1.14 at 1k
# full, since a program fills an SM and the last ones leave most SMs idle.
# Adding dQ up from the dK/dV kernel (5 products, not 7) was slower in all 18 cells.
_SM90 = {
    64: BackwardConfig(Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 3), descriptors=True),
    128: BackwardConfig(Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 3), descriptors=True),
    256: BackwardConfig(
        Tiles(32, 128, 8, 3),
        Tiles(128, 32, 8, 3),
        descriptors=True,
        dv=Tiles(64, 128, 8, 2),
        abreast=True,
    ),
}

# A window's walks are short, and smaller programs cover their ends (same machine, window of 1024
# at 16k: dQ at D = 128 0.41 ms, against 0.50 with the tiles above).
_SM90_WINDOW = {
    **_SM90,
    128: BackwardConfig(Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2), descriptors=True),
    # A left edge besides makes 3 stages of dK spill (34 instructions of the loop): 0.56 ms, 0.54
    # with 2.
    256: replace(_SM90[256], dkdv=Tiles(32, 128, 8, 2)),
}

# Dropout's bits and a score function's values need registers and shared memory besides: with the
# tiles above dK/dV spills at D = 128 (59 instructions of its loop move spilled values with
# dropout, 62 with a score function that bends), and D = 256 asks for more shared memory than
# there is (229 to 261 of 227 KiB). With these no loop spills, and at least 25 KiB stay for what a
# function loads by tiles (compiled for sm_90, bf16; not yet timed). LSE and D of 16 rows are read
# through pointers: TMA writes shared memory at multiples of 128 bytes.
_SM90_LADEN = {
    64: BackwardConfig(Tiles(32, 64, 4, 3), Tiles(64, 64, 4, 3), descriptors=True),
    128: BackwardConfig(Tiles(32, 64, 4, 3), Tiles(128, 64, 8, 2), descriptors=True),
    256: BackwardConfig(
        Tiles(16, 128, 8, 3), Tiles(128, 16, 8, 3), descriptors=True, dv=Tiles(32, 128, 8, 2)
    ),
}

# Sums of a score function's own gradients need still more: 65 with 32 rows at D = 128.
_SM90_SUMS = {
    **_SM90_LADEN,
    128: BackwardConfig(Tiles(16, 64, 4, 3), Tiles(128, 64, 8, 2), descriptors=True),
}

# A mask function alone spills nothing, but 2 KiB were all that 3 stages left for its loads. With
# a block list it spills here, and takes the tiles above.
_SM90_MASKED_256 = BackwardConfig(
    Tiles(32, 128, 8, 2), Tiles(128, 32, 8, 2), descriptors=True, dv=Tiles(64, 128, 8, 2)
)

_SM80 = {
    64: BackwardConfig(Tiles(64, 128, 8, 2), Tiles(128, 64, 8, 2)),
    128: BackwardConfig(Tiles(32, 128, 8, 2), Tiles(128, 32, 8, 2)),
    256: BackwardConfig(Tiles(32, 64, 8, 1), Tiles(64, 32, 8, 1)),
}

# As for sm_90, compiled only: the dK/dV tiles above spill 2578 instructions of the loop at D = 128
# with dropout and 3543 at D = 64, these none and 38.
_SM80_LADEN = {
    64: BackwardConfig(Tiles(32, 128, 8, 2), Tiles(128, 64, 8, 2)),
    128: BackwardConfig(Tiles(32, 64, 8, 2), Tiles(128, 32, 8, 2)),
    256: BackwardConfig(Tiles(16, 64, 8, 1), Tiles(64, 32, 8, 1)),
}

# 64 KiB of shared memory (sm_75, sm_86, CDNA) hold these.
_SAFE = {
    64: BackwardConfig(Tiles(64, 64, 4, 1), Tiles(64, 64, 4, 1)),
    128: BackwardConfig(Tiles(32, 64, 4, 1), Tiles(64, 32, 4, 1)),
    256: BackwardConfig(Tiles(16, 32, 4, 1), Tiles(32, 16, 4, 1)),
}
