"""A consumer of the Hopper float8 forward: a warpgroup that computes 64 rows of every tile.

As `consumer.py`, with five differences. S is multiplied by its blocks' scales, so that a row's
base, which stands in for its maximum, is a base 2 logit. P is rounded to float8, and its words are
what wgmma takes as they are: V's columns are in that order (`fp8_layout`). Row sums are those of
the rounded P, by a product with ones, so that they cost no additions. P V of a K/V tile is summed
from zero, then O = O * factor + P V in float32 ("two-level"): the factor rescales to a new base
and to the units of the tile's V scale at once. O leaves through buffers of its own.

The weights of half of a tile's keys are made while P V of the tile before is under way: its first
operand is in registers, so that half of its time passes until it is issued at all.

Values are always finite (`quantize_qkv` moves NaN to keys), so nothing needs repair.

Legend: BN columns (keys) of a tile, W number of a warpgroup, n sizes, C code.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon

from onchip.kernels import fp8_layout
from onchip.kernels.hopper.barriers import pass_turn, release, release_if, wait_for_turn
from onchip.kernels.hopper.consumer import (
    skip_k,
    skip_v,
    store_lse,
    store_rows,
    tile_number,
)
from onchip.kernels.hopper.fp8_producer import first_block
from onchip.kernels.hopper.fp8_weights import (
    first_weights,
    keys_of_words,
    lower_weights,
    operand,
    quotient,
    times,
    upper_weights,
)
from onchip.kernels.hopper.gluon_names import (
    fence_async_shared,
    gl,
    mbarrier,
    tma,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from onchip.kernels.hopper.shared import Outputs, place_of, plane
from onchip.kernels.hopper.softmax import Terms, logits, slope_of, unit_of, with_sink
from onchip.kernels.hopper.tiles import (
    Lengths,
    Sizes,
    Tile,
    View,
    end_of_keys,
    masked,
    num_before_the_left,
    num_cut_on_the_right,
    start_of_keys,
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
    acc: object  # (64, D_v) float32, without the last P V and its factor
    factor: object  # (64, 4) what acc must be multiplied by before the last P V is added
    base: object  # (64, 4) the logit of P = 1
    l: object  # (64, ONES) running sums of P but for the last
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
    """Scale of S and of V in the K/V tile that begins at `key`."""
    block = key // BLOCK_K
    k = gl.load(scales.k + (factors.k + block * scales.k_strides[2]))
    v = gl.load(scales.v + (factors.v + block * scales.v_strides[2]))
    # -inf times 0 is NaN, and hidden logits are -inf.
    return gl.maximum(factors.q * k, 1e-37), v


@gluon.jit
def _scores(i, count, more, at: Tiles, W: gl.constexpr, C: gl.constexpr):
    """Issues S = Q K^T of Q's buffer `i` and K tile `count`, once that is there."""
    BN: gl.constexpr = C.block_n
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    slot = slot_of(count, C)
    mbarrier.wait(at.k_full.index(slot), phase_of(count, C), pred=more)
    wait_for_turn(W, C)
    q = plane(at.q.index(i), 64, C.width)
    k = plane(at.k.index(slot), C.block_n, C.width)
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
def _product(p, walk: Walk, count, at: Tiles, C: gl.constexpr):
    """Issues P V of V tile `count`, once it is there: from zero, or on top of O."""
    slot = slot_of(count, C)
    mbarrier.wait(at.v_full.index(slot), phase_of(count, C))
    v = plane(at.v.index(slot), C.width_v, C.block_n).permute((1, 0))
    if C.two_level:
        zeros = gl.zeros_like(walk.acc)
        return warpgroup_mma(p, v, zeros, use_acc=False, is_async=True)
    else:
        return warpgroup_mma(p, v, walk.acc, is_async=True)


@gluon.jit
def _summed(walk: Walk, product, C: gl.constexpr):
    """O with the product; with one level O is in it."""
    if C.two_level:
        return times(walk.acc, walk.factor) + product
    else:
        return product


