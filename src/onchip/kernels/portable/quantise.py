"""Quantises q, k and v to float8 in one launch that reads them once.

A program takes one block of one head: 64 queries, or 128 keys with their values. Rows are
rotated (optionally), multiplied by the transform of `onchip.kernels.fp8_layout` on the matrix
units, and divided by the block's scale. Keys are taken in the order in which V's columns want
them, so that V is transposed in shared memory and written in full lines. What is not finite is
treated as in `onchip.kernels.fp8_quantise`, which says the same in torch.

A scale for a head or tensor needs its largest entry first: a launch before finds those of
blocks. Values that are float8 already are only laid out (`RAW`).

Memory: q, out (B, S_q, H, D) or (T_q, H, D); k (B, S_k, H_kv, D) or (T_k, H_kv, D); v as k with
D_v, out (B, H_kv, D_v, columns) or (H_kv, D_v, columns). Inputs may have any strides with the
last one 1.

Legend: B batch, S sequence length, T packed tokens, H heads, H_kv key and value heads, D / D_v
head dimensions, N blocks.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.kernels import fp8_layout
from onchip.kernels.fp8_layout import (
    FLOAT8,
    Quantiser,
    Source,
    expanded,
    num_blocks,
    transform,
    transform_gain,
)
from onchip.kernels.fp8_quantise import Blocks, shared_scales
from onchip.kernels.portable.arguments import are_aligned, strides_of
from onchip.problem import needs_copy

BLOCK_Q = tl.constexpr(fp8_layout.BLOCK_Q)
BLOCK_K = tl.constexpr(fp8_layout.BLOCK_K)
LARGEST = tl.constexpr(fp8_layout.LARGEST)
NAN_CODE = tl.constexpr(fp8_layout.NAN_CODE)
SMALLEST = tl.constexpr(fp8_layout.SMALLEST)


class Spec(NamedTuple):
    """What the compiled code depends on."""

    dim: int
    dim_v: int
    width: int  # D padded to a power of two
    width_v: int
    half: int  # rotary_dim / 2, 0 without
    positions: int  # of the rotary tables
    interleaved: bool
    hadamard: bool
    only_largest: bool  # finds largest entries, writes no codes
    given: bool  # scales are given, for each sequence and head
    raw: bool  # inputs are float8
    precision: str
    native: bool  # the GPU converts to float8 itself
    vector: int  # strides come in units of so many elements, which tells Triton their alignment


class Side(NamedTuple):
    """One of q, k and v: where it is read and written."""

    source: object
    stride_batch: object
    stride_row: object
    stride_head: object
    codes: object
    scales: object
    gain: object  # what a scale is multiplied by when it is written


class Cut(NamedTuple):
    """How one of queries and keys is cut into blocks; what a layout does not have is None."""

    cu_seqlens: object
    used: object
    length: object  # of a dense sequence
    blocks: object  # of a dense sequence, or of all packed ones
    batch: object
    heads: object


class Place(NamedTuple):
    """One block."""

    sequence: object
    block: object  # in memory of scales and columns
    first: object  # row in its own sequence
    start: object  # the sequence's first row in memory
    length: object  # rows of the sequence
    used: object  # rows that count


@triton.jit
def _place(index, cut: Cut, BLOCK: tl.constexpr):
    """Block number `index` of all sequences."""
    if cut.cu_seqlens is None:
        sequence = index // cut.blocks
        block = index - sequence * cut.blocks
        first = block * BLOCK
        start = 0
        length = cut.length
    else:
        low = 0
        high = cut.batch
        while high - low > 1:  # the last sequence whose first block is not behind
            middle = (low + high) // 2
            begins = tl.load(cut.cu_seqlens + middle) // BLOCK + middle
            low = tl.where(begins <= index, middle, low)
            high = tl.where(begins <= index, high, middle)
        sequence = low
        block = index
        start = tl.load(cut.cu_seqlens + sequence)
        length = tl.load(cut.cu_seqlens + sequence + 1) - start
        first = (index - start // BLOCK - sequence) * BLOCK
    used = length
    if cut.used is not None:
        used = tl.load(cut.used + sequence)
    return Place(sequence, block, first, start, length, used)


@triton.jit
def _pointers(side: Side, at: Place, head, rows, VECTOR: tl.constexpr):
    """The rows' first elements."""
    row = (at.start + rows).to(tl.int64) * (side.stride_row * VECTOR)
    base = side.source + tl.cast(at.sequence, tl.int64) * (side.stride_batch * VECTOR)
    return base + head * (side.stride_head * VECTOR) + row


