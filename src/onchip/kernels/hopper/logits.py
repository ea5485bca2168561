"""What S becomes before its exponentials: softcap, ALiBi, the mask's edges, the end of the keys.

A row sees the columns up to a limit, or from one on, and its ALiBi term counts from its own place.
A column's number is a multiple of 8, plus the pair of columns that is a thread's, plus 0 or 1:
what is known when compiling stands in assembly, beside what is left of the row's number behind the
pair. Arithmetic with a tensor of columns holds each of them in a register, of which the consumers
have none: 40 to 120 bytes were spilled (D = 64, three warpgroups). Comparisons with it are also
moved in front of the wait for S, as packed bits, twice the code.

Legend: C code; n sizes, in what makes assembly a thread's values.
"""

from __future__ import annotations

from triton.experimental import gluon

from onchip.kernels.gluon_rows import in_fours, out_of_fours
from onchip.kernels.hopper.gluon_names import gl
from onchip.kernels.hopper.softmax import LOG2E, Terms
from onchip.kernels.hopper.tiles import (
    Sizes,
    View,
    anew,
    first_seen,
    last_seen,
    query_of,
    shift_of,
)


@gluon.constexpr_function
def _formula(n, has_softcap, has_alibi):
    """Assembly: base 2 logits of a thread's n values of two rows.

    Operands, n of each: results, values, scale; where there is a softcap, it and -2 of it; with
    ALiBi places and -slope. Values lie in turns of two for each of the rows.
    """
    text = "{ .reg .f32 x, y; "
    for i in range(n):
        column, operand = i // 4 * 8 + i % 2, 3 * n + i
        text += f"mul.f32 x, ${n + i}, ${2 * n + i}; "
        if has_softcap:
            text += "ex2.approx.ftz.f32 x, x; add.f32 x, x, 1.0; rcp.approx.ftz.f32 x, x; "
            text += f"fma.rn.f32 x, x, ${operand + n}, ${operand}; "
            operand += 2 * n
        if has_alibi:
            text += f"sub.f32 y, ${operand}, {column}.0; abs.f32 y, y; "
            text += f"fma.rn.f32 x, y, ${operand + n}, x; "
        text += f"mov.f32 ${i}, x; "
    return text + "}"


@gluon.constexpr_function
def _choice(n, has_low, has_high):
    """Assembly: a thread's n values of two rows, -inf where a column is not within the limits.

    Operands, n of each: results, values, then the lowest and the highest columns where there are
    such limits. Values lie in turns of two for each of the rows.
    """
    text = "{ .reg .pred p; "
    for i in range(n):
        column, row = i // 4 * 8 + i % 2, i // 2 % 2 * 2
        low, high = 2 * n + row, (2 + has_low) * n + row
        if has_high:
            text += f"setp.ge.s32 p, ${high}, {column}; "
        if has_low and has_high:
            text += f"setp.le.and.s32 p, ${low}, {column}, p; "
        elif has_low:
            text += f"setp.le.s32 p, ${low}, {column}; "
        text += f"selp.f32 ${i}, ${n + i}, 0fFF800000, p; "
    return text + "}"


@gluon.constexpr_function
def _constraints(n, num_floats, num_limits):
    return ",".join(["=&f"] * n + ["f"] * (n * num_floats) + ["r"] * (n * num_limits))


@gluon.jit
def _behind(place, x):
    """Rows' places (64,) as seen from the first of a thread's every two columns, beside x."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, x.type.layout))
    place = gl.convert_layout(anew(place), gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    # Which of each 8 columns are a thread's; kept from step to step it would take a register.
    pair = anew(gl.arange(0, 4, gl.SliceLayout(0, LAYOUT)))
    rest = place[:, None] - 2 * pair[None, :]
    return gl.expand_dims(gl.expand_dims(rest, 1), 3)


@gluon.jit
def logits(s, key, view: View, terms: Terms, C: gl.constexpr):
    """S as base 2 logits where softcap or ALiBi ask for that; unchanged where none does.

    `key` is the first of the tile. See `softmax.unit_of`.
    """
    HAS_ALIBI: gl.constexpr = C.alibi_dim > 0
    if C.has_softcap or HAS_ALIBI:
        x = in_fours(s)
        if C.has_softcap:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), which cannot overflow. Of 1 and more the reciprocal
            # is one instruction and right to a last bit; a division takes eight.
            operands = (x, terms.scale * (2.0 * LOG2E), terms.softcap, -2.0 * terms.softcap)
        else:
            operands = (x, terms.scale)
        if HAS_ALIBI:
            place = view.row + view.rows + (shift_of(view.tile) - key)
            operands = operands + (_behind(place, x).to(gl.float32), -view.slope)
        N: gl.constexpr = s.shape[1] // 2
        ASM: gl.constexpr = _formula(N, C.has_softcap, HAS_ALIBI)
        OPERANDS: gl.constexpr = _constraints(N, len(operands), 0)
        x = gl.inline_asm_elementwise(ASM, OPERANDS, operands, dtype=gl.float32, is_pure=True,
                                      pack=N)  # fmt: skip
        s = out_of_fours(x, s)
    return s


@gluon.jit
def masked(s, key, view: View, n: Sizes, LAST: gl.constexpr, C: gl.constexpr):
    """S with -inf where a row does not see a key, by the edges that there are.

    `key` is the first of the tile; LAST: it may be the one in which the keys end.
    """
    HAS_HIGH: gl.constexpr = C.has_right or (C.has_tail and LAST)
    if C.has_left or HAS_HIGH:
        x = in_fours(s)
        operands = (x,)
        if C.has_left:
            low = query_of(view.row + view.rows, C) + (first_seen(view.tile, n) - key)
            operands = operands + (_behind(low, x),)
        if C.has_right:
            high = query_of(view.row + view.rows, C) + (last_seen(view.tile, n) - key)
            if C.has_tail and LAST:
                high = gl.minimum(high, anew(view.tile.seqlen_k) - 1 - key)
            operands = operands + (_behind(high, x),)
        elif HAS_HIGH:
            end = anew(view.tile.seqlen_k) - 1 - key
            operands = operands + (_behind(view.rows * 0 + end, x),)
        N: gl.constexpr = s.shape[1] // 2
        ASM: gl.constexpr = _choice(N, C.has_left, HAS_HIGH)
        OPERANDS: gl.constexpr = _constraints(N, 1, len(operands) - 1)
        x = gl.inline_asm_elementwise(ASM, OPERANDS, operands, dtype=gl.float32, is_pure=True,
                                      pack=N)  # fmt: skip
        s = out_of_fours(x, s)
    return s
