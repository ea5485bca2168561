"""The numeric lab: passes on any sizes, and notices each planted mistake where it should."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip import reference
from onchip.lab import numeric
from onchip.lab.numeric import Check, LabReport, run_lab

FORWARD = ["out: tiled = dense", "LSE: tiled = dense", "P: rebuilt from the LSE = dense"]
GRADIENTS = [f"{x}: tiled = central differences" for x in ("dq", "dk", "dv")]


def test_defaults_pass_with_the_promised_bounds():
    report = run_lab()
    assert report.passed
    assert [c.name for c in report.checks] == FORWARD + GRADIENTS
    assert [c.bound for c in report.checks] == [1e-12] * 3 + [2e-8] * 3
    # The differences are real ones: they never agree to the last bit.
    assert all(0 < c.error < c.bound / 100 for c in report.checks[3:])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("length", "block", "head_dim"),
    [(1, 1, 1), (1, 5, 4), (2, 1, 1), (5, 1, 3), (5, 8, 2), (6, 3, 2), (7, 5, 4), (17, 4, 2)],
)
def test_any_length_and_block(length, block, head_dim, causal):
    assert run_lab(length, block, head_dim, causal, seed=length).passed


EXPECTED = {
    "alpha": {FORWARD[0], *GRADIENTS[:2]},
    "scale": set(GRADIENTS[:2]),
    "causal": {*FORWARD, *GRADIENTS},
}


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(2, 6),
    block=st.integers(1, 8),
    head_dim=st.integers(2, 4),
    causal=st.booleans(),
    seed=st.integers(0, 2**63 - 1),
    mistake=st.sampled_from(["alpha", "scale", "causal"]),
)
def test_a_mistake_fails_exactly_the_checks_it_should(
    length, block, head_dim, causal, seed, mistake
):
    if mistake == "alpha":
        block = min(block, length - 1)
    report = run_lab(length, block, head_dim, causal or mistake == "causal", seed, mistake)
    assert not report.passed
    failed = {c.name for c in report.checks if not c.passed}
    assert failed == EXPECTED[mistake]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_mistakes_show_at_the_smallest_sizes(length):
    assert not run_lab(length, 1, 2, mistake="scale").passed
    assert not run_lab(length, 1, 1, causal=True, mistake="causal").passed
    if length > 1:
        assert not run_lab(length, 1, 1, mistake="alpha").passed


BAD = [
    ({"length": 0}, ValueError, "length: got 0"),
    ({"block": -3}, ValueError, "block: got -3"),
    ({"head_dim": 0}, ValueError, "head_dim: got 0"),
    ({"seed": -1}, ValueError, "seed: got -1"),
    ({"seed": 2**63}, ValueError, "seed: got"),
    ({"length": 2.0}, TypeError, "length: got 2.0"),
    ({"block": True}, TypeError, "block: got True"),
    ({"causal": 1}, TypeError, "causal: got 1"),
    ({"mistake": "beta"}, ValueError, "mistake: got 'beta'.*'alpha', 'scale', 'causal'"),
    ({"mistake": "alpha", "block": 7}, ValueError, "block: got 7.*smaller"),
    ({"mistake": "alpha", "length": 1, "block": 1}, ValueError, "length: got 1"),
    ({"mistake": "scale", "head_dim": 1}, ValueError, "head_dim: got 1"),
    ({"mistake": "causal"}, ValueError, "causal: got False.*causal=True"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD, ids=lambda x: str(x))
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        run_lab(**options)


def test_report_is_json_and_a_table():
    report = run_lab(4, 2, 2, True, 5, "causal")
    plain = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert plain["passed"] is False
    assert plain["mistake"] == "causal" and plain["length"] == 4 and plain["seed"] == 5
    lse = plain["checks"][1]
    assert lse["error"] is None and lse["passed"] is False  # -inf where a number should be
    lines = str(report).splitlines()
    assert lines[-1] == "FAIL" and "instead of" in lines[0]
    assert all(line.endswith("FAIL") for line in lines[2:-1])
    assert str(run_lab()).splitlines()[-1] == "PASS"
    assert max(map(len, str(run_lab()).splitlines())) <= 80


def test_nan_and_the_bound_itself_do_not_pass():
    assert not Check("x", float("nan"), 1.0, 0).passed
    assert not Check("x", 1.0, 1.0, 0).passed
    good = Check("x", 0.5, 1.0, 0)
    assert not LabReport(1, 1, 1, False, 0, None, [good, Check("y", 2.0, 1.0, 0)]).passed


def test_central_differences_are_those_of_the_oracle(monkeypatch):
    monkeypatch.setattr(numeric, "MAX_SCORES_AT_ONCE", 100)  # several chunks, with a tail
    g = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(5, 3, generator=g, dtype=torch.float64) for _ in range(4))
    dlse = torch.randn(5, generator=g, dtype=torch.float64)
    one = [x[None, :, None] for x in (q, k, v, dout)]
    want = reference.attention_backward(
        one[0], one[1], one[2], one[3], dlse[None, None], causal=True
    )
    for n, name in enumerate(("dq", "dk", "dv")):
        got = numeric._central_differences([q, k, v], n, dout, dlse, True)
        torch.testing.assert_close(got, getattr(want, name)[0, :, 0], rtol=0, atol=1e-10)
