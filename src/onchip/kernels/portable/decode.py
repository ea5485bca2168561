"""The portable decode: a few queries a sequence over long keys, in plain Triton, in one launch.

Method: the queries of a sequence (S_q <= 64) and the heads of one group are the rows of one
program, so that K and V are read once for the whole group. The keys of a sequence are cut into
pieces (split-KV, Dao et al. 2023, Flash-Decoding); each piece is walked tile by tile with the
online softmax (Milakov and Gimelshein 2018). A sequence of one piece is finished at once. Of
several pieces each stores its unnormalised output, maximum and denominator. With few rows the
last one to arrive at a counter merges them in their order, and resets the counter for the next
launch; with many that program would read for longer than a second launch takes, which merges.

In the narrow walk (few rows) tokens are the M side of the matrix products and rows the N side,
whose least size is 8. The tokens of a tile are dealt to as many groups as there are warps; each
keeps its own statistics, so the loop needs no exchange between warps, and the groups are merged
once, at the end. The wide walk (more rows) has rows as M and one set of statistics. On Hopper
one query a sequence and many rows have walks of their own (`decode_direct`, `decode_tall`), which
merge in their own launch.

Schedule: a piece's size follows from shapes alone. With many sequences the programs also look
at all lengths and, if these are unequal, cut every sequence into pieces in proportion.

Memory: q, out (B, S_q, H, D) or (T_q, H, D); k, v (B, S_k, H_kv, D) or pages (P, N, H_kv, D)
found through block_table; any strides with the last one 1; lse (B, H, S_q) or (H, T_q). Extra
memory: 4 bytes x programs x rows x (D_v + 2), and a counter for each sequence and head of K.
Float8 keys and values are multiplied as float16, which holds them exactly; each row of q is
scaled by a power of two first, so that it fits too.

It does not do: dropout, user score functions, gradients.

Legend: B batch, S_q / S_k lengths, T packed tokens, H query heads, H_kv key and value heads,
D / D_v head dimensions, P pages, N page size, BN keys of a tile, W groups of R = BN / W tokens,
ROWS rows of a program, m / l running maximum and denominator.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.bounded import Bounded
from onchip.kernels.launcher import Address, Described, Launch
from onchip.kernels.portable import decode_workspace, masks
from onchip.kernels.portable.arguments import precision_of
from onchip.kernels.portable.decode_config import DecodeConfig, choose_decode
from onchip.kernels.portable.decode_repeated import Repeated
from onchip.kernels.portable.decode_results import finish, finish_merged, merged, put_aside
from onchip.kernels.portable.decode_spec import (
    NUMBERS,
    appends_itself,
    decode_numbers,
    decode_spec,
    new_numbers,
    vector_of,
)
from onchip.kernels.portable.decode_tiles import (
    Keys,
    Terms,
    attend,
    merge_groups,
    row_edges,
)
from onchip.kernels.portable.masks import LOG2E
from onchip.problem import Layout, NewTokens, Problem, Tensors
from onchip.together import TOGETHER


class Piece(NamedTuple):
    """Which keys of which sequence a program walks."""

    batch: object  # sequence
    index: object  # piece of it
    count: object  # pieces that it has
    first_program: object  # program of its first piece


@triton.jit
def _tiles(length, num_queries, first, left, SPEC: tl.constexpr):
    """First tile that any row of a sequence sees and how many follow; works on vectors too."""
    BN: tl.constexpr = SPEC.block_n
    start = length * 0
    if SPEC.has_first:
        start = tl.maximum(start, first)
    if SPEC.has_left:
        start = tl.maximum(start, length - num_queries - left)
    tile = start // BN
    return tile, tl.where(start < length, tl.cdiv(length, BN) - tile, 0)


@triton.jit
def _pieces(tiles, wanted, SPEC: tl.constexpr):
    """Pieces that a sequence really gets, at least one."""
    size = tl.maximum(tl.cdiv(tiles, tl.maximum(wanted, 1)), SPEC.min_tiles)
    return tl.maximum(tl.cdiv(tiles, size), 1)


@triton.jit
def _num_queries(cu_seqlens_q, batch, seen, seqlen_q, SPEC: tl.constexpr):
    if SPEC.packed_q:
        start = tl.load(cu_seqlens_q + batch, mask=seen, other=0)
        return tl.load(cu_seqlens_q + batch + 1, mask=seen, other=0) - start
    else:
        return seqlen_q


@triton.jit
def _all_tiles(
    cu_seqlens_q, seqused_k, leftpad_k, num_sequences, seqlen_q, left, SPEC: tl.constexpr
):
    """Tiles of every sequence, 0 past the last one."""
    every = tl.arange(0, SPEC.batch_padded)
    seen = every < num_sequences
    lengths = tl.load(seqused_k + every, mask=seen, other=0)
    first = 0
    if SPEC.has_first:
        first = tl.load(leftpad_k + every, mask=seen, other=0)
    queries = _num_queries(cu_seqlens_q, every, seen, seqlen_q, SPEC)
    _, tiles = _tiles(lengths, queries, first, left, SPEC)
    return tl.where(seen, tiles, 0)


@triton.jit
def _shares(
    cu_seqlens_q, seqused_k, leftpad_k, num_sequences, seqlen_q, left, splits, num_sms, units,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Pieces of every sequence, and their running sum.

    Equal lengths: `splits` pieces each. Unequal ones: pieces in proportion, about `sm_pieces` for
    each SM.
    """
    every = tl.arange(0, SPEC.batch_padded)
    tiles = _all_tiles(cu_seqlens_q, seqused_k, leftpad_k, num_sequences, seqlen_q, left, SPEC)
    total = tl.sum(tiles, 0)
    unequal = tl.max(tiles, 0) * num_sequences * 4 > total * 5
    work = tl.maximum(total * units, 1)
    # With 3 pieces an SM the product would overflow at 2^31 only beyond 2^22 tiles of one sequence
    wanted = tl.where(unequal, tl.cdiv(tiles * num_sms * SPEC.sm_pieces, work), splits)
    counts = tl.where(every < num_sequences, _pieces(tiles, wanted, SPEC), 0)
    return counts, tl.cumsum(counts, 0)


