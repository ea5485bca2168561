"""What a call costs, against worked numbers and brute force."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import onchip
from onchip.analysis import bill as bills
from onchip.analysis import cost
from onchip.analysis.bill import Bill, Cache
from onchip.dispatch import human
from onchip.problem import Layout, Mask, Op, Problem

MIB = 1 << 20


def _problem(op=Op.FORWARD, seqlen=16384, heads=1, dtype=torch.float16, mask=None, batch=1):
    return Problem(
        op=op,
        device="cpu",
        dtype=dtype,
        kv_dtype=dtype,
        layout_q=Layout.DENSE,
        layout_k=Layout.DENSE,
        batch=batch,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        tokens_q=batch * seqlen,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=64,
        head_dim_v=64,
        mask=mask or Mask(),
        scale=0.125,
    )


def test_slow_memory_bill_of_16k():
    assert 16384**2 * 2 == 536_870_912 == 512 * MIB
    assert cost.three_step_bytes(_problem()) == 4 * 536_870_912 == 2048 * MIB

    bill = bills.three_step(_problem()).by_tensor()
    assert (bill["s"], bill["p"]) == (1024 * MIB, 1024 * MIB)
    scores, softmax, values = bills.three_step(_problem()).stages
    assert scores.writes == (bills.once("s", 512 * MIB),)
    assert softmax.slow_bytes == 1024 * MIB
    assert values.reads[0] == bills.once("p", 512 * MIB)


@pytest.mark.parametrize(
    ("seqlen", "s_mib", "traffic_mib"), [(4096, 32, 128), (16384, 512, 2048), (32768, 2048, 8192)]
)
def test_slow_memory_bill_of_other_lengths(seqlen, s_mib, traffic_mib):
    problem = _problem(seqlen=seqlen)
    assert cost.score_bytes(problem) == s_mib * MIB
    assert cost.three_step_bytes(problem) == traffic_mib * MIB
    inputs = 4 * seqlen * 64 * 2
    assert bills.three_step(problem).slow_bytes == traffic_mib * MIB + inputs


def test_three_step_backward_moves_seven_matrices():
    problem = _problem(Op.BACKWARD, seqlen=512)
    bill = bills.three_step(problem)
    tensors = bill.by_tensor()
    assert sum(tensors[name] for name in ("p", "dp", "ds")) == cost.three_step_bytes(problem)
    assert bill.flops == 4 * 2 * 512**2 * 64


def test_packing_offsets_and_their_cost():
    lengths_q, lengths_k = [5, 2, 1], [9, 7, 3]
    offsets_q = torch.tensor([0, *lengths_q]).cumsum(0).int()
    offsets_k = torch.tensor([0, *lengths_k]).cumsum(0).int()
    assert offsets_q.tolist() == [0, 5, 7, 8] and offsets_k.tolist() == [0, 9, 16, 19]
    q, k = torch.randn(8, 2, 4), torch.randn(19, 2, 4)
    explained = onchip.explain(
        q,
        k,
        k,
        cu_seqlens_q=offsets_q,
        cu_seqlens_k=offsets_k,
        max_seqlen_q=5,
        max_seqlen_k=9,
    )
    assert explained.upper_bound
    pairs = list(zip(lengths_q, lengths_k, strict=True))
    exact = cost.flops(explained.problem, pairs)
    assert exact == 2 * (5 * 9 + 2 * 7 + 1 * 3) * 2 * (4 + 4) <= explained.flops


def test_flops_and_bytes():
    causal = _problem(seqlen=7, heads=3, mask=Mask(-1, 0), batch=2)
    assert cost.flops(causal) == 4 * 64 * (7 * 8 // 2) * 3 * 2
    tensor = 2 * 7 * 3 * 64 * 2
    assert cost.traffic_bytes(causal) == 4 * tensor + 2 * 7 * 3 * 4
    backward = _problem(Op.BACKWARD, seqlen=7, heads=3, batch=2)
    assert cost.flops(backward) == 10 * 64 * 49 * 3 * 2
    assert cost.traffic_bytes(backward) == 8 * tensor + 2 * 7 * 3 * 4


def test_human_amounts():
    assert human(536_870_912) == "512.0 MiB"
    assert human(999, "FLOP", 1000) == "999 FLOP" and human(1.5e12, "FLOP", 1000) == "1.5 TFLOP"


CASES = {
    "full": {},
    "causal": {"mask": Mask(-1, 0)},
    "window": {"mask": Mask(3, 2), "kv_heads": 2},
    "narrow": {"mask": Mask(0, 0), "d_v": 8},
    "pages": {"mask": Mask(4, 0), "page": 4, "kv_dtype": torch.float8_e4m3fn},
    "float32": {"mask": Mask(-1, 1), "dtype": torch.float32, "kv_heads": 1},
}
LENGTHS = [(5, 9), (7, 7), (9, 3), (1, 12), (0, 4), (3, 0)]


def _varied(op, mask=None, kv_heads=4, d_v=16, page=0, dtype=torch.bfloat16, kv_dtype=None):
    return Problem(
        op=op,
        device="cuda",
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
        layout_q=Layout.PACKED,
        layout_k=Layout.PAGED if page else Layout.PACKED,
        batch=len(LENGTHS),
        seqlen_q=9,
        seqlen_k=12,
        tokens_q=sum(q for q, _ in LENGTHS),
        num_heads=4,
        num_kv_heads=kv_heads,
        head_dim=16,
        head_dim_v=d_v,
        mask=mask or Mask(),
        scale=1.0,
        page_size=page,
        num_pages=16 if page else 0,
    )


def _sees(problem, s_q, s_k, i, j) -> bool:
    at, mask = i + s_k - s_q, problem.mask
    return (mask.left < 0 or j >= at - mask.left) and (mask.right < 0 or j <= at + mask.right)


def _keys_of_tiles(problem, s_q, s_k, block_m, block_n):
    """Keys that each tile of queries reads, by looking at every pair."""
    for row in range(0, s_q, block_m):
        rows = range(row, min(row + block_m, s_q))
        seen = [j for j in range(s_k) if any(_sees(problem, s_q, s_k, i, j) for i in rows)]
        tiles = range(min(seen) // block_n, max(seen) // block_n + 1) if seen else ()
        yield [j for j in range(s_k) if j // block_n in tiles]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("block_m", "block_n"), [(2, 4), (4, 2), (3, 5)])
def test_flash_reads_what_brute_force_counts(case, block_m, block_n):
    problem = _varied(Op.FORWARD, **CASES[case])
    tokens = unique = entries = pairs = 0
    for s_q, s_k in LENGTHS:
        tiles = list(_keys_of_tiles(problem, s_q, s_k, block_m, block_n))
        pairs += sum(_sees(problem, s_q, s_k, i, j) for i in range(s_q) for j in range(s_k))
        tokens += problem.num_heads * sum(map(len, tiles))
        unique += problem.num_kv_heads * len({j for tile in tiles for j in tile})
        if problem.page_size:
            found = [{j // problem.page_size for j in tile} for tile in tiles]
            entries += problem.num_heads * sum(map(len, found))
    bill = bills.flash(problem, block_m, block_n, LENGTHS)
    size, kv_size = problem.dtype.itemsize, problem.kv_dtype.itemsize
    rows = problem.tokens_q * problem.num_heads
    expected = {
        "q": rows * 16 * size,
        "k": tokens * 16 * kv_size,
        "v": tokens * problem.head_dim_v * kv_size,
        "block_table": 4 * entries,
        "out": rows * problem.head_dim_v * size,
        "lse": 4 * rows,
    }
    assert bill.by_tensor() == {name: n for name, n in expected.items() if n}
    assert bill.flops == 2 * 4 * pairs * (16 + problem.head_dim_v) and bill.exps == 4 * pairs
    cached = bills.flash(problem, block_m, block_n, LENGTHS, Cache(1 << 30, 8))
    assert cached.by_tensor()["k"] == unique * 16 * kv_size
    assert cached.saved_by_l2_bytes + cached.slow_bytes == bill.slow_bytes


@pytest.mark.parametrize("case", [name for name in CASES if name != "pages"])
def test_backward_reads_what_brute_force_counts(case):
    problem = _varied(Op.BACKWARD, **CASES[case])
    rows_read = keys_read = pairs = 0
    for s_q, s_k in LENGTHS:
        pairs += sum(_sees(problem, s_q, s_k, i, j) for i in range(s_q) for j in range(s_k))
        keys_read += 4 * sum(map(len, _keys_of_tiles(problem, s_q, s_k, 4, 2)))
        for key in range(0, s_k, 3):
            keys = range(key, min(key + 3, s_k))
            seen = [i for i in range(s_q) if any(_sees(problem, s_q, s_k, i, j) for j in keys)]
            tiles = range(min(seen) // 2, max(seen) // 2 + 1) if seen else ()
            rows_read += 4 * sum(i // 2 in tiles for i in range(s_q))
    bill = bills.backward(problem, (2, 3), (4, 2), LENGTHS)
    pre, dkdv, dq = bill.stages
    size, d_v, rows = problem.dtype.itemsize, problem.head_dim_v, problem.tokens_q * 4
    tokens = sum(s_k for _, s_k in LENGTHS) * problem.num_kv_heads
    walked = {t.tensor: t.slow_bytes for t in dkdv.reads}
    assert walked == {
        "k": tokens * 16 * size, "v": tokens * d_v * size, "q": rows_read * 16 * size,
        "dout": rows_read * d_v * size, "lse": 4 * rows_read, "delta": 4 * rows_read,
    }  # fmt: skip
    walked = {t.tensor: t.slow_bytes for t in dq.reads}
    assert walked["k"] == keys_read * 16 * size and walked["v"] == keys_read * d_v * size
    assert walked["q"] == rows * 16 * size
    assert pre.slow_bytes == rows * (2 * d_v * size + 4)
    assert dkdv.flops == 2 * 4 * pairs * 2 * (16 + d_v)
    assert dq.flops == 2 * 4 * pairs * (2 * 16 + d_v)
    # Recomputation: Q K^T and dO V^T once more than the five products need.
    assert bill.flops == cost.flops(problem, LENGTHS) + 2 * 4 * pairs * (16 + d_v)
    assert bill.exps == 2 * 4 * pairs
    _, dv, dk, same = bills.backward(problem, (2, 3), (4, 2), LENGTHS, dv=(2, 3)).stages
    assert same == dq and dv.flops == 2 * 4 * pairs * (16 + d_v)
    assert dk.flops == 2 * 4 * pairs * (2 * 16 + d_v) and dk.reads == dkdv.reads
    assert {t.tensor for t in dv.reads} == {"k", "q", "dout", "lse"}
    assert dk.writes + dv.writes == dkdv.writes


def test_lengths_make_costs_exact():
    problem = _varied(Op.FORWARD, kv_heads=2)
    tokens = sum(k for _, k in LENGTHS)
    assert cost.tokens_k(problem, LENGTHS) == tokens < cost.tokens_k(problem)
    rows = problem.tokens_q * 4
    exact = (2 * rows * 16 + 2 * tokens * 2 * 16) * 2 + 4 * rows
    assert cost.traffic_bytes(problem, LENGTHS) == exact < cost.traffic_bytes(problem)
    pairs = sum(q * k for q, k in LENGTHS)
    assert cost.three_step_bytes(problem, iter(LENGTHS)) == 4 * 4 * pairs * 2
    assert bills.three_step(problem, iter(LENGTHS)).by_tensor()["s"] == 2 * 4 * pairs * 2


def test_traffic_falls_with_on_chip_memory():
    """O(N^2 d^2 / M) (Dao et al. 2022, theorem 2) with tiles of M / (4 d) rows."""
    seqlen, d = 16384, 64
    problem = _problem(seqlen=seqlen)
    for memory in (1 << 14, 1 << 15, 1 << 16):
        bill = bills.flash(problem, memory // (4 * d), 64).by_tensor()
        assert bill["k"] + bill["v"] == 16 * seqlen**2 * d**2 // memory
    doubled = bills.flash(_problem(seqlen=2 * seqlen), 256, 64).by_tensor()
    assert doubled["k"] == 4 * bill["k"]


def test_without_online_softmax_keys_are_read_three_times():
    once = bills.flash(_problem(), 128, 64)
    thrice = bills.fused_without_online_softmax(_problem(), 128, 64)
    assert thrice.by_tensor()["k"] == 3 * once.by_tensor()["k"]
    assert thrice.by_tensor()["v"] == once.by_tensor()["v"]
    assert thrice.flops == 2 * once.flops and thrice.exps == 2 * once.exps
    assert "s" not in thrice.by_tensor()


def test_cache_serves_what_fits_or_what_a_wave_shares():
    cache = Cache(1000, 8)
    assert cache.slow_bytes(1000, 64_000, 64) == 1000
    assert cache.slow_bytes(2000, 128_000, 64) == 8 * 2000  # 64 walks, 8 at a time
    assert cache.slow_bytes(2000, 6000, 64) == 6000
    grouped = replace(_problem(seqlen=512, heads=8), num_kv_heads=2)
    assert bills.flash(grouped, 64, 64).by_tensor()["k"] == 8 * 8 * 512 * 64 * 2
    cached = bills.flash(grouped, 64, 64, cache=Cache(1 << 20, 8)).by_tensor()
    assert cached["k"] == 2 * 512 * 64 * 2


def test_decode():
    """32 / 8 heads, D = 128, 4k keys in bf16: 16 MiB of K and V."""
    sizes = {"num_kv_heads": 8, "head_dim": 128, "head_dim_v": 128, "seqlen_q": 1, "tokens_q": 1}
    problem = replace(_problem(seqlen=4096, heads=32, dtype=torch.bfloat16), **sizes)
    one: Bill = bills.decode(problem)
    tensors = one.by_tensor()
    assert tensors["k"] + tensors["v"] == 16 * MIB
    assert one.slow_bytes == 16 * MIB + 2 * 32 * 128 * 2 + 32 * 4
    split = bills.decode(problem, 4)
    parts = 4 * 32 * (128 + 1) * 4
    assert split.slow_bytes == one.slow_bytes + 2 * parts
    assert split.stages[1].flops == 0 and split.flops == one.flops == 4 * 4096 * 32 * 128
    windowed = replace(problem, mask=Mask(255, 0))
    assert bills.decode(windowed).by_tensor()["k"] == 256 * 8 * 128 * 2


def test_store():
    problem = replace(_problem(Op.STORE, seqlen=10, heads=2), kv_dtype=torch.float8_e4m3fn)
    bill = bills.store(problem)
    assert bill.slow_bytes == cost.traffic_bytes(problem) + 10 * 8
    assert bill.flops == 0 and cost.three_step_bytes(problem) == 0
