"""A consumer of the Hopper forward: a warpgroup that computes 64 rows of every tile of queries.

Legend: BN columns (keys) of a tile, W number of a warpgroup, n sizes, C code.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon

from onchip.kernels.hopper.barriers import (
    meet_other_launches,
    pass_turn,
    release,
    release_if,
    settle,
    wait_for_turn,
)
from onchip.kernels.hopper.finish import finish
from onchip.kernels.hopper.gluon_names import (
    gl,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from onchip.kernels.hopper.logits import logits, masked
from onchip.kernels.hopper.shared import Outputs, Shared, plane
from onchip.kernels.hopper.softmax import (
    Terms,
    base_of,
    grown,
    in_each_thread,
    operand,
    packed,
    row_maximum,
    row_sums,
    slope_of,
    unit_of,
    widened,
)
from onchip.kernels.hopper.tiles import (
    Lengths,
    Sizes,
    Tile,
    View,
    anew,
    end_of_keys,
    end_of_tile,
    exists,
    num_before_the_left,
    num_cut_on_the_right,
    number_of,
    read,
    row_of,
    start_of_keys,
    tile_at,
)
from onchip.kernels.hopper.weights import packed_in_range, rescaled, weights_of


class Walk(NamedTuple):
    """What a consumer carries from K/V tile to K/V tile."""

    p: object  # (64, BN) weights of the last S, 16 bit, as wgmma's operand in registers
    acc: object  # (64, D_v) float32, without the last P V
    m: object  # (64, 4) base 2 logits that P is held against: the maximum so far, or a base
    l: object  # (64, 4) running sums of P
    q: object  # (64, D) Q as wgmma's operand in registers, or 0


@gluon.jit
def tile_number(done, lengths: Lengths, at: Shared, n: Sizes, C: gl.constexpr):
    """The CTA's tile number `done`: (whether there is one, the tile)."""
    if C.is_uneven:
        return read(done, n, at.notes, C)
    else:
        t = number_of(done)
        tile = tile_at(gl.minimum(t, anew(n.num_tiles) - 1), n, lengths, C)
        more = t < n.num_tiles
        if C.is_alone:
            more = more & exists(tile, n, C)
        return more, tile


@gluon.jit
def first_tile_number(lengths: Lengths, at: Shared, n: Sizes, C: gl.constexpr):
    """`tile_number` of the CTA's first tile, which is its own number."""
    if C.num_known > 0:
        t = gl.program_id(0)
        return t < n.num_tiles, tile_at(t, n, lengths, C)
    else:
        return tile_number(0, lengths, at, n, C)


