"""Append to a paged cache on a GPU: keys and values of new tokens go to their slots, one launch.

Slot s is token s % N of page s // N; slot -1 stores nothing. Stored values are divided by the
cache's scale, which reading multiplies by; float8 saturates instead of becoming NaN.

`launch` is given the slots; a program copies one head of one token. `append` finds the slots
from lengths and table on the device, rotates keys and queries on the way (Su et al. 2021,
RoFormer), and tells the lengths that attention will need; a program takes some heads of one
token, of K and V or of q. Offsets are 64-bit. Memory: k, v (T, H_kv, D) or (B, S_new, H_kv, D),
q (B, S_q, H, D) and the caches (P, N, H_kv, D), any strides with the last one 1.

Legend: B batch, S_new appended tokens of a sequence, S_q queries, T tokens, H query heads, H_kv
key and value heads, D / D_v head dimensions, P pages, N page size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.bounded import Bounded
from onchip.kernels.compiled import Compiled
from onchip.kernels.launcher import Launch
from onchip.problem import NewTokens, Problem

FLOAT8_MAX = tl.constexpr(448.0)  # of e4m3fn
_NUMBERS = (
    "page_size stride_kt stride_kh stride_vt stride_vh stride_kp stride_kn stride_kc stride_vp "
    "stride_vn stride_vc"
).split()


@triton.jit
def _converted(x, scale, head, num_heads, cache):
    """As the cache stores it."""
    if scale is not None:
        x = x.to(tl.float32) / tl.load(scale + head, mask=head < num_heads, other=1.0)
    if cache.dtype.element_ty == tl.float8e4nv:
        x = x.to(tl.float32)
        bounded = tl.minimum(tl.maximum(x, -FLOAT8_MAX), FLOAT8_MAX)
        x = tl.where(x == x, bounded, x)
    return x.to(cache.dtype.element_ty)


@triton.jit(do_not_specialize=_NUMBERS)
def kv_store_portable(
    k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, page_size,
    stride_kt: tl.int64, stride_kh: tl.int64, stride_vt: tl.int64, stride_vh: tl.int64,
    stride_kp: tl.int64, stride_kn: tl.int64, stride_kc: tl.int64,
    stride_vp: tl.int64, stride_vn: tl.int64, stride_vc: tl.int64,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: one head of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    page, offset = slot // page_size, slot % page_size
    column = tl.arange(0, WIDTH)
    source = k + token * stride_kt + head * stride_kh
    x = tl.load(source + column, mask=column < DIM, other=0.0)
    target = k_cache + page * stride_kp + offset * stride_kn + head * stride_kc
    x = _converted(x, k_scale, head, tl.num_programs(1), k_cache)
    tl.store(target + column, x, mask=column < DIM)
    source = v + token * stride_vt + head * stride_vh
    x = tl.load(source + column, mask=column < DIM_V, other=0.0)
    target = v_cache + page * stride_vp + offset * stride_vn + head * stride_vc
    x = _converted(x, v_scale, head, tl.num_programs(1), v_cache)
    tl.store(target + column, x, mask=column < DIM_V)


@triton.jit
def _slot(
    sequence, step, position, block_table, slot_mapping, stride_table, columns, page_size,
    num_new,
):  # fmt: skip
    """Where a new token goes; -1 for nowhere. Past the table nothing is stored."""
    if slot_mapping is not None:
        return tl.load(slot_mapping + sequence * num_new + step).to(tl.int64)
    else:
        column = position // page_size
        fits = column < columns
        page = tl.load(block_table + sequence * stride_table + column, mask=fits, other=0)
        slot = page.to(tl.int64) * page_size + position % page_size
        return tl.where(fits, slot, -1)


@triton.jit
def _rotated(source, rows, seen, column, cos, sin, position, SPEC: tl.constexpr):
    """Heads of one token in float32, (HEADS, WIDTH), turned by the angle of its position."""
    PAIRS: tl.constexpr = SPEC.rotary_pairs
    x = tl.load(source + rows + column, mask=seen, other=0.0)
    if PAIRS == 0:
        return x
    else:
        turns = column < 2 * PAIRS
        if SPEC.interleaved:
            pair, partner, is_first = column // 2, column ^ 1, column % 2 == 0
        else:
            is_first = column < PAIRS
            pair = tl.where(is_first, column, column - PAIRS)
            partner = tl.where(is_first, column + PAIRS, column - PAIRS)
        other = tl.load(source + rows + partner, mask=seen & turns, other=0.0).to(tl.float32)
        angle = position.to(tl.int64) * PAIRS + pair
        c = tl.load(cos + angle, mask=turns, other=1.0).to(tl.float32)
        s = tl.load(sin + angle, mask=turns, other=0.0).to(tl.float32)
        turned = x.to(tl.float32) * c + tl.where(is_first, -other, other) * s
        # As torch rounds: to x's dtype before the cache's.
        return tl.where(turns, turned.to(x.dtype), x)


_APPEND_NUMBERS = (
    "page_size columns num_new num_queries stride_table stride_qb stride_qs stride_qh "
    "stride_kb stride_ks stride_kh stride_vb stride_vs stride_vh stride_kp stride_kn stride_kc "
    "stride_vp stride_vn stride_vc"
).split()


@triton.jit(do_not_specialize=_APPEND_NUMBERS)
def kv_append_portable(
    q, k, v, k_cache, v_cache, seqlens, block_table, slot_mapping, cos, sin, k_scale, v_scale,
    q_rotated, seqused, page_size, columns, num_new, num_queries, stride_table: tl.int64,
    stride_qb: tl.int64, stride_qs: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_ks: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vs: tl.int64, stride_vh: tl.int64,
    stride_kp: tl.int64, stride_kn: tl.int64, stride_kc: tl.int64,
    stride_vp: tl.int64, stride_vn: tl.int64, stride_vc: tl.int64,
    SPEC: tl.constexpr,
):  # fmt: skip
    """One program: some heads of one new token, of K and V or, after those, of q."""
    token = tl.program_id(0)
    block = tl.program_id(1)
    if SPEC.overlaps:  # the attention is set up meanwhile: see `decode_direct`
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r",
            [token], dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip
    sequence, step = (token // num_new).to(tl.int64), token % num_new
    length = tl.load(seqlens + sequence)
    KV_BLOCKS: tl.constexpr = (SPEC.kv_heads + SPEC.heads_at_once - 1) // SPEC.heads_at_once
    column = tl.arange(0, SPEC.width)[None, :]
    if block < KV_BLOCKS:
        if block == 0 and step == 0:
            tl.store(seqused + sequence, length + num_new)
        position = length + step
        slot = _slot(sequence, step, position, block_table, slot_mapping, stride_table, columns,
                     page_size, num_new)  # fmt: skip
        if slot >= 0:
            head = block * SPEC.heads_at_once + tl.arange(0, SPEC.heads_at_once)[:, None]
            page, offset = slot // page_size, slot % page_size
            seen = (head < SPEC.kv_heads) & (column < SPEC.dim)
            source = k + sequence * stride_kb + step * stride_ks
            x = _rotated(source, head * stride_kh, seen, column, cos, sin, position, SPEC)
            target = k_cache + page * stride_kp + offset * stride_kn + head * stride_kc + column
            tl.store(target, _converted(x, k_scale, head, SPEC.kv_heads, k_cache), mask=seen)
            seen = (head < SPEC.kv_heads) & (column < SPEC.dim_v)
            source = v + sequence * stride_vb + step * stride_vs + head * stride_vh
            x = tl.load(source + column, mask=seen, other=0.0)
            target = v_cache + page * stride_vp + offset * stride_vn + head * stride_vc + column
            tl.store(target, _converted(x, v_scale, head, SPEC.kv_heads, v_cache), mask=seen)
    elif SPEC.rotary_pairs > 0:
        # The queries are the last of the new tokens.
        query = step - (num_new - num_queries)
        if query >= 0:
            head = (block - KV_BLOCKS) * SPEC.heads_at_once
            head += tl.arange(0, SPEC.heads_at_once)[:, None]
            position = length + (step if SPEC.in_order else 0)
            seen = (head < SPEC.heads) & (column < SPEC.dim)
            source = q + sequence * stride_qb + query * stride_qs
            x = _rotated(source, head * stride_qh, seen, column, cos, sin, position, SPEC)
            row = (sequence * num_queries + query) * SPEC.heads + head
            tl.store(q_rotated + row * SPEC.dim + column, x, mask=seen)


def launch(
    problem: Problem,
    k: torch.Tensor,  # (T, H_kv, D)
    v: torch.Tensor,  # (T, H_kv, D_v)
    k_cache: torch.Tensor,  # (P, N, H_kv, D)
    v_cache: torch.Tensor,  # (P, N, H_kv, D_v)
    slot_mapping: torch.Tensor,  # (T,)
    k_scale: torch.Tensor | None,  # (H_kv,)
    v_scale: torch.Tensor | None,  # (H_kv,)
) -> None:
    """Writes each token into its slot.

    Mutates:
        k_cache, v_cache: the slots named by slot_mapping.
    """
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    pointers = (k, v, k_cache, v_cache, slot_mapping.contiguous(), k_scale, v_scale)
    strides = (*k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3])
    aligned = tuple(None if x is None else x.data_ptr() % 16 for x in pointers)
    # The entry keeps the Problem alive, so its id is its own.
    key = (id(problem), k.device, strides, aligned, slot_mapping.dtype)
    found = _launches.get(key)
    if found is None:
        found = _launches[key] = (_resolve(problem, k), problem)
    width = triton.next_power_of_2(max(problem.head_dim, problem.head_dim_v))
    found[0](
        *pointers, problem.page_size, *strides, problem.head_dim, problem.head_dim_v, width
    )  # fmt: skip


def _resolve(problem: Problem, k: torch.Tensor) -> Launch:
    index = k.device.index if k.device.type == "cuda" else -1
    grid = (k.shape[0], problem.num_kv_heads)
    return Launch(kv_store_portable, grid, index, num_warps=1)


_launches: Bounded[tuple, tuple[Launch, Problem]] = Bounded(1024)


@dataclass(frozen=True)
class AppendSpec(Compiled):
    """What the compiled append depends on; everything else is a run-time value.

    Args:
        heads: H.
        kv_heads: H_kv.
        heads_at_once: heads of a program, a power of two.
        dim: D.
        dim_v: D_v.
        width: the larger of the two, padded to a power of two.
        rotary_pairs: rotary_dim / 2, 0 for no rotation.
        interleaved: whether pairs are (0, 1), (2, 3), ... and not halves.
        in_order: whether queries stand at the positions of the last new tokens, and not all of
            them at the first one's.
        overlaps: whether launches overlap (programmatic dependent launch).
    """

    heads: int
    kv_heads: int
    heads_at_once: int
    dim: int
    dim_v: int
    width: int
    rotary_pairs: int
    interleaved: bool
    in_order: bool
    overlaps: bool

    @classmethod
    def of(cls, problem: Problem, new: NewTokens) -> AppendSpec:
        """The spec of an append."""
        width = triton.next_power_of_2(max(problem.head_dim, problem.head_dim_v))
        heads = min(triton.next_power_of_2(problem.num_kv_heads), max(1, _ENTRIES // width))
        pairs = 0 if new.rotary_cos is None else new.rotary_cos.shape[1]
        return cls(
            new.q.shape[2], problem.num_kv_heads, heads, problem.head_dim, problem.head_dim_v,
            width, pairs, new.interleaved, new.in_order, problem.arch == "sm_90",
        )  # fmt: skip

    @property
    def blocks(self) -> int:
        """Programs of a token."""
        heads = self.heads if self.rotary_pairs else 0
        return -(-self.kv_heads // self.heads_at_once) + -(-heads // self.heads_at_once)


_ENTRIES = 1024  # of a program: 8 for each thread of 4 warps


class Append:
    """The append's launch for tensors of the same shapes, strides, dtypes and alignment."""

    def __init__(self, problem: Problem, new: NewTokens):
        k, v, k_cache, v_cache = new.k, new.v, new.k_cache, new.v_cache
        spec = AppendSpec.of(problem, new)
        columns, stride_table = new.block_table.shape[1], new.block_table.stride(0)
        self.numbers = (
            problem.page_size, columns, k.shape[1], new.q.shape[1], stride_table,
            *new.q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            *k_cache.stride()[:3], *v_cache.stride()[:3], spec,
        )  # fmt: skip
        self.rotates = spec.rotary_pairs > 0
        self.queries = (new.q.shape, new.q.dtype, new.q.device)
        self.batch = new.cache_seqlens.shape[0]
        grid = (k.shape[0] * k.shape[1], spec.blocks)
        index = k.device.index if k.device.type == "cuda" else -1
        # Fused multiplications would round otherwise than torch's rotation does.
        options = {"launch_pdl": True} if spec.overlaps else {}
        self.run = Launch(kv_append_portable, grid, index, num_warps=4, enable_fp_fusion=False,
                          **options)  # fmt: skip

    def outputs(self) -> tuple[Tensor | None, Tensor]:
        """Room for the rotated queries, if there are any, and for the lengths."""
        shape, dtype, device = self.queries
        rotated = torch.empty(shape, dtype=dtype, device=device) if self.rotates else None
        return rotated, torch.empty(self.batch, dtype=torch.int32, device=device)

    def __call__(self, new: NewTokens) -> tuple[Tensor, Tensor]:
        rotated, lengths = self.outputs()
        self.run(*new.tensors, rotated, lengths, *self.numbers)
        return new.q if rotated is None else rotated, lengths


