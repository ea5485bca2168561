"""Launches that were resolved at an earlier call of the same shape."""

from __future__ import annotations

import functools

import pytest
import torch

import onchip
from onchip import repeats
from onchip.kernels.portable import resolved
from tests import problems
from tests.tolerance import check_forward, check_gradients

pytestmark = pytest.mark.gpu


def _inputs(seed: int, **sizes):
    inputs = problems.qkv(dtype=torch.bfloat16, seed=seed, **sizes)
    return [x.cuda() for x in inputs]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_calls_alike_share_a_launch_and_not_their_data(head_dim):
    sizes = {"seqlen_q": 130, "seqlen_k": 200, "head_dim": head_dim}
    portable = functools.partial(onchip.attention, kernel="portable")
    for seed in range(3):
        check_forward(portable, *_inputs(seed, **sizes), causal=True)
        check_gradients(portable, *_inputs(seed, **sizes), causal=True)
    before = len(resolved._kept)
    check_gradients(portable, *_inputs(7, **sizes), causal=True)
    assert len(resolved._kept) == before > 0


def test_other_strides_and_alignment_take_another_launch():
    sizes = {"seqlen_q": 130, "seqlen_k": 200, "head_dim": 64}
    q, k, v = _inputs(0, **sizes)
    check_forward(onchip.attention, q, k, v)
    wide = torch.empty(*k.shape[:-1], 72, dtype=k.dtype, device="cuda")
    for first in (0, 4, 8):  # rows that begin at 16 bytes, at 8, at 16
        view = wide[..., first : first + 64]
        view.copy_(k)
        check_forward(onchip.attention, q, view, v)
    check_forward(onchip.attention, q, k.transpose(1, 2).contiguous().transpose(1, 2), v)


@pytest.mark.parametrize("given", [{}, {"causal": True}, {"window": (40, 3)}], ids=str)
@pytest.mark.parametrize("lengths", [(130, 130), (3, 1500)], ids=str)
def test_dense_calls_alike_go_straight_to_their_launches(lengths, given, monkeypatch):
    calls = []
    run = repeats.Repeat.__call__
    monkeypatch.setattr(repeats.Repeat, "__call__", lambda *a: calls.append(1) or run(*a))
    sizes = {"seqlen_q": lengths[0], "seqlen_k": lengths[1], "head_dim": 64}
    kept = [_inputs(seed, **sizes) for seed in range(4)]
    wanted = [onchip.attention(*x, return_lse=True, kernel="portable", **given) for x in kept]
    for _ in range(3):
        for x, (out, lse) in zip(kept, wanted, strict=True):
            found = onchip.attention(*x, return_lse=True, **given)
            torch.testing.assert_close(found[0], out, rtol=2e-2, atol=1e-2)
            torch.testing.assert_close(found[1], lse, rtol=1e-4, atol=1e-4)
    if torch.cuda.get_device_capability() == (9, 0) and torch.__version__ >= "2.9":
        assert len(calls) >= 8
    before = len(calls)
    q, k, v = kept[0]
    check_gradients(onchip.attention, q, k, v, **given)  # a call with a gradient is not one of them
    assert len(calls) == before


def test_decode_follows_its_tensors():
    cache = torch.randn(8, 16, 2, 64, device="cuda", dtype=torch.bfloat16)
    table = torch.arange(8, device="cuda", dtype=torch.int32).view(2, 4)
    for seed in range(3):
        torch.manual_seed(seed)
        q = torch.randn(2, 1, 4, 64, device="cuda", dtype=torch.bfloat16)
        seqlens = torch.randint(1, 64, (2,), device="cuda", dtype=torch.int32)
        out = onchip.attention_with_kvcache(
            q, cache, cache, cache_seqlens=seqlens, block_table=table, causal=True
        )
        for b, length in enumerate(seqlens.tolist()):
            keys = cache[table[b].long()].flatten(0, 1)[None, :length]
            alone = onchip.attention(q[b : b + 1], keys, keys)
            torch.testing.assert_close(out[b : b + 1], alone, rtol=2e-2, atol=1e-2)


def test_one_scale_for_keys_and_values_goes_straight_to_its_launch(monkeypatch):
    calls = []
    run = repeats.Repeat.__call__
    monkeypatch.setattr(repeats.Repeat, "__call__", lambda *a: calls.append(1) or run(*a))
    k, v = (torch.randn(8, 16, 2, 64, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    table = torch.arange(8, device="cuda", dtype=torch.int32).view(2, 4)
    q = torch.randn(2, 1, 4, 64, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([64, 17], device="cuda", dtype=torch.int32)
    one, two = (torch.full((2,), x, device="cuda") for x in (0.5, 2.0))
    for scales in [(one, one), (one, two), (two, two), (two, one)] * 3:
        named = {"k_scale": scales[0], "v_scale": scales[1]}
        out = onchip.attention_with_kvcache(
            q, k, v, cache_seqlens=lengths, block_table=table, **named
        )
        wide = [x.float() * float(scale[0]) for x, scale in zip((k, v), scales, strict=True)]
        want = onchip.attention_with_kvcache(
            q.float(), *wide, cache_seqlens=lengths, block_table=table
        )
        torch.testing.assert_close(out.float(), want, rtol=1e-2, atol=4e-3 * float(scales[1][0]))
    assert len(calls) >= 10


@pytest.mark.parametrize(("kernel", "num_launches"), [("portable", 1), ("hopper", 2)])
def test_a_profiler_of_tritons_hears_of_resolved_launches(kernel, num_launches):
    from triton import knobs

    if kernel == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    q, k, v = _inputs(0, seqlen_q=64, seqlen_k=64, head_dim=64)
    want = [onchip.attention(q, k, v, kernel=kernel) for _ in range(3)][-1]
    heard = []
    knobs.runtime.launch_enter_hook.add(heard.append)
    try:
        again = onchip.attention(q, k, v, kernel=kernel)
    finally:
        knobs.runtime.launch_enter_hook.remove(heard.append)
    assert len(heard) == num_launches and torch.equal(want, again)


def test_autotuning_measures_once_and_changes_no_value(monkeypatch):
    from onchip.kernels.portable import tuning

    monkeypatch.setenv("ONCHIP_AUTOTUNE", "1")
    sizes = {"seqlen_q": 300, "seqlen_k": 301, "head_dim": 64}
    before = len(tuning._fastest)
    portable = functools.partial(onchip.attention, kernel="portable")
    for seed in range(2):
        check_forward(portable, *_inputs(seed, **sizes), softcap=7.5)
    assert len(tuning._fastest) == before + 1
