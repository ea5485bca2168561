"""What the portable backward's launches hand to their kernels: the compiled part and the numbers.

Legend: B batch, S_q / S_k lengths, T packed tokens, H query heads, H_kv key and value heads,
D / D_v head dimensions, BM / BN rows and columns of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from onchip.kernels.compiled import Compiled
from onchip.kernels.portable.arguments import (
    LOG2E,
    are_aligned,
    describe,
    edges_of,
    factors_of,
    is_packed,
    precision_of,
    strides_of,
    suit_descriptors,
)
from onchip.kernels.portable.backward_config import BackwardConfig, choose_backward
from onchip.kernels.portable.config import L2_BUDGET_BYTES, can_describe, padded
from onchip.kernels.portable.extras import NO_FUNCTIONS, Functions, functions_of
from onchip.kernels.portable.resolved import Resolved
from onchip.problem import Layout, Problem, Tensors

#: Rows of LSE and D that belong to one sequence only: no tile of queries is longer.
STATS_BLOCK = 128


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
        has_softcap: whether logits are capped.
        alibi_dim: dimensions of the slopes, 0 for none.
        vector: strides come in units of so many elements, which tells Triton their alignment.
        precision: of float32 matrix products, "ieee" or "tf32".
        is_float32: whether q is float32.
        described: whether q, k, v and dout are tensor descriptors.
        packed: whether sequences lie one after the other in (T, H, D).
        foreign_rows: whether a descriptor can meet queries that are not the sequence's own.
        foreign_keys: whether a descriptor can meet keys that are not the sequence's own.
        has_group: whether query heads share key heads.
        makes: "dkdv", "dk", "dv" or "dq"; a kernel that owns keys makes one or both of dK and dV.
        reduction: where dQ is added up, see `BackwardConfig`.
        longest_last: whether, of a head's blocks, the last ones walk the longest way.
        has_dropout: whether entries of P are dropped.
        functions: the user's score and mask functions.
        list_m: queries of a block of the block list, 0 without one.
        list_n: keys of a block of it.
    """

    block_m: int
    block_n: int
    dim: int
    dim_v: int
    width: int
    width_v: int
    has_left: bool
    has_right: bool
    has_softcap: bool
    alibi_dim: int
    vector: int
    precision: str
    is_float32: bool
    described: bool
    packed: bool
    foreign_rows: bool
    foreign_keys: bool
    has_group: bool
    makes: str
    reduction: str
    longest_last: bool
    has_dropout: bool = False
    functions: Functions = NO_FUNCTIONS
    list_m: int = 0
    list_n: int = 0

    @property
    def describes_stats(self) -> bool:
        """Whether LSE and D are read through descriptors: their tiles begin at 128 bytes."""
        return self.described and self.block_m >= 32

    @property
    def hides_by_function(self) -> bool:
        """Whether more than the band hides keys, so that every tile must be masked."""
        return self.functions.mask is not None

    @property
    def in_one_walk(self) -> bool:
        """Whether no tile is known to be seen in full."""
        return self.hides_by_function or self.list_n > 0


def spec_of(
    config: BackwardConfig, part: str, problem: Problem, tensors: Tensors, dout: Tensor
) -> Spec:
    """The compiled part of the launch that makes `part`: "dkdv", "dk" or "dv", or "dq"."""
    tiles = config.tiles_of(part)
    inputs = (tensors.q, tensors.k, tensors.v, dout)
    aligned = are_aligned(*inputs)
    described = config.descriptors and can_describe(problem) and suit_descriptors(*inputs)
    packed = problem.layout_q is Layout.PACKED
    adds = part in ("dkdv", "dk")
    reduction = reduction_of(config, problem, tensors, dout) if adds else "none"
    spec = Spec(
        block_m=tiles.block_m,
        block_n=tiles.block_n,
        dim=problem.head_dim,
        dim_v=problem.head_dim_v,
        width=padded(problem.head_dim, aligned),
        width_v=padded(problem.head_dim_v, aligned),
        has_left=problem.mask.left >= 0,
        has_right=problem.mask.right >= 0,
        has_softcap=problem.softcap > 0,
        alibi_dim=problem.alibi,
        vector=16 // tensors.q.element_size() if aligned else 1,
        precision=precision_of(problem),
        is_float32=problem.dtype == torch.float32,
        described=described,
        packed=packed,
        foreign_rows=described and packed,
        foreign_keys=described and (packed or problem.seqused_k),
        has_group=problem.group > 1,
        makes=part,
        reduction=reduction,
        longest_last=part == "dq" and problem.mask.right >= 0,
        has_dropout=problem.dropout_p > 0,
        functions=functions_of(problem),
        list_m=problem.block_list[0] if problem.block_list else 0,
        list_n=problem.block_list[1] if problem.block_list else 0,
    )
    assert spec.list_m % spec.block_m == 0 and spec.list_n % spec.block_n == 0
    return spec


def reduction_of(config: BackwardConfig, problem: Problem, tensors: Tensors, dout: Tensor) -> str:
    """Where this problem's dQ is added up: as the config says, if the problem allows it."""
    if problem.deterministic or config.reduction != "tma":
        return "none" if problem.deterministic else config.reduction
    inputs = (tensors.q, tensors.k, tensors.v, dout)
    described = config.descriptors and can_describe(problem) and suit_descriptors(*inputs)
    dense = problem.layout_q is not Layout.PACKED
    return "tma" if dense and described and problem.head_dim % 4 == 0 else "atomics"


