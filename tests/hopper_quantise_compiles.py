"""Script: compiles the Hopper quantiser for sm_90a without a GPU; prints JSON last."""

from __future__ import annotations

import json

import torch

from onchip.kernels.fp8_layout import Quantiser, Source
from onchip.kernels.hopper import fp8_quantise
from tests import compile_only


def resources() -> list[dict]:
    """What each D's kernel uses, for each type of the inputs."""
    found = []
    for dim in fp8_quantise.CONFIGS:
        for dtype in (torch.bfloat16, torch.float16):
            shapes = ((2, 1000, 16, dim), (2, 4096, 4, dim), (2, 4096, 4, dim))
            source = Source(*(torch.empty(x, dtype=dtype, device="meta") for x in shapes))
            (launch,) = compile_only.captured(
                fp8_quantise.quantise_hopper,
                lambda: fp8_quantise.quantise(source, Quantiser()),  # noqa: B023
            )
            binary = compile_only.compiled(launch, "sm_90")
            sass = compile_only.disassembly(binary)
            wide = {"wide_stores": sass.count("STG.E.128"), "shuffles": sass.count("SHFL.IDX")}
            found.append({"dim": dim} | wide | compile_only.resources(binary))
    return found


if __name__ == "__main__":
    print(json.dumps(resources()))
