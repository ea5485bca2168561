"""The Hopper backward without a GPU: choices, what it compiles to, and its roles in a model."""

from __future__ import annotations

import itertools
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
from onchip.kernels.hopper import backward, backward_arguments, backward_table
from onchip.kernels.hopper.backward_config import BackwardConfig, choose_backward, padded
from onchip.kernels.hopper.backward_stats import (
    attn_bwd_post_hopper,
    attn_bwd_pre_hopper,
    attn_bwd_rest_hopper,
)
from onchip.problem import Layout, Mask, Op, Problem
from tests import compile_only
from tests.portable_cases import Case, build

HERE = Path(__file__).parent
SHARED_BYTES = 227 << 10

COMPILED = [
    {"dim": dim, **features} for dim in (64, 128, 256) for features in ({}, {"causal": True})
] + [
    {"dim": 64, "packed": True, "window": [1023, 0], "deterministic": True},
    {"dim": 128, "causal": True, "deterministic": True},
    {"dim": 128, "deterministic": True},
    {"dim": 128, "packed": True, "softcap": 30.0},
    {"dim": 64, "batch": 16, "seqlen": 1024, "causal": True},
    {"dim": 64, "batch": 1, "seqlen": 16384, "causal": True},
    {"dim": 64, "causal": True, "deterministic": True},
    {"dim": 128, "batch": 1, "seqlen": 16384},
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


def test_scratch_on_a_barrier_is_seen():
    ptx = """
    mov.b32 %r1, global_smem;
    add.s32 %r2, %r1, 64;
    @%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
    @%p1 st.shared.b32 [%r1 + {}], %r3;
    """
    assert compile_only.scratch_on_barriers(ptx.format(68)) == [64]
    assert compile_only.scratch_on_barriers(ptx.format(72)) == []


def test_no_scratch_lies_on_a_barrier(compiled):
    """A counter that came through there was the barrier's state: sums were added to before they
    were cleared, in 42 of 200 launches (H200, 2026-11-30)."""
    for used in compiled:
        assert used["scratch_on_barriers"] == [], used


def test_main_loops_do_not_spill(compiled):
    """Masked tiles are few. One of two consumers of "queries" keeps a number in memory, and at
    D = 128 those of "keys" a few addresses: 653 TFLOP/s at 16k, 591 without by an order of
    products that needs fewer registers (H200, 2026-11-30). In a fixed order lists keep 8 moves at
    D = 64."""
    for used in compiled:
        features = set(used["features"])
        if used["kernel"] == "queries" and not features:
            assert used["loop_spills"] <= 3, used
        elif used["kernel"] == "keys" and used["dim"] == 128:
            assert used["loop_spills"] <= (38 if "deterministic" in features else 24), used
        elif used["kernel"] != "queries" and "softcap" not in features:
            assert used["unmasked_spills"] <= 8 * ("deterministic" in features), used


def test_dq_is_stored_without_bank_conflicts(compiled):
    """By `stmatrix`; 8 bytes a thread, 16 or 32 times a step, would meet in half of the banks."""
    for used in compiled:
        if used["kernel"] == "keys":
            assert used["narrow_stores"] <= 4, used


MODELLED = {
    "full": {"lengths_q": [128], "lengths_k": [256], "heads": 2, "kv_heads": 2},
    "cut": {"lengths_q": [300], "lengths_k": [512], "heads": 4, "kv_heads": 2},
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
SINGLE = {"stages": 3, "starts_at_lse": True, "ds_buffers": 3, "holds_keys": True}
LAG = SINGLE | {"persistent": True, "lag": 1}
LAGS = SINGLE | {"persistent": True, "lag": 2}
LAGS_ONE = SINGLE | {"lag": 4}
LAG_LATE = {"late": True, "lag": 1}
LAGS_LATE = {"late": True, "lag": 4}
CUT = SINGLE | {"pieces": 3, "lag": 3}
CUT_LATE = {"late": True, "pieces": 2, "lag": 2}


def modelled(cases: list[dict]) -> list[str]:
    """What is wrong with each case's gradients."""
    paths = [str(HERE.parent), *sys.path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    command = [sys.executable, str(HERE / "hopper_backward_model.py"), json.dumps(cases)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return [case["wrong"] for case in json.loads(done.stdout.splitlines()[-1])]


SOME = ("causal", "window", "packed_causal")
ABREAST = ("cut", "tails", "packed", "window_left")


@pytest.mark.parametrize(
    ("own", "names"),
    [
        ({"dim": 64, "dim_v": 64}, tuple(MODELLED)),
        ({"dim": 128, "dim_v": 64}, ("tails", "packed_window", "softcap")),
        ({"dim": 64, "dim_v": 128}, ("more_keys", "more_queries")),
        ({"dim": 192, "dim_v": 128}, SOME),
        ({"dim": 64, "dim_v": 72, "deterministic": True}, SOME),
        ({"dim": 128, "dim_v": 128}, ("full", "causal", "low_lse")),
        ({"dim": 128, "dim_v": 128, "deterministic": True}, SOME),
        ({"dim": 64, "dim_v": 64, "config": LATE}, SOME),
        ({"dim": 64, "dim_v": 64, "deterministic": True}, SOME),
        ({"dim": 64, "dim_v": 64, "config": SINGLE}, SOME),
        ({"dim": 64, "dim_v": 64, "config": LAG}, ("tails", "causal", "packed", "packed_causal")),
        ({"dim": 64, "dim_v": 64, "config": LAGS}, ("tails", "causal", "window")),
        ({"dim": 64, "dim_v": 64, "config": LAGS, "deterministic": True}, ("causal", "tails")),
        ({"dim": 80, "dim_v": 72, "config": LAG_LATE}, ("tails", "causal", "packed_window")),
        ({"dim": 64, "dim_v": 64, "config": LAG, "deterministic": True}, ("tails",)),
        ({"dim": 64, "dim_v": 64, "config": LAGS_ONE, "deterministic": True}, ABREAST),
        ({"dim": 128, "dim_v": 64, "config": LAGS_LATE, "deterministic": True}, ABREAST),
        ({"dim": 64, "dim_v": 64, "config": CUT}, ("full", "cut")),
        ({"dim": 128, "dim_v": 128, "config": CUT_LATE}, ("full", "cut")),
    ],
    ids=str,
)
def test_roles_give_the_oracles_gradients(own, names):
    """Every role, barrier and coordinate of the device code, in `gluon_model`."""
    wrong = modelled([MODELLED[name] | own for name in names])
    assert dict(zip(names, wrong, strict=True)) == dict.fromkeys(names, "")


def test_walks_visit_what_rows_see():
    compile_only.run_script(HERE / "hopper_backward_walks.py", "0", "300")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sms", [1, 7, 132])
def test_a_table_names_every_tile_once(sms, causal, deterministic):
    case = Case((1000,) * 3, (1000,) * 3, heads=8, kv_heads=4, dim=64, dim_v=64, causal=causal)
    problem = replace(build(case).problem, op=Op.BACKWARD, deterministic=deterministic)
    config = choose_backward(problem)
    spec = backward_arguments.spec_of(config, problem, "keys")
    table = backward_table.schedule(config, problem, spec, sms)
    items = [[item for item in row if item >= 0] for row in table]
    assert len(table) == min(sms, 96)
    assert sorted(item for own in items for item in own) == list(range(96))  # 12 heads of 8 tiles
    for row, own in zip(table, items, strict=True):
        assert own == sorted(own), "a tile would wait for one behind it"
        assert row[len(own)] == -1


def test_a_table_knows_the_walks():
    """Tiles of 64 queries that 128 keys are seen by."""

    def steps(**changes):
        case = Case((512,), (512,), heads=2, kv_heads=1, dim=64, dim_v=64, **changes)
        return backward_table.steps_of(build(case).problem, 64, 128)

    assert steps() == [16] * 4
    assert steps(causal=True) == [16, 12, 8, 4]
    assert steps(window=(100, 0)) == [8, 8, 8, 4]


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("capturing", [False, True])
def test_lists_want_all_sms_and_no_capture(monkeypatch, alone, capturing):
    """A rank's collective may hold SMs until others get on; in a capture no table can be copied,
    and what is made for it is not kept."""
    monkeypatch.setattr(backward, "_is_alone", lambda: alone)
    monkeypatch.setattr(backward, "_is_capturing", lambda device: capturing)
    steps = backward._new_steps(None, _problem(), torch.device("cpu"))
    assert steps.config.persistent == (alone and not capturing)
    assert steps.is_for_capture == (alone and capturing)


def test_the_last_tiles_of_a_causal_call_are_the_short_ones():
    """So that CTAs end together: 4 % at 1k and 4k (H200, 2026-11-30)."""
    case = Case((1024,) * 16, (1024,) * 16, heads=16, kv_heads=16, dim=64, dim_v=64, causal=True)
    problem = replace(build(case).problem, op=Op.BACKWARD)
    config = choose_backward(problem)
    spec = backward_arguments.spec_of(config, problem, "keys")
    table = backward_table.schedule(config, problem, spec, 132)
    walks = backward_table.steps_of(problem, 64, 128)
    lag = backward_arguments.units_of(config, problem)[1]
    first = (256 - lag) * 8

    def place(item):
        return item % 8 if item < first else (item - first) // lag

    loads = [sum(walks[place(x)] + 1 for x in row if x >= 0) for row in table]
    assert max(loads) <= 1.02 * sum(loads) / len(loads)


def test_the_last_wave_is_cut_where_that_pays():
    """A model of 132 SMs; what was measured stands in `pieces_of`."""

    def pieces(dim, length, **changes):
        batch, heads = 16384 // length, 2048 // dim
        problem = _problem(
            head_dim=dim, head_dim_v=dim, seqlen_q=length, seqlen_k=length, batch=batch,
            num_heads=heads, num_kv_heads=heads, **changes,
        )  # fmt: skip
        return backward_arguments.pieces_of(choose_backward(problem), problem)

    assert [pieces(128, n) for n in (1024, 4096, 16384)] == [1, 1, 5]
    assert pieces(64, 16384) == 1
    assert pieces(128, 16384, deterministic=True) == 1
    assert pieces(128, 16384, mask=Mask(right=0)) == 1


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="covered by tests/gpu")
@pytest.mark.parametrize(("dim", "width"), [(128, 128), (72, 128), (24, 64)])
def test_the_launch_behind_puts_columns_in_order(dim, width):
    batch, heads, length, rows = 2, 3, 100, 128
    sums = torch.randn(batch, heads, rows, width)
    stored = sums.view(batch, heads, rows, -1, 4, 2).transpose(-1, -2).contiguous()
    dq = torch.empty(batch, length, heads, dim, dtype=torch.float16)
    attn_bwd_post_hopper[(8 * batch * heads,)](
        stored, dq, None, 0, 8, heads, length, 0, rows, 0.5, dim, width, False
    )
    want = (sums[:, :, :length, :dim] * 0.5).transpose(1, 2).half()
    torch.testing.assert_close(dq, want)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="covered by tests/gpu")
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("offsets", "longest", "tokens"),
    [
        ([0, 5, 5, 12], 7, 12),  # nothing is left
        ([0, 5, 5, 12], 7, 40),  # behind the last one
        ([3, 5, 9], 4, 9),  # before the first one
        ([0, 9, 12], 4, 12),  # past the longest length that the call names
        ([0, 0], 1, 6),  # nothing but rest
    ],
)
def test_rows_of_no_sequence_get_gradients_of_0(offsets, longest, tokens, parts):
    cu = torch.tensor(offsets, dtype=torch.int32)
    grads = [torch.full((tokens, heads, 200), torch.nan) for heads in (4, 2, 2)]
    widths = [x[0].numel() for x in grads]
    attn_bwd_rest_hopper[(len(offsets), parts)](
        *grads, cu, cu, longest, longest, tokens, tokens, *widths, parts
    )
    rest = torch.ones(tokens, dtype=torch.bool)
    for start, end in itertools.pairwise(offsets):
        rest[start : min(end, start + longest)] = False
    for x in grads:
        assert (x[rest] == 0).all() and x[~rest].isnan().all()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="covered by tests/gpu")
