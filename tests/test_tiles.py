"""Tiles: worked numbers, and predictions against what compiled kernels use."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from onchip.analysis import decode_tiles, planner, tiles
from onchip.analysis.hardware import Hardware
from onchip.analysis.predict import predict
from onchip.analysis.tiles import Part, TileShape, tiling
from onchip.kernels.portable import backward_config as portable_backward
from onchip.kernels.portable import config as portable
from onchip.kernels.portable.decode_config import choose_decode
from onchip.problem import Layout, Mask, Op, Problem
from tests import compile_only

SCRIPT = Path(__file__).with_name("tiles_compiles.py")
H100, A100 = Hardware.named("H100 SXM"), Hardware.named("A100 80GB")
KIB = 1024


def problem_of(seqlen=4096, heads=8, d=128, mask=None, batch=1, op=Op.FORWARD, **more) -> Problem:
    given = {
        "op": op, "device": "cuda", "arch": "sm_90", "dtype": torch.bfloat16,
        "kv_dtype": torch.bfloat16, "layout_q": Layout.DENSE, "layout_k": Layout.DENSE,
        "batch": batch, "seqlen_q": seqlen, "seqlen_k": seqlen, "tokens_q": batch * seqlen,
        "num_heads": heads, "num_kv_heads": heads, "head_dim": d, "head_dim_v": d,
        "mask": mask or Mask(), "scale": 1.0,
    }  # fmt: skip
    return Problem(**(given | more))


def test_tile_budget():
    """d = 128, B_c = 64, 16-bit inputs, float32 S and O: 64, 96 and 160 KiB."""
    found = [tiles.on_chip_bytes(rows, 64, 128, 128) for rows in (32, 64, 128)]
    assert found == [64 * KIB, 96 * KIB, 160 * KIB]
    grids = [tiling(problem_of(heads=1), TileShape(n, 64, 4, 1), H100) for n in (32, 64, 128)]
    assert [grid.num_programs for grid in grids] == [128, 64, 32]


def test_shared_memory_of_an_a100():
    """B_r = B_c = 128 in FP16: 16 KiB each of Q, K, V at d = 64, 32 KiB each at d = 128."""
    for d, kib in ((64, 16), (128, 32)):
        part = Part("forward", problem_of(d=d), "sm_80")
        buffers = tiles.shared_buffers(part, TileShape(128, 128, 8, 2))
        assert buffers == {"q": kib * KIB, "k": kib * KIB, "v": kib * KIB}
    assert A100.shared_sm_bytes == 164 * KIB


def test_grid_of_eight_heads():
    """B = 1, H = 8, N = 4096 on 132 SMs: 8 tasks by B x H, 256 when query tiles of 128 join."""
    found = tiling(problem_of(), TileShape(128, 64, 8, 2), H100)
    assert (found.num_heads_tasks, found.num_programs) == (8, 256)
    assert H100.num_sms == 132 and found.idle_sms == 0
    whole = tiling(problem_of(seqlen=128), TileShape(128, 64, 8, 2), H100)
    assert (whole.num_programs, whole.idle_sms, whole.waves) == (8, 124, 1)
    assert whole.imbalance == pytest.approx(132 * whole.blocks_per_sm / 8)


def test_residency_and_its_limiter():
    assert tiles.resident_blocks(H100, 4, 112 * KIB, 168) == (2, "shared memory")
    assert tiles.resident_blocks(H100, 4, 113 * KIB + 1, 168) == (1, "shared memory")
    assert tiles.resident_blocks(H100, 8, 64 * KIB, 255) == (1, "registers")
    assert tiles.resident_blocks(H100, 4, 0, 16) == (16, "threads")
    assert tiles.resident_blocks(H100, 1, 0, 16) == (32, "blocks")


def test_causal_imbalance_waste_and_re_reads():
    shape = TileShape(128, 128, 8, 2)
    full = tiling(problem_of(seqlen=1024, heads=1), shape, H100)
    assert (full.waste, full.re_reads) == (1.0, 8.0)
    causal = tiling(problem_of(seqlen=1024, heads=1, mask=Mask(-1, 0)), shape, H100)
    assert causal.waste == pytest.approx(36 * 128**2 / (1024 * 1025 / 2))
    assert causal.re_reads == pytest.approx(36 / 8)
    # 8 programs of 1 to 8 tiles, each on a slot of its own: the longest sets the time.
    slots = 132 * causal.blocks_per_sm
    assert causal.imbalance == pytest.approx(8 * slots / 36)
    many = tiling(problem_of(seqlen=8192, heads=32, mask=Mask(-1, 0)), shape, H100)
    assert 1 <= many.imbalance < 1.1
    uneven = problem_of(batch=2, layout_q=Layout.PACKED, layout_k=Layout.PACKED)
    packed = tiling(uneven, shape, H100, lengths=[(1000, 1000), (1, 4096)])
    assert packed.num_programs == 8 * (8 + 1)
    assert packed.re_reads == (8 * 8 + 32) / (8 + 32)


def test_backward_parts():
    problem = problem_of(op=Op.BACKWARD, num_kv_heads=2)
    shape = TileShape(64, 64, 4, 2)
    dkdv, dq = (tiling(problem, shape, H100, part) for part in ("dkdv", "dq"))
    assert (dkdv.num_programs, dq.num_programs) == (2 * 64, 8 * 64)
    assert dkdv.shared["k"] == 16 * KIB and dkdv.shared["q"] == 32 * KIB
    assert dq.shared["k"] == 32 * KIB and dq.shared["q"] == 16 * KIB
    assert dkdv.registers == {"dk": 64, "dv": 64, "s": 32, "p": 16, "dp": 32}
    dk, dv = (tiling(problem, shape, H100, part) for part in ("dk", "dv"))
    assert dk.registers == {"dk": 64, "s": 32, "p": 16, "dp": 32} and "v" in dk.shared
    assert dv.registers == {"dv": 64, "s": 32, "p": 16} and "v" not in dv.shared
    assert dkdv.re_reads == dq.re_reads == 64 and dkdv.waste == dq.waste == 1


@pytest.fixture(scope="module")
def compiled() -> list[tuple[Part, dict]]:
    pytest.importorskip("triton")
    from tests.portable_forward_compiles import pose
    from tests.tiles_compiles import CASES

    found = compile_only.run_script(SCRIPT, "forward")
    parts = [Part("forward", pose(arch, d, **given)[0], arch) for arch, d, given in CASES]
    return list(zip(parts, found, strict=True))


#: In a loop that is not pipelined the compiler's scratch comes and goes: -2 to +8 KiB in a
#: forward, -6 to +12 KiB in a backward (sm_80 and sm_86, D = 64 to 256).
ONE_STAGE_BYTES = 12 * KIB


def assert_near(shape: TileShape, predicted: int, used: dict) -> None:
    over = used["shared_bytes"] - predicted
    if shape.num_stages == 1:
        assert abs(over) <= ONE_STAGE_BYTES, (shape, predicted, used)
    else:
        assert 0 <= over <= tiles.ALLOWANCE_BYTES, (shape, predicted, used)


def shape_of(used: dict) -> TileShape:
    return TileShape(*(used["config"][name] for name in TileShape.__annotations__))


def test_shared_memory_is_what_the_compiler_uses(compiled):
    """Exact but for barriers and alignment: measured 0 to 1 KiB, 2 KiB allowed."""
    for part, used in compiled:
        shape = shape_of(used)
        assert_near(shape, sum(tiles.shared_buffers(part, shape).values()), used)


def test_shared_memory_of_every_shipped_config():
    """Tables for dropout and user functions too, compiled without what those need besides."""
    pytest.importorskip("triton")
    from tests import tiles_compiles as script
    from tests.portable_forward_compiles import pose

    entries = script.tables(portable, portable.Config)
    for (arch, dim, _), used in zip(
        entries, compile_only.run_script(SCRIPT, "every_forward"), strict=True
    ):
        part, shape = Part("forward", pose(arch, dim)[0], arch), shape_of(used)
        assert_near(shape, sum(tiles.shared_buffers(part, shape).values()), used)
    backwards = script.tables(portable_backward, portable_backward.BackwardConfig)
    assert len(entries) >= 12 and len(backwards) >= 14
    for (arch, dim, _), launches in zip(
        backwards, compile_only.run_script(SCRIPT, "every_backward"), strict=True
    ):
        for used in launches:
            part, shape = Part(used["part"], pose(arch, dim)[0], arch), shape_of(used)
            assert_near(shape, sum(tiles.shared_buffers(part, shape).values()), used)


def test_shared_memory_of_the_backward():
    pytest.importorskip("triton")
    from tests.portable_forward_compiles import pose
    from tests.tiles_compiles import BACKWARDS

    found = compile_only.run_script(SCRIPT, "backward")
    seen = set()
    for (arch, dim, given), launches in zip(BACKWARDS, found, strict=True):
        problem = pose(arch, dim, **given)[0]
        for used in launches:
            shape = shape_of(used)
            part = Part(used["part"], problem, arch)
            assert_near(shape, sum(tiles.shared_buffers(part, shape).values()), used)
            held = tiles.register_buffers(part, shape)
            if shape.num_stages > 1:
                assert sum(n for name, n in held.items() if name != "operands") <= used["registers"]
            seen.add(shape)
    tables = (portable_backward._SM90, portable_backward._SM90_WINDOW, portable_backward._SM80)
    configs = [config for table in tables for config in table.values()]
    wanted = {TileShape.of(c.tiles_of(part)) for c in configs for part in c.parts()}
    assert len(wanted) >= 8 and wanted <= seen


def test_shared_memory_of_the_decode():
    pytest.importorskip("triton")
    from tests.portable_decode_compiles import FEATURES, pose
    from tests.tiles_compiles import DECODES

    found = compile_only.run_script(SCRIPT, "decode")
    for (arch, dim, features), used in zip(DECODES, found, strict=True):
        problem = pose(arch, dim, **FEATURES[features])[0]
        config = choose_decode(problem, 132)
        predicted = sum(decode_tiles.buffers(problem, config, arch).values())
        assert 0 <= used["shared_bytes"] - predicted <= tiles.ALLOWANCE_BYTES, (features, used)


def test_pieces_of_a_decode():
    """One sequence of 32k keys, 8 heads of K: 16 pieces each, for 132 SMs."""
    given = {"seqlen_q": 1, "tokens_q": 1, "seqused_k": True, "num_kv_heads": 8}
    problem = problem_of(seqlen=32768, heads=32, **given)
    config = choose_decode(problem, 132)
    found = predict(problem, Hardware.named("H200"), config).tilings["split"]
    assert found.num_programs == 8 * config.splits == 128
    assert (found.num_heads_tasks, found.idle_sms, found.waves) == (8, 4, 1)
    assert found.shared == {"k": 48 * KIB, "v": 48 * KIB} and found.blocks_per_sm == 2
    assert found.waste == 2.0  # 8 rows for 4 query heads
    assert found.imbalance == 132 / 128 and found.re_reads == 1
    alone = predict(problem, Hardware.named("H200"), replace(config, splits=1)).tilings["decode"]
    assert (alone.num_programs, alone.idle_sms) == (8, 124)
    many = replace(problem, seqlen_q=32, tokens_q=32)
    tall = predict(many, Hardware.named("H200"), choose_decode(many, 132)).tilings["split"]
    assert (tall.num_programs, tall.idle_sms, tall.blocks_per_sm) == (128, 4, 1)
    assert tall.shared == {"k": 96 * KIB, "v": 96 * KIB, "q": 32 * KIB} and tall.waste < 1.001
    assert tall.re_reads == 1 and sum(tall.registers.values()) == 144
    some = replace(problem, seqlen_q=16, tokens_q=16)
    found = predict(some, Hardware.named("H200"), choose_decode(some, 132)).tilings["split"]
    assert (found.num_programs, found.waves, found.blocks_per_sm) == (128, 1, 2)
    several = replace(some, batch=8, tokens_q=128, seqlen_k=8192, head_dim=256, head_dim_v=256)
    config_of_several = choose_decode(several, 132)
    found = predict(several, Hardware.named("H200"), config_of_several).tilings["split"]
    # Programs that only unequal lengths need have no piece; 256 columns of Q are not in registers.
    assert config_of_several.balanced and found.num_programs == 8 * 8 * 2 and found.waves == 1
    assert found.shared["q"] == 32 * KIB and set(found.registers) == {"o", "s", "p"}
    with pytest.raises(ValueError, match="needs 1568 KiB of shared memory; H200 gives 227 KiB"):
        predict(problem, Hardware.named("H200"), replace(config, num_stages=49))
    with pytest.raises(ValueError, match="seqlen_k: got 0"):
        decode_tiles.tiling(replace(problem, seqlen_k=0), config, H100)


def test_registers_hold_the_tiles(compiled):
    """On sm_90's warpgroups the tiles are in registers, and little else (pages take more)."""
    for part, used in compiled:
        shape = TileShape(*(used["config"][name] for name in TileShape.__annotations__))
        if part.uses_warpgroups(shape) and not part.problem.page_size:
            tiles_held = sum(tiles.register_buffers(part, shape).values())
            assert tiles_held <= used["registers"] <= tiles_held + 2 * tiles.OTHER_REGISTERS


