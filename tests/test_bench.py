"""The comparison: every row checked before it is timed, refusals with reasons, tables and JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import torch

from onchip import cli
from onchip.analysis import cost
from onchip.analysis.hardware import Hardware
from onchip.bench import compare, report, verify
from onchip.bench import methods as rows
from onchip.bench.cases import Case, Inputs
from onchip.bench.methods import Method, attempted, prepared
from onchip.bench.timing import ColdTimer, Spread
from onchip.problem import Op
from tests.test_tiles import problem_of

CASE = Case(2, 70, 4, 2, 16, True, "float32", "cpu")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("part", rows.PARTS)
def test_methods_agree_with_the_oracle_in_blocks(part, causal, monkeypatch):
    case = replace(CASE, causal=causal)
    monkeypatch.setattr(verify, "_MOST_SCORES", 16 * case.length * 2)
    inputs = case.inputs()
    wanted = verify.expected(case, inputs, part)
    assert [(w.batch, w.kv_head) for w in wanted] == [(0, 0), (1, 1)]
    for method in rows.methods(case, ("onchip", "three-step", "torch math")):
        results, why = attempted(prepared(method, case, inputs, part))
        assert results is not None, why
        assert len(results) == (1 if part == "forward" else 4)
        assert verify.fault(results, wanted, 2) == ""


def test_a_wrong_result_gets_no_speed(monkeypatch):
    def wrong(q, k, v, case):
        return rows._onchip("cpu", q, k, v, case) * 1.01

    monkeypatch.setattr(rows, "_own", lambda case: [Method("onchip cpu", wrong)])
    cell = compare.measure(CASE, "forward", ("onchip", "three-step"), rounds=1)
    bad, good = cell.rows
    assert bad.time is None and bad.why_not.startswith("wrong result: out: error ")
    assert good.time is not None and good.why_not == ""
    text = report.table(cell)
    assert text.index("three-step") < text.index("onchip cpu") and "allowed are" in text


def test_gradients_are_checked_too():
    inputs = CASE.inputs()
    wanted = verify.expected(CASE, inputs, "both")
    right, _ = attempted(prepared(rows.methods(CASE, ("three-step",))[0], CASE, inputs, "both"))
    assert right is not None
    for index, name in enumerate(verify.NAMES):
        spoiled = list(right)
        spoiled[index] = spoiled[index].clone()
        spoiled[index][-1, 3, -1, 5] += 0.5
        assert verify.fault(tuple(spoiled), wanted, 2).startswith(f"{name}: error")
        spoiled[index][-1, 3, -1, 5] = torch.nan
        assert verify.fault(tuple(spoiled), wanted, 2).startswith(f"{name}: error nan")


def test_missing_and_refusing_peers_say_why():
    inputs = CASE.inputs()
    for name, words in (("fa3", "flash_attn_interface is not installed"), ("torch cudnn", "")):
        run = prepared(rows.methods(CASE, (name,))[0], CASE, inputs, "forward")
        results, why = attempted(run)
        assert results is None and words in why and why

    def refuses(q, k, v, case):
        import warnings

        warnings.warn("Flash attention kernel not used because: (Triggered internally at a.cpp:1)")
        warnings.warn("Flash attention only supports half. (Triggered internally at b.cpp:2.)")
        raise RuntimeError("No available kernel. Aborting execution.")

    assert attempted(prepared(Method("x", refuses), CASE, inputs, "forward")) == (
        None,
        "Flash attention only supports half.",
    )

    def too_large(q, k, v, case):
        raise torch.cuda.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 32.00 GiB. GPU 0 has a total capacity of ..."
        )

    run = prepared(Method("x", too_large), CASE, inputs, "forward")
    assert attempted(run) == (None, "out of memory, asked for 32.00 GiB more")


def test_cold_timer_takes_turns():
    timer, order = ColdTimer("cpu", 1 << 10), []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    spreads = timer.interleaved(calls, rounds=2, budget_us=0)
    assert order[4:] == ["a", "b", "b", "a"]
    assert spreads["a"].samples == 2 and spreads["a"].low_us <= spreads["a"].median_us
    assert Spread.of([float(n) for n in range(11)]) == Spread(5.0, 1.0, 9.0, 11)


def test_the_roof_is_the_needed_work(monkeypatch):
    gpu = Hardware.named("H200")
    monkeypatch.setattr(Case, "problem", lambda self, op=Op.FORWARD: problem_of(4096, 8, op=op))
    case = replace(CASE, length=4096, heads=8, dtype="bfloat16")
    forward, both = (compare._bound_us(case, part, gpu) for part in rows.PARTS)
    problem = problem_of(4096, 8)
    assert forward == pytest.approx(cost.flops(problem) / gpu.flops("bfloat16") * 1e6)
    assert both == pytest.approx(forward * 3.5)
    assert compare._bound_us(case, "both", None) is None
    predicted = compare._predicted_us("onchip portable", case, "both", gpu)
    assert predicted and forward < predicted[0] < predicted[1]
    assert compare._predicted_us("fa3", case, "both", gpu) is None
    assert case.flops("both") == 3.5 * case.flops("forward")


def test_command_writes_json_and_a_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "r.json", tmp_path / "r.svg"
    line = "bench --seqlen 32,48 --heads 2 --head-dim 16 --dtype float32 --device cpu --rounds 1"
    names = ["--methods", "onchip,three-step,fa2"]
    assert cli.main([*line.split(), *names, "--json", str(path), "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.count("forward and backward: B = 1, N = ") == 2
    assert "flash_attn is not installed" in out
    told = json.loads(path.read_text(encoding="utf-8"))
    assert len(told["cells"]) == 4 and told["torch"] == torch.__version__
    row = told["cells"][0]["rows"][0]
    assert row["method"] == "onchip cpu_fused" and row["time"]["median_us"] > 0
    assert "three-step" in picture.read_text(encoding="utf-8")
    assert cli.main([*line.split(), "--methods", "onchip", "--json", "-"]) == 0
    assert len(json.loads(capsys.readouterr().out)["cells"]) == 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--methods fa5", "methods: got 'fa5'; allowed: onchip, three-step, torch flash"),
        ("--parts backward", "--parts: got 'backward'; allowed: forward, both"),
        ("--rounds 0", "--rounds: got 0; allowed: 1 or more"),
        ("--heads 3 --kv-heads 2", "kv_heads: got 2; allowed: a divisor of heads, 3"),
        ("--head-dim 0", "head_dim: got 0; allowed: 1 or more"),
        ("--kv-heads 0", "--kv-heads: got 0; allowed: an int from 1"),
        ("--plot x.pdf", "--plot: got x.pdf; allowed: a name in .svg or .png"),
        ("--plot /nonexistent/a.svg", "a folder that exists. Make /nonexistent."),
        ("--json /nonexistent/x.json", "a folder that exists. Make /nonexistent."),
        ("--json /", "--json: got /; allowed: a file's name"),
        ("--seqlen 64,99999999999", "--seqlen: got 99999999999, whose inputs take 1.5 PiB"),
        ("--published --batch 1", "--batch: got it beside --published"),
        ("--published --seqlen 64", "--seqlen: got it beside --published"),
        ("--published --heads 16", "--heads: got it beside --published"),
        ("--published --kv-heads 2", "--kv-heads: got it beside --published"),
        ("--published --head-dim 64", "--head-dim: got it beside --published"),
        ("--published --dtype bfloat16", "--dtype: got it beside --published"),
        ("--published --causal", "--causal: got it beside --published"),
        ("--counters", "--device: got it beside --counters; allowed: --json alone"),
        ("--head-dim 4096", "no kernel takes this problem"),
    ],
)
def test_command_refuses(capsys, line, message):
    assert cli.main(["bench", "--device", "cpu", *line.split()]) == 2
    assert message in capsys.readouterr().err


def test_nothing_is_measured_before_the_command_line_is_refused(monkeypatch):
    monkeypatch.setattr(compare, "_run", lambda options: pytest.fail("ran"))
    line = "bench --device cpu --seqlen 32 --heads 2 --head-dim 16"
    for option in ("--plot=/nonexistent/a.svg", "--json=/nonexistent/x.json"):
        assert cli.main([*line.split(), option]) == 2


def test_files_that_can_be_written_pass(tmp_path):
    pytest.importorskip("matplotlib")
    report.check_plot(tmp_path / "a.SVG")
    report.check_file("--json", tmp_path / "a.json")


@pytest.mark.parametrize("option", ["--published", "--rounds=1", "--plot=a.svg", "--seqlen=64"])
def test_counters_take_no_other_option(capsys, option):
    assert cli.main(["bench", "--counters", option]) == 2
    assert f"{option.split('=')[0]}: got it beside --counters" in capsys.readouterr().err
    assert cli.main(["bench", "--counters", "--json", "-"]) == 2
    assert "--json: got - with --counters; allowed: a file" in capsys.readouterr().err


def test_options_that_are_not_given_have_their_defaults():
    args = compare._arguments([])
    assert vars(args) == compare._DEFAULTS
    names = {action.dest for action in compare._parser()._actions} - {"help"}
    assert names == compare._DEFAULTS.keys() and names >= compare._SIZES
    assert compare._arguments(["--published", "--rounds", "2"]).rounds == 2


def test_a_full_gpu_ends_in_a_message(monkeypatch, capsys):
    def full(options):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(compare, "_run", full)
    assert cli.main(["bench", "--device", "cpu", "--seqlen", "32"]) == 2
    assert "CUDA out of memory. Take a smaller --seqlen." in capsys.readouterr().err


def test_command_refuses_lengths_that_are_none(capsys):
    assert cli.main(["bench", "--seqlen", "0"]) == 2
    assert "got '0'; allowed: numbers from 1 on" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_command_refuses_a_gpu_that_is_not_here(capsys):
    assert cli.main(["bench", "--device", "cuda"]) == 2
    assert "torch sees no GPU here" in capsys.readouterr().err


def test_progress_is_for_terminals_alone():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    quiet, seen = io.StringIO(), Terminal()
    for stream in (quiet, seen):
        progress = report.Progress(stream, 2)
        progress.begin("N = 1")
        progress.step("check onchip")
        progress.begin("N = 2")
        progress.step("time")
        progress.say("no roofline")
        progress.clear()
    assert quiet.getvalue() == ""
    assert "[............] " not in seen.getvalue() and "N = 2: time" in seen.getvalue()


def test_inputs_are_the_cases():
    inputs = CASE.inputs()
    assert CASE.input_bytes == sum(x.nbytes for x in inputs)
    assert isinstance(inputs, Inputs) and inputs.q.shape == inputs.dout.shape == (2, 70, 4, 16)
    assert inputs.k.shape == inputs.v.shape == (2, 70, 2, 16)
    assert torch.equal(inputs.q, CASE.inputs().q) and not torch.equal(inputs.k, inputs.v)
