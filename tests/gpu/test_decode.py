"""The portable decode on a GPU, at real sizes and in 16 bit, under the contract's rule.

Legend: B batch, S_q / S_k lengths, H query heads, H_kv key and value heads, D head dimension.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import onchip
from onchip import reference
from onchip.kernels.portable.decode_config import suits_direct
from tests.portable_cases import Case, build, check

pytestmark = pytest.mark.gpu
BF16, F16 = torch.bfloat16, torch.float16
GQA = {"heads": 8, "kv_heads": 2}

CASES = {
    "pages_of_16": Case((1,) * 4, (3530, 70, 0, 1), page=16, **GQA),
    "pages_of_1": Case((1, 1), (1530, 0), page=1, **GQA),
    "pages_of_3": Case((1, 1), (1530, 1), page=3, **GQA),
    "pages_of_8": Case((1, 1), (1530, 40), page=8, **GQA),
    "pages_of_256": Case((1, 1), (5300, 256), page=256, **GQA),
    "dense_whole": Case((3, 3), (1900, 1900), causal=True, sinks=True, **GQA),
    "dense_whole_many": Case((60, 60), (1900, 1900), causal=True, window=(700, -1), **GQA),
    "dense": Case((1, 1), (1900, 170), used=True, first=(190, 3), **GQA),
    "several": Case((3, 3), (1530, 40), page=16, causal=True, **GQA),
    "several_window": Case((4, 4), (1530, 40), page=3, causal=True, window=(300, -1), **GQA),
    "sixteen": Case((16, 16), (1900, 3), page=16, causal=True, **GQA),
    "wide": Case((16, 16), (900, 30), heads=32, kv_heads=2, page=16, causal=True),
    "terms": Case(
        (2, 2),
        (900, 3),
        page=16,
        causal=True,
        softcap=3.0,
        alibi=2,
        sinks=True,
        window=(300, -1),
        **GQA,
    ),
    "packed": Case(
        (2, 0, 4), (1900, 17, 5), heads=6, kv_heads=2, page=16, packed=True, causal=True
    ),
    "strided": Case((2, 2), (900, 17), page=16, strided=True, causal=True, **GQA),
}


@pytest.fixture(scope="module")
def decode():
    return pytest.importorskip("onchip.kernels.portable.decode")


@pytest.fixture(autouse=True)
def _poisoned_outputs():
    """Fills memory that torch.empty hands out with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def configs(decode, call):
    """One piece, five pieces, and pieces cut on the device."""
    chosen = replace(decode.choose_decode(call.problem, 132), shares=0)
    yield replace(chosen, splits=1, balanced=False)
    yield replace(chosen, splits=5, balanced=False, min_tiles=1)
    if call.problem.seqused_k:
        yield replace(chosen, splits=2, balanced=True, min_tiles=1)


@pytest.mark.parametrize("name", CASES)
def test_cases(decode, name):
    call = build(replace(CASES[name], dim=128, dim_v=128, dtype=BF16), "cuda")
    for config in configs(decode, call):
        for _ in range(2):  # counters must be 0 again
            check(call, *decode.launch_with(config, call.problem, call.tensors))


