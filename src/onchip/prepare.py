"""From a call's checked arguments to the operators' Tensors and Params.

Whatever form a call has (dense, packed, paged, dense cache), kernels see one of few: a dense
cache (B, S_max, H_kv, D) is a paged one whose pages hold S_max tokens, and appended tokens are
slots.

Legend: B batch, S_q / S_k lengths, S_new appended tokens, T packed tokens, H query heads, H_kv
key and value heads, D / D_v head dimensions, P pages, N page size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onchip import validate, values
from onchip.kernels.common import apply_rotary
from onchip.problem import Mask, Params, Tensors

_checked: set[tuple] = set()
_MAX_CHECKED = 4096  # a bound on memory for servers whose shapes never repeat


class Options(NamedTuple):
    """The arguments that all calls share and that are not tensors; see `onchip.attention`."""

    causal: bool
    window: tuple[int, int]
    scale: float | None
    softcap: float
    return_lse: bool
    deterministic: bool
    num_splits: int | None
    kernel: str | None

    def params(self, head_dim: int, max_seqlen_q: int, max_seqlen_k: int) -> Params:
        """The numbers that kernels see."""
        mask = Mask.of(self.causal, self.window)
        return Params(
            max_seqlen_q,
            max_seqlen_k,
            mask.left,
            mask.right,
            head_dim**-0.5 if self.scale is None else float(self.scale),
            float(self.softcap),
            self.deterministic or torch.are_deterministic_algorithms_enabled(),
            self.num_splits or 0,
            self.kernel or "",
        )


class Call(NamedTuple):
    """What the operators are called with."""

    tensors: Tensors
    params: Params


@dataclass(slots=True)
class CacheArguments:
    """The tensors of `onchip.attention_with_kvcache`, as the user gave them."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    block_table: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    slot_mapping: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    cache_batch_idx: Tensor | None = None
    cache_leftpad: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None

    def all(self) -> tuple:
        """Every field, in order."""
        return tuple(getattr(self, name) for name in self.__slots__)


class Append(NamedTuple):
    """New keys and values on their way into a cache, already rotated."""

    k: Tensor  # (B * S_new, H_kv, D)
    v: Tensor  # (B * S_new, H_kv, D_v)
    slots: Tensor  # (B * S_new,)


def _meta(x):
    """What checks look at in an argument, hashable."""
    if isinstance(x, Tensor):
        return (x.shape, x.dtype, x.device, x.requires_grad, x.layout)
    return x


def _check_once(
    check: Callable[[], None], tensors: tuple, numbers: tuple, window: tuple = ()
) -> None:
    """Runs `check` unless arguments alike have passed it before.

    1, 1.0 and True are equal but not alike, so types count, those inside `window` too.
    """
    if torch.compiler.is_compiling():
        return check()
    try:
        key = (*map(_meta, tensors), *numbers, *map(type, numbers), *map(type, window))
        if key in _checked:
            return
    except TypeError:  # an unhashable argument: let the check name it
        return check()
    check()
    if len(_checked) >= _MAX_CHECKED:
        _checked.clear()
    _checked.add(key)


def _autocast(device: str, *tensors):
    """Casts as torch.autocast would for a matrix product; float64 stays."""
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if _casts(x) else x for x in tensors)


def _casts(x) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64


def _autocasting(q) -> bool:
    if not isinstance(q, Tensor) or q.is_meta:
        return False
    return torch.is_autocast_enabled(q.device.type)


def dense(t: Tensors, options: Options) -> Call:
    """Prepares `onchip.attention`.

    Raises:
        ValueError, TypeError: for an argument out of its range, naming it.
    """
    if _autocasting(t.q):
        t.q, t.k, t.v = _autocast(t.q.device.type, t.q, t.k, t.v)

    def check():
        validate.queries_and_keys(t.q, t.k, t.v, 4, 4)
        validate.dense_batch(t.q, t.k)
        validate.features(t.q, t.q.shape[0], options, t.alibi_slopes, t.sinks)

    tensors = (t.q, t.k, t.v, t.alibi_slopes, t.sinks)
    _check_once(check, tensors, options, options.window)
    return Call(t, options.params(t.q.shape[-1], t.q.shape[1], t.k.shape[1]))


def varlen(t: Tensors, max_seqlen_q: int, max_seqlen_k: int, options: Options) -> Call:
    """Prepares `onchip.attention_varlen`.

    Raises:
        ValueError, TypeError: for an argument out of its range, naming it.
    """
    if _autocasting(t.q):
        (t.q,) = _autocast(t.q.device.type, t.q)
        if t.block_table is None:  # a page pool is never copied: its dtype must fit as it is
            t.k, t.v = _autocast(t.q.device.type, t.k, t.v)

    def check():
        validate.varlen_shapes(t)
        validate.count("max_seqlen_q", max_seqlen_q, 0)
        validate.count("max_seqlen_k", max_seqlen_k, 0)
        assert t.cu_seqlens_q is not None
        batch = t.cu_seqlens_q.shape[0] - 1
        validate.features(t.q, batch, options, t.alibi_slopes, t.sinks)

    data = (t.q, t.k, t.v, t.cu_seqlens_q, t.cu_seqlens_k, t.block_table, t.seqused_k)
    numbers = (max_seqlen_q, max_seqlen_k, *options)
    _check_once(check, (*data, t.alibi_slopes, t.sinks), numbers, options.window)
    params = options.params(t.q.shape[-1], max_seqlen_q, max_seqlen_k)
    if values.visible(t.q):
        values.varlen_values(t, params)
    return Call(t, params)


