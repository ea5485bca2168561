"""The comparison and the counters on a GPU."""

from __future__ import annotations

import json

import pytest

from onchip.analysis.hardware import Hardware, measure
from onchip.bench import compare, counted, counters

pytestmark = pytest.mark.gpu


def test_a_comparison(tmp_path):
    path = tmp_path / "bench.json"
    line = f"--seqlen 500 --heads 4 --kv-heads 2 --causal --rounds 2 --json {path}"
    names = ["--methods", "onchip,three-step,torch flash"]
    assert compare.main([*line.split(), *names]) == 0
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert [cell["part"] for cell in cells] == ["forward", "both"]
    for cell in cells:
        rows = {row["method"]: row for row in cell["rows"]}
        own = [name for name in rows if name.startswith("onchip")]
        assert "onchip portable" in own
        for name in (*own, "three-step"):
            assert rows[name]["why_not"] == "" and rows[name]["time"]["median_us"] > 0
            assert rows[name]["peak_bytes"] > 0
        assert rows["three-step"]["peak_bytes"] > rows["onchip portable"]["peak_bytes"]


def test_rates_are_below_the_stated_ones():
    gpu, achieved = Hardware.detect(), measure(size=4096)
    assert 0.3 < achieved.flops / gpu.flops("bfloat16") < 1.05
    assert 0.5 < achieved.bandwidth / gpu.bandwidth < 1.05


def test_counted_bytes_are_the_models():
    """DRAM bytes within 15 % of the model's, read and written together."""
    try:
        ncu = counters.find_ncu()
        metrics = counters.chosen(counters.available(ncu))
        calls = [counted.CALLS[name] for name in ("forward-4096", "backward-4096")]
        both = counters.count(ncu, metrics, calls, Hardware.detect())
    except counters.CountersError as error:
        pytest.skip(str(error))
    names = [[kernel.name for kernel in found.kernels] for found in both]
    assert names[0][0].startswith("attn_fwd_") and all("attn_" in name for name in names[0])
    assert len(names[1]) >= 3 and all(name.startswith("attn_bwd_") for name in names[1])
    for found in both:
        assert sum(found.measured) == pytest.approx(sum(found.predicted), rel=0.15)
