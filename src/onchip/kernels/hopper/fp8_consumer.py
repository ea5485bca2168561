"""A consumer of the Hopper float8 forward: a warpgroup that computes 64 rows of every tile.

As `consumer.py`, with six differences. S is multiplied by its blocks' scales, so that a row's
base, which stands in for its maximum, is a base 2 logit. P is rounded to float8, and its words are
what wgmma takes as they are: V's columns are in that order (`fp8_layout`). Row sums are those of
the rounded P, by a product with ones, so that they cost no additions. P V of a K/V tile is summed
from zero, then O = O * factor + P V in float32 ("two-level"): the factor rescales to a new base
and to the units of the tile's V scale at once. O leaves through buffers of its own.

And a step is P V of one tile, then S of the next, then its weights, which run under the products
of the other warpgroups: P V and S are never in flight together, so that their registers are the
same. What that frees takes a third warpgroup (D = 64), or O of D = 256 beside whole tiles of 128
keys. A warp waits where it issues a product while others are queued, so P V is added to O behind S,
and the turn passed before. P V is summed in parts of D_v, each from zero, where a whole one would
need as many registers as O itself (D = 256).

Values are always finite (`quantize_qkv` moves NaN to keys), so nothing needs repair.

Legend: BN columns (keys) of a tile, W number of a warpgroup, n sizes, C code.
"""

from __future__ import annotations

from triton.experimental import gluon

