"""The portable backward on a CPU, through Triton's interpreter, against the float64 oracle.

bfloat16 products are wrong in the interpreter of Triton 3.6: tests/gpu has those.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
triton = pytest.importorskip("triton")

from onchip.kernels.portable import backward, backward_arguments  # noqa: E402
from onchip.kernels.portable.backward_config import (  # noqa: E402
    BackwardConfig,
    Tiles,
    choose_backward,
)
from tests import compile_only  # noqa: E402
from tests.portable_backward_cases import check_gradients, saved_of  # noqa: E402
from tests.portable_cases import Case, build  # noqa: E402

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="tests/gpu covers it where there is a GPU"
)
SMALL = BackwardConfig(Tiles(16, 32, 4, 2), Tiles(32, 16, 4, 2))
F32 = torch.float32
SCRIPT = Path(__file__).with_name("portable_backward_compiles.py")

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
@pytest.mark.parametrize("reduction", ["none", "atomics"])  # no "tma" in the interpreter
@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("name", ["plain", "window", "packed_causal", "dense_used", "all_terms"])
def test_every_config(name, descriptors, reduction):
    if not descriptors and reduction == "none":
        pytest.skip("test_every_feature has it")
    config = replace(SMALL, descriptors=descriptors, reduction=reduction, group_heads=True)
    run(CASES[name], config, arch="sm_90")


@interpreted
@pytest.mark.parametrize("with_dlse", [False, True])
def test_strided_gradients_with_and_without_an_lse_gradient(with_dlse):
    run(CASES["packed_causal"], SMALL, with_dlse=with_dlse, strided=True)
    run(CASES["sinks"], SMALL, with_dlse=with_dlse, strided=True)


@interpreted
@pytest.mark.parametrize("reduction", ["none", "atomics"])
@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize(
    "name", ["dim_256", "group_of_4", "packed_used", "dense_used", "all_terms"]
)
def test_dv_in_a_launch_of_its_own(name, descriptors, reduction):
    config = replace(SMALL, descriptors=descriptors, reduction=reduction, dv=Tiles(32, 16, 4, 2))
    run(CASES[name], config, arch="sm_90")


@interpreted
@pytest.mark.parametrize("name", ["causal", "dim_256", "all_terms"])
def test_the_chosen_config(name):
    run(CASES[name], choose_backward(build(CASES[name]).problem))


@interpreted
def test_rows_outside_of_packed_sequences_get_zero():
    call = build(CASES["packed"])
    saved = saved_of(call)
    t = call.tensors
    t.q, t.k, t.v = (torch.cat((x, x.new_full((3, *x.shape[1:]), 7.0))) for x in (t.q, t.k, t.v))
    problem = replace(call.problem, tokens_q=len(t.q))
    extra = saved.out.new_zeros(3, *saved.out.shape[1:])
    saved.out, saved.dout = (torch.cat((x, extra)) for x in (saved.out, saved.dout))
    lines = saved.lse.new_zeros(len(saved.lse), 3)
    saved.lse, saved.dlse = (torch.cat((x, lines), 1) for x in (saved.lse, saved.dlse))
    gradients = backward.launch_with(SMALL, problem, t, saved)
    assert all(not x[-3:].any() for x in gradients[:3])


@interpreted
def test_gradients_are_bitwise_reproducible():
    call = build(CASES["packed_causal"])
    saved = saved_of(call)
    first, second = (backward.launch_with(SMALL, call.problem, call.tensors, saved) for _ in "ab")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_deterministic_overrules_atomics():
    call = build(CASES["plain"])
    problem = replace(call.problem, deterministic=True)
    config = replace(SMALL, reduction="atomics")
    saved = saved_of(call)
    spec = backward_arguments.spec_of(config, "dkdv", problem, call.tensors, saved.dout)
    assert spec.reduction == "none"


@pytest.mark.parametrize("size", [{"block_m": 24}, {"num_warps": 3}, {"num_stages": 0}])
def test_a_bad_config_is_refused(size):
    (name,) = size
    with pytest.raises(ValueError, match=name):
        Tiles(**{"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 1, **size})
    with pytest.raises(ValueError, match="reduction"):
        BackwardConfig(Tiles(64, 64, 4, 1), Tiles(64, 64, 4, 1), "sum")


@pytest.mark.parametrize("arch", ["", "sm_80", "sm_90", "sm_120", "gfx942"])
def test_every_problem_has_a_config_whose_tiles_fit_the_statistics(arch):
    for dim in (1, 64, 80, 128, 256):
        for dtype in (torch.float16, F32):
            problem = build(Case((4,), (4,), dim=dim, dim_v=dim, dtype=dtype)).problem
            config = choose_backward(replace(problem, arch=arch, device="cuda"))
            assert max(config.dkdv.block_m, config.dq.block_m) <= backward_arguments.STATS_BLOCK


def compiles(*arguments: str) -> list[dict]:
    return compile_only.run_script(SCRIPT, *arguments)


def test_speed_goals_compile_to_wgmma_without_spills():
    cases = [
        {"arch": "sm_90", "dim": dim, "features": features}
        for dim in (64, 128, 256)
        for features in ("full", "causal")
    ]
    for used in compiles("resources", json.dumps(cases)):
        print(used)
        assert used["shared_bytes"] <= 227 << 10, used
        if used["kernel"] != "pre":
            assert used["wgmma"] > 0 and used["tma_loads"] > 0, used
            assert used["loop_spills"] == 0 and used["warnings"] == [], used


def test_other_targets_compile_and_fit():
    limits = {"sm_80": 163 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}
    cases = [
        {"arch": "sm_90", "dim": 128, "features": "packed_causal"},
        {"arch": "sm_90", "dim": 80, "features": "terms"},
        {"arch": "sm_80", "dim": 128, "features": "window"},
        {"arch": "gfx942", "dim": 128, "features": "causal"},
    ]
    found = compiles("resources", json.dumps(cases))
    assert len(found) == 3 * len(cases)
    for used in found:
        print(used)
        assert used["shared_bytes"] <= limits[used["arch"]], used


def test_lengths_and_windows_compile_nothing_anew():
    for count in compiles("counts"):
        assert count["kernels"] == count["configs"], count