@triton.jit
def _locate(
    cu_seqlens_q, seqused_k, leftpad_k, num_sequences, seqlen_q, left, splits, num_sms,
    SPEC: tl.constexpr,
):  # fmt: skip
    """This program's sequence and how its keys are cut, from `_shares`; see `Piece`.

    A program finds its sequence from the running sum; those left over come last.
    """
    program = tl.program_id(1)
    every = tl.arange(0, SPEC.batch_padded)
    counts, ends = _shares(cu_seqlens_q, seqused_k, leftpad_k, num_sequences, seqlen_q, left,
                           splits, num_sms, tl.num_programs(0), SPEC)  # fmt: skip
    batch = tl.sum((ends <= program).to(tl.int32), 0)
    end = tl.min(tl.where(ends > program, ends, 2147483647), 0)
    count = tl.sum(tl.where(every == batch, counts, 0), 0)
    first = end - count
    return Piece(batch, program - first, count, first)


@triton.jit
def _load_rows(
    q, batch, q_start, kv_head, row, num_rows, stride_qb, stride_qs, stride_qh, SPEC: tl.constexpr
):
    """Rows of q, rows last in the narrow walk: (D, ROWS), and first in the wide one: (ROWS, D)."""
    columns = tl.arange(0, SPEC.width)
    head = kv_head * SPEC.group + row % SPEC.group
    token = q_start + row // SPEC.group
    place = batch * (stride_qb * SPEC.vector) + token.to(tl.int64) * (stride_qs * SPEC.vector)
    place += head * (stride_qh * SPEC.vector)
    if SPEC.groups == 0:
        inside = (row < num_rows)[:, None] & (columns < SPEC.dim)[None, :]
        return tl.load(q + place[:, None] + columns[None, :], mask=inside, other=0.0)
    else:
        inside = (row < num_rows)[None, :] & (columns < SPEC.dim)[:, None]
        return tl.load(q + place[None, :] + columns[:, None], mask=inside, other=0.0)


