"""Attention as torch operators: schemas, fakes, autograd and FLOP formulas.

Those that write to a cache are in `onchip.cache_ops`.

The operators take flat positional arguments, so that torch.compile, export and the profiler see
one opaque node each. Autograd stands outside them, in a Function that is skipped when nothing
needs a gradient. Gradient transforms of torch.func and forward-mode derivatives are refused.

Legend: B batch, S_q / S_k lengths, T packed tokens, H query heads, H_kv key and value heads,
D / D_v head dimensions, P pages, N page size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onchip import dispatch, flops
from onchip.analysis import cost
from onchip.bounded import Bounded
from onchip.problem import (
    Op,
    Params,
    Problem,
    Saved,
    Tensors,
    dim_v_of,
    needs_copy,
    unaligned,
)

NAMESPACE = "onchip"

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? block_table, Tensor? seqused_k, Tensor? leftpad_k, Tensor? alibi_slopes, "
    "Tensor? sinks, Tensor? k_scale, Tensor? v_scale, Tensor? dropout_rng, "
    "Tensor[] score_aux, Tensor[] mask_aux, Tensor[] block_list, Tensor[] scales"
)
_PARAMS = (
    "SymInt max_seqlen_q, SymInt max_seqlen_k, SymInt window_left, SymInt window_right, "
    "float scale, float softcap, bool deterministic, SymInt num_splits, str kernel, "
    'float dropout_p=0.0, str score_mod="", str mask_mod="", bool aux_grad=False, '
    'SymInt block_q=0, SymInt block_k=0, str out_dtype=""'
)
_INPUT_NAMES = tuple(f.name for f in fields(Tensors))
_NUM_INPUTS = len(_INPUT_NAMES)

_lib = torch.library.Library(NAMESPACE, "DEF")
_lib.define(f"attn_forward({_INPUTS}, {_PARAMS}) -> (Tensor out, Tensor lse)")
_lib.define(
    f"attn_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_INPUTS}, {_PARAMS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor[] daux)"
)


class Plan(NamedTuple):
    """A problem and the function chosen to run it.

    `Kernel.load_repeat` says what repeats it, `Kernel.load_append` what appends in its launch.
    """

    problem: Problem
    launch: Callable
    repeat: Callable | None = None
    append: tuple[Callable, Callable] | None = None


_plans: Bounded[tuple, Plan] = Bounded(4096)


def plan(op: Op, tensors: Tensors, params: Params) -> Plan:
    """The chosen kernel for a call; remembered by everything the choice depends on.

    Raises:
        NoKernelError: if no kernel (or not the forced one) takes the problem.
    """
    q, k, v, alibi = tensors.q, tensors.k, tensors.v, tensors.alibi_slopes
    cu_seqlens_q = tensors.cu_seqlens_q
    key = (
        op,
        q.shape,
        k.shape,
        v.shape,
        q.dtype,
        k.dtype,
        q.device,
        None if cu_seqlens_q is None else cu_seqlens_q.shape[0],
        tensors.cu_seqlens_k is None,
        tensors.block_table is None,
        tensors.seqused_k is None,
        tensors.leftpad_k is None,
        None if alibi is None else alibi.dim(),
        tensors.sinks is None,
        tensors.k_scale is None and tensors.v_scale is None,
        len(tensors.block_list),
        unaligned(tensors),
        params,
    )
    found = _plans.get(key)
    if found is None:
        problem = replace(Problem.of(op, tensors, params), copies=())
        kernel = dispatch.choose(problem, params.kernel or None)
        append = kernel.load_append() if op is Op.FORWARD else None
        found = _plans[key] = Plan(problem, kernel.load(), kernel.load_repeat(), append)
    return found


_SMALL = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "alibi_slopes", "sinks")


def _readable(tensors: Tensors) -> Tensors:
    """Copies what kernels can't read in place. Mutates: tensors.

    That is q, k and v whose last dimension is not contiguous, lengths, slopes and sinks that are
    not contiguous, tables whose rows are not, and slopes that are finer than the LSE.
    """
    for name in _SMALL:
        x = getattr(tensors, name)
        if x is not None and not x.is_contiguous():
            setattr(tensors, name, x.contiguous())
    table, slopes = tensors.block_table, tensors.alibi_slopes
    if table is not None and needs_copy(table):
        tensors.block_table = table.contiguous()
    if slopes is not None and slopes.dtype != _lse_dtype(tensors.q):
        tensors.alibi_slopes = slopes.to(_lse_dtype(tensors.q))
    if needs_copy(tensors.q):
        tensors.q = tensors.q.contiguous()
    if needs_copy(tensors.k):
        tensors.k = tensors.k.contiguous()
    if needs_copy(tensors.v):
        tensors.v = tensors.v.contiguous()
    return tensors


_NO_CONTEXT = contextlib.nullcontext()


def without_autocast(device: str):
    """Kernels compute in their own precision: autocast must not reach into them."""
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return _NO_CONTEXT


def _lse_shape(q: Tensor, packed: bool) -> tuple[int, ...]:
    if packed:
        return (q.shape[1], q.shape[0])  # (H, T_q)
    return (q.shape[0], q.shape[2], q.shape[1])  # (B, H, S_q)


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _new_outputs(t: Tensors, params: Params) -> tuple[Tensor, Tensor]:
    q = t.q
    dtype = getattr(torch, params.out_dtype) if params.out_dtype else q.dtype
    out = q.new_empty(*q.shape[:-1], dim_v_of(t), dtype=dtype)
    shape = _lse_shape(q, t.cu_seqlens_q is not None)
    return out, q.new_empty(shape, dtype=_lse_dtype(q))


def _attn_forward(*args) -> tuple[Tensor, Tensor]:
    return _forward(Tensors(*args[:_NUM_INPUTS]), Params(*args[_NUM_INPUTS:]))


def _forward(tensors: Tensors, params: Params, memo=None) -> tuple[Tensor, Tensor]:
    """Runs the chosen forward kernel. Mutates: tensors, whose unreadable inputs are copied.

    `memo`, `onchip.prepare.Memo`, remembers the choice for calls alike, which may differ in how
    their tensors lie in memory.
    """
    if memo is not None and unaligned(tensors):
        memo = None
    found = None if memo is None else memo.forward
    if found is None:
        found = plan(Op.FORWARD, tensors, params)
        if memo is not None:
            memo.forward = found
    problem, launch, *_ = found
    if tensors.q.numel() == 0:
        return _new_outputs(tensors, params)
    with without_autocast(problem.device):
        out, lse = launch(problem, _readable(tensors))
    return out.contiguous(), lse.contiguous()


def _attn_backward(
    dout, dlse, out, lse, *args
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    tensors, params = Tensors(*args[:_NUM_INPUTS]), Params(*args[_NUM_INPUTS:])
    problem, launch, *_ = plan(Op.BACKWARD, tensors, params)
    aux = tensors.score_aux if params.aux_grad else ()
    if tensors.q.numel() == 0 or tensors.k.numel() == 0:
        return *_zero_gradients(tensors, lse, dlse), [x.new_zeros(x.shape) for x in aux]
    sums = [x.new_zeros(x.shape, dtype=torch.float32) for x in aux]
    saved = Saved(dout.contiguous() if needs_copy(dout) else dout, dlse, out, lse, sums)
    with without_autocast(problem.device):
        dq, dk, dv, dsinks = launch(problem, _readable(tensors), saved)
    if dsinks is None:
        dsinks = dq.new_empty(0)
    daux = [x.to(own.dtype) for x, own in zip(sums, aux, strict=True)]
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), dsinks, daux


def _zero_gradients(tensors: Tensors, lse: Tensor, dlse: Tensor | None):
    """Gradients where no query sees a key: only a sink can still move the LSE."""
    q, k, v, sinks = tensors.q, tensors.k, tensors.v, tensors.sinks
    if sinks is None:
        dsinks = q.new_empty(0)
    elif dlse is None:
        dsinks = torch.zeros_like(sinks)
    else:
        heads = 0 if dlse.dim() == 2 else 1
        rest = [d for d in range(dlse.dim()) if d != heads]
        dsinks = dlse.sum(rest).to(sinks.dtype).where(sinks > -torch.inf, 0.0)
    return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape), dsinks


def _fake_forward(*args):
    return _new_outputs(Tensors(*args[:_NUM_INPUTS]), Params(*args[_NUM_INPUTS:]))


def _fake_backward(dout, dlse, out, lse, *args):
    tensors, params = Tensors(*args[:_NUM_INPUTS]), Params(*args[_NUM_INPUTS:])
    q, k, v, sinks = tensors.q, tensors.k, tensors.v, tensors.sinks
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    daux = [x.new_empty(x.shape) for x in tensors.score_aux] if params.aux_grad else []
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks, daux


def implement(lib: torch.library.Library, name: str, real: Callable, fake: Callable) -> None:
    """Gives an operator that `lib` has defined its function, and the one that tells shapes."""
    lib.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=lib)


implement(_lib, "attn_forward", _attn_forward, _fake_forward)
implement(_lib, "attn_backward", _attn_backward, _fake_backward)

forward_op = torch.ops.onchip.attn_forward.default
backward_op = torch.ops.onchip.attn_backward.default

#: Operators worth saving under selective activation checkpointing
#: (torch.utils.checkpoint.create_selective_checkpoint_contexts).
SAVE_OPS = (forward_op,)


class _Attention(torch.autograd.Function):
    """Autograd around the operators; LSE's gradient is used, never dropped."""

    @staticmethod
    def forward(ctx, *args):
        given, counts, params, aux = _parted(args)
        run = _attn_forward if is_plain(*given[:3]) else forward_op
        out, lse = run(*_inputs(given, counts, aux), *params)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given, out, lse, *aux)
        ctx.counts, ctx.params = counts, params
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            # Silence would drop a term: the gradients depend on q, k and v.
            raise NotImplementedError(
                "onchip has no second derivatives: call backward without create_graph=True"
            )
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad
        given, (out, lse), aux = saved[:_NUM_GIVEN], saved[_NUM_GIVEN:][:2], saved[_NUM_GIVEN + 2 :]
        if dout is None:
            dout = torch.zeros_like(out)
        inputs = _inputs(given, ctx.counts, aux)
        arrived = (dout, out) if dlse is None else (dout, out, dlse)
        run = _attn_backward if is_plain(*arrived) else backward_op
        *grads, daux = run(dout, dlse, out, lse, *inputs, *ctx.params)
        grads = [g if need else None for g, need in zip(grads, needed, strict=False)]
        nothing = [None] * (len(needed) - len(grads) - len(aux))
        daux = [*daux, *[None] * (len(aux) - len(daux))]
        daux = [g if need else None for g, need in zip(daux, needed[-len(aux) :], strict=False)]
        return (*grads, *nothing, *daux)


