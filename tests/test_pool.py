"""PagePool against a plain model, and its errors."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from onchip.paging import OutOfPages, PagePool

NUM_PAGES = 7


class PoolMachine(RuleBasedStateMachine):
    """A dict page -> owners is the whole model."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.model: dict[int, int] = {}

    def owned(self, data, min_size=1):
        pages = st.sampled_from(sorted(self.model))
        return data.draw(st.lists(pages, min_size=min_size, max_size=6))

    @rule(num_pages=st.integers(0, NUM_PAGES + 1))
    def allocate(self, num_pages):
        num_free = NUM_PAGES - len(self.model)
        if num_pages > num_free:
            with pytest.raises(OutOfPages) as caught:
                self.pool.allocate(num_pages)
            assert (caught.value.wanted, caught.value.free) == (num_pages, num_free)
            return
        pages = self.pool.allocate(num_pages)
        assert len(set(pages)) == num_pages
        assert not set(pages) & set(self.model)
        self.model.update(dict.fromkeys(pages, 1))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def share(self, data):
        pages = self.owned(data)
        self.pool.share(pages)
        for page in pages:
            self.model[page] += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data):
        pages = self.owned(data)
        if any(pages.count(page) > self.model[page] for page in pages):
            with pytest.raises(ValueError, match="more often than they are owned"):
                self.pool.free(pages)
            return
        self.pool.free(pages)
        for page in pages:
            self.model[page] -= 1
        self.model = {page: count for page, count in self.model.items() if count}

    @rule(page=st.integers(0, NUM_PAGES - 1))
    def misuse_free_page(self, page):
        used = sorted(self.model)
        if page in self.model:
            return
        with pytest.raises(ValueError, match=str(page)):
            self.pool.share([*used, page])
        with pytest.raises(ValueError, match=str(page)):
            self.pool.free([*used, page])

    @rule(page=st.sampled_from([-1, NUM_PAGES, NUM_PAGES + 50]))
    def misuse_unknown_page(self, page):
        used = sorted(self.model)
        for method in (self.pool.share, self.pool.free):
            with pytest.raises(ValueError, match="not in the pool"):
                method([*used, page])
        with pytest.raises(ValueError, match="not in the pool"):
            self.pool.ref_count(page)

    @invariant()
    def agrees(self):
        self.pool.check_integrity()
        assert self.pool.num_free == NUM_PAGES - len(self.model)
        assert self.pool.num_used == len(self.model)
        for page in range(NUM_PAGES):
            assert self.pool.ref_count(page) == self.model.get(page, 0)


PoolMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, database=None
)
TestPoolMachine = PoolMachine.TestCase


def test_out_of_pages_names_both_numbers_and_is_a_runtime_error():
    pool = PagePool(3)
    pool.allocate(1)
    with pytest.raises(RuntimeError, match="5 pages wanted, 2 free"):
        pool.allocate(5)
    assert pool.num_free == 2


@pytest.mark.parametrize("num_pages", [0, -1])
def test_an_empty_pool_is_refused(num_pages):
    with pytest.raises(ValueError, match="num_pages"):
        PagePool(num_pages)


def test_a_negative_request_is_refused():
    with pytest.raises(ValueError, match="num_pages is -1"):
        PagePool(3).allocate(-1)


def corrupt_count(pool):
    pool._ref_counts[pool._free[0]] = 1


def corrupt_duplicate(pool):
    pool._free.append(pool._free[0])


def corrupt_lost_page(pool):
    pool._free.pop()


def corrupt_negative(pool):
    pool._ref_counts[pool._free[0]] = -1


def corrupt_unknown(pool):
    pool._free[0] = 99


@pytest.mark.parametrize(
    "corrupt",
    [corrupt_count, corrupt_duplicate, corrupt_lost_page, corrupt_negative, corrupt_unknown],
)
def test_check_integrity_sees_corruption(corrupt):
    pool = PagePool(4)
    pool.allocate(2)
    pool.check_integrity()
    corrupt(pool)
    with pytest.raises(AssertionError):
        pool.check_integrity()
