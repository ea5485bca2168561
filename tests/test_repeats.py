"""What counts as a repeated call over a cache, and what does not; on a CPU, without launches."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import onchip
from onchip import repeats
from onchip.problem import NewTokens, Tensors

NUMBERS = (False, False, None, None, False, True, None, 0.0, (-1, -1))


class Launched:
    """Stands for a kernel's launch."""

    is_ready = True

    def __call__(self, q, places):
        return q, tuple(places)


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def given(**changes):
    own = {
        "q": torch.zeros(2, 1, 4, 8),
        "k_cache": torch.zeros(9, 4, 2, 8),
        "v_cache": torch.zeros(9, 4, 2, 8),
        "cache_seqlens": torch.tensor([3, 4], dtype=torch.int32),
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        **changes,
    }
    return (*own.values(), *[None] * (16 - len(own)))


@pytest.fixture(params=["by key", "recent"])
def kept(request):
    repeats._kept.clear()
    repeats._recent = ()
    call = repeats.asked(given(), NUMBERS)
    assert call is not None
    found = repeats.Repeat(repeats._guards(call.tensors), Launched(), (0, 3, -1))
    repeats._kept[call.key] = [found]
    if request.param == "recent":
        assert find(given()) is found
        repeats._kept.clear()
        assert repeats._recent
    yield found
    repeats._kept.clear()
    repeats._recent = ()


def find(tensors, numbers=NUMBERS):
    found, _ = repeats.lookup(tensors, numbers)
    return None if found is None else found[0]


def test_calls_alike_are_found_and_read_their_own_addresses(kept):
    tensors = given()
    assert find(tensors) is kept
    _, places = kept(tensors[0], repeats.asked(tensors, NUMBERS).places)
    assert places == (tensors[0].data_ptr(), tensors[3].data_ptr(), None)


@pytest.mark.parametrize(
    "changes",
    [
        {"q": torch.zeros(2, 1, 4, 8).half()},
        {"q": torch.zeros(2, 2, 4, 8)[:, :1]},
        {"q": torch.zeros(2, 1, 4, 8, requires_grad=True)},
        {"q": torch._neg_view(torch.zeros(2, 1, 4, 8))},
        {"q": torch.nn.Parameter(torch.zeros(2, 1, 4, 8), requires_grad=False)},
        {"q": torch.zeros(65)[1:].view(2, 1, 4, 8)},  # starts at another alignment
        {"k_cache": torch.zeros(10, 4, 2, 8)},
        {"v_cache": torch.zeros(9, 4, 2, 9)[..., :8]},
        {"v_cache": torch.zeros(9, 4, 2, 8, device="meta")},
        {"cache_seqlens": torch.tensor([3, 4])},
        {"cache_seqlens": torch.tensor([3], dtype=torch.int32)},
        {"block_table": torch.zeros(2, 4, dtype=torch.int32)},
        {"block_table": None},
        {"block_table": None, "k": torch.zeros(2, 3, dtype=torch.int32)},  # at another place
        {"block_table": [[0, 1, 2]] * 2},
        {"q": None},
    ],
    ids=str,
)
def test_other_tensors_are_not(kept, changes):
    assert find(given(**changes)) is None


def test_other_numbers_are_not(kept):
    for place, value in ((0, True), (1, 0), (3, "cpu"), (5, 1), (6, 0.5), (7, 0), (8, (-1, 0))):
        assert find(given(), (*NUMBERS[:place], value, *NUMBERS[place + 1 :])) is None
    assert find(given(), (*NUMBERS[:-1], (-1, -1.0))) is None
    assert find(given(), (*NUMBERS[:-1], [-1, -1])) is None
    assert find(given(), (*NUMBERS[:-1], None)) is None
    assert find(given(), (*NUMBERS[:-2], torch.zeros(2), NUMBERS[-1])) is None