from onchip.kernels.hopper.barriers import (
    pass_turn,
    pass_turn_at_once,
    release,
    release_if,
    wait_for_turn,
)
from onchip.kernels.hopper.consumer import skip_v, tile_number
from onchip.kernels.hopper.fp8_walk import (
    Scales,
    Tiles,
    Walk,
    denominators,
    factors_at,
    first_walk,
    one_of,
    open_tile,
    phase_of,
    row_sums,
    scales_at,
    scores,
    slot_of,
    under,
)
from onchip.kernels.hopper.fp8_weights import operand, quotient, times, weights
from onchip.kernels.hopper.gluon_names import (
    fence_async_shared,
    gl,
    mbarrier,
    tma,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from onchip.kernels.hopper.logits import logits, masked
from onchip.kernels.hopper.shared import Outputs, place_of, plane
from onchip.kernels.hopper.softmax import Terms, slope_of, unit_of
from onchip.kernels.hopper.tiles import (
    Lengths,
    Sizes,
    View,
    num_before_the_left,
    num_cut_on_the_right,
    start_of_keys,
)


@gluon.jit
def _no_output(C: gl.constexpr):
    """O = 0 in its parts."""
    WIDTH: gl.constexpr = C.width_v // C.parts
    PARTS: gl.constexpr = C.parts
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    acc = ()
    for _ in gl.static_range(PARTS):
        acc += (gl.zeros([64, WIDTH], gl.float32, LAYOUT),)
    return acc


@gluon.jit
def _part(p, acc, v, PART: gl.constexpr, C: gl.constexpr):
    """Issues P V of one part of D_v: from zero, or on top of O."""
    WIDTH: gl.constexpr = C.width_v // C.parts
    columns = v.slice(PART * WIDTH, WIDTH, 0).permute((1, 0))
    if C.two_level:
        return warpgroup_mma(p, columns, gl.zeros_like(acc), use_acc=False, is_async=True)
    else:
        return warpgroup_mma(p, columns, acc, is_async=True)


@gluon.jit
def _operands(walk: Walk, count, at: Tiles, C: gl.constexpr):
    """P, and V tile `count`."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, walk.acc[0].type.layout, 4)
    return operand(walk.p, P_LAYOUT), plane(at.v.index(slot_of(count, C)), C.width_v, C.block_n)


@gluon.jit
def _product(walk: Walk, count, at: Tiles, C: gl.constexpr):
    """P V of V tile `count` as a whole, with one level O is in it; and row sums, under way.

    Their product, which is short, fills the time until S is issued.
    """
    p, v = _operands(walk, count, at, C)
    acc = walk.acc[0]
    if not C.two_level:
        acc = times(acc, walk.factor)
    product = _part(p, acc, v, 0, C)
    sums = row_sums(p, at)
    return warpgroup_mma_wait(1, deps=[product]), sums


@gluon.jit
def _whole(walk: Walk, product, C: gl.constexpr):
    """O with a `_product`."""
    if C.two_level:
        return (times(walk.acc[0], walk.factor) + product,)
    else:
        return (product,)


@gluon.jit
def _summed(walk: Walk, count, at: Tiles, C: gl.constexpr):
    """O in its parts, with P V of V tile `count`; and the row sums."""
    PARTS: gl.constexpr = C.parts
    p, v = _operands(walk, count, at, C)
    sums = row_sums(p, at)
    acc = ()
    for i in gl.static_range(PARTS):
        if C.two_level:
            product = _part(p, walk.acc[i], v, i, C)
            if i == 0:
                product, sums = warpgroup_mma_wait(0, deps=[product, sums])
            else:
                # The compiler would add all parts behind the last: each wait takes the sum before.
                product, before = warpgroup_mma_wait(0, deps=[product, acc[i - 1]])
                acc = acc[:-1] + (before,)
            acc += (times(walk.acc[i], walk.factor) + product,)
        else:
            product = _part(p, times(walk.acc[i], walk.factor), v, i, C)
            if i == 0:
                product, sums = warpgroup_mma_wait(0, deps=[product, sums])
            else:
                product = warpgroup_mma_wait(0, deps=[product])
            acc += (product,)
    if C.two_level:
        acc = acc[:-1] + (warpgroup_mma_wait(0, deps=[acc[PARTS - 1]]),)
    return acc, walk.l + one_of(sums, walk.l)


@gluon.jit
def _step(
    i, walk: Walk, count, key, view: View, terms: Terms, factors, scales: Scales,
    at: Tiles, n: Sizes, MASKED: gl.constexpr, W: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """One K/V tile further."""
    k_scale, unit_v = scales_at(key, factors, scales)
    # Together: the compiler puts a barrier before a wait that was waited for before.
    mbarrier.wait(at.k_full.index(slot_of(count + 1, C)), phase_of(count + 1, C))
    mbarrier.wait(at.v_full.index(slot_of(count, C)), phase_of(count, C))
    wait_for_turn(W, C)
    if C.parts == 1:
        product, sums = _product(walk, count, at, C)
        release(count, 1, C)
        s = scores(i, count + 1, at, C)
        pass_turn_at_once((W + 1) % C.warpgroups, count, C)
        acc = _whole(walk, product, C)  # under S
    else:
        acc, l = _summed(walk, count, at, C)
        release(count, 1, C)
        s = scores(i, count + 1, at, C)
        pass_turn((W + 1) % C.warpgroups, C)
    # Behind the products, which would wait for the scales to be loaded.
    terms = under(terms, factors, k_scale)
    unit = unit_of(terms, C)
    ratio = quotient(walk.unit, unit_v)
    if C.parts == 1:
        s, sums = warpgroup_mma_wait(0, deps=[s, sums])
        l = walk.l + one_of(sums, walk.l)
    else:
        s = warpgroup_mma_wait(0, deps=[s])
    release(count + 1, 0, C)
    s = logits(s, key, view, terms, C)
    if MASKED:
        s = masked(s, key, view, n, False, C)
    words, base, alpha = weights(s, unit, walk.base)
    return Walk(words, acc, alpha * ratio, base, l * alpha, unit_v)


@gluon.jit
def _store_part(out, PART: gl.constexpr, o, view: View, to: Outputs, n: Sizes, C: gl.constexpr):
    WIDTH: gl.constexpr = C.width_v // C.parts
    LAYOUT: gl.constexpr = out.type.layout
    tile = view.tile
    whole = view.row < n.seqlen_q
    if C.packed_q:
        whole = view.row + 64 <= tile.seqlen_q
    if whole:
        tma.store_wait(0)  # what this buffer held before has left
        plane(o, 64, WIDTH).store(out)
        fence_async_shared()
        place = [place_of(tile, C.packed_q), tile.head, tile.q_start + view.row, PART * WIDTH]
        tma_store(to.tiles, place, o)
    else:
        if C.packed_q:
            index = view.row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
            columns = PART * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
            start = (tile.q_start + index).to(gl.int64) * n.num_heads + tile.head
            inside = (index < tile.seqlen_q)[:, None] & (columns < C.dim_v)
            gl.store(to.out + start[:, None] * C.dim_v + columns, out, mask=inside)


@gluon.jit
def _finish(walk: Walk, o, view: View, terms: Terms, to: Outputs, n: Sizes, C: gl.constexpr):
    """Divides and stores a tile's rows; a row without keys gives 0."""
    PARTS: gl.constexpr = C.parts
    ROWS: gl.constexpr = gl.SliceLayout(1, walk.acc[0].type.layout)
    inverse = denominators(walk.base, walk.l, view, terms, to, n, C) * walk.unit
    inverse = gl.convert_layout(inverse, ROWS)[:, None]
    for i in gl.static_range(PARTS):
        _store_part((walk.acc[i] * inverse).to(o.dtype), i, o, view, to, n, C)


@gluon.jit
def fp8_consumer(
    W: gl.constexpr, lengths: Lengths, to: Outputs, terms: Terms, scales: Scales, at: Tiles,
    n: Sizes, C: gl.constexpr,
):  # fmt: skip
    """64 rows of every tile of queries that the CTA draws."""
    BN: gl.constexpr = C.block_n
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    NEXT: gl.constexpr = (W + 1) % C.warpgroups
    rows = gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))

    done = 0  # tiles of queries
    if C.warpgroups == W + 1:
        pass_turn(0, C)
    more, tile = tile_number(done, lengths, at, n, C)
    view = View(tile, tile.row + W * 64, rows, slope_of(terms, tile, n, C))
    factors = factors_at(tile, view.row, scales, lengths, n, C)
    s, count, skipped, end = open_tile(tile, more, 0, done, at, n, W, C)
    pass_turn(NEXT, C)
    s = warpgroup_mma_wait(0, deps=[s])
    release_if(more, count, 0, C)
    skip_v(skipped, 0, at, C)
    walk = first_walk(s, _no_output(C), end, view, terms, factors, scales, n, C)

    # `count` is the K/V tile whose P is ready and whose V is still to come.
    while more:
        i = (done % C.q_buffers) * C.warpgroups + W
        start = start_of_keys(view.tile.row, view.tile, n, C)
        cut = gl.minimum(num_cut_on_the_right(view.row, end, view.tile, n, C), end - start)
        full = gl.maximum(num_before_the_left(view.row + 64, end, view.tile, n, C), cut)
        if C.cuts_two:
            for j in range(1, cut):
                walk = _step(i, walk, count, (end - 1 - j) * BN, view, terms, factors,
                             scales, at, n, True, W, C)  # fmt: skip
                count += 1
        for j in range(cut, full):
            walk = _step(i, walk, count, (end - 1 - j) * BN, view, terms, factors, scales,
                         at, n, False, W, C)  # fmt: skip
            count += 1
        if C.has_left:
            for j in range(full, end - start):
                walk = _step(i, walk, count, (end - 1 - j) * BN, view, terms, factors,
                             scales, at, n, True, W, C)  # fmt: skip
                count += 1

        # The last P V of this tile, then the first S = Q K^T of the next, under which O leaves.
        mbarrier.arrive(at.q_empty.index(i), count=1)
        mbarrier.wait(at.v_full.index(slot_of(count, C)), phase_of(count, C))
        acc, l = _summed(walk, count, at, C)
        last = Walk(walk.p, acc, walk.factor, walk.base, l, walk.unit)
        done += 1
        more, tile = tile_number(done, lengths, at, n, C)
        following = View(tile, tile.row + W * 64, rows, slope_of(terms, tile, n, C))
        factors = factors_at(tile, following.row, scales, lengths, n, C)
        release_if(more, count, 1, C)
        s, first, skipped, end = open_tile(tile, more, count + 1, done, at, n, W, C)
        pass_turn(NEXT, C)
        _finish(last, at.o.index(W), view, terms, to, n, C)
        s = warpgroup_mma_wait(0, deps=[s])
        release_if(more, first, 0, C)
        skip_v(skipped, count + 1, at, C)
        walk = first_walk(s, _no_output(C), end, following, terms, factors, scales, n, C)
        view = following
        count = first
    tma.store_wait(0)
    if W == 0:
        wait_for_turn(0, C)
