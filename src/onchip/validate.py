"""Checks of a call's arguments: each error names the argument, what came, what is allowed and
what to do. Nothing here computes.

These are checks of types and shapes, run once per distinct call; `onchip.values` checks what
the tensors hold.

Legend: B batch, S_q / S_k lengths, T packed tokens, H query heads, H_kv key and value heads,
D / D_v head dimensions, P pages, N page size.
"""

from __future__ import annotations

import math
import sys
from typing import Any, NoReturn

import torch
from torch import Tensor

from onchip import dispatch
from onchip.problem import Tensors, needs_copy

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CACHE_FLOATS = (*FLOATS, torch.float8_e4m3fn)
_LARGEST = sys.float_info.max
_LEAST_SOFTCAP = 1e-30  # its inverse is still a float32
_RANKS = {3: "(T, H, D)", 4: "(B, S, H, D)"}


def reject(
    name: str, got: Any, allowed: str, fix: str, error: type[Exception] = ValueError
) -> NoReturn:
    """Raises the one form of error that users see."""
    raise error(f"{name}: got {got}; allowed: {allowed}. {fix}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(x: Tensor) -> str:
    return f"shape {tuple(x.shape)}"


def tensor(name: str, x: Any) -> None:
    """Requires a tensor."""
    if not isinstance(x, Tensor):
        fix = "Pass a tensor, e.g. torch.as_tensor(...)."
        reject(name, type(x).__name__, "a torch.Tensor", fix, TypeError)
    if x.layout != torch.strided:
        reject(name, f"layout {x.layout}", "torch.strided", "Use .to_dense().", TypeError)


def same_device(name: str, x: Tensor, q: Tensor) -> None:
    """Requires x to live where q lives."""
    if x.device != q.device:
        reject(name, f"device {x.device}", f"q's device {q.device}", f"Use {name}.to(q.device).")


def rank(name: str, x: Tensor, allowed: int, legend: str) -> None:
    """Requires a number of dimensions."""
    if x.dim() != allowed:
        fix = "Reshape it; a single sequence still needs its batch dimension (unsqueeze(0))."
        if allowed < x.dim():
            fix = "Flatten it to one dimension." if allowed == 1 else "Flatten or index it."
        if allowed == 3 and x.dim() == 4:
            fix = "Put the sequences behind one another (flatten(0, 1))."
        reject(name, f"{x.dim()} dimensions, {_shape(x)}", f"{allowed}: {legend}", fix)


def index_tensor(
    name: str, x: Any, q: Tensor, shape: tuple[int, ...], legend: str, dtypes=(torch.int32,)
) -> None:
    """Requires an integer tensor of one shape on q's device (-1 in `shape`: any size)."""
    tensor(name, x)
    if x.dtype not in dtypes:
        names = " or ".join(_name(d) for d in dtypes)
        fix = f"Use {name}.to(torch.{_name(dtypes[0])})."
        reject(name, f"dtype {_name(x.dtype)}", names, fix, TypeError)
    rank(name, x, len(shape), legend)
    same_device(name, x, q)
    for size, wanted in zip(x.shape, shape, strict=True):
        if wanted >= 0 and size != wanted:
            reject(name, _shape(x), f"{legend} = {shape}".replace("-1", "any"), "Match q's batch.")


def queries_and_keys(
    q: Any,
    k: Any,
    v: Any,
    rank_q: int,
    rank_k: int,
    names=("k", "v"),
    cache: bool = False,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
) -> None:
    """Requires q, k, v that fit each other in type, rank, heads, head dimension and device.

    Args:
        q, k, v: as given.
        rank_q, rank_k: dimensions that each must have.
        names: what the user calls k and v.
        cache: whether k and v are a cache (pages, or rows of S_max tokens).
        dtypes: of q.
    """
    for name, x in zip(("q", *names), (q, k, v), strict=True):
        tensor(name, x)
    if q.dtype not in dtypes:
        allowed = ", ".join(_name(d) for d in dtypes)
        reject("q", f"dtype {_name(q.dtype)}", allowed, "Use q.to(torch.bfloat16).", TypeError)
    legend_k = "(P, N, H_kv, D) or (B, S_max, H_kv, D)" if cache else _RANKS[rank_k]
    rank("q", q, rank_q, _RANKS[rank_q])
    for name, x in zip(names, (k, v), strict=True):
        rank(name, x, rank_k, legend_k)
        same_device(name, x, q)
    _dtypes_match(q, k, v, names, cache)
    _dimensions_match(q, k, v, names)


def _is_cast(q: Tensor) -> bool:
    """Whether q's dtype may be torch.autocast's choice and not the caller's."""
    kind = q.device.type
    enabled = kind != "meta" and torch.is_autocast_enabled(kind)
    return enabled and q.dtype == torch.get_autocast_dtype(kind)


def _dtypes_match(q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str], cache: bool) -> None:
    quantised = cache and k.dtype == torch.float8_e4m3fn
    if k.dtype != q.dtype and not quantised:
        allowed, fix = f"q's dtype {_name(q.dtype)}", f"Use {names[0]}.to(q.dtype)."
        if cache and _is_cast(q):
            allowed = f"{_name(q.dtype)}, to which torch.autocast casts q"
            fix = f"Make {names[0]} in this dtype, or call outside of autocast."
        reject(names[0], f"dtype {_name(k.dtype)}", allowed, fix, TypeError)
    if v.dtype != k.dtype:
        allowed = f"{names[0]}'s dtype {_name(k.dtype)}"
        fix = f"Use {names[1]}.to({names[0]}.dtype)."
        reject(names[1], f"dtype {_name(v.dtype)}", allowed, fix, TypeError)