@triton.jit
def _rotated(x, pointers, holds, position, cos, sin, SPEC: tl.constexpr):
    """x with its first 2 * half features turned, rounded to its own dtype."""
    WIDTH: tl.constexpr = SPEC.width
    HALF: tl.constexpr = SPEC.half
    columns = tl.arange(0, WIDTH)
    if SPEC.interleaved:
        partner = columns ^ 1
        angle = columns // 2
        is_first = columns % 2 == 0
    else:
        partner = tl.where(columns < HALF, columns + HALF, columns - HALF)
        angle = columns % HALF
        is_first = columns < HALF
    turns = holds[:, None] & (columns < 2 * HALF)[None, :]
    other = tl.load(pointers[:, None] + partner[None, :], mask=turns, other=0.0).to(tl.float32)
    position = tl.minimum(tl.maximum(position, 0), SPEC.positions - 1)
    table = position.to(tl.int64)[:, None] * HALF + angle[None, :]
    c = tl.load(cos + table, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + table, mask=turns, other=0.0).to(tl.float32)
    return (x.to(tl.float32) * c + tl.where(is_first, -other, other) * s).to(x.dtype)


@triton.jit
def _is_finite(x, RAW: tl.constexpr):
    """RAW: bytes of float8, which has NaN alone."""
    if RAW:
        return (x & 0x7F) != NAN_CODE
    else:
        return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
def _spoilt(x, RAW: tl.constexpr):
    """Rows with an element that is not finite."""
    return tl.max((~_is_finite(x, RAW)).to(tl.int32), 1) > 0


@triton.jit
def _transformed(x, matrix, SPEC: tl.constexpr):
    if SPEC.hadamard:
        WIDTH: tl.constexpr = SPEC.width
        index = tl.arange(0, WIDTH)
        m = tl.load(matrix + index[:, None] * WIDTH + index[None, :])
        return tl.dot(x, m, input_precision=SPEC.precision)
    else:
        return x.to(tl.float32)


@triton.jit
def _scale(x, side: Side, cut: Cut, at: Place, head, SPEC: tl.constexpr):
    """The block's scale; written where it is the block's own."""
    if SPEC.given:
        return tl.load(side.scales + at.sequence * cut.heads + head)
    else:
        largest = tl.max(tl.max(tl.abs(x), 1), 0)
        scale = tl.where(largest > 0, tl.maximum(largest, SMALLEST) / LARGEST, 1.0)
        place = tl.cast(at.block, tl.int64)
        if cut.cu_seqlens is None:
            place += tl.cast(at.sequence, tl.int64) * cut.heads * cut.blocks
        place += tl.cast(head, tl.int64) * cut.blocks
        if SPEC.only_largest:
            tl.store(side.scales + place, largest)
        else:
            tl.store(side.scales + place, scale * side.gain)
        return scale


