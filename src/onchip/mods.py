"""User functions in the kernels: `ScoreMod`, `MaskMod`, `BlockList`, and the keys that name them.

Operators take no functions: what travels is a key, and the kernels look the functions up here.
A key holds a hash of the functions' code, so that it means the same in another process.

Legend: B batch, S_q / S_k lengths, H query heads.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_functions: dict[str, tuple] = {}


def functions_of(key: str) -> tuple:
    """The functions that a key stands for.

    Raises:
        KeyError: if this process never made the ScoreMod or MaskMod that the key comes from.
    """
    if key not in _functions:
        raise KeyError(f"no ScoreMod or MaskMod was made for {key!r} in this process")
    return _functions[key]


def _register(functions: tuple) -> str:
    """The key of some functions, None for those not given."""
    digest = hashlib.sha256("".join(_code(f) for f in functions).encode()).hexdigest()[:16]
    name = f"{functions[0].__name__}-{digest}"
    key, number = name, 1
    # Functions with the same code may still differ in what they close over.
    while _functions.setdefault(key, functions) != functions:
        number += 1
        key = f"{name}-{number}"
    return key


def _code(function: Any) -> str:
    if function is None:
        return "-"
    if hasattr(function, "cache_key"):  # covers what it calls, too
        return function.cache_key
    return inspect.getsource(function.fn)


def _check(name: str, function: Any) -> None:
    if type(function).__name__ not in ("JITFunction", "InterpretedFunction"):
        kind = type(function).__name__
        raise TypeError(f"{name}: got {kind}; allowed: a function under @triton.jit. Decorate it.")


def _check_tensors(name: str, aux: Any) -> tuple[Tensor, ...]:
    if not isinstance(aux, (tuple, list)) or not all(isinstance(x, Tensor) for x in aux):
        raise TypeError(f"{name}: got {type(aux).__name__}; allowed: a tuple of tensors.")
    return tuple(aux)


@dataclass(frozen=True, eq=False)
class ScoreMod:
    """A function that changes logits, compiled into the kernels.

    `fn(score, b, h, i, j, *aux) -> score` gets blocks: `score` in natural logits, after scale,
    softcap and ALiBi and before the mask; `i` and `j`, which broadcast to it, are positions in
    the sequence, i counted from its own first query; `b` and `h` are numbers. Positions are
    always inside of the sequence, so loads by them need no mask. Make it once and keep it, not
    anew in every call.

    Args:
        fn: the function, under @triton.jit.
        grad: `grad(dscore, score, b, h, i, j, *aux) -> dscore` turns the gradient of what fn
            returned into that of the score it got. None where fn adds something that does not
            depend on the score.
        aux: tensors that the functions get, as pointers to their first elements; on q's device,
            contiguous.
        aux_grad: `aux_grad(dscore, score, b, h, i, j, *aux, *sums)` adds the gradients of aux,
            with tl.atomic_add, to sums: float32, shaped as aux. dscore belongs to what fn
            returned, and is 0 for pairs that are hidden. Its sums' order is not fixed, so it
            does not go with deterministic=True.

    Raises:
        TypeError: for functions that are not under @triton.jit, and aux that are not tensors.
    """

    fn: Callable
    grad: Callable | None = None
    aux: Sequence[Tensor] = ()
    aux_grad: Callable | None = None
    key: str = field(init=False, repr=False)

    def __post_init__(self):
        for name in ("fn", "grad", "aux_grad"):
            if name == "fn" or getattr(self, name) is not None:
                _check(f"ScoreMod.{name}", getattr(self, name))
        object.__setattr__(self, "aux", _check_tensors("ScoreMod.aux", self.aux))
        object.__setattr__(self, "key", _register((self.fn, self.grad, self.aux_grad)))


@dataclass(frozen=True, eq=False)
class BlockList:
    """Which blocks of the pairs of queries and keys a mask function lets anything through in.

    Kernels visit the listed blocks only. Each list ascends, so that sums have one order; what it
    holds past its count is never read. A listed block may hide everything, but a block that
    holds a visible pair must be listed. `onchip.block_list` makes one from a mask function.

    Args:
        key_counts: (B or 1, H or 1, query blocks) int32, key blocks that a query block visits.
        key_indices: (B or 1, H or 1, query blocks, most) int32, which ones.
        query_counts: (B or 1, H or 1, key blocks) int32, the transpose, for the backward.
        query_indices: (B or 1, H or 1, key blocks, most) int32.
        block: queries and keys of a block, multiples of 16. Kernels cut blocks into tiles of a
            power of two that divides them: multiples of 128 cost no speed.

    Raises:
        TypeError: for anything but contiguous int32 tensors and a pair of ints.
        ValueError: for tensors that do not fit each other, and sizes that no tile divides.
    """

    key_counts: Tensor
    key_indices: Tensor
    query_counts: Tensor
    query_indices: Tensor
    block: tuple[int, int]

    def __post_init__(self):
        check_block("BlockList.block", self.block)
        for name, x in zip(_LISTS, self.tensors, strict=True):
            if not isinstance(x, Tensor) or x.dtype != torch.int32 or not x.is_contiguous():
                got = x.dtype if isinstance(x, Tensor) else type(x).__name__
                allowed = "a contiguous int32 tensor. Use x.int().contiguous()."
                raise TypeError(f"BlockList.{name}: got {got}; allowed: {allowed}")
            dims = 4 if name.endswith("indices") else 3
            if x.dim() != dims or x.device != self.key_counts.device:
                allowed = f"{dims} dimensions, on the device of key_counts. See onchip.BlockList."
                got = f"shape {tuple(x.shape)} on {x.device}"
                raise ValueError(f"BlockList.{name}: got {got}; allowed: {allowed}")
        outer = self.key_counts.shape[:2]
        for side in ("key", "query"):
            counts, indices = getattr(self, f"{side}_counts"), getattr(self, f"{side}_indices")
            if counts.shape != indices.shape[:3] or counts.shape[:2] != outer:
                got = f"shape {tuple(indices.shape)} with counts {tuple(counts.shape)}"
                allowed = f"{(*outer, 'blocks', 'most')} with counts {(*outer, 'blocks')}"
                fix = "Both sides have the same B and H."
                raise ValueError(f"BlockList.{side}_indices: got {got}; allowed: {allowed}. {fix}")

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `Tensors.block_list` has them."""
        return self.key_counts, self.key_indices, self.query_counts, self.query_indices

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B or 1, H or 1, query blocks, key blocks."""
        b, h, num_queries = self.key_counts.shape
        return b, h, num_queries, self.query_counts.shape[2]


_LISTS = ("key_counts", "key_indices", "query_counts", "query_indices")


def check_block(name: str, block: Any) -> None:
    """Requires a pair of sizes that the kernels' least tile divides."""
    if not isinstance(block, tuple) or not all(type(size) is int for size in block):
        raise TypeError(f"{name}: got {block!r}; allowed: a tuple of two ints. Pass (128, 128).")
    if len(block) != 2 or any(size <= 0 or size % 16 for size in block):
        allowed = "(queries, keys), multiples of 16, the least tile"
        raise ValueError(f"{name}: got {block}; allowed: {allowed}. Pass e.g. (128, 128).")