def test_only_the_last_few_calls_are_recent(kept):
    found = []
    for heads in range(11, 17):
        q = given(q=torch.zeros(2, 1, heads, 8))
        call = repeats.asked(q, NUMBERS)
        guards = repeats._guards(call.tensors)
        found.append(repeats.Repeat(guards, Launched(), (0, 3, -1)))
        repeats._kept[call.key] = [found[-1]]
        assert find(q) is found[-1] and repeats.recent(q, NUMBERS)[0] is found[-1]
        assert find(q) is found[-1]
    assert [x.repeat for x in repeats._recent] == found[:1:-1]
    assert repeats.recent(given(q=torch.zeros(2, 1, 11, 8)), NUMBERS) is None
    assert find(given(q=torch.zeros(2, 1, 11, 8))) is found[0]


def test_whoever_listens_is_heard(kept, monkeypatch):
    with Passing():
        assert find(given()) is None
    with torch.inference_mode():
        assert find(given()) is None
    with torch.autograd.forward_ad.dual_level():
        assert find(given()) is None
    with torch.autograd.profiler.profile():
        assert find(given()) is None
    with torch.autocast("cpu"):
        assert find(given()) is None
    monkeypatch.setenv("ONCHIP_CHECK", "1")
    assert find(given()) is None
    monkeypatch.delenv("ONCHIP_CHECK")
    assert find(given()) is kept
    monkeypatch.setattr(Launched, "is_ready", False)
    assert find(given()) is None


def test_sources_are_the_callers_own_tensors():
    tensors = given()
    q, k, v, lengths, table = tensors[:5]
    read = repeats._read(Tensors(q, k, v, block_table=table, seqused_k=lengths))
    absent = -1
    own = (0, 1, 2, 4, absent, 3, *[absent] * 5)
    assert repeats._sources(read, tensors, table, None) == own
    copied = repeats._read(Tensors(q.clone(), k, v, block_table=table, seqused_k=lengths))
    assert repeats._sources(copied, tensors, table, None) is None
    dense = (q, k, v, lengths, *[None] * 6, lengths, *[None] * 5)  # cache_batch_idx
    table = lengths[:, None]
    read = repeats._read(Tensors(q, k, v, block_table=table, seqused_k=lengths))
    assert repeats._sources(read, dense, table, lengths)[3] == 3
    table = torch.arange(2, dtype=torch.int32)[:, None]  # our own: comes after the caller's
    read = repeats._read(Tensors(q, k, v, block_table=table, seqused_k=lengths))
    assert repeats._sources(read, tensors[:4] + (None,) * 12, table, None)[3] == 4


def test_an_append_wants_places_that_stand():
    """k_cache as v_cache would move the lengths, which an append puts in their place."""
    kv, new = torch.zeros(9, 4, 2, 8), torch.zeros(2, 1, 2, 8)
    call = repeats.asked(given(k_cache=kv, v_cache=kv, k=new, v=new), NUMBERS)
    assert call is not None and call.again == ((2, 1), (6, 5))
    assert not repeats._may_append(call.again)
    assert repeats._may_append(((6, 5),)) and repeats._may_append(())
    assert not repeats._may_append(((5, 0),)) and not repeats._may_append(((9, 3),))


@pytest.mark.parametrize("way", ["by key", "recent"])
def test_an_append_in_the_attentions_launch_wants_two_caches(way):
    """K and V in one place, by two tensors, take two launches: values are what was written last."""
    repeats._kept.clear()
    repeats._recent = ()
    call = repeats.asked(given(), NUMBERS)
    guards = repeats._guards(call.tensors)
    found = repeats.Repeat(guards, Launched(), (0, 3, -1), appends=True)
    repeats._kept[call.key] = [found]
    assert find(given()) is found
    if way == "recent":
        repeats._kept.clear()
    else:
        repeats._recent = ()
    cache = torch.zeros(9, 4, 2, 8)
    assert find(given(k_cache=cache, v_cache=cache.view(9, 4, 2, 8))) is None
    assert find(given()) is found
    repeats._kept.clear()
    repeats._recent = ()


