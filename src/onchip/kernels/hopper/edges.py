"""What the mask's edges and the end of the keys leave of S.

A row sees the columns up to a limit, or from one on. A column's number is a multiple of 8, plus
the pair of columns that is a thread's, plus 0 or 1: what is known when compiling is compared in
assembly with what is left of the limit. Comparisons with a tensor of columns hold each of them in
a register, of which the consumers have none: 40 to 120 bytes were spilled (D = 64, three
warpgroups). They are also moved in front of the wait for S, as packed bits, twice the code.

Legend: BN columns (keys) of a tile, n sizes, C code.
"""

from __future__ import annotations

from triton.experimental import gluon

from onchip.kernels.gluon_rows import in_fours
from onchip.kernels.hopper.gluon_names import gl
from onchip.kernels.hopper.tiles import Sizes, View, anew, first_seen, last_seen, query_of


@gluon.constexpr_function
def _choice(n, compare):
    """Assembly: a thread's n values of two rows, -inf where `limit compare column` does not hold.

    Operands: results, values, limits; values lie in turns of two for each of the rows.
    """
    text = "{ .reg .pred p; "
    for i in range(n):
        column, limit = i // 4 * 8 + i % 2, 2 * n + i // 2 % 2 * 2
        text += f"setp.{compare}.s32 p, ${limit}, {column}; "
        text += f"selp.f32 ${i}, ${n + i}, 0fFF800000, p; "
    return text + "}"


@gluon.constexpr_function
def _operands(n):
    return ",".join(["=&f"] * n + ["f"] * n + ["r"] * n)


@gluon.jit
def _kept(s, limit, COMPARE: gl.constexpr):
    """S (64, BN) where `limit` (64,) of its row compares so with its column; else -inf."""
    x = in_fours(s)
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, x.type.layout))
    limit = gl.convert_layout(anew(limit), gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    pair = anew(
        gl.arange(0, 4, gl.SliceLayout(0, LAYOUT))
    )  # which of each 8 columns are a thread's
    rest = limit[:, None] - 2 * pair[None, :]
    rest = gl.expand_dims(gl.expand_dims(rest, 1), 3)
    N: gl.constexpr = s.shape[1] // 2
    ASM: gl.constexpr = _choice(N, COMPARE)
    OPERANDS: gl.constexpr = _operands(N)
    x = gl.inline_asm_elementwise(ASM, OPERANDS, [x, rest], dtype=gl.float32, is_pure=True, pack=N)
    return gl.convert_layout(gl.reshape(x, [64, s.shape[1]]), s.type.layout, assert_trivial=True)


@gluon.jit
def masked(s, key, view: View, n: Sizes, LAST: gl.constexpr, C: gl.constexpr):
    """S (64, BN) with what its rows do not see at -inf.

    `key` is the first of the tile; LAST: it may be the one in which the keys end.
    """
    if C.has_right:
        limit = query_of(view.row + view.rows, C) + (last_seen(view.tile, n) - key)
        if C.has_tail and LAST:
            limit = gl.minimum(limit, anew(view.tile.seqlen_k) - 1 - key)
        s = _kept(s, limit, "ge")
    elif C.has_tail and LAST:
        s = _kept(s, view.rows * 0 + (anew(view.tile.seqlen_k) - 1 - key), "ge")
    if C.has_left:
        limit = query_of(view.row + view.rows, C) + (first_seen(view.tile, n) - key)
        s = _kept(s, limit, "le")
    return s
