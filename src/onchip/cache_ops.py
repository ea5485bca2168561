"""Writing to a cache as torch operators: stores by slot, and appends that find their slots.

Legend: B batch, S_new appended tokens, T packed tokens, H_kv key and value heads, D / D_v head
dimensions, P pages, N page size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onchip import dispatch, ops
from onchip.bounded import Bounded
from onchip.ops import Plan
from onchip.problem import Layout, Mask, NewTokens, Op, Params, Problem, Tensors, needs_copy

_lib = torch.library.Library(ops.NAMESPACE, "FRAGMENT")
_lib.define(
    "store_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping,"
    " Tensor? k_scale, Tensor? v_scale) -> ()"
)
_lib.define(
    "append_kv(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache,"
    " Tensor cache_seqlens, Tensor block_table, Tensor? slot_mapping, Tensor? rotary_cos,"
    " Tensor? rotary_sin, Tensor? k_scale, Tensor? v_scale, bool interleaved, bool in_order)"
    " -> (Tensor q, Tensor lengths)"
)


_plans: Bounded[tuple, Plan] = Bounded(4096)


def plan_store(k: Tensor, v: Tensor, k_cache: Tensor, scaled: bool, entry: str = "") -> Plan:
    """The chosen kernel for a store of k (T, H_kv, D) and v, or its other `entry`; see `plan`."""
    key = (entry, k.shape, v.shape[-1], k_cache.shape, k.dtype, k_cache.dtype, k.device, scaled)
    found = _plans.get(key)
    if found is None:
        problem = store_problem(k, v, k_cache, scaled)
        kernel = dispatch.choose(problem)
        found = _plans[key] = Plan(problem, kernel.load(entry), kernel.load_repeat(entry))
    return found


def store_problem(k: Tensor, v: Tensor, k_cache: Tensor, scaled: bool) -> Problem:
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
        head_dim_v=v.shape[-1],
        mask=Mask(),
        scale=1.0,
        page_size=k_cache.shape[1],
        num_pages=k_cache.shape[0],
        kv_scales=scaled,
    )


def _store_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale) -> None:
    scaled = k_scale is not None or v_scale is not None
    problem, launch, *_ = plan_store(k, v, k_cache, scaled)
    if k.numel():
        with ops.without_autocast(problem.device):
            launch(problem, k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def append(new: NewTokens) -> tuple[Tensor, Tensor]:
    """Appends, past torch's dispatcher where nothing listens to it.

    Returns:
        q, rotated if `new` says how, else q itself; and the lengths after the append, (B,).

    Mutates:
        new.k_cache, new.v_cache: the slots of the new tokens.
    """
    if ops.is_plain(new.q, new.k, new.v, new.k_cache, new.v_cache):
        found = _append(new)
        mark_written(new.k_cache, new.v_cache)
        return found
    q, lengths = append_op(*new.tensors, new.interleaved, new.in_order)
    return (new.q if new.rotary_cos is None else q), lengths


def append_and_attend(
    tensors: Tensors, params: Params, new: NewTokens
) -> tuple[Tensor, Tensor] | None:
    """Appends and attends in one launch, where the attention's kernel does both.

    Returns:
        out and lse; None where it takes two launches, or where torch's dispatcher is listened
        to, whose operators are two. Nothing has happened then.

    Raises:
        NoKernelError: if no kernel takes the attention; nothing was appended.

    Mutates:
        new.k_cache, new.v_cache: the slots of the new tokens, unless None is returned.
    """
    if torch.compiler.is_compiling():
        return None
    plan = ops.plan(Op.FORWARD, tensors, params)
    if plan.append is None or not ops.is_plain(new.q, new.k, new.v, new.k_cache, new.v_cache):
        return None
    if new.q.numel() == 0 or forward_ad._current_level >= 0:
        return None
    with ops.without_autocast(plan.problem.device):
        found = plan.append[0](plan.problem, tensors, new)
    if found is not None:
        mark_written(new.k_cache, new.v_cache)
    return found


def mark_written(*caches: Tensor) -> None:
    """Tells autograd that kernels wrote to these, past torch's dispatcher.

    Inference tensors have no version; torch passes over them.
    """
    torch.autograd.graph.increment_version(caches)


def _append(new: NewTokens) -> tuple[Tensor, Tensor]:
    problem, launch, *_ = plan_append(new)
    if new.k.numel() == 0:
        return new.q, new.cache_seqlens + new.k.shape[1]
    for name in ("q", "k", "v"):
        if needs_copy(getattr(new, name)):
            setattr(new, name, getattr(new, name).contiguous())
    for name in ("cache_seqlens", "block_table", "slot_mapping", "rotary_cos", "rotary_sin"):
        x = getattr(new, name)
        if x is not None and (needs_copy(x) if name == "block_table" else not x.is_contiguous()):
            setattr(new, name, x.contiguous())
    with ops.without_autocast(problem.device):
        return launch(problem, new)


def plan_append(new: NewTokens) -> Plan:
    """The chosen kernel for an append; see `plan`.

    Raises:
        NoKernelError: if no kernel takes it.
    """
    scaled = new.k_scale is not None or new.v_scale is not None
    return plan_store(new.k.flatten(0, 1), new.v, new.k_cache, scaled, "append")


def _append_kv(*args) -> tuple[Tensor, Tensor]:
    new = NewTokens(*args)
    q, lengths = _append(new)
    return (new.q.new_empty(0) if new.rotary_cos is None else q), lengths


def _fake_append(q, k, v, k_cache, v_cache, cache_seqlens, *rest):
    rotates = rest[2] is not None
    return q.new_empty(q.shape if rotates else 0), cache_seqlens.new_empty(cache_seqlens.shape)


def _fake_store(*args) -> None:
    return None


ops.implement(_lib, "store_kv", _store_kv, _fake_store)
ops.implement(_lib, "append_kv", _append_kv, _fake_append)

store_op = torch.ops.onchip.store_kv.default
append_op = torch.ops.onchip.append_kv.default
