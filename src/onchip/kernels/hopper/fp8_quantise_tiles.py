"""What a CTA of the Hopper quantiser does with a tile of 128 rows in shared memory.

Rows of q and k are multiplied by the transform's blocks of 64 x 64, whose products the Hadamard
matrix of D / 64 then adds in registers. V is transposed by a product: V^T, which wgmma reads from
V's own tile, times a permutation. A product's columns come in the order in which a thread then
stores 16 codes at once.

Largest magnitudes are compared as bits, so that what is not finite is the largest.

Legend: R rows of a tile, D head dimension, C code.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon

from onchip.kernels import fp8_layout
from onchip.kernels.hopper.gluon_names import (
    fence_async_shared,
    gl,
    mbarrier,
    tma_load,
    wait_for_all,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = gl.constexpr(128)  # of a tile: a block of keys, or two of queries
INFINITE = gl.constexpr(0x7F800000)  # as bits
_LARGEST = gl.constexpr(fp8_layout.LARGEST)
_SMALLEST = gl.constexpr(fp8_layout.SMALLEST)


class Sizes(NamedTuple):
    """Run-time numbers."""

    seqlen_q: object
    seqlen_k: object
    blocks_q: object  # of a sequence
    blocks_k: object
    heads: object
    kv_heads: object


class Ring(NamedTuple):
    """Tiles on their way to shared memory: a CTA's tiles of q, then V and K by turns."""

    tiles: object  # (stages, 1, 1, R, D)
    full: object  # mbarriers
    q: object  # descriptors of (B, H or H_kv, S, D)
    k: object
    v: object
    num_q: object  # tiles of q
    num: object  # all tiles


class To(NamedTuple):
    """Where one of q, k and v goes: pointers, the codes' as words of four."""

    codes: object
    scales: object
    gain: object  # what a scale is multiplied by when it is written


@gluon.jit
def place_of(index, heads, tiles):
    """(batch, head, tile) of tile number `index`: heads of the same rows follow one another."""
    rest = index // heads
    return rest // tiles, index % heads, rest % tiles


