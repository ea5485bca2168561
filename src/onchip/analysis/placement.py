"""Which SM runs which program when, as a schedule that can be drawn.

Times are in tiles of the walked side, not in microseconds: programs differ by how many they
walk over.
"""

from __future__ import annotations

import heapq
from itertools import pairwise

from onchip.analysis.pipeline import Schedule, Span
from onchip.analysis.reads import query_tiles, rounded
from onchip.analysis.tiles import require_work
from onchip.problem import Problem


def placement(
    problem: Problem,
    block_m: int,
    block_n: int,
    num_sms: int,
    longest_first: bool = True,
    by_heads: bool = False,
) -> Schedule:
    """The forward's programs on SMs that take one at a time, each on whichever is free first.

    Args:
        problem: a dense call.
        block_m: query rows of a tile.
        block_n: keys of a tile.
        num_sms: SMs, 1 or more.
        longest_first: order of the programs; else head by head, row by row.
        by_heads: a program walks over all query tiles of its head (B x H programs).

    Raises:
        ValueError: if the problem has no work or a number is less than 1.
    """
    require_work(problem)
    for name, count in (("block_m", block_m), ("block_n", block_n), ("num_sms", num_sms)):
        if count < 1:
            raise ValueError(f"{name}: got {count}; allowed: 1 or more")
    walks = _walks(problem, block_m, block_n)
    programs = [
        (f"h{head}" if by_heads else f"h{head} r{row}", tiles)
        for head in range(problem.batch * problem.num_heads)
        for row, tiles in ([(0, sum(walks))] if by_heads else enumerate(walks))
    ]
    if longest_first:
        programs.sort(key=lambda program: -program[1])
    free = [(0, sm) for sm in range(num_sms)]
    spans = []
    for label, tiles in programs:
        start, sm = free[0]
        heapq.heapreplace(free, (start + tiles, sm))
        spans.append(Span(f"SM {sm}", label, start, start + tiles))
    kind = "tasks by head" if by_heads else "tiles of queries"
    return Schedule(f"{len(programs)} {kind} on {num_sms} SMs", tuple(spans), "tiles")


def _walks(problem: Problem, block_m: int, block_n: int) -> list[int]:
    """Tiles of keys that each tile of queries of one head walks over; 0 are left out."""
    s_q, s_k = problem.seqlen_q, problem.seqlen_k
    rows = [*(start for start, _ in query_tiles(s_q, block_m)), s_q]
    spans = (problem.mask.key_range(*tile, s_q, s_k) for tile in pairwise(rows))
    return [-(-len(rounded(span, block_n, s_k)) // block_n) for span in spans if span]
