"""Script: shared memory and registers of the shipped portable configs; prints JSON last."""

from __future__ import annotations

import json
import re
from dataclasses import asdict

import torch

from onchip.kernels.portable.config import choose_forward
from tests import compile_only
from tests.portable_forward_compiles import call_of, pose

DIMS = (64, 128, 256)
#: What leads `choose_forward` to each of its shapes for sm_90.
FORWARDS = (
    {},
    {"causal": True, "seqlen": 1024},
    {"seqlen": 16, "seqlen_k": 4096},
    {"dtype": torch.float32},
)
OTHERS = (("sm_80", 64, {}), ("sm_80", 128, {}), ("sm_90", 64, {"page": 16}))
CASES = (*(("sm_90", dim, given) for given in FORWARDS for dim in DIMS), *OTHERS)


def used(arch: str, dim: int, given: dict) -> dict:
    """What the forward for such a problem was compiled to use, beside its config."""
    problem, tensors = pose(arch, dim, **given)
    binary = compile_only.compiled(call_of(problem, tensors), arch)
    tool = compile_only._tool("cuobjdump")
    usage = compile_only._run_on(binary.asm["cubin"], ".cubin", [tool, "--dump-resource-usage"])
    registers = re.search(r"REG:(\d+)", usage)
    assert registers, usage
    return {
        "config": asdict(choose_forward(problem)),
        "shared_bytes": binary.metadata.shared,
        "registers": int(registers[1]),
    }


if __name__ == "__main__":
    print(json.dumps([used(*case) for case in CASES]))