@gluon.jit
def under(terms: Terms, scale):
    """The terms of a tile whose S is to be multiplied by a further scale."""
    return Terms(terms.scale * scale, terms.softcap, terms.slopes, terms.sinks)


@gluon.jit
def _step(
    i, walk: Walk, count, key, view: View, terms: Terms, factors: Factors, scales: Scales,
    at: Tiles, n: Sizes, MASKED: gl.constexpr, W: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """One K/V tile further, with Q's buffer `i`."""
    scale, unit_v = scales_at(key, factors, scales)
    terms = under(terms, scale)
    unit = unit_of(terms, C)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, walk.acc.type.layout, 4)
    p = operand(walk.p, P_LAYOUT)
    s = _scores(i, count + 1, True, at, W, C)
    sums = row_sums(p, at)
    product = _product(p, walk, count, at, C)
    pass_turn((W + 1) % C.warpgroups, C)
    s = warpgroup_mma_wait(2, deps=[s])
    s = logits(s, key, view, terms, C)
    if MASKED:
        s = masked(s, key, view, n, False, C)
    lower, upper = keys_of_words(s)
    first = lower_weights(lower, unit, walk.base)
    # Behind these: a release keeps the wait for O below what stands above it.
    release(count + 1, 0, C)
    sums, product = warpgroup_mma_wait(0, deps=[sums, product])
    release(count, 1, C)
    acc = _summed(walk, product, C)
    words, base, alpha = upper_weights(lower, upper, first, unit, walk.base)
    following = alpha * quotient(walk.unit, unit_v)
    if not C.two_level:
        acc = times(acc, following)
    return Walk(words, acc, following, base, times(walk.l + sums, alpha), unit_v)


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
    return _scores(i, count, more, at, W, C), count, skipped, end


@gluon.jit
def first_walk(
    s, acc, end, view: View, terms: Terms, factors: Factors, scales: Scales, n: Sizes,
    C: gl.constexpr,
):  # fmt: skip
    """A tile's walk after its first S, which the right edge crosses; `acc` is O = 0."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ONES, 32])
    key = (end - 1) * C.block_n
    scale, unit_v = scales_at(key, factors, scales)
    terms = under(terms, scale)
    s = masked(logits(s, key, view, terms, C), key, view, n, True, C)
    words, base = first_weights(s, unit_of(terms, C))
    l = gl.zeros([64, ONES], gl.float32, LAYOUT)
    return Walk(words, acc, gl.zeros_like(base), base, l, unit_v)


@gluon.jit
def denominators(base, l, view: View, terms: Terms, to: Outputs, n: Sizes, C: gl.constexpr):
    """Stores the LSE; a row without keys has -inf.

    Returns:
        What O is to be multiplied by, but for V's scale, (64,).
    """
    ROWS: gl.constexpr = view.rows.type.layout
    top = gl.convert_layout(gl.max(base, 1), ROWS)
    l = gl.convert_layout(gl.max(l, 1), ROWS)
    top, l, factor = with_sink(top, l, view.tile.head, 1.0, terms, C)
    store_lse(top, l, view, to, n, C)
    inverse = factor / l
    if C.may_be_empty:
        inverse = gl.where(l == 0.0, 0.0, inverse)
    return inverse


@gluon.jit
def _finish(walk: Walk, o, view: View, terms: Terms, to: Outputs, n: Sizes, C: gl.constexpr):
    """Divides and stores a tile's rows; a row without keys gives 0."""
    ROWS: gl.constexpr = gl.SliceLayout(1, walk.acc.type.layout)
    inverse = denominators(walk.base, walk.l, view, terms, to, n, C) * walk.unit
    out = (walk.acc * gl.convert_layout(inverse, ROWS)[:, None]).to(o.dtype)
    tile = view.tile
    whole = view.row < n.seqlen_q
    if C.packed_q:
        whole = view.row + 64 <= tile.seqlen_q
    if whole:
        tma.store_wait(0)  # what this buffer held before has left
        plane(o, 64, C.width_v).store(out)
        fence_async_shared()
        place = [place_of(tile, C.packed_q), tile.head, tile.q_start + view.row, 0]
        tma_store(to.tiles, place, o)
    else:
        if C.packed_q:
            store_rows(out, view, to, n, C)


