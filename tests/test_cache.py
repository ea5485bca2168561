"""PagedKVCache against plain tensors, one a sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from onchip.paging import OutOfPages, PagedKVCache

LAYERS, HEADS, DIM = 2, 2, 3
PAGE_SIZES = [1, 3, 16, 256]


def make_cache(num_pages=8, page_size=3, **changes):
    cache = PagedKVCache(LAYERS, num_pages, page_size, HEADS, DIM, torch.float32, **changes)
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    return cache


def write(cache, seq_id, positions, rows):
    """Stores rows (T, L, H_kv, D) at the positions of a sequence, v as the negative of k."""
    slots = cache.slot_mapping([seq_id], [positions.start], [positions.stop])
    cache.k.flatten(1, 2)[:, slots] = rows.transpose(0, 1)
    cache.v.flatten(1, 2)[:, slots] = -rows.transpose(0, 1)


def gather(tensor, table_row, length):
    """The tokens of a sequence, found through its row of the block table alone."""
    num_pages = -(-length // tensor.shape[2])
    tokens = tensor[:, table_row[:num_pages].long()].flatten(1, 2)[:, :length]
    return tokens.transpose(0, 1)  # (length, L, H_kv, D)


class CacheMachine(RuleBasedStateMachine):
    """Every sequence is also a plain tensor; the two never differ, whatever is shared."""

    @initialize(page_size=st.sampled_from([1, 2, 3, 5]), num_pages=st.integers(1, 9))
    def start(self, page_size, num_pages):
        self.cache = make_cache(num_pages, page_size)
        self.model: dict[int, torch.Tensor] = {}
        self.stamp = 0.0

    def sequence(self, data):
        return data.draw(st.sampled_from(sorted(self.model)))

    def snapshot(self):
        cache = self.cache
        pages = {seq_id: cache.pages(seq_id) for seq_id in cache.seq_ids}
        return pages, {s: cache.length(s) for s in cache.seq_ids}, cache.pool.num_free

    @rule()
    def add(self):
        seq_id = self.cache.add_sequence()
        assert seq_id not in self.model
        self.model[seq_id] = torch.empty(0, LAYERS, HEADS, DIM)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), num_tokens=st.integers(0, 9), reserve_first=st.booleans())
    def append(self, data, num_tokens, reserve_first):
        seq_id, cache, before = self.sequence(data), self.cache, self.snapshot()
        length = len(self.model[seq_id])
        total = length + num_tokens
        too_long = total > cache.num_pages * cache.page_size
        wanted = -(-total // cache.page_size) - len(cache.pages(seq_id))
        if too_long or wanted > cache.pool.num_free:
            error = ValueError if too_long else OutOfPages
            for method in (cache.reserve, cache.append):
                with pytest.raises(error):
                    method(seq_id, num_tokens)
            assert self.snapshot() == before
            return
        assert cache.num_pages_needed(seq_id, num_tokens) == max(0, wanted)
        if reserve_first:
            cache.reserve(seq_id, num_tokens)
            assert cache.length(seq_id) == length
            assert cache.num_pages_needed(seq_id, num_tokens) == 0
        positions = cache.append(seq_id, num_tokens)
        assert positions == range(length, total)
        self.stamp += 1
        rows = torch.full((num_tokens, LAYERS, HEADS, DIM), self.stamp) + torch.rand(DIM)
        write(cache, seq_id, positions, rows)
        self.model[seq_id] = torch.cat([self.model[seq_id], rows])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def reserve(self, data):
        seq_id, num_tokens = self.sequence(data), data.draw(st.integers(0, 4))
        before = self.snapshot()
        try:
            self.cache.reserve(seq_id, num_tokens)
        except (OutOfPages, ValueError):
            assert self.snapshot() == before

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def fork(self, data):
        seq_id, cache, before = self.sequence(data), self.cache, self.snapshot()
        length = len(self.model[seq_id])
        if length % cache.page_size and not cache.pool.num_free:
            with pytest.raises(OutOfPages):
                cache.fork(seq_id)
            assert self.snapshot() == before
            return
        child = cache.fork(seq_id)
        num_full = length // cache.page_size
        assert cache.pages(child)[:num_full] == cache.pages(seq_id)[:num_full]
        assert not set(cache.pages(child)[num_full:]) & set(cache.pages(seq_id))
        assert cache.pool.num_free == before[2] - bool(length % cache.page_size)
        self.model[child] = self.model[seq_id].clone()

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data):
        seq_id = self.sequence(data)
        self.cache.free_sequence(seq_id)
        del self.model[seq_id]
        with pytest.raises(ValueError, match=f"seq_id {seq_id}"):
            self.cache.length(seq_id)

    @invariant()
    def agrees(self):
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        cache.check_integrity()
        assert cache.seq_ids == list(self.model)
        assert cache.used_bytes == cache.pool.num_used * cache.page_bytes <= cache.total_bytes
        table = cache.block_table(cache.seq_ids)
        for row, (seq_id, rows) in zip(table, self.model.items(), strict=True):
            assert cache.length(seq_id) == len(rows)
            assert torch.equal(gather(cache.k, row, len(rows)), rows)
            assert torch.equal(gather(cache.v, row, len(rows)), -rows)


CacheMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, database=None
)
TestCacheMachine = CacheMachine.TestCase


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_slot_mapping_is_page_times_size_plus_offset(page_size):
    cache = make_cache(12, page_size)
    first, second = cache.add_sequence(), cache.add_sequence()
    for _ in range(2):  # interleaved, so that the pages of a sequence are not neighbours
        cache.append(first, page_size + 1)
        cache.append(second, page_size)
    starts, ends = [1, 0], [cache.length(first), cache.length(second)]
    slots = cache.slot_mapping([first, second], starts, ends)
    expected = [
        cache.pages(seq_id)[t // page_size] * page_size + t % page_size
        for seq_id, start, end in zip([first, second], starts, ends, strict=True)
        for t in range(start, end)
    ]
    assert slots.dtype == torch.int64
    assert slots.tolist() == expected
    assert len(set(expected)) == len(expected)


def test_slot_mapping_of_nothing_is_empty():
    cache = make_cache()
    seq_id = cache.add_sequence()
    assert cache.slot_mapping([], [], []).shape == (0,)
    assert cache.slot_mapping([seq_id], [0], [0]).shape == (0,)


def test_block_table_is_right_padded_with_minus_one():
    cache = make_cache(8, 3)
    ids = [cache.add_sequence() for _ in range(3)]
    cache.append(ids[0], 7)
    cache.append(ids[2], 1)
    table = cache.block_table(ids)
    assert table.dtype == torch.int32
    assert table.tolist() == [cache.pages(ids[0]), [-1] * 3, [*cache.pages(ids[2]), -1, -1]]
    assert cache.block_table([]).shape == (0, 1)
    assert cache.block_table([ids[1]]).tolist() == [[-1]]


def test_equal_head_dims_share_one_allocation_and_unequal_ones_do_not():
    same = PagedKVCache(2, 4, 3, 5, 8, torch.bfloat16)
    assert same.k.shape == same.v.shape == (2, 4, 3, 5, 8)
    assert same.k.untyped_storage().data_ptr() == same.v.untyped_storage().data_ptr()
    assert same.k[1].is_contiguous() and same.v[1].is_contiguous()
    assert same.total_bytes == 2 * 2 * 4 * 3 * 5 * 8 * 2 == same.k.untyped_storage().nbytes()
    other = PagedKVCache(2, 4, 3, 5, 8, torch.float32, head_dim_v=6)
    assert other.v.shape == (2, 4, 3, 5, 6)
    assert other.total_bytes == 2 * 4 * 3 * 5 * (8 + 6) * 4
    assert other.page_bytes == other.total_bytes // 4


def test_used_bytes_count_a_shared_page_once():
    cache = make_cache(8, 3)
    parent = cache.add_sequence()
    cache.append(parent, 6)
    cache.fork(parent)
    assert cache.used_bytes == 2 * cache.page_bytes
    cache.free_sequence(parent)
    assert cache.used_bytes == 2 * cache.page_bytes


def test_a_fork_copies_head_dim_v_and_not_the_tail():
    cache = make_cache(4, 4, head_dim_v=5)
    parent = cache.add_sequence()
    cache.append(parent, 2)
    cache.k[:, cache.pages(parent)[0], :2] = 1.0
    cache.v[:, cache.pages(parent)[0], :2] = 2.0
    copy = cache.pages(cache.fork(parent))[0]
    assert copy != cache.pages(parent)[0]
    assert (cache.k[:, copy, :2] == 1).all() and (cache.v[:, copy, :2] == 2).all()
    assert cache.k[:, copy, 2:].isnan().all() and cache.v[:, copy, 2:].isnan().all()


def test_a_prompt_longer_than_the_cache_says_so_and_changes_nothing():
    cache = make_cache(4, 3)
    seq_id = cache.add_sequence()
    cache.append(seq_id, 2)
    with pytest.raises(ValueError, match=r"num_tokens is 11.*13 tokens.*holds 12 \(4 pages of 3\)"):
        cache.append(seq_id, 11)
    assert (cache.length(seq_id), cache.pool.num_free) == (2, 3)
    cache.append(seq_id, 10)
    assert (cache.length(seq_id), cache.pool.num_free) == (12, 0)


def test_out_of_pages_is_all_or_nothing():
    cache = make_cache(4, 3)
    first, second = cache.add_sequence(), cache.add_sequence()
    cache.append(first, 7)
    with pytest.raises(OutOfPages, match="2 pages wanted, 1 free"):
        cache.append(second, 4)
    assert (cache.length(second), cache.pages(second), cache.pool.num_free) == (0, [], 1)
    cache.free_sequence(first)
    cache.append(second, 4)
    cache.check_integrity()


@pytest.mark.parametrize(
    "name", ["num_layers", "num_pages", "page_size", "num_kv_heads", "head_dim", "head_dim_v"]
)
def test_counts_below_one_are_refused(name):
    names = ("num_layers", "num_pages", "page_size", "num_kv_heads", "head_dim", "head_dim_v")
    counts: dict[str, Any] = dict.fromkeys(names, 1)
    with pytest.raises(ValueError, match=f"{name} is 0"):
        PagedKVCache(**{**counts, name: 0}, dtype=torch.float32)


def test_an_integer_cache_is_refused():
    with pytest.raises(TypeError, match="dtype is torch.int8.*torch.bfloat16"):
        PagedKVCache(1, 1, 1, 1, 1, torch.int8)


def test_wrong_arguments_are_named():
    cache = make_cache()
    seq_id = cache.add_sequence()
    cache.append(seq_id, 2)
    with pytest.raises(ValueError, match="num_tokens is -1"):
        cache.append(seq_id, -1)
    with pytest.raises(ValueError, match="starts and ends have 1, 1 and 0"):
        cache.slot_mapping([seq_id], [0], [])
    for start, end in [(-1, 1), (0, 3), (2, 1)]:
        with pytest.raises(ValueError, match=r"starts/ends.*2 tokens"):
            cache.slot_mapping([seq_id], [start], [end])
    unknown = seq_id + 1
    for call in (
        lambda: cache.append(unknown, 1),
        lambda: cache.fork(unknown),
        lambda: cache.free_sequence(unknown),
        lambda: cache.block_table([seq_id, unknown]),
        lambda: cache.slot_mapping([unknown], [0], [0]),
    ):
        with pytest.raises(ValueError, match=f"seq_id {unknown}"):
            call()
    cache.check_integrity()


def share_partial_page(cache, seq_id):
    page = cache.pages(seq_id)[-1]
    cache._add(type(cache._entries[seq_id])([page], 1))
    cache.pool.share([page])


def lose_reference(cache, seq_id):
    cache.pool.free(cache.pages(seq_id)[:1])


def overlong(cache, seq_id):
    cache._entries[seq_id].length = 100


def page_twice(cache, seq_id):
    entry = cache._entries[seq_id]
    cache.pool.share(entry.pages[:1])
    entry.pages.append(entry.pages[0])


@pytest.mark.parametrize("corrupt", [share_partial_page, lose_reference, overlong, page_twice])
def test_check_integrity_sees_corruption(corrupt):
    cache = make_cache()
    seq_id = cache.add_sequence()
    cache.append(seq_id, 4)
    cache.check_integrity()
    corrupt(cache, seq_id)
    with pytest.raises(AssertionError):
        cache.check_integrity()
