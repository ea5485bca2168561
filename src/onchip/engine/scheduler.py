"""Which sequences run next, and which wait for pages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from onchip.engine.sequence import Sequence
from onchip.paging.cache import PagedKVCache


@dataclass(frozen=True)
class Batch:
    """The sequences of one step, all prefill or all decode, with room in the cache."""

    sequences: list[Sequence]
    is_prefill: bool


class Scheduler:
    """Prefill first, as many waiting prompts as fit; otherwise decode everything that runs.

    Args:
        cache: where keys and values go.
        max_num_seqs: sequences of one step at most.
        max_batch_tokens: prompt tokens of one step at most; a longer prompt runs alone.

    Attributes:
        waiting: not in the cache, next one first.
        running: in the cache, oldest first.
        num_preempted: how often a sequence gave its pages up.
    """

    def __init__(self, cache: PagedKVCache, max_num_seqs: int, max_batch_tokens: int):
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_batch_tokens = max_batch_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preempted = 0

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Puts sequences at the end of the line. Mutates: waiting."""
        self.waiting.extend(sequences)

    def schedule(self) -> Batch:
        """Picks the sequences of the next step and gives them pages for its tokens.

        Returns:
            A batch; empty only if there is nothing to do.

        Mutates: the cache, waiting and running.
        """
        admitted = self._admit()
        if admitted:
            return Batch(admitted, is_prefill=True)
        return Batch(self._grow(), is_prefill=False)

    def finish(self, sequences: Iterable[Sequence]) -> None:
        """Forgets sequences and frees their pages. Mutates: the cache, waiting and running."""
        for seq in sequences:
            if seq.cache_id is not None:
                self._evict(seq)
            elif seq in self.waiting:
                self.waiting.remove(seq)

    def preempt(self, sequences: list[Sequence]) -> None:
        """Back to the head of the line; their keys and values are computed again later.

        Mutates: the cache, waiting and running.
        """
        for seq in reversed(sequences):
            self._evict(seq)
            self.waiting.appendleft(seq)
            self.num_preempted += 1

    def _admit(self) -> list[Sequence]:
        admitted: list[Sequence] = []
        num_tokens = 0
        while self.waiting and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            num_tokens += seq.num_tokens
            num_pages = -(-seq.num_tokens // self.cache.page_size)
            if admitted and num_tokens > self.max_batch_tokens:
                break
            if num_pages > self.cache.pool.num_free:
                break
            seq.cache_id = self.cache.add_sequence()
            self.cache.append(seq.cache_id, seq.num_tokens)
            self.running.append(self.waiting.popleft())
            admitted.append(seq)
        return admitted

    def _grow(self) -> list[Sequence]:
        """Room for one token more for each running sequence, the oldest first."""
        grown: list[Sequence] = []
        while len(grown) < len(self.running):
            seq = self.running[len(grown)]
            assert seq.cache_id is not None
            if self.cache.num_pages_needed(seq.cache_id, 1) <= self.cache.pool.num_free:
                self.cache.append(seq.cache_id, 1)
                grown.append(seq)
            else:
                self.preempt(self.running[-1:])
        return grown

    def _evict(self, seq: Sequence) -> None:
        assert seq.cache_id is not None
        self.cache.free_sequence(seq.cache_id)
        self.running.remove(seq)
        seq.cache_id, seq.num_cached = None, 0
