"""What the portable forward's launch hands to its kernel: the compiled part and the numbers.

Legend: B batch, S_q / S_k lengths, T packed tokens, H query heads, H_kv key and value heads,
D / D_v head dimensions, N page size, BM / BN rows and columns of a tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from onchip.kernels.compiled import Compiled
from onchip.kernels.portable.config import L2_BUDGET_BYTES, Config, can_describe, padded
from onchip.kernels.portable.extras import NO_FUNCTIONS, Functions, functions_of
from onchip.problem import Layout, Problem, Tensors

LOG2E = math.log2(math.e)
_UNBOUNDED = 1 << 30  # larger than any length, small enough that int32 sums do not overflow


@dataclass(frozen=True)
class Spec(Compiled):
    """What the compiled code depends on; everything else is a run-time value.

    Args:
        block_m: BM.
        block_n: BN.
        dim: D.
        dim_v: D_v.
        width: D padded to a power of two.
        width_v: D_v padded.
        has_left: whether the mask has a left edge.
        has_right: whether it has a right edge.
        has_first: whether keys may begin after the sequence's first row.
        fold_scale: whether the scale waits for the exponent's own multiplication; it must be
            positive, and nothing may come between it and the softmax.
        has_softcap: whether logits are capped.
        alibi_dim: dimensions of the slopes, 0 for none.
        page_size: N, 0 when not paged.
        vector: strides come in units of so many elements, which tells Triton their alignment.
        precision: of float32 matrix products, "ieee" or "tf32".
        is_float32: whether q is float32.
        described: whether q, k and v are tensor descriptors.
        has_foreign: whether a descriptor can meet rows that are not the sequence's own.
        packed_q: whether lse is (H, T_q).
        longest_first: whether later query blocks, which see more keys, start first.
        careful: the spec of the walk that keeps values that are not finite out of rows that do
            not see them.
        has_dropout: whether entries of P are dropped.
        functions: the user's score and mask functions.
        list_m: queries of a block of the block list, 0 without one.
        list_n: keys of a block of it.
        is_float8: whether keys and values are float8.
    """

    block_m: int
    block_n: int
    dim: int
    dim_v: int
    width: int
    width_v: int
    has_left: bool
    has_right: bool
    has_first: bool
    fold_scale: bool
    has_softcap: bool
    alibi_dim: int
    page_size: int
    vector: int
    precision: str
    is_float32: bool
    described: bool
    has_foreign: bool
    packed_q: bool
    longest_first: bool
    careful: Spec | None = None
    has_dropout: bool = False
    functions: Functions = NO_FUNCTIONS
    list_m: int = 0
    list_n: int = 0
    is_float8: bool = False

    @property
    def hides_by_function(self) -> bool:
        """Whether more than the band hides keys, so that every tile must be masked."""
        return self.functions.mask is not None

    @property
    def in_one_walk(self) -> bool:
        """Whether no tile is known to be seen in full."""
        return self.hides_by_function or self.list_n > 0

    @property
    def hides(self) -> bool:
        """Whether tiles are walked that some of their rows do not see."""
        return self.has_left or self.has_right or self.in_one_walk


class Lengths(NamedTuple):
    """Tensors that say where sequences lie; each may be None."""

    cu_seqlens_q: Tensor | None  # (B + 1,)
    cu_seqlens_k: Tensor | None  # (B + 1,)
    seqused_k: Tensor | None  # (B,)
    leftpad_k: Tensor | None  # (B,)
    block_table: Tensor | None  # (B, max_pages)


def lengths_of(tensors: Tensors) -> Lengths:
    return Lengths(
        tensors.cu_seqlens_q,
        tensors.cu_seqlens_k,
        tensors.seqused_k,
        tensors.leftpad_k,
        tensors.block_table,
    )


def spec_of(config: Config, problem: Problem, tensors: Tensors) -> Spec:
    inputs = (tensors.q, tensors.k, tensors.v)
    described = config.descriptors and can_describe(problem) and suit_descriptors(*inputs)
    packed = problem.layout_q is Layout.PACKED
    aligned = are_aligned(*inputs)
    spec = Spec(
        block_m=config.block_m,
        block_n=config.block_n,
        dim=problem.head_dim,
        dim_v=problem.head_dim_v,
        width=padded(problem.head_dim, aligned),
        width_v=padded(problem.head_dim_v, aligned),
        has_left=problem.mask.left >= 0,
        has_right=problem.mask.right >= 0,
        has_first=problem.leftpad,
        fold_scale=problem.scale > 0
        and problem.softcap == 0
        and problem.alibi == 0
        and not problem.score_mod
        and not problem.kv_scales,  # whose sign is not known
        has_softcap=problem.softcap > 0,
        alibi_dim=problem.alibi,
        page_size=problem.page_size,
        vector=16 // tensors.q.element_size() if aligned else 1,
        precision=precision_of(problem),
        is_float32=problem.dtype == torch.float32,
        described=described,
        has_foreign=described and (packed or problem.seqused_k or problem.leftpad),
        packed_q=packed,
        longest_first=problem.mask.right >= 0 or packed,
        has_dropout=problem.dropout_p > 0,
        functions=functions_of(problem),
        list_m=problem.block_list[0] if problem.block_list else 0,
        list_n=problem.block_list[1] if problem.block_list else 0,
        is_float8=problem.kv_dtype.itemsize == 1,
    )
    assert spec.list_m % spec.block_m == 0 and spec.list_n % spec.block_n == 0
    return replace(spec, careful=replace(spec, block_n=16, described=False, has_foreign=False))


def precision_of(problem: Problem) -> str:
    """How float32 products are made: as torch makes its own, tf32 on NVIDIA only."""
    if problem.dtype != torch.float32 or not problem.arch.startswith("sm_"):
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def strides_of(x: Tensor, packed: bool) -> tuple[int, int, int]:
    """Strides of sequence (or page), row and head in elements; 0 where a size is 1."""
    strides = [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    return (0, *strides[:2]) if packed else tuple(strides[:3])


def is_packed(x: Tensor) -> bool:
    return x.dim() == 3


def are_aligned(*inputs: Tensor) -> bool:
    """Whether every row of these tensors begins at a multiple of 16 bytes."""
    for x in inputs:
        unit = 16 // x.element_size()
        if x.data_ptr() % 16 or any(stride % unit for stride in strides_of(x, is_packed(x))):
            return False
    return True


def suit_descriptors(*inputs: Tensor) -> bool:
    """Whether TMA takes these tensors: aligned, not empty, no dimension expanded."""
    expanded = any(
        n > 1 and s == 0 for x in inputs for n, s in zip(x.shape, x.stride(), strict=True)
    )
    return are_aligned(*inputs) and not expanded and all(x.numel() > 0 for x in inputs)


def sources_of(config: Config, spec: Spec, tensors: Tensors) -> tuple:
    """q, k and v as the kernel reads them."""
    if not spec.described:
        return tensors.q, tensors.k, tensors.v
    return (
        describe(tensors.q, config.block_m, spec.width),
        describe(tensors.k, config.block_n, spec.width),
        describe(tensors.v, config.block_n, spec.width_v),
    )


def describe(x: Tensor, block: int, width: int) -> TensorDescriptor:
    """(B, H, S, D), B = 1 when packed, read in tiles of one head's rows."""
    x = (x.unsqueeze(0) if is_packed(x) else x).transpose(1, 2)
    unit = 16 // x.element_size()
    # A dimension of size 1 may have any stride, which TMA would refuse.
    strides = [unit if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides[:3], 1], [1, 1, block, width])


