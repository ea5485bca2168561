"""Calls other than dense squares on a GPU: a window, fewer key and value heads, packed sequences,
sums in a fixed order, memory, a long layer.

Each is held against onchip's own dense call of the same kernel, measured in turns; the layer of a
long sequence against peers.

Legend: B batch, N sequence length, T packed tokens, H heads, D head dimension.
"""

from __future__ import annotations

import functools
import itertools
import random
import statistics
from collections.abc import Callable, Iterator

import torch

from onchip.api import attention, attention_varlen
from onchip.bench.timing import interleaved_device_ms

TOKENS, WIDTH = 16384, 2048
DIMS, LENGTHS = (64, 128, 256), (1024, 4096, 16384)
WINDOW = 1024
HEADS, KV_HEADS = 32, 8
NUM_SEQUENCES, SHORTEST, LONGEST = 64, 64, 4096


def _leaves(*shape: int) -> list[torch.Tensor]:
    """Random q, k, v that require a gradient."""
    return [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    ]


def _parts(call: Callable, leaves: list[torch.Tensor]) -> dict[str, Callable[[], object]]:
    """Forward and backward of one call, apart."""
    data = [x.detach() for x in leaves]
    out = call(*leaves)
    dout = torch.randn_like(out)
    return {
        "forward": lambda: call(*data),
        "backward": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
    }


