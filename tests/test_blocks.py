"""Block lists: what `onchip.block_list` makes, and kernels that walk it in the interpreter."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

import onchip
from onchip.kernels.portable import backward, forward
from onchip.kernels.portable.backward_config import choose_backward
from onchip.kernels.portable.config import choose_forward, forward_candidates
from onchip.problem import Op
from tests import problems, user_mods
from tests.portable_backward_cases import saved_of
from tests.portable_cases import Case, build
from tests.test_mods import SMALL, SMALL_BACKWARD, hold, interpreted, with_mods

F32 = torch.float32
LENGTH = 70
#: Documents of two rows; the second row is one document.
DOCUMENTS = torch.tensor([[0] * 13 + [1] * 29 + [2] * 28, [7] * LENGTH], dtype=torch.int32)
SAME = [(row[:, None] == row)[None, None] for row in DOCUMENTS]


def documents(block=None, count=2) -> onchip.MaskMod:
    """`same_document` over DOCUMENTS, with a block list if `block` is given."""
    mask = onchip.MaskMod(user_mods.same_document, (DOCUMENTS[:count], torch.tensor(LENGTH)))
    if block is None:
        return mask
    return replace(mask, blocks=onchip.block_list(mask, count, 1, LENGTH, LENGTH, block=block))


def prefix_mask(prefix, length_q, length_k):
    at_q, at_k = torch.arange(length_q)[:, None], torch.arange(length_k)
    return (at_k < prefix) | (at_k <= at_q)


@interpreted
@pytest.mark.parametrize("block", [(16, 32), (64, 16), (48, 80), (128, 256)])
def test_lists_name_the_blocks_that_let_something_through(block):
    prefix = torch.tensor([70, 3])
    mask = onchip.MaskMod(user_mods.prefix_or_causal, (prefix,))
    blocks = onchip.block_list(mask, 2, 3, 90, 130, block=block)
    assert blocks.block == block
    for b in range(2):
        seen = torch.zeros(-(-90 // block[0]) * block[0], -(-130 // block[1]) * block[1])
        seen[:90, :130] = prefix_mask(prefix[b], 90, 130)
        flags = seen.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0])).amax((1, 3)) > 0
        for h in range(3):
            sides = ((blocks.key_counts, blocks.key_indices, flags),
                     (blocks.query_counts, blocks.query_indices, flags.T))  # fmt: skip
            for counts, indices, wanted in sides:
                found = [indices[b, h, i, :n].tolist() for i, n in enumerate(counts[b, h])]
                assert found == [row.nonzero()[:, 0].tolist() for row in wanted]


@interpreted
@pytest.mark.parametrize(
    "block, features",
    [
        ((16, 32), {"causal": True}),
        ((128, 128), {"causal": True}),
        ((48, 96), {"window": (30, 12), "sinks": True}),
        ((32, 64), {"window": (30, 12), "heads": 4, "kv_heads": 2}),
    ],
)
def test_documents_with_the_chosen_tiles(block, features):
    case = Case((LENGTH,) * 2, (LENGTH,) * 2, **features)
    call = with_mods(case, mask=documents(block), plain_masks=SAME)
    tiles = choose_backward(replace(call.problem, op=Op.BACKWARD))
    hold(call, config=tiles, forward_config=choose_forward(call.problem))


@interpreted
@pytest.mark.parametrize("reduction", ["none", "atomics"])
@pytest.mark.parametrize(
    "case",
    [
        Case((50, 50), (77, 77), dtype=F32),
        Case((50, 30), (50, 77), packed=True, sinks=True),
        Case((50, 50), (77, 20), used=True, dim=20, dim_v=12, softcap=4.0),
    ],
    ids=["dense", "packed", "used"],
)
def test_prefix_lm(case, reduction):
    prefix = torch.tensor([17, 3])
    mask = onchip.MaskMod(user_mods.prefix_or_causal, (prefix,))
    longest = build(case).problem
    lengths = (longest.seqlen_q, longest.seqlen_k)
    mask = replace(mask, blocks=onchip.block_list(mask, 2, 1, *lengths, block=(32, 64)))
    pairs = zip(prefix, case.lengths_q, case.lengths_k, strict=True)
    masks = [prefix_mask(*one)[None, None] for one in pairs]
    call = with_mods(case, mask=mask, plain_masks=masks)
    hold(call, config=replace(SMALL_BACKWARD, reduction=reduction))


@interpreted
@pytest.mark.parametrize("poison", [False, True])
def test_a_list_changes_no_bit(poison):
    case = Case((LENGTH,), (LENGTH,), causal=True)
    found = []
    for block in (None, (64, 96)) if poison else (None, (32, 32), (64, 96)):
        call = with_mods(case, mask=documents(block, 1), plain_masks=SAME[:1])
        if poison:
            call.tensors.v[0, 30, 0, 3] = torch.nan
        out = forward.launch_with(SMALL, call.problem, call.tensors)
        saved = saved_of(call)
        problem = replace(call.problem, op=Op.BACKWARD)
        grads = () if poison else backward.launch_with(SMALL_BACKWARD, problem, call.tensors, saved)
        found.append([*out, *grads[:3]])
    for got in found[1:]:
        for x, y in zip(found[0], got, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@interpreted
def test_a_learned_bias_with_a_list():
    bias = torch.randn(2, 8)
    score = onchip.ScoreMod(
        user_mods.relative_bias, aux=(bias,), aux_grad=user_mods.relative_bias_grad
    )
    sums = []
    for block in (None, (32, 64)):
        call = with_mods(Case((LENGTH,), (LENGTH,)), score, documents(block, 1),
                         user_mods.with_relative_bias(bias), SAME[:1])  # fmt: skip
        sums.append(hold(call, aux_grad=True).aux_sums[0])
    torch.testing.assert_close(*sums, rtol=1e-5, atol=1e-5)


@interpreted
def test_blocks_that_are_not_listed_are_not_visited():
    """Rows without a listed block see nothing; the mask function itself would let them."""
    mask = documents((32, 32), 1)
    assert mask.blocks is not None
    keys, queries = mask.blocks.key_counts.clone(), mask.blocks.query_counts.clone()
    keys[:, :, 1], queries[:, :, 2] = 0, 0
    lists = (keys, mask.blocks.key_indices, queries, mask.blocks.query_indices)
    mask = replace(mask, blocks=onchip.BlockList(*lists, (32, 32)))
    call = with_mods(Case((LENGTH,), (LENGTH,)), mask=mask, plain_masks=SAME[:1])
    out, lse = forward.launch_with(SMALL, call.problem, call.tensors)
    assert not out[0, 32:64].any() and (lse[0, :, 32:64] == -torch.inf).all()
    assert out[0, 64:].all(1).any() and lse[0, :, 64:].isfinite().all()
    problem = replace(call.problem, op=Op.BACKWARD)
    dq, dk, dv, _ = backward.launch_with(SMALL_BACKWARD, problem, call.tensors, saved_of(call))
    assert not dq[0, 32:64].any() and dq[0, :32].any() and dq[0, 64:].any()
    for x in (dk, dv):
        assert not x[0, 64:].any() and x[0, :32].any() and x[0, 32:64].any()


@pytest.mark.parametrize("block", [(16, 16), (48, 80), (64, 256), (128, 128), (1024, 384)])
def test_tiles_divide_blocks(block):
    base = build(Case((60,), (60,))).problem
    for arch in ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942"):
        for dim in (20, 64, 128, 256):
            for dtype in (torch.bfloat16, F32):
                problem = replace(base, arch=arch, device="cuda", head_dim=dim, head_dim_v=dim,
                                  dtype=dtype, kv_dtype=dtype, mask_mod="some")  # fmt: skip
                listed = replace(problem, block_list=block)
                own = choose_backward(listed)
                tiles = [own.dkdv, own.dq, *([own.dv] if own.dv else [])]
                tiles += [choose_forward(listed), *forward_candidates(listed)]
                assert all(block[0] % x.block_m == block[1] % x.block_n == 0 for x in tiles)
                if min(block) >= 128:  # at D = 256 a list takes other tiles, for its registers
                    assert own == choose_backward(problem) or dim == 256
                    assert choose_forward(listed) == choose_forward(problem)


LISTS = {"key_counts": torch.zeros(1, 1, 2, dtype=torch.int32),
         "key_indices": torch.zeros(1, 1, 2, 3, dtype=torch.int32),
         "query_counts": torch.zeros(1, 1, 3, dtype=torch.int32),
         "query_indices": torch.zeros(1, 1, 3, 2, dtype=torch.int32)}  # fmt: skip


@pytest.mark.parametrize(
    "name, wrong, error",
    [
        ("block", (128, 24), ValueError),
        ("block", (0, 128), ValueError),
        ("block", 128, TypeError),
        ("key_counts", torch.zeros(1, 1, 2), TypeError),
        ("key_indices", torch.zeros(1, 2, 3, dtype=torch.int32), ValueError),
        ("query_indices", torch.zeros(1, 1, 2, 2, dtype=torch.int32), ValueError),
        ("query_indices", torch.zeros(1, 1, 2, 3, dtype=torch.int32).mT, TypeError),
        ("query_counts", torch.zeros(1, 2, 3, dtype=torch.int32), ValueError),
    ],
)
def test_bad_lists_are_refused(name, wrong, error):
    onchip.BlockList(**LISTS, block=(32, 32))
    with pytest.raises(error, match=r"BlockList\.\w+: got .*; allowed: "):
        onchip.BlockList(**{**LISTS, "block": (32, 32), name: wrong})


@interpreted
def test_bad_arguments_are_refused():
    mask = documents()
    for wrong, error in (
        ({"mask_mod": user_mods.same_document}, TypeError),
        ({"B": 0}, ValueError),
        ({"H": 1.0}, TypeError),
        ({"S_q": -1}, ValueError),
        ({"S_k": 2**31}, ValueError),
        ({"block": (128, 100)}, ValueError),
        ({"device": "meta"}, ValueError),
    ):
        given = {"mask_mod": mask, "B": 2, "H": 1, "S_q": LENGTH, "S_k": LENGTH} | wrong
        with pytest.raises(error, match=f"{next(iter(wrong))}.*: got .*; allowed: "):
            onchip.block_list(given.pop("mask_mod"), **given)
    with pytest.raises(TypeError, match=r"MaskMod\.blocks: got tuple.*BlockList"):
        replace(mask, blocks=(32, 32))


def test_a_list_must_be_for_the_call():
    blocks = onchip.BlockList(**LISTS, block=(32, 32))
    mask = onchip.MaskMod(user_mods.prefix_or_causal, (torch.ones(2),), blocks)
    wrong = problems.qkv(seqlen_q=64, seqlen_k=97)
    with pytest.raises(ValueError, match=r"mask_mod\.blocks: got \(1, 1, 2, 3\).*\(2, 4, 2, 4\)"):
        onchip.attention(*wrong, mask_mod=mask)
    right = problems.qkv(seqlen_q=64, seqlen_k=96)
    with pytest.raises(onchip.NoKernelError, match="cpu: mask_mod needs a Triton kernel"):
        onchip.attention(*right, mask_mod=mask)
    for name, wrong in (("key_counts", [4, 0]), ("query_counts", [0, -1, 0])):
        lists = {**LISTS, name: torch.tensor([[wrong]], dtype=torch.int32)}
        bad = replace(mask, blocks=onchip.BlockList(**lists, block=(32, 32)))
        with pytest.raises(ValueError, match=rf"mask_mod\.blocks\.{name}: got -?\d; allowed: 0"):
            onchip.attention(*right, mask_mod=bad)
    lists = {**LISTS, "key_counts": torch.full((1, 1, 2), 2, dtype=torch.int32)}
    bad = replace(mask, blocks=onchip.BlockList(**lists, block=(32, 32)))
    with pytest.raises(ValueError, match=r"key_indices: got 0 at \[0, 0, 0, 1\].*ascending"):
        onchip.attention(*right, mask_mod=bad)
    meta = [x.to("meta") for x in right]
    aux, lists = (torch.ones(2, device="meta"),), (x.to("meta") for x in LISTS.values())
    mask = onchip.MaskMod(user_mods.prefix_or_causal, aux, onchip.BlockList(*lists, (32, 32)))
    assert onchip.attention(*meta, mask_mod=mask).shape == meta[0].shape