def _dimensions_match(q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str]) -> None:
    if q.shape[-1] == 0:
        reject("q", f"head dimension 0, {_shape(q)}", "D >= 1", "Give q at least one feature.")
    if v.shape[-1] == 0:
        reject(names[1], f"head dimension 0, {_shape(v)}", "D_v >= 1", "Give it a feature.")
    if k.shape[-1] != q.shape[-1]:
        fix = "q and k must share their last dimension; only v may differ."
        reject(names[0], f"head dimension {k.shape[-1]}", f"q's {q.shape[-1]}", fix)
    if k.shape[:-1] != v.shape[:-1]:
        allowed = f"{names[0]}'s leading dimensions {tuple(k.shape[:-1])}"
        fix = "Keys and values come in pairs: same sequences, lengths and heads."
        reject(names[1], _shape(v), allowed, fix)
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        allowed = "H_kv >= 1 that divides H"
        fix = "Each key/value head serves H / H_kv query heads, so H_kv must divide H."
        reject(names[0], f"H_kv = {kv_heads} with H = {heads}", allowed, fix)


def dense_batch(q: Tensor, k: Tensor) -> None:
    """Requires the same batch in dense q and k."""
    if q.shape[0] != k.shape[0]:
        fix = "Expand the smaller one, e.g. k.expand(B, -1, -1, -1)."
        reject("k", f"batch {k.shape[0]}", f"q's batch {q.shape[0]}", fix)


def flag(name: str, value: Any) -> None:
    """Requires a bool."""
    if not isinstance(value, bool):
        reject(name, repr(value), "True or False", "Pass a bool.", TypeError)


def count(name: str, value: Any, least: int) -> None:
    """Requires an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        reject(name, f"{type(value).__name__} {value!r}", "an int", "Pass int(...).", TypeError)
    if not least <= value < 2**63:
        reject(name, value, f"an int from {least} to 2**63 - 1", "Pass one of these.")


def real(name: str, value: Any, least: float = -math.inf) -> None:
    """Requires a finite number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        fix = "Pass float(...)."
        reject(name, f"{type(value).__name__} {value!r}", "a number", fix, TypeError)
    # Comparisons, not math.isfinite: torch.compile may trace symbolic numbers through here.
    if not max(least, -_LARGEST) <= value <= _LARGEST:
        bound = "" if least == -math.inf else f" >= {least:g}"
        reject(name, value, f"a finite number{bound}", "Leave it out for the default.")


