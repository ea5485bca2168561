"""What the Hopper backward's launches hand to their kernels: descriptors, code and numbers.

Legend: B batch, S_q / S_k lengths, T packed tokens, H query heads, H_kv key and value heads,
D / D_v head dimensions, BM / BN rows of a tile of queries and of keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from onchip.kernels.compiled import Compiled
from onchip.kernels.hopper.backward_config import BackwardConfig, padded
from onchip.kernels.rows import NUM_SMS
from onchip.problem import Layout, Problem, Saved, Tensors

LOG2E = math.log2(math.e)
#: Rows of the statistics that belong to one sequence only: no tile of queries is longer.
STATS_BLOCK = 128
#: Elements of 16 bytes: what TMA wants rows to begin at.
UNIT = 8
#: See `pieces_of`: what a CTA, and each piece that is added up, takes in steps of 3,300 clocks at
#: D = 128: 4 to 8 thousand clocks beside its steps, some 1 us a piece (H200, 2026-11-30).
_CTA_STEPS = 4.0
_PIECE_STEPS = 2.0
_MOST_PIECES = 8
_LEAST_GAIN = 0.015
_UNBOUNDED = 1 << 29  # larger than any length, small enough that int32 sums do not overflow


@dataclass(frozen=True)
class Spec(Compiled):
    """What the compiled code depends on; everything else is a run-time value.

    Args:
        block_m, block_n: BM and BN.
        dim, dim_v: D and D_v as padded.
        stages, late, starts_at_lse, holds_keys, fours: see `BackwardConfig`.
        ordered: whether dQ's sums are added in a fixed order.
        has_left, has_right: which edges the mask has.
        has_tail: whether the last tile of keys may be short.
        has_softcap: whether logits are capped.
        high_edges: whether masked tiles can lie behind those that are seen in full.
        packed: whether sequences lie one after the other in (T, H, D).
        apart, ds_buffers: see `BackwardConfig`.
        dq_buffers, kv_buffers: tiles of dQ, and of K and V, in shared memory; not with `apart`.
        persistent: see `BackwardConfig`.
        pieces: of tiles of keys that several CTAs share (`backward_pieces`); 1: there are none.
    """

    block_m: int
    block_n: int
    dim: int
    dim_v: int
    stages: int
    late: bool
    starts_at_lse: bool
    holds_keys: bool
    fours: bool
    apart: bool
    ordered: bool
    has_left: bool
    has_right: bool
    has_tail: bool
    has_softcap: bool
    high_edges: bool
    packed: bool
    ds_buffers: int
    dq_buffers: int
    kv_buffers: int
    persistent: bool
    pieces: int

    @property
    def multiplies_first(self) -> bool:
        """Whether a warpgroup of keys is the kernel's first role, see `attn_bwd_keys_hopper`."""
        return self.ordered or not (self.late and self.masks)

    @property
    def turns_back(self) -> bool:
        """Whether the last heads' walks go from the last queries down to the diagonal, so that
        the last CTAs are the short ones although sums are ordered."""
        return self.ordered and self.has_right and not self.has_left

    @property
    def abreast(self) -> int:
        """Heads of K whose tiles of keys begin side by side are `lag` divided by this; 0: one head
        begins after the other.

        In a fixed order a CTA follows some steps behind the one before it, so tiles of a head that
        begin at once wait. Of the default's speed at 1k, 4k, 16k without a mask, in one or two
        runs: D = 64 0.87 to 0.89, 0.89 to 0.93, 0.93 to 0.97 with `lag` heads, 0.78, 0.79, 0.86
        with half of them, 0.62, 0.57 to 0.59, 0.82 with one; D = 128 0.92, 0.97, 0.89 with `lag`,
        0.76, 0.74, 0.85 with one. Causal, more is worse, very likely since a CTA whose walk is
        short waits to round what long walks add to: D = 64 0.89, 0.92 with three tenths of `lag`
        (at 16k that is one head), 0.79, 0.75, 0.83 with `lag`, 0.84, 0.83 to 0.87, 0.87 to 0.89
        with one; D = 128, turns passed at once, 0.85, 0.90, 0.90 with three tenths, 0.90, 0.95,
        0.90 with one (H200, 2026-11-30). A third stands for three tenths: 8 heads for 7 at 1k.
        """
        if not self.ordered:
            return 0
        if not (self.has_left or self.has_right):
            return 1
        return 0 if self.late else 3

    @property
    def passes_at_once(self) -> bool:
        """Whether a CTA lets the next one add to a tile of dQ as soon as it has added, and not a
        step later.

        Of the default's speed at 1k, 4k, 16k, D = 128 in one run: full 0.92, 1.02, 0.99 against
        0.92, 0.97, 0.89, causal 0.95, 1.00, 0.92 against 0.89, 0.93, 0.83. At D = 64, where a step
        is shorter, two runs do not agree: full 0.85, 0.95, 0.93 against 0.89, 0.93, 0.97, then
        0.89, 0.95, 0.93 against 0.87, 0.89, 0.93; causal 0.87, 0.87, 0.83 against 0.89, 0.92, 0.94
        (H200, 2026-11-30).
        """
        return self.ordered and self.late

    @property
    def masks(self) -> bool:
        """Whether there can be tiles that an edge crosses."""
        return self.has_right or self.has_left or self.has_tail