@gluon.jit
def fp8_consumer(
    W: gl.constexpr, lengths: Lengths, to: Outputs, terms: Terms, scales: Scales, at: Tiles,
    n: Sizes, C: gl.constexpr,
):  # fmt: skip
    """64 rows of every tile of queries that the CTA draws."""
    BN: gl.constexpr = C.block_n
    WIDTH_V: gl.constexpr = C.width_v
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH_V, 32])
    NEXT: gl.constexpr = (W + 1) % C.warpgroups
    rows = gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
    columns = gl.arange(0, BN, gl.SliceLayout(0, S_LAYOUT))

    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4)

    done = 0  # tiles of queries
    if C.warpgroups == W + 1:
        pass_turn(0, C)
    more, tile = tile_number(done, lengths, at, n, C)
    view = View(tile, tile.row + W * 64, rows, columns, slope_of(terms, tile, n, C))
    factors = factors_at(tile, view.row, scales, lengths, n, C)
    s, count, skipped, end = open_tile(tile, more, 0, done, at, n, W, C)
    pass_turn(NEXT, C)
    s = warpgroup_mma_wait(0, deps=[s])
    release_if(more, count, 0, C)
    skip_v(skipped, 0, at, C)
    acc = gl.zeros([64, WIDTH_V], gl.float32, O_LAYOUT)
    walk = first_walk(s, acc, end, view, terms, factors, scales, n, C)

    # `count` is the K/V tile whose P is ready and whose V is still to come.
    while more:
        i = (done % C.q_buffers) * C.warpgroups + W
        start = start_of_keys(view.tile.row, view.tile, n, C)
        cut = gl.minimum(num_cut_on_the_right(view.row, end, view.tile, n, C), end - start)
        full = gl.maximum(num_before_the_left(view.row + 64, end, view.tile, n, C), cut)
        if C.cuts_two:
            for j in range(1, cut):
                walk = _step(i, walk, count, (end - 1 - j) * BN, view, terms, factors, scales,
                             at, n, True, W, C)  # fmt: skip
                count += 1
        for j in range(cut, full):
            walk = _step(i, walk, count, (end - 1 - j) * BN, view, terms, factors, scales, at, n,
                         False, W, C)  # fmt: skip
            count += 1
        if C.has_left:
            for j in range(full, end - start):
                walk = _step(i, walk, count, (end - 1 - j) * BN, view, terms, factors, scales,
                             at, n, True, W, C)  # fmt: skip
                count += 1

        # The last P V of this tile and the first S = Q K^T of the next.
        mbarrier.arrive(at.q_empty.index(i), count=1)
        done += 1
        more, tile = tile_number(done, lengths, at, n, C)
        following = View(tile, tile.row + W * 64, rows, columns, slope_of(terms, tile, n, C))
        factors = factors_at(tile, following.row, scales, lengths, n, C)
        p = operand(walk.p, P_LAYOUT)
        s, first, skipped, end = open_tile(tile, more, count + 1, done, at, n, W, C)
        sums = row_sums(p, at)
        product = _product(p, walk, count, at, C)
        pass_turn(NEXT, C)
        # Words of new weights beside a product of old ones would serialise all (C7513).
        s, sums, product = warpgroup_mma_wait(0, deps=[s, sums, product])
        release_if(more, first, 0, C)
        release_if(more, count, 1, C)
        skip_v(skipped, count + 1, at, C)
        acc = _summed(walk, product, C)
        last = Walk(walk.p, acc, walk.factor, walk.base, walk.l + sums, walk.unit)
        acc = gl.zeros([64, WIDTH_V], gl.float32, O_LAYOUT)
        walk = first_walk(s, acc, end, following, terms, factors, scales, n, C)
        _finish(last, at.o.index(W), view, terms, to, n, C)
        view = following
        count = first
    tma.store_wait(0)
    if W == 0:
        wait_for_turn(0, C)
