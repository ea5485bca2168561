"""Attention that appends itself: the same bits as by two launches, whatever memory held before.

Legend: N page size.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import onchip
from onchip import repeats

pytestmark = pytest.mark.gpu
BF16, F16 = torch.bfloat16, torch.float16
LENGTHS = (0, 1, 15, 16, 62, 63, 64, 65, 127, 128, 700, 1533)


@dataclass(frozen=True)
class Case:
    """One call's shapes."""

    lengths: tuple[int, ...] = LENGTHS
    page: int = 16  # 0 for a dense cache
    heads: int = 8
    kv_heads: int = 2
    dim: int = 128
    dtype: torch.dtype = BF16
    pairs: int = 64
    interleaved: bool = False
    angles: torch.dtype = torch.float32
    packed: bool = False  # q, k and v side by side in memory
    leftpad: bool = False
    rows: bool = False  # whether a dense cache's rows are named
    sinks: bool = False
    options: tuple = ()


CASES = {
    "pages_of_16": Case(),
    "pages_of_1": Case(page=1, pairs=32),
    "pages_of_3": Case(page=3, interleaved=True),
    "pages_of_8": Case(page=8, angles=BF16),
    "pages_of_48": Case(page=48, dtype=F16),
    "pages_of_256": Case(page=256, packed=True),
    "dense": Case(page=0),
    "dense_rows": Case(page=0, rows=True, pairs=20, interleaved=True),
    "leftpad": Case(page=0, leftpad=True),
    "as_it_is": Case(pairs=0),
    "as_it_is_dense": Case(pairs=0, page=0, packed=True),
    "narrow": Case(dim=64, pairs=32),
    "narrow_interleaved": Case(dim=64, pairs=16, interleaved=True, page=1),
    "three_heads": Case(heads=3, kv_heads=3),
    "six_of_a_group": Case(heads=12, kv_heads=2, sinks=True),
    "eight_of_a_group": Case(heads=8, kv_heads=1, packed=True),
    "window": Case(options=(("window", (50, 0)),)),
    "window_of_none": Case(page=3, options=(("window", (0, 0)),)),
    "not_causal": Case(options=(("causal", False),)),
    "one_piece": Case(options=(("num_splits", 1),)),
    "many_pieces": Case(options=(("num_splits", 24),)),
    "one_short": Case(lengths=(3,)),
    "one_empty": Case(lengths=(0,)),
    "one_long": Case(lengths=(4095,), heads=32, kv_heads=8),
    "one_long_of_256": Case(lengths=(4096,), heads=32, kv_heads=32, page=256),
    "balanced": Case(lengths=LENGTHS * 4, heads=32, kv_heads=8),
    "balanced_pages_of_1": Case(lengths=LENGTHS * 4, heads=32, kv_heads=8, page=1, pairs=0),
    "balanced_dense": Case(lengths=(1533,) * 40, heads=32, kv_heads=8, page=0),
}


