"""What becomes of row statistics, in registers as wgmma leaves them; beside `gluon_rows`.

Where softcap or ALiBi change S, it is turned into logits of base 2 first (`logits.py`); else the
scale waits for the exponential's own multiplication.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon

from onchip.kernels.gluon_names import gl
from onchip.kernels.gluon_rows import (  # noqa: F401 (consumers find all they need here)
    base_of,
    halves,
    in_each_thread,
    operand,
    packed,
    row_maximum,
    row_sums,
    widened,
)
from onchip.kernels.hopper.tiles import Sizes, Tile, View

LOG2E = gl.constexpr(1.4426950408889634)


class Terms(NamedTuple):
    """What turns Q K^T into logits; what a call does not have is any pointer."""

    scale: object  # scale * log2(e); with a softcap scale / softcap
    softcap: object  # softcap * log2(e)
    slopes: object  # (H,) or (B, H) float32
    sinks: object  # (H,)


@gluon.jit
def slope_of(terms: Terms, tile: Tile, n: Sizes, C: gl.constexpr):
    """The ALiBi slope of a tile's head, times log2(e)."""
    slope = 0.0
    if C.alibi_dim == 1:
        slope = gl.load(terms.slopes + tile.head) * LOG2E
    if C.alibi_dim == 2:
        slope = gl.load(terms.slopes + tile.batch * n.num_heads + tile.head) * LOG2E
    return slope


@gluon.jit
def unit_of(terms: Terms, C: gl.constexpr):
    """What S is still to be multiplied by to be a base 2 logit."""
    if C.has_softcap or C.alibi_dim > 0:
        return 1.0
    else:
        return terms.scale


@gluon.jit
def grown(m, l):
    """What the next tile's S is held against in place of its maximum, where bases lag.

    A sum tells how far the logits so far have risen above `m`: beyond 2^24 it moves on. P of the
    next tile may exceed that by 2^100 before float32 and bfloat16 overflow; rows in which it does
    have the sum inf, and `repair.py` makes them again. A power of two costs no rounding.

    Returns:
        the new `m`, and the factor on O and the sums.
    """
    top = in_each_thread(gl.max(l, 1), l)
    grows = (top > 16777216.0) & (top < float("inf"))
    return gl.where(grows, m + 24.0, m), gl.where(grows, 1.0 / 16777216.0, 1.0)


@gluon.jit
def with_sink(top, l, view: View, terms: Terms, C: gl.constexpr):
    """Adds exp(sink) to the denominators: (base 2 maximum, denominator, factor on O)."""
    factor = 1.0
    if C.has_sinks:
        head = view.tile.head
        if C.heads > 1:
            head = head * C.heads + (view.row + view.rows) % C.heads
        sink = gl.cast(gl.load(terms.sinks + head), gl.float32) * LOG2E
        new = gl.maximum(top, sink)
        base = base_of(new, True)
        factor = gl.exp2(top - base)
        l = l * factor + gl.exp2(sink - base)
        top = new
    return top, l, factor