def shipped(*names: str) -> set[TileShape]:
    return {TileShape.of(c) for name in names for c in getattr(portable, name).values()}


def test_every_shipped_config_was_compiled(compiled):
    seen = {tuple(used["config"][name] for name in TileShape.__annotations__)
            for _, used in compiled}  # fmt: skip
    # Not the tables for dropout and user functions, which need more than tiles.
    wanted = shipped("_SM90", "_SM90_SHORT", "_SHORT", "_FLOAT32")
    assert len(wanted) >= 6
    assert {shape for shape in wanted if tuple(vars(shape).values()) not in seen} == set()


@pytest.mark.parametrize("gpu", ["H200", "A100 80GB", "L4", "RTX 5090", "MI300X"])
@pytest.mark.parametrize("d", [64, 80, 128, 256])
@pytest.mark.parametrize("seqlen", [16, 1024, 16384])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_the_kernels_choose_is_in_the_plan(gpu, d, seqlen, dtype):
    hardware = Hardware.named(gpu)
    problem = problem_of(seqlen, 4, d, Mask(-1, 0), arch=hardware.arch, dtype=dtype, kv_dtype=dtype)
    chosen = TileShape.of(portable.choose_forward(problem))
    part = Part("forward", problem, hardware.arch)
    assert tiles.reasons(part, chosen, hardware) == []
    if seqlen == 1024:
        assert chosen in [c.shape for c in planner.plan(problem, hardware).feasible]


