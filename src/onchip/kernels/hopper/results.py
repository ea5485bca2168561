"""How a consumer of the Hopper forward hands over 64 finished rows: outputs, LSE, notes.

Legend: B batch, S_q length, T packed tokens, H query heads, C code.
"""

from __future__ import annotations

from triton.experimental import gluon

from onchip.kernels.hopper.gluon_names import fence_async_shared, gl, tma, tma_store
from onchip.kernels.hopper.shared import Outputs, corner_of, plane
from onchip.kernels.hopper.softmax import halves
from onchip.kernels.hopper.tiles import Sizes, View, anew, num_rows, query_of

LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def row_index(view: View, C: gl.constexpr):
    """Rows of the sequence, and which of them there are."""
    index = view.row + view.rows
    return index, index < num_rows(view.tile.seqlen_q, C)


@gluon.jit
def _number(x, C: gl.constexpr):
    """`anew` where registers are few. Without masks they are not: 2 % slower (H200, D = 128)."""
    if C.is_cut:
        return anew(x)
    else:
        return x


@gluon.jit
def store_lse(top, l, view: View, to: Outputs, n: Sizes, C: gl.constexpr):
    index, inside = row_index(view, C)
    tile = view.tile
    head = tile.head
    if C.heads > 1:
        head = head * C.heads + index % C.heads
    if C.packed_q:  # (H, T_q)
        start = gl.cast(head, gl.int64) * anew(n.tokens_q) + tile.q_start
    else:
        size = _number(tile.seqlen_q, C)
        start = gl.cast(tile.batch * n.num_heads + head, gl.int64) * size
    gl.store(to.lse + start + query_of(index, C), (top + gl.log2(l)) * LN2, mask=inside)


@gluon.jit
def note_leaks(out, l, view: View, to: Outputs, C: gl.constexpr):
    """Notes rows for `repair.py`: NaN or infinite although their weights are not, or overflowed."""
    sums = gl.convert_layout(gl.sum(out * 0.0, 1), l.type.layout)
    _, inside = row_index(view, C)
    leaks = (((sums != 0.0) & (l == l)) | (l == float("inf"))) & inside
    gl.store(to.leaks + (view.rows * 0 + _number(1, C)), gl.full_like(view.rows, 1), mask=leaks)


@gluon.jit
def store_tile(out, o, view: View, to: Outputs, C: gl.constexpr):
    """Stores 64 rows by TMA, which leaves out what lies outside of the tensor."""
    if C.q_buffers > 1:
        corner = corner_of(view.tile, view.row, 0, C)
        plane(o, 64, C.width_v).store(out)
        fence_async_shared()
        tma_store(to.tiles, corner, o)
    else:  # in two halves
        left, right = halves(out)
        for i in range(2):
            tma.store_wait(0)
            plane(o, 64, C.width_v // 2).store(gl.where(i == 0, left, right))
            fence_async_shared()
            tma_store(to.tiles, corner_of(view.tile, view.row, i * (C.width_v // 2), C), o)


@gluon.jit
def store_rows(out, view: View, to: Outputs, n: Sizes, C: gl.constexpr):
    """Stores those rows that belong to the sequence."""
    LAYOUT: gl.constexpr = out.type.layout
    WIDTH: gl.constexpr = C.width_v
    tile = view.tile
    index = view.row + gl.arange(0, out.shape[0], gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
    start = (tile.q_start + query_of(index, C)).to(gl.int64) * anew(n.num_heads)
    if not C.packed_q:
        start += gl.cast(tile.batch * n.num_heads, gl.int64) * tile.seqlen_q
    if C.heads > 1:
        start += tile.head * C.heads + index % C.heads
    else:
        start += tile.head
    inside = (index < num_rows(tile.seqlen_q, C))[:, None] & (columns < C.dim_v)
    gl.store(to.out + start[:, None] * C.dim_v + columns, out, mask=inside)