def spec_of(config: BackwardConfig, problem: Problem, part: str, sms: int = NUM_SMS) -> Spec:
    """The compiled part of a launch, "keys" or "queries", on a GPU of so many SMs."""
    packed = problem.layout_q is Layout.PACKED
    ordered = problem.deterministic and not config.apart
    persistent = config.persistent and not packed
    has_left, has_right = problem.mask.left >= 0, problem.mask.right >= 0
    has_tail = packed or problem.seqlen_k % config.block_n != 0
    return Spec(
        block_m=2 * config.block_m if part == "queries" else config.block_m,
        block_n=config.block_n,
        dim=padded(problem.head_dim),
        dim_v=padded(problem.head_dim_v),
        stages=config.stages,
        late=config.late,
        starts_at_lse=starts_at_lse(config, problem),
        holds_keys=config.holds_keys,
        fours=config.fours,
        apart=config.apart,
        ordered=ordered,
        has_left=has_left,
        has_right=has_right,
        has_tail=has_tail,
        has_softcap=problem.softcap > 0,
        high_edges=has_right or has_tail if part == "queries" else has_left,
        packed=packed,
        ds_buffers=config.ds_buffers,
        dq_buffers=2,
        kv_buffers=2 if persistent else 1,
        persistent=persistent,
        pieces=pieces_of(config, problem, sms) if part == "keys" else 1,
    )


def starts_at_lse(config: BackwardConfig, problem: Problem) -> bool:
    """Whether S starts at -LSE: its unit is 1 / scale then, and nothing may come between."""
    return config.starts_at_lse and problem.softcap == 0 and problem.scale != 0


