"""The portable forward compiles for GPUs that are not there, and what it uses there.

Registers, shared memory and spills of every kernel are printed (`pytest -s`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests import compile_only

SCRIPT = Path(__file__).with_name("portable_forward_compiles.py")
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}

# The shapes of the speed goals, and every feature somewhere.
FAST = [
    {"arch": "sm_90", "dim": dim, "features": features}
    for dim in (64, 128, 256)
    for features in ("full", "causal")
]
OTHERS = [
    {"arch": "sm_90", "dim": 128, "features": "window"},
    {"arch": "sm_90", "dim": 80, "features": "terms"},
    {"arch": "sm_90", "dim": 128, "features": "pages"},
    {"arch": "sm_80", "dim": 128, "features": "packed_causal"},
    {"arch": "gfx942", "dim": 128, "features": "causal"},
    {"arch": "gfx942", "dim": 64, "features": "pages"},
]


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    found = compile_only.run_script(SCRIPT, "resources", json.dumps(FAST + OTHERS))
    for used in found:
        print(used)
    return found


def test_every_target_compiles_and_fits(compiled):
    assert len(compiled) == len(FAST + OTHERS)
    for used in compiled:
        assert used["shared_bytes"] <= SHARED_BYTES[used["arch"]], used


def test_speed_goals_use_the_tensor_cores_without_spills_in_a_loop(compiled):
    for used in compiled[: len(FAST)]:
        assert used["wgmma"] > 0 and used["tma_loads"] > 0, used
        assert used["loop_spills"] == 0, used
        assert used["warnings"] == [], used  # C7510: products that wait for each other


def test_lengths_and_windows_compile_nothing_anew():
    for count in compile_only.run_script(SCRIPT, "counts"):
        assert count["kernels"] == count["configs"] <= 2, count
