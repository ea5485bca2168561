"""Script: compiles the Hopper float8 forward for sm_90a without a GPU; prints JSON last."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch

from onchip.kernels.fp8_layout import BLOCK_K, BLOCK_Q, FLOAT8, num_blocks
from onchip.kernels.hopper import fp8
from onchip.kernels.hopper.fp8_config import choose_fp8
from onchip.problem import Mask, Op, Params, Problem, Tensors
from tests import compile_only

FEATURES = {
    "full": {},
    "causal": {"causal": True},
    "short": {"seqlen": 1024, "causal": True},
    "window": {"causal": True, "window": (1000, 0)},
    "packed": {"packed": True, "causal": True},
    "terms": {"softcap": 30.0, "alibi": True, "sinks": True},
}


def _empty(*shape, dtype=FLOAT8) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def pose(
    dim, dim_v=None, seqlen=4096, causal=False, window=(-1, -1), packed=False, softcap=0.0,
    alibi=False, sinks=False,
) -> tuple[Problem, Tensors]:  # fmt: skip
    """A problem as if on a GPU, with tensors that hold no data."""
    batch, heads, kv_heads, dim_v = 4, 16, 4, dim_v or dim
    count = batch if packed else None
    tokens = batch * seqlen if packed else seqlen
    n_q, n_k = num_blocks(tokens, count, BLOCK_Q), num_blocks(tokens, count, BLOCK_K)
    lead = () if packed else (batch,)
    tensors = Tensors(
        _empty(*lead, tokens, heads, dim),
        _empty(*lead, tokens, kv_heads, dim),
        _empty(*lead, kv_heads, dim_v, n_k * BLOCK_K),
        scales=[_empty(batch, h, n, dtype=torch.float32)
                for h, n in ((heads, n_q), (kv_heads, n_k), (kv_heads, n_k))],
    )  # fmt: skip
    if packed:
        tensors.cu_seqlens_q = tensors.cu_seqlens_k = _empty(batch + 1, dtype=torch.int32)
    tensors.alibi_slopes = _empty(heads, dtype=torch.float32) if alibi else None
    tensors.sinks = _empty(heads, dtype=torch.bfloat16) if sinks else None
    mask = Mask.of(causal, window)
    params = Params(seqlen, seqlen, mask.left, mask.right, dim**-0.5, softcap, False, 0, "",
                    out_dtype="bfloat16")  # fmt: skip
    return replace(Problem.of(Op.FORWARD, tensors, params), device="cuda", arch="sm_90"), tensors


def resources(cases: list[list]) -> list[dict]:
    """What each case's kernel uses; a case is [dim, name of features, changes of the config]."""
    found = []
    for dim, name, changes in cases:
        problem, tensors = pose(dim, **FEATURES[name])
        config = replace(choose_fp8(problem), **changes)
        (call,) = compile_only.captured(
            fp8.attn_fwd_fp8_hopper, lambda: fp8.launch_with(config, problem, tensors)  # noqa: B023
        )  # fmt: skip
        binary = compile_only.compiled(call, "sm_90")
        used = compile_only.resources(binary)
        sass = compile_only.disassembly(binary)
        used |= {"qgmma": sass.count("QGMMA"), "shuffles": sass.count("SHFL")}
        found.append({"dim": dim, "features": name, "changes": changes} | used)
        print(found[-1], file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    print(json.dumps(resources(json.loads(sys.argv[1]))))
