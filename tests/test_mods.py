"""User score and mask functions in Triton's interpreter, and their public objects."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

import onchip
from onchip import mods, reference
from onchip.kernels.portable import backward, forward
from onchip.kernels.portable.backward_config import BackwardConfig, Tiles
from onchip.kernels.portable.config import Config
from onchip.problem import Op
from tests import problems, user_mods
from tests.portable_backward_cases import check_gradients, saved_of
from tests.portable_cases import Call, Case, build, check

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="tests/gpu covers it where there is a GPU"
)
F32 = torch.float32
SMALL = Config(32, 16, 4, 1)
SMALL_BACKWARD = BackwardConfig(Tiles(16, 32, 4, 1), Tiles(32, 16, 4, 1))


def with_mods(case: Case, score=None, mask=None, plain_score=None, plain_masks=None) -> Call:
    """A call with user functions and what they mean for the oracle, sequence by sequence."""
    call = build(case)
    call.tensors.score_aux = () if score is None else score.aux
    call.tensors.mask_aux = () if mask is None else mask.aux
    blocks = None if mask is None else mask.blocks
    call.tensors.block_list = () if blocks is None else blocks.tensors
    call.problem = replace(
        call.problem,
        score_mod="" if score is None else score.key,
        mask_mod="" if mask is None else mask.key,
        block_list=() if blocks is None else blocks.block,
    )
    count = len(case.lengths_q)
    call.extras = [
        reference.Extras(score_mod=plain_score, mask=(plain_masks or [None] * count)[b])
        for b in range(count)
    ]
    return call


def hold(call: Call, aux_grad: bool = False, config=SMALL_BACKWARD, forward_config=SMALL):
    """Checks forward and backward; returns the sums of the aux gradients."""
    check(call, *forward.launch_with(forward_config, call.problem, call.tensors))
    saved = saved_of(call)
    problem = replace(call.problem, op=Op.BACKWARD, aux_grad=aux_grad)
    if aux_grad:
        saved.aux_sums = [torch.zeros(x.shape) for x in call.tensors.score_aux]
    check_gradients(call, saved, backward.launch_with(config, problem, call.tensors, saved))
    return saved


@interpreted
@pytest.mark.parametrize("poison", [False, True])
def test_documents(poison):
    documents = torch.tensor([[0] * 20 + [1] * 25 + [2] * 15, [0] * 60], dtype=torch.int32)
    mask = onchip.MaskMod(user_mods.same_document, (documents, torch.tensor(60)))
    masks = [(row[:, None] == row)[None, None] for row in documents]
    call = with_mods(Case((60, 60), (60, 60), causal=True), mask=mask, plain_masks=masks)
    if poison:  # reaches exactly its own document's later rows
        for x in (call.tensors.v[0], call.sequences[0][2]):
            x[30, 0, 3], x[31, 0, 5] = torch.nan, torch.inf
        check(call, *forward.launch_with(SMALL, call.problem, call.tensors))
    else:
        hold(call)


@interpreted
@pytest.mark.parametrize("case", [Case((50, 50), (50, 50), dtype=F32),
                                  Case((50, 30), (50, 30), packed=True, sinks=True)])  # fmt: skip
def test_prefix_lm(case):
    prefix = torch.tensor([17, 3])
    mask = onchip.MaskMod(user_mods.prefix_or_causal, (prefix,))
    masks = []
    for n, length in zip(prefix, case.lengths_q, strict=True):
        at = torch.arange(length)
        masks.append(((at < n) | (at <= at[:, None]))[None, None])
    hold(with_mods(case, mask=mask, plain_masks=masks))


@interpreted
@pytest.mark.parametrize("reduction", ["none", "atomics"])
@pytest.mark.parametrize(
    "case",
    [
        Case((40,), (53,), dtype=F32, causal=True),
        Case((33, 20), (30, 41), packed=True, heads=4, kv_heads=2, softcap=4.0),
    ],
)
def test_learned_relative_bias(case, reduction):
    bias = torch.randn(case.heads, 8)
    score = onchip.ScoreMod(
        user_mods.relative_bias, aux=(bias,), aux_grad=user_mods.relative_bias_grad
    )
    call = with_mods(case, score, plain_score=user_mods.with_relative_bias(bias))
    saved = hold(call, aux_grad=True, config=replace(SMALL_BACKWARD, reduction=reduction))
    wanted = torch.zeros_like(bias, dtype=torch.float64)
    for b, (q, k, v) in enumerate(call.sequences):
        leaf = bias.double().requires_grad_()
        extras = reference.Extras(score_mod=user_mods.with_relative_bias(leaf))
        inputs = (x[None].double() for x in (q, k, v))
        given = {"causal": case.causal, "softcap": case.softcap, "extras": extras}
        out, lse = reference.eager(*inputs, **given)
        start = sum(case.lengths_q[:b])
        rows = slice(start, start + len(q))
        dout, dlse = saved.dout[b], saved.dlse[b]
        if case.packed:
            dout, dlse = saved.dout[rows], saved.dlse[:, rows]
        wanted += torch.autograd.grad((out * dout[None]).sum() + (lse * dlse[None]).sum(), leaf)[0]
    tolerance = 1e-4 if case.dtype == F32 else 2e-2
    torch.testing.assert_close(saved.aux_sums[0].double(), wanted, rtol=tolerance, atol=tolerance)


@interpreted
@pytest.mark.parametrize("case", [Case((40,), (53,), dtype=F32, window=(20, 9), alibi=1),
                                  Case((40,), (53,), dtype=F32, softcap=3.0, sinks=True),
                                  Case((40, 9), (33, 50), packed=True, causal=True)])  # fmt: skip
def test_a_score_function_with_a_derivative(case):
    factor = torch.tensor([0.05, -0.02])
    score = onchip.ScoreMod(user_mods.bent, user_mods.bent_grad, aux=(factor,))
    hold(with_mods(case, score, plain_score=user_mods.with_bend(factor)))


def test_keys_tell_functions_apart_and_find_them_again():
    first = onchip.MaskMod(user_mods.prefix_or_causal, (torch.tensor([1]),))
    again = onchip.MaskMod(user_mods.prefix_or_causal, (torch.tensor([2]),))
    other = onchip.ScoreMod(user_mods.bent, user_mods.bent_grad)
    assert first.key == again.key != other.key
    assert onchip.ScoreMod(user_mods.bent).key != other.key
    assert mods.functions_of(other.key) == (user_mods.bent, user_mods.bent_grad, None)
    with pytest.raises(KeyError, match="nothing-like-it"):
        mods.functions_of("nothing-like-it")


def test_bad_objects_are_refused():
    with pytest.raises(TypeError, match=r"MaskMod\.fn: got function.*@triton\.jit"):
        onchip.MaskMod(lambda b, h, i, j: i >= j)
    with pytest.raises(TypeError, match=r"ScoreMod\.grad"):
        onchip.ScoreMod(user_mods.bent, grad=len)
    with pytest.raises(TypeError, match=r"ScoreMod\.aux"):
        onchip.ScoreMod(user_mods.bent, aux=torch.ones(2))
    inputs = problems.qkv()
    with pytest.raises(TypeError, match=r"mask_mod: got JITF|mask_mod: got InterpretedF"):
        onchip.attention(*inputs, mask_mod=user_mods.prefix_or_causal)
    leaf = torch.ones(4, requires_grad=True)
    with pytest.raises(ValueError, match=r"score_mod\.aux.*aux_grad"):
        onchip.attention(*inputs, score_mod=onchip.ScoreMod(user_mods.bent, aux=(leaf,)))
    strided = onchip.ScoreMod(user_mods.bent, aux=(torch.ones(4, 2)[:, 0],))
    with pytest.raises(ValueError, match=r"score_mod\.aux.*contiguous"):
        onchip.attention(*inputs, score_mod=strided)


def test_a_cpu_says_why_not():
    score = onchip.ScoreMod(user_mods.bent, aux=(torch.ones(4),))
    with pytest.raises(onchip.NoKernelError, match="cpu: score_mod needs a Triton kernel"):
        onchip.attention(*problems.qkv(), score_mod=score)
    mask = onchip.MaskMod(user_mods.prefix_or_causal, (torch.ones(2),))
    q, k, v, lengths = problems.packed([3, 2], [4, 5])
    with pytest.raises(onchip.NoKernelError, match="cpu: mask_mod needs a Triton kernel"):
        onchip.attention_varlen(q, k, v, mask_mod=mask, **lengths)


def test_meta_tensors_pass_through_the_operators():
    q, k, v = (x.to("meta") for x in problems.qkv())
    score = onchip.ScoreMod(user_mods.bent, aux=(torch.ones(4, device="meta"),))
    assert onchip.attention(q, k, v, score_mod=score).shape == q.shape