def window(value: Any) -> None:
    """Requires a pair of ints of at least -1."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        fix = "Pass e.g. window=(255, 0)."
        reject("window", repr(value), "a pair (left, right) of ints", fix, TypeError)
    for side in value:
        if isinstance(side, bool) or not isinstance(side, (int, torch.SymInt)):
            fix = "Use -1, not None, for an unbounded side."
            reject("window", repr(value), "a pair of ints", fix, TypeError)
        if not -1 <= side < 2**63:
            fix = "Use -1 for an unbounded side."
            reject("window", repr(tuple(value)), "each side >= -1 and < 2**63", fix)


def features(q: Tensor, batch: int, options, alibi_slopes: Any, sinks: Any) -> None:
    """Requires mask, score and run options in their ranges, tensors on q's device.

    Args:
        q: the queries, already checked.
        batch: B.
        options: `prepare.Options`.
        alibi_slopes, sinks: as given.
    """
    flag("causal", options.causal)
    window(options.window)
    if options.scale is not None:
        real("scale", options.scale)
    real("softcap", options.softcap, 0.0)
    if 0 < options.softcap < _LEAST_SOFTCAP:
        fix = "Such a cap leaves no scores; 0 means none."
        reject("softcap", options.softcap, f"0, or at least {_LEAST_SOFTCAP:g}", fix)
    real("dropout_p", options.dropout_p, 0.0)
    if options.dropout_p >= 1:
        reject("dropout_p", options.dropout_p, "0 <= p < 1", "At 1 nothing would be left.")
    flag("return_lse", options.return_lse)
    flag("deterministic", options.deterministic)
    if options.num_splits is not None:
        count("num_splits", options.num_splits, 1)
    kernel = options.kernel
    if kernel is not None and not (isinstance(kernel, str) and kernel in dispatch.kernel_names()):
        allowed = ", ".join(dispatch.kernel_names())
        reject("kernel", repr(options.kernel), allowed, "Leave it None to let onchip choose.")
    if alibi_slopes is not None:
        _alibi(q, batch, q.shape[-2], alibi_slopes)
    if sinks is not None:
        _sinks(q, sinks)


def _sinks(q: Tensor, sinks: Any) -> None:
    tensor("sinks", sinks)
    same_device("sinks", sinks, q)
    if sinks.dtype not in FLOATS:
        reject("sinks", f"dtype {_name(sinks.dtype)}", "a float dtype", "Cast it.", TypeError)
    if sinks.dim() != 1 or sinks.shape[0] != q.shape[-2]:
        fix = "One logit for each query head."
        reject("sinks", _shape(sinks), f"(H,) = ({q.shape[-2]},)", fix)


def _alibi(q: Tensor, batch: int, heads: int, alibi_slopes: Any) -> None:
    tensor("alibi_slopes", alibi_slopes)
    same_device("alibi_slopes", alibi_slopes, q)
    if alibi_slopes.dtype not in (torch.float32, torch.float64):
        fix = "Use alibi_slopes.float()."
        got = f"dtype {_name(alibi_slopes.dtype)}"
        reject("alibi_slopes", got, "float32", fix, TypeError)
    if tuple(alibi_slopes.shape) not in ((heads,), (batch, heads)):
        allowed = f"(H,) = ({heads},) or (B, H) = ({batch}, {heads})"
        reject("alibi_slopes", _shape(alibi_slopes), allowed, "One slope for each query head.")
    if alibi_slopes.requires_grad:
        fix = "Slopes have no gradient here: pass alibi_slopes.detach()."
        reject("alibi_slopes", "a tensor that requires a gradient", "one that does not", fix)


def scale_tensor(name: str, x: Any, q: Tensor, kv_heads: int) -> None:
    """Requires a cache scale: float32, one number or one for each key/value head."""
    tensor(name, x)
    if x.device != q.device:
        reject(name, f"device {x.device}", f"{q.device}, as the cache", f"Use {name}.to(...).")
    if x.dtype != torch.float32:
        reject(name, f"dtype {_name(x.dtype)}", "float32", f"Use {name}.float().", TypeError)
    if tuple(x.shape) not in ((), (1,), (kv_heads,)):
        allowed = f"() or (H_kv,) = ({kv_heads},)"
        reject(name, _shape(x), allowed, "One scale for the cache or for each head.")


def varlen_shapes(t: Tensors) -> None:
    """Requires the tensors of a packed call to fit each other."""
    paged = t.block_table is not None
    if paged:
        tensor("block_table", t.block_table)
    queries_and_keys(t.q, t.k, t.v, 3, 4 if paged else 3, cache=paged)
    offsets = varlen_offsets(t)
    if t.cu_seqlens_k is None and t.seqused_k is None:
        fix = "Paged keys need their lengths from one of the two."
        reject("cu_seqlens_k", "None, and no seqused_k", "one of the two", fix, TypeError)
    if paged:
        index_tensor("block_table", t.block_table, t.q, (offsets - 1, -1), "(B, max_pages)")
        _page_size("k", t.k)
    if t.seqused_k is not None:
        index_tensor("seqused_k", t.seqused_k, t.q, (offsets - 1,), "(B,)")


def varlen_offsets(t: Tensors) -> int:
    """Requires offsets of packed sequences; returns how many there are."""
    index_tensor("cu_seqlens_q", t.cu_seqlens_q, t.q, (-1,), "(B + 1,)")
    assert t.cu_seqlens_q is not None
    offsets = t.cu_seqlens_q.shape[0]
    if offsets == 0:
        reject("cu_seqlens_q", "no entries", "(B + 1,)", "An empty batch is [0].")
    if t.cu_seqlens_k is not None:
        index_tensor("cu_seqlens_k", t.cu_seqlens_k, t.q, (offsets,), "(B + 1,)")
    elif t.block_table is None:
        fix = "Only paged keys with seqused_k go without it."
        reject("cu_seqlens_k", None, "(B + 1,) int32", fix, TypeError)
    return offsets


def _page_size(name: str, cache: Tensor) -> None:
    if cache.shape[1] == 0:
        reject(name, f"page size 0, {_shape(cache)}", "N >= 1", "A page holds tokens.")


def cache_shapes(c) -> None:
    """Requires the tensors of `prepare.CacheArguments` to fit each other."""
    queries_and_keys(c.q, c.k_cache, c.v_cache, 4, 4, ("k_cache", "v_cache"), cache=True)
    _page_size("k_cache", c.k_cache)
    batch, kv_heads = c.q.shape[0], c.k_cache.shape[2]
    index_tensor("cache_seqlens", c.cache_seqlens, c.q, (batch,), "(B,)")
    if c.block_table is not None:
        index_tensor("block_table", c.block_table, c.q, (batch, -1), "(B, max_pages)")
    elif c.cache_batch_idx is None and c.k_cache.shape[0] != batch:
        fix = "Pass cache_batch_idx to choose rows of the cache."
        reject("k_cache", f"batch {c.k_cache.shape[0]}", f"q's batch {batch}", fix)
    for name in ("cache_batch_idx", "cache_leftpad"):
        if getattr(c, name) is not None:
            index_tensor(name, getattr(c, name), c.q, (batch,), "(B,)")
    if c.cache_batch_idx is not None and c.block_table is not None:
        fix = "Reorder the rows of block_table instead."
        reject("cache_batch_idx", "given with block_table", "one of the two", fix)
    for name in ("k_scale", "v_scale"):
        if getattr(c, name) is not None:
            scale_tensor(name, getattr(c, name), c.q, kv_heads)
    _new_tokens(c, batch)


_TRAINS = "Call it under torch.no_grad(); attention_varlen over packed keys trains."


def no_gradient(fix: str = _TRAINS, **tensors: Tensor | None) -> None:
    """Requires that no gradient is asked of a call that has none."""
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.requires_grad:
            reject(name, "a tensor that requires a gradient", "one that does not", fix)


def written_in_place(k_cache: Tensor, v_cache: Tensor) -> None:
    """Requires caches that can be written and whose last dimension is contiguous."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if needs_copy(cache):
            fix = "A cache is read and written in place: keep its last dimension contiguous."
            reject(name, f"last stride {cache.stride(-1)}", "1", fix)
        if torch.compiler.is_compiling():  # it can't trace the question
            continue
        if cache.is_inference() and not torch.is_inference_mode_enabled():
            fix = "Call it under torch.inference_mode(), or make the cache outside of it."
            reject(name, "an inference tensor", "one that may be written here", fix)


