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
        pair: whether two warpgroups do the same for 64 keys each (D and D_v up to 64), rather
            than one of them all of S and dV, the other all of dP and dK.
        whole: whether a CTA owns all keys of a head, one tile after the other; only with `pair`.
        starts_at_lse: whether S is summed up from -LSE on rather than from 0.
        starts_at_delta: whether dP is summed up from -D on; not with `pair`.
        p_buffers: tiles of P on their way from warpgroup to warpgroup; not with `pair`.
        ds_buffers: tiles of dS of 128 keys on their way to dQ, with `pair`.

    Raises:
        ValueError: if a value is not one that the kernels can do.
    """

    block_m: int = 64
    block_n: int = 128
    stages: int = 2
    apart: bool = False
    pair: bool = False
    whole: bool = False
    starts_at_lse: bool = False
    starts_at_delta: bool = False
    p_buffers: int = 2
    ds_buffers: int = 2

    def __post_init__(self):
        if self.block_m != 64:
            raise ValueError(f"block_m: got {self.block_m}; allowed: 64")
        if self.block_n != (64 if self.apart else 128):
            raise ValueError(f"block_n: got {self.block_n}; allowed: 128, or 64 with apart")
        if self.stages < 2:
            raise ValueError(f"stages: got {self.stages}; allowed: 2 or more")
        if self.apart and (self.starts_at_lse or self.pair):
            raise ValueError("apart: got True; allowed: without starts_at_lse and pair")
        if self.whole and not self.pair:
            raise ValueError("whole: got True; allowed: only with pair")


def padded(head_dim: int) -> int:
    """The compiled width of a head: 64, 128 or 256; TMA fills with 0 and does not write there."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def choose_backward(problem: Problem) -> BackwardConfig:
    """The backward's config for a problem: a pure function, no device is asked."""
    width = padded(max(problem.head_dim, problem.head_dim_v))
    if width == 64 and can_be_whole(problem) and _is_whole_quicker(problem):
        return _WHOLE
    if width == 128 and _is_plain(problem):
        return _PLAIN_128
    return _CONFIGS[width]


def can_be_whole(problem: Problem) -> bool:
    """Whether a CTA may own all keys of a head: then it knows which keys come first and last to
    every tile of queries, and that each tile sees some."""
    mask, shift = problem.mask, problem.seqlen_k - problem.seqlen_q
    sees_all = mask.right < 0
    is_causal = mask.right == 0 and shift >= 0 and shift % _WHOLE.block_m == 0
    is_dense = problem.layout_q is Layout.DENSE and problem.layout_k is Layout.DENSE
    return is_dense and mask.left < 0 and (sees_all or is_causal)


def _is_plain(problem: Problem) -> bool:
    """Dense, without a window or softcap: so far only such calls were held to the oracle on a GPU
    with three tiles of P (16k 570 / 599 TFLOP/s against 565 / 587 with two)."""
    is_dense = problem.layout_q is Layout.DENSE and problem.layout_k is Layout.DENSE
    return is_dense and problem.mask.left < 0 and problem.mask.right <= 0 and problem.softcap == 0


_NUM_SMS = 132  # of an H100 and an H200
_MAX_WHOLE = 1024  # rows


def _is_whole_quicker(problem: Problem) -> bool:
    """Whether heads fill the SMs and their tiles stay in L2 from tile to tile of keys.

    H200, 2026-11-30, TFLOP/s, one CTA for all keys / for 128: N = 1024 334 / 281 causal and
    352 / 399 full, N = 4096 343 / 444 causal.
    """
    heads = problem.batch * problem.num_kv_heads
    fill = heads / (_NUM_SMS * -(-heads // _NUM_SMS))
    return problem.mask.causal and problem.seqlen_q <= _MAX_WHOLE and fill >= 0.9


_CONFIGS = {
    64: BackwardConfig(pair=True, stages=3, starts_at_lse=True, ds_buffers=3),
    128: BackwardConfig(),
    256: BackwardConfig(block_n=64, apart=True),
}
_PLAIN_128 = BackwardConfig(p_buffers=3)
_WHOLE = BackwardConfig(pair=True, whole=True, stages=3, starts_at_lse=True)
