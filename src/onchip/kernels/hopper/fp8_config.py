"""Tiles of the Hopper float8 forward: a frozen Config and the pure function that picks it.

No kernel language is imported here, so that `explain` can show a config anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onchip.kernels.fp8_layout import BLOCK_K
from onchip.kernels.hopper.config import L2_BUDGET_BYTES, WARPGROUP_ROWS, padded
from onchip.problem import Problem


@dataclass(frozen=True)
class FP8Config:
    """How the float8 forward cuts its work.

    Args:
        warpgroups: consumer warpgroups, 64 query rows each: 2 or 3.
        stages: K/V tiles in flight.
        q_buffers: tiles of Q in shared memory.
        turns: whether the warpgroups take turns at the tensor cores.
        registers: of a consumer thread.
        two_level: whether P V of a tile is summed from zero and added in float32; else the
            tensor cores add to the accumulator themselves, with fewer bits.
        parts: in which P V is summed, D_v / parts at a time.
        l2_bytes: K and V of a group of heads; tiles are handed out group by group.

    Raises:
        ValueError: if the sizes do not go together.
    """

    warpgroups: int
    stages: int
    q_buffers: int
    turns: bool
    registers: int
    two_level: bool = True
    parts: int = 1
    l2_bytes: int = L2_BUDGET_BYTES
    block_n: ClassVar[int] = BLOCK_K  # keys of a tile: those that share a scale
    serial: ClassVar[bool] = True  # P V and the next S wait for each other, in the same registers
    # What the parts shared with the 16-bit forward ask for.
    pins: ClassVar[str] = "kv"
    maxima: ClassVar[bool] = True
    folded: ClassVar[bool] = False
    grouped: ClassVar[bool] = False

    def __post_init__(self):
        if self.warpgroups not in (2, 3):
            raise ValueError(f"warpgroups: got {self.warpgroups}; allowed: 2 or 3")
        if self.parts not in (1, 2, 4):
            raise ValueError(f"parts: got {self.parts}; allowed: 1, 2 or 4")
        # Named barriers: two for each stage from 8 on, one turn for each warpgroup from 15 down.
        if 8 + 2 * self.stages > 16 - self.warpgroups * self.turns:
            raise ValueError(f"stages: got {self.stages}; there are 8 named barriers")

    @property
    def block_m(self) -> int:
        """Query rows of a tile."""
        return self.warpgroups * WARPGROUP_ROWS


def choose_fp8(problem: Problem) -> FP8Config:
    """The float8 forward's config for a problem: a pure function, no device is asked."""
    width = max(padded(problem.head_dim), padded(problem.head_dim_v))
    if width == 64 and problem.seqlen_k <= _SHORT:
        return _SHORT_64
    if width == 256 and problem.mask.right >= 0:
        return _CAUSAL_256
    return _CONFIGS[width]


# H200, 16k tokens, 2026-11-30, TFLOP/s (FlashAttention-3's float8). D = 64, N = 1k: two warpgroups
# 601, causal 403, three 580 and 348 (444, 300); N = 4k 715, 609 and 762, 623 (608, 543). D = 256,
# causal, N = 16k / 4k: without turns 1307 / 1126, with them 1292 / 1115 (1280 / 1119); full 1298 /
# 1223 and 1313 / 1227 (1293 / 1236). With one buffer of Q, in an earlier run: full 1280 / 1194,
# with two 1289 / 1208.
_SHORT = 1024
_SHORT_64 = FP8Config(2, 2, 2, turns=True, registers=240)
_CAUSAL_256 = FP8Config(2, 2, 2, turns=False, registers=240, parts=2)
_CONFIGS = {
    64: FP8Config(3, 2, 2, turns=True, registers=160),
    128: FP8Config(2, 2, 2, turns=True, registers=240),
    256: FP8Config(2, 2, 2, turns=True, registers=240, parts=2),
}