@pytest.mark.parametrize("d", [64, 128, 256])
def test_what_was_measured_best_ranks_near_the_top(d):
    """The tables for sm_90 were measured on an H200; the planner only reckons."""
    hardware = Hardware.named("H200")
    problem = problem_of(seqlen=8192, heads=16, d=d)
    plan = planner.plan(problem, hardware)
    chosen = TileShape.of(portable.choose_forward(problem))
    (time_us,) = (c.model_us for c in plan.feasible if c.shape == chosen)
    assert time_us < 1.2 * plan.feasible[0].model_us


def test_plan_orders_what_fits_and_says_why_the_rest_does_not():
    start = time.perf_counter()
    plan = planner.plan(problem_of(seqlen=8192, heads=16, mask=Mask(-1, 0)), H100)
    assert time.perf_counter() - start < 5  # measured 0.1 s
    times = [c.model_us for c in plan.feasible]
    assert max(t / min(times[i:]) for i, t in enumerate(times)) < 1.06
    assert len(times) + len(plan.failing) == 200
    best = plan.feasible[0]
    assert best.shape.block_m >= 64 and best.shape.num_stages >= 2
    failing = dict(plan.failing)
    why = failing[TileShape(256, 256, 8, 4)]
    assert "needs 576 KiB of shared memory; H100 SXM gives 227 KiB" in why
    assert any("registers of tiles a thread; 255" in reason for reason in why)
    assert str(best.shape) in str(plan).splitlines()[0]
    fits = [c for c in plan.feasible if c.tiling.shared_bytes > 227 * KIB]
    assert fits == []


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({"seqlen_q": 0}, TileShape(64, 64, 4, 2), "seqlen_q: got 0; allowed: 1 or more"),
        ({"batch": 0}, TileShape(64, 64, 4, 2), "batch: got 0"),
        ({"seqlen_k": 2, "mask": Mask(0, 0), "seqlen_q": 1}, TileShape(48, 64, 4, 2), "block_m 48"),
        ({}, TileShape(128, 128, 8, 4), "needs 288 KiB of shared memory; H100 SXM gives 227 KiB"),
        ({}, TileShape(64, 64, 4, 0), "needs at least one warp and one stage"),
        ({}, TileShape(64, 64, 64, 1), "has 2048 threads; 1024 are allowed"),
    ],
)
def test_bad_input(change, config, message):
    with pytest.raises(ValueError, match=message):
        tiling(replace(problem_of(), **change), config, H100)


def test_bad_plans():
    with pytest.raises(ValueError, match="seqlen_k: got 0"):
        planner.plan(problem_of(seqlen_k=0), H100)
    with pytest.raises(ValueError, match="part: got 'dkv'; allowed: forward, dkdv, dk, dv, dq"):
        planner.plan(problem_of(), H100, "dkv")