@dataclass(frozen=True, eq=False)
class MaskMod:
    """A function that hides keys from queries, compiled into the kernels.

    `fn(b, h, i, j, *aux) -> bool` gets positions as `ScoreMod` does, and lets a pair through
    where it is true and the call's own mask (causal, window) lets it through too.

    Args:
        fn: the function, under @triton.jit.
        aux: tensors that it gets, as pointers to their first elements; on q's device, contiguous.
        blocks: which blocks it lets anything through in, for kernels to pass over the others; see
            `onchip.block_list`. None visits all that the call's own mask lets through.

    Raises:
        TypeError: for a function that is not under @triton.jit, aux that are not tensors, and
            blocks that are no BlockList.
    """

    fn: Callable
    aux: Sequence[Tensor] = ()
    blocks: BlockList | None = None
    key: str = field(init=False, repr=False)

    def __post_init__(self):
        _check("MaskMod.fn", self.fn)
        if self.blocks is not None and not isinstance(self.blocks, BlockList):
            got, fix = type(self.blocks).__name__, "Make one with onchip.block_list."
            raise TypeError(f"MaskMod.blocks: got {got}; allowed: an onchip.BlockList. {fix}")
        object.__setattr__(self, "aux", _check_tensors("MaskMod.aux", self.aux))
        object.__setattr__(self, "key", _register((self.fn,)))
