"""Dropout of the portable kernels in Triton's interpreter, and the public keyword."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

import onchip
from onchip import reference
from onchip.kernels.portable import backward, dropout, forward
from onchip.kernels.portable.backward_config import BackwardConfig, Tiles
from onchip.kernels.portable.config import Config
from tests import problems
from tests.portable_backward_cases import check_gradients, saved_of
from tests.portable_cases import Call, Case, build, check

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="tests/gpu covers it where there is a GPU"
)
F32 = torch.float32
CASES = {
    "plain": Case((40, 40), (53, 53)),
    "causal_float32": Case((50,), (77,), dtype=F32, causal=True),
    "all_terms": Case((50,), (60,), dtype=F32, alibi=1, softcap=4.0, sinks=True, window=(25, 4)),
    "packed_causal": Case((33, 1, 40), (50, 7, 20), packed=True, causal=True, sinks=True),
    "dense_used": Case((20, 20), (50, 17), used=True, window=(9, 2)),
}


def dropping(case: Case, p: float = 0.3) -> Call:
    """A call with dropout, and each sequence's mask for the oracle."""
    call = build(case)
    rng = call.tensors.dropout_rng = torch.tensor([2**40 + 12345, 77])
    call.problem = replace(call.problem, dropout_p=p)
    longest = max(case.lengths_q), max(case.lengths_k)
    keep = dropout.keep_mask(rng, p, len(case.lengths_q), case.heads, *longest)
    call.extras = [
        reference.Extras(keep[b : b + 1, :, :m, :n], dropout.rounded(p))
        for b, (m, n) in enumerate(zip(case.lengths_q, case.lengths_k, strict=True))
    ]
    return call


@interpreted
@pytest.mark.parametrize("tiles", [(16, 32), (32, 16)])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_match_the_oracle_with_the_same_mask(name, tiles):
    call = dropping(CASES[name])
    check(call, *forward.launch_with(Config(*tiles, 4, 1), call.problem, call.tensors))
    saved = saved_of(call)
    config = BackwardConfig(Tiles(*tiles, 4, 1), Tiles(*tiles[::-1], 4, 1))
    gradients = backward.launch_with(config, call.problem, call.tensors, saved)
    check_gradients(call, saved, gradients)


@interpreted
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_fraction_kept_and_its_independence(p):
    rng = torch.tensor([11, 5])
    keep = dropout.keep_mask(rng, p, 2, 2, 120, 200).double()
    # 96 000 draws: 5 standard deviations of their mean.
    assert abs(float(keep.mean()) - (1 - p)) < 5 * (p * (1 - p) / keep.numel()) ** 0.5
    centred = keep - keep.mean()
    for other in (centred.roll(1, -1), centred.roll(8, -1), centred.roll(1, -2), centred.flip(1)):
        correlation = float((centred * other).mean() / centred.square().mean())
        assert abs(correlation) < 5 / keep.numel() ** 0.5


@interpreted
def test_the_mask_depends_on_seed_and_offset_and_not_on_lengths():
    keep = dropout.keep_mask(torch.tensor([11, 5]), 0.5, 2, 3, 40, 70)
    assert torch.equal(keep, dropout.keep_mask(torch.tensor([11, 5]), 0.5, 2, 3, 40, 70))
    longer = dropout.keep_mask(torch.tensor([11, 5]), 0.5, 2, 3, 90, 99)
    assert torch.equal(keep, longer[:, :, :40, :70])
    for rng in ([12, 5], [11, 6], [11 + 2**32, 5]):
        other = dropout.keep_mask(torch.tensor(rng), 0.5, 2, 3, 40, 70)
        assert 0.4 < float((keep == other).double().mean()) < 0.6


def test_rounding_of_p():
    assert dropout.rounded(0.25) == 0.25
    assert abs(dropout.rounded(0.1) - 0.1) <= 2**-17
    assert dropout.rounded(1e-9) == 2**-16 and dropout.rounded(1 - 1e-9) == 1 - 2**-16


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, float("nan"), True, "0.1"])
def test_a_bad_probability_is_refused(p):
    with pytest.raises((ValueError, TypeError), match="dropout_p"):
        onchip.attention(*problems.qkv(), dropout_p=p)


def test_a_cpu_refuses_it_with_reasons_and_leaves_the_generator_alone():
    before = torch.random.get_rng_state()
    with pytest.raises(onchip.NoKernelError, match="cpu: has no dropout"):
        onchip.attention(*problems.qkv(), dropout_p=0.5)
    assert torch.equal(before, torch.random.get_rng_state())
    q, k, v, lengths = problems.packed([3, 2], [4, 5])
    with pytest.raises(onchip.NoKernelError, match="cpu: has no dropout"):
        onchip.attention_varlen(q, k, v, dropout_p=0.5, **lengths)
    assert "dropout" in str(onchip.explain(*problems.qkv(), dropout_p=0.5))


def test_meta_tensors_and_no_dropout_at_zero():
    q, k, v = (x.to("meta") for x in problems.qkv())
    assert onchip.attention(q, k, v, dropout_p=0.5).shape == q.shape
    inputs = problems.qkv()
    assert torch.equal(onchip.attention(*inputs, dropout_p=0.0), onchip.attention(*inputs))