def _medians_us(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    times_ms = interleaved_device_ms(runs, rounds, 4.0)
    return {name: 1e3 * statistics.median(each) for name, each in times_ms.items()}


def window(dim: int, rounds: int, kernel: str | None) -> list[dict]:
    """Time of a causal window of 1024 keys against full causal attention, N = 16k."""
    leaves = _leaves(1, TOKENS, WIDTH // dim, dim)
    call = functools.partial(attention, causal=True, kernel=kernel)
    full = _parts(call, leaves)
    cut = _parts(functools.partial(call, window=(WINDOW, 0)), leaves)
    rows = []
    for part in full:
        us = _medians_us({"full": full[part], "window": cut[part]}, rounds)
        ratio = us["window"] / us["full"]
        rows.append({"case": "window", "part": part, "dim": dim, **us, "of_causal": ratio})
    return rows


def groups(dim: int, length: int, rounds: int, kernel: str | None) -> list[dict]:
    """Time with 8 key and value heads for 32 query heads against 32 of both."""
    batch = TOKENS // length
    q, k, v = _leaves(batch, length, HEADS, dim)
    few = [x.detach()[:, :, :KV_HEADS].contiguous().requires_grad_() for x in (k, v)]
    rows = []
    for causal in (False, True):
        call = functools.partial(attention, causal=causal, kernel=kernel)
        equal, grouped = _parts(call, [q, k, v]), _parts(call, [q, *few])
        for part in equal:
            us = _medians_us({"equal": equal[part], "grouped": grouped[part]}, rounds)
            row = {"case": "groups", "part": part, "dim": dim, "length": length, "causal": causal}
            rows.append({**row, **us, "of_equal": us["equal"] / us["grouped"]})
    return rows


def lengths() -> list[int]:
    """64 sequence lengths, always the same."""
    draw = random.Random(0)
    return [draw.randint(SHORTEST, LONGEST) for _ in range(NUM_SEQUENCES)]


def varlen(dim: int, causal: bool, rounds: int, kernel: str | None) -> list[dict]:
    """FLOP/s of packed sequences against those of a dense batch of their mean length."""
    sizes, heads = lengths(), WIDTH // dim
    mean = round(statistics.mean(sizes))
    offsets = torch.tensor([0, *sizes], device="cuda").cumsum(0).int()
    packed = _parts(
        lambda q, k, v: attention_varlen(
            q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=max(sizes),
            max_seqlen_k=max(sizes), causal=causal, kernel=kernel,
        ),
        _leaves(sum(sizes), heads, dim),
    )  # fmt: skip
    square = _parts(
        functools.partial(attention, causal=causal, kernel=kernel),
        _leaves(NUM_SEQUENCES, mean, heads, dim),
    )
    work = sum(n * n for n in sizes) / (NUM_SEQUENCES * mean * mean)
    rows = []
    for part in packed:
        us = _medians_us({"dense": square[part], "packed": packed[part]}, rounds)
        row = {"case": "varlen", "part": part, "dim": dim, "causal": causal, **us}
        rows.append({**row, "of_dense": work * us["dense"] / us["packed"]})
    return rows


def memory(kernel: str | None, length: int = 65536, heads: int = 16, dim: int = 128) -> dict:
    """Peak memory of forward and backward over that of inputs, outputs and gradients."""
    leaves = _leaves(1, length, heads, dim)
    dout = torch.randn_like(leaves[0])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attention(*leaves, causal=True, kernel=kernel)
    grads = torch.autograd.grad(out, leaves, dout)  # type: ignore[arg-type]
    tensor_bytes = leaves[0].nbytes
    named_bytes = tensor_bytes * (len(leaves) + 1 + 1 + len(grads))  # inputs, dout, out, grads
    peak_bytes = torch.cuda.max_memory_allocated() - before + 4 * tensor_bytes
    return {"case": "memory", "length": length, "of_tensors": peak_bytes / named_bytes}


def deterministic(dim: int, length: int, causal: bool, rounds: int, kernel: str | None) -> dict:
    """TFLOP/s of the backward with sums in a fixed order and without."""
    leaves = _leaves(TOKENS // length, length, WIDTH // dim, dim)
    runs = {}
    for name in ("default", "deterministic"):
        call = functools.partial(
            attention, causal=causal, kernel=kernel, deterministic=name != "default"
        )
        runs[name] = _parts(call, leaves)["backward"]
    us = _medians_us(runs, rounds)
    flops = 10 * TOKENS * length * WIDTH / (2 if causal else 1)
    facts = {"case": "deterministic", "dim": dim, "length": length, "causal": causal}
    return {**facts, "tflops": {name: flops / 1e6 / each for name, each in us.items()}}


LAYER_LENGTH, LAYER_HEADS, LAYER_DIM = 65536, 16, 128


def layer(calls: dict[str, Callable], rounds: int = 3) -> list[dict]:
    """Time and peak memory of a causal layer's forward and backward, B = 1.

    Args:
        calls: name -> function of q, k, v (B, N, H, D) and causal; one that fails is left out.
        rounds: times that each is measured.

    Returns:
        A row for each call: `ms`, and `peak_mib` over what is allocated before: q, k, v and dout.
    """
    leaves = _leaves(1, LAYER_LENGTH, LAYER_HEADS, LAYER_DIM)
    dout = torch.randn_like(leaves[0])
    runs, rows = {}, []
    for name, call in calls.items():

        def run(call=call):
            return torch.autograd.grad(call(*leaves, True), leaves, dout)

        try:
            run()
            runs[name] = run
            rows.append({"case": "layer", "name": name, "peak_mib": _peak_mib(run)})
        except Exception as error:
            print(f"{name} left out: {type(error).__name__}: {str(error)[:80]}", flush=True)
    times_ms = interleaved_device_ms(runs, rounds)
    return [{**row, "ms": statistics.median(times_ms[row["name"]])} for row in rows]


def _peak_mib(run: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20)


def measure(rounds: int, kernel: str | None) -> Iterator[dict]:
    """Rows of every case, each as soon as it is measured; one that fails is left out."""
    jobs: list[Callable[[], list[dict]]] = [lambda: [memory(kernel)]]
    for dim in DIMS:
        jobs.append(functools.partial(window, dim, rounds, kernel))
        for length in LENGTHS[1:]:
            jobs.append(functools.partial(groups, dim, length, rounds, kernel))
        for causal in (False, True):
            jobs.append(functools.partial(varlen, dim, causal, rounds, kernel))
    for dim, length, causal in itertools.product(DIMS, LENGTHS, (False, True)):
        row = functools.partial(deterministic, dim, length, causal, rounds, kernel)
        jobs.append(lambda row=row: [row()])
    for job in jobs:
        try:
            yield from job()
        except Exception as error:
            print(f"left out: {type(error).__name__}: {str(error)[:100]}", flush=True)
        torch.cuda.empty_cache()
