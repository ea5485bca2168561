"""Script: compiles the portable forward for GPUs that are not there; prints JSON last.

`resources` compiles the speed goals' shapes and some features, `counts` counts how many
different kernels 50 random shapes of a layout need.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace

import torch

from onchip.kernels.portable import forward
from onchip.kernels.portable.config import choose_forward
from onchip.problem import Mask, Op, Params, Problem, Tensors
from tests import compile_only

FEATURES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (1023, 0)},
    "packed_causal": {"causal": True, "packed": True},
    "pages": {"causal": True, "page": 16},
    "float8_pages": {"causal": True, "page": 16, "kv_dtype": torch.float8_e4m3fn},
    "terms": {"softcap": 30.0, "alibi": True, "sinks": True},
}


def _empty(*shape, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def pose(
    arch, dim, batch=4, seqlen=4096, seqlen_k=None, dtype=torch.bfloat16, causal=False,
    window=(-1, -1), packed=False, page=0, softcap=0.0, alibi=False, sinks=False, heads=16,
    kv_dtype=None,
) -> tuple[Problem, Tensors]:  # fmt: skip
    """A problem as if on a GPU of `arch`, with tensors that hold no data."""
    seqlen_k = seqlen if seqlen_k is None else seqlen_k
    ints = torch.int32
    q, k, v = (_empty(batch, n, heads, dim, dtype=dtype) for n in (seqlen, seqlen_k, seqlen_k))
    tensors = Tensors(q, k, v)
    if packed:
        tensors = Tensors(*(x.flatten(0, 1) for x in (q, k, v)))
        tensors.cu_seqlens_q = _empty(batch + 1, dtype=ints)
        tensors.cu_seqlens_k = _empty(batch + 1, dtype=ints)
    if page:
        pages = batch * (seqlen_k // page + 1)
        shape, kv_dtype = (pages, page, heads, dim), kv_dtype or dtype
        tensors.k, tensors.v = (_empty(*shape, dtype=kv_dtype) for _ in range(2))
        if kv_dtype.itemsize == 1:
            tensors.k_scale = tensors.v_scale = _empty(heads, dtype=torch.float32)
        tensors.block_table = _empty(batch, seqlen_k // page + 1, dtype=ints)
        tensors.seqused_k = _empty(batch, dtype=ints)
    tensors.alibi_slopes = _empty(heads, dtype=torch.float32) if alibi else None
    tensors.sinks = _empty(heads) if sinks else None
    mask = Mask.of(causal, window)
    params = Params(
        seqlen, seqlen_k, mask.left, mask.right, dim**-0.5, softcap, False, 0, ""
    )  # fmt: skip
    return replace(Problem.of(Op.FORWARD, tensors, params), device="cuda", arch=arch), tensors


def call_of(problem: Problem, tensors: Tensors) -> compile_only.Call:
    """The launch that the problem would make."""
    (call,) = compile_only.captured(
        forward.attn_fwd_portable, lambda: forward.launch(problem, tensors)
    )
    return call


def resources(cases: list[dict]) -> list[dict]:
    """What each case's kernel uses; a case names arch, dim and a set of features."""
    found = []
    for case in cases:
        problem, tensors = pose(case["arch"], case["dim"], **FEATURES[case["features"]])
        binary = compile_only.compiled(call_of(problem, tensors), case["arch"])
        found.append(case | compile_only.resources(binary))
    return found


def counts() -> list[dict]:
    """Different kernels and different configs among 50 random shapes of each layout."""
    draw = random.Random(0)
    found = []
    for layout in ({}, {"packed": True}, {"page": 16}, {"causal": True, "window": (64, 0)}):
        for dim in (64, 20):
            keys, configs = set(), set()
            for _ in range(50):
                size = {"batch": draw.randint(1, 9), "seqlen": draw.randint(1, 5000)}
                size["seqlen_k"] = size["seqlen"] if "packed" in layout else draw.randint(1, 5000)
                if "window" in layout:
                    layout["window"] = (draw.randint(0, 900), 0)
                problem, tensors = pose("sm_90", dim, **size, **layout, heads=draw.choice((5, 6)))
                configs.add(choose_forward(problem))
                call = call_of(problem, tensors)
                _, _, specialisation, options = compile_only.specialisation(call, "sm_90")
                constants = [value for kind, value in zip(
                    specialisation, call.args, strict=False) if kind[0] == "constexpr"]  # fmt: skip
                keys.add(str((specialisation, constants, options)))
            found.append({"layout": str(layout), "kernels": len(keys), "configs": len(configs)})
    return found


if __name__ == "__main__":
    print(
        json.dumps(resources(json.loads(sys.argv[2])) if sys.argv[1] == "resources" else counts())
    )