DIRECT = {
    "pages_of_1": CASES["pages_of_1"],
    "pages_of_3": CASES["pages_of_3"],
    "pages_of_8": CASES["pages_of_8"],
    "pages_of_16": CASES["pages_of_16"],
    "pages_of_48": Case((1,) * 3, (1530, 47, 49), page=48, **GQA),
    "pages_of_256": CASES["pages_of_256"],
    "dense": Case((1, 1), (1900, 170), used=True, **GQA),
    "dense_whole": Case((1, 1), (1900, 1900), causal=True, **GQA),
    "sinks": Case((1,) * 3, (900, 3, 64), page=16, sinks=True, heads=8, kv_heads=1),
    "one_head": Case((1, 1), (700, 100), page=64, heads=3, kv_heads=3),
    "two_heads": Case((1, 1), (2700, 100), page=64, heads=4, kv_heads=2, sinks=True),
    "six_heads": Case((1,) * 5, (3100, 65, 0, 1, 700), page=16, heads=12, kv_heads=2),
    "window": Case((1,) * 4, (3100, 65, 0, 900), page=16, window=(700, 0), **GQA),
    "window_pages_of_3": Case((1,) * 3, (3100, 65, 1), page=3, window=(130, -1), **GQA),
    "leftpad": Case((1,) * 3, (1900, 170, 90), used=True, first=(190, 3, 80), **GQA),
    "leftpad_window": Case((1,) * 2, (1900, 170), used=True, first=(190, 3), window=(300, 0)),
}
SHORT = ("pages_of_3", "pages_of_256", "dense", "window")


@pytest.mark.parametrize(
    "name, dim, dtype, warps",
    [
        *((name, 128, BF16, 4) for name in DIRECT),
        *((name, 64, BF16, 4) for name in (*SHORT, "one_head", "six_heads", "leftpad")),
        *((name, 128, F16, 4) for name in SHORT),
        *((name, 128, BF16, 2) for name in (*SHORT, "one_head", "six_heads")),
    ],
    ids=str,
)
def test_direct_walk(decode, name, dim, dtype, warps):
    call = build(replace(DIRECT[name], dim=dim, dim_v=dim, dtype=dtype), "cuda")
    assert suits_direct(call.problem)
    few, some, *balanced = configs(decode, call)
    for config in (few, some, replace(some, splits=128), *balanced):
        config = replace(config, rows=8, row_blocks=1, groups=warps, block_n=16 * warps,
                         num_warps=warps, direct=True)  # fmt: skip
        for _ in range(2):  # counters must be 0 again
            check(call, *decode.launch_with(config, call.problem, call.tensors))


def test_an_empty_table_of_sequences_without_keys():
    q = torch.randn(3, 1, 32, 128, device="cuda", dtype=BF16)
    k, v = (torch.randn(4, 16, 8, 128, device="cuda", dtype=BF16) for _ in range(2))
    table, lengths = (torch.zeros(*n, device="cuda", dtype=torch.int32) for n in ((3, 0), (3,)))
    out, lse = onchip.attention_with_kvcache(
        q, k, v, cache_seqlens=lengths, block_table=table, return_lse=True
    )
    assert not out.any() and (lse == -math.inf).all()


