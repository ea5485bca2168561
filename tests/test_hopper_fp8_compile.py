"""The Hopper float8 forward compiles for sm_90a without a GPU; what it takes and refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from onchip.kernels import KERNELS
from onchip.kernels.hopper.fp8_config import FP8Config
from onchip.problem import Layout, Mask, Op, Problem
from tests import compile_only

SCRIPT = Path(__file__).with_name("hopper_fp8_compiles.py")
SHARED_BYTES = 227 << 10
CASES = [
    [64, "full", {}],
    [64, "causal", {}],
    [64, "short", {}],
    [64, "terms", {}],
    [128, "full", {}],
    [128, "causal", {}],
    [128, "packed", {}],
    [128, "window", {}],
    [256, "full", {}],
    [256, "causal", {}],
]
FLOAT8 = torch.float8_e4m3fn
PROBLEM = Problem(
    op=Op.FORWARD, device="cuda", arch="sm_90", dtype=FLOAT8, kv_dtype=FLOAT8,
    layout_q=Layout.DENSE, layout_k=Layout.DENSE, batch=2, seqlen_q=1024, seqlen_k=1024,
    tokens_q=2048, num_heads=16, num_kv_heads=16, head_dim=128, head_dim_v=128, mask=Mask(),
    scale=0.1, out_dtype="bfloat16",
)  # fmt: skip
RECORD = next(k for k in KERNELS if k.name == "fp8_hopper")


def test_it_fits_and_no_products_wait_for_each_other():
    for used in compile_only.run_script(SCRIPT, json.dumps(CASES)):
        print(used)
        assert used["shared_bytes"] <= SHARED_BYTES, used
        assert used["qgmma"] > 0 and used["tma_loads"] > 0, used
        assert used["warnings"] == [], used  # C7510: wgmma is serialised
        assert used["scratch_on_barriers"] == [], used
        if used["features"] in ("full", "causal", "short"):
            # Between tiles at D = 64, where three warpgroups share the registers, and at D = 256,
            # where O alone takes half of them.
            assert used["spill_bytes"] <= {64: 32, 128: 0, 256: 200}[used["dim"]], used


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"arch": "sm_80"}, "needs sm_90"),
        ({"head_dim": 272}, "D up to 256"),
        ({"head_dim": 72}, "multiples of 16"),
        ({"scale": -1.0}, "a scale over 0"),
        ({"out_dtype": "float32"}, "writes float16 or bfloat16"),
        ({"unaligned": ("k",)}, "TMA, which k does not suit"),
        ({"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}, "takes float8_e4m3fn"),
    ],
)
def test_what_it_does_not_take_is_named(changed, reason):
    assert not RECORD.rejections(PROBLEM)
    assert any(reason in why for why in RECORD.rejections(replace(PROBLEM, **changed)))


@pytest.mark.parametrize("wrong", [{"warpgroups": 4}, {"stages": 4}, {"parts": 3}])
def test_a_config_that_does_not_go_together_is_refused(wrong):
    base = {"warpgroups": 2, "stages": 2, "q_buffers": 2, "turns": True, "registers": 240}
    with pytest.raises(ValueError, match=r"got \d+"):
        FP8Config(**{**base, **wrong})
