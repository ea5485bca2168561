"""The CPU kernels where contract tests with small shapes don't reach: tile edges, both routes of
the scores, NaN in gradients, memory, and the benchmark itself."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import onchip
from onchip import reference
from onchip.bench import cpu as bench
from onchip.bench import timing
from onchip.kernels import cpu, cpu_tiled
from onchip.kernels.common import apply_rotary
from onchip.problem import Mask
from tests.problems import offsets, packed, qkv
from tests.tolerance import assert_close_to_oracle, check_forward, check_gradients

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
call = functools.partial(onchip.attention, kernel="cpu")
fused = functools.partial(onchip.attention, kernel="cpu_fused")

# Tile sizes are 16 to 256: these lengths cross them and leave tails.
BANDS = {
    "full": {},
    "causal": {"causal": True},
    "wide window": {"window": (210, 100)},
    "window": {"causal": True, "window": (70, 0)},
    "narrow window": {"window": (1, 2)},
    "two keys": {"window": (0, 1)},
    "left only": {"window": (33, -1)},
    "right only": {"window": (-1, 5)},
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("lengths", [(300, 300), (150, 410), (290, 120)], ids=str)
@pytest.mark.parametrize("band", BANDS)
def test_every_band_over_many_tiles(band, lengths, dtype):
    q, k, v = qkv(1, *lengths, heads=2, kv_heads=1, head_dim=16, dtype=dtype)
    check_forward(call, q, k, v, **BANDS[band])
    check_gradients(call, q, k, v, **BANDS[band])


@pytest.fixture
def tiny_tiles(monkeypatch):
    monkeypatch.setattr(cpu_tiled, "_TILE_SCORES", 64)
    monkeypatch.setattr(cpu_tiled, "_TILE_KEYS", 3)
    monkeypatch.setattr(cpu_tiled, "_WIDEST_TILE", 5)
    monkeypatch.setattr(cpu_tiled, "_CHUNK_HEADS", 2)
    monkeypatch.setattr(cpu, "_WINDOW_ROWS", 5)


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 2.0, 100.0])
@pytest.mark.parametrize("band", BANDS)
def test_tiny_tiles(tiny_tiles, band, softcap, dtype):
    q, k, v = qkv(2, 37, 41, heads=6, kv_heads=3, head_dim=4, head_dim_v=6, dtype=dtype)
    slopes = torch.rand(2, 6) if softcap == 100 else None
    features = {**BANDS[band], "softcap": softcap, "alibi_slopes": slopes}
    check_forward(call, q, k, v, **features)
    check_gradients(call, q, k, v, **features)


@pytest.mark.parametrize("features", [{}, {"softcap": 500.0}, {"window": (9, 4)}], ids=str)
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_scores_too_large_for_exp(dtype, features):
    q, k, v = qkv(1, 40, 50, head_dim=16, dtype=dtype)
    q = q * 60  # scores of hundreds: exp overflows without a maximum
    features = {"causal": True, **features}
    check_forward(call, q, k, v, **features)
    check_gradients(call, q, k, v, **features)


@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
@pytest.mark.parametrize("shape", [(4, 4, 16, 16), (6, 2, 24, 8), (4, 1, 5, 40)], ids=str)
def test_lse_gradient_and_padding_through_the_fused_backward(shape, dtype):
    heads, kv_heads, head_dim, head_dim_v = shape
    q, k, v = qkv(2, 9, 70, heads, kv_heads, head_dim, head_dim_v, dtype)
    check_gradients(call, q, k, v)


@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_the_fused_record(causal, dtype):
    q, k, v = qkv(2, 33, 33, heads=3, kv_heads=3, head_dim=20, dtype=dtype)
    check_forward(fused, q, k, v, causal=causal)
    check_gradients(fused, q, k, v, causal=causal)
    dout = torch.randn(q.shape).to(dtype)
    grads = []
    for x in (q, k, v):
        x.requires_grad_()
    oracle = reference.attention_backward(q, k, v, dout, causal=causal)
    for run in (fused, reference.eager):
        out = run(q, k, v, causal=causal)
        out = out if isinstance(out, torch.Tensor) else out[0]
        grads.append(torch.autograd.grad(out, (q, k, v), dout))
    for name, ours, eager in zip(("dq", "dk", "dv"), *grads, strict=True):
        assert_close_to_oracle(ours, getattr(oracle, name), eager, name)


@pytest.mark.parametrize("run", [fused, call], ids=["cpu_fused", "cpu"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
def test_nan_reaches_only_gradients_that_depend_on_it(dtype, place, value, run):
    q, k, v = qkv(1, 40, 40, heads=2, kv_heads=2, dtype=dtype)
    dout = torch.randn(q.shape).to(dtype)
    {"q": q, "k": k, "v": v, "dout": dout}[place][0, 25, 0, 3] = value
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = run(*inputs, causal=True)
    grads = torch.autograd.grad(out, inputs, dout)
    # Query i <= j depends on keys and values j <= i alone, and key j on queries i >= j.
    assert out[:, :25].isfinite().all() and out[:, :, 1].isfinite().all()
    assert grads[0][:, :25].isfinite().all()
    for name, g in zip(("dq", "dk", "dv"), grads, strict=True):
        assert g[:, :, 1].isfinite().all(), name
        if place in ("q", "dout"):
            assert g[:, 26:].isfinite().all(), name
    touched = {"q": grads[0], "k": grads[0], "v": grads[0], "dout": grads[2]}[place]
    assert not touched[:, :, 0].isfinite().all()


def test_sinks_do_not_hide_nan():
    q, k, v = qkv(1, 6, 6)
    v[0, 3, 0, 0] = torch.nan
    sinks = torch.tensor([0.5, -torch.inf, 1.0, 0.0]).requires_grad_()
    out = onchip.attention(q, k, v, causal=True, sinks=sinks)
    assert out[0, 3:, 0, 0].isnan().all() and out[0, :3].isfinite().all()
    (dsinks,) = torch.autograd.grad(out, sinks, torch.ones_like(out))
    # Heads 0 and 1 read the KV head that holds the NaN.
    assert dsinks.isnan().tolist() == [True, True, False, False] and dsinks[2:].all()


@pytest.mark.parametrize("features", [{"causal": True}, {"softcap": 3.0}, {"window": (20, 5)}])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bits_do_not_depend_on_neighbours(dtype, features):
    lengths = [70, 1, 0, 150]
    q, k, v, limits = packed(lengths, lengths, head_dim=16, dtype=dtype)
    together = onchip.attention_varlen(q, k, v, **limits, **features)
    q, k, v = (x.clone() for x in (q, k, v))
    for x in (q, k, v):
        x[:71] = 100 * torch.randn(x[:71].shape).to(dtype)
    changed = onchip.attention_varlen(q, k, v, **limits, **features)
    alone = onchip.attention_varlen(
        q[71:], k[71:], v[71:], cu_seqlens_q=offsets([150]), cu_seqlens_k=offsets([150]),
        max_seqlen_q=150, max_seqlen_k=150, **features,
    )  # fmt: skip
    assert torch.equal(together[71:], changed[71:]) and torch.equal(together[71:], alone)


@given(
    seqlen_q=st.integers(1, 30),
    seqlen_k=st.integers(1, 30),
    left=st.integers(-1, 12),
    right=st.integers(-1, 12),
)
@settings(max_examples=150)
def test_rectangles_cover_each_visible_pair_once(seqlen_q, seqlen_k, left, right):
    met = torch.zeros(seqlen_q, seqlen_k)
    for r in cpu._rectangles(Mask(left, right), seqlen_q, seqlen_k):
        part = torch.ones(r.rows.stop - r.rows.start, r.keys.stop - r.keys.start)
        if r.causal:
            assert part.shape[0] == part.shape[1]
            part = part.tril()
        met[r.rows, r.keys] += part if r.bias is None else part * r.bias.exp()
    want = reference.visible(seqlen_q, seqlen_k, window=(left, right))
    assert torch.equal(met, want.float())


def test_views_are_read_in_place():
    base = torch.randn(2, 3, 50, 16)
    q = base.transpose(1, 2)  # (2, 50, 3, 16)
    k = torch.randn(1, 50, 1, 16).expand(2, 50, 3, 16)
    want = call(q.contiguous(), k.contiguous(), k.contiguous(), causal=True)
    assert torch.equal(call(q, k, k, causal=True), want)


def test_memory_does_not_grow_with_the_square():
    growth_mb = bench.peak_growth_mb()
    assert 5 < growth_mb < bench.TARGET_MEMORY_MB  # q, k, v and their gradients alone take 24


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_turns_complex_numbers(interleaved):
    x = torch.randn(2, 5, 3, 10, dtype=torch.float64)
    angles = torch.rand(9, 4, dtype=torch.float64)
    positions = torch.randint(0, 9, (2, 5))
    pairs = x[..., :8].unflatten(-1, (4, 2) if interleaved else (2, 4))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    turn = torch.polar(torch.ones(()).double(), angles[positions]).unsqueeze(-2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    turned = turned if interleaved else turned.transpose(-1, -2)
    want = torch.cat((turned.flatten(-2), x[..., 8:]), dim=-1)
    got = apply_rotary(x, angles.cos(), angles.sin(), positions, interleaved)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)


def test_timing_interleaves_and_compares_rounds():
    order = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times_us = timing.interleaved_us(calls, rounds=3, min_time_us=0.0)
    assert order[4:] == ["a", "b", "b", "a", "a", "b"] and all(
        len(t) == 3 for t in times_us.values()
    )
    assert timing.median_ratio([2.0, 9.0, 40.0], [1.0, 3.0, 10.0]) == 3.0


def test_cases_count_what_the_mask_lets_through():
    cases = {case.name: case for case in bench.CASES}
    assert cases["full"].share(64) == 1.0
    assert cases["causal"].share(64) == pytest.approx(65 / 128)
    assert cases["causal"].share_of_torch(64) == 1.0 == cases["full"].share_of_torch(64)
    assert cases["varlen"].share(64) == pytest.approx(0.5**2 + 0.25**2 + 2 * 0.125**2)
    assert cases["S_q = N/2, causal"].share(64) == pytest.approx((32 * 32 + 32 * 33 / 2) / 64**2)


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_cell_is_measured(part):
    case = next(case for case in bench.CASES if case.name == "varlen, causal")
    cell = bench.measure(case, 32, torch.float32, part, rounds=2)
    assert cell["onchip_us"] > 0 and cell["ratio"] > 0
    assert cell["passed"] == (cell["ratio"] >= cell["target"])


def test_the_overhead_command_writes_json(tmp_path, capsys):
    path = tmp_path / "a" / "overhead.json"
    status = bench.main(["--overhead", "--json", str(path)])
    overhead = json.loads(path.read_text())["overhead"]
    assert status == (not overhead["passed"])
    assert min(overhead["call_us"], overhead["launch_us"]) > 0
    assert "overhead" in capsys.readouterr().out
