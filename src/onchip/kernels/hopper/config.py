"""Tiles of the Hopper kernels: a frozen Config and the pure function that picks it.

No kernel language is imported here, so that `explain` can show a config anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from onchip.kernels.rows import MOST_PIECES, NUM_SMS, has_few_tiles, is_grouped
from onchip.problem import Layout, Problem

#: Query rows of a consumer warpgroup: what one wgmma instruction takes.
WARPGROUP_ROWS = 64
#: Bytes of K and V that CTAs working at the same time should share in the L2 cache.
L2_BUDGET_BYTES = 16 << 20


@dataclass(frozen=True)
class Config:
    """How the forward cuts its work.

    Args:
        warpgroups: consumer warpgroups, 64 query rows each: 2 or 3.
        block_n: keys of a tile, a power of two >= 64.
        stages: K/V tiles in flight.
        q_buffers: tiles of Q in shared memory: 3, where O leaves through its tile's own Q
            buffer, or 1, where it leaves through a half-width buffer of its own.
        turns: whether the warpgroups take turns at the tensor cores, so that the softmax of
            one runs under the products of another.
        late: whether O is waited for behind the exponentials rather than before them.
        registers: of a consumer thread.
        pins: of which slots the releases stay where they are written: K's ("k"), V's ("v"),
            both ("kv") or none (""); see `barriers.release`.
        maxima: whether every step takes the maxima of its S; without, a step whose tile is seen
            in full has the base of the step before, unless weights grow too large (`weights.py`).
        lags: whether bases then follow the sums of earlier steps instead, which needs the range
            of bfloat16 (`softmax.grown`).
        q_in_registers: whether Q is an operand in registers rather than in shared memory.
        folded: whether a tile is two blocks of 64 rows, one as far from the first row as the
            other from the last: causal tiles are then alike. Only where each CTA has one tile.
        grouped: whether a tile's rows are the heads of a group, query after query, so that few
            queries fill it and K and V are read once for all of them.
        l2_bytes: K and V of a group of heads; tiles are handed out group by group.

    Raises:
        ValueError: if the sizes do not go together.
    """

    warpgroups: int
    block_n: int
    stages: int
    q_buffers: int
    turns: bool
    late: bool
    registers: int
    pins: str = ""
    maxima: bool = False
    lags: bool = False
    q_in_registers: bool = False
    folded: bool = False
    grouped: bool = False
    l2_bytes: int = L2_BUDGET_BYTES

    def __post_init__(self):
        if self.warpgroups not in (2, 3):
            raise ValueError(f"warpgroups: got {self.warpgroups}; allowed: 2 or 3")
        if self.block_n < 64 or self.block_n & (self.block_n - 1):
            raise ValueError(f"block_n: got {self.block_n}; allowed: powers of two from 64 on")
        if self.block_m - WARPGROUP_ROWS > self.block_n:
            raise ValueError(
                f"block_n: got {self.block_n} for {self.warpgroups} warpgroups; a warpgroup "
                f"skips one tile at most: {self.block_m - WARPGROUP_ROWS} keys or more"
            )
        if self.folded and self.warpgroups != 2:
            raise ValueError(f"folded: got {self.warpgroups} warpgroups; allowed: 2")
        if self.folded and self.grouped:
            raise ValueError("folded: a grouped tile is not")
        if self.q_buffers not in (1, 3):
            raise ValueError(f"q_buffers: got {self.q_buffers}; allowed: 1 or 3")
        if self.pins not in ("", "k", "v", "kv"):
            raise ValueError(f"pins: got {self.pins!r}; allowed: '', 'k', 'v' or 'kv'")
        # Named barriers: two for each stage from 6 on, one turn for each warpgroup from 15 down.
        if 6 + 2 * self.stages > 16 - self.warpgroups * self.turns:
            raise ValueError(f"stages: got {self.stages}; there are 10 named barriers")

    @property
    def block_m(self) -> int:
        """Query rows of a tile."""
        return self.warpgroups * WARPGROUP_ROWS


def padded(head_dim: int) -> int:
    """The power of two >= 64 that holds a head dimension."""
    return max(64, 1 << (head_dim - 1).bit_length())


def choose_forward(problem: Problem) -> Config:
    """The forward's config for a problem: a pure function, no device is asked."""
    width, width_v = padded(problem.head_dim), padded(problem.head_dim_v)
    causal = problem.mask.right >= 0
    # ALiBi's logits may rise all along the keys, by more than float32's range within a tile.
    laden = problem.softcap > 0 or problem.alibi > 0
    if width != width_v:  # O does not fit into Q's buffer
        return replace(_DEEP, maxima=laden)
    grouped = is_grouped(problem)
    if laden:
        return replace(_LADEN[width], maxima=True, grouped=grouped)
    if width == 64 and (grouped or has_few_tiles(problem)):
        # Three warpgroups spill beside what merges pieces.
        return replace(_USUAL_64, grouped=grouped)
    config = replace(_CONFIGS[width, causal], grouped=grouped)
    if problem.dtype != torch.bfloat16:
        config = replace(config, lags=False)
    if width < 256 and _is_single(problem) and not grouped:
        return replace(config, folded=True, turns=False)
    if causal and problem.seqlen_k > _LONG:
        return _TALL_64_CAUSAL if width == 64 else replace(config, lags=False)
    if config.q_in_registers and problem.head_dim < width:  # its columns are multiplied in pieces
        return replace(config, q_in_registers=False)
    return config


