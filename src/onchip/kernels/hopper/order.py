"""The order in which the Hopper forward's producers take sequences of unequal lengths.

Tiles differ in time as their keys do, and a counter hands them out: where the longest come first,
all CTAs end at about the same time. Every producer finds the order by itself, before its first
tile: each lane of its warp counts, for some sequences, those that are longer. Where lengths turn
out to be alike the call takes about 1 us more (H200, 2026-12-01, 64 of 4k 273.2 and 272.3).

Legend: B sequences, padded.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon

from onchip.kernels.hopper.gluon_names import gl

_LANES = gl.constexpr(32)
_AT_A_TIME = gl.constexpr(8)  # sequences that a lane compares its own one with
_BITS = gl.constexpr(7)  # of a sequence's number: up to 128 are put in order
_MOST_KEYS = gl.constexpr(1 << 21)  # longer sequences count as so long: sums stay within int32


class Order(NamedTuple):
    """Shared memory of the producer's."""

    places: object  # (B / 32, 32) of each sequence, how many come before it << 7, plus its number
    weights: object  # (B / 32, 32) a number of each one's own, the larger the more keys it has


@gluon.jit
def order_of(otherwise, SORTS: gl.constexpr):
    """Memory for the order of `SORTS` sequences at most, or `otherwise` where there is none."""
    if SORTS > 0:
        layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        places = gl.allocate_shared_memory(gl.int32, [SORTS // _LANES, _LANES], layout)
        weights = gl.allocate_shared_memory(gl.int32, [SORTS // _LANES, _LANES], layout)
        return Order(places, weights)
    else:
        return otherwise


@gluon.jit
def _numbers(SIZE: gl.constexpr, DIM: gl.constexpr):
    """0 to SIZE - 1, along the lanes (DIM 1) or all of them in each lane (0)."""
    layout: gl.constexpr = gl.BlockedLayout([1, _AT_A_TIME], [_LANES, 1], [1, 1], [1, 0])
    return gl.arange(0, SIZE, gl.SliceLayout(DIM, layout))


@gluon.jit
def longest_first(order: Order, lengths, num_sequences, SORTS: gl.constexpr):
    """Finds the order; sequences of about one length stay as they are given.

    Args:
        order: written.
        lengths: (num_sequences,) keys.
        num_sequences: up to SORTS.
        SORTS: B.
    """
    GROUPS: gl.constexpr = SORTS // _LANES
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lanes = _numbers(_LANES, 1)
    total = lanes * 0
    longest = lanes * 0
    for group in gl.static_range(GROUPS):
        every = group * _LANES + lanes
        keys = gl.load(lengths + every, mask=every < num_sequences, other=0)
        keys = gl.maximum(gl.minimum(keys, _MOST_KEYS), 0)
        total += keys
        longest = gl.maximum(longest, keys)
        order.weights.index(group).store(keys * SORTS + (SORTS - 1 - every))
        order.places.index(group).store((every << _BITS) + every)
    most = gl.max(longest, 0)
    # H200, 2026-12-01, us, 32 queries of 100 sequences of up to 1k 99.5 without an order and 104.2
    # with it, of up to 2k 141.3 and 142.0; of 128 of up to 4k 331.7 and 316.5.
    is_worth = most * 8 > num_sequences * num_sequences
    if (most * num_sequences * 4 > gl.sum(total, 0) * 5) & is_worth:
        others = order.weights._reinterpret(gl.int32, [SORTS // _AT_A_TIME, _AT_A_TIME], layout)
        columns = _numbers(_AT_A_TIME, 0)
        for some in range((num_sequences + _LANES - 1) // _LANES):
            own = order.weights.index(some).load(lanes.type.layout)
            rank = lanes * 0
            for i in range((num_sequences + _AT_A_TIME - 1) // _AT_A_TIME):
                other = others.index(i).load(columns.type.layout)
                rank -= gl.sum((own[:, None] - other[None, :]) >> 31, 1)
            every = some * _LANES + lanes
            order.places.index(some).store((rank << _BITS) + every)


@gluon.jit
def sequence_at(rank, order: Order, SORTS: gl.constexpr):
    """The sequence before which `rank` others come."""
    LAYOUT: gl.constexpr = _numbers(_LANES, 1).type.layout
    found = gl.full([_LANES], 0, gl.int32, LAYOUT)
    for group in gl.static_range(SORTS // _LANES):
        place = order.places.index(group).load(LAYOUT)
        found = gl.where(place >> _BITS == rank, place, found)
    return gl.max(found, 0) & ((1 << _BITS) - 1)
