"""What tiles read of slow memory, and what the L2 cache serves of it.

Legend: S_q / S_k lengths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from onchip.problem import Problem


@dataclass(frozen=True)
class Transfer:
    """Bytes of one tensor that a stage reads or writes.

    Args:
        tensor: its name.
        slow_bytes: what slow memory serves.
        requested_bytes: what the programs ask for; the L2 cache serves the difference.
    """

    tensor: str
    slow_bytes: int
    requested_bytes: int


def once(tensor: str, num_bytes: int) -> Transfer:
    """A tensor of which every byte is moved once."""
    return Transfer(tensor, num_bytes, num_bytes)


@dataclass(frozen=True)
class Cache:
    """The L2 cache, as programs that read the same tensor again see it.

    Args:
        size_bytes: how much of that tensor it can hold.
        num_programs: programs that run at one time; they walk in step and share what they read.
    """

    size_bytes: int
    num_programs: int

    def slow_bytes(self, unique_bytes: int, requested_bytes: int, num_walks: int) -> int:
        """Slow bytes of `num_walks` programs that walk over the same `unique_bytes`.

        Once if it stays in the cache, else once for each wave of programs.
        """
        if unique_bytes <= self.size_bytes:
            return unique_bytes
        num_waves = -(-num_walks // max(1, self.num_programs))
        return min(requested_bytes, unique_bytes * num_waves)


def rounded(span: range, block: int, limit: int) -> range:
    """The span with its ends moved out to whole blocks, but not beyond `limit`."""
    if not span:
        return range(0)
    return range(span.start // block * block, min(limit, -(-span.stop // block) * block))


def query_tiles(s_q: int, block_m: int) -> Iterator[tuple[int, int]]:
    """First and last row (exclusive) of each tile of queries."""
    for start in range(0, s_q, block_m):
        yield start, min(start + block_m, s_q)


def rows_seeing(problem: Problem, keys: range, s_q: int, s_k: int) -> range:
    """Queries that see at least one of some keys: `Mask.key_range` the other way round."""
    mask, shift = problem.mask, s_k - s_q
    start = 0 if mask.right < 0 else max(0, keys.start - shift - mask.right)
    stop = s_q if mask.left < 0 else min(s_q, keys.stop - shift + mask.left)
    return range(start, max(start, stop))


class Walks:
    """Tokens that the tiles of one side read of the other, over all sequences.

    Args:
        spans: tokens that each tile of one sequence reads.
    """

    def __init__(self, spans: Iterable[range]):
        spans = [span for span in spans if span]
        self.count = len(spans)
        self.requested = sum(map(len, spans))
        # Bands move on monotonically, so that the union of their spans has no gap.
        self.unique = range(
            min((span.start for span in spans), default=0),
            max((span.stop for span in spans), default=0),
        )
        self.spans = spans


def read_again(
    tensor: str, walks: Walks, token_bytes: int, repeats: int, cache: Cache | None
) -> Transfer:
    """A tensor that `repeats` rounds of walks read, one head of one sequence."""
    requested = walks.requested * repeats * token_bytes
    if cache is None:
        return once(tensor, requested)
    unique = len(walks.unique) * token_bytes
    return Transfer(tensor, cache.slow_bytes(unique, requested, walks.count * repeats), requested)


def scaled(transfers: Iterable[Transfer], factor: int) -> list[Transfer]:
    return [
        Transfer(t.tensor, t.slow_bytes * factor, t.requested_bytes * factor) for t in transfers
    ]


def summed(transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
    """Transfers of the same tensor added up; tensors of no bytes are left out."""
    slow: Counter[str] = Counter()
    requested: Counter[str] = Counter()
    for transfer in transfers:
        slow[transfer.tensor] += transfer.slow_bytes
        requested[transfer.tensor] += transfer.requested_bytes
    return tuple(Transfer(name, slow[name], requested[name]) for name in slow if requested[name])
