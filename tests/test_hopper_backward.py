"""The Hopper backward without a GPU: choices, what it compiles to, and its roles in a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from onchip import dispatch
from onchip.kernels.hopper.backward_config import BackwardConfig, choose_backward, padded
from onchip.problem import Op, Problem
from tests import compile_only
from tests.portable_cases import Case, build

HERE = Path(__file__).parent
SHARED_BYTES = 227 << 10

COMPILED = [
    {"dim": dim, **features} for dim in (64, 128, 256) for features in ({}, {"causal": True})
] + [
    {"dim": 64, "packed": True, "window": [1023, 0], "deterministic": True},
    {"dim": 128, "causal": True, "deterministic": True},
    {"dim": 128, "packed": True, "softcap": 30.0},
    {"dim": 64, "batch": 16, "seqlen": 1024, "causal": True},
    {"dim": 64, "batch": 1, "seqlen": 16384, "causal": True},
    {"dim": 64, "causal": True, "deterministic": True},
]


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    script = HERE / "hopper_backward_compiles.py"
    found = compile_only.run_script(script, json.dumps(COMPILED))
    for used in found:
        print(used)
    return found


def test_every_config_compiles_and_fits(compiled):
    for used in compiled:
        assert used["shared_bytes"] <= SHARED_BYTES, used


def test_products_are_not_serialised(compiled):
    """C7510 and the like: products that wait for each other, or registers that are ignored."""
    for used in compiled:
        assert used["warnings"] == [], used


def test_main_loops_do_not_spill(compiled):
    """Masked tiles are few. One of two consumers of "queries" keeps a number in memory, and at
    D = 128 those of "keys" a few addresses: 653 TFLOP/s at 16k, 591 without by an order of
    products that needs fewer registers (H200, 2026-11-30)."""
    for used in compiled:
        features = set(used["features"])
        if used["kernel"] == "queries" and not features:
            assert used["loop_spills"] <= 3, used
        elif used["kernel"] == "keys" and used["dim"] == 128:
            assert used["loop_spills"] <= (35 if "deterministic" in features else 24), used
        elif used["kernel"] != "queries" and "softcap" not in features:
            assert used["unmasked_spills"] == 0, used


MODELLED = {
    "full": {"lengths_q": [128], "lengths_k": [256], "heads": 2, "kv_heads": 2},
    "tails": {"lengths_q": [100, 100], "lengths_k": [211, 211], "heads": 4, "kv_heads": 2},
    "causal": {"lengths_q": [313], "lengths_k": [313], "heads": 4, "kv_heads": 1, "causal": True},
    "more_keys": {"lengths_q": [100], "lengths_k": [377], "causal": True},
    "more_queries": {"lengths_q": [377], "lengths_k": [100], "causal": True},
    "window": {"lengths_q": [400], "lengths_k": [450], "window": [130, 70]},
    "window_left": {"lengths_q": [400], "lengths_k": [500], "window": [33, -1]},
    "window_causal": {"lengths_q": [400], "lengths_k": [400], "window": [100, 0]},
    "beyond": {"lengths_q": [400], "lengths_k": [20], "window": [4, 3]},
    "softcap": {"lengths_q": [200], "lengths_k": [200], "softcap": 5.0, "causal": True},
    "low_lse": {"lengths_q": [100], "lengths_k": [101], "scale": -4.0},
    "one": {"lengths_q": [1], "lengths_k": [1], "causal": True},
    "packed": {"lengths_q": [133, 0, 5, 70], "lengths_k": [100, 90, 0, 240], "packed": True},
    "packed_causal": {
        "lengths_q": [133, 1, 200], "lengths_k": [200, 7, 100], "heads": 4, "kv_heads": 2,
        "packed": True, "causal": True,
    },
    "packed_window": {
        "lengths_q": [133, 1, 200], "lengths_k": [200, 7, 100], "packed": True, "window": [50, 20],
    },
}  # fmt: skip
LATE = {"late": True}
LAG = {"stages": 3, "starts_at_lse": True, "ds_buffers": 3, "holds_keys": True, "lag": 1}
LAGS = LAG | {"lag": 2}
LAG_LATE = {"late": True, "lag": 1}


def modelled(cases: list[dict]) -> list[str]:
    """What is wrong with each case's gradients."""
    paths = [str(HERE.parent), *sys.path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    command = [sys.executable, str(HERE / "hopper_backward_model.py"), json.dumps(cases)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return [case["wrong"] for case in json.loads(done.stdout.splitlines()[-1])]


SOME = ("causal", "window", "packed_causal")


@pytest.mark.parametrize(
    ("own", "names"),
    [
        ({"dim": 64, "dim_v": 64}, tuple(MODELLED)),
        ({"dim": 128, "dim_v": 64}, ("tails", "packed_window", "softcap")),
        ({"dim": 64, "dim_v": 128}, ("more_keys", "more_queries")),
        ({"dim": 192, "dim_v": 128}, SOME),
        ({"dim": 64, "dim_v": 72, "deterministic": True}, SOME),
        ({"dim": 128, "dim_v": 128}, ("causal", "low_lse")),
        ({"dim": 128, "dim_v": 128, "deterministic": True}, SOME),
        ({"dim": 64, "dim_v": 64, "config": LATE}, SOME),
        ({"dim": 64, "dim_v": 64, "deterministic": True}, SOME),
        ({"dim": 64, "dim_v": 64, "config": LAG}, ("tails", "causal", "packed", "packed_causal")),
        ({"dim": 64, "dim_v": 64, "config": LAGS}, ("tails", "causal", "window")),
        ({"dim": 64, "dim_v": 64, "config": LAGS, "deterministic": True}, ("causal", "tails")),
        ({"dim": 80, "dim_v": 72, "config": LAG_LATE}, ("tails", "causal", "packed_window")),
        ({"dim": 64, "dim_v": 64, "config": LAG, "deterministic": True}, ("tails",)),
    ],
    ids=str,
)
def test_roles_give_the_oracles_gradients(own, names):
    """Every role, barrier and coordinate of the device code, in `gluon_model`."""
    wrong = modelled([MODELLED[name] | own for name in names])
    assert dict(zip(names, wrong, strict=True)) == dict.fromkeys(names, "")


def test_walks_visit_what_rows_see():
    compile_only.run_script(HERE / "hopper_backward_walks.py", "0", "300")


def _problem(**changes) -> Problem:
    problem = build(Case((64,), (64,), dim=64, dim_v=64)).problem
    return replace(problem, op=Op.BACKWARD, device="cuda", arch="sm_90", **changes)


def test_it_is_the_choice_on_hopper():
    assert dispatch.choose(_problem()).name == "hopper"
    assert dispatch.choose(_problem(), "portable").name == "portable"
    explained = dispatch.explain(_problem()).on("H200")
    assert explained.chosen == "hopper" and explained.skipped == ["portable"]
    assert "block_n=128" in str(explained)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"arch": "sm_80"}, "needs sm_90, not sm_80"),
        ({"arch": "sm_100"}, "needs sm_90, not sm_100"),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, "takes float16, bfloat16"),
        ({"head_dim": 20, "head_dim_v": 20}, "multiples of 8"),
        ({"alibi": 1}, "has no alibi"),
        ({"seqused_k": True}, "has no seqused_k"),
        ({"dropout_p": 0.1}, "has no dropout"),
        ({"seqlen_q": 0}, "at least one query"),
    ],
)
def test_what_it_rejects(changes, reason):
    problem = replace(_problem(), **changes)
    assert reason in "; ".join(dispatch.rejections(problem, "hopper")["hopper"])
    assert dispatch.choose(problem).name == "portable"


def test_configs_are_chosen_by_head_dimension():
    assert [padded(d) for d in (8, 64, 72, 128, 136, 256)] == [64, 64, 128, 128, 256, 256]
    for dims, late, apart in (
        ((64, 64), False, False), ((128, 64), True, False), ((64, 128), True, False),
        ((128, 128), True, False), ((192, 128), False, True),
    ):  # fmt: skip
        config = choose_backward(_problem(head_dim=dims[0], head_dim_v=dims[1]))
        assert (config.late, config.apart) == (late, apart), dims


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_m": 128}, "block_m: got 128"),
        ({"block_n": 64}, "block_n: got 64"),
        ({"stages": 1}, "stages: got 1"),
        ({"apart": True, "block_n": 64, "starts_at_lse": True}, "apart: got True"),
        ({"lag": 0}, "lag: got 0"),
    ],
)
def test_a_config_says_what_is_wrong_with_it(changes, message):
    with pytest.raises(ValueError, match=message):
        BackwardConfig(**changes)