_NUM_GIVEN = 9  # q, k, v, sinks and what has no gradient, see `attention`


def _parted(args: tuple) -> tuple[tuple, tuple, tuple, tuple]:
    """`_Attention`'s arguments: tensors, how many aux tensors of each kind, Params, aux tensors."""
    end = _NUM_GIVEN + 2 + len(Params._fields)
    return args[:_NUM_GIVEN], args[_NUM_GIVEN:][:2], args[_NUM_GIVEN + 2 : end], args[end:]


def _inputs(given: Sequence, counts: Sequence[int], aux: Sequence) -> tuple:
    """The operators' tensors, in their order."""
    q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, dropout_rng = given
    first, second = counts[0], counts[0] + counts[1]
    lists = list(aux[:first]), list(aux[first:second]), list(aux[second:])
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, None, seqused_k, None, alibi_slopes, sinks)
    return (*tensors, None, None, dropout_rng, *lists, [])


def needs_grad(tensors: Tensors) -> bool:
    """Whether autograd would ask this call for a gradient."""
    if not torch.is_grad_enabled():
        return False
    sinks = tensors.sinks
    return (
        tensors.q.requires_grad
        or tensors.k.requires_grad
        or tensors.v.requires_grad
        or (sinks is not None and sinks.requires_grad)
        or any(x.requires_grad for x in tensors.score_aux)
    )


