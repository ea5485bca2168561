"""Calls that are like an earlier one go straight from arguments to launches.

A decode step makes the same call for every layer and token, a model's layers the same prefill:
only addresses differ. What checks, choice and launch depend on beside those is compared with an
earlier call's, whose launches are then made with the new addresses. Only calls on a GPU that
nothing listens to are kept, and only those whose kernels read the caller's own tensors, not copies.

Tensors are compared by torch.compile's own guard, in C++: 0.4 us for five of them, where their
attributes cost 3 us from Python. It covers type, dtype, device, sizes, strides, need of a
gradient, and everything that rides on dispatch keys: modes, transforms, autocast, inference
tensors, lazy negation.

On an H200's host (2026-11-29) a decode took 59 us of host time without this.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import is_, itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onchip import cache_ops, env, ops
from onchip.bounded import Bounded
from onchip.problem import NewTokens, Op, Tensors
from onchip.together import TOGETHER

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # no call is repeated then
    TensorGuards = None

#: Places among `prepare.CacheArguments`.
_Q, _K_CACHE, _V_CACHE, _SEQLENS, _TABLE, _BATCH_IDX = 0, 1, 2, 3, 4, 10
_MAX_ALIKE = 8  # calls with one key, which are told apart one by one


class Repeat:
    """The launches of calls alike.

    Args:
        guards: tells whether tensors are like the first call's.
        attend: the attention's launch.
        sources: place among the call's tensors of each one that it reads; -1 for absent.
        table: a table of our own, whose place comes after the caller's tensors.
        append: the append's launch, if it is one of its own.
        new: its `sources`.
        appends: whether the attention's launch appends.
    """

    __slots__ = (
        "_append", "_attend", "_is_at_once", "_new", "_sources", "_table", "appends", "fits",
    )  # fmt: skip

    def __init__(self, guards, attend, sources, table=None, append=None, new=(), appends=False):
        self.fits = guards.check
        self._attend = attend
        self._sources = itemgetter(*sources)
        self._table = table
        self._append = append
        self._new = itemgetter(*new) if new else None
        self.appends = appends or append is not None
        self._is_at_once = appends

    def takes(self, places: Sequence[int]) -> bool:
        """Whether launches may take these addresses: one that appends and attends reads K and V in
        places of their own."""
        return not self._is_at_once or places[_K_CACHE] != places[_V_CACHE]

    @property
    def is_ready(self) -> bool:
        """Whether launches may take addresses now: no profiler listens, the device is current."""
        return self._attend.is_ready  # an append was, when it was kept: same device, same hooks

    def __call__(self, q: Tensor, places: list) -> tuple[Tensor, Tensor | None]:
        """Runs the launches on the call's addresses; out and, if it was asked for, lse."""
        if self._table is not None:
            places.append(self._table.data_ptr())
        places.append(None)
        with TOGETHER:
            if self._append is None or self._new is None:
                return self._attend(q, self._sources(places))
            kept, rotated, lengths = self._append(self._new(places))
            places[_SEQLENS] = lengths
            if rotated is not None:
                places[_Q] = rotated
            out = self._attend(q, self._sources(places))
            del kept
            return out


_kept: Bounded[tuple, list[Repeat]] = Bounded(512)  # up to 1 MiB each


class Asked(NamedTuple):
    """A call as it is looked up.

    Args:
        key: what is hashed of it.
        tensors: those that are there, each once.
        places: their addresses.
        given: all of them, None for those that are not.
        again: (place, earlier place) of those that are given twice, as one scale for K and V.
        numbers: the other arguments.
    """

    key: tuple
    tensors: list
    places: list
    given: Sequence[Tensor | None]
    again: tuple[tuple[int, int], ...]
    numbers: tuple


class _Recent(NamedTuple):
    """A call that was repeated lately: alike are those with equal `numbers` and tensors.

    Args:
        repeat: its launches.
        present: picks the tensors that are there from those given, each once.
        absent: picks those that are not.
        nothing: what it picks then: as many None.
        again: see `Asked`.
        numbers: equal, of equal types.
        types: of the numbers and of what the last of them holds.
        modes: see `_modes`.
    """

    repeat: Repeat
    present: itemgetter
    absent: itemgetter
    nothing: tuple[None, ...]
    again: tuple[tuple[int, int], ...]
    numbers: tuple
    types: list
    modes: tuple


#: The latest ones, the last of them first; looked through one by one. Replaced, never changed.
_recent: tuple[_Recent, ...] = ()
_MOST_RECENT = 4