def numbers_of(config: Config, spec: Spec, problem: Problem, tensors: Tensors) -> tuple:
    """The kernel's run-time numbers, in its order from stride_qb to softcap."""
    strides = [
        stride // spec.vector
        for x in (tensors.q, tensors.k, tensors.v)
        for stride in strides_of(x, is_packed(x))
    ]
    table = tensors.block_table
    return (
        *strides,
        0 if table is None else table.stride(0),
        problem.batch,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.tokens_q,
        problem.num_heads,
        problem.group,
        heads_per_group(config, problem),
        *edges_of(problem),
        *factors_of(problem, LOG2E),
    )


def edges_of(problem: Problem) -> tuple[int, int]:
    """The window's left and right edge as the kernels take them."""
    return min(problem.mask.left, _UNBOUNDED), min(problem.mask.right, _UNBOUNDED)


def factors_of(problem: Problem, unit: float) -> tuple[float, float]:
    """Factors before and behind the softcap's tanh, or the scale and 0; `unit` of the logits."""
    scale, softcap = problem.scale, problem.softcap
    return scale / softcap if softcap > 0 else scale * unit, softcap * unit


def heads_per_group(config: Config, problem: Problem) -> int:
    """Query heads whose programs run interleaved: as many as share the L2 cache."""
    if not config.group_heads:
        return 1
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.kv_dtype.itemsize
    kv_heads = max(1, L2_BUDGET_BYTES // max(1, problem.seqlen_k * row_bytes))
    return min(kv_heads * problem.group, problem.batch * problem.num_heads)