@triton.jit
def _fit_float16(q, SPEC: tl.constexpr):
    """q times a power of two for each row, so that its largest entry is near 1, and its inverse."""
    axis: tl.constexpr = 1 if SPEC.groups == 0 else 0
    top = tl.max(tl.abs(q.to(tl.float32)), axis)
    exponent = tl.where(top > 0.0, tl.floor(tl.log2(tl.maximum(top, 1e-30))), 0.0)
    shrink = tl.exp2(-exponent)
    return (q.to(tl.float32) * tl.expand_dims(shrink, axis)).to(tl.float16), tl.exp2(exponent)


# Triton specialises numbers inside tuples, whatever it is told; to compile once for all
# lengths and strides, the numbers must be parameters of their own. Hence so many.

#: Whether Triton has the Gluon that `decode_direct` and `decode_tall` are written in.
_HAS_GLUON = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)

_MERGE_NUMBERS = (
    "num_sequences seqlen_q seqlen_k tokens_q num_heads splits left num_sms num_pieces"
).split()


@triton.jit(do_not_specialize=NUMBERS)
def attn_decode_portable(
    q, k, v, out, lse, block_table, cu_seqlens_q, seqused_k, leftpad_k, alibi_slopes, sinks,
    k_scale, v_scale, partial_out, partial_stats, counters,
    stride_qb: tl.int64, stride_qs: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_ks: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vs: tl.int64, stride_vh: tl.int64, stride_table: tl.int64,
    num_sequences, seqlen_q, seqlen_k, tokens_q: tl.int64, num_heads, splits, left, right,
    scale: tl.float32, softcap: tl.float32, num_sms,
    SPEC: tl.constexpr,
):  # fmt: skip
    """One program: the rows of one head of K and row block against a piece of a sequence."""
    unit = tl.program_id(0)
    kv_head, row_start = unit // SPEC.row_blocks, (unit % SPEC.row_blocks) * SPEC.rows
    if SPEC.batch_padded == 1:
        program = tl.program_id(1)
        batch = program // splits
        piece = Piece(batch, program % splits, splits, batch * splits)
    else:
        piece = _locate(cu_seqlens_q, seqused_k, leftpad_k, num_sequences, seqlen_q, left, splits,
                        num_sms, SPEC)  # fmt: skip
        if piece.batch >= num_sequences:
            return
    batch = piece.batch.to(tl.int64)
    _, length, first_key = masks.key_span(None, seqused_k, leftpad_k, batch, seqlen_k)
    q_start = 0
    num_queries = seqlen_q
    if SPEC.packed_q:
        q_start, num_queries = masks.query_span(cu_seqlens_q, batch, seqlen_q)
    first_tile, tiles = _tiles(length, num_queries, first_key, left, SPEC)
    count = piece.count
    if SPEC.batch_padded == 1:
        count = _pieces(tiles, splits, SPEC)
        if piece.index >= count:
            return
    size = tl.cdiv(tiles, count)
    start = first_tile + piece.index * size
    stop = tl.minimum(start + size, first_tile + tiles)

    row = row_start + tl.arange(0, SPEC.rows)
    num_rows = num_queries * SPEC.group
    queries = _load_rows(q, batch, q_start, kv_head, row, num_rows, stride_qb, stride_qs,
                         stride_qh, SPEC)  # fmt: skip
    factor = scale
    v_factor = 1.0
    if k_scale is not None:
        factor *= tl.load(k_scale + kv_head)
    if v_scale is not None:
        v_factor = tl.load(v_scale + kv_head)
    row_factor = factor
    if SPEC.is_float8:
        queries, unshrink = _fit_float16(queries, SPEC)
        row_factor = factor * unshrink
    slope = 0.0
    if SPEC.alibi_dim > 0:
        head = kv_head * SPEC.group + row % SPEC.group
        slopes = alibi_slopes + (batch * num_heads if SPEC.alibi_dim == 2 else 0)
        slope = tl.load(slopes + head, mask=row < num_rows, other=0.0) * LOG2E
    edges = row_edges(row // SPEC.group, length, num_queries, first_key, left, right, SPEC)
    table = block_table
    if block_table is not None:
        table = block_table + batch * stride_table
    keys = Keys(k + kv_head * (stride_kh * SPEC.vector), stride_kb, stride_ks)
    values = Keys(v + kv_head * (stride_vh * SPEC.vector), stride_vb, stride_vs)
    stats = attend(queries, keys, values, table, batch, start, stop, edges,
                   Terms(row_factor, softcap, slope), SPEC)  # fmt: skip
    if SPEC.groups > 0:
        stats = merge_groups(stats)
    if not SPEC.merges or count == 1:
        finish(stats, out, lse, sinks, batch, q_start, kv_head, row, num_rows, num_heads,
                seqlen_q, tokens_q, v_factor, SPEC)  # fmt: skip
    base = tl.cast(unit, tl.int64) * tl.num_programs(1) + piece.first_program
    if SPEC.merges:  # noqa: SIM102 (one is decided by the compiler, one at run time)
        if count > 1:
            put_aside(stats, partial_out, partial_stats, base + piece.index, SPEC)
    if SPEC.merges and SPEC.merged_rows == 0:  # noqa: SIM102
        if count > 1:
            tl.debug_barrier()  # all threads' stores come before the one thread's count
            counter = counters + batch * tl.num_programs(0) + unit
            if tl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
                KEPT: tl.constexpr = SPEC.kept
                acc, maximum, denominator = merged(partial_out, partial_stats, base, count, 0, KEPT,
                                                   SPEC)  # fmt: skip
                finish_merged(acc, maximum, denominator, out, lse, sinks, batch, q_start, kv_head,
                              row_start, num_rows, num_heads, seqlen_q, tokens_q, v_factor, KEPT,
                              SPEC)  # fmt: skip
                tl.store(counter, 0)


@triton.jit(do_not_specialize=_MERGE_NUMBERS)
def attn_decode_merge_portable(
    out, lse, cu_seqlens_q, seqused_k, leftpad_k, sinks, v_scale, partial_out, partial_stats,
    num_sequences, seqlen_q, seqlen_k, tokens_q: tl.int64, num_heads, splits, left, num_sms,
    num_pieces, SPEC: tl.constexpr,
):  # fmt: skip
    """One program: some rows of one head of K and row block of a sequence, merged."""
    ROWS: tl.constexpr = SPEC.merged_rows
    BLOCKS: tl.constexpr = SPEC.kept // SPEC.merged_rows
    unit, first_row = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * ROWS
    kv_head, row_start = unit // SPEC.row_blocks, (unit % SPEC.row_blocks) * SPEC.rows
    batch = tl.program_id(1).to(tl.int64)
    q_start = 0
    num_queries = seqlen_q
    if SPEC.packed_q:
        q_start, num_queries = masks.query_span(cu_seqlens_q, batch, seqlen_q)
    num_rows = num_queries * SPEC.group
    if SPEC.batch_padded == 1:
        _, length, first_key = masks.key_span(None, seqused_k, leftpad_k, batch, seqlen_k)
        _, tiles = _tiles(length, num_queries, first_key, left, SPEC)
        count, first = _pieces(tiles, splits, SPEC), batch * splits
    else:
        counts, ends = _shares(cu_seqlens_q, seqused_k, leftpad_k, num_sequences, seqlen_q, left,
                               splits, num_sms, tl.num_programs(0) // BLOCKS, SPEC)  # fmt: skip
        own = tl.arange(0, SPEC.batch_padded) == batch
        count = tl.sum(tl.where(own, counts, 0), 0)
        first = (tl.sum(tl.where(own, ends, 0), 0) - count).to(tl.int64)
    if count == 1 or row_start + first_row >= num_rows:
        return
    v_factor = 1.0
    if v_scale is not None:
        v_factor = tl.load(v_scale + kv_head)
    place = tl.cast(unit, tl.int64) * num_pieces + first
    acc, maximum, denominator = merged(partial_out, partial_stats, place, count, first_row, ROWS,
                                       SPEC)  # fmt: skip
    finish_merged(acc, maximum, denominator, out, lse, sinks, batch, q_start, kv_head,
                  row_start + first_row, num_rows, num_heads, seqlen_q, tokens_q, v_factor, ROWS,
                  SPEC)  # fmt: skip


def launch(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Runs the decode with the config that `choose_decode` picks.

    Args:
        problem: what the call asks for.
        tensors: its data; nothing here is written.

    Returns:
        out (B, S_q, H, D_v) or (T_q, H, D_v) and lse (B, H, S_q) or (H, T_q) float32, both
        contiguous and written in every element.
    """
    return launch_with(None, problem, tensors)


def launch_with(
    config: DecodeConfig | None, problem: Problem, tensors: Tensors, new: NewTokens | None = None
) -> tuple[Tensor, Tensor]:
    """`launch`, or `append_launch`, with a given config: for the tuner and the tests."""
    return _plan_of(config, problem, tensors, new)(tensors, new)


def append_launch(
    problem: Problem, tensors: Tensors, new: NewTokens
) -> tuple[Tensor, Tensor] | None:
    """See `onchip.kernels.Kernel.load_append`.

    Mutates:
        new.k_cache, new.v_cache: the slots of the new tokens, unless None is returned.
    """
    plan = _appending(problem, tensors, new)
    return None if plan is None else plan(tensors, new)


def repeat_launch(problem: Problem, tensors: Tensors, wants_lse: bool) -> Repeated | None:
    """See `onchip.kernels.Kernel.load_repeat`; addresses from q to v_scale."""
    return Repeated(_plan_of(None, problem, tensors), tensors.q, wants_lse)


def repeat_append_launch(
    problem: Problem, tensors: Tensors, new: NewTokens, wants_lse: bool
) -> Repeated | None:
    """`repeat_launch` of `append_launch`; those of new k, v, cosine and sine come behind."""
    plan = _appending(problem, tensors, new)
    return None if plan is None else Repeated(plan, tensors.q, wants_lse)


def _appending(problem: Problem, tensors: Tensors, new: NewTokens) -> Plan | None:
    """The plan of one launch for both, if there is one."""
    if not (_HAS_GLUON and appends_itself(problem, tensors, new)):
        return None
    return _plan_of(None, problem, tensors, new)


def _plan_of(
    config: DecodeConfig | None, problem: Problem, tensors: Tensors, new: NewTokens | None = None
) -> Plan:
    q, k, v, table = tensors.q, tensors.k, tensors.v, tensors.block_table
    # Beside the problem, what the plan depends on: where rows lie and how they are aligned.
    places = tuple((x.stride(), x.data_ptr() % 16) for x in (q, k, v))
    columns = None if table is None else (table.shape[1], table.stride(0), table.data_ptr() % 16)
    others = tuple(
        None if x is None else (x.dtype, x.data_ptr() % 16) for x in _optional_tensors(tensors)
    )
    if new is not None:
        others = (*others, new.interleaved, *map(_place, _new_tensors(new)))
    # To hash a Problem costs more than the launch; the plan keeps it alive, so its id is its own.
    key = (config, id(problem), q.device, places, columns, others, precision_of(problem))
    found = _plans.get(key)
    if found is None:
        found = _plans[key] = Plan(config, problem, tensors, new)
    return found


def _place(x: Tensor | None):
    """What a plan depends on in a tensor that is appended, or in a table of angles."""
    return None if x is None else (x.dtype, x.shape[1], x.stride(), x.data_ptr() % 16)


def _optional_tensors(t: Tensors) -> tuple:
    """The kernel's parameters from cu_seqlens_q to v_scale."""
    return (
        t.cu_seqlens_q, t.seqused_k, t.leftpad_k, t.alibi_slopes, t.sinks, t.k_scale, t.v_scale
    )  # fmt: skip


def _new_tensors(new: NewTokens | None) -> tuple:
    """`attn_decode_direct`'s parameters from new_k to rotary_sin."""
    if new is None:
        return (None,) * 4
    return (new.k, new.v, new.rotary_cos, new.rotary_sin)


class Plan:
    """What does not change between calls of one shape."""

    def __init__(
        self,
        config: DecodeConfig | None,
        problem: Problem,
        tensors: Tensors,
        new: NewTokens | None = None,
    ):
        self.problem = problem
        self.dtype, self.device = tensors.q.dtype, tensors.q.device
        device = self.device
        num_sms = decode_workspace.num_sms(device)
        if config is None:
            config = choose_decode(problem, num_sms, _HAS_GLUON and vector_of(tensors) > 1)
        self.spec = spec = decode_spec(config, problem, tensors, new)
        packed = problem.layout_q is Layout.PACKED
        rows = (problem.tokens_q,) if packed else (problem.batch, problem.seqlen_q)
        self.out_shape = (*rows, problem.num_heads, problem.head_dim_v)
        self.lse_shape = (*rows[:-1], problem.num_heads, rows[-1])
        units = problem.num_kv_heads * config.row_blocks
        programs = config.programs(problem, num_sms)
        num_counters = problem.batch * units
        if config.tall:  # two for each piece and warpgroup
            num_counters = units * programs * (spec.rows // 32)
        self.room = (units * programs * spec.kept, spec.width_v, num_counters)
        self.numbers = (*decode_numbers(spec, config, problem, tensors), num_sms, spec)
        self.tall = None
        self.like: tuple[Described, ...] = ()  # of k and v, where the kernel reads them by TMA
        self.absent: tuple[None, ...] = ()  # parameters behind v_scale that the call lacks
        # See `forward._resolve`: rows that are only 2-byte aligned.
        stages = config.num_stages if spec.vector > 1 else 1
        index = device.index if device.type == "cuda" else -1
        if config.direct:
            assert spec.vector > 1, "rows must begin at multiples of 16 bytes"
            # Gluon is imported where it is needed: other platforms may lack it.
            from onchip.kernels.portable.decode_direct import attn_decode_direct

            self.numbers = (*self.numbers[:-1], *new_numbers(spec, new), spec, stages)
            self.absent = () if spec.appends else _new_tensors(None)
            self.run = Launch(attn_decode_direct, (units, programs), index,
                              num_warps=config.num_warps, maxnreg=128, launch_pdl=True)  # fmt: skip
        elif config.tall:
            from onchip.kernels.portable import decode_tall

            self.tall = decode_tall.tall_of(spec, units * programs, num_sms)
            found = (self.tall.described(x) for x in (tensors.k, tensors.v))
            self.like = tuple(Described(Address(0), x.shape, x.strides) for x in found)
            self.numbers = (*self.numbers[:-1], self.tall, stages)
            self.run = decode_tall.launcher(self.tall, (units, programs), index)
        else:
            self.run = Launch(attn_decode_portable, (units, programs), index,
                              num_warps=config.num_warps, num_stages=stages)  # fmt: skip
        self.merge = None
        if spec.merged_rows:
            blocks = (units * spec.kept // spec.merged_rows, problem.batch)
            self.merge = Launch(attn_decode_merge_portable, blocks, index, num_warps=4)
            numbers = dict(zip(NUMBERS, self.numbers, strict=False))
            self.merge_numbers = (
                *(numbers[name] for name in _MERGE_NUMBERS[:7]), num_sms, programs, spec
            )  # fmt: skip

    def __call__(self, tensors: Tensors, new: NewTokens | None = None) -> tuple[Tensor, Tensor]:
        q = tensors.q
        out = q.new_empty(self.out_shape)
        lse = q.new_empty(self.lse_shape, dtype=torch.float32)
        with TOGETHER:
            self._launch(tensors, new, out, lse)
        return out, lse

    def _launch(self, t: Tensors, new: NewTokens | None, out: Tensor, lse: Tensor) -> None:
        """Mutates: out, lse, and new's caches."""
        partials = (None, None, None)
        if self.spec.merges:
            partials = decode_workspace.take(out.device, *self.room)
        keys = (t.k, t.v)
        if self.like:
            keys = (*self._described(t), t.v)
        appended = self.absent if new is None else _new_tensors(new)
        self.run(t.q, *keys, out, lse, t.block_table, *_optional_tensors(t), *appended, *partials,
                 *self.numbers)  # fmt: skip
        if self.merge is not None:
            self.merge(out, lse, t.cu_seqlens_q, t.seqused_k, t.leftpad_k, t.sinks, t.v_scale,
                       *partials[:2], *self.merge_numbers)  # fmt: skip

    def _described(self, t: Tensors) -> tuple:
        """k and v as descriptors; Triton looks at real ones at the first launch."""
        if not self.run.is_resolved:
            return self.tall.described(t.k), self.tall.described(t.v)
        pairs = zip((t.k, t.v), self.like, strict=True)
        return tuple(Described(x, like.shape, like.strides) for x, like in pairs)


_plans: Bounded[tuple, Plan] = Bounded(1024)
