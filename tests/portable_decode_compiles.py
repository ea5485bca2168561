"""Script: compiles the portable decode for GPUs that are not there; prints JSON last."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial

import torch

from onchip.kernels.portable import decode, decode_direct, decode_tall
from onchip.kernels.portable.decode_config import choose_decode
from onchip.problem import Mask, NewTokens, Op, Params, Problem, Tensors
from tests import compile_only
from tests.hopper_forward_compiles import walks

FEATURES = {
    "page_16": {},
    "page_256": {"page": 256},
    "page_1": {"page": 1},
    "page_8": {"page": 8},
    "balanced": {"batch": 64},
    "float8": {"kv_dtype": torch.float8_e4m3fn},
    "float8_many": {"kv_dtype": torch.float8_e4m3fn, "batch": 64},
    "window": {"window": (1023, 0), "batch": 64},
    "speculative": {"seqlen_q": 4},
    "wide": {"seqlen_q": 16, "window": (1023, 0)},
    "terms": {"softcap": 30.0, "terms": True},
    "dense_cache": {"page": 32768, "batch": 4},
    "append": {"new": {}},
    "append_turned": {"new": {"pairs": 64}},
    "append_pairs": {"new": {"pairs": 32, "interleaved": True}, "page": 256},
    "append_balanced": {"new": {"pairs": 64}, "batch": 64},
    "append_page_1": {"new": {"pairs": 64}, "page": 1, "batch": 64},
    "append_dense_cache": {"new": {"pairs": 64}, "page": 32768, "batch": 4},
    "append_window": {"new": {"pairs": 64}, "window": (1023, 0), "batch": 64},
    "append_half": {"new": {"pairs": 32}},  # of D = 64
    "tall_64": {"seqlen_q": 16},
    "tall_128": {"seqlen_q": 32},
    "tall_pages_of_256": {"seqlen_q": 32, "page": 256},
    "tall_float16": {"seqlen_q": 32, "page": 256, "dtype": torch.float16,
                     "kv_dtype": torch.float16},
    "tall_balanced": {"seqlen_q": 32, "batch": 64},
    "tall_balanced_64": {"seqlen_q": 8, "batch": 64},
    "tall_blocks": {"seqlen_q": 64},
    "tall_two_pieces": {"seqlen_q": 32, "batch": 8, "seqlen_k": 16384},
    "tall_two_pieces_64": {"seqlen_q": 16, "batch": 8, "seqlen_k": 16384},
    "tall_shared": {"seqlen_q": 16, "batch": 4, "seqlen_k": 4096},
    "tall_shared_128": {"seqlen_q": 32, "batch": 4, "seqlen_k": 4096},
    "tall_shared_16": {"seqlen_q": 16, "batch": 2, "seqlen_k": 16384, "heads": 16, "kv_heads": 4},
    "tall_of_dense": {"seqlen_q": 16, "page": 32768, "batch": 4},
}  # fmt: skip


def _empty(*shape, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def pose(
    arch, dim, batch=1, seqlen_q=1, page=16, window=(-1, 0), softcap=0.0, terms=False,
    kv_dtype=torch.bfloat16, dtype=torch.bfloat16, heads=32, kv_heads=8, seqlen_k=32768,
    new=None,
) -> tuple[Problem, Tensors]:  # fmt: skip
    """A problem as if on a GPU of `arch`, with tensors that hold no data; `new` see `appended`."""
    columns = seqlen_k // page
    q = _empty(batch, seqlen_q, heads, dim, dtype=dtype)
    k, v = (_empty(batch * columns, page, kv_heads, dim, dtype=kv_dtype) for _ in range(2))
    tensors = Tensors(q, k, v)
    tensors.block_table = _empty(batch, columns, dtype=torch.int32)
    tensors.seqused_k = _empty(batch, dtype=torch.int32)
    tensors.alibi_slopes = _empty(heads, dtype=torch.float32) if terms else None
    tensors.sinks = _empty(heads) if terms else None
    if kv_dtype.itemsize == 1:
        tensors.k_scale = tensors.v_scale = _empty(kv_heads, dtype=torch.float32)
    mask = Mask(*window)
    params = Params(
        seqlen_q, seqlen_k, mask.left, mask.right, dim**-0.5, softcap, False, 0, ""
    )  # fmt: skip
    return replace(Problem.of(Op.FORWARD, tensors, params), device="cuda", arch=arch), tensors


def appended(tensors: Tensors, pairs=0, interleaved=False) -> NewTokens:
    """One new token a sequence that turns by so many pairs of features."""
    batch, (_, _, kv_heads, dim) = tensors.q.shape[0], tensors.k.shape
    k, v = (_empty(batch, 1, kv_heads, dim, dtype=tensors.k.dtype) for _ in range(2))
    tables = [_empty(4096, pairs) if pairs else None for _ in range(2)]
    return NewTokens(
        tensors.q, k, v, tensors.k, tensors.v, tensors.seqused_k, tensors.block_table, None,
        *tables, interleaved=interleaved,
    )  # fmt: skip


def resources(cases: list[dict]) -> list[dict]:
    """What each case's kernel uses; a case names arch, dim and a set of features."""
    found = []
    for case in cases:
        features = FEATURES[case["features"]]
        problem, tensors = pose(case["arch"], case["dim"], **features)
        new = appended(tensors, **features["new"]) if "new" in features else None
        launch = partial(decode.launch_with, choose_decode(problem, 132), problem, tensors, new)
        kernels = (
            decode.attn_decode_portable,
            decode.attn_decode_merge_portable,
            decode_direct.attn_decode_direct,
            decode_tall.attn_decode_tall,
        )
        for call in compile_only.captured_of(kernels, launch):
            binary = compile_only.compiled(call, case["arch"])
            used = {"kernel": call.kernel.__name__} | compile_only.resources(binary)
            if used.get("wgmma"):
                used["walks"] = walks(compile_only.disassembly(binary))
            found.append(case | used)
    return found


if __name__ == "__main__":
    print(json.dumps(resources(json.loads(sys.argv[1]))))
