"""The Hopper forward compiles for sm_90a without a GPU: registers, spills, machine code.

What every kernel uses is printed (`pytest -s`).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from onchip import kernels
from onchip.kernels import KERNELS
from onchip.kernels.hopper.config import Config, choose_forward
from onchip.problem import Layout, Mask, Op, Problem
from tests import compile_only

SCRIPT = Path(__file__).with_name("hopper_forward_compiles.py")
SHARED_BYTES = 227 << 10

# The shapes of the speed goals, and every feature somewhere.
FAST = [[dim, dim, name] for dim in (64, 128, 256) for name in ("full", "causal")]
FAST += [[64, 64, "folded"], [128, 128, "folded"]]
FAST += [[128, 128, "grouped"], [128, 128, "pieces"], [256, 256, "few"], [128, 128, "order"]]
OTHERS = [
    [128, 128, "packed"],
    [128, 128, "window"],
    [64, 64, "packed"],
    [64, 64, "window"],
    [256, 256, "window"],
    [256, 256, "all"],
    [64, 64, "terms"],
    [192, 128, "causal_unaligned"],
    [256, 256, "order"],
    [192, 128, "order_apart"],
    [64, 64, "order_full"],
    [128, 128, "order_full"],
]
PROBLEM = Problem(
    op=Op.FORWARD, device="cuda", arch="sm_90", dtype=torch.bfloat16, kv_dtype=torch.bfloat16,
    layout_q=Layout.DENSE, layout_k=Layout.DENSE, batch=2, seqlen_q=1024, seqlen_k=1024,
    tokens_q=2048, num_heads=16, num_kv_heads=16, head_dim=128, head_dim_v=128, mask=Mask(),
    scale=0.1,
)  # fmt: skip
RECORD = next(k for k in KERNELS if k.name == "hopper" and k.op is Op.FORWARD)


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    found = compile_only.run_script(SCRIPT, json.dumps(FAST + OTHERS))
    for used in found:
        print(used)
    return found


def _main_walks(used: dict) -> list[dict]:
    """Loops that are a step of one K/V tile that is not masked."""
    problem = replace(PROBLEM, head_dim=used["dim"], head_dim_v=used["dim_v"])
    causal = used["features"] != "full" and used["features"] != "packed_full"
    mask = Mask(right=0 if causal else -1)
    config = choose_forward(replace(problem, mask=mask))
    assert not config.maxima
    exps = config.block_n // 2
    return [w for w in used["walks"] if w["exps"] == exps]


def test_bases_lag_in_bfloat16_only_and_where_walks_are_short():
    causal = replace(PROBLEM, mask=Mask(right=0))
    for dim, size in ((64, 1024), (128, 1024), (64, 4096), (128, 4096)):
        problem = replace(causal, head_dim=dim, head_dim_v=dim, seqlen_q=size, seqlen_k=size,
                          batch=16)  # fmt: skip
        assert choose_forward(problem).lags == (size == 1024)
        assert not choose_forward(replace(problem, dtype=torch.float16)).lags


def test_few_long_tiles_are_folded():
    problem = replace(PROBLEM, batch=1, num_heads=2, seqlen_q=4096, seqlen_k=4096, head_dim=64,
                      head_dim_v=64, mask=Mask(right=0))  # fmt: skip
    assert choose_forward(problem).folded


def test_every_variant_fits_and_no_products_wait_for_each_other(compiled):
    assert len(compiled) == len(FAST + OTHERS)
    for used in compiled:
        assert used["shared_bytes"] <= SHARED_BYTES, used
        assert used["wgmma"] > 0 and used["tma_loads"] > 0, used
        assert used["warnings"] == [], used  # C7510: wgmma is serialised
        assert used["scratch_on_barriers"] == [], used


def test_nothing_is_spilled(compiled):
    for used in compiled:
        assert used["spill_bytes"] == 0, used
    for used in compiled[: len(FAST)]:
        assert len(_main_walks(used)) >= 2, used


def test_exponentials_stand_where_products_hide_them(compiled):
    for used in compiled[: len(FAST)]:
        for walk in _main_walks(used):
            inside = walk["between_waits"]
            if used["dim"] < 256:  # behind the wait for S, while another warpgroup multiplies
                inside += walk["behind_waits"]
            assert inside == walk["exps"], used


def test_walks_of_masked_tiles_cost_the_main_walk_nothing(compiled):
    """P is carried from walk to walk as words; 16-bit values were taken apart in every step."""
    found = {used["features"]: _main_walks(used) for used in compiled if used["dim"] == 128}
    alone = max(walk["instructions"] for walk in found["causal"])
    assert alone < 530  # 190 of them in branches that almost no step takes
    for name in ("packed", "window"):
        assert min(walk["instructions"] for walk in found[name]) <= 1.02 * alone, name


def test_hidden_values_that_are_not_finite_are_looked_for_where_there_are_some(compiled):
    for used in compiled:
        assert used["repairs"] == (used["features"] != "terms"), used  # or where sums overflow


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"arch": "sm_80"}, "needs sm_90"),
        ({"arch": "sm_100"}, "needs sm_90"),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, "takes float16, bfloat16"),
        ({"head_dim": 20}, "multiples of 8"),
        ({"scale": -1.0}, "a scale over 0"),
        ({"seqlen_k": 0}, "at least one query and one key"),
        ({"unaligned": ("q",)}, "TMA, which q does not suit"),
        ({"dropout_p": 0.1}, "has no dropout"),
        ({"layout_k": Layout.PAGED, "page_size": 48}, "pages of 8, 16, 32, 64 or multiples of 128"),
    ],
)
def test_what_it_does_not_take_is_named(changed, reason):
    assert not RECORD.rejections(PROBLEM)
    assert any(reason in why for why in RECORD.rejections(replace(PROBLEM, **changed)))


def test_older_tritons_are_named(monkeypatch):
    monkeypatch.setattr(kernels, "_triton_release", lambda: (3, 5))
    assert RECORD.rejections(PROBLEM) == ["needs Triton 3.6 or later, not 3.5"]
    monkeypatch.setattr(kernels, "_triton_release", lambda: None)  # explained where none is
    assert RECORD.rejections(PROBLEM) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"warpgroups": 4},
        {"block_n": 48},
        {"warpgroups": 3, "block_n": 64},
        {"q_buffers": 2},
        {"stages": 5, "turns": True},
        {"pins": "q"},
    ],
)
def test_a_config_that_does_not_go_together_is_refused(wrong):
    base = {"warpgroups": 2, "block_n": 128, "stages": 2, "q_buffers": 3, "turns": True}
    with pytest.raises(ValueError, match=r"got .+; (allowed|a warpgroup|there are)"):
        Config(**{**base, "late": False, "registers": 240, **wrong})
