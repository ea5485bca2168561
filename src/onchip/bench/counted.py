"""What runs under Nsight Compute: calls, each warmed up, between the profiler's start and stop.

Usage: ncu --profile-from-start off ... python -m onchip.bench.counted NAME ...

Behind each call a kernel that only waits runs, so that the counts can be told apart
(`counters.apart`).

Sizes are such that outputs are far larger than an L2 cache, which keeps what was written last:
writes still in it when a kernel ends are not counted as slow memory's.

Legend: B batch, N sequence length, H heads, D head dimension, P pages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from onchip import dispatch
from onchip.analysis import bill as bills
from onchip.analysis.bill import Bill
from onchip.analysis.hardware import Hardware
from onchip.api import attention_with_kvcache, explain
from onchip.bench.cases import Case
from onchip.bench.methods import Method, methods, prepared
from onchip.problem import Op

_HEADS, _KV_HEADS, _DIM, _PAGE = 32, 8, 128, 16


@dataclass(frozen=True)
class Counted:
    """One call to count, and what the cost model says of it.

    Args:
        name: on the command line.
        words: for people.
        pose: makes the call, all but the counted part already done.
        bill: the model's bill on a GPU.
        pairs: of query and key, over all heads.
    """

    name: str
    words: str
    pose: Callable[[], Callable[[], object]]
    bill: Callable[[Hardware], Bill]
    pairs: int


def _case(length: int, batch: int, heads: int = _HEADS) -> Case:
    return Case(batch, length, heads, heads, _DIM, False, "bfloat16", "cuda")


def _own(case: Case) -> Method:
    return methods(case, ("onchip",))[0]


def _forward(case: Case, name: str) -> Callable[[], object]:
    found = _own(case) if name == "onchip" else methods(case, (name,))[0]
    return prepared(found, case, case.inputs(), "forward").call


def _backward(case: Case) -> Callable[[], object]:
    *leaves, dout = case.inputs()
    leaves = [x.requires_grad_() for x in leaves]
    out = _own(case).attend(*leaves, case)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def _decode_arguments(batch: int, length: int) -> tuple[tuple, dict]:
    pages = batch * length // _PAGE
    shape = (pages, _PAGE, _KV_HEADS, _DIM)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(batch, 1, _HEADS, _DIM, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(pages, device="cuda").int().view(batch, -1)
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    return (q, k, v), {"cache_seqlens": lengths, "block_table": table, "causal": True}


def _decode(batch: int, length: int) -> Callable[[], object]:
    tensors, more = _decode_arguments(batch, length)
    return lambda: attention_with_kvcache(*tensors, **more)


def _predicted(case: Case, op: Op, hardware: Hardware) -> Bill:
    kernel = _own(case).name.removeprefix("onchip ")  # whose backward it is too
    told = dispatch.explain(case.problem(op), kernel, None, hardware).prediction
    assert told is not None, "a GPU with a record has a prediction"
    return told.bill


def _decode_bill(batch: int, length: int, hardware: Hardware) -> Bill:
    """The decode's bill from the Problem that its call poses."""
    tensors, more = _decode_arguments(batch, length)
    problem = explain(*tensors, **more).problem
    told = dispatch.explain(problem, None, None, hardware).prediction
    assert told is not None, "a GPU with a record has a prediction"
    return told.bill


def _square(length: int, batch: int) -> list[Counted]:
    case = _case(length, batch)
    steps = _case(length, 1, (1 << 29) // length**2)  # S is 1 GiB, which the profiler saves
    size = f"N = {length}, H = {_HEADS}, D = {_DIM}"
    return [
        Counted(
            f"three-step-{length}",
            f"three steps, B = 1, N = {length}, H = {steps.heads}, D = {_DIM}",
            lambda: _forward(steps, "three-step"),
            lambda hardware: bills.three_step(steps.problem()),
            steps.heads * length**2,
        ),
        Counted(
            f"forward-{length}", f"forward, B = {batch}, {size}",
            lambda: _forward(case, "onchip"),
            lambda hardware: _predicted(case, Op.FORWARD, hardware),
            batch * _HEADS * length**2,
        ),
        Counted(
            f"backward-{length}", f"backward, B = {batch}, {size}",
            lambda: _backward(case),
            lambda hardware: _predicted(case, Op.BACKWARD, hardware),
            batch * _HEADS * length**2,
        ),
    ]  # fmt: skip


def _decoding(batch: int, length: int) -> Counted:
    return Counted(
        f"decode-{length}",
        f"decode, B = {batch}, {length} keys, H = {_HEADS}/{_KV_HEADS}, D = {_DIM}, pages of 16",
        lambda: _decode(batch, length),
        lambda hardware: _decode_bill(batch, length, hardware),
        batch * _HEADS * length,
    )


CALLS: dict[str, Counted] = {
    call.name: call
    for call in (*_square(4096, 8), *_square(16384, 2), _decoding(64, 4096), _decoding(1, 131072))
}


def main(argv: list[str] | None = None) -> int:
    """Poses, warms up and runs calls, only the last run of each visible to the profiler."""
    for name in sys.argv[1:] if argv is None else argv:
        _run(CALLS[name])
        torch.cuda.empty_cache()
    return 0


def _run(counted: Counted) -> None:
    call = counted.pose()
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    profiler = torch.cuda.cudart()
    profiler.cudaProfilerStart()  # type: ignore[union-attr]
    call()
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    profiler.cudaProfilerStop()  # type: ignore[union-attr]


if __name__ == "__main__":
    sys.exit(main())
