"""Which tiles of keys each CTA of the Hopper backward takes, one after the other.

There are as many CTAs as SMs, and a tile goes to the CTA that would be free first: what the
hardware would do with a CTA for each tile, but K and V of the next tile come, and dK and dV of the
last one go, while a CTA multiplies.
"""

from __future__ import annotations

import heapq

from onchip.kernels.hopper.backward_arguments import Spec, units_of
from onchip.kernels.hopper.backward_config import BackwardConfig
from onchip.problem import Problem

#: What a tile of keys takes beside its steps, in steps: 0.5 to 3 are within 1 % (H200, 2026-11-30).
_TILE_STEPS = 1.0


def steps_of(problem: Problem, block_m: int, block_n: int) -> list[int]:
    """Tiles of queries that each tile of keys of a head of K meets, the first keys first."""
    s_q, s_k, mask = problem.seqlen_q, problem.seqlen_k, problem.mask
    shift, tiles = s_k - s_q, -(-s_q // block_m)
    found = []
    for key in range(0, s_k, block_n):
        first, end = 0, tiles
        last = min(key + block_n, s_k) - 1
        if mask.right >= 0:
            first = min(max(key - shift - mask.right, 0) // block_m, tiles)
        if mask.left >= 0:
            end = min(max(last - shift + mask.left + block_m, 0) // block_m, tiles)
        found.append(max(end - first, 0) * problem.group)
    return found


def table_of(order: list[int], steps: list[int], ctas: int) -> list[list[int]]:
    """Items of each CTA, -1 behind the last one.

    Args:
        order: of each item, in the order in which they begin, its place in `steps`.
    """
    free = [(0.0, cta) for cta in range(ctas)]
    found: list[list[int]] = [[] for _ in range(ctas)]
    for item, place in enumerate(order):
        time, cta = heapq.heappop(free)
        found[cta].append(item)
        heapq.heappush(free, (time + steps[place] + _TILE_STEPS, cta))
    slots = max(len(items) for items in found) + 1
    return [items + [-1] * (slots - len(items)) for items in found]


def places_of(tiles: int, units: int, lag: int, spec: Spec) -> list[int]:
    """Of each item, as `backward_walk.unit_of` numbers them, which tile of keys of its head it is.

    Args:
        tiles: of a head of K.
        units, lag: see `backward_arguments.units_of`.
    """
    first = units - lag
    places = range(tiles)
    turned = [tiles - 1 - p for p in places] if spec.ordered and spec.has_right else list(places)
    width = max(lag // spec.abreast, 1) if spec.abreast else 1
    order = []
    for base in range(0, first, width):
        order += [place for place in turned for _ in range(min(width, first - base))]
    for place in places if spec.turns_back else turned:
        order += [place] * lag
    return order


def schedule(config: BackwardConfig, problem: Problem, spec: Spec, sms: int) -> list[list[int]]:
    """`table_of` for a call on so many SMs."""
    steps = steps_of(problem, config.block_m, config.block_n)
    order = places_of(len(steps), *units_of(config, problem), spec)
    return table_of(order, steps, min(sms, len(order)))