def test_the_launch_before_puts_rows_in_fours():
    """Rows 2 i, 2 i + 1, 2 i + 8, 2 i + 9 of every 16 side by side."""
    batch, heads, length, rows, dim = 2, 2, 100, 128, 64
    out, dout = torch.randn(2, batch, length, heads, dim)
    lse = torch.randn(batch, heads, length)
    found = []
    for fours in (False, True):
        stats, delta = torch.empty(2, batch * heads, rows)
        strides = (length * heads * dim // 8, heads * dim // 8, dim // 8)
        attn_bwd_pre_hopper[(8 * batch * heads,)](
            out, dout, lse, None, None, None, stats, delta, None, None, None, *strides, 8, batch,
            heads, length, 0, rows, 1, batch * heads, 1, 1, 0, dim, dim, dim, dim, 1.0, 8, False,
            False, fours,
        )  # fmt: skip
        found.append((stats, delta))
    (stats, delta), in_fours = found
    torch.testing.assert_close(stats[:, :length], -lse.flatten(0, 1))
    want = -(out * dout).sum(-1).transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(delta[:, :length], want, rtol=1e-5, atol=1e-4)
    for rows_of, of in zip((stats, delta), in_fours, strict=True):
        assert torch.equal(of.view(-1, 4, 2, 2).transpose(1, 2).reshape(rows_of.shape), rows_of)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="covered by tests/gpu")
