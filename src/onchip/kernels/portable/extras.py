"""The host's side of dropout and of user functions: what a call's kernels are given.

Legend: B batch, S_q / S_k lengths, H query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from onchip import mods
from onchip.kernels.portable.context import Extras
from onchip.kernels.portable.dropout import threshold_of
from onchip.problem import Problem, Tensors


@dataclass(frozen=True)
class Functions:
    """The user's functions, compiled into a kernel; None for those not given.

    Args:
        score: of `onchip.ScoreMod`.
        grad: its derivative.
        aux_grad: adds up the gradients of its own tensors; only where some are wanted.
        mask: of `onchip.MaskMod`.
        fingerprint: tells equally named functions with different code apart, since Triton's
            cache on disk knows these by name only.
    """

    score: Any = None
    grad: Any = None
    aux_grad: Any = None
    mask: Any = None
    fingerprint: str = ""


NO_FUNCTIONS = Functions()


def functions_of(problem: Problem) -> Functions:
    """The functions that the problem's keys stand for."""
    if not problem.score_mod and not problem.mask_mod:
        return NO_FUNCTIONS
    score = mods.functions_of(problem.score_mod) if problem.score_mod else (None, None, None)
    (mask,) = mods.functions_of(problem.mask_mod) if problem.mask_mod else (None,)
    fn, grad, aux_grad = score
    if not problem.aux_grad:
        aux_grad = None
    return Functions(fn, grad, aux_grad, mask, problem.score_mod + problem.mask_mod)


def extras_of(
    problem: Problem, tensors: Tensors, aux_sums: Sequence[Tensor] = (), by_keys: bool = False
) -> Extras | None:
    """The kernels' argument; None when the call uses nothing of it.

    Args:
        problem, tensors: the call.
        aux_sums: `Saved.aux_sums`.
        by_keys: whether the kernel's programs own keys, so that it needs the other half of the
            block list.
    """
    dropped = problem.dropout_p > 0
    if not (dropped or problem.score_mod or problem.mask_mod):
        return None
    counts, indices, shape = (), (), ()
    if tensors.block_list:
        counts, indices = tensors.block_list[2:] if by_keys else tensors.block_list[:2]
        shape = tuple(map(float, indices.shape))
    return Extras(
        tensors.dropout_rng if dropped else (),
        float(threshold_of(problem.dropout_p)) if dropped else (),
        tuple(tensors.score_aux),
        tuple(tensors.mask_aux),
        tuple(aux_sums),
        counts,
        indices,
        shape,
    )