@gluon.jit
def _pass_over(count, at: Shared, W: gl.constexpr, C: gl.constexpr):
    mbarrier.wait(at.k_full.index(count % C.stages), (count // C.stages) & 1)
    release(count, 0, C)
    wait_for_turn(W, C)
    pass_turn((W + 1) % C.warpgroups, C)


@gluon.jit
def skip_k(skipped, count, at: Shared, W: gl.constexpr, C: gl.constexpr):
    """Passes over the CTA's last K tiles, if they lie beyond the keys of this warpgroup's rows.

    At most one where a tile's rows lie together. Of several the V tiles but the last are passed
    over as well: the producer does not run further ahead than its slots.
    """
    if C.is_folded:
        for j in range(skipped):
            _pass_over(count + j, at, W, C)
            skip_v(j, count + j - 1, at, C)
    else:
        if skipped > 0:
            _pass_over(count, at, W, C)


@gluon.jit
def skip_v(skipped, count, at: Shared, C: gl.constexpr):
    """Passes over V tile `count`, the last one, if K tiles were passed over."""
    if skipped > 0:
        mbarrier.wait(at.v_full.index(count % C.stages), (count // C.stages) & 1)
        release(count, 1, C)


@gluon.jit
def _q_operand(i, at: Shared, C: gl.constexpr):
    """Q's buffer `i` in registers, where the config asks for it."""
    BN: gl.constexpr = C.block_n
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    if C.q_in_registers:
        return plane(at.q.index(i), 64, C.width).load(gl.DotOperandLayout(0, S_LAYOUT, 2))
    else:
        return 0


@gluon.jit
def _columns(q, k, s, NUMBER: gl.constexpr, C: gl.constexpr):
    """Issues what some columns of Q and K add to S."""
    START: gl.constexpr = C.pieces[NUMBER][0]
    SIZE: gl.constexpr = C.pieces[NUMBER][1]
    if C.width > SIZE:
        q = q.slice(START, SIZE, 1)
        k = k.slice(START, SIZE, 0)
    return warpgroup_mma(q, k, s, use_acc=START > 0, is_async=True)


@gluon.jit
def _scores(i, q, count, more, at: Shared, KEYS: gl.constexpr, W: gl.constexpr, C: gl.constexpr):
    """Issues S = Q K^T of Q's buffer `i` and the first KEYS of K tile `count`, once both are there.

    Where there is no tile (not `more`) it multiplies what is left in shared memory.
    """
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    slot = count % C.stages
    mbarrier.wait(at.k_full.index(slot), (count // C.stages) & 1, pred=more)
    wait_for_turn(W, C)
    k = plane(at.k.index(slot), C.block_n, C.width)
    if C.block_n > KEYS:
        k = k.slice(0, KEYS, 0)
    k = k.permute((1, 0))
    s = gl.zeros([64, KEYS], gl.float32, S_LAYOUT)
    if C.q_in_registers:
        return warpgroup_mma(q, k, s, use_acc=False, is_async=True)
    else:
        q = plane(at.q.index(i), 64, C.width)
        NUMBER: gl.constexpr = len(C.pieces)
        for piece in gl.static_range(NUMBER):
            s = _columns(q, k, s, piece, C)
        return s


@gluon.jit
def _product(walk: Walk, count, at: Shared, C: gl.constexpr):
    """Issues O += P V of V tile `count`, once it is there."""
    slot = count % C.stages
    mbarrier.wait(at.v_full.index(slot), (count // C.stages) & 1)
    v = plane(at.v.index(slot), C.block_n, C.width_v)
    return warpgroup_mma(operand(walk.p, at.q.dtype, C), v, walk.acc, is_async=True)


@gluon.jit
def _step(
    i, phase, walk: Walk, count, key, view: View, terms: Terms, at: Shared, n: Sizes,
    MASKED: gl.constexpr, W: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """One K/V tile further; Q's buffer `i` became full in `phase`."""
    BN: gl.constexpr = C.block_n
    MAXIMA: gl.constexpr = MASKED or C.maxima
    MOVES: gl.constexpr = not (MAXIMA or C.lags)
    unit = unit_of(terms, C)
    s = _scores(i, walk.q, count + 1, True, at, BN, W, C)
    acc = _product(walk, count, at, C)
    pass_turn((W + 1) % C.warpgroups, C)
    m = walk.m
    if not (MAXIMA or MOVES):  # while the tensor cores work
        m, factor = grown(m, walk.l)
    s = warpgroup_mma_wait(1, deps=[s])
    if C.late:
        release(count + 1, 0, C)
    s = logits(s, key, view, terms, C)
    if MASKED:
        s = masked(s, key, view, n, False, C)
    if MAXIMA:
        m = gl.maximum(m, in_each_thread(row_maximum(s), walk.l) * unit)
    base = base_of(m, MASKED or C.may_be_empty)
    if MAXIMA:
        factor = gl.exp2(walk.m - base)
    if not C.late:
        # Behind the maximum: a release keeps the wait for O below what stands above it.
        release(count + 1, 0, C)
        acc = warpgroup_mma_wait(0, deps=[acc])
        release(count, 1, C)
        if not MOVES:
            acc = rescaled(acc, factor, C)
    weights = weights_of(s, unit, base)
    sums = row_sums(weights)
    if C.late:  # the compiler does not move the wait for O over a wait for an mbarrier
        mbarrier.wait(at.q_full.index(i), phase)
        acc = warpgroup_mma_wait(0, deps=[acc])
        release(count, 1, C)
    if MOVES:
        p, acc, l, m = packed_in_range(weights, sums, walk.p, acc, walk.l + sums, m, at.q.dtype)
    else:
        p = packed(weights, at.q.dtype, C)
        l = walk.l * factor + sums
        if C.late:
            acc = rescaled(acc, factor, C)
    return Walk(p, acc, m, l, walk.q)


@gluon.jit
def _steps(
    first, behind, i, phase, walk: Walk, count, end, view: View, terms: Terms, at: Shared, n: Sizes,
    MASKED: gl.constexpr, W: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Steps number `first` to `behind - 1` of those from `end` towards the first key."""
    for j in range(first, behind):
        key = (end - 1 - j) * C.block_n
        walk = _step(i, phase, walk, count, key, view, terms, at, n, MASKED, W, C)
        count += 1
    return walk, count


@gluon.jit
def _open(tile: Tile, more, count, done, at: Shared, n: Sizes, W: gl.constexpr, C: gl.constexpr):
    """Issues a tile's first S, of K tile `count` or the one behind it.

    Returns:
        S, its K tile's number, how many K/V tiles were passed over, `end_of_keys` and Q.
    """
    SKIPS: gl.constexpr = C.skips and C.warpgroups > W + 1
    if C.in_pieces:
        end = end_of_tile(tile, n, C)
    else:
        end = end_of_keys(row_of(tile, W, n, C) + 64, tile, n, C)
    skipped = 0
    if SKIPS:
        skipped = gl.where(more, end_of_tile(tile, n, C) - end, 0)
        skip_k(skipped, count, at, W, C)
        count += skipped
    i = (done % C.q_buffers) * C.warpgroups + W
    mbarrier.wait(at.q_full.index(i), (done // C.q_buffers) & 1, pred=more)
    q = _q_operand(i, at, C)
    KEYS: gl.constexpr = C.last_keys[W]
    return _scores(i, q, count, more, at, KEYS, W, C), count, skipped, end, q


@gluon.jit
def _first_weights(s, end, view: View, terms: Terms, n: Sizes, C: gl.constexpr):
    """Weights (float32), base and sums of the first S, which the right edge crosses."""
    BN: gl.constexpr = C.block_n
    KEYS: gl.constexpr = s.shape[1]
    seen = view
    if BN > KEYS:
        LAYOUT: gl.constexpr = s.type.layout
        rows = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        seen = View(view.tile, view.row, rows, view.slope)
    key = (end - 1) * BN
    s = masked(logits(s, key, seen, terms, C), key, seen, n, True, C)
    unit = unit_of(terms, C)
    m = row_maximum(s) * unit
    weights = gl.exp2(s * unit - base_of(m, C.may_be_empty)[:, None])
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    m = gl.convert_layout(m, gl.SliceLayout(1, S_LAYOUT), assert_trivial=True)
    weights = widened(weights, BN)
    l = row_sums(weights)
    return weights, in_each_thread(m, l), l


@gluon.jit
def _free_q(done, at: Shared, W: gl.constexpr, C: gl.constexpr):
    """Hands a buffer of Q back: this tile's, or the one through which the last O has left."""
    if C.q_buffers == 1:
        mbarrier.arrive(at.q_empty.index(W), count=1)
    else:
        if done > 1:
            tma.store_wait(0)
            i = ((done - 2) % C.q_buffers) * C.warpgroups + W
            mbarrier.arrive(at.q_empty.index(i), count=1)


@gluon.jit
def _summed(walk: Walk, count, at: Shared, C: gl.constexpr):
    """The walk with its last P V."""
    acc = warpgroup_mma_wait(0, deps=[_product(walk, count, at, C)])
    return Walk(walk.p, acc, walk.m, walk.l, walk.q)


@gluon.jit
def _passed_on(
    more, tile: Tile, done, walk: Walk, o, count, unmasked, view: View, following: View,
    terms: Terms, to: Outputs, at: Shared, n: Sizes, W: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """The last O += P V of a tile beside the first S = Q K^T of the next, if there is one.

    Returns:
        The next tile's walk, the number of its first K/V tile, and `end_of_keys`.
    """
    WIDTH_V: gl.constexpr = C.width_v
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH_V, 16])
    NEXT: gl.constexpr = (W + 1) % C.warpgroups
    s, first, skipped, end, q = _open(tile, more, count + 1, done, at, n, W, C)
    if C.q_buffers > 1:
        acc = _product(walk, count, at, C)
        pass_turn(NEXT, C)
        s = warpgroup_mma_wait(1, deps=[s])
    else:
        pass_turn(NEXT, C)
        s = warpgroup_mma_wait(0, deps=[s])
    release_if(more, first, 0, C)
    weights, m, l = widened(s, C.block_n), walk.m, walk.l
    if more or not C.is_short:  # to pass over them costs more than it saves where tiles are many
        weights, m, l = _first_weights(s, end, following, terms, n, C)
    if C.q_buffers > 1:
        if C.late:
            j = (done % C.q_buffers) * C.warpgroups + W
            mbarrier.wait(at.q_full.index(j), (done // C.q_buffers) & 1, pred=more)
        acc = warpgroup_mma_wait(0, deps=[acc])
        release_if(more, count, 1, C)
    skip_v(skipped, first - 1, at, C)
    p = packed(weights, at.q.dtype, C)
    if C.q_buffers > 1:
        walk = Walk(walk.p, acc, walk.m, walk.l, walk.q)
        finish(walk, o, unmasked, view, terms, to, n, W, C)
    return Walk(p, gl.zeros([64, WIDTH_V], gl.float32, O_LAYOUT), m, l, q), first, end


@gluon.jit
def _turn_over(
    done, walk: Walk, view: View, count, end, unmasked, lengths: Lengths, to: Outputs,
    terms: Terms, at: Shared, n: Sizes, W: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """From tile number `done - 1`, of which P V of `count` is left, to the next.

    Returns:
        Whether there is a next tile; its walk, view, first K/V tile and `end_of_keys`.
    """
    _free_q(done, at, W, C)
    i = ((done - 1) % C.q_buffers) * C.warpgroups + W
    o = at.q.index(i) if C.q_buffers > 1 else at.o.index(W)
    if C.q_buffers == 1:  # the next Q comes late: finish this tile first
        walk = _summed(walk, count, at, C)
        finish(walk, o, unmasked, view, terms, to, n, W, C)
    more, tile = tile_number(done - C.num_known, lengths, at, n, C)
    slope = slope_of(terms, tile, n, C)
    following = View(tile, row_of(tile, W, n, C), view.rows, slope)
    if C.q_buffers == 1:
        release_if(more, count, 1, C)
    walk, count, end = _passed_on(more, tile, done, walk, o, count, unmasked, view, following,
                                  terms, to, at, n, W, C)  # fmt: skip
    return more, walk, following, count, end


@gluon.jit
def _tile(
    done, walk: Walk, view: View, count, end, lengths: Lengths, to: Outputs, terms: Terms,
    at: Shared, n: Sizes, W: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Tile number `done` from its first P on, and the first P of the next.

    Returns:
        Whether there is a next tile; its walk, view, first K/V tile and `end_of_keys`.
    """
    i = (done % C.q_buffers) * C.warpgroups + W
    phase = (done // C.q_buffers) & 1
    start = start_of_keys(view.tile.row, view.tile, n, C)
    # Steps before `cut` may be cut by the right edge, those from `full` on by the left one.
    cut = gl.minimum(num_cut_on_the_right(view.row, end, view.tile, n, C), end - start)
    full = gl.maximum(num_before_the_left(view.row + 64, end, view.tile, n, C), cut)
    if C.in_pieces:
        full = end - start
    if C.cuts_two and C.has_left:
        # One loop for both edges: with every feature at D = 128 a copy of a masked step is 1,200
        # instructions of each warpgroup. First the right edge and what is seen in full, then the
        # left one alone.
        for edge in range(2):
            first = gl.where(edge == 0, 1, full)
            behind = gl.where(edge == 0, cut, end - start)
            walk, count = _steps(first, behind, i, phase, walk, count, end, view, terms, at, n,
                                 True, W, C)  # fmt: skip
            behind = gl.where(edge == 0, full, cut)
            walk, count = _steps(cut, behind, i, phase, walk, count, end, view, terms, at, n,
                                 False, W, C)  # fmt: skip
    else:
        if C.cuts_two:
            walk, count = _steps(1, cut, i, phase, walk, count, end, view, terms, at, n, True,
                                 W, C)  # fmt: skip
        walk, count = _steps(cut, full, i, phase, walk, count, end, view, terms, at, n, False,
                             W, C)  # fmt: skip
        if C.has_left:
            walk, count = _steps(full, end - start, i, phase, walk, count, end, view, terms, at,
                                 n, True, W, C)  # fmt: skip

    if C.is_folded or C.is_alone:  # the CTA's only tile
        walk = _summed(walk, count, at, C)
        o = at.q.index(i) if C.q_buffers > 1 else at.o.index(W)
        finish(walk, o, full > cut, view, terms, to, n, W, C)
        more = done < 0
    else:
        more, walk, view, count, end = _turn_over(
            done + 1, walk, view, count, end, full > cut, lengths, to, terms, at, n, W, C
        )
    return more, walk, view, count, end


@gluon.jit
def consumer(
    W: gl.constexpr, lengths: Lengths, to: Outputs, terms: Terms, at: Shared, n: Sizes,
    C: gl.constexpr,
):  # fmt: skip
    """64 rows of every tile of queries that the CTA draws."""
    if not C.foresees:
        meet_other_launches(4)
    BN: gl.constexpr = C.block_n
    WIDTH_V: gl.constexpr = C.width_v
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH_V, 16])
    NEXT: gl.constexpr = (W + 1) % C.warpgroups
    DTYPE: gl.constexpr = at.q.dtype
    rows = gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))

    done = 0  # tiles of queries
    if C.warpgroups == W + 1:
        pass_turn(0, C)
    more, tile = first_tile_number(lengths, at, n, C)
    if C.foresees:
        settle(tile.row + tile.head + tile.batch, 4)
        meet_other_launches(4)
    view = View(tile, row_of(tile, W, n, C), rows, slope_of(terms, tile, n, C))
    s, count, skipped, end, q = _open(tile, more, 0, done, at, n, W, C)
    pass_turn(NEXT, C)
    s = warpgroup_mma_wait(0, deps=[s])
    release_if(more, count, 0, C)
    skip_v(skipped, count - 1, at, C)
    weights, m, l = _first_weights(s, end, view, terms, n, C)
    p = packed(weights, DTYPE, C)
    walk = Walk(p, gl.zeros([64, WIDTH_V], gl.float32, O_LAYOUT), m, l, q)

    # `count` is the K/V tile whose P is ready and whose V is still to come.
    while more:
        more, walk, view, count, end = _tile(done, walk, view, count, end, lengths, to, terms, at,
                                             n, W, C)  # fmt: skip
        done += 1
    tma.store_wait(0)
    if W == 0:
        wait_for_turn(0, C)
