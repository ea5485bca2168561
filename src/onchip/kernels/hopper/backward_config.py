"""Tile sizes of the Hopper backward: a frozen config and the pure function that picks it.

No kernel language is imported here, so that `explain` can show a config anywhere.

Legend: D / D_v head dimensions, BM / BN rows of a tile of queries and of keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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
        late: whether dP is issued behind P, summed up from -D on, and P kept in 16 bits: with D
            or D_v over 64 the sums leave no registers for S, P and dP at a time.
        starts_at_lse: whether S is summed up from -LSE on rather than from 0.
        ds_buffers: tiles of dS of 128 keys on their way to dQ.
        holds_keys: whether K and V wait in registers, where there are some: a product with an
            operand there reads half as much from shared memory; not with `late`.
        fours: whether LSE and D lie in the order in which threads take four at a time; not with
            `apart`.
        persistent: whether there are as many CTAs as SMs, each with a list of tiles of keys, K and
            V of the next one on their way; not with `late` or `apart`, and packed sequences have a
            CTA for each tile all the same.
        pieces: of the tiles of keys of a last wave of CTAs that is not full; 1 leaves them whole,
            0 means what a model of the wave says.
        lag: tiles of keys between those that add to a head's dQ and those that clear or round it;
            those of so many last ones begin in the order of their lengths, with `apart` where a
            right edge is.

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
    fours: bool = False
    persistent: bool = False
    pieces: int = 0
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
        if self.persistent and (self.apart or self.late):
            raise ValueError("persistent: got True; allowed: without late and apart")
        if self.fours and self.apart:
            raise ValueError("fours: got True; allowed: without apart")
        if self.pieces < 0:
            raise ValueError(f"pieces: got {self.pieces}; allowed: 0 or more")
        if self.lag < 1:
            raise ValueError(f"lag: got {self.lag}; allowed: 1 or more")


def padded(head_dim: int) -> int:
    """The compiled width of a head: 64, 128 or 256; TMA fills with 0 and does not write there."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def choose_backward(problem: Problem) -> BackwardConfig:
    """The backward's config for a problem: a pure function, no device is asked."""
    config = _CONFIGS[padded(max(problem.head_dim, problem.head_dim_v))]
    if config.late and not _has_masks(problem, config):
        config = replace(config, fours=True)
    config = replace(config, lag=_lag_of(problem, config))
    if config.persistent and not _has_lists(problem, config):
        return replace(config, persistent=False)
    return config


def _lag_of(problem: Problem, config: BackwardConfig) -> int:
    """The config's `lag` for a problem.

    Heads of Q that share one of K have more to clear and to round for a unit, and `lag` units are
    left to the launches before and behind: 136 tiles are 1.03 to 1.05 of 200 in causal calls at
    D = 128 and 1k, 4k, and else within 1 % or better (H200, 2026-11-30).

    Tiles of keys are counted for the longest sequence, and those behind the end of a shorter one
    do nothing, so `lag` of them are fewer than there are SMs and wait for what still runs. 64
    packed sequences of 64 to 4096 tokens (half of the tiles are such), of a dense call's FLOP/s at
    their mean length with 200, 400, 700 and 1200: D = 128 full 0.98, 1.00, 0.99, 0.96, causal 0.88,
    0.96, 0.98, 0.98; D = 64 0.98, 1.00, 1.00, 1.00 and 0.89, 0.95, 0.96, 0.95 (H200, 2026-11-30).
    So `lag` grows as rows of the longest lengths do over tokens, and by `_PACKED_SLACK`.
    """
    lag = config.lag
    if problem.deterministic and config.late and _has_edges(problem):
        lag = _ORDERED_LAG
    elif problem.group > 1:
        lag = _GROUPED_APART_LAG if config.apart else _GROUPED_LAG
    if problem.layout_q is not Layout.PACKED:
        return lag
    rows = problem.batch * problem.seqlen_q
    return math.ceil(_PACKED_SLACK * lag * rows / max(problem.tokens_q, 1))


#: Lengths vary from sequence to sequence, and so does how many tiles in a row work.
_PACKED_SLACK = 1.25
#: `lag` where heads of Q share one of K; see `_lag_of`.
_GROUPED_LAG, _GROUPED_APART_LAG = 136, 200


def _has_masks(problem: Problem, config: BackwardConfig) -> bool:
    """Whether there can be tiles that an edge crosses: a step that masks has no register left for
    the addresses of `fours`."""
    packed = problem.layout_q is Layout.PACKED
    return _has_edges(problem) or packed or problem.seqlen_k % config.block_n != 0


def _has_edges(problem: Problem) -> bool:
    return problem.mask.left >= 0 or problem.mask.right >= 0


def _has_lists(problem: Problem, config: BackwardConfig) -> bool:
    """Whether CTAs take several tiles of keys where they can.

    Up to 4096 queries of a head of K: 492 / 347 TFLOP/s against 445 / 325 at 1k (full / causal),
    566 / 520 against 559 / 511 at 4k. At 16k a tile takes longer, and a table made before spreads
    the work less well than the hardware: 552 / 540 against 569 / 553. In a fixed order it is 518
    against 482 at 16k causal (D = 64, H200, 2026-11-30).
    """
    tiles = problem.batch * problem.num_kv_heads * -(-problem.seqlen_k // config.block_n)
    few = tiles <= _MOST_LISTED
    return few and (problem.deterministic or problem.seqlen_q * problem.group <= 4096)


#: The `lag` of ordered sums at D = 128 with a mask: CTAs with short walks begin first and wait to
#: round what longer ones add to. Causal, of the default's speed at 1k, 4k, 16k: 0.92, 0.98, 0.98
#: with it and 0.90, 0.95, 0.90 with 200 in one run, 0.90, 0.96, 0.95 in a later one, which had none
#: with 200 (H200, 2026-11-30).
_ORDERED_LAG = 300

#: Tiles of keys in lists: they take the host 1 us each where a shape is new, and 4 bytes.
_MOST_LISTED = 1 << 15


_CONFIGS = {
    64: BackwardConfig(
        stages=3, starts_at_lse=True, ds_buffers=3, holds_keys=True, persistent=True
    ),
    128: BackwardConfig(late=True),
    # Causal at 1k, 4k, 16k, with a `lag` of 200, 300, 400 against last tiles head by head: 1.015,
    # 1.015, 1.00; 1.02, 1.02, 1.01; 1.02, 1.01, 1.015; with a quarter of the heads of K, at 1k and
    # 4k, 200 and 400 1.12, 1.03 and 1.07, 1.02 (H200, 2026-11-30).
    256: BackwardConfig(block_n=64, apart=True, lag=300),
}