def test_an_append_in_the_attentions_launch_is_kept_with_its_tensors(monkeypatch):
    """Its lengths are the caller's: no launch before it makes new ones."""
    names = ("k", "v", "slot_mapping", "rotary_cos", "rotary_sin")
    shapes = ((2, 1, 2, 8), (2, 1, 2, 8), None, (9, 4), (9, 4))
    more = {n: None if s is None else torch.zeros(s) for n, s in zip(names, shapes, strict=True)}
    tensors = given(**more)
    q, k_cache, v_cache, lengths, table, k, v, _, cos, sin, *_ = tensors
    launch = Launched()
    plan = SimpleNamespace(problem=None, append=(None, lambda *a: launch))
    monkeypatch.setattr(repeats.ops, "plan", lambda *a: plan)
    own = Tensors(q, k_cache, v_cache, block_table=table, seqused_k=lengths)
    new = NewTokens(q, k, v, k_cache, v_cache, lengths, table, None, cos, sin)
    call = SimpleNamespace(tensors=own, params=None)
    repeats._kept.clear()
    repeats._keep_at_once(repeats.asked(tensors, NUMBERS), tensors, call, new, False)
    found, places = repeats.lookup(tensors, NUMBERS)[0]
    assert found.appends and found(q, places)[1] == tuple(
        None if x is None else x.data_ptr()
        for x in (q, k_cache, v_cache, table, None, lengths, *[None] * 5, k, v, cos, sin)
    )
    repeats._kept.clear()
    repeats._recent = ()


@pytest.mark.parametrize("way", ["by key", "recent"])
def test_one_tensor_in_two_places_is_told_from_two(way):
    """As one scale for keys and values."""
    scale, other = torch.zeros(1), torch.zeros(1)
    once = given(k=scale, v=other)
    twice = given(k=scale, v=scale)
    for kept, others in ((once, twice), (twice, once)):
        repeats._kept.clear()
        repeats._recent = ()
        call = repeats.asked(kept, NUMBERS)
        found = repeats.Repeat(repeats._guards(call.tensors), Launched(), (0, 5, -1))
        repeats._kept[call.key] = [found]
        assert find(kept) is found
        if way == "recent":
            repeats._kept.clear()
        assert find(kept) is found and find(others) is None
        again = given(k=other, v=other) if kept is twice else given(k=other, v=scale)
        assert find(again) is found
        _, places = repeats.lookup(again, NUMBERS)[0]
        assert len(places) == (6 if kept is twice else 7) and places[5] == other.data_ptr()
    assert repeats._sources((scale, scale), twice, None, None) == (5, 5)
    repeats._kept.clear()
    repeats._recent = ()


def test_calls_on_a_cpu_are_not_kept():
    tensors = given()
    repeats._kept.clear()
    for _ in range(2):
        onchip.attention_with_kvcache(
            *tensors[:3], cache_seqlens=tensors[3], block_table=tensors[4], causal=True
        )
    assert not repeats._kept


def test_the_fields_of_new_tokens_come_in_the_kernels_order():
    names = [name for name in NewTokens.__slots__ if name not in ("interleaved", "in_order")]
    q = torch.zeros(1)
    new = NewTokens(*[q + i for i in range(len(names))])
    assert [int(x) for x in new.tensors] == list(range(len(names)))


def test_grad_mode_is_part_of_what_is_asked():
    with torch.no_grad():
        without = repeats.asked(given(), NUMBERS)
    assert without.key != repeats.asked(given(), NUMBERS).key


def test_threads_do_not_come_between_an_append_and_its_reader():
    """Scratch memory of a stream holds one call's lengths."""
    scratch, wrong = [None], []

    class Append:
        is_ready = True

        def __call__(self, places):
            scratch[0] = places[0]
            time.sleep(1e-4)  # as Triton's launcher does, it lets others run
            return None, None, places[0]

    class Reader:
        is_ready = True

        def __call__(self, q, places):
            time.sleep(1e-4)
            wrong.append(scratch[0] != places[0])
            return q, None

    guards = repeats._guards([torch.zeros(1)])
    repeat = repeats.Repeat(guards, Reader(), (3, 0), None, Append(), (0, 1))

    def run(number):
        for _ in range(20):
            repeat(None, [number, 0, 0, number])

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(wrong) == 80 and not any(wrong)