def made(case: Case) -> dict:
    """Arguments of a call; what a sequence's tokens do not fill is NaN."""
    batch, width = len(case.lengths), max(case.lengths) + 1
    page = case.page or width + 7
    columns = -(-width // page) + (case.page > 0)
    heads = (case.heads, case.kv_heads, case.kv_heads)
    if case.packed:
        beside = torch.randn(batch, 1, sum(heads), case.dim, device="cuda", dtype=case.dtype)
        q, k, v = beside.split(heads, 2)
    else:
        q, k, v = (
            torch.randn(batch, 1, n, case.dim, device="cuda", dtype=case.dtype) for n in heads
        )
    shape = (batch * columns + 3, page, case.kv_heads, case.dim)
    caches = [torch.randn(shape, device="cuda", dtype=case.dtype) for _ in range(2)]
    table = torch.randperm(shape[0], device="cuda")[: batch * columns].view(batch, columns).int()
    if case.page == 0 and not case.rows:
        caches, table = [x[:batch] for x in caches], torch.arange(batch, device="cuda")[:, None]
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")
    valid = torch.zeros(len(caches[0]) * page, dtype=torch.bool, device="cuda")
    for b, length in enumerate(case.lengths):
        place = torch.arange(length, device="cuda")
        valid[table[b, place // page].long() * page + place % page] = True
    for x in caches:
        x[~valid.view(-1, page)] = torch.nan
    given = {"q": q, "k": k, "v": v, "k_cache": caches[0], "v_cache": caches[1]}
    given["cache_seqlens"] = lengths
    if case.page > 0:
        given["block_table"] = table
    elif case.rows:
        given["cache_batch_idx"] = table[:, 0].contiguous()
    if case.pairs:
        given["rotary_cos"], given["rotary_sin"] = (
            torch.randn(width, case.pairs, device="cuda", dtype=case.angles) for _ in range(2)
        )
        given["rotary_interleaved"] = case.interleaved
    if case.leftpad:
        given["cache_leftpad"] = torch.randint_like(lengths, 0, 80)  # at times beyond the end
    if case.sinks:
        given["sinks"] = torch.randn(case.heads, device="cuda")
    return {"causal": True, **given, **dict(case.options), "return_lse": True}


@pytest.fixture
def decode():
    repeats._kept.clear()
    repeats._recent = ()
    return pytest.importorskip("onchip.kernels.portable.decode")


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


@pytest.mark.parametrize("name", CASES)
def test_one_launch_gives_the_bits_of_two(decode, name, monkeypatch):
    case = CASES[name]
    given = made(case)
    caches = {key: given.pop(key) for key in ("k_cache", "v_cache")}
    copies = [{key: x.clone() for key, x in caches.items()} for _ in range(3)]
    found = [onchip.attention_with_kvcache(**given, **mine) for mine in copies[:2]]
    kept = [x for each in repeats._kept.values() for x in each]
    assert len(kept) == 1 and kept[0].appends and kept[0]._append is None, "two launches"
    repeats._kept.clear()
    repeats._recent = ()
    monkeypatch.setattr(decode, "appends_itself", lambda *a: False)
    found.append(onchip.attention_with_kvcache(**given, **copies[2]))
    kept = [x for each in repeats._kept.values() for x in each]
    assert kept[0]._append is not None
    assert not any(x.isnan().any() for x in found[2])
    for i in range(2):
        for one, two in zip(found[i], found[2], strict=True):
            assert torch.equal(bits(one), bits(two)), f"call {i}"
        for key in caches:
            assert torch.equal(bits(copies[i][key]), bits(copies[2][key])), f"call {i} {key}"
    assert not torch.equal(bits(copies[2]["k_cache"]), bits(caches["k_cache"]))
    repeats._kept.clear()


def test_pages_of_minus_one_and_tokens_past_the_table_store_nothing(decode):
    """As in a batch that is padded for a graph."""
    given = made(Case(lengths=(0, 40, 0, 60)))
    given["block_table"][2] = -1
    given["block_table"] = given["block_table"][:, :3].contiguous()
    given["cache_seqlens"][3] = 48  # three pages are full
    before = {key: given[key].clone() for key in ("k_cache", "v_cache")}
    for _ in range(2):
        out, lse = onchip.attention_with_kvcache(**given)
    torch.cuda.synchronize()
    assert not out[:2].isnan().any() and not lse[:2].isnan().any()
    for key, x in before.items():
        changed = (bits(given[key]) != bits(x)).flatten(2).any(-1)
        table = given["block_table"].long()
        want = torch.zeros_like(changed)
        want[table[0, 0], 0] = want[table[1, 2], 8] = True
        assert torch.equal(changed, want)


def test_steps_one_after_another_see_what_the_last_one_appended(decode):
    """Launches overlap; each must wait for the one before it."""
    given = made(Case(lengths=(4000,), heads=32, kv_heads=8))
    given["rotary_cos"], given["rotary_sin"] = (torch.randn(4200, 64, device="cuda") for _ in "cs")
    given["block_table"] = torch.randperm(300, device="cuda").int()[None]
    shape = (300, *given["k_cache"].shape[1:])
    caches = {key: torch.randn(shape, device="cuda").to(BF16) for key in ("k_cache", "v_cache")}
    given = {key: x for key, x in given.items() if key not in caches}
    one, two = ({key: x.clone() for key, x in caches.items()} for _ in range(2))
    lengths = given.pop("cache_seqlens")
    steps = [lengths + i for i in range(64)]
    found = [onchip.attention_with_kvcache(**given, **one, cache_seqlens=n)[0] for n in steps]
    for n, out in zip(steps, found, strict=True):
        want = onchip.attention_with_kvcache(**given, **two, cache_seqlens=n)[0]
        torch.cuda.synchronize()
        assert torch.equal(out, want)
    assert all(torch.equal(one[key], two[key]) for key in one)