def attention(tensors: Tensors, params: Params, memo=None) -> tuple[Tensor, Tensor]:
    """Runs the forward, through autograd only when a gradient will be asked for.

    Returns:
        out as q with D_v; lse (B, H, S_q) or (H, T_q).

    Raises:
        NoKernelError: if no kernel takes the forward, or the backward that will be needed.
        NotImplementedError: under forward-mode differentiation.
    """
    t = tensors
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        # The operators have no forward derivatives: without this, tangents would be 0.
        raise NotImplementedError(
            "onchip has no forward-mode derivatives (jvp, jacfwd, hessian): use backward()"
        )
    training = needs_grad(t)
    if params.dropout_p > 0 and t.dropout_rng is None:
        if not torch.compiler.is_compiling() and _holds_data(t.q):
            plan(Op.FORWARD, t, params)  # a call that fails must not move the generator
            if training:
                plan(Op.BACKWARD, t, params)
        t.dropout_rng = torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=t.q.device)
    if not training and is_plain(t.q, t.k, t.v):
        return _forward(t, params, memo)
    if not training:
        return forward_op(
            t.q,
            t.k,
            t.v,
            t.cu_seqlens_q,
            t.cu_seqlens_k,
            t.block_table,
            t.seqused_k,
            t.leftpad_k,
            t.alibi_slopes,
            t.sinks,
            t.k_scale,
            t.v_scale,
            t.dropout_rng,
            t.score_aux,
            t.mask_aux,
            t.block_list,
            t.scales,
            *params,
        )
    if not torch.compiler.is_compiling() and not t.q.is_meta:
        plan(Op.BACKWARD, t, params)
    rest = (t.cu_seqlens_q, t.cu_seqlens_k, t.seqused_k, t.alibi_slopes, t.dropout_rng)
    counts = len(t.score_aux), len(t.mask_aux)
    aux = (*t.score_aux, *t.mask_aux, *t.block_list)
    return _Attention.apply(t.q, t.k, t.v, t.sinks, *rest, *counts, *params, *aux)


