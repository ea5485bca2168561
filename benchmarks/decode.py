"""Times the decode against FlashAttention-3 where it is installed, and writes JSON.

CUDA graphs of ten calls, replayed in interleaved rounds; medians. Host time is that of eager
calls. Rows are those of the peers' table, pages of 1 and 8, several and many queries, unequal
lengths and equal ones of the same sum, a float8 cache, a shared prefix, and appends. Beside them
stands what a kernel that only reads needs for as many bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import NamedTuple

import torch
import triton
import triton.language as tl

import onchip
from onchip.bench.attention import device_report
from onchip.bench.timing import graph_of
from onchip.paging.cascade import Cascade, of_pages

CALLS_IN_GRAPH = 10


@triton.jit
def read_only(source, sums, count, BLOCK: tl.constexpr):
    """Reads `count` words and keeps their sum, so that no load can be left out."""
    total = tl.zeros([BLOCK], tl.int32)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in tl.range(first, count, tl.num_programs(0).to(tl.int64) * BLOCK, num_stages=2):
        place = start + tl.arange(0, BLOCK)
        total += tl.load(source + place, mask=place < count, other=0)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def readers(num_bytes: int) -> dict:
    """Calls that read so many bytes, with several sizes of programs: the fastest counts."""
    count = num_bytes // 4
    words = torch.randint(-(2**31), 2**31 - 1, (count,), device="cuda", dtype=torch.int32)
    sums = torch.empty(8192, device="cuda", dtype=torch.int32)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    found = {}
    for block, programs in ((4096, 4), (4096, 8), (8192, 4), (8192, 8), (16384, 2)):
        found[f"read {block} x {programs}"] = lambda block=block, programs=programs: read_only[
            (programs * num_sms,)
        ](words, sums, count, block, num_warps=8)
    return found


class Row(NamedTuple):
    """One shape; `lengths` of each sequence."""

    heads: int
    kv_heads: int
    lengths: tuple[int, ...]
    page: int
    seqlen_q: int = 1
    float8: bool = False
    name: str = ""
    shared: int = 0  # tokens that all sequences begin with
    append: bool = False  # one new token each, rotated
    dim: int = 128


def rows(quick: bool) -> list[Row]:
    """The peers' 38 rows, then what they lack."""
    shapes = [(1, 4096), (1, 32768), (1, 131072), (16, 4096), (64, 4096), (128, 8192), (32, 32768)]
    found = []
    for heads, kv_heads in ((32, 8),) if quick else ((32, 8), (32, 32), (64, 8)):
        for batch, length in shapes:
            if kv_heads == 32 and batch * length > 64 * 8192:
                continue
            found += [Row(heads, kv_heads, (length,) * batch, page) for page in (16, 256)]
    found += [Row(32, 8, (4096,) * 64, page, name="page") for page in (1, 8)]
    found += [Row(32, 8, (32768,), page, name="page") for page in (1, 8)]
    generator = torch.Generator().manual_seed(0)
    log_uniform = 128 * 256 ** torch.rand(64, generator=generator)
    mixed = {"log-uniform": log_uniform.int().tolist(), "one long": [1024] * 63 + [131072]}
    for name, lengths in mixed.items():
        found.append(Row(32, 8, tuple(lengths), 16, name=name))
        found.append(Row(32, 8, (sum(lengths) // 64,) * 64, 16, name=f"as {name}"))
    found += [Row(32, 8, (16384,) * 8, 16, n, name="speculative") for n in (2, 4, 8, 16)]
    found += [Row(32, 8, (32768,), 16, n, name="speculative") for n in (2, 4, 8, 12, 16)]
    found += [Row(64, 8, (32768,), 16, n, name="speculative") for n in (4, 16)]
    found += [Row(64, 8, (16384,) * 8, 16, n, name="speculative") for n in (4, 16)]
    found.append(Row(32, 32, (8192,), 16, 16, name="speculative"))
    shapes = [(1, 32768), (8, 4096), (8, 16384), (32, 4096)]
    for heads, n in ((32, 20), (32, 32), (32, 64), (64, 32), (64, 64)):
        found += [Row(heads, 8, (length,) * b, 16, n, name="many queries") for b, length in shapes]
    found += [Row(64, 8, (length,) * b, 16, 16, name="many queries") for b, length in shapes[1::2]]
    uniform = 1024 + 7168 * torch.rand(64, generator=generator)
    unequal = tuple(uniform.int().tolist())
    for heads, n, batch in ((32, 8, 64), (32, 20, 64), (32, 32, 64), (32, 32, 32), (64, 16, 32)):
        found.append(Row(heads, 8, unequal[:batch], 16, n, name="unequal"))
    found += [Row(32, 8, unequal, 16, n, name="unequal", dim=d) for d in (64, 256) for n in (8, 32)]
    for n in (1, 2, 8, 32):
        shapes = ((32768,), (8192,) * 8, (4096,) * 32)
        found += [Row(32, 8, x, 16, n, name="other D", dim=d) for d in (64, 256) for x in shapes]
    found += [Row(32, 8, (8192,) * 64, 16, float8=on, name="float8") for on in (False, True)]
    found.append(Row(32, 8, (4096,), 16, append=True, name="append"))
    found.append(Row(32, 8, (4096,) * 64, 16, append=True, name="append"))
    found.append(Row(32, 8, (17408,) * 64, 16, shared=16384, name="shared"))
    return found


def calls_of(row: Row, flash) -> tuple[dict, int]:
    """name -> call, and the bytes of K and V that count."""
    batch, longest = len(row.lengths), max(row.lengths)
    columns = -(-longest // row.page)
    needed = [-(-n // row.page) for n in row.lengths]
    shape = (sum(needed), row.page, row.kv_heads, row.dim)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    order = torch.randperm(sum(needed), device="cuda").int()
    table = torch.zeros(batch, columns, dtype=torch.int32, device="cuda")
    start = 0
    for b, count in enumerate(needed):
        table[b, :count] = order[start : start + count]
        start += count
    lengths = torch.tensor(row.lengths, dtype=torch.int32, device="cuda")
    q = torch.randn(batch, row.seqlen_q, row.heads, row.dim, device="cuda", dtype=torch.bfloat16)
    if row.shared:
        table[:, : row.shared // row.page] = table[0, : row.shared // row.page]
    extra = {}
    new = {}
    if row.append:
        lengths -= 1
        new["k"], new["v"] = (torch.randn_like(q[:, :, : row.kv_heads]) for _ in range(2))
        angles = (longest, row.dim // 2)
        new["rotary_cos"], new["rotary_sin"] = (
            torch.randn(angles, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
    if row.float8:
        scale = torch.full((row.kv_heads,), 0.02, device="cuda")
        extra = {"k_scale": scale, "v_scale": scale}
        k, v = ((x / 0.02).clamp(-448, 448).to(torch.float8_e4m3fn) for x in (k, v))

    def ours():
        return onchip.attention_with_kvcache(
            q, k, v, cache_seqlens=lengths, block_table=table, causal=True, **extra, **new
        )

    def theirs():
        return flash(q, k, v, cache_seqlens=lengths, page_table=table, causal=True, **new)

    calls = {"onchip": ours}
    if row.shared:
        cascade = cascade_of(row, table)
        calls["cascade"] = lambda: cascade.attention(q, k, v)
    if flash is not None and not row.float8:
        calls["fa3"] = theirs
    return calls, 2 * sum(row.lengths) * row.kv_heads * row.dim * k.element_size()


def cascade_of(row: Row, table: torch.Tensor) -> Cascade:
    """The row's sequences, whose first tokens are the same ones."""
    pages = table.tolist()
    return of_pages(pages, list(row.lengths), row.seqlen_q, row.page, lambda x: x.cuda())


def host_us(call) -> float:
    """Median host time of an eager call."""
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(5):
            call()
        times.append((time.perf_counter() - start) / 5 * 1e6)
    return statistics.median(times)


def gpu_us(graphs: dict, num_rounds: int) -> dict[str, float]:
    """Median time of a call of each graph, in interleaved rounds."""
    times = {name: [] for name in graphs}
    for _ in range(num_rounds):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / CALLS_IN_GRAPH * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(row: Row, flash, num_rounds: int) -> dict:
    """One row's figures."""
    calls, num_bytes = calls_of(row, flash)
    graphs, host = {}, {}
    for name, call in list(calls.items()):
        try:
            graphs[name], host[name] = graph_of(call, CALLS_IN_GRAPH), host_us(call)
        except Exception as error:
            if name == "onchip":
                raise
            print(f"{name}: {type(error).__name__} {str(error)[:100]}")
    for name, call in readers(num_bytes).items():
        graphs[name] = graph_of(call, CALLS_IN_GRAPH)
    times = gpu_us(graphs, num_rounds)
    reads = [times.pop(name) for name in list(times) if name.startswith("read")]
    times["read"] = min(reads)
    found = row._asdict() | {"lengths": [len(row.lengths), max(row.lengths)], "bytes": num_bytes}
    found |= {f"{name}_us": round(t, 2) for name, t in times.items()}
    found |= {f"{name}_tbps": round(num_bytes / t / 1e6, 3) for name, t in times.items()}
    return found | {f"{name}_host_us": round(t, 1) for name, t in host.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one head count only")
    parser.add_argument("--rounds", type=int, default=21, help="times that each call is measured")
    parser.add_argument("--only", help="rows of this name only; '' for the peers' rows")
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args()
    try:
        from flash_attn_interface import flash_attn_with_kvcache as flash
    except ImportError:
        flash = None
    results = []
    report = {**device_report(), "unit": "us", "rows": results}
    for row in rows(options.quick):
        if options.only is not None and row.name != options.only:
            continue
        try:
            found = measure(row, flash, options.rounds)
        except Exception as error:
            print("FAILED", row._replace(lengths=()), type(error).__name__, str(error)[-200:])
            continue
        results.append(found)
        ratio = found["fa3_us"] / found["onchip_us"] if "fa3_us" in found else 0
        host = [found.get(f"{n}_host_us") for n in ("onchip", "fa3")]
        ours = f"onchip {found['onchip_us']:8.1f} us {found['onchip_tbps']:.2f} TB/s"
        theirs = f"fa3 {found.get('fa3_us', 0):8.1f} us, ratio {ratio:.2f}, host {host}"
        theirs += f", of a read {found['read_us'] / found['onchip_us']:.2f}"
        if row.shared:
            theirs += f", cascade {found['cascade_us']:.1f} us"
        shape = f"{row.heads}/{row.kv_heads} D {row.dim} {found['lengths']} page {row.page}"
        shape += f" S_q {row.seqlen_q}"
        print(f"{row.name or 'row':12} {shape} {ours} {theirs}", flush=True)
        if options.out:
            with open(options.out, "w") as file:
                json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