@pytest.mark.parametrize("packed", [False, True])
def test_the_launch_before_makes_statistics_and_clears(packed):
    """-LSE, -D, the sinks' gradient, dQ's sum of the first heads, counters of heads and tiles."""
    lengths, heads, group, dim, lag, ctas = (130, 1, 300), 4, 2, 64, 2, 3
    longest = max(lengths)
    if not packed:
        lengths = (longest,) * 3
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    tokens, batch, blocks = int(cu[-1]), len(lengths), -(-longest // 128) * 8
    units = batch * heads // group
    out, dout = torch.randn(2, tokens, heads, dim)
    lse, dlse = torch.randn(2, heads, tokens)
    lse[1, 7] = -torch.inf
    sinks = torch.randn(heads)
    rows = (tokens // 128 + batch) * 128 if packed else -(-longest // 128) * 128
    lines = heads if packed else batch * heads
    stats, delta = torch.full((2, lines, rows), torch.nan)
    dq_sum = torch.full((lines, rows, dim), torch.nan)
    counters = torch.full((units + lines * rows // 64,), -1, dtype=torch.int32)
    dsinks = torch.full((blocks, batch, heads), torch.nan)

    def by_sequence(x):  # (H, T) as the forward returns it
        return x if packed else x.view(heads, batch, longest).transpose(0, 1).contiguous()

    strides = (0 if packed else longest * heads * dim // 8, heads * dim // 8, dim // 8)
    attn_bwd_pre_hopper[(blocks * batch * heads,)](
        out, dout, by_sequence(lse), by_sequence(dlse), sinks, cu if packed else None, stats, delta,
        dq_sum, counters, dsinks, *strides, blocks, batch, heads, longest, tokens, rows, group,
        units, lag, ctas, 0, dim, dim, dim, dim, 1.5, 8, packed, True, False,
    )  # fmt: skip
    assert counters[:units].tolist() == [ctas] * lag + [0] * (units - lag)
    d = ((out * dout).sum(-1).T - dlse).where(lse > -torch.inf, 0.0)
    mass = (torch.exp(sinks[:, None] - lse) * d).where(lse > -torch.inf, 0.0)
    torch.testing.assert_close(dsinks.sum((0, 1)), -mass.sum(1), rtol=1e-4, atol=1e-4)
    turns = counters[units:].view(lines, -1)
    for b, h in itertools.product(range(batch), range(heads)):
        start, length = int(cu[b]), lengths[b]
        line, first = (h, (start // 128 + b) * 128) if packed else (b * heads + h, 0)
        own = slice(first, first + length)
        want = -1.5 * lse[h, start : start + length]
        torch.testing.assert_close(stats[line, own], want.where(want < torch.inf, -torch.inf))
        want = -d[h, start : start + length]
        torch.testing.assert_close(delta[line, own], want, rtol=1e-5, atol=1e-4)
        whole = slice(first, first + -(-length // 128) * 128)
        is_cleared = (b * heads + h) // group < lag
        assert (dq_sum[line, whole] == 0).all() if is_cleared else dq_sum[line, whole].isnan().all()
        assert (turns[line, whole.start // 64 : whole.stop // 64] == 0).all()


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
    assert choose_backward(_problem(head_dim=64, head_dim_v=64)).persistent
    assert not choose_backward(_problem(seqlen_q=4097)).persistent
    assert choose_backward(_problem(seqlen_q=4097, deterministic=True)).persistent
    assert not choose_backward(_problem(head_dim=72)).persistent
    many = _problem(batch=1 << 15, seqlen_q=64, seqlen_k=64)
    assert choose_backward(many).persistent
    assert not choose_backward(replace(many, batch=1 + (1 << 15))).persistent
    long = _problem(head_dim=128, head_dim_v=128, seqlen_k=256)
    assert choose_backward(long).fours
    assert not choose_backward(replace(long, mask=Mask(right=0))).fours
    assert not choose_backward(replace(long, seqlen_k=257)).fours


def test_heads_begin_side_by_side_where_sums_are_ordered():
    """What was measured stands in `Spec.abreast` and `Spec.passes_at_once`."""
    found = {}
    for dim in (64, 128):
        for ordered in (False, True):
            for right in (-1, 0):
                problem = _problem(
                    head_dim=dim, head_dim_v=dim, deterministic=ordered, mask=Mask(right=right)
                )
                spec = backward_arguments.spec_of(choose_backward(problem), problem, "keys")
                found[dim, ordered, right] = (spec.abreast, spec.passes_at_once)
    assert found == {
        (64, False, -1): (0, False), (64, False, 0): (0, False), (64, True, -1): (1, False),
        (64, True, 0): (3, False), (128, False, -1): (0, False), (128, False, 0): (0, False),
        (128, True, -1): (1, True), (128, True, 0): (0, True),
    }  # fmt: skip


def test_lag_follows_the_call():
    """What was measured stands in `backward_config`."""
    alone = _problem(head_dim=128, head_dim_v=128, num_heads=4, num_kv_heads=4, seqlen_k=256)
    ordered = replace(alone, deterministic=True)
    assert choose_backward(ordered).lag == choose_backward(alone).lag == 200
    assert choose_backward(replace(ordered, mask=Mask(right=0))).lag == 300
    assert choose_backward(replace(alone, num_kv_heads=1)).lag == 136
    assert choose_backward(replace(alone, head_dim=256)).lag == 300
    assert choose_backward(replace(alone, head_dim=256, num_kv_heads=1)).lag == 200
    packed = replace(
        alone, layout_q=Layout.PACKED, layout_k=Layout.PACKED, batch=4, seqlen_q=1000,
        seqlen_k=1000, tokens_q=4000,
    )  # fmt: skip
    assert choose_backward(packed).lag == 250
    assert choose_backward(replace(packed, tokens_q=2000)).lag == 500
    assert choose_backward(replace(packed, tokens_q=0)).lag == 250 * 4000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_m": 128}, "block_m: got 128"),
        ({"block_n": 64}, "block_n: got 64"),
        ({"stages": 1}, "stages: got 1"),
        ({"apart": True, "block_n": 64, "starts_at_lse": True}, "apart: got True"),
        ({"lag": 0}, "lag: got 0"),
        ({"late": True, "persistent": True}, "persistent: got True"),
        ({"apart": True, "block_n": 64, "fours": True}, "fours: got True"),
        ({"pieces": -1}, "pieces: got -1"),
    ],
)
def test_a_config_says_what_is_wrong_with_it(changes, message):
    with pytest.raises(ValueError, match=message):
        BackwardConfig(**changes)
