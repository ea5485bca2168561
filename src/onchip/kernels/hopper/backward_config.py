"""Tile sizes of the Hopper backward: a frozen config and the pure function that picks it.

No kernel language is imported here, so that `explain` can show a config anywhere.

Legend: D / D_v head dimensions, BM / BN rows of a tile of queries and of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from onchip.problem import Problem


@dataclass(frozen=True)
class BackwardConfig:
    """How the backward cuts its work.

    Args:
        block_m: BM, queries of a tile: 64.
        block_n: BN, keys of a CTA: 128, or 64 with `apart`.
        stages: tiles of queries in flight, the current one included.
        apart: whether dQ is made by a kernel of its own, 7 matrix products rather than 5: dK and
            dV of wide heads leave no registers for more. Else it is added up in float32.
        late: whether dP is issued behind P, summed up from -D on, and P kept in 16 bits: with D
            or D_v over 64 the sums leave no registers for S, P and dP at a time.
        starts_at_lse: whether S is summed up from -LSE on rather than from 0.
        ds_buffers: tiles of dS of 128 keys on their way to dQ.
        holds_keys: whether K and V wait in registers, where there are some: a product with an
            operand there reads half as much from shared memory; not with `late`.
        lag: CTAs between those that add to a head's dQ and those that clear or round it.

    Raises:
        ValueError: if a value is not one that the kernels can do.
    """

    block_m: int = 64
    block_n: int = 128
    stages: int = 2
    apart: bool = False
    late: bool = False
    starts_at_lse: bool = False
    ds_buffers: int = 2
    holds_keys: bool = False
    lag: int = 200

    def __post_init__(self):
        if self.block_m != 64:
            raise ValueError(f"block_m: got {self.block_m}; allowed: 64")
        if self.block_n != (64 if self.apart else 128):
            raise ValueError(f"block_n: got {self.block_n}; allowed: 128, or 64 with apart")
        if self.stages < 2:
            raise ValueError(f"stages: got {self.stages}; allowed: 2 or more")
        if self.apart and (self.starts_at_lse or self.late):
            raise ValueError("apart: got True; allowed: without starts_at_lse and late")
        if self.lag < 1:
            raise ValueError(f"lag: got {self.lag}; allowed: 1 or more")


def padded(head_dim: int) -> int:
    """The compiled width of a head: 64, 128 or 256; TMA fills with 0 and does not write there."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def choose_backward(problem: Problem) -> BackwardConfig:
    """The backward's config for a problem: a pure function, no device is asked."""
    width = padded(max(problem.head_dim, problem.head_dim_v))
    return _CONFIGS[width]


_CONFIGS = {
    64: BackwardConfig(stages=3, starts_at_lse=True, ds_buffers=3, holds_keys=True),
    128: BackwardConfig(late=True),
    256: BackwardConfig(block_n=64, apart=True),
}
