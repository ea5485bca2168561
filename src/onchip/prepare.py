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

from onchip import blocks, validate, values
from onchip.bounded import Bounded
from onchip.mods import MaskMod, ScoreMod
from onchip.problem import Mask, NewTokens, Params, Tensors

_checked: Bounded[tuple, Memo] = Bounded(4096)


class Memo:
    """What calls alike have in common beside their data: found at the first, used by the rest.

    Args:
        params: their numbers.
        forward: `ops.Plan` of the forward.
    """

    __slots__ = ("forward", "params")

    def __init__(self):
        self.params: Params | None = None
        self.forward = None


class Call(NamedTuple):
    """What the operators are called with."""

    tensors: Tensors
    params: Params
    memo: Memo | None = None


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
    dropout_p: float = 0.0

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
            float(self.dropout_p),
        )


class Mods(NamedTuple):
    """The user's functions of a call."""

    score: ScoreMod | None = None
    mask: MaskMod | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What checks must see of them: tensors."""
        own = () if self.score is None else tuple(self.score.aux)
        if self.mask is None:
            return own
        blocks = self.mask.blocks
        return (*own, *self.mask.aux, *(() if blocks is None else blocks.tensors))

    @property
    def facts(self) -> tuple:
        """What checks must see of them: the rest."""
        keys = tuple(None if mod is None else mod.key for mod in self)
        blocks = None if self.mask is None else self.mask.blocks
        sizes = () if blocks is None else blocks.block
        contiguous = (x.is_contiguous() for x in self.tensors)
        return (*keys, *contiguous, *sizes, torch.is_grad_enabled())

    def attached(self, t: Tensors, memo: Memo) -> Call:
        """The call with these functions. Mutates: t."""
        params = memo.params
        assert params is not None
        if self is NO_MODS:
            return Call(t, params, memo)
        score, mask = self
        if score is not None:
            t.score_aux = score.aux
            wanted = torch.is_grad_enabled() and any(x.requires_grad for x in score.aux)
            params = params._replace(score_mod=score.key, aux_grad=wanted)
        if mask is not None:
            t.mask_aux = mask.aux
            params = params._replace(mask_mod=mask.key)
            if mask.blocks is not None:
                if values.visible(t.q):
                    blocks.check_values(mask.blocks)
                t.block_list = mask.blocks.tensors
                block_q, block_k = mask.blocks.block
                params = params._replace(block_q=block_q, block_k=block_k)
        return Call(t, params)


NO_MODS = Mods()


def user_functions(mods: Mods) -> None:
    """Requires `Mods` to hold what they should."""
    for name, mod, kind in (("score_mod", mods.score, ScoreMod), ("mask_mod", mods.mask, MaskMod)):
        if mod is not None and not isinstance(mod, kind):
            fix = f"Wrap the function: onchip.{kind.__name__}(function)."
            validate.reject(name, type(mod).__name__, f"an onchip.{kind.__name__}", fix, TypeError)


def user_tensors(q: Tensor, mods: Mods) -> None:
    """Requires the tensors of `Mods` to be usable by kernels."""
    for name, mod in (("score_mod.aux", mods.score), ("mask_mod.aux", mods.mask)):
        for x in () if mod is None else mod.aux:
            validate.same_device(name, x, q)
            if not x.is_contiguous():
                fix = "Functions get pointers: pass x.contiguous()."
                validate.reject(name, f"strides {x.stride()}", "contiguous tensors", fix)
            trains = torch.is_grad_enabled() and x.requires_grad
            if trains and getattr(mod, "aux_grad", None) is None:
                fix = "Pass x.detach(), or give a ScoreMod its aux_grad."
                validate.reject(name, "a tensor that requires a gradient", "one that does not", fix)


def mods_of(score: ScoreMod | None, mask: MaskMod | None) -> Mods:
    """The user's functions; one object stands for none."""
    return NO_MODS if score is None and mask is None else Mods(score, mask)


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
        return (
            self.q,
            self.k_cache,
            self.v_cache,
            self.cache_seqlens,
            self.block_table,
            self.k,
            self.v,
            self.slot_mapping,
            self.rotary_cos,
            self.rotary_sin,
            self.cache_batch_idx,
            self.cache_leftpad,
            self.k_scale,
            self.v_scale,
            self.alibi_slopes,
            self.sinks,
        )


def _meta(x):
    """What checks look at in an argument, hashable."""
    if x is None:
        return None
    if isinstance(x, Tensor):
        return (x.shape, x.dtype, x.device, x.requires_grad, x.layout)
    return x


def _check_once(
    check: Callable[[], None], tensors: tuple, numbers: tuple, window: tuple = ()
) -> Memo:
    """Runs `check` unless arguments alike have passed it before; returns what they share.

    1, 1.0 and True are equal but not alike, so types count, those inside `window` too.
    """
    if torch.compiler.is_compiling():
        check()
        return Memo()
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        key = (
            *map(_meta, tensors),
            *numbers,
            *map(type, numbers),
            *map(type, window),
            deterministic,
        )
        found = _checked.get(key)
    except TypeError:  # an unhashable argument: let the check name it
        check()
        return Memo()
    if found is None:
        check()
        found = _checked[key] = Memo()
    return found


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


