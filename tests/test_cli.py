"""The command line: results, JSON, exit statuses, and life without the cli extra."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import onchip
from onchip import cli, dispatch, info, kernels
from onchip.problem import Layout, Mask, Op, Params, Problem, Tensors

SRC = Path(__file__).resolve().parents[1] / "src"
WITHOUT_TYPER = """
import sys
sys.modules["typer"] = None
import importlib.util as util
found = util.find_spec
util.find_spec = lambda name, *rest: None if name == "typer" else found(name, *rest)
import onchip.__main__ as entry
sys.argv = ["onchip", *sys.argv[1:]]
sys.exit(entry.main())
"""


def run(*arguments: str, prelude: str | None = None) -> subprocess.CompletedProcess:
    start = ["-m", "onchip"] if prelude is None else ["-c", prelude]
    return subprocess.run(
        [sys.executable, *start, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SRC)},
        timeout=120,
    )


def lines_of(capsys) -> str:
    return capsys.readouterr().out


def test_module_runs_as_a_program():
    result = run("info", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["onchip"] == onchip.__version__
    assert report["torch"]["version"] == torch.__version__


def test_without_typer_info_works_and_others_name_the_extra():
    result = run("info", "--json", prelude=WITHOUT_TYPER)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["onchip"] == onchip.__version__
    for arguments in (["explain"], ["lab"], []):
        result = run(*arguments, prelude=WITHOUT_TYPER)
        assert result.returncode == 2
        assert "'.[cli]' in onchip's folder" in result.stderr
        assert "Traceback" not in result.stderr
        assert result.stdout == ""


def test_version_and_help(capsys):
    assert cli.main(["--version"]) == 0
    assert lines_of(capsys).strip() == onchip.__version__
    assert cli.main(["--help"]) == 0
    text = lines_of(capsys)
    assert [c for c in ("info", "explain", "lab", "generate") if c not in text] == []


def test_info_lists_every_kernel_once():
    report = info.collect()
    listed = [(k["name"], k["op"]) for k in report["kernels"]]
    assert listed == [(k.name, k.op.value) for k in kernels.KERNELS]
    assert report["devices"][0]["type"] == "cpu"
    assert info.render(report).startswith("onchip    " + onchip.__version__)


def test_info_finds_the_cpu_kernels_available():
    reasons = {(k["name"], k["op"]): k["reasons"] for k in info.collect()["kernels"]}
    assert [name for name in reasons if name[0].startswith("cpu") and reasons[name]] == []


def test_info_says_why_a_kernel_is_not_available(monkeypatch):
    def needs_hopper(problem: Problem) -> list[str]:
        return [] if problem.arch == "sm_90" else [f"needs sm_90, not {problem.arch!r}"]

    base = kernels.KERNELS[0]
    elsewhere = dataclasses.replace(base, name="elsewhere", devices=frozenset({"xpu"}))
    newer = dataclasses.replace(base, name="newer", reasons=needs_hopper)
    broken = dataclasses.replace(base, name="broken", module="onchip.no_such_module")
    monkeypatch.setattr(kernels, "KERNELS", (elsewhere, newer, broken))
    report = info.collect()
    reasons = {k["name"]: k["reasons"] for k in report["kernels"]}
    assert reasons["elsewhere"][0].startswith("runs on xpu; this machine has cpu")
    assert reasons["newer"] == ["needs sm_90, not ''"]
    assert "no_such_module" in reasons["broken"][0]
    assert "no_such_module" in info.render(report)


def test_info_never_raises(monkeypatch):
    def broken(*_):
        raise RuntimeError("driver is gone")

    monkeypatch.setattr(torch, "get_num_threads", broken)
    monkeypatch.setattr(torch.cuda, "is_available", broken)
    monkeypatch.setattr(info.importlib.metadata, "version", broken)
    report = info.collect()
    for part in ("torch", "triton", "devices", "kernels"):
        assert "driver is gone" in report[part]["error"]
    text = info.render(report)
    assert text.count("driver is gone") >= 4
    assert "settings" in text
    assert isinstance(info.render({"nonsense": 1}), str)
    assert info.main(["--json"]) == 0


def test_info_says_which_setting_is_not_valid(monkeypatch):
    monkeypatch.setenv("ONCHIP_CHECK", "yes")
    text = info.render(info.collect())
    assert "ONCHIP_CHECK=yes  not valid" in text
    assert "allowed: 0 or 1" in text
    monkeypatch.setenv("ONCHIP_CHECK", "1")
    assert "not valid" not in info.render(info.collect())


def test_info_refuses_unknown_arguments(capsys):
    assert info.main(["--yaml"]) == 2
    assert "--yaml" in capsys.readouterr().err


@pytest.mark.parametrize("backward", [False, True])
def test_explain_agrees_with_the_call(capsys, backward):
    """The command builds, from sizes, the very Problem that the tensors would pose."""
    sizes = "--batch 2 --seqlen 5 --seqlen-k 9 --heads 4 --kv-heads 2 --head-dim 8".split()
    options = "--causal --window 3 -1 --softcap 2.5 --dtype float32 --json".split()
    assert cli.main(["explain", *sizes, *options, *(["--backward"] if backward else [])]) == 0
    shown = json.loads(lines_of(capsys))
    q = torch.zeros(2, 5, 4, 8, requires_grad=backward)
    k, v = torch.zeros(2, 2, 9, 2, 8)
    said = onchip.explain(q, k, v, causal=True, window=(3, -1), softcap=2.5)
    assert shown == json.loads(json.dumps(said.to_dict()))
    assert (shown["backward"] is not None) == backward


def test_explain_text_and_forced_kernel(capsys):
    assert cli.main("explain --seqlen 64 --window 8 0 --kernel cpu_fused".split()) == 0
    text = lines_of(capsys)
    assert "none takes this problem" in text
    assert "has no window" in text
    assert cli.main("explain --seqlen 64 --window 8 0".split()) == 0
    assert "kernel    cpu\n" in lines_of(capsys)


def test_explain_for_a_device_that_is_not_here(capsys):
    assert cli.main("explain --device cuda --arch sm_90 --json".split()) == 0
    shown = json.loads(lines_of(capsys))
    assert shown["problem"]["device"] == "cuda"
    assert shown["problem"]["arch"] == "sm_90"
    assert "runs on cpu, not on cuda" in shown["rejected"]["cpu"]


def test_explain_refuses_an_arch_without_a_gpu(capsys):
    assert cli.main("explain --arch sm_90".split()) == 2
    error = capsys.readouterr().err
    assert "--arch: got sm_90" in error
    assert "--device cuda" in error


def test_explain_of_a_gpu_by_name_is_on_cuda(capsys):
    told = []
    for more in ([], ["--device", "cuda"]):
        assert cli.main(["explain", "--gpu", "H200", "--json", *more]) == 0
        told.append(json.loads(lines_of(capsys)))
    assert told[0] == told[1] and told[0]["problem"]["device"] == "cuda"


def test_explain_of_nothing(capsys):
    assert cli.main("explain --batch 0 --seqlen 0 --json".split()) == 0
    assert json.loads(lines_of(capsys))["flops"] == 0


BAD = [
    ("explain --seqlen -3", "--seqlen: got -3"),
    ("explain --batch x", "--batch"),
    ("explain --heads 8 --kv-heads 3", "--kv-heads: got 3"),
    ("explain --kv-heads 0", "--kv-heads: got 0"),
    ("explain --head-dim 0", "--head-dim: got 0"),
    ("explain --window -2 0", "window: got (-2, 0)"),
    ("explain --softcap -1", "--softcap: got -1"),
    ("explain --softcap nan", "--softcap: got nan"),
    ("explain --dtype int8", "--dtype"),
    ("explain --device toaster", "--device: got toaster"),
    ("explain --gpu H200 --device cpu", "--device: got cpu; allowed: cuda beside --gpu"),
    ("explain --kernel warp", "--kernel: got warp"),
    ("explain --no-such-option", "--no-such-option"),
    ("lab --length 0", "--length: got 0"),
    ("lab --block -1", "--block: got -1"),
    ("lab --head-dim 0", "--head-dim: got 0"),
    ("lab --break window", "--break"),
    ("lab --page p.html --length 0", "--length: got it beside --page; allowed: --json alone"),
    ("lab --page p.html --length 7", "--length: got it beside --page"),
    ("lab --page p.html --break alpha", "--break: got it beside --page"),
    ("lab --page p.html --no-causal", "--causal: got it beside --page"),
    ("lab --page p.html --seed 0", "--seed: got it beside --page"),
    ("generate no_such_folder Hello", "no_such_folder"),
    ("generate no_such_folder Hello --max-tokens 0", "max_tokens: got 0"),
    ("generate no_such_folder Hello --temperature -1", "temperature: got -1"),
    ("generate no_such_folder Hello --top-p 2", "top_p: got 2"),
    ("generate no_such_folder", "prompt"),
    ("fly", "fly"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=[line for line, _ in BAD])
def test_bad_values_get_a_message_and_status_2(capsys, line, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(line.split()) == 2
    captured = capsys.readouterr()
    assert message.lower() in captured.err.lower()
    assert captured.out == ""
    assert not any(tmp_path.iterdir())


def test_lab_passes_and_prints_json(capsys):
    assert cli.main("lab --length 7 --block 3 --causal".split()) == 0
    assert "PASS" in lines_of(capsys)
    assert cli.main("lab --length 5 --block 8 --seed 3 --json".split()) == 0
    assert json.loads(lines_of(capsys))["passed"] is True


@pytest.mark.parametrize("mistake", ["alpha", "scale", "causal"])
def test_lab_with_a_mistake_fails(capsys, mistake):
    assert cli.main(["lab", "--break", mistake, "--json"]) == 1
    assert json.loads(lines_of(capsys))["passed"] is False


def test_dense_problem_is_the_one_that_tensors_pose():
    q, k = torch.zeros(3, 6, 4, 16), torch.zeros(3, 7, 2, 16)
    params = Params(6, 7, -1, 0, 0.25, 0.0, False, 0, "")
    posed = Problem.of(Op.FORWARD, Tensors(q, k, k), params)
    built = cli.dense_problem(
        device="cpu",
        arch=None,
        softcap=0.0,
        mask=Mask.of(True, (-1, -1)),
        dtype=torch.float32,
        batch=3,
        seqlen_q=6,
        seqlen_k=7,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
    )
    assert built == posed
    assert built.layout_k is Layout.DENSE
    assert dispatch.choose(built).name == "cpu"


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> str:
    """A random Llama with a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w31"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_generate_streams_what_the_engine_gives(capsys, tiny_model):
    from onchip.engine.llm import LLM, SamplingParams

    params = SamplingParams(max_tokens=6, temperature=0.8, top_p=0.9, seed=5)
    (expected,) = LLM(tiny_model).generate(["w3 w4"], params)
    options = "--max-tokens 6 --temperature 0.8 --top-p 0.9 --seed 5".split()
    assert cli.main(["generate", tiny_model, "w3 w4", *options]) == 0
    captured = capsys.readouterr()
    assert captured.out == expected.text + "\n"
    assert captured.err == "loading [" + "#" * 30 + "]\n"
    assert cli.main(["generate", tiny_model, "w3 w4", *options, "--json"]) == 0
    shown = json.loads(lines_of(capsys))
    assert shown["text"] == expected.text
    assert shown["token_ids"] == expected.token_ids
    assert shown["finish_reason"] == expected.finish_reason
    assert shown["stats"]["prefill_tokens"] == len(expected.prompt_ids)


def test_generate_refuses_what_the_model_can_not_do(capsys, tiny_model):
    assert cli.main(["generate", tiny_model, "w3 " * 100]) == 2
    assert "allowed: 64" in capsys.readouterr().err
    assert cli.main(["generate", tiny_model, "w3", "--chat"]) == 2
    assert "chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("explain --device cuda --arch sm_xyz", "--arch"),
        ("explain --device cuda --arch sm_", "--arch"),
        ("explain --batch 1000000000000 --gpu H200", "--batch"),
    ],
)
def test_what_names_no_gpu_or_too_many_sequences_is_refused(line, words):
    result = run(*line.split())
    assert result.returncode == 2 and words in result.stderr + result.stdout
