"""Weights of the Hopper float8 forward in registers: from S to what wgmma multiplies with V.

A row's base stands in for its maximum: P = 2^(logit - base). It moves only where P would leave
float8's range, so that a step takes no maxima (`fp8_assembly`).

Bases and factors are (64, 4): what each of a row's four threads holds.

Legend: BN columns (keys) of a tile, D_v head dimension of the values.
"""

from __future__ import annotations

from triton.experimental import gluon

from onchip.kernels.gluon_rows import beside, in_fours, out_of_fours
from onchip.kernels.hopper.fp8_assembly import constraints, first_tile, next_tile
from onchip.kernels.hopper.gluon_names import gl


@gluon.jit
def _halves(x):
    """(64, N, 4) as two of (64, N / 2, 4); no data moves."""
    return gl.split(gl.permute(gl.reshape(x, [64, 2, x.shape[1] // 2, 4]), (0, 2, 3, 1)))


@gluon.jit
def _joined(lower, upper):
    """`_halves` undone."""
    x = gl.permute(gl.join(lower, upper), (0, 3, 1, 2))
    return gl.reshape(x, [64, 2 * lower.shape[1], 4])


@gluon.jit
def _keys_of_words(s):
    """S (64, BN) as the keys of P's words, those of both halves: four of (64, BN / 32, 4) each.

    Word 4i + t has keys 16i + 8a + 2t + c at 2a + c. That is the order of V's columns, and no data
    moves.
    """
    x = gl.reshape(s, [64, s.shape[1] // 16, 2, 4, 2])  # a, t, c
    left, right = gl.split(gl.permute(x, (0, 1, 3, 4, 2)))
    a, b = gl.split(left)
    c, d = gl.split(right)
    a, e = _halves(a)
    b, f = _halves(b)
    c, g = _halves(c)
    d, h = _halves(d)
    return (a, b, c, d), (e, f, g, h)


@gluon.jit
def _spread(x, like):
    """(64, 4) as (64, N, 4)."""
    LAYOUT: gl.constexpr = like.type.layout
    x = gl.convert_layout(x, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    return gl.zeros_like(like) + gl.expand_dims(x, 1)


@gluon.jit
def _one(x):
    """(64, 4) of (64, N, 4) whose middle is all the same."""
    N: gl.constexpr = x.shape[1]
    if N == 1:
        return gl.reshape(x, [64, 4])
    else:
        a, _ = _halves(x)
        return _one(a)


@gluon.jit
def weights(s, unit, base):
    """Words of a tile, the base that they are held against, the factor on sums so far."""
    lower, upper = _keys_of_words(s)
    a, b, c, d = lower
    e, f, g, h = upper
    N: gl.constexpr = 2 * a.shape[1]
    ASM: gl.constexpr = next_tile(N)
    OPERANDS: gl.constexpr = constraints(N, "rrff", "ffffffffff")
    low, high, base, factor = gl.inline_asm_elementwise(
        ASM, OPERANDS, [a, b, c, d, e, f, g, h, _spread(base, a), gl.full_like(a, unit)],
        dtype=(gl.int32, gl.int32, gl.float32, gl.float32), is_pure=True, pack=N)  # fmt: skip
    return _joined(low, high), _one(base), _one(factor)


@gluon.jit
def first_weights(s, unit):
    """Words of a row's first tile, and the base that they are held against."""
    lower, upper = _keys_of_words(s)
    a, b, c, d = lower
    e, f, g, h = upper
    N: gl.constexpr = 2 * a.shape[1]
    ASM: gl.constexpr = first_tile(N)
    OPERANDS: gl.constexpr = constraints(N, "rrf", "fffffffff")
    low, high, base = gl.inline_asm_elementwise(
        ASM, OPERANDS, [a, b, c, d, e, f, g, h, gl.full_like(a, unit)],
        dtype=(gl.int32, gl.int32, gl.float32), is_pure=True, pack=N)  # fmt: skip
    return _joined(low, high), _one(base)


@gluon.jit
def operand(words, LAYOUT: gl.constexpr):
    """Words of weights as wgmma's first operand (64, BN).

    They are handed from step to step as words: Triton would carry bytes one in each register. To
    be made before the products are issued (else ptxas serialises them, C7513).
    """
    pairs = gl.join(words, words)
    x = gl.reshape(gl.join(pairs, pairs), [64, words.shape[1] * 16])
    x = gl.convert_layout(x, LAYOUT, assert_trivial=True)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [x], dtype=gl.float8e4nv,
                                     is_pure=True, pack=4)  # fmt: skip


@gluon.jit
def times(x, factor):
    """(64, N) in an accumulator's layout times a factor (64, 4) for each row."""
    y = in_fours(x)
    return out_of_fours(y * beside(factor, y), x)


@gluon.jit
def quotient(x, y):
    """x / y of two numbers, to two units in the last place: a division is ten instructions."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 r; rcp.approx.ftz.f32 r, $2; mul.f32 $0, $1, r; }", "=f,f,f", [x, y],
        dtype=gl.float32, is_pure=True, pack=1)  # fmt: skip