def recent(given: Sequence[Tensor | None], numbers: tuple) -> tuple[Repeat, list[int]] | None:
    """The launches of calls like this one and the addresses of its tensors, the quick way.

    Finds what `find` has found lately for tensors that all begin at multiples of 16 bytes.
    """
    if not _recent or _is_watched():
        return None
    try:
        modes = _modes()
        for call in _recent:
            if call.modes != modes or not _are_alike(call, numbers):
                continue
            if call.absent(given) != call.nothing:
                continue
            if call.again and not all(given[i] is given[j] for i, j in call.again):
                continue
            tensors = call.present(given)
            if not call.repeat.fits(*tensors):
                continue
            places = [*map(_data_ptr, tensors)]
            if reduce(or_, places) & 15 or not call.repeat.is_ready:
                return None
            if not call.repeat.takes(places):
                continue
            return call.repeat, places
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        pass  # the checks will say it
    return None


def _are_alike(call: _Recent, numbers: tuple) -> bool:
    """Whether a call's numbers are these: the same objects, as defaults are, or equal ones."""
    if len(call.numbers) == len(numbers) and all(map(is_, call.numbers, numbers)):
        return True
    # Types first: to compare with a tensor that is no number would make a tensor.
    types = [*map(type, numbers), *map(type, numbers[-1])]
    return call.types == types and call.numbers == numbers


def _remember(call: Asked, repeat: Repeat) -> None:
    """Puts a call in front of the recent ones."""
    global _recent
    if reduce(or_, call.places) & 15:
        return
    second = {i for i, _ in call.again}
    there = [i for i, x in enumerate(call.given) if x is not None and i not in second]
    absent = [i for i, x in enumerate(call.given) if x is None]
    types = [*map(type, call.numbers), *map(type, call.numbers[-1])]
    picks = (_picks(there), _picks(absent), (None,) * len(absent), call.again)
    new = _Recent(repeat, *picks, call.numbers, types, _modes())
    _recent = (new, *[x for x in _recent if x.repeat is not repeat][: _MOST_RECENT - 1])


def _picks(places: list[int]) -> Any:
    """An itemgetter that gives a tuple, whatever the number of places."""
    if len(places) == 1:
        return itemgetter(slice(places[0], places[0] + 1))
    return itemgetter(*places) if places else itemgetter(slice(0))


def _modes() -> tuple:
    """What of torch's state a kept call depends on."""
    return (torch._C._get_deterministic_algorithms(), torch.is_grad_enabled())


def _is_watched() -> bool:
    """Whether somebody wants to see a call's operators, or its checks.

    Guards see autocast: a call that was kept without it does not fit with it.
    """
    return (
        torch.autograd.profiler._is_profiler_enabled
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or env.CHECK.is_set()
    )


def may_repeat(q: Any) -> bool:
    """Whether a call without a cache is looked up: on a GPU and without a gradient."""
    return (
        not torch.compiler.is_compiling()
        and type(q) is Tensor
        and q.is_cuda
        and not (q.requires_grad and torch.is_grad_enabled())
    )


def asked(given: Sequence[Tensor | None], numbers: tuple) -> Asked | None:
    """How a call is looked up; None where it can't be a repeated one.

    Args:
        given: tensors in the order of `prepare.CacheArguments`; of a call without a cache q, k,
            v, alibi_slopes and sinks.
        numbers: the other arguments, `window` last; equal ones of other types differ.
    """
    if TensorGuards is None or _is_watched() or torch.is_autocast_enabled("cuda"):
        return None
    if type(given[0]) is not Tensor:
        return None  # a fake tensor has no address
    try:
        tensors, again = [x for x in given if x is not None], ()
        if len({*map(id, tensors)}) < len(tensors):
            tensors, again = _present(given), _again(given)
        places = [*map(_data_ptr, tensors)]
        key = (
            # Not all shapes: the guards tell apart what these do not.
            tensors[0].shape,
            tensors[1].shape,
            tensors[min(4, len(tensors) - 1)].shape,
            *map(type, given),  # which are there
            again,
            *[place & 15 for place in places],
            *_modes(),
            *numbers,
            *map(type, numbers),
            *map(type, numbers[-1]),
        )
    except (AttributeError, IndexError, RuntimeError, TypeError):  # the checks will say it
        return None
    return Asked(key, tensors, places, given, again, numbers)


_data_ptr = Tensor.data_ptr


def lookup(
    given: Sequence[Tensor | None], numbers: tuple
) -> tuple[tuple[Repeat, list[int]] | None, Asked | None]:
    """Launches and addresses of a call that can be repeated; else what `keep` wants of it."""
    found = recent(given, numbers)
    if found is not None:
        return found, None
    call = asked(given, numbers)
    repeat = find(call)
    return (None if repeat is None or call is None else (repeat, call.places)), call


def find(call: Asked | None) -> Repeat | None:
    """The launches of calls like this one, if there are any and they may be used now."""
    if call is None:
        return None
    try:
        alike = _kept.get(call.key, ())
    except TypeError:  # an unhashable number
        return None
    for found in alike:
        if found.fits(*call.tensors) and found.takes(call.places):
            if not found.is_ready:
                return None
            _remember(call, found)
            return found
    return None


def _may_append(again: Sequence[tuple[int, int]]) -> bool:
    """Whether q and lengths, of which an append makes new ones, are given once, and no tensor
    before the lengths is given twice, which would move their place."""
    return all(i > _SEQLENS and j not in (_Q, _SEQLENS) for i, j in again)