def test_keys_before_a_window_are_never_multiplied(decode):
    case = Case((1, 1), (1900, 300), page=16, window=(250, 0), dim=128, dim_v=128, dtype=BF16)
    call = build(replace(case, **GQA), "cuda")
    assert suits_direct(call.problem)
    wanted = [decode.launch_with(c, call.problem, call.tensors) for c in configs(decode, call)]
    for b, length in enumerate(case.lengths_k):
        for token in range(length - 251):
            page = call.tensors.block_table[b, token // 16]
            call.tensors.k[page, token % 16] = call.tensors.v[page, token % 16] = math.nan
        call.tensors.block_table[b, : (length - 251) // 16] = -1
    for config, (out, lse) in zip(configs(decode, call), wanted, strict=True):
        again, lse_again = decode.launch_with(config, call.problem, call.tensors)
        assert torch.equal(again, out) and torch.equal(lse_again, lse)


TALL = {
    "pages_of_16": Case((16,) * 4, (3530, 70, 0, 1), page=16, causal=True, **GQA),
    "pages_of_32": Case((5, 5), (1530, 31), page=32, causal=True, **GQA),
    "pages_of_64": Case((5, 5), (1530, 64), page=64, causal=True, **GQA),
    "pages_of_128": Case((40,) * 3, (1530, 17, 256), page=128, causal=True, **GQA),
    "pages_of_256": Case((20, 20), (5300, 256), page=256, causal=True, sinks=True, **GQA),
    "two_blocks": Case((64,) * 3, (1900, 20, 64), page=16, causal=True, **GQA),
    "not_causal": Case((20, 20), (1900, 33), page=64, **GQA),
    "sees_later_keys": Case((20, 20), (1900, 33), page=64, window=(-1, 7), **GQA),
    "dense": Case((20, 20), (1900, 170), used=True, causal=True, **GQA),
    "dense_whole": Case((20, 20), (1900, 1900), causal=True, sinks=True, **GQA),
    "packed": Case((20, 0, 33), (1900, 17, 80), page=16, packed=True, causal=True, **GQA),
    "one_page": Case((20, 20), (77, 90), page=90, causal=True, **GQA),
    "many": Case((16,) * 40, (500, 3) * 20, page=16, causal=True, heads=16, kv_heads=4),
    "many_rows": Case((48,) * 20, (300, 70) * 10, page=32, causal=True, heads=32, kv_heads=4),
    "one_query": Case((1, 1), (1900, 70), page=16, heads=32, kv_heads=1),
    "one_head": Case((30, 30), (1900, 100), page=16, causal=True, heads=3, kv_heads=3),
    "groups_of_3": Case((30, 30), (1900, 100), page=16, causal=True, heads=6, kv_heads=2),
}


def cut_configs(decode, call):
    """Five pieces, two, as many as a launch merges, pieces that share rows or are cut on device."""
    five, *balanced = list(configs(decode, call))[1:]
    shared = (replace(five, shares=8), replace(five, splits=12, shares=16))
    return [five, replace(five, splits=2), replace(five, splits=12), *shared, *balanced]


def tall_call(case, dim, dtype=BF16):
    """A case of the tall walk, with as many queries of 64 or 256 columns as it takes."""
    most = 64 if dim == 128 else 64 * case.kv_heads // case.heads
    lengths_q = tuple(min(n, most) for n in case.lengths_q)
    return build(replace(case, lengths_q=lengths_q, dim=dim, dim_v=dim, dtype=dtype), "cuda")


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", TALL)
def test_tall_walk(decode, name, dim):
    call = tall_call(TALL[name], dim)
    for config in cut_configs(decode, call):
        assert config.tall
        for _ in range(2):
            check(call, *decode.launch_with(config, call.problem, call.tensors))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case((1,) * 4, (3530, 70, 0, 1), page=16, causal=True, heads=2, kv_heads=2),
        Case((1, 1), (5300, 256), page=256, sinks=True, heads=8, kv_heads=2),
        Case((2, 0, 1), (1900, 17, 80), page=16, packed=True, causal=True, heads=4, kv_heads=1),
        Case((1,) * 40, (500, 3) * 20, page=64, causal=True, heads=16, kv_heads=4),
        Case((7, 7), (1900, 170), used=True, causal=True, heads=1, kv_heads=1),
        Case((3, 3), (1900, 170), page=16, causal=True, heads=8, kv_heads=2, dim=64, dim_v=64),
    ],
    ids=["1", "4", "8", "many", "dense", "12_of_64_columns"],
)
def test_tall_walk_of_few_rows(decode, case, dtype):
    dim = case.dim if case.dim == 64 else 256
    call = build(replace(case, dim=dim, dim_v=dim, dtype=dtype), "cuda")
    for config in cut_configs(decode, call):
        assert config.tall
        for _ in range(2):
            check(call, *decode.launch_with(config, call.problem, call.tensors))


