"""One block of one head: what a program of the quantising kernel does.

Codes are made four at a time, as words: a word's four numbers are four tensors, so that no thread
takes bytes apart. Queries and keys are transformed by every fourth column of the matrix at a
time; of the values, rows are read that follow one another in V's columns, and V is transposed in
words.

Legend: D / D_v head dimensions, R rows, C columns.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from onchip.kernels import fp8_layout

BLOCK_Q = tl.constexpr(fp8_layout.BLOCK_Q)
BLOCK_K = tl.constexpr(fp8_layout.BLOCK_K)
LARGEST = tl.constexpr(fp8_layout.LARGEST)
NAN_CODE = tl.constexpr(fp8_layout.NAN_CODE)
SMALLEST = tl.constexpr(fp8_layout.SMALLEST)
INFINITE = tl.constexpr(0x7F800000)  # as bits


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
    """Rows of four parts with an element that is not finite."""
    a, b, c, d = x
    if RAW:
        finite = _is_finite(a, RAW) & _is_finite(b, RAW) & _is_finite(c, RAW) & _is_finite(d, RAW)
        return tl.max((~finite).to(tl.int32), 1) > 0
    else:  # 0 times what is not finite is NaN
        return tl.sum(a * 0.0 + b * 0.0 + (c * 0.0 + d * 0.0), 1) != 0.0


@triton.jit
def _top(x):
    """Bits of the largest magnitude in four parts; `INFINITE` or more if one is not finite."""
    a, b, c, d = x
    top = tl.maximum(tl.maximum(_bits(a), _bits(b)), tl.maximum(_bits(c), _bits(d)))
    return tl.max(tl.max(top, 1), 0)


@triton.jit
def _bits(x):
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def _magnitude(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _largest(x):
    """Largest magnitude in each row of four parts."""
    a, b, c, d = x
    top = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
    return tl.max(top, 1)


@triton.jit
def _in_four(x):
    """(R, C) as four parts (R, C / 4): columns 0, 4, 8, ... and so on."""
    x = tl.reshape(x, [x.shape[0], x.shape[1] // 4, 2, 2])
    even, odd = tl.split(x)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _transform(matrix, SPEC: tl.constexpr):
    """The matrix, columns in the order of `_transformed`."""
    WIDTH: tl.constexpr = SPEC.width
    at = tl.arange(0, WIDTH)
    return tl.load(matrix + at[:, None] * WIDTH + at[None, :])


@triton.jit
def _transformed(x, matrix, SPEC: tl.constexpr):
    """x times the matrix, in four parts.

    A thread holds columns 8i + 2t + e of a product; the matrix has its columns so ordered that
    these are columns 16t + 2i + e of every 64, which it stores without moving data.
    """
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = SPEC.width
    y = tl.dot(x, matrix, input_precision=SPEC.precision)
    y = tl.permute(tl.reshape(y, [ROWS, WIDTH // 64, 8, 4, 2]), (0, 1, 3, 2, 4))
    return _in_four(tl.reshape(y, [ROWS, WIDTH]))


@triton.jit
def _scale(largest, side: Side, cut: Cut, at: Place, head, SPEC: tl.constexpr):
    """The block's scale, from its largest magnitude; written where it is the block's own."""
    if SPEC.given:
        return tl.load(side.scales + at.sequence * cut.heads + head)
    else:
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
def _code(x):
    """x as a byte of float8_e4m3fn in an int32: to nearest, ties to even, saturated; NaN stays.

    By integers: GPUs before sm_89 have no instruction for it, and Triton's interpreter cuts off.
    """
    y = tl.minimum(tl.abs(x), LARGEST)
    bits = y.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9; adding 2^23 rounds to an integer.
    small = (y * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(y < 0.015625, small, normal)
    code = tl.where(x < 0, code | 0x80, code)
    return tl.where(x != x, NAN_CODE, code)


@triton.jit
def _words(x, divisor, SPEC: tl.constexpr):
    """Four parts, divided and in float8, as words; the first part is the lowest byte."""
    a, b, c, d = x
    if SPEC.native:
        inverse = 1.0 / divisor
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
            "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,r,r,r,r", [a * inverse, b * inverse, c * inverse, d * inverse], dtype=tl.int32,
            is_pure=True, pack=1)  # fmt: skip
    else:
        return _joined((_code(a / divisor), _code(b / divisor), _code(c / divisor),
                        _code(d / divisor)))  # fmt: skip


@triton.jit
def _joined(bytes):
    """Four parts of bytes in int32 as words."""
    a, b, c, d = bytes
    return a | (b << 8) | (c << 16) | (d << 24)


@triton.jit
def _store_rows(
    words, side: Side, cut: Cut, at: Place, head, rows, DIM: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    columns = tl.arange(0, WIDTH // 4)[None, :]
    row = (at.start + rows).to(tl.int64)
    if cut.cu_seqlens is None:
        row += tl.cast(at.sequence, tl.int64) * cut.length
    row = (row * cut.heads + head)[:, None]
    inside = (rows < at.length)[:, None]
    if DIM != WIDTH:
        inside = inside & (4 * columns < DIM)
    if DIM % 4 == 0:
        # As words from the start: Triton does not see that bytes 4 apart are words in a row.
        start = side.codes.to(tl.pointer_type(tl.int32))
        tl.store(start + row * (DIM // 4) + columns, words, mask=inside)
    else:
        for i in tl.static_range(4):
            byte = ((words >> (8 * i)) & 0xFF).to(tl.uint8)
            place = row * DIM + 4 * columns + i
            tl.store(side.codes + place, byte, mask=inside & (4 * columns + i < DIM))


@triton.jit
def _rows(side: Side, at: Place, head, rows, shift, cos, sin, matrix, SPEC: tl.constexpr):
    """Rows of q or k as they are to be quantised, in four parts."""
    WIDTH: tl.constexpr = SPEC.width
    columns = tl.arange(0, WIDTH)
    holds = rows < at.used
    pointers = _pointers(side, at, head, rows, SPEC.vector)
    inside = holds[:, None] & (columns < SPEC.dim)[None, :]
    x = tl.load(pointers[:, None] + columns[None, :], mask=inside, other=0)
    if SPEC.half > 0:
        x = _rotated(x, pointers, holds, rows + shift, cos, sin, SPEC)
    if SPEC.raw:
        return _in_four(x.to(tl.int32))
    elif SPEC.hadamard:
        return _transformed(x, _transform(matrix, SPEC), SPEC)
    else:
        return _in_four(x.to(tl.float32))


@triton.jit
def _finish_rows(
    x, spoilt, is_spoilt, side: Side, cut: Cut, at: Place, head, rows, SPEC: tl.constexpr
):  # fmt: skip
    """Quantises rows of q or k; NaN where `spoilt`, if `is_spoilt`, or not finite."""
    if SPEC.raw:
        words = tl.where(spoilt[:, None] | _spoilt(x, True)[:, None], 0x01010101 * NAN_CODE,
                         _joined(x))  # fmt: skip
    else:
        top = _top(x)
        if (top < INFINITE) & (is_spoilt == 0):
            words = _words(x, _scale(_magnitude(top), side, cut, at, head, SPEC), SPEC)
        else:
            spoilt = spoilt | _spoilt(x, False)
            largest = tl.max(tl.where(spoilt, 0.0, _largest(x)), 0)
            scale = _scale(largest, side, cut, at, head, SPEC)
            words = _words(x, tl.where(spoilt, float("nan"), scale)[:, None], SPEC)
    if not SPEC.only_largest:
        _store_rows(words, side, cut, at, head, rows, SPEC.dim, SPEC.width)


@triton.jit
def quantise_queries(
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
    x = _rows(q, at, head, rows, seqlen_k - at.length, cos, sin, matrix, SPEC)
    _finish_rows(x, tl.full([BLOCK_Q], 0, tl.int1), 0, q, cut, at, head, rows, SPEC)


@triton.jit
def _store_columns(words, v: Side, cut: Cut, at: Place, head, SPEC: tl.constexpr):
    """V's codes, (BLOCK_K / 4, D_v) words of four keys each, transposed."""
    WIDTH: tl.constexpr = SPEC.width_v
    WORDS: tl.constexpr = BLOCK_K // 4
    dims = tl.arange(0, WIDTH)[:, None]
    row = tl.cast(head, tl.int64)
    if cut.cu_seqlens is None:
        row += tl.cast(at.sequence, tl.int64) * cut.heads
    start = v.codes.to(tl.pointer_type(tl.int32)) + tl.cast(at.block, tl.int64) * WORDS
    pointers = start + (row * SPEC.dim_v + dims) * (tl.cast(cut.blocks, tl.int64) * WORDS)
    pointers += tl.arange(0, WORDS)[None, :]
    if SPEC.dim_v == WIDTH:
        tl.store(pointers, tl.trans(words))
    else:
        tl.store(pointers, tl.trans(words), mask=dims < SPEC.dim_v)


