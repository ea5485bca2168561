"""Attention as torch operators: schemas, fakes, autograd and FLOP formulas.

The operators take flat positional arguments, so that torch.compile, export and the profiler see
one opaque node each. Autograd stands outside them, in a Function that is skipped when nothing
needs a gradient. Gradient transforms of torch.func and forward-mode derivatives are refused.

Legend: B batch, S_q / S_k lengths, T packed tokens, H query heads, H_kv key and value heads,
D / D_v head dimensions, P pages, N page size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import fields, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onchip import dispatch, flops
from onchip.analysis import cost
from onchip.problem import Layout, Mask, Op, Params, Problem, Saved, Tensors, needs_copy

NAMESPACE = "onchip"

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? block_table, Tensor? seqused_k, Tensor? leftpad_k, Tensor? alibi_slopes, "
    "Tensor? sinks, Tensor? k_scale, Tensor? v_scale"
)
_PARAMS = (
    "SymInt max_seqlen_q, SymInt max_seqlen_k, SymInt window_left, SymInt window_right, "
    "float scale, float softcap, bool deterministic, SymInt num_splits, str kernel"
)
_INPUT_NAMES = tuple(f.name for f in fields(Tensors))
_NUM_INPUTS = len(_INPUT_NAMES)

_lib = torch.library.Library(NAMESPACE, "DEF")
_lib.define(f"attn_forward({_INPUTS}, {_PARAMS}) -> (Tensor out, Tensor lse)")
_lib.define(
    f"attn_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_INPUTS}, {_PARAMS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"
)
_lib.define(
    "store_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping,"
    " Tensor? k_scale, Tensor? v_scale) -> ()"
)


class Plan(NamedTuple):
    """A problem and the function chosen to run it."""

    problem: Problem
    launch: Callable


_plans: dict[tuple, Plan] = {}
_MAX_PLANS = 4096  # a bound on memory for servers whose lengths never repeat


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
        params,
    )
    found = _plans.get(key)
    if found is None:
        problem = replace(Problem.of(op, tensors, params), copies=())
        kernel = dispatch.choose(problem, params.kernel or None)
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        found = _plans[key] = Plan(problem, kernel.load())
    return found


def plan_store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, scaled: bool) -> Plan:
    """The chosen kernel for an append; see `plan`."""
    key = (k.shape, v.shape[-1], k_cache.shape, k.dtype, k_cache.dtype, k.device, scaled)
    found = _plans.get(key)
    if found is None:
        problem = _store_problem(k, v, k_cache, scaled)
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        found = _plans[key] = Plan(problem, dispatch.choose(problem).load())
    return found


def _store_problem(k: Tensor, v: Tensor, k_cache: Tensor, scaled: bool) -> Problem:
    return Problem(
        op=Op.STORE,
        device=k.device.type,
        dtype=k.dtype,
        kv_dtype=k_cache.dtype,
        layout_q=Layout.PACKED,
        layout_k=Layout.PAGED,
        batch=1,
        seqlen_q=k.shape[0],
        seqlen_k=k.shape[0],
        tokens_q=k.shape[0],
        num_heads=k.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=k.shape[2],
        head_dim_v=v.shape[2],
        mask=Mask(),
        scale=1.0,
        page_size=k_cache.shape[1],
        num_pages=k_cache.shape[0],
        kv_scales=scaled,
    )


def _readable(tensors: Tensors) -> Tensors:
    """Copies q, k and v whose last dimension is not contiguous. Mutates: tensors."""
    if needs_copy(tensors.q):
        tensors.q = tensors.q.contiguous()
    if needs_copy(tensors.k):
        tensors.k = tensors.k.contiguous()
    if needs_copy(tensors.v):
        tensors.v = tensors.v.contiguous()
    return tensors


_NO_CONTEXT = contextlib.nullcontext()


def _without_autocast(device: str):
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


def _new_outputs(q: Tensor, v: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    return out, q.new_empty(_lse_shape(q, packed), dtype=_lse_dtype(q))


def _attn_forward(*args) -> tuple[Tensor, Tensor]:
    tensors, params = Tensors(*args[:_NUM_INPUTS]), Params(*args[_NUM_INPUTS:])
    problem, launch = plan(Op.FORWARD, tensors, params)
    if tensors.q.numel() == 0:
        return _new_outputs(tensors.q, tensors.v, tensors.cu_seqlens_q is not None)
    with _without_autocast(problem.device):
        out, lse = launch(problem, _readable(tensors))
    return out.contiguous(), lse.contiguous()


def _attn_backward(dout, dlse, out, lse, *args) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors, params = Tensors(*args[:_NUM_INPUTS]), Params(*args[_NUM_INPUTS:])
    problem, launch = plan(Op.BACKWARD, tensors, params)
    if tensors.q.numel() == 0 or tensors.k.numel() == 0:
        return _zero_gradients(tensors, lse, dlse)
    saved = Saved(dout.contiguous() if needs_copy(dout) else dout, dlse, out, lse)
    with _without_autocast(problem.device):
        dq, dk, dv, dsinks = launch(problem, _readable(tensors), saved)
    if dsinks is None:
        dsinks = dq.new_empty(0)
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), dsinks


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


def _store_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale) -> None:
    scaled = k_scale is not None or v_scale is not None
    problem, launch = plan_store(k, v, k_cache, v_cache, scaled)
    if k.numel():
        with _without_autocast(problem.device):
            launch(problem, k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def _fake_forward(q, k, v, cu_seqlens_q, *rest):
    return _new_outputs(q, v, cu_seqlens_q is not None)


def _fake_backward(dout, dlse, out, lse, q, k, v, *rest):
    sinks = rest[_INPUT_NAMES.index("sinks") - 3]
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _fake_store(*args) -> None:
    return None


for _name, _impl, _fake in (
    ("attn_forward", _attn_forward, _fake_forward),
    ("attn_backward", _attn_backward, _fake_backward),
    ("store_kv", _store_kv, _fake_store),
):
    _lib.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_lib)

forward_op = torch.ops.onchip.attn_forward.default
backward_op = torch.ops.onchip.attn_backward.default
store_op = torch.ops.onchip.store_kv.default

#: Operators worth saving under selective activation checkpointing
#: (torch.utils.checkpoint.create_selective_checkpoint_contexts).
SAVE_OPS = (forward_op,)


class _Attention(torch.autograd.Function):
    """Autograd around the operators; LSE's gradient is used, never dropped."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, *params):
        inputs = (q, k, v, cu_seqlens_q, cu_seqlens_k, None, seqused_k, None, alibi_slopes, sinks)
        out, lse = forward_op(*inputs, None, None, *params)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, out, lse
        )
        ctx.params = params
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            # Silence would drop a term: the gradients depend on q, k and v.
            raise NotImplementedError(
                "onchip has no second derivatives: call backward without create_graph=True"
            )
        q, k, v, sinks, cu_q, cu_k, seqused_k, alibi_slopes, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        inputs = (q, k, v, cu_q, cu_k, None, seqused_k, None, alibi_slopes, sinks)
        dq, dk, dv, dsinks = backward_op(dout, dlse, out, lse, *inputs, None, None, *ctx.params)
        needed = ctx.needs_input_grad
        grads = [g if need else None for g, need in zip((dq, dk, dv), needed, strict=False)]
        dsinks = dsinks if sinks is not None and needed[3] else None
        return (*grads, dsinks, *([None] * (4 + len(ctx.params))))


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
    )


def attention(tensors: Tensors, params: Params) -> tuple[Tensor, Tensor]:
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
    if not needs_grad(t):
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
            *params,
        )
    if not torch.compiler.is_compiling():
        plan(Op.BACKWARD, t, params)
    extra = (t.cu_seqlens_q, t.cu_seqlens_k, t.seqused_k, t.alibi_slopes)
    return _Attention.apply(t.q, t.k, t.v, t.sinks, *extra, *params)


def _lengths(tensors: Tensors) -> list[tuple[int, int]] | None:
    """(S_q, S_k) of each sequence, read from the data; None when dense or without data."""
    if tensors.cu_seqlens_q is None and tensors.seqused_k is None:
        return None
    if tensors.q.is_meta or type(tensors.q).__name__ == "FakeTensor":
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