class RepeatedAppend:
    """An append's launch from addresses, in the order of `NewTokens.tensors`.

    Rotated queries and lengths go to scratch memory of the stream, or of the graph that it is
    recording: whoever reads them is launched next.
    """

    def __init__(self, once: Append, queries: Tensor):
        self._once = once
        self._device = queries.device
        self._lengths_at = -(-queries.numel() * queries.element_size() // 16) * 16
        self._lengths_at *= once.rotates
        self._num_bytes = self._lengths_at + 4 * once.batch
        self._places: dict[int, tuple] = {}  # of each stream

    @property
    def is_ready(self) -> bool:
        """Whether it may be called now."""
        return self._once.run.takes_addresses

    def __call__(self, places: tuple) -> tuple[Tensor, int | None, int]:
        """What to keep until the reader's launch; addresses of rotated q, if any, and lengths."""
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        found = None
        if not torch._C._cuda_isCurrentStreamCapturing():
            found = self._places.get(stream)
        if found is None:
            found = self._place(stream)
        run, head, tail, kept, rotated, lengths = found
        run(*head, *places, *tail)
        return kept, rotated, lengths

    def _place(self, stream: int) -> tuple:
        """The launcher, what it takes before and after the addresses, and the scratch memory."""
        memory = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
        start = memory.data_ptr()
        rotated = start if self._once.rotates else None
        lengths = start + self._lengths_at
        tail = (rotated, lengths, *self._once.numbers)
        found = (*self._once.run.on(stream), tail, memory, rotated, lengths)
        capturing = torch._C._cuda_isCurrentStreamCapturing()
        if not capturing and self._num_bytes <= _MOST_SCRATCH_BYTES:
            self._places[stream] = found
        return found


_MOST_SCRATCH_BYTES = 1 << 20  # kept for each shape and stream


def append(problem: Problem, new: NewTokens) -> tuple[Tensor, Tensor]:
    """Writes new tokens after each sequence's own, rotated if there are tables, in one launch.

    Returns:
        q, rotated where there are tables, else q itself; and the new lengths (B,) int32.

    Mutates:
        new.k_cache, new.v_cache: the slots of the new tokens.
    """
    return _append_of(problem, new)(new)


def repeat_append(problem: Problem, new: NewTokens) -> RepeatedAppend:
    """See `onchip.kernels.Kernel.load_repeat`."""
    return RepeatedAppend(_append_of(problem, new), new.q)


def _append_of(problem: Problem, new: NewTokens) -> Append:
    key = (id(problem), new.interleaved, new.in_order, *map(_place, new.tensors))
    found = _appends.get(key)
    if found is None:
        # The entry keeps the Problem alive, so its id is its own.
        found = _appends[key] = (Append(problem, new), problem)
    return found[0]


def _place(x: Tensor | None):
    """What a launch depends on in a tensor."""
    return None if x is None else (x.device, x.dtype, x.shape, x.stride(), x.data_ptr() % 16)


_appends: Bounded[tuple, tuple[Append, Problem]] = Bounded(1024)
