"""What the imitations share: their words for arguments, lengths, and the form of their errors.

Legend: B batch, S_q / S_k lengths, T_q packed queries, H query heads, S_max tokens of a cache row,
N page size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from onchip import validate
from onchip.validate import reject

Function = TypeVar("Function", bound=Callable)


def spelled(**names: str) -> Callable[[Function], Function]:
    """Makes a function's errors name its own parameters.

    Args:
        **names: onchip's name of an argument, and the imitated library's.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args, **kwargs):
            try:
                return function(*args, **kwargs)
            except (ValueError, TypeError) as error:
                name, colon, rest = str(error).partition(":")
                if not colon or name not in names:
                    raise
                raise type(error)(f"{names[name]}:{rest}") from None

        return call  # type: ignore[return-value]

    return decorate


def unsupported(name: str, got: Any, allowed: str, fix: str) -> NoReturn:
    """Raises for what the imitated library takes and this one does not.

    Raises:
        NotImplementedError: always.
    """
    reject(name, got, allowed, fix, NotImplementedError)


def refuse_given(fix: str, **arguments: Any) -> None:
    """Requires arguments that are not supported to be None.

    Raises:
        NotImplementedError: naming the first that is not.
    """
    for name, value in arguments.items():
        if value is not None:
            unsupported(name, type(value).__name__, "None", fix)


def longest(value: Any) -> Any:
    """A maximum length as an int; a tensor's is read from the device, so the host waits."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_floating_point():
        return int(value.item())
    return value


def ranked(**tensors: tuple[Any, int, str]) -> None:
    """Requires arguments to be tensors of some rank, or None.

    Args:
        **tensors: name -> (value, dimensions, shape for the error).

    Raises:
        ValueError, TypeError: naming the argument.
    """
    for name, (x, rank, legend) in tensors.items():
        if x is not None:
            validate.tensor(name, x)
            validate.rank(name, x, rank, legend)


def unpacked(name: str, x: Any, legend: str, rank: int, parts: int) -> tuple[Tensor, ...]:
    """Views of the tensors stacked in the dimension before the heads.

    Args:
        name: of the argument.
        x: (..., parts, H, D).
        legend: its shape, for the error.
        rank: dimensions it must have.
        parts: 3 for q, k and v; 2 for k and v.
    """
    if not isinstance(x, Tensor):
        reject(name, type(x).__name__, f"a tensor {legend}", "Stack them.", TypeError)
    if x.dim() != rank or x.shape[-3] != parts:
        reject(name, f"shape {tuple(x.shape)}", legend, "Stack them with torch.stack(..., dim=-3).")
    return x.unbind(-3)


def cache_lengths(
    cache_seqlens: Any, batch: int, k_cache: Any, table: Tensor | None, appends: bool
) -> Any:
    """Lengths in the cache as a tensor (B,): from an int for all, or None for full caches.

    Raises:
        ValueError: if tokens are appended to caches of unsaid lengths.
    """
    if isinstance(cache_seqlens, Tensor) or not isinstance(k_cache, Tensor) or k_cache.dim() != 4:
        return cache_seqlens
    if cache_seqlens is None:
        if appends:
            fix = "Say how many tokens each sequence has before the new ones."
            reject("cache_seqlens", "None, with k and v to append", "an int or (B,) int32", fix)
        columns = 1 if table is None else table.shape[1]
        cache_seqlens = columns * k_cache.shape[1]
    elif isinstance(cache_seqlens, bool) or not isinstance(cache_seqlens, int):
        fix = "Pass one of these."
        got = type(cache_seqlens).__name__
        reject("cache_seqlens", got, "an int, a tensor (B,) int32 or None", fix, TypeError)
    if not 0 <= cache_seqlens < 2**31:
        reject("cache_seqlens", cache_seqlens, "0 to 2**31 - 1", "Pass the tokens in the cache.")
    return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=k_cache.device)


def num_splits_of(value: Any) -> Any:
    """onchip's num_splits: their 0 (a heuristic) is None."""
    return None if isinstance(value, int) and not isinstance(value, bool) and value == 0 else value


def rotates_all_new(q: Any, k: Any, rotary_cos: Any) -> None:
    """Requires as many queries as new keys where both are rotated.

    Raises:
        NotImplementedError: otherwise; the positions of the queries would be FlashAttention's
            own (its queries start at the first new key, its mask ends at the last).
    """
    if rotary_cos is None or not (isinstance(q, Tensor) and isinstance(k, Tensor)):
        return
    if q.dim() == k.dim() == 4 and q.shape[1] != k.shape[1]:
        got = f"S_q = {q.shape[1]} with {k.shape[1]} new keys"
        fix = "Rotate q and k yourself and leave rotary_cos and rotary_sin out."
        unsupported("q", got, "as many queries as new keys with rotary_cos", fix)


def check_parts(out_partial: Any, lse_partial: Any, out: Any, out_dtype: Any) -> None:
    """Requires what `flash_attn_combine` reads to be tensors of one rank apart.

    Raises:
        ValueError, TypeError: naming the argument.
    """
    for name, x in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        validate.tensor(name, x)
    if out_partial.dim() not in (4, 5):
        legend = "(splits, B, S_q, H, D) or (splits, T_q, H, D)"
        reject("out_partial", f"shape {tuple(out_partial.shape)}", legend, "Stack the parts.")
    if lse_partial.shape != out_partial.shape[:-1]:
        got, allowed = tuple(lse_partial.shape), f"out_partial's {tuple(out_partial.shape[:-1])}"
        reject("lse_partial", f"shape {got}", allowed, "One LSE for each row of each part.")
    if out is not None:
        validate.tensor("out", out)
        if not out.is_floating_point():
            reject("out", f"dtype {out.dtype}", "a float dtype", "Make it one.", TypeError)
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        got = type(out_dtype).__name__
        reject("out_dtype", got, "a torch.dtype or None", "E.g. torch.bfloat16.", TypeError)