def interleaving(interleaved: bool, rotary_cos: Tensor | None) -> None:
    """Requires a flag, and tables where it is set."""
    flag("rotary_interleaved", interleaved)
    if interleaved and rotary_cos is None:
        fix = "Pass rotary_cos and rotary_sin too, or leave it out."
        reject("rotary_interleaved", True, "False without rotary_cos", fix)


def _new_tokens(c, batch: int) -> None:
    if c.k is None and c.v is None:
        for name in ("slot_mapping", "rotary_cos", "rotary_sin"):
            if getattr(c, name) is not None:
                fix = "It says how k and v are appended: pass them too."
                reject(name, "a tensor without k and v", "None, or k and v with it", fix, TypeError)
        return
    for name in ("k", "v"):
        if getattr(c, name) is None:
            fix = "Pass k and v together, or neither."
            reject(name, None, "a tensor, as its twin is given", fix, TypeError)
    assert c.k is not None
    # Before they are held against each other: the one that does not fit the cache is to be named.
    for name, new, cache in (("k", c.k, c.k_cache), ("v", c.v, c.v_cache)):
        if isinstance(new, Tensor) and new.dim() == 4:
            _fits_cache(name, new, cache)
            if name == "k":
                dense_batch(c.q, new)
    queries_and_keys(c.q, c.k, c.v, 4, 4)
    if c.slot_mapping is not None:
        total, dtypes = batch * c.k.shape[1], (torch.int32, torch.int64)
        index_tensor("slot_mapping", c.slot_mapping, c.q, (total,), "(B * S_new,)", dtypes)
    _rotary(c)


