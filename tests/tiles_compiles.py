"""Script: shared memory and registers of the shipped portable configs; prints JSON last."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from functools import partial

import torch

from onchip.kernels.portable import backward_config, config, decode, decode_direct, decode_tall
from onchip.kernels.portable import forward as portable_forward
from onchip.kernels.portable.backward_config import BackwardConfig, choose_backward
from onchip.kernels.portable.config import Config, choose_forward
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
    *(("sm_90", dim, name) for dim in DIMS for name in ("page_16", "wide", "float8")),
    ("sm_90", 128, "terms"),
    ("sm_90", 256, "terms"),
    *(("sm_80", 128, name) for name in ("page_16", "wide")),
    *(("sm_90", 128, name) for name in ("tall_64", "tall_128", "tall_shared")),
    ("sm_90", 64, "tall_64"),
    ("sm_90", 256, "tall_64"),
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
    kernels = (
        decode.attn_decode_portable,
        decode.attn_decode_merge_portable,
        decode_direct.attn_decode_direct,
        decode_tall.attn_decode_tall,
    )
    call = compile_only.captured_of(kernels, launch)[0]
    return _used(compile_only.compiled(call, arch), config)


def tables(module, kind: type) -> list[tuple[str, int, object]]:
    """Architecture, D and config of every entry of a module's tables.

    A name says the architecture, _SAFE's is one of the others; tables by dtype or by few queries
    are chosen by a problem alone.
    """
    found = []
    for name, table in vars(module).items():
        if not re.fullmatch(r"_(SM\d\d|SAFE).*", name):
            continue
        arch = {"_SM90": "sm_90", "_SM80": "sm_80"}.get(name[:5], "sm_86")
        entries = table if isinstance(table, dict) else {int(name.rpartition("_")[2]): table}
        for key, entry in entries.items():
            dim = key[0] if isinstance(key, tuple) else key
            if isinstance(entry, kind) and (arch, dim, entry) not in found:
                found.append((arch, dim, entry))
    return found


def every_forward() -> list[dict]:
    """What a plain forward was compiled to use with each config of a table."""
    found = []
    for arch, dim, entry in tables(config, Config):
        problem, tensors = pose(arch, dim)
        launch = partial(portable_forward.launch_with, entry, problem, tensors)
        (call,) = compile_only.captured(portable_forward.attn_fwd_portable, launch)
        found.append(_used(compile_only.compiled(call, arch), entry))
    return found


def every_backward() -> list[list[dict]]:
    """The same of the launches of a backward, but the one that makes D."""
    found = []
    for arch, dim, entry in tables(backward_config, BackwardConfig):
        problem, tensors = pose(arch, dim)
        calls = calls_of(problem, tensors, entry)
        found.append([
            _used(compile_only.compiled(call, arch), entry.tiles_of(part), part=part)
            for part, call in calls.items()
            if part != "pre"
        ])  # fmt: skip
    return found


KINDS = {"forward": (forward, CASES), "backward": (backward, BACKWARDS),
         "decode": (decoding, DECODES)}  # fmt: skip


if __name__ == "__main__":
    every = {"every_forward": every_forward, "every_backward": every_backward}
    if sys.argv[1] in every:
        print(json.dumps(every[sys.argv[1]]()))
    else:
        compile_one, cases = KINDS[sys.argv[1]]
        print(json.dumps([compile_one(*case) for case in cases]))