def dense(t: Tensors, options: Options, mods: Mods = NO_MODS) -> Call:
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
        user_tensors(t.q, mods)
        blocks.check(t.q, t.q.shape[0], t.q.shape[1], t.k.shape[1], mods)

    tensors, numbers = (t.q, t.k, t.v, t.alibi_slopes, t.sinks), options
    if mods is not NO_MODS:
        user_functions(mods)
        tensors, numbers = (*tensors, *mods.tensors), (*options, *mods.facts)
    memo = _check_once(check, tensors, numbers, options.window)
    if memo.params is None:
        memo.params = options.params(t.q.shape[-1], t.q.shape[1], t.k.shape[1])
    return mods.attached(t, memo)


def varlen(
    t: Tensors, max_seqlen_q: int, max_seqlen_k: int, options: Options, mods: Mods = NO_MODS
) -> Call:
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
        user_tensors(t.q, mods)
        blocks.check(t.q, batch, max_seqlen_q, max_seqlen_k, mods)

    lengths = (t.cu_seqlens_q, t.cu_seqlens_k, t.block_table, t.seqused_k)
    data = (t.q, t.k, t.v, *lengths, t.k_scale, t.v_scale)
    tensors, numbers = (*data, t.alibi_slopes, t.sinks), (max_seqlen_q, max_seqlen_k, *options)
    if mods is not NO_MODS:
        user_functions(mods)
        tensors, numbers = (*tensors, *mods.tensors), (*numbers, *mods.facts)
    memo = _check_once(check, tensors, numbers, options.window)
    if memo.params is None:
        memo.params = options.params(t.q.shape[-1], max_seqlen_q, max_seqlen_k)
    if values.visible(t.q):
        values.varlen_values(t, memo.params)
    return mods.attached(t, memo)


def kvcache(
    c: CacheArguments, interleaved: bool, options: Options, check_values: bool = True
) -> tuple[Call, NewTokens | None]:
    """Prepares `onchip.attention_with_kvcache`: pages for every cache, and what is appended.

    The call's q and lengths are those before the append, which gives the new ones.
    `check_values=False` is for callers that have had the same lengths and pages checked.

    Raises:
        ValueError, TypeError: for an argument out of its range, naming it.
    """
    if _autocasting(c.q):
        c.q, c.k, c.v = _autocast(c.q.device.type, c.q, c.k, c.v)

    def check():
        validate.cache_shapes(c)
        validate.interleaving(interleaved, c.rotary_cos)
        validate.features(c.q, c.q.shape[0], options, c.alibi_slopes, c.sinks)
        validate.no_gradient(**{name: getattr(c, name) for name in CacheArguments.__slots__})

    numbers = (interleaved, torch.is_grad_enabled(), *options)
    memo = _check_once(check, c.all(), numbers, options.window)
    validate.written_in_place(c.k_cache, c.v_cache)
    table = _as_block_table(c)
    num_new = 0 if c.k is None else c.k.shape[1]
    if check_values and values.visible(c.q):
        values.cache_values(c, table, num_new)
    scales = (per_head(c.k_scale, c.k_cache), per_head(c.v_scale, c.v_cache))
    new = None
    if c.k is not None and c.v is not None:
        # Without an order among the new queries all of them stand at the first position.
        in_order = not Mask.of(options.causal, options.window).is_full
        rotary = (c.rotary_cos, c.rotary_sin)
        new = NewTokens(
            c.q, c.k, c.v, c.k_cache, c.v_cache, c.cache_seqlens, table, c.slot_mapping,
            *rotary, *scales, interleaved, in_order,
        )  # fmt: skip
    tensors = Tensors(
        c.q,
        c.k_cache,
        c.v_cache,
        block_table=table,
        seqused_k=c.cache_seqlens,
        leftpad_k=c.cache_leftpad,
        alibi_slopes=c.alibi_slopes,
        sinks=c.sinks,
        k_scale=scales[0],
        v_scale=scales[1],
    )
    if memo.params is None:
        longest = table.shape[1] * c.k_cache.shape[1]
        memo.params = options.params(c.q.shape[-1], c.q.shape[1], longest)
    return Call(tensors, memo.params, memo), new


def _as_block_table(c: CacheArguments) -> Tensor:
    """Page ids of every cache: a row of a dense cache is a page of S_max tokens."""
    if c.block_table is not None:
        return c.block_table
    if c.cache_batch_idx is not None:
        return c.cache_batch_idx[:, None]
    return _every_row(c.q.shape[0], c.q.device)


def _every_row(batch: int, device: torch.device) -> Tensor:
    """Rows 0 to B - 1 as a table; kept where that is no part of a graph being recorded."""
    if device.type != "cuda" or torch.compiler.is_compiling() or type(batch) is not int:
        return _new_rows(batch, device)
    if torch._C._len_torch_dispatch_stack() > 0 or torch.cuda.is_current_stream_capturing():
        return _new_rows(batch, device)
    # Another stream might read it before this one has written it.
    key = (batch, device, torch.cuda.current_stream(device).cuda_stream)
    found = _rows.get(key)
    if found is None:
        found = _rows[key] = _new_rows(batch, device)
    return found


def _new_rows(batch: int, device: torch.device) -> Tensor:
    return torch.arange(batch, dtype=torch.int32, device=device)[:, None]


_rows: Bounded[tuple[int, torch.device, int], Tensor] = Bounded(4096)


def per_head(scale: Tensor | None, cache: Tensor) -> Tensor | None:
    """A cache scale as (H_kv,)."""
    if scale is None or (scale.shape == cache.shape[2:3] and scale.is_contiguous()):
        return scale
    return scale.expand(cache.shape[2]).contiguous()


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
