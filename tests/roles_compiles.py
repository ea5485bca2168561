"""Script: shared memory, registers and warps of the shipped Hopper configs; prints JSON last."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import torch

from onchip.kernels.hopper import fp8, fp8_config
from onchip.kernels.hopper.backward_config import choose_backward
from onchip.kernels.hopper.config import choose_forward
from onchip.kernels.hopper.fp8_config import choose_fp8
from onchip.problem import Op, Problem, Tensors
from tests import (
    compile_only,
    hopper_backward_compiles,
    hopper_forward_compiles,
    hopper_fp8_compiles,
)
from tests.portable_forward_compiles import pose as pose_portable

DIMS = (64, 128, 256)
HALF = torch.float16
#: D, D_v and features that lead `choose_forward` to each of its configs.
FORWARDS = (
    *((dim, None, {"causal": causal, "dtype": dtype})
      for dim in DIMS for causal in (False, True) for dtype in (HALF, torch.bfloat16)),
    *((128, 64, {"dtype": dtype}) for dtype in (HALF, torch.bfloat16)),
    *((64, None, {"seqlen_k": 2048, "causal": True, "dtype": dtype})
      for dtype in (HALF, torch.bfloat16)),
    (128, None, {"seqlen_k": 2048, "causal": True}),
    *((dim, None, {"softcap": 30.0, "alibi": 2, "sinks": True}) for dim in DIMS),
    (128, None, {"packed": True, "used": True, "causal": True}),
)  # fmt: skip
_WIDTHS = {max(key) if isinstance(key, tuple) else key for key in fp8_config._CONFIGS}
FLOAT8 = (
    *((dim, {"causal": causal}) for dim in sorted(_WIDTHS) for causal in (False, True)),
    (128, {"causal": True, "packed": True}),
    (64, {"seqlen": 1024}),
)
#: D, D_v and features that lead `choose_backward` to each of its configs.
BACKWARDS = (
    *((dim, None, {}) for dim in DIMS), (128, None, {"causal": True}),
    *((dim, None, {"window": (512, 0)}) for dim in (128, 256)), (64, 128, {}),
    *((dim, None, {"seqlen": 1024, "batch": 8, "causal": True}) for dim in (64, 128)),
)  # fmt: skip
PARTS = {"keys": "dkdv", "queries": "dq"}


def forward_of(dim: int, dim_v: int | None, given: dict) -> tuple[Problem, Tensors]:
    """A forward's problem."""
    return hopper_forward_compiles.pose(dim, dim_v, **given)


def float8_of(dim: int, given: dict) -> tuple[Problem, Tensors]:
    """A float8 forward's problem."""
    return hopper_fp8_compiles.pose(dim, **given)


def backward_of(dim: int, dim_v: int | None, given: dict) -> tuple[Problem, Tensors]:
    """A backward's problem."""
    if dim_v:
        problem, tensors = hopper_forward_compiles.pose(dim, dim_v, **given)
    else:
        problem, tensors = pose_portable("sm_90", dim, **given)
    return replace(problem, op=Op.BACKWARD), tensors


def _used(call: compile_only.Call, config, part: str = "forward") -> dict:
    binary = compile_only.compiled(call, "sm_90")
    tool = compile_only._tool("cuobjdump")
    usage = compile_only._run_on(binary.asm["cubin"], ".cubin", [tool, "--dump-resource-usage"])
    registers = re.search(r"REG:(\d+)", usage)
    threads = re.search(r"\.(?:req|max)ntid (\d+)", binary.asm["ptx"])
    assert registers and threads, usage
    return {
        "config": repr(config),
        "part": part,
        "shared_bytes": binary.metadata.shared,
        "registers": int(registers[1]),
        "warps": int(threads[1]) // 32,
    }


def forwards() -> list[dict]:
    """What each of `FORWARDS` was compiled to use."""
    found = []
    for case in FORWARDS:
        problem, tensors = forward_of(*case)
        call = hopper_forward_compiles.calls_of(problem, tensors)[0]
        found.append(_used(call, choose_forward(problem)))
    return found


def float8() -> list[dict]:
    """What each of `FLOAT8` was compiled to use."""
    found = []
    for case in FLOAT8:
        problem, tensors = float8_of(*case)
        kernel = fp8.attn_fwd_fp8_hopper
        (call,) = compile_only.captured(kernel, lambda: fp8.launch(problem, tensors))  # noqa: B023
        found.append(_used(call, choose_fp8(problem)))
    return found


def backwards() -> list[list[dict]]:
    """What the launches of each of `BACKWARDS` that walk over tiles were compiled to use."""
    found = []
    for case in BACKWARDS:
        problem, tensors = backward_of(*case)
        calls = hopper_backward_compiles.calls_of(problem, tensors)
        config = choose_backward(problem)
        found.append([_used(calls[name], config, PARTS[name]) for name in PARTS if name in calls])
    return found


if __name__ == "__main__":
    print(json.dumps({"forwards": forwards(), "float8": float8(), "backwards": backwards()}))