@pytest.mark.parametrize("name", ["pages_of_16", "pages_of_64", "pages_of_256", "two_blocks"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_tall_walk_of_pages_that_hold_head_after_head(decode, name, dim):
    call = tall_call(TALL[name], dim)
    for x in "kv":
        heads_first = getattr(call.tensors, x).transpose(1, 2).contiguous().transpose(1, 2)
        setattr(call.tensors, x, heads_first)
    for config in cut_configs(decode, call):
        check(call, *decode.launch_with(config, call.problem, call.tensors))


WHOLE = ("pages_of_16", "pages_of_256", "two_blocks", "dense_whole", "packed")


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_tall_walk_of_whole_sequences(decode, name, dim):
    call = tall_call(TALL[name], dim, F16)
    config = next(configs(decode, call))
    for _ in range(2):
        check(call, *decode.launch_with(config, call.problem, call.tensors))


@pytest.mark.parametrize("name", ["pages_of_16", "pages_of_256", "two_blocks"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_tall_walk_reads_no_table_entry_past_the_end(decode, name, dim):
    call = tall_call(TALL[name], dim)
    for b, length in enumerate(call.case.lengths_k):
        past = call.tensors.block_table[b, -(-length // call.case.page) :]
        past.fill_((2**31 - 1, -(2**31), 10**6, -1)[b])
    for config in cut_configs(decode, call):
        check(call, *decode.launch_with(config, call.problem, call.tensors))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("queries, dim", [(6, 64), (6, 128), (30, 128), (6, 256)])
def test_tall_walk_keeps_what_is_not_finite_to_its_rows(decode, queries, dim, poison):
    """30 queries of 4 heads: two warpgroups."""
    call = tall_call(Case((queries,), (1500,), heads=4, page=16, causal=True), dim)
    _, _, v = call.sequences[0]
    for key in (3, 1490, 1499):
        page = call.tensors.block_table[0, key // 16]
        for x in (call.tensors.v[page, key % 16], v[key]):
            x[0, key % dim] = poison
    for config in cut_configs(decode, call):
        check(call, *decode.launch_with(config, call.problem, call.tensors))


@pytest.mark.parametrize("seqlen_q, dim", [(16, 64), (16, 128), (48, 128), (1, 256), (16, 256)])
def test_tall_walk_of_a_cache_by_index_and_at_new_addresses(seqlen_q, dim):
    """Repeated calls describe k and v at their own addresses."""
    for seed in range(4):
        torch.manual_seed(seed)
        k, v = (torch.randn(5, 1100, 2, dim, device="cuda", dtype=BF16) for _ in range(2))
        q = torch.randn(3, seqlen_q, 8, dim, device="cuda", dtype=BF16)
        index = torch.tensor([4, 0, 2], device="cuda", dtype=torch.int32)
        lengths = torch.tensor([1100, 1, 333], device="cuda", dtype=torch.int32)
        out = onchip.attention_with_kvcache(
            q, k, v, cache_seqlens=lengths, cache_batch_idx=index, causal=True
        )
        for b, (row, n) in enumerate(zip(index.tolist(), lengths.tolist(), strict=True)):
            keys = (x[row : row + 1, :n] for x in (k, v))
            want, _ = reference.attention(q[b : b + 1], *keys, causal=True)
            torch.testing.assert_close(out[b : b + 1].double(), want, rtol=0, atol=2e-2)


@pytest.mark.parametrize("dims", [(64, 64), (80, 48), (256, 256)], ids=str)
@pytest.mark.parametrize("name", ["pages_of_16", "several", "wide", "packed"])
def test_head_dimensions(decode, name, dims):
    call = build(replace(CASES[name], dim=dims[0], dim_v=dims[1], dtype=F16), "cuda")
    check(call, *decode.launch(call.problem, call.tensors))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("heads", [2, 16])  # the narrow and the wide walk
def test_what_is_not_finite_reaches_exactly_the_rows_that_see_it(decode, heads, poison):
    case = Case((3,), (1500,), heads=heads, page=16, causal=True, dtype=BF16, dim=128, dim_v=128)
    call = build(case, "cuda")
    _, _, v = call.sequences[0]
    page = call.tensors.block_table[0, 1499 // 16]
    for x in (call.tensors.v[page, 1499 % 16], v[1499]):
        x[0, 3] = poison
    check(call, *decode.launch(call.problem, call.tensors))


def _cache(batch, longest, page=16, heads=8, kv_heads=2, dim=128, seqlen_q=1):
    columns = -(-longest // page)
    shape = (batch * columns, page, kv_heads, dim)
    k, v = (torch.randn(shape, device="cuda", dtype=BF16) for _ in range(2))
    table = torch.randperm(batch * columns, device="cuda").int().view(batch, columns)
    q = torch.randn(batch, seqlen_q, heads, dim, device="cuda", dtype=BF16)
    return q, k, v, table


@pytest.mark.parametrize("kv_dtype", [BF16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    "seqlen_q, dim",
    [(1, 128), (2, 128), (4, 128), (16, 128), (40, 128), (1, 256), (16, 256), (1, 64), (16, 64)],
)  # the narrow walk, the wide, the tall
def test_one_split_is_batch_invariant(seqlen_q, dim, kv_dtype):
    q, k, v, table = _cache(37, 3000, seqlen_q=seqlen_q, dim=dim)
    k, v = k.to(kv_dtype), v.to(kv_dtype)
    lengths = torch.randint(0, 3000, (37,), device="cuda").int()
    options = {"causal": True, "num_splits": 1, "return_lse": True}
    out, lse = onchip.attention_with_kvcache(
        q, k, v, cache_seqlens=lengths, block_table=table, **options
    )
    for b in (0, 17, 36):
        own = slice(b, b + 1)
        alone = onchip.attention_with_kvcache(
            q[own], k, v, cache_seqlens=lengths[own], block_table=table[own], **options
        )
        assert torch.equal(alone[0], out[own]) and torch.equal(alone[1], lse[own])


@pytest.mark.parametrize("name", ["pages_of_1", "pages_of_8", "pages_of_16", "sixteen"])
def test_table_entries_past_the_end_are_never_read(decode, name):
    call = build(replace(CASES[name], dim=128, dim_v=128, dtype=BF16), "cuda")
    for b, length in enumerate(call.case.lengths_k):
        past = call.tensors.block_table[b, -(-length // call.case.page) :]
        past.fill_((2**31 - 1, -(2**31), 10**6, -1)[b])
    for config in configs(decode, call):
        check(call, *decode.launch_with(config, call.problem, call.tensors))


def test_every_schedule_is_bitwise_reproducible():
    for batch in (1, 8, 200):
        q, k, v, table = _cache(batch, 4000)
        lengths = torch.randint(0, 4000, (batch,), device="cuda").int()
        outs = [
            onchip.attention_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table)
            for _ in range(5)
        ]
        assert all(torch.equal(outs[0], out) for out in outs)


@pytest.mark.parametrize("seqlen_q", [1, 16])
@pytest.mark.parametrize("batch", [2, 200])
def test_a_cuda_graph_follows_changed_lengths_and_tables(batch, seqlen_q):
    q, k, v, table = _cache(batch, 2000, seqlen_q=seqlen_q)
    lengths = torch.full((batch,), 2000, device="cuda", dtype=torch.int32)

    def call():
        return onchip.attention_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for _ in range(3):
        lengths.copy_(torch.randint(0, 2001, (batch,)))
        lengths[0] = 0  # a padding row
        table.copy_(table.flatten()[torch.randperm(table.numel(), device="cuda")].view_as(table))
        graph.replay()
        assert torch.equal(out, call())
        assert bool((out[0] == 0).all())
        b = batch - 1
        n = int(lengths[b])
        rows = [x[table[b].long()].flatten(0, 1)[None, :n] for x in (k, v)]
        want, _ = reference.attention(q[b : b + 1], *rows)
        torch.testing.assert_close(out[b : b + 1].double(), want, rtol=0, atol=1e-2)


@pytest.mark.parametrize("batch", [1, 200])
def test_a_launch_waits_for_what_earlier_ones_write(batch):
    """Launches overlap; queries, keys, tables and lengths change between them all the same."""
    q, k, v, table = _cache(batch, 1500)
    lengths = torch.full((batch,), 700, device="cuda", dtype=torch.int32)
    tables = [table[:, torch.randperm(table.shape[1])].contiguous() for _ in range(8)]
    tokens = torch.randint(1, 1500, (8, batch), device="cuda").int()
    rows = [torch.randn_like(x) for x in (q, k)]

    def step(i):
        q.add_(rows[0], alpha=0.1)
        k.add_(rows[1], alpha=0.1)
        v.neg_()
        table.copy_(tables[i])
        lengths.copy_(tokens[i])
        return onchip.attention_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table)

    first = [x.clone() for x in (q, k, v)]
    at_once = [step(i) for i in range(8)]
    for x, before in zip((q, k, v), first, strict=True):
        x.copy_(before)
    for i in range(8):
        torch.cuda.synchronize()
        assert torch.equal(step(i), at_once[i])


def test_a_cache_of_more_than_2_31_elements():
    page, heads, dim = 256, 64, 128
    num_pages = (1 << 31) // (page * heads * dim) + 8
    k = torch.empty(num_pages, page, heads, dim, device="cuda", dtype=BF16)
    v = torch.empty_like(k)
    last = torch.arange(num_pages - 4, num_pages, device="cuda", dtype=torch.int32)[None]
    for x in (k, v):
        x[-4:].normal_()
    q = torch.randn(1, 1, heads, dim, device="cuda", dtype=BF16)
    lengths = torch.tensor([1000], device="cuda", dtype=torch.int32)
    out = onchip.attention_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=last)
    want, _ = reference.attention(q, *(x[-4:].flatten(0, 1)[None, :1000] for x in (k, v)))
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-2)


@pytest.mark.parametrize("num_splits", [None, 1, 5])
@pytest.mark.parametrize("seqlen_q", [1, 8, 40])
def test_float8_cache(seqlen_q, num_splits):
    q, k, v, table = _cache(4, 2000, seqlen_q=seqlen_q)
    lengths = torch.tensor([2000, 20, 900, 64], device="cuda", dtype=torch.int32)
    scale = torch.tensor([0.02, 0.03], device="cuda")
    k8, v8 = ((x.float() / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn) for x in (k, v))
    options = {"cache_seqlens": lengths, "block_table": table, "causal": True}
    scales = {"k_scale": scale, "v_scale": scale, "num_splits": num_splits}
    out = onchip.attention_with_kvcache(q, k8, v8, **scales, **options)
    wide = [x.float() * scale[:, None] for x in (k8, v8)]
    want = onchip.attention_with_kvcache(
        q.float(), *wide, cache_seqlens=lengths, block_table=table, causal=True
    )
    torch.testing.assert_close(out.float(), want, rtol=1e-2, atol=4e-3)


@pytest.mark.parametrize("page, dim", [(1, 128), (16, 128), (256, 128), (16, 64), (8, 64)])
def test_float8_cache_of_unequal_lengths(page, dim):
    q, k, v, table = _cache(200, 3000, page=page, dim=dim)
    lengths = torch.randint(0, 3000, (200,), device="cuda").int()
    lengths[:3] = torch.tensor([0, 1, 3000])
    scale = torch.tensor([0.02, 0.03], device="cuda")
    k8, v8 = ((x.float() / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn) for x in (k, v))
    options = {"cache_seqlens": lengths, "block_table": table, "return_lse": True}
    out, lse = onchip.attention_with_kvcache(q, k8, v8, k_scale=scale, v_scale=scale, **options)
    wide = [(x.float() * scale[:, None]).bfloat16() for x in (k8, v8)]
    want, want_lse = onchip.attention_with_kvcache(q, *wide, **options)
    torch.testing.assert_close(out.float(), want.float(), rtol=2e-2, atol=6e-3)
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=2e-2)