def pre_spec_of(problem: Problem, dout: Tensor) -> Spec:
    """The compiled part of the kernel that makes D: independent of all that it does not use."""
    return Spec(
        block_m=STATS_BLOCK,
        block_n=0,
        dim=0,
        dim_v=problem.head_dim_v,
        width=0,
        width_v=padded(problem.head_dim_v),
        has_left=False,
        has_right=False,
        has_softcap=False,
        alibi_dim=0,
        vector=row_strides(dout)[1],
        precision="ieee",
        is_float32=problem.dtype == torch.float32,
        described=False,
        packed=problem.layout_q is Layout.PACKED,
        foreign_rows=False,
        foreign_keys=False,
        has_group=False,
        makes="",
        reduction="none",
        longest_last=False,
    )


def row_strides(x: Tensor) -> tuple[list[int], int]:
    """Strides of sequence, row and head in units of 16 bytes where they are that, and the unit."""
    unit = 16 // x.element_size() if are_aligned(x) else 1
    return [stride // unit for stride in strides_of(x, is_packed(x))], unit


def sources_of(spec: Spec, tensors: Tensors, dout: Tensor) -> tuple:
    """q, k, v and dout as the kernel reads them."""
    if not spec.described:
        return tensors.q, tensors.k, tensors.v, dout
    return (
        describe(tensors.q, spec.block_m, spec.width),
        describe(tensors.k, spec.block_n, spec.width),
        describe(tensors.v, spec.block_n, spec.width_v),
        describe(dout, spec.block_m, spec.width_v),
    )


def stats_shape(problem: Problem) -> tuple[int, int]:
    """Shape of LSE and of D as the kernels keep them; see `_stats_place` in backward.py."""
    if problem.layout_q is Layout.PACKED:
        blocks = problem.tokens_q // STATS_BLOCK + problem.batch
        return problem.num_heads, blocks * STATS_BLOCK
    blocks = -(-problem.seqlen_q // STATS_BLOCK)
    return problem.batch * problem.num_heads, blocks * STATS_BLOCK


def stats_of(spec: Spec, stats: Tensor) -> TensorDescriptor | Tensor:
    """LSE or D as the dK/dV kernel reads it."""
    if not spec.describes_stats:
        return stats
    return TensorDescriptor(stats, list(stats.shape), list(stats.stride()), [1, spec.block_m])


def sum_of(spec: Spec, dq_sum: Tensor | None) -> TensorDescriptor | Tensor | None:
    """The float32 dQ, in q's shape, as the kernel adds to it."""
    if dq_sum is None or spec.reduction != "tma":
        return dq_sum
    return describe(dq_sum, spec.block_m, spec.width)


def numbers_of(spec: Spec, problem: Problem, tensors: Tensors, dout: Tensor, group: int) -> tuple:
    """The kernels' run-time numbers, in their order from stride_qb to grad_scale.

    Args:
        group: heads whose programs run interleaved.
    """
    strides = [
        stride // spec.vector
        for x in (tensors.q, tensors.k, tensors.v, dout)
        for stride in strides_of(x, is_packed(x))
    ]
    unit = 1.0 if problem.dtype == torch.float32 else LOG2E  # logits' base, e or 2
    return (
        *strides,
        problem.batch,
        problem.seqlen_q,
        problem.seqlen_k,
        stats_shape(problem)[1],
        problem.num_heads,
        problem.num_kv_heads,
        group,
        *edges_of(problem),
        *factors_of(problem, unit),
        problem.scale,
    )


def heads_per_group(config: BackwardConfig, problem: Problem, seqlen: int, num_heads: int) -> int:
    """Heads whose programs run interleaved: as many as share the L2 cache with what they walk.

    Args:
        seqlen: length of the walked side.
        num_heads: heads that own programs, H or H_kv.
    """
    if not config.group_heads:
        return 1
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    per_head = max(1, seqlen * row_bytes * (problem.num_heads // num_heads))
    return min(max(1, L2_BUDGET_BYTES // per_head), problem.batch * num_heads)


class Steps:
    """What backward calls of one signature share: the config and the launches, found once.

    Args:
        config: tiles, with the reduction that these tensors allow.
        problem: what the calls ask for.
    """

    __slots__ = ("config", "launches", "parts", "stats_shape")

    def __init__(self, config: BackwardConfig, problem: Problem):
        self.config = config
        self.parts = config.parts()
        self.stats_shape = (2, *stats_shape(problem))
        self.launches: dict[str, Resolved] = {}

    @property
    def is_resolved(self) -> bool:
        """Whether every launch has run once and takes the short way from now on."""
        return all(each.is_resolved for each in self.launches.values())


def steps_of(
    config: BackwardConfig | None, problem: Problem, tensors: Tensors, dout: Tensor
) -> Steps:
    """The steps of a given config, or of the chosen one."""
    chosen = config or choose_backward(problem)
    reduction = reduction_of(chosen, problem, tensors, dout)
    return Steps(replace(chosen, reduction=reduction), problem)
