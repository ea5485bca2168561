"""Tiles and schedule of the portable decode: a frozen DecodeConfig and the function that picks it.

No kernel language is imported here. Nothing here looks at lengths: the schedule follows from
shapes, and sequences of unequal lengths are cut evenly on the device.

Legend: B batch, S_q queries of a sequence, H_kv key and value heads, D / D_v head dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from onchip.kernels import MAX_PIECES
from onchip.kernels.portable.config import padded
from onchip.kernels.rows import MOST_PIECES, shares_of, suits_tall, tall_block_n
from onchip.problem import Layout, Problem

#: Most pieces that the keys of a sequence are cut into.
MAX_SPLITS = 128
#: Query rows (queries of a sequence x heads of a group) of one program, at most.
MAX_ROWS = 64
#: Pieces of unequal sequences that an SM gets in the direct walk. H200, 2026-11-30, with 2 to 6,
#: us: 64 sequences of log-uniform lengths 304.5, 307.0, 302.4, 303.8 and 303.0, two other such
#: draws 377.9, 378.0, 375.4, 376.5, 374.7 and 308.0, 310.6, 306.6, 311.1, 308.6, one of 128k
#: beside 63 of 1k 187.7, 185.5, 186.2, 189.6, 187.8; float8 with 4, 5 and 6 197, 219 and 215.
_SM_PIECES = 4
#: Fewest tiles in a piece, unless the caller says how many pieces there are.
MIN_TILES = 2


@dataclass(frozen=True)
class DecodeConfig:
    """How the decode cuts its work.

    Args:
        rows: query rows of a program, a power of two.
        row_blocks: programs that share the rows of a sequence and head of K.
        groups: groups of tokens that keep statistics of their own, one a warp; 0 where all
            warps share the rows (the wide walk).
        block_n: keys of a tile, a power of two >= 16.
        num_warps: warps of a program.
        num_stages: K/V tiles in flight, the current one included.
        splits: pieces that a sequence of the largest length is cut into.
        balanced: whether unequal lengths are cut evenly on the device.
        min_tiles: fewest tiles in a piece.
        direct: whether `decode_direct` walks.
        tall: whether `decode_tall` walks.
        sm_pieces: pieces of unequal sequences that an SM gets, about.
        shares: parts of 64 rows that the pieces of a sequence merge among themselves, in the tall
            walk where all of them run at a time. Neighbours are joined where it is 0, if no launch
            merges, and where the device finds lengths unequal.
    """

    rows: int
    row_blocks: int
    groups: int
    block_n: int
    num_warps: int
    num_stages: int
    splits: int
    balanced: bool
    min_tiles: int = MIN_TILES
    direct: bool = False
    tall: bool = False
    sm_pieces: int = 3
    shares: int = 0

    def programs(self, problem: Problem, num_sms: int) -> int:
        """Programs for each head of K and row block: pieces of all sequences."""
        if not self.balanced:
            return problem.batch * self.splits
        heads = problem.num_kv_heads * self.row_blocks
        pieces = self.sm_pieces * num_sms
        return problem.batch + max(problem.batch * (self.splits - 1), -(-pieces // heads))


def suits_direct(problem: Problem) -> bool:
    """Whether `decode_direct` can walk: one query a sequence, D = 64 or 128, no terms."""
    return (
        problem.arch == "sm_90"
        and problem.layout_q is Layout.DENSE
        and problem.seqlen_q == 1
        and problem.group <= 8
        and problem.head_dim == problem.head_dim_v
        and problem.head_dim in (64, 128)
        and problem.dtype in (torch.float16, torch.bfloat16)
        and not (problem.softcap or problem.alibi or problem.unaligned)
    )


def choose_decode(problem: Problem, num_sms: int, is_aligned: bool = True) -> DecodeConfig:
    """The decode's config for a problem: a pure function, no device is asked.

    Args:
        problem: what the call asks for.
        num_sms: multiprocessors of the GPU.
        is_aligned: whether all rows begin at multiples of 16 bytes, and Triton has
            Gluon: what `decode_direct` and `decode_tall` need.
    """
    if is_aligned and suits_tall(problem):
        return _choose_tall(problem, num_sms)
    walks_direct = is_aligned and suits_direct(problem)
    tile = _DIRECT_TILE if walks_direct else _tile(problem)
    units = problem.batch * problem.num_kv_heads * tile.row_blocks
    num_tiles = _num_tiles(problem, tile)
    if problem.num_splits:
        splits = min(problem.num_splits, num_tiles)
        balanced, min_tiles = False, 1
    else:
        # With less work than that, balancing costs more at the start than it gains.
        balanced = units >= 2 * num_sms and _may_balance(problem, num_sms)
        if walks_direct:
            two = _wants_two(problem, units * num_tiles // num_sms)
        else:
            # Pages that each tile has several of, and the wide walk's longer chain, keep an SM's
            # memory pipes busy only with two programs on it.
            two = 0 < problem.page_size < tile.block_n // 4 or tile.groups == 0
        splits, min_tiles = _splits(units, num_tiles, num_sms * (2 if two else 1)), MIN_TILES
    stages = tile.num_stages
    if num_tiles <= 8 * splits and tile.groups > 0:
        stages = min(stages, 3)
    if walks_direct and balanced and problem.kv_dtype.itemsize == 1:
        # H200, 2026-11-30, 64 sequences of 8k, us: 247.5, 253.4 and 302 with 2, 3 and 4 stages;
        # with 3 and fewer four programs run on an SM.
        stages = 2
    return DecodeConfig(
        tile.rows, tile.row_blocks, tile.groups, tile.block_n, tile.num_warps, stages,
        splits, balanced, min_tiles, walks_direct, sm_pieces=_SM_PIECES if walks_direct else 3,
    )  # fmt: skip


def _num_tiles(problem: Problem, tile: _Tile) -> int:
    num_keys = problem.seqlen_k
    if problem.mask.left >= 0:  # a window's keys, and what its edges cut of two tiles
        num_keys = min(num_keys, problem.mask.left + problem.seqlen_q + tile.block_n)
    return max(1, -(-num_keys // tile.block_n))


def _may_balance(problem: Problem, num_sms: int) -> bool:
    """Whether lengths may be unequal, and pieces of so many sequences fit in a grid."""
    several = problem.seqused_k and problem.batch > 1
    return several and problem.batch + _SM_PIECES * num_sms <= MAX_PIECES


def _choose_tall(problem: Problem, num_sms: int) -> DecodeConfig:
    """The config of the walk for many rows."""
    tile = _tall_tile(problem)
    units = problem.batch * problem.num_kv_heads * tile.row_blocks
    num_tiles = _num_tiles(problem, tile)
    # Two programs on an SM, so that one begins while the other ends.
    two = tile.rows == 64 and problem.head_dim <= 128
    stages, balanced, min_tiles, sm_pieces, shares = tile.num_stages, False, 1, 1, 0
    if problem.num_splits:
        splits = min(problem.num_splits, num_tiles)
    else:
        min_tiles = MIN_TILES
        at_once = 2 * num_sms if problem.head_dim == 64 else num_sms
        splits = _tall_splits(units, num_tiles, at_once, *_tall_costs(tile, problem))
        # Balancing costs nothing here, but in tiles of 128 keys. H200, 2026-11-30, 40 queries, us,
        # with it and without: 8 of 16k 261 and 237, 8 of 2k to 16k 153 and 212. Pieces beyond
        # `MOST_PIECES` are merged by a launch, which does not know how the device cuts: 2026-12-01,
        # us, 8/1 heads, 4 of 32k 26, joined by neighbours 36, D = 256, 2 of 32k 28 and 41. Rows so
        # few that one program merges them at once (`decode_spec`) neighbours join all the same.
        balanced = tile.row_blocks == 1 or units >= 2 * num_sms
        balanced = balanced and splits <= MOST_PIECES and _may_balance(problem, num_sms)
        if two and balanced and units * splits <= num_sms:
            # A grid for unequal lengths has programs without a piece, beside which two with one
            # would meet on an SM; so one fills it. H200, 2026-12-01, us, 3 and 6 stages: 8 of 8k,
            # 16 rows 73.2 and 69.9, 64 rows 76.3 and 72.3; 16/16 heads 140.0 and 131.1; D = 64, 6
            # and 12 stages: 8 of 8k 51.5 and 43.3.
            stages, two = 2 * stages, False
        if units * splits <= num_sms * (1 + two) and _share_rows(splits, tile.rows, balanced):
            shares = shares_of(splits)
    if balanced:
        # As many as run at a time, or two. H200, 2026-11-30, us, 1, 2 and 3: 20 queries of 64
        # sequences of up to 8k 302, 299, 317, of 8 of up to 16k 94, 105, 106; 16 queries (64 rows,
        # of which two programs run on an SM) 262, 259, 264 and 86.5, 87.6, 94.
        sm_pieces = 2 if two or units >= 2 * num_sms else 1
    return DecodeConfig(
        tile.rows, tile.row_blocks, tile.groups, tile.block_n, tile.num_warps, stages,
        splits, balanced, min_tiles, tall=True, sm_pieces=sm_pieces, shares=shares,
    )  # fmt: skip


def _tall_costs(tile: _Tile, problem: Problem) -> tuple[float, float, float, float]:
    """Rate, start, merging and launch of `_tall_splits`.

    H200, 2026-12-01, us, by pieces: 64 rows, 8 sequences of 8k 1 91.9, 2 69.9, 4 73.0, 12 of 4k 1
    63.2, 2 66.6, 4 69.5, one of 32k 8 52.2, 16 40.1, 33 45.3; 128 rows, 8 of 8k 1 113.0, 2 78.7, 12
    of 4k 1 66.8, 2 80.3, 4 85.0, 20 of 4k 1 132.8, 2 119.6, 3 122.0; D = 256, 64 rows, 8 of 8k 1
    135.4, 2 134.3, 12 of 4k 1 119.2, 2 124.8, one of 32k 8 76.0, 16 73.9. D = 64, where two
    programs on an SM take what memory gives: one of 32k 8 41.6, 16 25.5, 33 26.8, 8 of 8k 2 43.3,
    4 43.5, 4 of 4k 2 28.1, 4 18.9, 8 14.4, 32 of 4k 1 69.1, 2 78.5.
    """
    if problem.head_dim == 256:
        return 1.4, 2.5, 2.0, 0.0
    if problem.head_dim == 64:
        return 1.5, 3.0, 2.0, 6.0
    if tile.rows == 64:
        return 1.25, 4.0, 4.0, 0.0
    return (1.15, 6.0, 6.0, 0.0) if tile.block_n == 64 else (1.15, 3.0, 3.0, 0.0)


def _share_rows(splits: int, rows: int, balanced: bool) -> bool:
    """Whether the pieces of a sequence, all running, share its rows out among themselves.

    H200, 2026-12-01, us, so, joined by neighbours and merged by a launch: 2 pieces, 8 sequences of
    8k, 64 rows 73.1, 69.9 and 73.1, 128 rows 82.0, 78.7 and 85.2; 4 pieces, 4 of 4k 26.3, 27.3 and
    26.6, 128 rows 32.5, 34.3 and 33.5, D = 256 45.6, 50.3 and 46.7; 5, 3 of 16k, 96 rows 63.4, 66.3
    and 64.0; 8, 2 of 8k 25.5, 29.6 and 26.2, 128 rows 32.7, 37.0 and 32.0, D = 256, one of 32k 132,
    140.7 and 133.4; 16, one of 32k 40.1, 47.1 and 41.3, 128 rows 52.6, 57.4 and 48.1, D = 256 74.2,
    86.3 and 73.9. Pieces that are cut on the device are not merged by a launch.
    """
    return 2 < splits <= (MOST_PIECES if rows == 64 or balanced else 8)


@dataclass(frozen=True)
class _Tile:
    rows: int
    row_blocks: int
    groups: int
    block_n: int
    num_warps: int
    num_stages: int


#: Of the direct walk. H200, 2026-11-30, us. One of 32k: 44.2 and 38.5 with 2 and 3 stages. Two
#: warps against four: 64 of 4k 241.9 and 240.4, 32 of 32k 946 and 941, in pages of 256 934 and 943,
#: 128 of 8k 946 and 942, one of 32k 37.4 and 35.0.
_DIRECT_TILE = _Tile(rows=8, row_blocks=1, groups=4, block_n=64, num_warps=4, num_stages=3)


def _wants_two(problem: Problem, num_tiles: int) -> bool:
    """Whether only two programs of the direct walk keep an SM's memory pipes busy.

    H200, 2026-11-30, one and two at a time, us: float8, one sequence of 32k 29.8 and 26.8, 16 of
    4k 47.9 and 40.8, one of 4k 8.5 and 10.4; D = 64, one of 32k 24.2 and 23.1; one of 32k in
    pages of 1 42.2 and 40.4, of 8 39.5 and 41.6, of 16 38.1 and 39.6.

    Args:
        problem: the call.
        num_tiles: that an SM gets.
    """
    is_light = problem.kv_dtype.itemsize * problem.head_dim < 256 or 0 < problem.page_size < 8
    return is_light and num_tiles >= 16


def _tile(problem: Problem) -> _Tile:
    """The part of a config that decides how numbers are added up: batch plays no part in it."""
    width = max(padded(problem.head_dim), padded(problem.head_dim_v))
    all_rows = problem.seqlen_q * problem.group
    rows = 1 << max(0, all_rows - 1).bit_length()
    nvidia = problem.arch.startswith("sm_") or not problem.arch
    is_16_bit = problem.kv_dtype.itemsize == 2
    if problem.arch == "sm_90" and width <= 128 and is_16_bit:
        # H200, 2026-11-30, 4 queries of 32/8 heads: 152 us with 16 rows here, 8 sequences of
        # 16k, where 64 rows take 140 in the wide walk.
        narrow = 8
    else:
        narrow = 16 if width <= 128 else 8
    if rows <= narrow and nvidia:
        # Tokens are the matrix product's M, rows its N: 8 rows waste nothing. Float8 keys take
        # half the room, and longer tiles hide more of each step's latency.
        if problem.kv_dtype.itemsize == 1 and width <= 128:
            return _Tile(max(8, rows), 1, 4, 128, 4, _stages(problem, 128, width, 3))
        stages = _stages(problem, 64, width, 4)
        return _Tile(max(8, rows), 1, 4, 64, 4, stages)
    if problem.arch == "sm_90" and width <= 128 and problem.dtype != torch.float32:
        # wgmma has 64 rows at least. H200, 2026-11-29, 8 sequences of 16k, 16 queries: 142 us,
        # against 183 with 64 keys a tile, which leave room for one program on an SM.
        return _Tile(64, -(-all_rows // 64), 0, 32, 4, _stages(problem, 32, width, 4))
    rows = min(max(16, rows), MAX_ROWS)
    block_n = 64 if width <= 128 and nvidia else 32
    stages = _stages(problem, block_n, width, 3) if nvidia else 1
    warps = 8 if rows * width >= 4096 else 4  # fewer would spill
    return _Tile(rows, -(-all_rows // rows), 0, block_n, warps, stages)


def _tall_tile(problem: Problem) -> _Tile:
    """Rows of one or two warpgroups, beside the producer's.

    Of 64 rows and up to 128 columns two programs share an SM.

    H200, 2026-11-30, 64/8 heads: 64 queries (512 rows) of 8 sequences of 16k take 494 us with
    tiles of 128 keys and 538 with 64; 16 queries (128 rows) 154 and 146, and of one of 32k 60 and
    46, since fewer tiles are in flight.
    """
    all_rows, block_n = problem.seqlen_q * problem.group, tall_block_n(problem)
    if all_rows <= 64:
        return _Tile(64, 1, 0, block_n, 8, 6 if problem.head_dim == 64 else 3)
    return _Tile(128, -(-all_rows // 128), 0, block_n, 12, 384 // block_n)


# Shared memory of a program that still lets the GPU hide latency, by architecture.
_SHARED_BYTES = {"sm_80": 160 << 10, "sm_90": 220 << 10, "sm_100": 220 << 10}


def _stages(problem: Problem, block_n: int, width: int, most: int) -> int:
    """K/V tiles that fit in shared memory, up to `most`."""
    tile_bytes = 2 * block_n * width * max(problem.kv_dtype.itemsize, 1)
    budget = _SHARED_BYTES.get(problem.arch, 96 << 10)
    if problem.dtype == torch.float32:
        most = 1
    return max(1, min(most, budget // tile_bytes))


@lru_cache(maxsize=4096)
def _splits(units: int, num_tiles: int, num_sms: int) -> int:
    """Pieces for equal lengths, from a model of the time in tiles.

    `num_sms` counts the programs that should run at a time: one for each SM, or more. Memory is
    shared by all (programs * work / SMs); one SM can't use much more than its share (5 %);
    starting a program costs about two tiles, merging about 1.5.
    """

    def cost(pieces: int, per: int) -> float:
        programs, work = units * pieces, per + 2
        merging = 1.5 + pieces / 32 if pieces > 1 else 0
        return max(programs * work / num_sms, -(-programs // num_sms) * work / 1.05) + merging

    return _cheapest(units, num_tiles, num_sms, cost)


@lru_cache(maxsize=4096)
def _tall_splits(
    units: int, num_tiles: int, num_sms: int, rate: float, start: float, merging: float,
    launch: float,
) -> int:  # fmt: skip
    """`_splits` of the walk for many rows.

    Args:
        units: what is cut.
        num_tiles: of each.
        num_sms: programs that run at a time.
        rate: of its share of memory that one of them uses where few run. Where about as many run
            as memory serves, neither limit holds by itself (their fourth powers are added).
        start: what it costs to begin and end a program, in tiles.
        merging: what it costs to put pieces together.
        launch: what it costs more if a launch does, beyond `MOST_PIECES`.
    """

    def cost(pieces: int, per: int) -> float:
        programs, work = units * pieces, per + start
        shared, alone = programs * work / num_sms, -(-programs // num_sms) * work / rate
        together = merging + pieces / 32 + launch * (pieces > MOST_PIECES)
        return (shared**4 + alone**4) ** 0.25 + (together if pieces > 1 else 0)

    return _cheapest(units, num_tiles, num_sms, cost)


def _cheapest(units: int, num_tiles: int, num_sms: int, cost: Callable[[int, int], float]) -> int:
    """Pieces for which `cost`, of pieces and of tiles in each, is least."""
    best, choice = float("inf"), 1
    most = min(num_tiles // MIN_TILES, 4 * num_sms // max(1, units) + 1, MAX_SPLITS)
    for pieces in range(1, max(1, most) + 1):
        per = -(-num_tiles // pieces)
        if -(-num_tiles // per) != pieces:
            continue  # the same cut as with fewer pieces
        found = cost(pieces, per)
        if found < best:
            best, choice = found, pieces
    return choice