def _fits_cache(name: str, new: Tensor, cache: Tensor) -> None:
    if new.shape[-2:] != cache.shape[-2:]:
        allowed = f"the cache's heads and dimension {tuple(cache.shape[-2:])}"
        reject(name, f"{tuple(new.shape[-2:])}", allowed, "New tokens must fit the cache.")


def _rotary(c) -> None:
    if (c.rotary_cos is None) != (c.rotary_sin is None):
        fix = "Pass both tables or neither."
        reject("rotary_cos, rotary_sin", "one without the other", "both", fix, TypeError)
    if c.rotary_cos is None:
        return
    if c.q.shape[1] > c.k.shape[1]:
        got, allowed = f"S_q = {c.q.shape[1]}", f"at most S_new = {c.k.shape[1]} with rotary_cos"
        reject("q", got, allowed, "Each rotated query stands at the position of a new key.")
    rotary_tables(c.rotary_cos, c.rotary_sin, c.q)


def rotary_tables(cos: Any, sin: Any, q: Tensor) -> None:
    """Requires tables of cosines and sines that fit q and each other."""
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        tensor(name, x)
        rank(name, x, 2, "(S_max, rotary_dim / 2)")
        same_device(name, x, q)
        if x.dtype not in FLOATS:
            reject(name, f"dtype {_name(x.dtype)}", "a float dtype", "Cast it.", TypeError)
        if not 1 <= x.shape[1] <= q.shape[-1] // 2:
            allowed = f"rotary_dim / 2 from 1 to D / 2 = {q.shape[-1] // 2}"
            reject(name, _shape(x), allowed, "rotary_dim may be less than D, not more.")
    if cos.shape != sin.shape:
        got, allowed = _shape(sin), f"rotary_cos's {tuple(cos.shape)}"
        reject("rotary_sin", got, allowed, "Both tables cover the same positions.")


