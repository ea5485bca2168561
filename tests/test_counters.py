"""Counters: what Nsight Compute prints, what may stand in its way, and the model beside it."""

from __future__ import annotations

import subprocess

import pytest
import torch

from onchip import cli
from onchip.analysis import bill as bills
from onchip.analysis.bill import Bill, Stage, once
from onchip.analysis.hardware import Hardware
from onchip.bench import cases, counted, counters
from onchip.bench.counters import CountersError

PRINTED = """==PROF== Connected to process 7
==PROF== Profiling "attn_fwd_portable": 0%....100% - 2 passes
"ID","Kernel Name","gpu__time_duration.sum","dram__bytes_read.sum","dram__bytes_write.sum",\
"dram__throughput.avg.pct_of_peak_sustained_elapsed",\
"sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",\
"l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",\
"smsp__average_warps_issue_stalled_wait_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio"
"","","ns","byte","byte","%","%","","",""
"0","attn_fwd_portable","1234000","2,000,000","500000","12.5","61.5","7","0.5","2.25"
"1","merge","1000","100","50","1","","0","0","0"
"""


def test_parse():
    first, second = counters.parse(PRINTED)
    assert (first.name, first.time_us, first.read_bytes) == ("attn_fwd_portable", 1234.0, 2000000)
    assert (first.written_bytes, first.dram_percent, first.tensor_percent) == (500000, 12.5, 61.5)
    assert first.bank_conflicts == 7 and list(first.stalls.items()) == [
        ("barrier", 2.25),
        ("wait", 0.5),
    ]
    assert second.tensor_percent is None and second.stalls == {}
    count = counters.Count("x", "a call", (first, second), (2000100, 400000), 500_000)
    assert count.measured == (2000100, 500050)
    text = str(count)
    assert "  5 bytes for each pair" in text
    assert "+0.0%" in text and "+25.0%" in text and "waits: barrier 2.2, wait 0.5" in text


def test_calls_of_one_process_are_told_apart(monkeypatch):
    header, units, first, second = PRINTED.splitlines()[2:]
    spin = second.replace("merge", "at::cuda::<unnamed>::spin_kernel(long)")
    lines = [header, units, first, spin, first, second, spin]
    commands = []

    def printed(command):
        commands.append(command)
        return "\n".join(lines)

    monkeypatch.setattr(counters, "_run", printed)
    monkeypatch.setattr(cases, "device_arch", lambda device: "sm_90")
    calls = [counted.CALLS["forward-4096"], counted.CALLS["backward-4096"]]
    found = counters.count("ncu", ["x"], calls, Hardware.named("H200"))
    assert [len(count.kernels) for count in found] == [1, 2]
    assert [count.name for count in found] == ["forward-4096", "backward-4096"]
    assert commands[0][-2:] == ["forward-4096", "backward-4096"]
    assert found[1].predicted[0] > found[0].predicted[0]
    lines[2:4] = [spin]
    with pytest.raises(CountersError, match="kernels of 1 calls, not of forward-4096, backward"):
        counters.count("ncu", ["x"], calls, Hardware.named("H200"))


def test_metrics_are_those_that_exist():
    base = ["gpu__time_duration", "dram__bytes_read", "dram__bytes_write", "other"]
    assert counters.chosen(base) == [f"{name}.sum" for name in base[:3]]
    some = counters.chosen([*base, "sm__inst_executed_pipe_tensor", counters._STALLED + "wait"])
    assert "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active" in some
    with pytest.raises(CountersError, match="no counter dram__bytes_write"):
        counters.chosen(base[:2])


@pytest.mark.parametrize(
    ("printed", "status", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - no permission", 1, "NVreg_RestrictProfilingToAdminUsers=0"),
        ("Failed to initialize the profiler: LibraryNotLoaded", 0, "container or virtual machine"),
        ("==ERROR== Failed to find metric x", 1, "ncu failed: ==ERROR== Failed to find metric x"),
        ("nothing", 3, "ncu failed: nothing"),
    ],
)
def test_failures_are_explained(monkeypatch, printed, status, message):
    done = subprocess.CompletedProcess([], status, stdout=printed, stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: done)
    with pytest.raises(CountersError) as caught:
        counters._run(["ncu"])
    assert message in str(caught.value)


def test_a_missing_tool(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(counters, "_PLACES", (str(tmp_path / "*" / "ncu"),))
    with pytest.raises(CountersError, match="Install Nsight Compute"):
        counters.find_ncu()
    for version in ("2024.1", "2025.3"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "ncu").touch()
    assert counters.find_ncu() == str(tmp_path / "2025.3" / "ncu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_command_without_a_gpu(capsys):
    assert cli.main(["bench", "--counters"]) == 2
    assert "onchip bench --counters: there is no GPU here" in capsys.readouterr().err


def test_predictions(monkeypatch):
    """Three steps move 8 bytes for each pair and head, onchip an order of magnitude less."""
    monkeypatch.setattr(cases, "device_arch", lambda device: "sm_90")
    gpu = Hardware.named("H200")
    steps, forward = (counted.CALLS[f"{n}-16384"].bill(gpu) for n in ("three-step", "forward"))
    assert sum(counters.predicted_bytes(steps)) == pytest.approx(8 * 2 * 16384**2, rel=0.01)
    assert counted.CALLS["three-step-16384"].pairs == 2 * 16384**2
    pair_bytes = sum(counters.predicted_bytes(forward)) / counted.CALLS["forward-16384"].pairs
    assert pair_bytes < 8 / 10
    stage = Stage("x", 1, 0, (once("a", 5), once("b", 6)), (once("c", 7),))
    assert counters.predicted_bytes(Bill("m", (stage, stage))) == (22, 14)
    small = cases.Case(1, 64, 1, 1, 16, False, "bfloat16", "cuda").problem()
    assert counters.predicted_bytes(bills.three_step(small))[1] == 2 * 64 * 64 * 2 + 64 * 16 * 2
