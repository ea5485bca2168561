"""PagedKVCache: the keys and values of many sequences in pages of one tensor.

Token t of a sequence lies in page ``pages[t // N]`` at offset ``t % N``; its slot is
``page * N + offset``. The cache decides where tokens go; the attention layer writes them there
(`onchip.store_kvcache`) and reads them back through the block table.

Legend: L layers, P pages, N page size, H_kv key and value heads, D / D_v head dimensions, B
sequences of one step, T tokens of one step.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from onchip.paging import cascade
from onchip.paging.cascade import Cascade
from onchip.paging.pool import PagePool

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn)
_NO_PAGE = array("i", [-1])


@dataclass(slots=True)
class _Entry:
    """One sequence: the pages it owns, in order, and how many of their slots hold tokens."""

    # Not a list: block tables of a whole batch are built from these by copying memory.
    pages: array[int] = field(default_factory=lambda: array("i"))
    length: int = 0


class PagedKVCache:
    """Paged keys and values of every layer, and the page lists of the sequences in them.

    Every method that raises has changed nothing. The tensors start uninitialised: attention
    never reads a slot that no token was written to. Nothing here waits for the device.

    Args:
        num_layers: L.
        num_pages: P, pages of each layer; one page id means the same tokens in every layer.
        page_size: N, tokens of a page, any number from 1.
        num_kv_heads: H_kv.
        head_dim: D.
        dtype: float16, bfloat16, float32, float64 or float8_e4m3fn.
        device: where the tensors live.
        head_dim_v: D_v; D when None.

    Attributes:
        k: (L, P, N, H_kv, D); `k[l]` is what layer l binds.
        v: (L, P, N, H_kv, D_v); one allocation with k where D_v == D.
        k_scale: (L, H_kv) float32 ones, to be set before the first store: pages hold k / k_scale.
            None unless dtype is float8_e4m3fn.
        v_scale: as k_scale.
        pool: the page allocator.

    Raises:
        ValueError: if a count is below 1.
        TypeError: if dtype is none of the above.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        head_dim_v: int | None = None,
    ):
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        counts = {
            "num_layers": num_layers,
            "num_pages": num_pages,
            "page_size": page_size,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "head_dim_v": head_dim_v,
        }
        for name, value in counts.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be 1 or more")
        if dtype not in _DTYPES:
            allowed = ", ".join(str(d) for d in _DTYPES)
            raise TypeError(f"dtype is {dtype}; the cache takes {allowed}")
        self.page_size = page_size
        self.device = torch.device(device)
        rows = (num_layers, num_pages, page_size, num_kv_heads)
        if head_dim_v == head_dim:
            both = torch.empty((2, *rows, head_dim), dtype=dtype, device=device)
            self.k, self.v = both[0], both[1]
        else:
            self.k = torch.empty((*rows, head_dim), dtype=dtype, device=device)
            self.v = torch.empty((*rows, head_dim_v), dtype=dtype, device=device)
        self.k_scale = self.v_scale = None
        if dtype.itemsize == 1:
            self.k_scale, self.v_scale = torch.ones(
                (2, num_layers, num_kv_heads), dtype=torch.float32, device=device
            )
        self.pool = PagePool(num_pages)
        self._entries: dict[int, _Entry] = {}
        self._next_id = 0

    @property
    def num_pages(self) -> int:
        """P."""
        return self.pool.num_pages

    @property
    def page_bytes(self) -> int:
        """Bytes of one page id: its keys and values in every layer."""
        return self.total_bytes // self.num_pages

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole cache."""
        return (self.k.numel() + self.v.numel()) * self.k.element_size()

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that sequences own; a shared page counts once."""
        return self.pool.num_used * self.page_bytes

    @property
    def seq_ids(self) -> list[int]:
        """Ids of the sequences in the cache, oldest first."""
        return list(self._entries)

    def length(self, seq_id: int) -> int:
        """Tokens of a sequence."""
        return self._entry(seq_id).length

    def pages(self, seq_id: int) -> list[int]:
        """Pages of a sequence in order, reserved ones included (a copy)."""
        return list(self._entry(seq_id).pages)

    def num_pages_needed(self, seq_id: int, num_tokens: int) -> int:
        """Pages that `reserve` or `append` of so many tokens would take from the pool.

        Raises:
            ValueError: if seq_id is unknown, num_tokens is negative, or the sequence would be
                longer than the whole cache.
        """
        entry = self._entry(seq_id)
        if num_tokens < 0:
            raise ValueError(f"num_tokens is {num_tokens}; it must be 0 or more")
        num_pages = -(-(entry.length + num_tokens) // self.page_size)
        if num_pages > self.num_pages:
            raise ValueError(
                f"num_tokens is {num_tokens}: sequence {seq_id} would have "
                f"{entry.length + num_tokens} tokens and the whole cache holds "
                f"{self.num_pages * self.page_size} ({self.num_pages} pages of {self.page_size}). "
                f"Shorten the prompt or make the cache larger (num_pages)"
            )
        return max(0, num_pages - len(entry.pages))

    def add_sequence(self) -> int:
        """Starts an empty sequence.

        Returns:
            Its id, never used before in this cache.

        Mutates: the set of sequences.
        """
        return self._add(_Entry())

    def reserve(self, seq_id: int, num_tokens: int) -> None:
        """Makes sure that the next tokens of a sequence have pages; its length stays.

        Args:
            seq_id: from `add_sequence` or `fork`.
            num_tokens: tokens after the sequence's length that will fit afterwards.

        Raises:
            ValueError: as `num_pages_needed`.
            OutOfPages: if too few pages are free.

        Mutates: the pool and the sequence's page list.
        """
        num_pages = self.num_pages_needed(seq_id, num_tokens)
        self._entries[seq_id].pages.extend(self.pool.allocate(num_pages))

    def append(self, seq_id: int, num_tokens: int) -> range:
        """Makes a sequence longer, taking pages as needed. Writes no keys or values.

        Args:
            seq_id: from `add_sequence` or `fork`.
            num_tokens: new tokens.

        Returns:
            The positions of the new tokens in the sequence.

        Raises:
            ValueError: as `num_pages_needed`.
            OutOfPages: if too few pages are free.

        Mutates: the pool, the sequence's page list and its length.
        """
        self.reserve(seq_id, num_tokens)
        entry = self._entries[seq_id]
        entry.length += num_tokens
        return range(entry.length - num_tokens, entry.length)

    def free_sequence(self, seq_id: int) -> None:
        """Forgets a sequence and gives up its pages; shared ones stay with their other owners.

        Raises:
            ValueError: if seq_id is unknown.

        Mutates: the pool and the set of sequences.
        """
        self.pool.free(self._entry(seq_id).pages)
        del self._entries[seq_id]

    def fork(self, seq_id: int) -> int:
        """Starts a sequence with the tokens of another one.

        Full pages are shared: no token is ever appended to them. A partly filled last page is
        copied, so that each of the two appends to its own. Pages that the other sequence has
        merely reserved stay with it alone.

        Returns:
            The new sequence's id.

        Raises:
            ValueError: if seq_id is unknown.
            OutOfPages: if a page must be copied and none is free.

        Mutates: the pool, the set of sequences, and `k` and `v` in the copied page.
        """
        entry = self._entry(seq_id)
        num_full, num_rest = divmod(entry.length, self.page_size)
        pages = entry.pages[:num_full]
        copies = self.pool.allocate(1 if num_rest else 0)
        try:
            for page in copies:
                # The filled part alone: a copied tail would be traffic for nothing.
                self.k[:, page, :num_rest] = self.k[:, entry.pages[num_full], :num_rest]
                self.v[:, page, :num_rest] = self.v[:, entry.pages[num_full], :num_rest]
        except BaseException:  # an inference tensor outside of inference mode, say
            self.pool.free(copies)
            raise
        self.pool.share(pages)
        return self._add(_Entry(pages + array("i", copies), entry.length))

    def slot_mapping(
        self, seq_ids: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> torch.Tensor:
        """Slots of tokens [start, end) of each sequence, one sequence after the other.

        Args:
            seq_ids: the sequences of a step.
            starts: first token of each.
            ends: one past the last token of each, at most its length.

        Returns:
            (T,) int64 on the cache's device: page * N + offset.

        Raises:
            ValueError: if the lists differ in length or a range does not lie in its sequence.
        """
        if not len(seq_ids) == len(starts) == len(ends):
            raise ValueError(
                f"seq_ids, starts and ends have {len(seq_ids)}, {len(starts)} and {len(ends)} "
                f"entries; give one of each for every sequence"
            )
        pages: list[int] = []
        counts, shifts, num_tokens = [], [], 0
        for seq_id, start, end in zip(seq_ids, starts, ends, strict=True):
            entry = self._entry(seq_id)
            if not 0 <= start <= end <= entry.length:
                raise ValueError(
                    f"starts/ends: [{start}, {end}) does not lie in sequence {seq_id} of "
                    f"{entry.length} tokens; append the tokens first"
                )
            # Token `start` is number num_tokens of the step, and lies in the next entry of pages.
            shifts.append(len(pages) * self.page_size + start % self.page_size - num_tokens)
            counts.append(end - start)
            pages += entry.pages[start // self.page_size : -(-end // self.page_size)]
            num_tokens += end - start
        places = torch.arange(num_tokens) + _repeat(shifts, counts)  # in the pages, end to end
        starts_of_pages = torch.tensor(pages, dtype=torch.int64) * self.page_size
        slots = starts_of_pages[places // self.page_size] + places % self.page_size
        return self._to_device(slots)

    def block_table(self, seq_ids: Sequence[int]) -> torch.Tensor:
        """Pages of each sequence.

        Args:
            seq_ids: the sequences of a step.

        Returns:
            (B, max_pages) int32 on the cache's device, right-padded with -1, at least 1 wide.

        Raises:
            ValueError: if a sequence is unknown.
        """
        rows = [self._entry(seq_id).pages for seq_id in seq_ids]
        if not rows:
            return torch.empty((0, 1), dtype=torch.int32, device=self.device)
        width = max(1, *map(len, rows))
        padded = array("i")
        for pages in rows:
            padded += pages
            padded += _NO_PAGE * (width - len(pages))
        return self._to_device(torch.frombuffer(padded, dtype=torch.int32).view(-1, width))

    def cascade(self, seq_ids: Sequence[int], num_queries: int = 1) -> Cascade:
        """Where the sequences of a decode step begin with the same pages, and their own ones.

        Worth it when the shared part is long and the sequences are many: `Cascade.attention`
        reads the shared keys once for all of them, in three launches for one.

        Args:
            seq_ids: the sequences of a step, whose new tokens are appended already.
            num_queries: S_q, the last tokens of each that will ask; these are never shared.

        Raises:
            ValueError: if a sequence is unknown or shorter than that, or there is none.
            TypeError: if num_queries is no int.
        """
        entries = [self._entry(seq_id) for seq_id in seq_ids]
        pages, lengths = [list(e.pages) for e in entries], [e.length for e in entries]
        return cascade.of_pages(pages, lengths, num_queries, self.page_size, self._to_device)

    def check_integrity(self) -> None:
        """Verifies every invariant; an AssertionError is a bug in this package."""
        self.pool.check_integrity()
        owners = Counter(page for entry in self._entries.values() for page in entry.pages)
        for page in range(self.num_pages):
            assert self.pool.ref_count(page) == owners[page], (
                f"page {page}: owners and count differ"
            )
        for seq_id, entry in self._entries.items():
            assert 0 <= seq_id < self._next_id, f"sequence {seq_id} was never added"
            assert len(set(entry.pages)) == len(entry.pages), f"sequence {seq_id}: a page twice"
            capacity = len(entry.pages) * self.page_size
            assert 0 <= entry.length <= capacity, f"sequence {seq_id}: more tokens than slots"
            for page in entry.pages[entry.length // self.page_size :]:
                assert owners[page] == 1, f"sequence {seq_id}: page {page} is shared and not full"

    def _add(self, entry: _Entry) -> int:
        seq_id = self._next_id
        self._next_id += 1
        self._entries[seq_id] = entry
        return seq_id

    def _entry(self, seq_id: int) -> _Entry:
        try:
            return self._entries[seq_id]
        except KeyError:
            raise ValueError(
                f"seq_id {seq_id} is not in the cache, which holds {len(self._entries)} sequences; "
                f"use an id from add_sequence or fork that was not freed"
            ) from None

    def _to_device(self, index: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cuda":
            # From pageable memory the copy would wait for the stream.
            index = index.pin_memory()
        return index.to(self.device, non_blocking=True)


def _repeat(values: list[int], counts: list[int]) -> torch.Tensor:
    """Each value as often as its count says."""
    return torch.tensor(values, dtype=torch.int64).repeat_interleave(
        torch.tensor(counts, dtype=torch.int64)
    )