def store_arguments(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale) -> None:
    """Requires the arguments of `onchip.store_kvcache` to fit each other."""
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        tensor(name, new)
        tensor(f"{name}_cache", cache)
        rank(name, new, 3, "(T, H_kv, D)")
        rank(f"{name}_cache", cache, 4, "(P, N, H_kv, D)")
        same_device(name, new, k)
        _on_device_of_k(f"{name}_cache", cache, k)
        _store_dtypes(name, new, cache, k, k_cache)
        _fits_cache(name, new, cache)
    if v.shape[:2] != k.shape[:2]:
        reject("v", _shape(v), f"k's (T, H_kv) = {tuple(k.shape[:2])}", "Store them in pairs.")
    if v_cache.shape[:2] != k_cache.shape[:2]:
        allowed = f"k_cache's (P, N) = {tuple(k_cache.shape[:2])}"
        reject("v_cache", _shape(v_cache), allowed, "One slot holds a key and its value.")
    _page_size("k_cache", k_cache)
    dtypes = (torch.int32, torch.int64)
    index_tensor("slot_mapping", slot_mapping, k, (k.shape[0],), "(T,)", dtypes)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            scale_tensor(name, scale, k, k_cache.shape[2])


def _on_device_of_k(name: str, x: Tensor, k: Tensor) -> None:
    if x.device != k.device:
        fix = "The cache is written in place: move the new tokens."
        reject(name, f"device {x.device}", f"k's device {k.device}", fix)


def _store_dtypes(name: str, new: Tensor, cache: Tensor, k: Tensor, k_cache: Tensor) -> None:
    if new.dtype not in FLOATS or new.dtype != k.dtype:
        allowed = ", ".join(_name(d) for d in FLOATS) if new is k else f"k's dtype {k.dtype}"
        reject(name, f"dtype {_name(new.dtype)}", allowed, "Cast it.", TypeError)
    if cache.dtype not in (new.dtype, torch.float8_e4m3fn) or cache.dtype != k_cache.dtype:
        allowed = f"{_name(new.dtype)} or float8_e4m3fn, the same for both caches"
        reject(f"{name}_cache", f"dtype {_name(cache.dtype)}", allowed, "Cast k and v.", TypeError)


def states(outs: Any, lses: Any) -> None:
    """Requires parts of `onchip.merge_states` that fit each other."""
    for name, parts in (("outs", outs), ("lses", lses)):
        if isinstance(parts, Tensor) and parts.dim():
            parts = parts.unbind(0)
        if not isinstance(parts, (list, tuple)) or not parts:
            fix = "Pass a list of the parts."
            is_empty = isinstance(parts, (list, tuple))
            got = f"an empty {type(parts).__name__}" if is_empty else type(parts).__name__
            reject(name, got, "a list of at least one tensor", fix, TypeError)
        for part in parts:
            tensor(name, part)
            if part.dtype not in FLOATS or part.dtype != parts[0].dtype:
                allowed = "one float dtype for every part"
                reject(name, f"dtype {_name(part.dtype)}", allowed, "Cast it.", TypeError)
            if part.shape != parts[0].shape or part.device != parts[0].device:
                fix = "All parts cover the same queries."
                reject(name, _shape(part), f"{tuple(parts[0].shape)} for every part", fix)
    if len(outs) != len(lses):
        reject("lses", f"{len(lses)} parts", f"{len(outs)}, one for each of outs", "Pair them.")
    if outs[0].dim() not in (3, 4):
        legend = "(B, S_q, H, D_v) or (T_q, H, D_v)"
        reject("outs", _shape(outs[0]), legend, "Reshape it.")
    *batch, length, heads = outs[0].shape[:-1]
    if tuple(lses[0].shape) != (*batch, heads, length):
        allowed = "(B, H, S_q) for outs (B, S_q, H, D_v), (H, T_q) for (T_q, H, D_v)"
        reject("lses", f"{_shape(lses[0])} for outs {_shape(outs[0])}", allowed, "Reshape it.")
    if lses[0].device != outs[0].device:
        allowed = f"outs' device {outs[0].device}"
        reject("lses", f"device {lses[0].device}", allowed, "Move it.")