_MERGED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_MERGED = 16  # parts and features that the kernel takes
_MAX_MERGED_DIM = 1024


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Merges parts in one launch; None where the kernel does not: see `onchip.merge_states`."""
    parts = (*outs, *lses)
    if outs[0].device.type != "cuda" or len(outs) > _MAX_MERGED or not is_plain(*parts):
        return None
    if outs[0].dtype not in _MERGED_DTYPES or lses[0].dtype != torch.float32:
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in parts):
        return None
    if forward_ad._current_level >= 0:
        return None
    if outs[0].shape[-1] > _MAX_MERGED_DIM:
        return None
    from onchip.kernels.portable import merge as kernel

    return kernel.launch(outs, lses)


_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def is_plain(*inputs: Tensor) -> bool:
    """Whether nothing listens to the dispatcher, so that a call may go past it.

    torch's dispatcher costs 12 us for an operator with so many arguments (2026-11-29, Xeon). It
    is needed by compilers, dispatch modes, transforms, profilers, subclasses, meta tensors and lazy
    negation.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore[attr-defined]
        or torch.autograd.profiler._is_profiler_enabled
    ):
        return False
    return not any(
        type(x) not in _PLAIN_TYPES or x.is_meta or x.is_neg() or x._is_zerotensor() for x in inputs
    )


def _holds_data(x: Tensor) -> bool:
    return not x.is_meta and type(x).__name__ != "FakeTensor"


def _lengths(tensors: Tensors) -> list[tuple[int, int]] | None:
    """(S_q, S_k) of each sequence, read from the data; None when dense or without data."""
    if tensors.cu_seqlens_q is None and tensors.seqused_k is None:
        return None
    if not _holds_data(tensors.q):
        return None
    if tensors.cu_seqlens_q is None:
        queries = [tensors.q.shape[1]] * tensors.q.shape[0]
    else:
        queries = tensors.cu_seqlens_q.diff().tolist()
    if tensors.seqused_k is not None:
        return list(zip(queries, tensors.seqused_k.tolist(), strict=True))
    assert tensors.cu_seqlens_k is not None
    return list(zip(queries, tensors.cu_seqlens_k.diff().tolist(), strict=True))


def _flops(op: Op, args) -> int:
    tensors, params = Tensors(*args[:_NUM_INPUTS]), Params(*args[_NUM_INPUTS:])
    return cost.flops(Problem.of(op, tensors, params), _lengths(tensors))


def _forward_flops(*args, out_val=None, **kwargs) -> int:
    return _flops(Op.FORWARD, args)


def _backward_flops(*args, out_val=None, **kwargs) -> int:
    return _flops(Op.BACKWARD, args[4:])


flops.register(
    {
        torch.ops.onchip.attn_forward: _forward_flops,
        torch.ops.onchip.attn_backward: _backward_flops,
    }
)