@triton.jit
def _values(v: Side, at: Place, head, PART: tl.constexpr, SPEC: tl.constexpr):
    """Values of the keys in V's columns PART, PART + 4, ...: (BLOCK_K / 4, D_v)."""
    WIDTH: tl.constexpr = SPEC.width_v
    i = tl.arange(0, BLOCK_K // 4)
    # Of 16, column 4t + 2a + c holds key 8a + 2t + c.
    rows = at.first + i // 4 * 16 + i % 4 * 2 + (PART // 2 * 8 + PART % 2)
    dims = tl.arange(0, WIDTH)
    inside = (rows < at.used)[:, None] & (dims < SPEC.dim_v)[None, :]
    pointers = _pointers(v, at, head, rows, SPEC.vector)
    x = tl.load(pointers[:, None] + dims[None, :], mask=inside, other=0)
    return x.to(tl.int32) if SPEC.raw else x.to(tl.float32)


@triton.jit
def _sound(x, RAW: tl.constexpr):
    """Values with 0 where they are not finite, and in which rows that is."""
    finite = _is_finite(x, RAW)
    return tl.where(finite, x, 0), tl.max((~finite).to(tl.int32), 1)


@triton.jit
def _sound_in_four(values, RAW: tl.constexpr):
    """The same of four parts; rows (BLOCK_K,) in the order of V's columns."""
    a, b, c, d = values
    a, spoilt_0 = _sound(a, RAW)
    b, spoilt_1 = _sound(b, RAW)
    c, spoilt_2 = _sound(c, RAW)
    d, spoilt_3 = _sound(d, RAW)
    spoilt = tl.join(tl.join(spoilt_0, spoilt_2), tl.join(spoilt_1, spoilt_3))
    return (a, b, c, d), tl.reshape(spoilt, [BLOCK_K]) != 0


@triton.jit
def quantise_keys(index, head, k: Side, v: Side, cut: Cut, cos, sin, matrix, SPEC: tl.constexpr):
    at = _place(index, cut, BLOCK_K)
    a = _values(v, at, head, 0, SPEC)
    b = _values(v, at, head, 1, SPEC)
    c = _values(v, at, head, 2, SPEC)
    d = _values(v, at, head, 3, SPEC)
    spoilt = tl.full([BLOCK_K], 0, tl.int1)
    is_spoilt = 0
    if SPEC.raw:
        values, spoilt = _sound_in_four((a, b, c, d), True)
        words = _joined(values)
    else:
        top = _top((a, b, c, d))
        if top >= INFINITE:
            values, spoilt = _sound_in_four((a, b, c, d), False)
            a, b, c, d = values
            top = _top(values)
            is_spoilt = 1
        words = _words((a, b, c, d), _scale(_magnitude(top), v, cut, at, head, SPEC), SPEC)
    if not SPEC.only_largest:
        _store_columns(words, v, cut, at, head, SPEC)

    # Keys in the order of V's columns, as what their values spoil: 4 i + PART.
    column = tl.arange(0, BLOCK_K)
    c = column % 16
    rows = at.first + column - c + (c // 2) % 2 * 8 + c // 4 * 2 + c % 2
    x = _rows(k, at, head, rows, 0, cos, sin, matrix, SPEC)
    _finish_rows(x, spoilt, is_spoilt, k, cut, at, head, rows, SPEC)
