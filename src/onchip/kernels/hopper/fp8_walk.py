"""What a consumer of the Hopper float8 forward carries from K/V tile to K/V tile, and its ends.

Scales of blocks, S, row sums, a tile's first step and its denominators; for `fp8_consumer.py`.

Legend: B batch, H query heads, H_kv key and value heads, N blocks, BN columns (keys) of a tile,
W number of a warpgroup, n sizes, C code.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon

from onchip.kernels import fp8_layout
from onchip.kernels.hopper.barriers import wait_for_turn
from onchip.kernels.hopper.consumer import skip_k
from onchip.kernels.hopper.fp8_producer import first_block
from onchip.kernels.hopper.fp8_weights import (
    first_weights,
)
from onchip.kernels.hopper.gluon_names import (
    gl,
    mbarrier,
    warpgroup_mma,
)
from onchip.kernels.hopper.logits import logits, masked
from onchip.kernels.hopper.results import store_lse
from onchip.kernels.hopper.shared import Outputs, plane
from onchip.kernels.hopper.softmax import Terms, unit_of, with_sink
from onchip.kernels.hopper.tiles import (
    Lengths,
    Sizes,
    Tile,
    View,
    end_of_keys,
)

BLOCK_Q = gl.constexpr(fp8_layout.BLOCK_Q)
BLOCK_K = gl.constexpr(fp8_layout.BLOCK_K)
ONES = gl.constexpr(8)  # rows of the tile of ones: the fewest that wgmma multiplies with


@gluon.jit
def slot_of(count, C: gl.constexpr):
    """Where K/V tile number `count` lies; a division by a power of two costs signs, bits do not."""
    if C.stages == 2:
        return count & 1
    else:
        return count % C.stages


@gluon.jit
def phase_of(count, C: gl.constexpr):
    """The phase of its barriers."""
    if C.stages == 2:
        return (count >> 1) & 1
    else:
        return (count // C.stages) & 1


class Scales(NamedTuple):
    """Scales of blocks (B, H or H_kv, N): pointers and strides."""

    q: object
    k: object
    v: object
    q_strides: object  # of sequence, head and block
    k_strides: object
    v_strides: object


class Tiles(NamedTuple):
    """Shared memory: as `shared.Shared`, and a tile of ones, which sums weights."""

    q: object  # (q_buffers * warpgroups, 1, 1, 64, D)
    k: object  # (stages, 1, 1, BN, D)
    v: object  # (stages, 1, 1, D_v, BN)
    o: object  # (warpgroups, 1, 1, 64, D_v / parts)
    q_full: object
    q_empty: object
    k_full: object
    v_full: object
    notes: object
    ones: object  # (8, BN)


class Factors(NamedTuple):
    """One warpgroup's rows of a tile: their scale, and where its keys' scales begin."""

    q: object
    k: object  # place of the sequence's first block
    v: object


class Walk(NamedTuple):
    """What a consumer carries from K/V tile to K/V tile."""

    p: object  # words of the last S's weights
    acc: object  # O in its parts of D_v, float32, without the last P V and its factor
    factor: object  # (64, 4) what acc must be multiplied by before the last P V is added
    base: object  # (64, 4) the logit of P = 1
    l: object  # (64, 4) running sums of P but for the last
    unit: object  # V's scale in the last tile


@gluon.jit
def factors_at(tile: Tile, row, scales: Scales, lengths: Lengths, n: Sizes, C: gl.constexpr):
    k_start = 0
    if C.packed_k:
        k_start = gl.load(lengths.cu_seqlens_k + tile.batch)
    block_q = first_block(tile.q_start, tile, BLOCK_Q, C.packed_q) + row // BLOCK_Q
    block_k = first_block(k_start, tile, BLOCK_K, C.packed_k)
    head = tile.head // n.group
    q, k, v = scales.q_strides, scales.k_strides, scales.v_strides
    # A tile may begin past its sequence's end: that block may not be there.
    inside = row < tile.seqlen_q
    place = tile.batch * q[0] + tile.head * q[1] + gl.where(inside, block_q, 0) * q[2]
    return Factors(
        gl.load(scales.q + place),
        tile.batch * k[0] + head * k[1] + block_k * k[2],
        tile.batch * v[0] + head * v[1] + block_k * v[2],
    )


@gluon.jit
def scales_at(key, factors: Factors, scales: Scales):
    """Scales of K and of V in the K/V tile that begins at `key`."""
    block = key // BLOCK_K
    k = gl.load(scales.k + (factors.k + block * scales.k_strides[2]))
    v = gl.load(scales.v + (factors.v + block * scales.v_strides[2]))
    return k, v


@gluon.jit
def scores(i, count, at: Tiles, C: gl.constexpr):
    """Issues S = Q K^T of Q's buffer `i` and K tile `count`."""
    BN: gl.constexpr = C.block_n
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    q = plane(at.q.index(i), 64, C.width)
    k = plane(at.k.index(slot_of(count, C)), C.block_n, C.width)
    zeros = gl.zeros([64, BN], gl.float32, S_LAYOUT)
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def row_sums(p, at: Tiles):
    """Issues P times ones, (64, ONES)."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ONES, 32])
    p = gl.convert_layout(p, gl.DotOperandLayout(0, LAYOUT, 4), assert_trivial=True)
    zeros = gl.zeros([64, ONES], gl.float32, LAYOUT)
    return warpgroup_mma(p, at.ones.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def one_of(sums, like):
    """Row sums (64, ONES), all columns alike, as (64, 4): what each of a row's threads holds."""
    first, _ = gl.split(gl.reshape(sums, [64, ONES // 2, 2]))
    return gl.convert_layout(first, like.type.layout, assert_trivial=True)


@gluon.jit
def under(terms: Terms, factors: Factors, k_scale):
    """The terms of a tile whose S is to be multiplied by the scales of Q and K."""
    scale = gl.maximum(
        factors.q * k_scale, 1e-37
    )  # -inf times 0 is NaN, and hidden logits are -inf
    return Terms(terms.scale * scale, terms.softcap, terms.slopes, terms.sinks)


@gluon.jit
def open_tile(tile: Tile, more, count, done, at: Tiles, n: Sizes, W: gl.constexpr, C: gl.constexpr):
    """Issues a tile's first S, of K tile `count` or the one behind it.

    Returns:
        S, the K tile's number, how many K/V tiles were passed over, and `end_of_keys`.
    """
    SKIPS: gl.constexpr = C.skips and C.warpgroups > W + 1
    end = end_of_keys(tile.row + W * 64 + 64, tile, n, C)
    skipped = 0
    if SKIPS:
        skipped = gl.where(more, end_of_keys(tile.row + C.block_m, tile, n, C) - end, 0)
        skip_k(skipped, count, at, W, C)
        count += skipped
    i = (done % C.q_buffers) * C.warpgroups + W
    mbarrier.wait(at.q_full.index(i), (done // C.q_buffers) & 1, pred=more)
    mbarrier.wait(at.k_full.index(slot_of(count, C)), phase_of(count, C), pred=more)
    wait_for_turn(W, C)
    return scores(i, count, at, C), count, skipped, end


@gluon.jit
def first_walk(
    s, acc, end, view: View, terms: Terms, factors: Factors, scales: Scales, n: Sizes,
    C: gl.constexpr,
):  # fmt: skip
    """A tile's walk after its first S, which the right edge crosses; `acc` is O = 0."""
    key = (end - 1) * C.block_n
    k_scale, unit_v = scales_at(key, factors, scales)
    terms = under(terms, factors, k_scale)
    s = masked(logits(s, key, view, terms, C), key, view, n, True, C)
    words, base = first_weights(s, unit_of(terms, C))
    none = gl.zeros_like(base)
    return Walk(words, acc, none, base, none, unit_v)


@gluon.jit
def denominators(base, l, view: View, terms: Terms, to: Outputs, n: Sizes, C: gl.constexpr):
    """Stores the LSE; a row without keys has -inf.

    Returns:
        What O is to be multiplied by, but for V's scale, (64,).
    """
    ROWS: gl.constexpr = view.rows.type.layout
    top = gl.convert_layout(gl.max(base, 1), ROWS)
    l = gl.convert_layout(gl.max(l, 1), ROWS)
    top, l, factor = with_sink(top, l, view, terms, C)
    store_lse(top, l, view, to, n, C)
    inverse = factor / l
    if C.may_be_empty:
        inverse = gl.where(l == 0.0, 0.0, inverse)
    return inverse
