"""Script: compiles kernels with dropout, user functions and block lists; prints JSON last."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import torch

import onchip
from onchip.kernels.portable import backward, blocks
from onchip.kernels.portable.backward_config import choose_backward
from onchip.problem import Op, Problem, Saved, Tensors
from tests import compile_only, user_mods
from tests.portable_forward_compiles import call_of, pose


def _empty(*shape, dtype=torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def posed(case: dict) -> tuple[Problem, Tensors]:
    """A causal problem with the case's feature: dropout, bend, bias, documents or list."""
    problem, tensors = pose(case["arch"], case["dim"], causal=True)
    feature = case["feature"]
    if feature == "dropout":
        tensors.dropout_rng = _empty(2, dtype=torch.int64)
        return replace(problem, dropout_p=0.1), tensors
    if feature in ("bend", "bias"):
        mod = onchip.ScoreMod(user_mods.bent, user_mods.bent_grad, (_empty(16),))
        if feature == "bias":
            sums = user_mods.relative_bias_grad
            mod = onchip.ScoreMod(user_mods.relative_bias, aux=(_empty(16, 8),), aux_grad=sums)
        tensors.score_aux = mod.aux
        return replace(problem, score_mod=mod.key, aux_grad=feature == "bias"), tensors
    mod = documents()
    tensors.mask_aux = mod.aux
    problem = replace(problem, mask_mod=mod.key)
    if feature == "list":
        lists = (_empty(4, 1, 32, dtype=torch.int32), _empty(4, 1, 32, 32, dtype=torch.int32))
        tensors.block_list = lists * 2
        problem = replace(problem, block_list=(128, 128))
    return problem, tensors


def documents() -> onchip.MaskMod:
    aux = (_empty(4, 4096, dtype=torch.int32), _empty(dtype=torch.int64))
    return onchip.MaskMod(user_mods.same_document, aux)


def backward_calls(problem: Problem, tensors: Tensors) -> list[compile_only.Call]:
    """The launches that make dq, dk and dv."""
    problem = replace(problem, op=Op.BACKWARD)
    out = torch.empty_like(tensors.q)
    lse = _empty(problem.batch, problem.num_heads, problem.seqlen_q)
    saved = Saved(out, None, out, lse, [_empty(*x.shape) for x in tensors.score_aux])
    if not problem.aux_grad:
        saved.aux_sums = ()
    found = []

    def run():
        backward.launch_with(choose_backward(problem), problem, tensors, saved)

    kernels = [getattr(backward, f"attn_bwd_{part}_portable") for part in ("pre", "dkdv", "dq")]
    for kernel in kernels[1:]:
        with ExitStack() as stack:
            for other in kernels:
                if other is not kernel:
                    stack.enter_context(mock.patch.object(other, "run", lambda *a, **k: None))
            found += compile_only.captured(kernel, run)
    return found


def builder_call() -> compile_only.Call:
    """The launch behind `onchip.block_list`."""
    mask, sizes, device = documents(), (4, 1, 4096, 4096), torch.device("meta")
    (call,) = compile_only.captured(
        blocks.mask_blocks_portable, lambda: blocks.lists(mask, sizes, (128, 128), device)
    )
    return call


def resources(cases: list[dict]) -> list[dict]:
    """What each case's kernels use; a case names arch, dim and feature."""
    found = []
    for case in cases:
        calls = [builder_call()] if case["feature"] == "builder" else []
        if not calls:
            problem, tensors = posed(case)
            calls = [call_of(problem, tensors), *backward_calls(problem, tensors)]
        for call in calls:
            binary = compile_only.compiled(call, case["arch"])
            name = getattr(call.kernel, "__name__", "")
            found.append(case | {"kernel": name} | compile_only.resources(binary))
    return found


if __name__ == "__main__":
    print(json.dumps(resources(json.loads(sys.argv[1]))))