@lru_cache(maxsize=4096)
def most_pieces(config: Config, problem: Problem, num_ctas: int) -> int:
    """Pieces that the keys of a tile are cut into at most, from a model of the time in K/V tiles.

    A CTA's start and end take about as long as three tiles, and so does the meeting of pieces;
    where not all run at once the last one merges them alone. A number of splits is the caller's
    (one: the sums of a sequence must not hang on its neighbours), and rows that fill two waves
    are not cut, so that partial results take no more than `MOST_PIECES` times that room.
    """
    same_width = problem.head_dim == problem.head_dim_v
    cut = config.grouped or (has_few_tiles(problem) and same_width and problem.alibi == 0)
    cut = cut and not config.folded and config.warpgroups == 2  # three spill beside what merges
    if not cut or problem.mask.left >= 0 or problem.num_splits:
        return 1
    group = problem.group if config.grouped else 1
    num_rows = -(-problem.seqlen_q * group // config.block_m)
    num_rows *= problem.batch * problem.num_heads // group
    if num_rows > 2 * num_ctas:
        return 1
    num_tiles = -(-problem.seqlen_k // config.block_n)

    def cost(pieces: int) -> float:
        waves = -(-num_rows * pieces // num_ctas)
        alone = 0.6 * pieces if waves > 1 else 0.0
        return waves * (-(-num_tiles // pieces) + 3) + (3 + alone) * (pieces > 1)

    return min(range(1, max(1, min(MOST_PIECES, num_tiles // 2)) + 1), key=cost)


def _is_single(problem: Problem) -> bool:
    """Whether the tiles of causal squares are no more than a GPU has multiprocessors."""
    size = problem.seqlen_q
    is_dense = problem.layout_q is Layout.DENSE and problem.layout_k is Layout.DENSE
    is_square = problem.mask.causal and size == problem.seqlen_k and not problem.seqused_k
    num_tiles = problem.batch * problem.num_heads * -(-size // (2 * WARPGROUP_ROWS))
    return is_dense and is_square and problem.mask.left < 0 and num_tiles <= NUM_SMS


# H200, bf16, 16k tokens, 2026-11-30, ratio to FlashAttention-3 in the same rounds at N = 16k / 4k
# / 1k: D = 64 1.10 / 1.12 / 1.22, causal 1.06 / 1.04 / 1.27; 128 1.04 / 1.04 / 1.06, causal 1.02 /
# 1.01 / 1.03; 256 1.02 / 1.04 / 1.05, causal 1.02 / 1.04 / 1.09. docs/log.md has what is slower.
_WIDE = Config(2, 64, 2, q_buffers=1, turns=True, late=True, registers=240, pins="kv")
# D = 192, D_v = 128: V's releases alone 1.10 / 1.10 / 1.16, both 1.08 / 1.08 / 1.14.
_DEEP = replace(_WIDE, stages=3, pins="v")
# Causal at D = 64, ratio to FlashAttention-3 of three warpgroups and of two: 1k 1.02 and 1.26, 2k
# 1.03 and 1.06, 4k 1.05 and 1.02, 8k 1.06 and 0.97; packed, up to 4k, 1.12 and 1.05.
_LONG = 2048
_TALL_64 = Config(3, 128, 3, q_buffers=3, turns=True, late=False, registers=160, pins="k")
# Keys' releases pinned / not: 4k 1.054 / 1.086, 16k 1.091 / 1.133.
_TALL_64_CAUSAL = replace(_TALL_64, pins="")
_USUAL_64 = Config(2, 128, 3, q_buffers=3, turns=True, late=False, registers=240, pins="k")
_USUAL_128 = Config(2, 128, 2, q_buffers=3, turns=True, late=False, registers=240)
_LADEN = {64: _USUAL_64, 128: _USUAL_128, 256: _WIDE}
# bfloat16 with bases that lag / move within the step: D = 64 full 16k 1.098 / 1.070, causal 1k
# 1.323 / 1.254; 128 causal 1k 1.083 / 1.059, one sequence of 2k 1.090 / 1.071, but 4k 1.043 /
# 1.047, 16k 1.034 / 1.049; full 4k 1.058 / 1.085; 256 1.035 / 1.051.
_CONFIGS = {
    (64, False): replace(_TALL_64, lags=True),
    (64, True): replace(_USUAL_64, lags=True),
    # Q in registers: 0.990 against 0.982 full; causal 0.956 against 0.977, where it spills.
    (128, False): replace(_USUAL_128, q_in_registers=True),
    (128, True): replace(_USUAL_128, lags=True),
    (256, False): _WIDE,
    (256, True): _WIDE,
}
