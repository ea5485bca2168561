"""Rows of S, P and O in registers as wgmma leaves them: what Gluon kernels of Hopper share.

A row of an accumulator lies in four threads, in pairs of columns. Row sums stay apart in the
four until the end: `l` is (64, 4). Other numbers for each row are (64,), or (64, 4) where they
meet sums: what each of the four threads holds, all the same.

What the compiled code depends on, C, has here: `width_v` (D_v, padded) and `has_words` (whether
steps hand P on as words).

Legend: BN columns (keys) of a tile.
"""

from __future__ import annotations

from triton.experimental import gluon

from onchip.kernels.gluon_names import gl


@gluon.jit
def halves(x):
    """Left and right half of the columns; no data moves."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def _operand(p, C: gl.constexpr):
    """P (64, BN), laid out as wgmma's first operand; no data moves."""
    WIDTH_V: gl.constexpr = C.width_v
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH_V, 16])
    return gl.convert_layout(p, gl.DotOperandLayout(0, O_LAYOUT, 2))


@gluon.jit
def _words(weights, DTYPE: gl.constexpr):
    """P (64, BN) in 16 bits, as words of two neighbours."""
    a, b = gl.split(gl.reshape(weights, [weights.shape[0], weights.shape[1] // 2, 2]))
    if DTYPE.is_bf16():
        return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [a, b],
                                         dtype=gl.int32, is_pure=True, pack=1)  # fmt: skip
    else:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [a, b],
                                         dtype=gl.int32, is_pure=True, pack=1)  # fmt: skip


@gluon.jit
def _unpacked(words, DTYPE: gl.constexpr, C: gl.constexpr):
    """What `_words` made, as wgmma's first operand."""
    x = gl.reshape(gl.join(words, words), [words.shape[0], words.shape[1] * 2])
    x = _operand(x, C)
    if DTYPE.is_bf16():
        return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [x], dtype=gl.bfloat16,
                                         is_pure=True, pack=2)  # fmt: skip
    else:
        return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [x], dtype=gl.float16,
                                         is_pure=True, pack=2)  # fmt: skip


@gluon.jit
def packed(weights, DTYPE: gl.constexpr, C: gl.constexpr):
    """P (64, BN) in 16 bits, as one step hands it to the next.

    Where several walks follow one another these are words: Triton would carry 16 bits from walk
    to walk one value in each register, and take them apart in every step. So it would with what
    assembly made.
    """
    if C.has_words:
        return _words(weights, DTYPE)
    else:
        return _operand(weights.to(DTYPE), C)


@gluon.jit
def operand(p, DTYPE: gl.constexpr, C: gl.constexpr):
    """What `packed` gave as wgmma's first operand (64, BN)."""
    if C.has_words:
        return _unpacked(p, DTYPE, C)
    else:
        return p


@gluon.jit
def row_maximum(s):
    """(64,): two levels of independent maxima in front of the chain that the compiler makes."""
    layout: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    x = s
    for _ in gl.static_range(2):
        a, b = halves(x)
        x = gl.maximum(a, b)
    return gl.convert_layout(gl.max(x, 1), layout, assert_trivial=True)


@gluon.jit
def row_sums(p):
    """(64, 4): what each of a row's four threads holds."""
    x = p
    for _ in gl.static_range(2):
        a, b = halves(x)
        x = a + b
    return gl.sum(gl.sum(gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def widened(x, BN: gl.constexpr):
    """All columns of a tile of which `x` may be the left half; the others are 0."""
    if x.shape[1] < BN:
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
        x = gl.permute(gl.join(x, gl.zeros_like(x)), (0, 2, 1))
        x = gl.convert_layout(gl.reshape(x, [x.shape[0], BN]), LAYOUT, assert_trivial=True)
    return x


@gluon.jit
def scaled_sums(l, factor):
    """Row sums times a factor for each row."""
    layout: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    return l * gl.convert_layout(factor, layout, assert_trivial=True)[:, None]


@gluon.jit
def base_of(m, GUARDED: gl.constexpr):
    """What is subtracted from a row of maximum `m`: not -inf, of which -inf - -inf is NaN."""
    if GUARDED:
        m = gl.where(m == float("-inf"), 0.0, m)
    return m


@gluon.jit
def rescaled(acc, factor):
    """O times a factor for each row (64,)."""
    return acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def in_fours(x):
    """(64, BN) as (64, BN / 8, 4, 2): a row's four threads hold pairs of columns in turn."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def out_of_fours(x, like):
    """What became of `in_fours(like)`, laid out like that."""
    x = gl.reshape(x, [like.shape[0], like.shape[1]])
    return gl.convert_layout(x, like.type.layout, assert_trivial=True)


@gluon.jit
def beside(factor, x):
    """A number for each row (64, 4), for arithmetic with columns in fours."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, x.type.layout))
    factor = gl.convert_layout(factor, LAYOUT, assert_trivial=True)
    return gl.expand_dims(gl.expand_dims(factor, 1), 3)


@gluon.jit
def in_each_thread(m, l):
    """A number for each row (64,) as (64, 4), beside sums `l`."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    return gl.zeros_like(l) + gl.convert_layout(m, LAYOUT, assert_trivial=True)[:, None]
