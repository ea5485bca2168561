"""The Hopper float8 forward's roles in a model of Gluon give the emulation's results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from onchip.kernels import fp8_emulated
from tests.fp8_cases import relative
from tests.hopper_fp8_cases import posed
from tests.model_runs import results_of

HERE = Path(__file__).parent
INPUTS = {
    "full": {"lengths": [[300, 450]]},
    "causal": {"lengths": [[500, 500]], "causal": True, "heads": 3},
    "more_queries": {"lengths": [[300, 140]], "causal": True},
    "window": {"lengths": [[300, 450]], "causal": True, "window": [100, 0]},
    "left": {"lengths": [[300, 450]], "window": [100, -1]},
    "both_edges": {"lengths": [[300, 333]], "window": [100, 40], "seed": 1},
    "terms": {"lengths": [[200, 300]], "causal": True, "softcap": 5.0, "slopes": [0.5, 0.02]},
    "packed": {
        "lengths": [[130, 30], [64, 300], [0, 5], [200, 200]], "causal": True, "packed": True
    },
}  # fmt: skip
USUAL = {"warpgroups": 2, "stages": 2, "q_buffers": 2, "turns": True, "registers": 240}
CONFIGS = {
    "usual": USUAL,
    "free": USUAL | {"turns": False},
    "one_level": USUAL | {"two_level": False, "stages": 3},
    "three": USUAL | {"warpgroups": 3, "registers": 160},
    "parts": USUAL | {"parts": 2, "q_buffers": 1},
}
CASES = [(inputs, config) for config in CONFIGS for inputs in INPUTS]


@pytest.fixture(scope="module")
def modelled(tmp_path_factory) -> dict:
    """What the roles wrote, case by case: (out, lse), or what went wrong."""
    entries = [{"inputs": INPUTS[i], "config": CONFIGS[c]} for i, c in CASES]
    script, folder = HERE / "hopper_fp8_model.py", tmp_path_factory.mktemp("model")
    return dict(zip(CASES, results_of(script, entries, folder), strict=True))


@pytest.mark.parametrize(("inputs", "config"), CASES)
def test_roles_give_the_emulations_result(modelled, inputs, config):
    found = modelled[inputs, config]
    assert not isinstance(found, str), found
    want, want_lse = fp8_emulated.launch(*posed(**INPUTS[inputs]))
    out, lse = found
    assert not out.isnan().any()
    assert relative(out, want) < 1e-4  # a code may fall to the other side
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=2e-5)
