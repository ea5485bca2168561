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
merge in their own launch, unless very many pieces of many rows; the former appends one new token a
sequence in it too. The portable kernels are in `decode_walk`.

Schedule: a piece's size follows from shapes alone. With many sequences the programs also look
at all lengths and, if these are unequal, cut every sequence into pieces in proportion.

Memory: q, out (B, S_q, H, D) or (T_q, H, D); k, v (B, S_k, H_kv, D) or pages (P, N, H_kv, D)
found through block_table; any strides with the last one 1; lse (B, H, S_q) or (H, T_q). Extra
memory: 4 bytes x programs x rows x (D_v + 2), and a counter for each sequence and head of K
(many rows: two for each piece and warpgroup).
Float8 keys and values are multiplied as float16, which holds them exactly; each row of q is
scaled by a power of two first, so that it fits too.

It does not do: dropout, user score functions, gradients.

Legend: B batch, S_q / S_k lengths, T packed tokens, H query heads, H_kv key and value heads,
D / D_v head dimensions, P pages, N page size, BN keys of a tile, W groups of R = BN / W tokens,
ROWS rows of a program, m / l running maximum and denominator.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from onchip.bounded import Bounded
from onchip.kernels.launcher import Address, Described, Launch
from onchip.kernels.portable import decode_workspace
from onchip.kernels.portable.arguments import precision_of
from onchip.kernels.portable.decode_config import DecodeConfig, choose_decode
from onchip.kernels.portable.decode_repeated import Repeated
from onchip.kernels.portable.decode_spec import (
    NUMBERS,
    appends_itself,
    decode_numbers,
    decode_spec,
    new_numbers,
    vector_of,
)
from onchip.kernels.portable.decode_walk import (
    MERGE_NUMBERS,
    attn_decode_merge_portable,
    attn_decode_portable,
)
from onchip.problem import Layout, NewTokens, Problem, Tensors
from onchip.together import TOGETHER

#: Whether Triton has the Gluon that `decode_direct` and `decode_tall` are written in.
_HAS_GLUON = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)


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
    """`launch`, or `append_launch`, with a given config: for the tuner and the tests.

    Mutates:
        new.k_cache, new.v_cache: the slots of the new tokens, where `new` is given.
    """
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

            self.tall = decode_tall.tall_of(spec, (tensors.k, tensors.v))
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
                *(numbers[name] for name in MERGE_NUMBERS[:7]), num_sms, programs, spec
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
