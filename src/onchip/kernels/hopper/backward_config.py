"""Tile sizes of the Hopper backward: a frozen config and the pure function that picks it.

No kernel language is imported here, so that `explain` can show a config anywhere.

Legend: D / D_v head dimensions, BM / BN rows of a tile of queries and of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from onchip.problem import Layout, Problem


@dataclass(frozen=True)
class BackwardConfig:
    """How the backward cuts its work.

    Args:
        block_m: BM, queries of a tile: 64.
        block_n: BN, keys of a CTA: 128, or 64 with `apart`.
        stages: tiles of queries in flight, the current one included.
        apart: whether dQ is made by a kernel of its own, 7 matrix products rather than 5: dK and
            dV of wide heads leave no registers for more. Else it is added up in float32.
        whole: whether a CTA owns all keys of a head, one tile after the other; not with `apart`.
        late: whether dP is issued behind P, summed up from -D on, and P kept in 16 bits: with D
            or D_v over 64 the sums leave no registers for S, P and dP at a time.
        starts_at_lse: whether S is summed up from -LSE on rather than from 0.
        ds_buffers: tiles of dS of 128 keys on their way to dQ.

    Raises:
        ValueError: if a value is not one that the kernels can do.
    """

    block_m: int = 64
    block_n: int = 128
    stages: int = 2
    apart: bool = False
    whole: bool = False
    late: bool = False
    starts_at_lse: bool = False
    ds_buffers: int = 2

    def __post_init__(self):
        if self.block_m != 64:
            raise ValueError(f"block_m: got {self.block_m}; allowed: 64")
        if self.block_n != (64 if self.apart else 128):
            raise ValueError(f"block_n: got {self.block_n}; allowed: 128, or 64 with apart")
        if self.stages < 2:
            raise ValueError(f"stages: got {self.stages}; allowed: 2 or more")
        if self.apart and (self.starts_at_lse or self.late or self.whole):
            raise ValueError("apart: got True; allowed: without starts_at_lse, late and whole")


def padded(head_dim: int) -> int:
    """The compiled width of a head: 64, 128 or 256; TMA fills with 0 and does not write there."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def choose_backward(problem: Problem) -> BackwardConfig:
    """The backward's config for a problem: a pure function, no device is asked."""
    width = padded(max(problem.head_dim, problem.head_dim_v))
    return _CONFIGS[width]


def can_be_whole(problem: Problem) -> bool:
    """Whether a CTA may own all keys of a head: then it knows which keys come first and last to
    every tile of queries, and that each tile sees some."""
    mask, shift = problem.mask, problem.seqlen_k - problem.seqlen_q
    sees_all = mask.right < 0
    is_causal = mask.right == 0 and shift >= 0 and shift % _WHOLE_BLOCK_M == 0
    is_dense = problem.layout_q is Layout.DENSE and problem.layout_k is Layout.DENSE
    return is_dense and mask.left < 0 and (sees_all or is_causal)


_CONFIGS = {
    64: BackwardConfig(stages=3, starts_at_lse=True, ds_buffers=3),
    128: BackwardConfig(late=True),
    256: BackwardConfig(block_n=64, apart=True),
}
_WHOLE_BLOCK_M = 64  # of a config that is `whole`