def kvcache(c: CacheArguments, interleaved: bool, options: Options) -> tuple[Call, Append | None]:
    """Prepares `onchip.attention_with_kvcache`: rotation, slots, and pages for every cache.

    Raises:
        ValueError, TypeError: for an argument out of its range, naming it.
    """
    if _autocasting(c.q):
        c.q, c.k, c.v = _autocast(c.q.device.type, c.q, c.k, c.v)

    def check():
        validate.cache_shapes(c)
        validate.flag("rotary_interleaved", interleaved)
        validate.features(c.q, c.q.shape[0], options, c.alibi_slopes, c.sinks)

    _check_once(check, c.all(), (interleaved, *options), options.window)
    validate.written_in_place(c.k_cache, c.v_cache)
    validate.no_gradient(**{name: getattr(c, name) for name in CacheArguments.__slots__})
    table = _as_block_table(c)
    num_new = 0 if c.k is None else c.k.shape[1]
    if values.visible(c.q):
        values.cache_values(c, table, num_new)
    seqlens = c.cache_seqlens + num_new if num_new else c.cache_seqlens
    q, append = c.q, None
    if c.k is not None:
        q, append = _rotate_and_place(c, table, interleaved, options)
    tensors = Tensors(
        q,
        c.k_cache,
        c.v_cache,
        block_table=table,
        seqused_k=seqlens,
        leftpad_k=c.cache_leftpad,
        alibi_slopes=c.alibi_slopes,
        sinks=c.sinks,
        k_scale=per_head(c.k_scale, c.k_cache),
        v_scale=per_head(c.v_scale, c.v_cache),
    )
    longest = table.shape[1] * c.k_cache.shape[1]
    return Call(tensors, options.params(q.shape[-1], q.shape[1], longest)), append


def _as_block_table(c: CacheArguments) -> Tensor:
    """Page ids of every cache: a row of a dense cache is a page of S_max tokens."""
    if c.block_table is not None:
        return c.block_table
    if c.cache_batch_idx is not None:
        return c.cache_batch_idx[:, None]
    return torch.arange(c.q.shape[0], dtype=torch.int32, device=c.q.device)[:, None]


def per_head(scale: Tensor | None, cache: Tensor) -> Tensor | None:
    """A cache scale as (H_kv,)."""
    return None if scale is None else scale.expand(cache.shape[2]).contiguous()


def _rotate_and_place(
    c: CacheArguments, table: Tensor, interleaved: bool, options: Options
) -> tuple[Tensor, Append]:
    """Rotates q and k by their positions and finds the new tokens' slots."""
    assert c.k is not None and c.v is not None
    num_new, page_size = c.k.shape[1], c.k_cache.shape[1]
    steps = torch.arange(num_new, device=c.q.device)
    positions = c.cache_seqlens[:, None].long() + steps  # (B, S_new)
    slots = c.slot_mapping
    if slots is None:
        capacity = table.shape[1] * page_size
        columns = (positions // page_size).clamp(max=table.shape[1] - 1)
        slots = table.long().gather(1, columns) * page_size + positions % page_size
        # Past the table nothing is stored, rather than something overwritten.
        slots = slots.where(positions < capacity, -1).flatten()
    q, k = c.q, c.k
    if c.rotary_cos is not None and c.rotary_sin is not None:
        rotary = (c.rotary_cos, c.rotary_sin)
        k = apply_rotary(k, *rotary, positions, interleaved)
        start = c.cache_seqlens[:, None].long()
        if Mask.of(options.causal, options.window).is_full:
            # Without an order among the new queries all of them stand at the first position.
            rows = start.expand(-1, q.shape[1])
        else:
            # The queries are the last of the new tokens.
            first = num_new - q.shape[1]
            rows = start + torch.arange(first, num_new, device=q.device)
        q = apply_rotary(q, *rotary, rows, interleaved)
    return q, Append(k.flatten(0, 1), c.v.flatten(0, 1), slots)


def store(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale) -> None:
    """Checks the arguments of `onchip.store_kvcache`.

    Raises:
        ValueError, TypeError: for an argument out of its range, naming it.
    """
    arguments = (k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    _check_once(lambda: validate.store_arguments(*arguments), arguments, ())
    validate.written_in_place(k_cache, v_cache)
    validate.no_gradient(k_cache=k_cache, v_cache=v_cache, k_scale=k_scale, v_scale=v_scale)
    if values.visible(k):
        values.slots_within(slot_mapping, k_cache.shape[0] * k_cache.shape[1])
