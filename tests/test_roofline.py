"""The roofline, and predictions and explanations that join it with bills and tiles."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

import onchip
from onchip import cli, dispatch
from onchip.analysis import bill as bills
from onchip.analysis import predict as predicting
from onchip.analysis import roofline as roofs
from onchip.analysis.hardware import Hardware
from onchip.analysis.predict import predict
from onchip.analysis.roofline import roofline
from onchip.analysis.tiles import TileShape
from onchip.analysis.words import human_us
from onchip.kernels.portable.backward_config import choose_backward
from onchip.problem import Layout, Mask, Op
from tests.test_tiles import problem_of

H100, H200, B200 = (Hardware.named(name) for name in ("H100 SXM", "H200", "B200"))
A100 = replace(Hardware.named("A100 80GB"), bandwidth=2e12)


def test_scores_alone_are_bound_by_memory():
    """A100: ridge 156 FLOP/B; Q K^T alone has d FLOP/B, d / 2 once S is read again."""
    for d in (64, 128):
        bill = bills.three_step(problem_of(seqlen=65536, heads=1, d=d, arch="sm_80"))
        scores = roofline(bill, A100, torch.bfloat16).stages[0]
        assert scores.intensity == pytest.approx(d, rel=0.01)
        assert bill.stages[0].flops / (2 * bill.stages[0].writes[0].slow_bytes) == d / 2
        assert scores.intensity < A100.ridge("bfloat16") and scores.limiter == "memory"
        assert scores.tflops == pytest.approx(scores.intensity * 2, rel=1e-6)  # 2 TB/s


def test_flash_is_bound_by_products_and_three_steps_by_memory():
    problem = problem_of(seqlen=16384, heads=32)
    steps, unfused, flash = (roofline(b, H200, problem.dtype) for b in roofs.methods(problem, H200))
    assert steps.total.limiter == "memory" and flash.total.limiter == "matrix products"
    assert flash.total.bound_us < unfused.total.bound_us < steps.total.bound_us
    assert flash.total.bound_us == pytest.approx(4 * 16384**2 * 32 * 128 / 989.4e12 * 1e6)
    assert steps.total.bound_us == sum(stage.bound_us for stage in steps.stages)
    s_and_p = 4 * 16384**2 * 32 * 2
    assert steps.total.memory_us == pytest.approx(s_and_p / 4.8e12 * 1e6, rel=0.02)


@pytest.mark.parametrize(
    ("gpu", "d", "limiter"),
    [
        (H100, 64, "matrix products and exponentials"),  # 256 FLOP and one exp for each pair
        (H100, 128, "matrix products"),
        (B200, 64, "exponentials"),
        (B200, 128, "matrix products and exponentials"),
        (A100, 64, "matrix products"),
    ],
)
def test_exponentials_limit_small_heads(gpu, d, limiter):
    problem = problem_of(seqlen=16384, d=d)
    point = roofline(bills.flash(problem, 128, 64, cache=roofs.cache_of(gpu)), gpu, problem.dtype)
    assert point.total.limiter == limiter
    assert point.total.exps_us == pytest.approx(8 * 16384**2 / gpu.exps * 1e6)


def test_decode_is_bound_by_memory():
    """32 / 8 heads, D = 128, 4k keys in bf16: 16 MiB, 3.8 us at 4.39 TB/s."""
    problem = replace(problem_of(heads=32, num_kv_heads=8), seqlen_q=1, tokens_q=1)
    gpu = replace(H200, bandwidth=4.39e12)
    total = roofline(bills.decode(problem), gpu, problem.dtype).total
    assert total.limiter == "memory" and total.bound_us == pytest.approx(3.8, abs=0.05)


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    path = roofs.plot(problem_of(d=64), H100, tmp_path / "roof.svg", (1024, 16384))
    text = path.read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    for words in ("three-step", "flash", "exponentials", "H100 SXM", "16k"):
        assert words in text
    png = roofs.plot(problem_of(op=Op.BACKWARD), H100, tmp_path / "roof.png", [1024])
    assert png.read_bytes()[:4] == b"\x89PNG"


def test_plot_of_bytes(tmp_path):
    pytest.importorskip("matplotlib")
    path = roofs.plot_bytes(problem_of(), H200, tmp_path / "bytes.svg", (1024, 16384))
    text = path.read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert "bytes of slow memory" in text and "three-step" in text
    with pytest.raises(ValueError, match="lengths: got"):
        roofs.plot_bytes(problem_of(), H200, tmp_path / "bytes.svg", [])


def test_plot_refuses(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="path: got roof.pdf; allowed: a name in .svg or .png"):
        roofs.plot(problem_of(), H100, tmp_path / "roof.pdf")
    with pytest.raises(ValueError, match="lengths: got"):
        roofs.plot(problem_of(), H100, tmp_path / "roof.svg", [0])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '.\[plot\]'"):
        roofs.plot(problem_of(), H100, tmp_path / "roof.svg")


def test_nothing_to_do():
    empty = problem_of(seqlen=0)
    with pytest.raises(ValueError, match="without work"):
        roofline(bills.flash(empty, 64, 64), H100, empty.dtype)
    with pytest.raises(ValueError, match="seqlen_q: got 0; allowed: 1 or more"):
        predict(empty, H100)


def test_prediction_joins_bill_roof_and_tiles():
    problem = problem_of(seqlen=8192, heads=16, mask=Mask(-1, 0))
    found = predict(problem, H200, TileShape(64, 64, 4, 3))
    tiling = found.tilings["flash"]
    loss = tiling.waste * tiling.imbalance
    total = found.roofline.total
    assert found.fastest_us == pytest.approx(total.products_us * loss)
    assert found.slowest_us == pytest.approx(
        total.memory_us + (total.products_us + total.exps_us) * loss
    )
    assert total.bound_us <= found.fastest_us < found.slowest_us
    # K and V of a head fit the L2 cache: each comes from slow memory once.
    assert found.bill.by_tensor()["k"] == 8192 * 16 * 128 * 2
    told = json.loads(json.dumps(found.to_dict()))
    assert told["bound_us"] == total.bound_us and told["limiter"] == "matrix products"
    assert told["stages"][0]["tiling"]["shared"]["k"] == 3 * 64 * 128 * 2


def test_prediction_of_a_backward_a_decode_and_a_store():
    problem = problem_of(seqlen=4096, op=Op.BACKWARD)
    found = predict(problem, H200, choose_backward(problem))
    assert set(found.tilings) == {"dkdv", "dq"}
    assert found.three_step and len(found.three_step.stages) == 5
    tile = TileShape(64, 64, 4, 2)
    apart = predict(problem, H200, SimpleNamespace(dkdv=tile, dq=tile, dv=tile))
    assert set(apart.tilings) == {"dv", "dk", "dq"}
    assert apart.roofline.total.flops == 8 / 7 * found.roofline.total.flops
    assert apart.flops == found.flops == 5 / 7 * found.roofline.total.flops
    assert predict(problem, H200).tilings == {}
    store = problem_of(op=Op.STORE, layout_k=Layout.PAGED, page_size=16, num_pages=999)
    stored = predict(store, H200)
    assert stored.roofline.total.limiter == "memory"
    assert "assumed" not in "".join(stored.lines()) and stored.to_dict()["three_step_us"] is None
    decode = dispatch.explain(
        problem_of(seqlen_q=1, tokens_q=1, num_kv_heads=2, seqused_k=True), hardware=H200
    )
    assert decode.chosen == "decode" and decode.prediction
    assert decode.prediction.bill.method == "decode"
    assert decode.prediction.to_dict()["limiter"] == "memory"


def test_a_config_that_cannot_fit():
    with pytest.raises(ValueError, match="config: got 128x128, 8 warps, 4 stages, which needs"):
        predict(problem_of(), H200, TileShape(128, 128, 8, 4))


def test_explain_for_a_gpu_that_is_not_here():
    q = torch.zeros(1, 512, 8, 128, dtype=torch.bfloat16, requires_grad=True)
    here = onchip.explain(q, q, q, causal=True, kernel="portable")
    assert here.prediction is None and here.why_no_prediction == ""
    there = here.on("H200")
    assert (there.problem.device, there.problem.arch) == ("cuda", "sm_90")
    for told, name in ((there, "flash"), (there.backward, "dkdv")):
        assert told and told.chosen and told.prediction
        assert told.prediction.config is not None and name in told.prediction.tilings
    text = str(there)
    assert "config    block_m=" in text and "config    dkdv=" in text
    for words in ("bound     ", "on H200", "TFLOP/s, limited by", "3 steps   "):
        assert text.count(words) == 2
    with pytest.raises(ValueError, match="gpu: got 'H300', which is not known; allowed: A100"):
        here.on("H300")
    nothing = onchip.explain(q[:, :0], q, q).on("H200")
    assert nothing.prediction is None and "seqlen_q: got 0" in str(nothing)


def test_explain_imports_no_kernel_language():
    code = (
        "import sys, torch, onchip; q = torch.randn(1, 64, 2, 64).half();"
        "known = set(sys.modules); e = onchip.explain(q, q, q).on('H200'); assert e.prediction;"
        "new = set(sys.modules) - known; bad = [m for m in new if m.startswith(('triton', 'numpy',"
        "'matplotlib')) or m.endswith(('forward', 'backward', 'decode'))]; assert not bad, bad"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_command(capsys):
    assert cli.main("explain --gpu H200 --head-dim 64 --seqlen 16384 --causal".split()) == 0
    text = capsys.readouterr().out
    assert "limited by matrix products and exponentials" in text and "kernel    " in text
    assert cli.main("explain --gpu l4 --json --backward".split()) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["prediction"]["gpu"] == told["backward"]["prediction"]["gpu"] == "L4"
    assert told["problem"]["arch"] == "sm_89"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("explain --gpu H300", "gpu: got 'H300', which is not known; allowed: A100 40GB"),
        ("explain --gpu A100", "more than one; allowed: A100 40GB, A100 80GB"),
        ("explain --gpu H200 --arch sm_80", "--arch: got sm_80; allowed: sm_90"),
    ],
)
def test_command_refuses(capsys, line, message):
    assert cli.main(line.split()) == 2
    assert message in capsys.readouterr().err


def test_times_in_words():
    assert [human_us(t) for t in (3.82, 1500, 2.5e6)] == ["3.82 us", "1.5 ms", "2.5 s"]


def test_assumed_tile_is_said():
    lines = predict(problem_of(), H200).lines()
    assert lines[0] == "config    not known; tiles of 128x64 assumed"
    assert predicting._ASSUMED_TILE == (128, 64)