def keep(
    asked_for: Asked | None,
    given: Sequence[Tensor | None],
    call: Any,
    new: NewTokens | None,
    wants_lse: bool,
    at_once: bool = False,
) -> None:
    """Keeps the launches of a call that has just run, if they can be repeated.

    Args:
        asked_for: from `asked`.
        given: the tensors that it was made from.
        call: `prepare.Call`, its tensors as the attention read them; q and lengths come from
            the append, if it was a launch of its own.
        new: as the append read them.
        wants_lse: whether the caller asked for it.
        at_once: whether one launch appended and attended.
    """
    if asked_for is None:
        return
    tensors = call.tensors
    if tensors.q.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # a table of rows that a graph makes is not there before the graph runs
    if tensors.q.device.type != "cuda" or not ops.is_plain(*_present(given)):
        return
    if tensors.q.numel() == 0 or (new is not None and new.k.numel() == 0):
        return
    if at_once and new is not None:
        _keep_at_once(asked_for, given, call, new, wants_lse)
        return
    named = given
    if new is not None:
        if not _may_append(asked_for.again):
            return
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
    if not attend.is_ready or (append is not None and not append.is_ready):
        return  # launches that only Triton can make are looked up as all others are
    is_ours = table is not given[_TABLE] and batch_idx is None
    _put(asked_for, attend, sources, table if is_ours else None, append, own)


def _keep_at_once(
    asked_for: Asked, given: Sequence[Tensor | None], call: Any, new: NewTokens, wants_lse: bool
) -> None:
    """`keep` where one launch appended and attended: tensors are as they were before."""
    tensors = call.tensors
    table, batch_idx = tensors.block_table, given[_BATCH_IDX]
    read = (*_read(tensors), new.k, new.v, new.rotary_cos, new.rotary_sin)
    sources = _sources(read, given, table, batch_idx)
    plan = ops.plan(Op.FORWARD, tensors, call.params)
    if sources is None or plan.append is None:
        return
    attend = plan.append[1](plan.problem, tensors, new, wants_lse)
    if attend is not None and attend.is_ready:
        is_ours = table is not given[_TABLE] and batch_idx is None
        _put(asked_for, attend, sources, table if is_ours else None, appends=True)


def keep_dense(
    asked_for: Asked | None, given: Sequence[Tensor | None], call: Any, wants_lse: bool
) -> None:
    """`keep` for a call without a cache that asks for no gradient.

    Args:
        asked_for: from `asked`.
        given: the tensors that it was made from.
        call: `prepare.Call`, its tensors as the kernel read them.
        wants_lse: whether the caller asked for the LSE.
    """
    tensors = call.tensors
    if asked_for is None or tensors.q.device.type != "cuda" or ops.needs_grad(tensors):
        return
    if tensors.q.numel() == 0 or not ops.is_plain(*_present(given)):
        return
    sources = _sources(_read(tensors), given, None, None)
    forward = ops.plan(Op.FORWARD, tensors, call.params)
    if sources is None or not forward.repeat:
        return
    attend = forward.repeat(forward.problem, tensors, wants_lse)
    if attend is not None and attend.is_ready:
        _put(asked_for, attend, sources)


def _put(asked_for: Asked, attend, sources, table=None, append=None, own=(), appends=False) -> None:
    """Keeps launches for calls like this one."""
    guards = _guards(asked_for.tensors)
    if guards is None:
        return
    repeat = Repeat(guards, attend, sources, table, append, own, appends)
    try:
        alike = _kept.get(asked_for.key)
    except TypeError:  # an unhashable number
        return
    if alike is None:
        alike = _kept[asked_for.key] = []
    alike.insert(0, repeat)
    del alike[_MAX_ALIKE:]


def _guards(tensors: list[Tensor]) -> Any:
    """What tells tensors alike: those of the same sizes, strides, dtype and so on.

    None where torch's own interface is not the one that is known here.
    """
    assert TensorGuards is not None
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    try:
        # A list for each tensor, whatever torch's stubs say.
        guards = TensorGuards(
            *tensors,
            dynamic_dims_sizes=sizes,  # type: ignore[arg-type]
            dynamic_dims_strides=strides,  # type: ignore[arg-type]
        )
        return guards if guards.check(*tensors) else None
    except (RuntimeError, SystemError, TypeError):
        return None


def _present(given: Sequence[Tensor | None]) -> list[Tensor]:
    """Those that are there, each once."""
    second = {i for i, _ in _again(given)}
    return [x for i, x in enumerate(given) if x is not None and i not in second]


def _again(given: Sequence[Tensor | None]) -> tuple[tuple[int, int], ...]:
    """See `Asked`."""
    first: dict[int, int] = {}
    places = ((i, first.setdefault(id(x), i)) for i, x in enumerate(given) if x is not None)
    return tuple((i, earlier) for i, earlier in places if earlier < i)


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
