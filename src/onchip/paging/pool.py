"""PagePool: which pages are free, and how many owners each used page has. Pure Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class OutOfPages(RuntimeError):
    """More pages were wanted than are free. Nothing was allocated; free some and try again.

    Args:
        wanted: pages asked for.
        free: pages that were free.
    """

    def __init__(self, wanted: int, free: int):
        super().__init__(
            f"{wanted} pages wanted, {free} free. Free or preempt a sequence and try again, or "
            f"make the cache larger (num_pages)"
        )
        self.wanted = wanted
        self.free = free

    def __reduce__(self):
        return type(self), (self.wanted, self.free)


class PagePool:
    """Hands out page ids 0 .. num_pages - 1 and counts the owners of each.

    A page is free (reference count 0) or used (count >= 1). Every method that raises has
    changed nothing.

    Args:
        num_pages: pages in the pool, at least 1.

    Raises:
        ValueError: if num_pages < 1.
    """

    def __init__(self, num_pages: int):
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; a pool needs at least 1 page")
        self.num_pages = num_pages
        self._ref_counts = [0] * num_pages
        # A stack: the page freed last is the one most likely still in a cache.
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages that have no owner."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that have an owner; a shared page counts once."""
        return self.num_pages - len(self._free)

    def ref_count(self, page: int) -> int:
        """Owners of a page; 0 when it is free.

        Raises:
            ValueError: if the page is not in the pool.
        """
        self._check_ids([page], "page")
        return self._ref_counts[page]

    def allocate(self, num_pages: int) -> list[int]:
        """Takes pages that nobody owns: all of them or none.

        Args:
            num_pages: how many, 0 or more.

        Returns:
            Distinct page ids, each with reference count 1.

        Raises:
            ValueError: if num_pages < 0.
            OutOfPages: if fewer are free.

        Mutates: the free list and the counts of the returned pages.
        """
        if num_pages < 0:
            raise ValueError(f"num_pages is {num_pages}; ask for 0 or more")
        if num_pages > self.num_free:
            raise OutOfPages(num_pages, self.num_free)
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._ref_counts[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds an owner to each page (two, where a page is named twice).

        Raises:
            ValueError: if a page is free or not in the pool.

        Mutates: the counts of the pages.
        """
        pages = list(pages)
        self._check_ids(pages, "pages")
        unowned = sorted({page for page in pages if self._ref_counts[page] == 0})
        if unowned:
            raise ValueError(f"pages {unowned} are free; only a used page can be shared")
        for page in pages:
            self._ref_counts[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Removes an owner from each page; a page without owners becomes free.

        Raises:
            ValueError: if a page is not in the pool or has fewer owners than are removed.

        Mutates: the counts of the pages and the free list.
        """
        pages = list(pages)
        self._check_ids(pages, "pages")
        removed = Counter(pages)
        overfreed = sorted(page for page, n in removed.items() if n > self._ref_counts[page])
        if overfreed:
            raise ValueError(
                f"pages {overfreed} would be freed more often than they are owned; "
                f"free each page once for each allocate or share"
            )
        for page in pages:
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                self._free.append(page)

    def check_integrity(self) -> None:
        """Verifies every invariant; an AssertionError is a bug in this package."""
        free = set(self._free)
        assert len(self._ref_counts) == self.num_pages, "one count a page"
        assert len(free) == len(self._free), "a page is on the free list twice"
        assert free <= set(range(self.num_pages)), "the free list holds an unknown page"
        for page, count in enumerate(self._ref_counts):
            assert count >= 0, f"page {page} has {count} owners"
            assert (count == 0) == (page in free), f"page {page} is listed wrongly"

    def _check_ids(self, pages: list[int], name: str) -> None:
        unknown = sorted({page for page in pages if not 0 <= page < self.num_pages})
        if unknown:
            raise ValueError(
                f"{name}: {unknown} not in the pool; ids go from 0 to {self.num_pages - 1}"
            )
