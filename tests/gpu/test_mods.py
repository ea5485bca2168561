"""User score and mask functions on a GPU through the public calls, at real sizes."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import triton.testing

import onchip
from onchip import reference
from tests import problems, user_mods
from tests.tolerance import assert_close_to_oracle

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def leaves(length=500, head_dim=64, dtype=BF16):
    shape = {"seqlen_q": length, "seqlen_k": length, "heads": 4, "kv_heads": 2}
    given = problems.qkv(**shape, head_dim=head_dim, dtype=dtype)
    return [x.cuda().requires_grad_() for x in given]


def hold(inputs, extras, causal=False, **given) -> None:
    """Values and gradients of a call against the oracle."""
    out, lse = onchip.attention(*inputs, causal=causal, return_lse=True, **given)
    plain, plain_lse = reference.eager(*inputs, causal=causal, extras=extras)
    with torch.no_grad():
        oracle, oracle_lse = reference.attention(*inputs, causal=causal, extras=extras)
    assert_close_to_oracle(out, oracle, plain, "out")
    assert_close_to_oracle(lse, oracle_lse, plain_lse, "lse")
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, dout)
    eager = torch.autograd.grad(plain, inputs, dout)
    own = [x.detach() for x in inputs]
    want = reference.attention_backward(*own, dout, causal=causal, extras=extras)
    for name, got, exact, rough in zip("qkv", grads, want[:3], eager, strict=True):
        assert_close_to_oracle(got, exact, rough, f"d{name}")


def documents(length, size, block=None):
    """Two rows of documents, of `size` tokens and of all of them, and their mask."""
    row = torch.arange(length, device="cuda") // size
    documents = torch.stack((row, row * 0)).int()
    mask = onchip.MaskMod(user_mods.same_document, (documents, torch.tensor(length, device="cuda")))
    if block is not None:
        mask = replace(mask, blocks=onchip.block_list(mask, 2, 1, length, length, block=block))
    return documents, mask


@pytest.mark.parametrize("block", [None, (128, 128), (64, 64), (256, 32)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_documents(head_dim, block):
    rows, mask = documents(500, 137, block)
    allowed = (rows[:, None, :] == rows[:, :, None])[:, None]
    hold(leaves(500, head_dim), reference.Extras(mask=allowed), causal=True, mask_mod=mask)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_block_list_changes_no_bit(head_dim):
    found = []
    inputs = leaves(4096, head_dim)
    dout = torch.randn_like(inputs[0])
    for block in (None, (128, 128), (256, 128)):
        _, mask = documents(4096, 700, block)
        out = onchip.attention(*inputs, causal=True, mask_mod=mask, kernel="portable")
        found.append([out, *torch.autograd.grad(out, inputs, dout)])
    for x, y, z in zip(*found, strict=True):
        # A list at D = 256 takes smaller tiles in the backward: another order of sums.
        tolerance = 2e-2 if head_dim == 256 and x is not found[0][0] else 0.0
        torch.testing.assert_close(y, z, rtol=0, atol=0)
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_block_list_saves_time(part):
    """Eight documents of 2k in 16k leave an eighth of the pairs; the goal is 0.35 of the time."""
    length = 16384
    row = (torch.arange(length, device="cuda") // (length // 8)).int()[None]
    mask = onchip.MaskMod(user_mods.same_document, (row, torch.tensor(length, device="cuda")))
    listed = replace(mask, blocks=onchip.block_list(mask, 1, 1, length, length))
    given = [x[:1].contiguous() for x in leaves(length, 128)]
    inputs = [x.detach().requires_grad_(part == "backward") for x in given]
    dout = torch.randn_like(inputs[0])

    def run(mod):
        out = onchip.attention(*inputs, mask_mod=mod, kernel="portable")
        if part == "backward":
            torch.autograd.grad(out, inputs, dout)

    times = {}
    for name, mod in (("plain", None), ("listed", listed)):
        times[name] = triton.testing.do_bench_cudagraph(
            functools.partial(run, mod), rep=60, return_mode="median"
        )
    assert times["listed"] < 0.35 * times["plain"], times


@pytest.mark.parametrize("block", [None, (128, 128), (32, 64)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_prefix_lm(dtype, block):
    prefix = torch.tensor([177, 30], device="cuda")
    at = torch.arange(500, device="cuda")
    allowed = (at < prefix[:, None, None]) | (at <= at[:, None])
    mask = onchip.MaskMod(user_mods.prefix_or_causal, (prefix,))
    if block is not None:
        mask = replace(mask, blocks=onchip.block_list(mask, 2, 1, 500, 500, block=block))
    hold(leaves(dtype=dtype), reference.Extras(mask=allowed[:, None]), mask_mod=mask)


def test_a_score_function_with_a_derivative():
    factor = torch.tensor([0.05, -0.05, 0.1, 0.0], device="cuda")
    score = onchip.ScoreMod(user_mods.bent, user_mods.bent_grad, aux=(factor,))
    extras = reference.Extras(score_mod=user_mods.with_bend(factor))
    hold(leaves(), extras, causal=True, score_mod=score)


def learned(bias):
    return onchip.ScoreMod(
        user_mods.relative_bias, aux=(bias,), aux_grad=user_mods.relative_bias_grad
    )


def test_a_relative_bias_learns():
    bias = torch.randn(4, 8, device="cuda", requires_grad=True)
    inputs = leaves()
    extras = reference.Extras(score_mod=user_mods.with_relative_bias(bias.detach()))
    hold(inputs, extras, causal=True, score_mod=learned(bias))
    out = onchip.attention(*inputs, causal=True, score_mod=learned(bias))
    dout = torch.randn_like(out)
    (got,) = torch.autograd.grad(out, bias, dout)
    exact = [x.detach().double() for x in inputs]
    extras = reference.Extras(score_mod=user_mods.with_relative_bias(bias))
    out, _ = reference.eager(*exact, causal=True, extras=extras)
    (want,) = torch.autograd.grad(out, bias, dout.double())
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))


def test_deterministic_refuses_the_atomics():
    bias = torch.randn(4, 8, device="cuda", requires_grad=True)
    with pytest.raises(onchip.NoKernelError, match="not deterministic"):
        onchip.attention(*leaves(), score_mod=learned(bias), deterministic=True)
    onchip.attention(*leaves(), score_mod=learned(bias.detach()), deterministic=True)


def test_compiled_in_one_graph():
    bias = torch.randn(4, 8, device="cuda", requires_grad=True)
    score = learned(bias)

    def loss(q, k, v):
        return onchip.attention(q, k, v, causal=True, score_mod=score).float().square().sum()

    given = leaves(dtype=torch.float16)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    eager = torch.autograd.grad(loss(*given), (*given, bias))
    traced = torch.autograd.grad(compiled(*given), (*given, bias))
    for x, y in zip(eager[:3], traced[:3], strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    torch.testing.assert_close(eager[3], traced[3], rtol=1e-3, atol=1e-3)


def test_packed_lengths_compile_nothing_anew():
    from onchip.kernels.portable.forward import attn_fwd_portable

    bias = torch.randn(4, 8, device="cuda")
    caches = attn_fwd_portable.device_caches[torch.cuda.current_device()][0]

    def attend(*lengths):
        q, k, v, given = problems.packed(lengths, lengths, head_dim=64, dtype=BF16)
        given = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
        qkv = (x.cuda() for x in (q, k, v))
        return onchip.attention_varlen(*qkv, causal=True, score_mod=learned(bias), **given)

    attend(100, 7)
    before = len(caches)
    for n in (50, 64, 65, 127, 128, 512, 513):
        attend(n, 3, n)
    assert len(caches) == before
