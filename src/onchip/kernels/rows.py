"""Which GPU kernels read keys once for many query rows, and where the Hopper forward cuts keys.

Rows of a head of K are the queries of a sequence times the heads of its group. Pure functions of a
problem, which choices of kernels and of configs share.

Legend: B batch, S_q / S_k lengths, D head dimension.
"""

from __future__ import annotations

import torch

from onchip.problem import Problem

#: Most rows of a key/value head (queries x heads of its group) that are few, up to D = 128. H200,
#: 2026-12-01, 16 rows, us, by the walk for many and the other: D = 64, one sequence of 32k 25.4 and
#: 31.8, 8 of 8k 42.0 and 51.4, 32 of 4k 67.8 and 92.4; 128 40.1 and 43.1, 68.6 and 72.8, 124.6 and
#: 130.2.
FEW_ROWS = 8
#: Query heads of one head of K that the Hopper forward can put side by side in a tile, and the
#: rows of such a tile.
GROUPS, TILE_ROWS = (2, 4, 8, 16, 32, 64), 128
#: Multiprocessors of an H100 and an H200: programs beyond them gain nothing from cut keys.
NUM_SMS = 132
#: Most pieces of the keys of a tile whose programs share its rows out among themselves.
MOST_PIECES = 16
#: What counts as many keys.
MANY_KEYS = 1024


def tall_block_n(problem: Problem) -> int:
    """Keys of a tile of the decode's walk for many rows; see `portable.decode_config`."""
    return 64 if problem.seqlen_q * problem.group <= 128 else 128


def shares_of(pieces: int) -> int:
    """Parts of 64 rows that so many pieces share out: of two kinds, so that variants are few."""
    return 8 if pieces <= 8 else MOST_PIECES


def suits_tall(problem: Problem) -> bool:
    """Whether the decode has its walk for many rows, which reads keys once for 128 of them.

    Of 64 and 256 columns it has up to 64 rows. H200, 2026-12-01, us, by it and by the forward: 64
    rows, one sequence of 32k, 8 of 8k and 32 of 4k, D = 64 25.8 and 33.2, 43.2 and 54.3, 69.4 and
    84.0, D = 256 74 and 85, 134 and 147, 251 and 253; D = 64, 128 rows 34.3 and 33.0, 55.6 and
    54.3, 106.6 and 84.6. Of 256 columns it has the fewest too: 4 rows by it and by the walk for few
    69.7 and 73.8, 125.5 and 132.0, 241.9 and 247.6, one of 1k 8.8 and 11.8.
    """
    size, rows = problem.page_size, problem.seqlen_q * problem.group
    takes = {64: FEW_ROWS < rows <= 64, 128: rows > FEW_ROWS, 256: rows <= 64}
    # A page that holds all keys is one piece, if it is as long as a tile.
    fits = size % tall_block_n(problem) == 0 or size in (16, 32, 64)
    fits = fits or size >= max(problem.seqlen_k, tall_block_n(problem))
    return (
        problem.arch == "sm_90"
        and problem.head_dim == problem.head_dim_v
        and takes.get(problem.head_dim, False)
        and problem.dtype == problem.kv_dtype
        and problem.dtype in (torch.float16, torch.bfloat16)
        and fits
        and problem.seqlen_k > 0
        and problem.scale > 0
        and problem.mask.left < 0
        and not (problem.leftpad or problem.softcap or problem.alibi or problem.kv_scales)
        and not problem.unaligned
    )


def is_grouped(problem: Problem) -> bool:
    """Whether the Hopper forward fills its tiles with the heads of a group, queries being few."""
    same_width = problem.head_dim == problem.head_dim_v
    few = problem.seqlen_q < TILE_ROWS or has_few_tiles(problem)
    return few and same_width and problem.group in GROUPS and problem.alibi == 0


def has_few_tiles(problem: Problem) -> bool:
    """Whether the Hopper forward has tiles for half of the multiprocessors, and keys to cut.

    Not where splits are given: a sequence's bits must not depend on the number of its neighbours.
    """
    tiles = problem.batch * problem.num_heads * -(-problem.seqlen_q // TILE_ROWS)
    is_few = tiles <= NUM_SMS // 2 and problem.seqlen_k >= 2 * problem.seqlen_q
    return is_few and not problem.num_splits


def reads_once(problem: Problem) -> bool:
    """Whether the Hopper forward is faster than the decode: it reads K and V once for many rows.

    H200, 2026-11-30, bf16, pages of 16, us, here and by the decode. D = 128 (`suits_tall`), 8
    heads of K: 256 rows, one sequence of 32k 66 and 73, two of 8k 44 and 46, of 4k 27 and 31; four
    of 4k, cut in two, 44 and 41, of 8k 69 and 70; five of 8k, whose 80 tiles are not cut, 105 and
    94; 512 rows, 3 sequences of 16k 197 and 212; 128 rows, 8 of 16k 145 and 139, 16 of 4k 76 and
    74, 32 of 4k 143 and 146. D = 64, 128 rows: one of 32k 47 and 50, 8 of 8k 53 and 92. D = 256,
    here and by the portable walk: 32 rows 95 and 122, 147 and 230; 128 rows 97 and 225, 151 and
    434; 2026-12-01, 16 rows, 87 and 96, 150 and 180, one of 4k 27 and 21.
    """
    rows = problem.seqlen_q * problem.group
    is_wide = problem.head_dim > 128
    takes = is_grouped(problem) or (is_wide and problem.group == 1 and problem.alibi == 0)
    takes = takes and problem.head_dim == problem.head_dim_v and problem.head_dim % 8 == 0
    takes = takes and problem.dtype == problem.kv_dtype and problem.mask.left < 0
    if not takes or problem.leftpad or problem.kv_scales:
        return False
    tiles = problem.batch * problem.num_kv_heads * -(-rows // TILE_ROWS)
    pieces = min(MOST_PIECES, NUM_SMS // max(tiles, 1), problem.seqlen_k // (2 * TILE_ROWS))
    ctas = tiles * max(1, pieces)
    fills = 10 * ctas >= 7 * NUM_SMS
    if is_wide:
        # Where `decode_tall` does not walk: 1.1 to 2.9 times as fast, one sequence of 4k 0.8.
        some = rows > TILE_ROWS // 2 and 10 * ctas >= 4 * NUM_SMS
        return not suits_tall(problem) and rows > FEW_ROWS and (fills or some)
    if not suits_tall(problem):
        return rows > TILE_ROWS // 2 and fills
    if rows <= TILE_ROWS:
        return rows > TILE_ROWS // 2 and tiles >= 2 * NUM_SMS - 16
    return fills and not (pieces == 2 and problem.seqlen_k < 6 * MANY_KEYS)
