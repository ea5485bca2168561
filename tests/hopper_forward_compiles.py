"""Script: compiles the Hopper forward for sm_90a without a GPU; prints JSON last.

For every case named on the command line: registers, spills, and how the loop over K/V tiles
that are not masked looks in machine code.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import torch

from onchip.kernels.hopper import arguments, forward, repair
from onchip.problem import Mask, Op, Params, Problem, Tensors
from tests import compile_only

FEATURES = {
    "full": {},
    "causal": {"causal": True},
    "folded": {"causal": True, "single": 1024},
    "causal_unaligned": {"causal": True, "seqlen_k": 4100},
    "window": {"causal": True, "window": (1000, 0)},
    "packed": {"packed": True, "causal": True},
    "packed_full": {"packed": True},
    "grouped": {"causal": True, "page": 16, "seqlen_q": 64, "batch": 32},
    "pieces": {"causal": True, "page": 16, "seqlen_q": 64, "seqlen_k": 32768, "batch": 1},
    "few": {"causal": True, "page": 16, "seqlen_q": 16, "seqlen_k": 32768, "batch": 1},
    "order": {"causal": True, "page": 16, "seqlen_q": 16, "batch": 64},
    "order_apart": {"causal": True, "page": 16, "seqlen_q": 16, "batch": 8},
    "order_full": {"used": True, "seqlen_q": 128, "batch": 16},
    "terms": {"softcap": 30.0, "alibi": 2, "sinks": True},
    "all": {"softcap": 30.0, "alibi": 1, "sinks": True, "packed": True, "used": True,
            "window": (100, 40)},
}  # fmt: skip


def _empty(*shape, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def pose(
    dim, dim_v=None, seqlen_k=4096, causal=False, window=(-1, -1), packed=False, used=False,
    softcap=0.0, alibi=0, sinks=False, dtype=torch.bfloat16, single=0, page=0, seqlen_q=4096,
    batch=4,
) -> tuple[Problem, Tensors]:  # fmt: skip
    """A problem as if on a GPU, with tensors that hold no data.

    `single`: one square so long; with pages eight query heads share one of K.
    """
    heads, ints = 64 if page else 16, torch.int32
    if single:
        batch, seqlen_q, seqlen_k = 1, single, single
    sizes = ((seqlen_q, dim), (seqlen_k, dim), (seqlen_k, dim_v or dim))
    tensors = Tensors(*(_empty(batch, n, heads, d, dtype=dtype) for n, d in sizes))
    if packed:
        tensors = Tensors(*(x.flatten(0, 1) for x in (tensors.q, tensors.k, tensors.v)))
        tensors.cu_seqlens_q = _empty(batch + 1, dtype=ints)
        tensors.cu_seqlens_k = _empty(batch + 1, dtype=ints)
    if page:
        shape = (batch * seqlen_k // page, page, heads // 8)
        tensors.k, tensors.v = (_empty(*shape, d, dtype=dtype) for d in (dim, dim_v or dim))
        tensors.block_table = _empty(batch, seqlen_k // page, dtype=ints)
    tensors.seqused_k = _empty(batch, dtype=ints) if used or page else None
    shape = (batch, heads)[2 - alibi :]
    tensors.alibi_slopes = _empty(*shape, dtype=torch.float32) if alibi else None
    tensors.sinks = _empty(heads) if sinks else None
    mask = Mask.of(causal, window)
    params = Params(
        seqlen_q, seqlen_k, mask.left, mask.right, dim**-0.5, softcap, False, 0, ""
    )  # fmt: skip
    return replace(Problem.of(Op.FORWARD, tensors, params), device="cuda", arch="sm_90"), tensors


def calls_of(problem: Problem, tensors: Tensors) -> list[compile_only.Call]:
    """The launches that the problem would make: the forward, and the repair where there is one."""
    arguments._kept.clear()
    found: list[compile_only.Call] = []

    def run():
        found[:0] = compile_only.captured(
            forward.attn_fwd_hopper, lambda: forward.launch(problem, tensors)
        )

    repairs = compile_only.captured(repair.attn_repair_hopper, run)
    return found + repairs


def walks(sass: str) -> list[dict]:
    """The loops of a consumer's main walk: instructions, and exponentials of each kind.

    `hidden` are exponentials between the wait for S and the next products: they run while the
    tensor cores work for this warpgroup's P V, or for another warpgroup.
    """
    labels, lines = {}, []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = len(lines)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            lines.append(instruction[1])
    found = []
    for end, text in enumerate(lines):
        jump = re.search(r"\bBRA\b.*?`\((\.L\w+)\)", text)
        start = labels.get(jump[1], end) if jump else end
        body = lines[start : end + 1]
        waits = [i for i, x in enumerate(body) if "WARPGROUP.DEPBAR" in x]
        if len(waits) == 2 and len(body) < 700:
            spills = sum(bool(re.search(r"\b(STL|LDL)\b", x)) for x in body)
            exps = [i for i, x in enumerate(body) if "MUFU.EX2" in x]
            found.append({
                "instructions": len(body),
                "spills": spills,
                "exps": len(exps),
                "between_waits": sum(waits[0] < i < waits[1] for i in exps),
                "behind_waits": sum(i > waits[1] for i in exps),
            })  # fmt: skip
    return found


def resources(cases: list[list]) -> list[dict]:
    """What each case's kernel uses; a case is [dim, dim_v, name of features]."""
    found = []
    for dim, dim_v, name in cases:
        main, *repairs = calls_of(*pose(dim, dim_v, **FEATURES[name]))
        binary = compile_only.compiled(main, "sm_90")
        used = compile_only.resources(binary) | {"walks": walks(compile_only.disassembly(binary))}
        if name == "packed":
            compile_only.compiled(repairs[0], "sm_90")
        found.append({"dim": dim, "dim_v": dim_v, "features": name, "repairs": len(repairs)} | used)
    return found


if __name__ == "__main__":
    print(json.dumps(resources(json.loads(sys.argv[1]))))
