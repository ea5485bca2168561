"""Calls over a cache that are like an earlier one go straight from arguments to launches.

A decode step makes the same call for every layer and token: only addresses differ. What checks,
choice and launch depend on beside those is gathered in one key; behind it lie launches that were
resolved by the first such call. Only calls on a GPU that nothing listens to are kept, and only
those whose kernels read the caller's own tensors, not copies.

On an H200's host (2026-11-29) a decode took 59 us of host time without this.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onchip import cache_ops, env, ops
from onchip.problem import NewTokens, Op, Tensors

_Q, _SEQLENS, _TABLE, _BATCH_IDX = 0, 3, 4, 10  # places among `prepare.CacheArguments`
_MAX_KEPT = 4096  # a bound on memory for servers whose shapes never repeat


class Repeat:
    """The launches of calls alike.

    Args:
        attend: the attention's launch.
        sources: place among the call's tensors of each one that it reads; -1 for absent.
        table: a table of our own, whose place comes after the caller's tensors.
        append: the append's launch, if there is one.
        new: its `sources`.
    """

    __slots__ = ("_append", "_attend", "_new", "_sources", "_table")

    def __init__(self, attend, sources, table=None, append=None, new=()):
        self._attend = attend
        self._sources = itemgetter(*sources)
        self._table = table
        self._append = append
        self._new = itemgetter(*new) if new else None

    @property
    def is_ready(self) -> bool:
        """Whether launches may take addresses now: no profiler listens, the device is current."""
        append = self._append
        return self._attend.is_ready and (append is None or append.is_ready)

    def __call__(self, q: Tensor, places: list) -> tuple[Tensor, Tensor | None]:
        """Runs the launches on the call's addresses; out and, if it was asked for, lse."""
        if self._table is not None:
            places.append(self._table.data_ptr())
        places.append(None)
        if self._append is not None and self._new is not None:
            # Kept by name until the attention that reads them is launched.
            rotated, lengths = self._append(self._new(places))
            places[_SEQLENS] = lengths.data_ptr()
            if rotated is not None:
                q = rotated
                places[_Q] = rotated.data_ptr()
        return self._attend(q, self._sources(places))


_kept: dict[tuple, Repeat] = {}

# Called by map, these cost half of what an attribute or a method costs in a loop.
_facts = attrgetter("shape", "dtype", "device", "requires_grad")
_stride, _data_ptr = Tensor.stride, Tensor.data_ptr


def key_of(given: Sequence[Tensor | None], numbers: tuple) -> tuple[tuple | None, list]:
    """What a repeated call must have in common with its first, and its tensors' addresses.

    Args:
        given: tensors in the order of `prepare.CacheArguments`.
        numbers: the other arguments, `window` last; equal ones of other types differ.

    Returns:
        None for the key where a call can't be a repeated one.
    """
    if _is_heard():
        return None, []
    try:
        tensors = [x for x in given if x is not None]
        places = [*map(_data_ptr, tensors)]
        key = (
            *map(type, given),  # which are there, too
            *map(_facts, tensors),
            *map(_stride, tensors),
            *[place & 15 for place in places],
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            tensors[1].is_inference(),
            tensors[2].is_inference(),
            tensors[0].is_neg() or tensors[1].is_neg() or tensors[2].is_neg(),
            numbers,
            *map(type, numbers),
            *map(type, numbers[-1]),
        )
    except (AttributeError, IndexError, RuntimeError, TypeError):  # the checks will say it
        return None, []
    return key, places


def _is_heard() -> bool:
    """Whether something listens to calls, checks their values or casts their inputs."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore[attr-defined]
        or torch.autograd.profiler._is_profiler_enabled
        or forward_ad._current_level >= 0
        or torch.is_autocast_enabled("cuda")
        or env.CHECK.is_set()
    )


def find(key: tuple | None) -> Repeat | None:
    """The launches of calls with this key, if there are any and they may be used now."""
    try:
        found = None if key is None else _kept.get(key)
    except TypeError:  # an unhashable number
        return None
    return found if found is not None and found.is_ready else None


def keep(
    key: tuple | None,
    given: Sequence[Tensor | None],
    call: Any,
    new: NewTokens | None,
    wants_lse: bool,
) -> None:
    """Keeps the launches of a call that has just run, if they can be repeated.

    Args:
        key: from `key_of`.
        given: the tensors that it was made from.
        call: `prepare.Call`, its tensors as the attention read them; q and lengths come from
            the append, if there was one.
        new: as the append read them.
        wants_lse: whether the caller asked for it.
    """
    if key is None:
        return
    tensors = call.tensors
    if tensors.q.device.type != "cuda" or not ops.is_plain(*_present(given)):
        return
    if tensors.q.numel() == 0 or (new is not None and new.k.numel() == 0):
        return
    named = given
    if new is not None:
        named = (tensors.q, *given[1:_SEQLENS], tensors.seqused_k, *given[_SEQLENS + 1 :])
    table, batch_idx = tensors.block_table, given[_BATCH_IDX]
    own = () if new is None else _sources(new.tensors, given, table, batch_idx)
    sources = _sources(_read(tensors), named, table, batch_idx)
    if own is None or sources is None:
        return
    forward = ops.plan(Op.FORWARD, tensors, call.params)
    attend = append = None
    if forward.repeat:
        attend = forward.repeat(forward.problem, tensors, wants_lse)
    if new is not None:
        plan = cache_ops.plan_append(new)
        append = plan.repeat(plan.problem, new) if plan.repeat else None
    if attend is None or (new is not None and append is None):
        return
    is_ours = table is not given[_TABLE] and batch_idx is None
    if len(_kept) >= _MAX_KEPT:
        _kept.clear()
    try:
        _kept[key] = Repeat(attend, sources, table if is_ours else None, append, own)
    except TypeError:  # an unhashable number
        return


def _present(given: Sequence[Tensor | None]) -> list[Tensor]:
    return [x for x in given if x is not None]


def _read(t: Tensors) -> tuple[Tensor | None, ...]:
    """What a kernel's repeated launch is given addresses of, in this order."""
    lengths = (t.cu_seqlens_q, t.seqused_k, t.leftpad_k)
    return (t.q, t.k, t.v, t.block_table, *lengths, t.alibi_slopes, t.sinks, t.k_scale, t.v_scale)


def _sources(
    read: Sequence[Tensor | None],
    given: Sequence[Tensor | None],
    table: Tensor | None,
    batch_idx: Tensor | None,
) -> tuple[int, ...] | None:
    """The place of each tensor among those given; None if one lies elsewhere, as a copy does.

    The table may be the caller's rows of a dense cache seen as pages, or else our own, which
    comes last. -1 stands for an absent one.
    """
    present = _present(given)
    found = []
    for x in read:
        same = [i for i, y in enumerate(present) if y is x]
        if x is None:
            found.append(-1)
        elif same:
            found.append(same[0])
        elif x is table and batch_idx is None:
            found.append(len(present))
        elif batch_idx is not None and x is table and _starts_with(x, batch_idx):
            found.append(next(i for i, y in enumerate(present) if y is batch_idx))
        else:
            return None
    return tuple(found)


def _starts_with(table: Tensor, batch_idx: Tensor) -> bool:
    """Whether the table is these rows where they lie."""
    return table.data_ptr() == batch_idx.data_ptr() and batch_idx.is_contiguous()