def stats_shape(problem: Problem) -> tuple[int, int]:
    """Lines and rows of LSE, D and the float32 dQ; see `backward_walk.stats_row`."""
    if problem.layout_q is Layout.PACKED:
        blocks = problem.tokens_q // STATS_BLOCK + problem.batch
        return problem.num_heads, blocks * STATS_BLOCK
    blocks = -(-problem.seqlen_q // STATS_BLOCK)
    return problem.batch * problem.num_heads, blocks * STATS_BLOCK


def units_of(config: BackwardConfig, problem: Problem) -> tuple[int, int]:
    """Heads of K of all sequences, and how many of them lie between the one that CTAs add to and
    those that they clear and round dQ for."""
    units = problem.batch * problem.num_kv_heads
    return units, min(units, -(-config.lag // num_key_tiles(config, problem)))


def num_key_tiles(config: BackwardConfig, problem: Problem) -> int:
    """CTAs of a head of K of a sequence."""
    return -(-problem.seqlen_k // config.block_n)


def pieces_of(config: BackwardConfig, problem: Problem, sms: int = NUM_SMS) -> int:
    """Of how many pieces the tiles of the last wave of CTAs are, 1 if they are whole.

    The model chooses them at D = 128 where walks are long: 68 tiles of 2048 are a last wave on
    132 SMs, and with 5 or 7 pieces of each 16k takes 641, 654 and 651 TFLOP/s in three runs, whole
    619, 637 and 645; 4k is within 2 % with 3, and 1k 2 to 6 % slower. At D = 64 the last wave is 4
    tiles of 4096, and all pieces are within 1 % (H200, 2026-11-30).
    """
    tiles = problem.batch * problem.num_kv_heads * num_key_tiles(config, problem)
    if tiles % sms == 0 or not _can_be_cut(config, problem):
        return 1
    if config.pieces:
        return config.pieces
    if not config.late:
        return 1
    steps = -(-problem.seqlen_q // config.block_m) * problem.group

    def last_wave(pieces: int) -> float:
        waves = -(-(tiles % sms * pieces) // sms)
        return waves * (steps / pieces + _CTA_STEPS) + _PIECE_STEPS * (pieces - 1)

    best = min(range(1, _MOST_PIECES + 1), key=last_wave)
    total = tiles // sms * (steps + _CTA_STEPS) + last_wave(1)
    return best if last_wave(1) - last_wave(best) >= _LEAST_GAIN * total else 1


def _can_be_cut(config: BackwardConfig, problem: Problem) -> bool:
    """Whether CTAs take tiles of keys that have all the same walk, and may share one."""
    is_full = problem.mask.left < 0 and problem.mask.right < 0
    dims = (problem.head_dim, problem.head_dim_v)
    return (
        is_full
        and not (config.apart or config.persistent or problem.deterministic)
        and problem.layout_q is not Layout.PACKED
        and problem.seqlen_k % config.block_n == 0
        and all(dim == padded(dim) for dim in dims)
    )


def num_whole(config: BackwardConfig, problem: Problem, sms: int = NUM_SMS) -> int:
    """Tiles of keys that have a CTA of their own; only sums of the last `lag` heads are rounded
    behind the launch, so that it does not matter how many CTAs add to them."""
    units, lag = units_of(config, problem)
    ctas = num_key_tiles(config, problem)
    if pieces_of(config, problem, sms) == 1:
        return units * ctas
    return units * ctas - min(units * ctas % sms, lag * ctas)


def num_programs(config: BackwardConfig, problem: Problem, sms: int = NUM_SMS) -> int:
    """CTAs of the launch that owns keys, where each takes one tile of them or a piece of one."""
    tiles = problem.batch * problem.num_kv_heads * num_key_tiles(config, problem)
    whole = num_whole(config, problem, sms)
    return whole + (tiles - whole) * pieces_of(config, problem, sms)


def numbers_of(
    config: BackwardConfig, problem: Problem, table=None, slots: int = 0, sms: int = NUM_SMS
) -> tuple:
    """The kernels' run-time numbers, from seqlen_q to cap."""
    scale, softcap = problem.scale, problem.softcap
    return (
        problem.seqlen_q,
        problem.seqlen_k,
        problem.num_heads,
        problem.num_kv_heads,
        problem.group,
        stats_shape(problem)[1],
        min(problem.mask.left, _UNBOUNDED),
        min(problem.mask.right, _UNBOUNDED),
        *units_of(config, problem),
        table,
        slots,
        num_whole(config, problem, sms),
        problem.head_dim // UNIT,
        float(scale),
        scale / softcap if softcap > 0 else scale * LOG2E,
        softcap * LOG2E,
    )


def row_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of sequence (0 when packed), row and head in `UNIT` elements."""
    strides = [0 if n == 1 else s // UNIT for n, s in zip(x.shape, x.stride(), strict=True)]
    return (0, strides[0], strides[1]) if x.dim() == 3 else (strides[0], strides[1], strides[2])


def describe(x: Tensor, rows: int) -> TensorDescriptor:
    """(B, S, H, D) or (T, H, D) in tiles of one head's rows; see `backward_walk.span`."""
    box = [1, 1, rows, 1, padded(x.shape[-1])]
    layout = gl.NVMMASharedLayout(128, 16, 5)
    # A dimension of size 1 may have any stride, which TMA would refuse.
    strides = [UNIT if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
    if x.dim() == 4:
        return TensorDescriptor(x, [1, *x.shape], [UNIT, *strides[:3], 1], box, layout)
    row = strides[0]
    shape = [0x7FFF0000, 0x7FFF0000, 1 << 30, *x.shape[1:]]
    return TensorDescriptor(x, shape, [2**34 - row, row, row, strides[1], 1], box, layout)


def describe_line(x: Tensor, rows: int) -> TensorDescriptor:
    """LSE or D in tiles of rows."""
    return TensorDescriptor(x, [x.numel()], [1], [rows], gl.NVMMASharedLayout(0, 32, 1))


def describe_sum(x: Tensor, block_m: int) -> TensorDescriptor:
    """The float32 dQ (lines, rows, D) in what is added at a time: 64 columns of a tile."""
    lines, width, dim = x.shape
    layout = gl.NVMMASharedLayout(128, 32, 2)
    return TensorDescriptor(x, [lines * width, dim], [dim, 1], [block_m, 64], layout)


def readable(tensors: Tensors, saved: Saved) -> tuple[Tensors, Saved]:
    """The call's data as TMA takes them: what is not aligned to 16 bytes is copied."""
    inputs = {name: _aligned(getattr(tensors, name)) for name in ("q", "k", "v")}
    if any(x is not getattr(tensors, name) for name, x in inputs.items()):
        tensors = replace(tensors, **inputs)
    dlse = saved.dlse
    saved = replace(
        saved,
        dout=_aligned(saved.dout),
        dlse=None if dlse is None else dlse.contiguous(),
        out=saved.out.contiguous(),
        lse=saved.lse.contiguous(),
    )
    return tensors, saved


def _aligned(x: Tensor) -> Tensor:
    """The tensor, or a copy where rows are off 16 bytes or a dimension is expanded."""
    rows = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    if x.data_ptr() & 15 or any(n > 1 and (s % UNIT or s == 0) for n, s in rows):
        return x.clone(memory_format=torch.contiguous_format)
    return x