@triton.jit
def _code(x, scale, SPEC: tl.constexpr):
    """x / scale as a byte of float8_e4m3fn: to nearest, ties to even, saturated.

    By integers where there is no instruction for it: GPUs before sm_89 have none, and Triton's
    interpreter cuts off.
    """
    if SPEC.native:
        return (x * (1.0 / scale)).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        y = tl.minimum(tl.abs(x / scale), LARGEST)
        bits = y.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 codes are multiples of 2^-9; adding 2^23 rounds to an integer.
        small = (y * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xFF
        code = tl.where(y < 0.015625, small, normal)
        return tl.where(x < 0, code | 0x80, code).to(tl.uint8)


@triton.jit
def _code_of_rows(x, spoilt, scale, SPEC: tl.constexpr):
    """`_code`, NaN in rows that are spoilt."""
    if SPEC.native:  # a NaN's code is `NAN_CODE`; on words, which are fewer operations than bytes
        return _code(tl.where(spoilt[:, None], float("nan"), x), scale, SPEC)
    else:
        return tl.where(spoilt[:, None], NAN_CODE, _code(x, scale, SPEC)).to(tl.uint8)


@triton.jit
def _store_rows(
    codes, side: Side, cut: Cut, at: Place, head, rows, DIM: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    columns = tl.arange(0, WIDTH)
    row = (at.start + rows).to(tl.int64)
    if cut.cu_seqlens is None:
        row += tl.cast(at.sequence, tl.int64) * cut.length
    pointers = side.codes + (row * cut.heads + head)[:, None] * DIM + columns[None, :]
    inside = (rows < at.length)[:, None] & (columns < DIM)[None, :]
    tl.store(pointers, codes, mask=inside)


@triton.jit
def _rows(side: Side, at: Place, head, rows, shift, cos, sin, matrix, SPEC: tl.constexpr):
    """Rows of q or k as they are to be quantised (0 where spoilt), and which are spoilt."""
    WIDTH: tl.constexpr = SPEC.width
    columns = tl.arange(0, WIDTH)
    holds = rows < at.used
    pointers = _pointers(side, at, head, rows, SPEC.vector)
    inside = holds[:, None] & (columns < SPEC.dim)[None, :]
    x = tl.load(pointers[:, None] + columns[None, :], mask=inside, other=0)
    if SPEC.half > 0:
        x = _rotated(x, pointers, holds, rows + shift, cos, sin, SPEC)
    spoilt = _spoilt(x, SPEC.raw)
    if not SPEC.raw:
        x = tl.where(spoilt[:, None], 0.0, x).to(x.dtype)
        x = _transformed(x, matrix, SPEC)
    return x, spoilt


@triton.jit
def _quantise_queries(
    index, head, q: Side, cut: Cut, keys: Cut, cos, sin, matrix, SPEC: tl.constexpr
):  # fmt: skip
    at = _place(index, cut, BLOCK_Q)
    rows = at.first + tl.arange(0, BLOCK_Q)
    seqlen_k = keys.length
    if keys.used is not None:
        seqlen_k = tl.load(keys.used + at.sequence)
    elif keys.cu_seqlens is not None:
        seqlen_k = tl.load(keys.cu_seqlens + at.sequence + 1)
        seqlen_k -= tl.load(keys.cu_seqlens + at.sequence)
    x, spoilt = _rows(q, at, head, rows, seqlen_k - at.length, cos, sin, matrix, SPEC)
    scale = _scale(x, q, cut, at, head, SPEC)
    if not SPEC.only_largest:
        codes = _code_of_rows(x, spoilt, scale, SPEC)
        _store_rows(codes, q, cut, at, head, rows, SPEC.dim, SPEC.width)


@triton.jit
def _store_columns(codes, v: Side, cut: Cut, at: Place, head, SPEC: tl.constexpr):
    """V's codes (BLOCK_K, D_v) transposed."""
    WIDTH: tl.constexpr = SPEC.width_v
    dims = tl.arange(0, WIDTH)
    width = tl.cast(cut.blocks, tl.int64) * BLOCK_K
    row = tl.cast(head, tl.int64)
    if cut.cu_seqlens is None:
        row += tl.cast(at.sequence, tl.int64) * cut.heads
    column = tl.cast(at.block, tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    pointers = v.codes + (row * SPEC.dim_v + dims)[:, None] * width + column[None, :]
    tl.store(pointers, tl.trans(codes), mask=(dims < SPEC.dim_v)[:, None])


@triton.jit
def _quantise_keys(index, head, k: Side, v: Side, cut: Cut, cos, sin, matrix, SPEC: tl.constexpr):
    at = _place(index, cut, BLOCK_K)
    column = tl.arange(0, BLOCK_K)
    c = column % 16  # 4t + 2a + c holds key 8a + 2t + c
    rows = at.first + column - c + (c // 2) % 2 * 8 + c // 4 * 2 + c % 2
    WIDTH: tl.constexpr = SPEC.width_v
    dims = tl.arange(0, WIDTH)
    inside = (rows < at.used)[:, None] & (dims < SPEC.dim_v)[None, :]
    pointers = _pointers(v, at, head, rows, SPEC.vector)
    values = tl.load(pointers[:, None] + dims[None, :], mask=inside, other=0)
    spoilt = _spoilt(values, SPEC.raw)
    values = tl.where(_is_finite(values, SPEC.raw), values, 0)
    if not SPEC.raw:
        values = values.to(tl.float32)
        values = _code(values, _scale(values, v, cut, at, head, SPEC), SPEC)
    if not SPEC.only_largest:
        _store_columns(values.to(tl.uint8), v, cut, at, head, SPEC)

    x, spoilt_k = _rows(k, at, head, rows, 0, cos, sin, matrix, SPEC)
    spoilt |= spoilt_k
    if SPEC.raw:
        x = tl.where(spoilt[:, None], NAN_CODE, x).to(tl.uint8)
    else:
        x = _code_of_rows(x, spoilt, _scale(x, k, cut, at, head, SPEC), SPEC)
    if not SPEC.only_largest:
        _store_rows(x, k, cut, at, head, rows, SPEC.dim, SPEC.width)


_NUMBERS = (
    "num_queries batch seqlen_q seqlen_k blocks_q blocks_k num_heads num_kv_heads stride_qb "
    "stride_qs stride_qh stride_kb stride_ks stride_kh stride_vb stride_vs stride_vh"
).split()


@triton.jit(do_not_specialize=_NUMBERS)
def quantise_portable(
    q, k, v, q_codes, k_codes, v_codes, q_scales, k_scales, v_scales, cu_seqlens_q, cu_seqlens_k,
    seqused_k, cos, sin, matrix, gain: tl.float32, num_queries, batch, seqlen_q, seqlen_k,
    blocks_q, blocks_k, num_heads, num_kv_heads,
    stride_qb: tl.int64, stride_qs: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_ks: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vs: tl.int64, stride_vh: tl.int64, SPEC: tl.constexpr,
):  # fmt: skip
    """One program: one block of one head; the first `num_queries` have queries."""
    queries = Cut(cu_seqlens_q, None, seqlen_q, blocks_q, batch, num_heads)
    keys = Cut(cu_seqlens_k, seqused_k, seqlen_k, blocks_k, batch, num_kv_heads)
    program = tl.program_id(0)
    if program < num_queries:
        side = Side(q, stride_qb, stride_qs, stride_qh, q_codes, q_scales, gain)
        _quantise_queries(program // num_heads, program % num_heads, side, queries, keys, cos, sin,
                          matrix, SPEC)  # fmt: skip
    else:
        program -= num_queries
        k_side = Side(k, stride_kb, stride_ks, stride_kh, k_codes, k_scales, gain)
        v_side = Side(v, stride_vb, stride_vs, stride_vh, v_codes, v_scales, 1.0)
        _quantise_keys(program // num_kv_heads, program % num_kv_heads, k_side, v_side, keys, cos,
                       sin, matrix, SPEC)  # fmt: skip


class _Sizes(NamedTuple):
    """Host-side numbers of one call."""

    batch: int
    blocks_q: int  # of a dense sequence, or of all packed ones
    blocks_k: int
    all_q: int  # of all sequences
    all_k: int


def _sizes(s: Source) -> _Sizes:
    packed = s.cu_seqlens_q is not None
    batch = s.cu_seqlens_q.shape[0] - 1 if packed else s.q.shape[0]
    count = batch if packed else None
    blocks = [
        num_blocks(x.shape[-3], count, size)
        for x, size in ((s.q, fp8_layout.BLOCK_Q), (s.k, fp8_layout.BLOCK_K))
    ]
    every = blocks if packed else [n * batch for n in blocks]
    return _Sizes(batch, *blocks, *every)


def quantise(source: Source, how: Quantiser) -> tuple[Tensor, ...]:
    """`onchip.kernels.fp8_quantise.quantise`, in one launch (two with shared scales)."""
    s = _readable(source)
    n = _sizes(s)
    packed = s.cu_seqlens_q is not None
    heads = (s.q.shape[-2], s.k.shape[-2], s.k.shape[-2])
    blocks = (n.blocks_q, n.blocks_k, n.blocks_k)
    lead = () if packed else (n.batch,)
    own = [
        s.q.new_empty(*lead, h, b, dtype=torch.float32) for h, b in zip(heads, blocks, strict=True)
    ]
    codes = (
        torch.empty(s.q.shape, dtype=FLOAT8, device=s.q.device),
        torch.empty(s.k.shape, dtype=FLOAT8, device=s.q.device),
        _new_columns(s, n),
    )
    gain = transform_gain(s.q.shape[-1], how.hadamard)
    if how.scale == "block":
        _run(s, how, n, codes, own, gain)
        scales = [x.expand(n.batch, -1, -1) if packed else x for x in own]
        return *codes, *scales
    _run(s, how, n, codes, own, 1.0, only_largest=True)
    shared = [_shared(s, how, x, part) for x, part in zip(own, "qkv", strict=True)]
    _run(s, how, n, codes, shared, 1.0, given=True)
    gains = (gain, gain, 1.0)
    parts = zip(shared, gains, blocks, strict=True)
    return *codes, *[expanded(x * g, b) for x, g, b in parts]


def relaid(source: Source) -> tuple[Tensor, Tensor]:
    """`onchip.kernels.fp8_quantise.relaid`, in one launch."""
    s = _readable(source)
    n = _sizes(s)
    k, v = torch.empty(s.k.shape, dtype=FLOAT8, device=s.k.device), _new_columns(s, n)
    nothing = s.k.new_empty(0, dtype=torch.float32)
    _run(s, Quantiser(hadamard=False), n, (s.q, k, v), [nothing] * 3, 1.0, raw=True)
    return k, v


def _readable(s: Source) -> Source:
    """With copies of what can't be read in place."""
    parts = {name: getattr(s, name) for name in ("q", "k", "v")}
    copies = {name: x.contiguous() for name, x in parts.items() if needs_copy(x)}
    tables = {
        name: x.contiguous()
        for name in ("rotary_cos", "rotary_sin", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")
        if (x := getattr(s, name)) is not None
    }
    return replace(s, **copies, **tables)


def _new_columns(s: Source, n: _Sizes) -> Tensor:
    lead = () if s.cu_seqlens_q is not None else (n.batch,)
    shape = (*lead, *s.v.shape[-2:], n.blocks_k * fp8_layout.BLOCK_K)
    return torch.empty(shape, dtype=FLOAT8, device=s.v.device)


def _shared(s: Source, how: Quantiser, largest: Tensor, part: str) -> Tensor:
    """Scales (B, H) from the blocks' largest entries, for one of q, k and v."""
    packed = s.cu_seqlens_q is not None
    largest = largest.t() if packed else largest.transpose(1, 2).flatten(0, 1)  # (N, H)
    if part == "q":
        blocks = Blocks(s.q, s.cu_seqlens_q, None, fp8_layout.BLOCK_Q)
    else:
        blocks = Blocks(s.k, s.cu_seqlens_k, None, fp8_layout.BLOCK_K)
    return shared_scales(largest, blocks, how.scale).contiguous()


def _run(
    s: Source, how: Quantiser, n: _Sizes, codes: tuple, scales: list, gain: float,
    only_largest: bool = False, given: bool = False, raw: bool = False,
) -> None:  # fmt: skip
    """One launch. Mutates: codes, and scales unless given."""
    programs_q = 0 if raw else n.all_q * s.q.shape[-2]
    programs = programs_q + n.all_k * s.k.shape[-2]
    if programs == 0:
        return
    dim, dim_v = s.q.shape[-1], s.v.shape[-1]
    spec = Spec(
        dim=dim,
        dim_v=dim_v,
        width=max(16, triton.next_power_of_2(dim)),
        width_v=max(16, triton.next_power_of_2(dim_v)),
        half=0 if s.rotary_cos is None else s.rotary_cos.shape[1],
        positions=0 if s.rotary_cos is None else s.rotary_cos.shape[0],
        interleaved=how.rotary_interleaved,
        hadamard=how.hadamard,
        only_largest=only_largest,
        given=given,
        raw=raw,
        precision="ieee",
        native=_converts(s.q.device),
        vector=16 // s.q.element_size() if are_aligned(s.q, s.k, s.v) else 1,
    )
    matrix = transform(dim, spec.width, s.q.dtype, s.q.device) if how.hadamard else None
    packed = s.cu_seqlens_q is not None
    strides = [n // spec.vector for x in (s.q, s.k, s.v) for n in strides_of(x, packed)]
    # Bytes: not every GPU's Triton knows float8.
    inputs = [x.view(torch.uint8) if raw else x for x in (s.q, s.k, s.v)]
    codes = [x.view(torch.uint8) for x in codes]
    with _on(s.q.device):
        quantise_portable[(programs,)](
            *inputs, *codes, *scales, s.cu_seqlens_q, s.cu_seqlens_k, s.seqused_k,
            s.rotary_cos, s.rotary_sin, matrix, gain, programs_q, n.batch, s.q.shape[-3],
            s.k.shape[-3], n.blocks_q, n.blocks_k, s.q.shape[-2], s.k.shape[-2], *strides, spec,
            num_warps=_num_warps(spec),
        )  # fmt: skip


def _num_warps(spec: Spec) -> int:
    """Enough for a block of keys to stay in registers: 64 of each thread's."""
    return {64: 4, 128: 8, 256: 16}.get(max(64, spec.width, spec.width_v), 16)


def _converts(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _on(device: torch.device):
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
