"""Script: shared memory and registers of the shipped portable configs; prints JSON last."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from functools import partial

import torch

from onchip.kernels.portable import decode
from onchip.kernels.portable.backward_config import choose_backward
from onchip.kernels.portable.config import choose_forward
from onchip.kernels.portable.decode_config import choose_decode
from tests import compile_only, portable_decode_compiles
from tests.portable_backward_compiles import calls_of
from tests.portable_forward_compiles import call_of, pose

DIMS = (64, 128, 256)
#: What leads `choose_forward` to each of its shapes for sm_90.
FORWARDS = (
    {},
    {"causal": True, "seqlen": 1024},
    {"seqlen": 16, "seqlen_k": 4096},
    {"dtype": torch.float32},
)
OTHERS = (
    ("sm_80", 64, {}), ("sm_80", 128, {}), ("sm_80", 256, {}), ("sm_86", 128, {}),
    ("sm_90", 64, {"page": 16}),
)  # fmt: skip
CASES = (*(("sm_90", dim, given) for given in FORWARDS for dim in DIMS), *OTHERS)
BACKWARDS = (
    *((arch, dim, {}) for arch in ("sm_90", "sm_80") for dim in DIMS),
    ("sm_90", 128, {"window": (512, 0)}), ("sm_90", 256, {"window": (512, 0)}),
    ("sm_86", 128, {}), ("sm_90", 64, {"dtype": torch.float32}),
)  # fmt: skip
#: Architecture, D, and a name of `portable_decode_compiles.FEATURES`.
DECODES = (
    *(("sm_90", dim, "page_16") for dim in DIMS),
    ("sm_90", 128, "wide"), ("sm_90", 256, "speculative"), ("sm_90", 128, "float8"),
    ("sm_80", 128, "page_16"),
)  # fmt: skip


def _used(binary, config, **more) -> dict:
    tool = compile_only._tool("cuobjdump")
    usage = compile_only._run_on(binary.asm["cubin"], ".cubin", [tool, "--dump-resource-usage"])
    registers = re.search(r"REG:(\d+)", usage)
    assert registers, usage
    used = {"shared_bytes": binary.metadata.shared, "registers": int(registers[1])}
    return {"config": asdict(config), **used, **more}


def forward(arch: str, dim: int, given: dict) -> dict:
    """What the forward for such a problem was compiled to use, beside its config."""
    problem, tensors = pose(arch, dim, **given)
    binary = compile_only.compiled(call_of(problem, tensors), arch)
    return _used(binary, choose_forward(problem))


def backward(arch: str, dim: int, given: dict) -> list[dict]:
    """The same of the launches of a backward, but the one that makes D."""
    problem, tensors = pose(arch, dim, **given)
    config = choose_backward(problem)
    return [
        _used(compile_only.compiled(call, arch), config.tiles_of(part), part=part)
        for part, call in calls_of(problem, tensors).items()
        if part != "pre"
    ]


def decoding(arch: str, dim: int, features: str) -> dict:
    """The same of a decode."""
    given = portable_decode_compiles.FEATURES[features]
    problem, tensors = portable_decode_compiles.pose(arch, dim, **given)
    config = choose_decode(problem, 132)
    launch = partial(decode.launch_with, config, problem, tensors)
    kernels = (decode.attn_decode_portable, decode.attn_decode_merge_portable)
    call = compile_only.captured_of(kernels, launch)[0]
    return _used(compile_only.compiled(call, arch), config)


KINDS = {"forward": (forward, CASES), "backward": (backward, BACKWARDS),
         "decode": (decoding, DECODES)}  # fmt: skip


if __name__ == "__main__":
    compile_one, cases = KINDS[sys.argv[1]]
    print(json.dumps([compile_one(*case) for case in cases]))