@gluon.jit
def load(number, ring: Ring, n: Sizes, C: gl.constexpr):
    """Starts to load the CTA's tile number `number`, if there is one."""
    slot = number % C.stages
    full = ring.full.index(slot)
    to = ring.tiles.index(slot)
    if number < ring.num:
        mbarrier.expect(full, ROWS * C.dim * 2)
        first = gl.program_id(0)
        step = gl.num_programs(0)
        if number < ring.num_q:
            index = first + number * step
            batch, head, tile = place_of(index, n.heads, (n.blocks_q + 1) // 2)
            tma_load(ring.q, [batch, head, tile * ROWS, 0], full, to)
        else:
            rest = number - ring.num_q
            batch, head, tile = place_of(first + rest // 2 * step, n.kv_heads, n.blocks_k)
            if rest % 2 == 0:
                tma_load(ring.v, [batch, head, tile * ROWS, 0], full, to)
            else:
                tma_load(ring.k, [batch, head, tile * ROWS, 0], full, to)


@gluon.jit
def loaded(number, ring: Ring, C: gl.constexpr):
    """Tile number `number` (R, D), once it is there."""
    slot = number % C.stages
    mbarrier.wait(ring.full.index(slot), (number // C.stages) & 1)
    return ring.tiles.index(slot).reshape([ROWS, C.dim])


@gluon.jit
def refill(number, ring: Ring, n: Sizes, C: gl.constexpr):
    """Loads the tile that takes tile number `number`'s slot, which all warps have read."""
    wait_for_all()
    load(number + C.stages, ring, n, C)


@gluon.jit
def transformed(x, factors, C: gl.constexpr):
    """A tile's rows times the transform, in parts of 64 features."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.warps, 1], [16, 64, 16])
    PARTS: gl.constexpr = C.dim // 64
    parts = ()
    for i in gl.static_range(PARTS):
        zeros = gl.zeros([ROWS, 64], gl.float32, LAYOUT)
        columns = x.slice(64 * i, 64, 1)
        parts += (warpgroup_mma(columns, factors.index(i), zeros, use_acc=False, is_async=True),)
    parts = warpgroup_mma_wait(0, deps=parts)
    if PARTS == 1:
        return (parts,)
    elif PARTS == 2:
        a, b = parts
        return a + b, a - b
    else:
        a, b, c, d = parts
        e, f, g, h = a + b, a - b, c + d, c - d
        return e + g, f + h, e - g, f - h


@gluon.jit
def transposed(x, factors, C: gl.constexpr):
    """V^T (D, 64) of a tile's first and last keys, in the order of V's columns."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.warps, 1], [16, 64, 16])
    DIM: gl.constexpr = C.dim
    PERMUTATION: gl.constexpr = C.dim // 64
    parts = ()
    for i in gl.static_range(2):
        zeros = gl.zeros([DIM, 64], gl.float32, LAYOUT)
        keys = x.slice(64 * i, 64, 0).permute((1, 0))
        parts += (warpgroup_mma(keys, factors.index(PERMUTATION), zeros, use_acc=False,
                                is_async=True),)  # fmt: skip
    return warpgroup_mma_wait(0, deps=parts)


@gluon.jit
def row_tops(parts):
    """Bits of the largest magnitude of each row in some parts."""
    NUMBER: gl.constexpr = len(parts)
    top = gl.abs(parts[0]).to(gl.int32, bitcast=True)
    for i in gl.static_range(1, NUMBER):
        top = gl.maximum(top, gl.abs(parts[i]).to(gl.int32, bitcast=True))
    return gl.max(top, 1)


@gluon.jit
def scale_of(bits):
    """The scale of a block whose largest magnitude has these bits."""
    largest = bits.to(gl.float32, bitcast=True)
    return gl.where(largest > 0, gl.maximum(largest, _SMALLEST) / _LARGEST, 1.0)


@gluon.jit
def sound(x, C: gl.constexpr):
    """Puts 0 where a tile of V is not finite; returns which of its rows are (R,)."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [C.warps, 1], [1, 0])
    values = x.load(LAYOUT)
    finite = gl.abs(values.to(gl.float32)) < float("inf")
    x.store(gl.where(finite, values, 0.0).to(values.dtype))
    fence_async_shared()
    wait_for_all()
    return gl.max((~finite).to(gl.int32), 1)


@gluon.jit
def _words(x):
    """A product's columns (R, 64) in float8: words (R, 16), four of a thread next to another.

    A thread has columns 8i + 2t + e; they are columns 16t + 2i + e of the result.
    """
    R: gl.constexpr = x.shape[0]
    x = gl.permute(gl.reshape(x, [R, 8, 4, 2]), (0, 2, 1, 3))
    even, odd = gl.split(gl.reshape(x, [R, 16, 2, 2]))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
        "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
        "=r,r,r,r,r", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1)  # fmt: skip


@gluon.constexpr_function
def _by_fours(rows, warps):
    """Layout of words (rows, 16): a thread's four lie in registers that follow one another."""
    between = 16 * warps  # rows of all warps
    repeats = [[between << i, 0] for i in range(8) if between << i < rows]
    registers = [[0, 1], [0, 2], [8, 0], *repeats]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    in_warps = [[16 << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, in_warps, [], [rows, 16])


@gluon.jit
def store(x, start, stride, count, C: gl.constexpr):
    """Stores (R, 64) as codes in the rows below `count`; pointer and stride in words."""
    LAYOUT: gl.constexpr = _by_fours(x.shape[0], C.warps)
    words = gl.convert_layout(_words(x), LAYOUT, assert_trivial=True)
    row = gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))
    place = (row.to(gl.int64) * stride)[:, None] + column[None, :]
    gl.store(start + place, words, mask=(row < count)[:, None])


@gluon.jit
def store_rows(
    parts, spoilt, is_spoilt, to: To, start, stride, count, block, num_blocks,
    GROUPS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Stores rows of q (two blocks) or k (one), and their scales.

    Args:
        parts: of 64 features.
        spoilt: rows to become NaN, where `is_spoilt`; so do those that are not finite.
        is_spoilt: whether there is one.
        to: where they go.
        start: place of the first row's codes.
        stride: of rows.
        count: rows of the tile that exist.
        block: place of the first block's scale.
        num_blocks: blocks of the tile that exist.
        GROUPS: blocks of a tile.
        C: code.
    """
    PARTS: gl.constexpr = C.dim // 64
    SIZE: gl.constexpr = ROWS // GROUPS
    rows = row_tops(parts)
    by_block = gl.reshape(rows, [GROUPS, SIZE])
    tops = gl.max(by_block, 1)
    is_spoilt = is_spoilt | (gl.max(tops, 0) >= INFINITE)
    if is_spoilt:
        spoilt = spoilt | (rows >= INFINITE)
        tops = gl.max(gl.reshape(gl.where(spoilt, 0, rows), [GROUPS, SIZE]), 1)
    scale = scale_of(tops)
    at = gl.arange(0, GROUPS, scale.type.layout)
    gl.store(to.scales + block + at, scale * to.gain, mask=at < num_blocks)
    inverse = gl.expand_dims(1.0 / scale, 1) + gl.zeros_like(by_block).to(gl.float32)
    inverse = gl.convert_layout(gl.reshape(inverse, [ROWS]), rows.type.layout)
    if is_spoilt:
        inverse = gl.where(spoilt, float("nan"), inverse)
    for i in gl.static_range(PARTS):
        store(parts[i] * inverse[:, None], to.codes + start + 16 * i, stride, count, C)
