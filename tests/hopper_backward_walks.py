"""Script: holds the walks of the Hopper backward against the mask, for random sizes.

Every pair that a row sees is visited, tiles that are not masked are seen in full, the masks'
offsets belong to the tile that is visited, and the turns of ordered sums are 0, 1, 2, ... among
the CTAs of a tile, in the order in which the CTAs start. A unit's CTAs start behind all of the unit
`lag` before, whose sums they round and which cleared theirs. So nobody waits for a CTA that starts
later, on however many SMs.
"""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace

from tests import gluon_model

gluon_model.install()

from onchip.kernels.hopper import backward_table, backward_walk  # noqa: E402
from onchip.kernels.hopper.backward_walk import Edges, Sizes  # noqa: E402

GROUP = 2


class Sight:
    """Which keys a row sees."""

    def __init__(self, draw: random.Random):
        self.s_q, self.s_k = draw.randint(1, 900), draw.randint(1, 900)
        self.left = draw.choice((-1, -1, draw.randint(0, 700)))
        self.right = draw.choice((-1, 0, 0, draw.randint(0, 500)))
        self.units = draw.randint(1, 9)
        self.lag = draw.randint(1, self.units)  # the last ones are in an order of their own
        self.abreast = draw.choice((0, 1, 3))

    def keys(self, row: int) -> tuple[int, int]:
        """First and last key without regard to where keys end."""
        at = row + self.s_k - self.s_q
        low = 0 if self.left < 0 else at - self.left
        return max(low, 0), self.s_k - 1 if self.right < 0 else at + self.right

    def sizes(self) -> Sizes:
        left, right = (x if x >= 0 else 1 << 29 for x in (self.left, self.right))
        return Sizes(
            None, None, self.s_q, self.s_k, GROUP, 1, GROUP, 1024, left, right,
            self.units, self.lag, None, 0, 0, 8,
        )  # fmt: skip

    def spec(self, block_m: int, block_n: int, owns_keys: bool) -> SimpleNamespace:
        has_left, has_right = self.left >= 0, self.right >= 0
        tail = self.s_k % block_n != 0
        return SimpleNamespace(
            block_m=block_m, block_n=block_n, has_left=has_left, has_right=has_right,
            has_tail=tail, packed=False, ordered=owns_keys, apart=not owns_keys, pieces=1,
            turns_back=owns_keys and has_right and not has_left, abreast=self.abreast,
            high_edges=has_left if owns_keys else has_right or tail,
        )  # fmt: skip


def _steps(walk, spec, group: int):
    """(head, tile) of every step; masked ones are checked to be where their mask is."""
    edges = Edges(walk.edges, walk.full - walk.first, walk.inner, 0, 0, 0)
    count, masks = (walk.edges + walk.inner) * group, walk.edges * group
    for i in range(count):
        head, tile = backward_walk.tile_at(walk, i, group)
        at = count - 1 - i if walk.back else i
        if at < masks:
            assert walk.first + backward_walk.edge_index(edges, at, spec) == tile
        yield head, tile, at < masks


def _check_seen(sight: Sight, rows: range, n: int, block_n: int) -> None:
    for row in (rows[0], rows[-1]):
        low, high = sight.keys(row)
        assert low <= n * block_n and high >= (n + 1) * block_n - 1, "not seen in full"


def _check_visited(sight: Sight, visited: set, block_m: int, block_n: int) -> None:
    for row in range(0, sight.s_q, 5):
        low, high = sight.keys(row)
        for n in range(low // block_n, min(high, sight.s_k - 1) // block_n + 1):
            assert low > high or (row // block_m, n) in visited, "a tile is missed"


def check_keys(sight: Sight, block_n: int) -> None:
    spec, sizes = sight.spec(64, block_n, True), sight.sizes()
    tiles = -(-sight.s_k // block_n)
    visited = [set() for _ in range(sight.units)]
    turns = [{} for _ in range(sight.units)]
    items = [[] for _ in range(sight.units)]
    places = backward_table.places_of(tiles, sight.units, sight.lag, spec)
    for item, place in enumerate(places):
        unit = backward_walk.unit_of(item, sizes, spec).index
        items[unit].append(item)
        walk = backward_walk.plan_keys(item, sizes, spec)
        n = walk.own // block_n
        assert n == place, "a list of tiles would take it for another"
        for head, m, masked in _steps(walk, spec, GROUP):
            if not masked:
                _check_seen(sight, range(m * 64, min(m * 64 + 64, sight.s_q)), n, block_n)
            visited[unit].add((m, n))
            turn = backward_walk.turn_of(walk, m, sizes, spec)
            turns[unit].setdefault((head, m), []).append((turn, item))
    for seen, taken in zip(visited, turns, strict=True):
        _check_visited(sight, seen, 64, block_n)
        _check_turns(taken)
    assert [len(own) for own in items] == [tiles] * sight.units
    for earlier, later in zip(items, items[sight.lag :], strict=False):
        assert max(earlier) < min(later), "a sum would not be cleared or added to"


def _check_turns(turns: dict) -> None:
    for taken in turns.values():
        order = sorted(taken)
        assert [turn for turn, _ in order] == list(range(len(order)))
        items = [item for _, item in order]
        assert items == sorted(items), "a tile would wait for one that begins later"


def check_queries(sight: Sight) -> None:
    spec, sizes, visited = sight.spec(128, 64, False), sight.sizes(), set()
    for program in range(-(-sight.s_q // 128)):
        gluon_model.set_program(program)
        walk = backward_walk.plan_queries(sizes, spec)
        for _, n, masked in _steps(walk, spec, 1):
            if not masked:
                _check_seen(sight, range(walk.own, min(walk.own + 128, sight.s_q)), n, 64)
            visited.add((walk.own // 128, n))
    _check_visited(sight, visited, 128, 64)


if __name__ == "__main__":
    draw = random.Random(int(sys.argv[1]))
    for _ in range(int(sys.argv[2])):
        sight = Sight(draw)
        check_keys(sight, draw.choice((64, 128)))
        check_queries(sight)
    print("[]")
