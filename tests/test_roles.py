"""Tiles of kernels whose warpgroups have roles: shared memory, registers, the planner, explain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from onchip import dispatch
from onchip.analysis import bill as bills
from onchip.analysis import planner, roles, tiles
from onchip.analysis.hardware import Hardware
from onchip.analysis.predict import predict
from onchip.kernels.hopper import backward_config, config, fp8_config
from onchip.problem import Layout, Mask, Op, Problem
from tests import compile_only

SCRIPT = Path(__file__).with_name("roles_compiles.py")
H200 = Hardware.named("H200")
KIB = 1024


def problem_of(d=128, d_v=None, seqlen=4096, heads=32, op=Op.FORWARD, mask=None, **more):
    given = {
        "op": op, "device": "cuda", "arch": "sm_90", "dtype": torch.bfloat16,
        "kv_dtype": torch.bfloat16, "layout_q": Layout.DENSE, "layout_k": Layout.DENSE,
        "batch": 1, "seqlen_q": seqlen, "seqlen_k": seqlen, "tokens_q": seqlen,
        "num_heads": heads, "num_kv_heads": heads, "head_dim": d, "head_dim_v": d_v or d,
        "mask": mask or Mask(), "scale": 1.0,
    }  # fmt: skip
    return Problem(**(given | more))


def shipped(module: ModuleType, kind: type) -> set:
    """Every config that a module has in its names and tables."""
    values = [x for name, x in vars(module).items() if name.startswith("_") and name[1:].isupper()]
    values += [x for table in values if isinstance(table, dict) for x in table.values()]
    return {x for x in values if isinstance(x, kind)}


@pytest.fixture(scope="module")
def compiled() -> list[tuple[Problem, object, dict]]:
    """Problem, config and what it was compiled to use, of every launch."""
    pytest.importorskip("triton")
    from tests import roles_compiles as script

    found = compile_only.run_script(SCRIPT)
    assert isinstance(found, dict)
    cases = []
    for given, used in zip(script.FORWARDS, found["forwards"], strict=True):
        problem = script.forward_of(*given)[0]
        cases.append((problem, config.choose_forward(problem), used))
    for given, used in zip(script.FLOAT8, found["float8"], strict=True):
        problem = script.float8_of(*given)[0]
        cases.append((problem, fp8_config.choose_fp8(problem), used))
    for given, launches in zip(script.BACKWARDS, found["backwards"], strict=True):
        problem = script.backward_of(*given)[0]
        chosen = backward_config.choose_backward(problem)
        assert [used["part"] for used in launches] == [*roles.parts(chosen, problem)]
        cases += [(problem, chosen, used) for used in launches]
    return cases


def test_shared_memory_and_registers_are_what_the_compiler_uses(compiled):
    """Barriers and alignment take 0.3 to 0.7 KiB (triton 3.6); 2 are allowed."""
    for problem, chosen, used in compiled:
        assert used["config"] == repr(chosen)
        found = roles.use(problem, chosen, used["part"])
        over = used["shared_bytes"] - sum(found.shared.values())
        assert 0 <= over <= tiles.ALLOWANCE_BYTES, (used, found)
        assert used["shared_bytes"] <= H200.shared_block_bytes
        assert used["warps"] == found.shape.num_warps
        assert used["registers"] == roles.launch_registers(used["warps"], H200)
        assert roles.reasons(found, H200) == []


def test_every_shipped_config_was_compiled(compiled):
    seen = {chosen for _, chosen, _ in compiled}
    wanted = shipped(config, config.Config) | shipped(fp8_config, fp8_config.FP8Config)
    wanted |= shipped(backward_config, backward_config.BackwardConfig)
    assert len(wanted) >= 6 and wanted - seen == set()


def test_buffers_of_a_forward():
    """D = 128, two warpgroups: three tiles of Q of 32 KiB, two each of K and V."""
    chosen = config.Config(2, 128, 2, q_buffers=3, turns=True, late=False, registers=240)
    found = roles.tiling(problem_of(), chosen, H200)
    assert found.shared == {"q": 96 * KIB, "k": 64 * KIB, "v": 64 * KIB}
    assert found.registers == {"o": 64, "s": 64, "p": 32}
    assert (found.blocks_per_sm, found.num_programs) == (1, 32 * 32)
    assert found.waste == 1.0 and found.re_reads == 32
    # Registers beside shared memory allow one program: 12 warps of 168 are all of an SM's.
    assert tiles.resident_blocks(H200, 12, 0, 168) == (1, "registers")


def test_buffers_of_a_backward():
    problem = problem_of(op=Op.BACKWARD)
    found = predict(problem, H200, backward_config.BackwardConfig(late=True))
    assert set(found.tilings) == {"dkdv"}
    shared = found.tilings["dkdv"].shared
    assert (shared["k"], shared["q"], shared["ds"], shared["dq"]) == tuple(
        n * KIB for n in (32, 32, 32, 32)
    )
    apart = backward_config.BackwardConfig(block_n=64, apart=True)
    wide = predict(replace(problem, head_dim=256, head_dim_v=256), H200, apart)
    assert set(wide.tilings) == {"dkdv", "dq"}
    assert wide.tilings["dq"].shared["k"] == 64 * KIB
    assert wide.roofline.total.flops == 7 / 5 * wide.flops


@pytest.mark.parametrize("mask", [Mask(), Mask(-1, 0), Mask(100, 50)])
def test_bill_of_a_summed_backward(mask):
    """5 products; the float32 sum of dQ is cleared, added to, and rounded."""
    problem = problem_of(d=80, op=Op.BACKWARD, mask=mask, num_kv_heads=8)
    bill = bills.backward_summed(problem, (64, 128), 128)
    pre, keys, last = bill.stages
    assert bill.flops == keys.flops == predict(problem, H200).flops
    rows = 4096 * 32
    assert pre.slow_bytes == rows * (2 * 160 + 4 + 3 * 4 - 4 + 4 * 128)
    seen = range(4096)
    tiles_read = sum(
        any(_sees(mask, i, key) for i in (row, row + 63) for key in (first, first + 127))
        or _covers(mask, row, first)
        for row in seen[::64]
        for first in seen[::128]
    )
    requested = tiles_read * 64 * 32
    reads = {t.tensor: t.slow_bytes for t in keys.reads}
    assert reads["dq sum"] == requested * 4 * 128 and reads["q"] == requested * 160
    assert {t.tensor for t in keys.writes} == {"dk", "dv", "dq sum"}
    assert last.slow_bytes == rows * (4 * 128 + 160)
    cached = bills.backward_summed(problem, (64, 128), 128, cache=bills.Cache(1 << 30, 132))
    assert cached.by_tensor()["dq sum"] == 4 * rows * 4 * 128


def _sees(mask: Mask, i: int, j: int) -> bool:
    return (mask.left < 0 or j >= i - mask.left) and (mask.right < 0 or j <= i + mask.right)


def _covers(mask: Mask, row: int, first: int) -> bool:
    """Whether a band passes through a tile of 64 x 128 between its corners."""
    return any(_sees(mask, i, j) for i in range(row, row + 64) for j in range(first, first + 128))


def test_bill_of_a_backward_that_clears_and_rounds_beside_its_products():
    """The same bytes, but most of them while others multiply."""
    problem = problem_of(seqlen=1024, heads=128, op=Op.BACKWARD)
    rows = 1024 * 128
    alone = bills.backward_summed(problem, (64, 128), 128)
    found = bills.backward_summed(problem, (64, 128), 128, outside=0.25)
    assert found.by_tensor() == alone.by_tensor()
    pre, keys, last = found.stages
    assert pre.slow_bytes == rows * (2 * 256 + 3 * 4 + 4 * 128 // 4)
    assert last.slow_bytes == rows * (4 * 128 + 256) // 4
    assert keys.slow_bytes - alone.stages[1].slow_bytes == rows * (2 * 4 * 128 + 256) * 3 // 4
    # 200 CTAs are 25 heads of 8.
    config = backward_config.choose_backward(problem)
    assert roles.share_outside(problem, config) == 25 / 128
    assert roles.share_outside(replace(problem, num_kv_heads=16), config) == 1.0
    assert predict(problem, H200, config).bill.stages[2].slow_bytes == rows * 768 * 25 // 128


@pytest.mark.parametrize(("kernel", "op"), [("hopper", Op.FORWARD), ("hopper", Op.BACKWARD)])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_explain_shows_tiles(kernel, op, d):
    told = dispatch.explain(problem_of(d=d, op=op, mask=Mask(-1, 0)), kernel, None, H200)
    assert told.chosen == kernel and told.prediction and told.prediction.tilings
    text = str(told)
    assert "assumed" not in text and " warps, " in text and "KiB shared, 1 a SM" in text


def test_explain_of_float8():
    fp8 = {"dtype": torch.float8_e4m3fn, "kv_dtype": torch.float8_e4m3fn, "out_dtype": "bfloat16"}
    told = dispatch.explain(problem_of(**fp8), "fp8_hopper", None, H200).prediction
    assert told and told.tilings["flash"].shared["o"] == 32 * KIB
    moved = told.bill.by_tensor()
    assert moved["out"] == 2 * moved["q"] == 4096 * 32 * 128 * 2


def test_what_does_not_fit():
    wide = config.Config(2, 128, 3, q_buffers=3, turns=True, late=False, registers=240)
    with pytest.raises(ValueError, match="needs 288 KiB of shared memory; H200 gives 227 KiB"):
        predict(problem_of(), H200, wide)
    tall = config.Config(3, 128, 2, q_buffers=1, turns=True, late=False, registers=160)
    with pytest.raises(ValueError, match="holds 160 registers .*; 152 are allowed"):
        roles.tiling(problem_of(), replace(tall, registers=152), H200)
    a100 = Hardware.named("A100 80GB")
    with pytest.raises(ValueError, match="has roles, which need sm_90; A100 80GB is sm_80"):
        roles.tiling(problem_of(), config.choose_forward(problem_of()), a100)
    assert not roles.has_roles(SimpleNamespace(block_m=64, block_n=64))


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("mask", [Mask(), Mask(-1, 0)])
def test_what_the_kernel_chooses_is_in_the_plan(d, mask):
    """And the model, which only reckons, takes it for one of the good ones."""
    problem = problem_of(d=d, mask=mask, seqlen=16384)
    plan = planner.plan_roles(problem, H200)
    chosen = planner.RoleShape.of(config.choose_forward(problem))
    (time_us,) = (c.model_us for c in plan.feasible if c.shape == chosen)
    assert time_us < 1.2 * plan.feasible[0].model_us
    assert len(plan.feasible) + len(plan.failing) == 48
    assert chosen.registers == config.choose_forward(problem).registers
    assert str(plan.feasible[0].shape) in str(plan).splitlines()[0]


def test_plans_say_why_the_rest_fails():
    failing = dict(planner.plan_roles(problem_of(), H200).failing)
    why = failing[planner.RoleShape(3, 64, 2, 1)]
    assert why == ("a warpgroup would skip more than one tile of keys",)
    why = failing[planner.RoleShape(2, 256, 2, 1)]
    assert why[0].startswith("needs 304 KiB of shared memory; H200 gives 227 KiB")
    assert "holds 256 registers of tiles a consumer thread; 240 are allowed" in why
    assert planner.plan_roles(problem_of(), Hardware.named("L4")).feasible == ()
    with pytest.raises(ValueError, match="seqlen_k: got 0"):
        planner.plan_roles(problem_of(seqlen_k=0), H200)
