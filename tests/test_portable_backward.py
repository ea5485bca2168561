"""The portable backward on a CPU, through Triton's interpreter, against the float64 oracle.

bfloat16 products are wrong in the interpreter of Triton 3.6: tests/gpu has those.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
triton = pytest.importorskip("triton")

from onchip.kernels.portable import backward  # noqa: E402
from onchip.kernels.portable.backward_config import (  # noqa: E402
    BackwardConfig,
    Tiles,
)
from tests.portable_backward_cases import check_gradients, saved_of  # noqa: E402
from tests.portable_cases import Case, build  # noqa: E402

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="tests/gpu covers it where there is a GPU"
)
SMALL = BackwardConfig(Tiles(16, 32, 4, 2), Tiles(32, 16, 4, 2))
F32 = torch.float32

CASES = {
    "plain": Case((40, 40), (53, 53)),
    "causal": Case((50,), (50,), heads=2, kv_heads=2, causal=True),
    "causal_float32": Case((50,), (77,), dtype=F32, causal=True),
    "causal_more_queries": Case((77,), (40,), dtype=F32, causal=True),
    "window": Case((50,), (70,), dtype=F32, window=(20, 9)),
    "window_left": Case((50,), (70,), dtype=F32, window=(33, -1)),
    "window_right": Case((50,), (70,), dtype=F32, window=(-1, 3)),
    "window_diagonal": Case((50,), (70,), dtype=F32, window=(0, 0)),
    "window_beyond_keys": Case((70,), (20,), dtype=F32, window=(4, 3)),
    "window_unseen_keys": Case((20,), (70,), dtype=F32, window=(3, 3)),
    "one_row": Case((1, 1), (40, 40), dtype=F32, causal=True),
    "dims_1_and_3": Case((20,), (30,), dim=1, dim_v=3, dtype=F32, causal=True),
    "dims_40_and_72": Case((20,), (30,), dim=40, dim_v=72),
    "dim_256": Case((17,), (30,), heads=1, dim=256, dim_v=256),
    "group_of_4": Case((33,), (40,), heads=8, kv_heads=2, dtype=F32, causal=True),
    "softcap": Case((40,), (40,), dtype=F32, softcap=3.0),
    "softcap_overflow": Case((40,), (40,), dtype=F32, softcap=0.5, scale=300.0),
    "alibi": Case((40, 40), (60, 60), dtype=F32, alibi=1),
    "alibi_batch": Case((40, 40), (60, 60), dtype=F32, alibi=2, causal=True),
    "all_terms": Case((50,), (60,), dtype=F32, alibi=1, softcap=4.0, sinks=True, window=(25, 4)),
    "sinks": Case((70,), (60,), sinks=True),
    "sinks_empty_rows": Case((70,), (30,), dtype=F32, causal=True, sinks=True),
    "negative_scale": Case((40,), (60,), scale=-0.3),
    "very_low_lse": Case((20,), (20,), scale=-30.0, dim=16, dim_v=16),
    "packed": Case((33, 0, 5, 17), (20, 9, 0, 44), packed=True),
    "packed_causal": Case((33, 1, 40), (50, 7, 20), packed=True, causal=True, sinks=True),
    "packed_alibi_batch": Case((20, 9), (31, 15), dtype=F32, packed=True, alibi=2),
    "packed_used": Case((33, 8), (20, 41), packed=True, used=True, causal=True),
    "dense_used": Case((20, 20), (50, 17), used=True, window=(9, 2)),
    "dense_used_none": Case((20, 20), (50, 0), used=True, sinks=True),
    "strided": Case((20, 20), (30, 30), strided=True, causal=True),
}


def run(case: Case, config: BackwardConfig, arch: str = "", **options) -> None:
    call = build(case)
    saved = saved_of(call, **options)
    problem = replace(call.problem, arch=arch)
    gradients = backward.launch_with(config, problem, call.tensors, saved)
    check_gradients(call, saved, gradients)


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_every_feature(name):
    run(CASES[name], SMALL)


@interpreted
@pytest.mark.parametrize("reduction", ["none", "atomics", "tma"])
@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("name", ["plain", "window", "packed_causal", "dense_used", "all_terms"])
def test_every_config(name, descriptors, reduction):
    if not descriptors and reduction == "none":
        pytest.skip("test_every_feature has it")
    config = replace(SMALL, descriptors=descriptors, reduction=reduction, group_heads=True)
    run(CASES[name], config, arch="sm_90")
