"""Calls over a cache that are like an earlier one go straight from arguments to launches.

A decode step makes the same call for every layer and token: only addresses differ. What checks,
choice and launch depend on beside those is gathered in one key; behind it lie launches that were
resolved by the first such call. Only calls on a GPU that nothing listens to are kept, and only
those whose kernels read the caller's own tensors, not copies.

On an H200's host (2026-11-29) a decode took 59 us of host time without this.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onchip import env, ops
from onchip.problem import NewTokens, Tensors

_Q, _SEQLENS, _BATCH_IDX = 0, 3, 10  # places among `prepare.CacheArguments`
_MAX_KEPT = 4096  # a bound on memory for servers whose shapes never repeat


class Repeat:
    """The launches of calls alike.

    Args:
        attend: the attention's launch.
        sources: place among the call's tensors of each one that it reads; None for absent.
        table: a table of our own, whose place comes after the caller's tensors.
        append: the append's launch, if there is one.
        new: its `sources`.
    """

    __slots__ = ("_append", "_attend", "_new", "_sources", "_table")

    def __init__(self, attend, sources, table=None, append=None, new=()):
        self._attend = attend
        self._sources = sources
        self._table = table
        self._append = append
        self._new = new

    @property
    def is_ready(self) -> bool:
        """Whether launches may take addresses now: no profiler listens, the device is current."""
        append = self._append
        return self._attend.is_ready and (append is None or append.is_ready)

    def __call__(self, places: list) -> tuple[Tensor, Tensor]:
        """Runs the launches on the call's addresses; out and lse as `ops.attention`'s."""
        if self._table is not None:
            places.append(self._table.data_ptr())
        if self._append is not None:
            # Kept by name until the attention that reads them is launched.
            rotated, lengths = self._append([None if i is None else places[i] for i in self._new])
            places[_SEQLENS] = lengths.data_ptr()
            if rotated is not None:
                places[_Q] = rotated.data_ptr()
        return self._attend([None if i is None else places[i] for i in self._sources])


_kept: dict[tuple, Repeat] = {}


def key_of(given: Sequence[Tensor | None], numbers: tuple) -> tuple[tuple | None, list]:
    """What a repeated call must have in common with its first, and its tensors' addresses.

    Args:
        given: tensors in the order of `prepare.CacheArguments`.
        numbers: the other arguments, `window` last; equal ones of other types differ.

    Returns:
        None for the key where a call can't be a repeated one.
    """
    q, k_cache, v_cache = given[:3]
    if not _is_plain(q, k_cache, v_cache):
        return None, []
    facts: list = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    facts.append(torch.are_deterministic_algorithms_enabled())
    facts += (k_cache.is_inference(), v_cache.is_inference())  # type: ignore[union-attr]
    places: list = []
    try:
        for x in given:
            if x is None:
                places.append(None)
                facts.append(None)
                continue
            place = x.data_ptr()
            places.append(place)
            facts += (
                x.shape, x.stride(), x.dtype, x.get_device(), x.requires_grad, place & 15,
            )  # fmt: skip
        key = (*facts, *numbers, *map(type, numbers), *map(type, numbers[-1]))
        hash(key)
    except (AttributeError, RuntimeError, TypeError):  # no strided tensor, an unhashable number
        return None, []
    return key, places


def _is_plain(q: Any, k_cache: Any, v_cache: Any) -> bool:
    """Whether nothing listens to the call, checks no values and casts nothing."""
    return (
        type(q) is Tensor
        and q.is_cuda
        and env.CHECK.name not in os.environ
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled("cuda")
        and ops.is_plain(q, k_cache, v_cache)
    )


def find(key: tuple | None) -> Repeat | None:
    """The launches of calls with this key, if there are any and they may be used now."""
    found = None if key is None else _kept.get(key)
    return found if found is not None and found.is_ready else None


def keep(
    key: tuple | None,
    given: Sequence[Tensor | None],
    tensors: Tensors,
    memo: Any,
    new: NewTokens | None,
) -> None:
    """Keeps the launches of a call that has just run, if they can be repeated.

    Args:
        key: from `key_of`.
        given: the tensors that it was made from.
        tensors: as the attention read them; q and lengths from the append, if there was one.
        memo: `prepare.Memo` of the call.
        new: as the append read them.
    """
    if key is None or memo is None or memo.forward is None or not memo.forward.repeat:
        return
    if tensors.q.numel() == 0 or (new is not None and new.k.numel() == 0):
        return
    named = (*given, tensors.block_table)
    if new is not None:
        named = (tensors.q, *given[1:_SEQLENS], tensors.seqused_k, *named[_SEQLENS + 1 :])
    sources = _sources(_read(tensors), named)
    attend = memo.forward.repeat(memo.forward.problem, tensors)
    append, own = None, []
    if new is not None:
        plan = ops.plan_append(new)
        own = _sources(new.tensors, (*given, tensors.block_table))
        append = plan.repeat(plan.problem, new) if plan.repeat else None
        if append is None:
            return
    if attend is None or sources is None or own is None:
        return
    is_ours = len(given) in (*sources, *own)
    if len(_kept) >= _MAX_KEPT:
        _kept.clear()
    _kept[key] = Repeat(attend, sources, tensors.block_table if is_ours else None, append, own)


def _read(t: Tensors) -> tuple[Tensor | None, ...]:
    """What a kernel's repeated launch is given addresses of, in this order."""
    lengths = (t.cu_seqlens_q, t.seqused_k, t.leftpad_k)
    return (t.q, t.k, t.v, t.block_table, *lengths, t.alibi_slopes, t.sinks, t.k_scale, t.v_scale)


def _sources(read: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> list | None:
    """The place among `given` of each tensor; None if one lies elsewhere, as a copy does."""
    found: list[int | None] = []
    for x in read:
        if x is None:
            found.append(None)
            continue
        places = [i for i, y in enumerate(given) if y is x or _is_column(x, y, i)]
        if not places:
            return None
        found.append(places[0])
    return found


def _is_column(table: Tensor, given: Tensor | None, place: int) -> bool:
    """Whether a table is the caller's rows of a dense cache, seen as pages."""
    if place != _BATCH_IDX or given is None or table.dim() != 2:
        return False
    return table.data_ptr() == given.data_ptr() and table.shape == (*given.shape, 1)
