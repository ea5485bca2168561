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
    return _CONFIGS[max(padded(problem.head_dim), padded(problem.head_dim_v))]


# H200, 16k tokens, 2026-11-30, ratio to FlashAttention-3's float8 at N = 16k / 4k, full and causal:
# D = 256 with one buffer of Q 1.02 / 0.99 and 1.01 / 0.98, with two 1.03 / 1.01 and 1.02 / 1.00.
_CONFIGS = {
    64: FP8Config(3, 2, 2, turns=True, registers=160),
    128: FP8Config(2, 2, 2, turns=True, registers=240),
    256: FP8Config(2, 2, 2, turns=True, registers=240, parts=2),
}
