"""Script: compiles the quantising kernel for GPUs that are not there; prints JSON last."""

from __future__ import annotations

import functools
import json
import sys

import torch

from onchip.kernels.fp8_quantise import FLOAT8, Quantiser, Source
from onchip.kernels.portable import quantise
from tests import compile_only


def source_of(dim: int, packed: bool, rotary: bool, dtype: torch.dtype) -> Source:
    """q, k and v without data."""

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    rows = (4096,) if packed else (4, 4096)
    offsets = empty(5, dtype=torch.int32) if packed else None
    table = empty(4096, dim // 2) if rotary else None
    qkv = (empty(*rows, 16, dim), empty(*rows, 4, dim), empty(*rows, 4, dim))
    return Source(*qkv, offsets, offsets, None, table, table)


def _quantise(source: Source):
    return quantise.quantise(source, Quantiser())


def resources(cases: list[dict]) -> list[dict]:
    """What each case's kernel uses."""
    found = []
    for case in cases:
        raw = case.get("raw", False)
        dtype = FLOAT8 if raw else torch.bfloat16
        source = source_of(case["dim"], case.get("packed", False), case.get("rotary", False), dtype)
        quantise._converts = lambda device, arch=case["arch"]: arch == "sm_90"
        run = functools.partial(quantise.relaid if raw else _quantise, source)
        (launch,) = compile_only.captured(quantise.quantise_portable, run)
        binary = compile_only.compiled(launch, case["arch"])
        found.append(case | compile_only.resources(binary))
    return found


if __name__ == "__main__":
    print(json.dumps(resources(json.loads(sys.argv[1]))))
