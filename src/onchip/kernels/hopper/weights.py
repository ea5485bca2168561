"""Weights of the Hopper forward, and what becomes of O where their base moves.

P = 2^(logit - base). With maxima the base is a row's largest logit so far. Without, it is the
largest one of the tiles that an edge cuts, or of the first, until the weights come near the end
of P's range. The sums of a thread's weights tell that: a warp votes on them, and in almost no
step goes into a branch that multiplies the weights of the rows concerned, still in float32, by a
power of two. A base never exceeds its row's maximum by more than rounding, so that weights are
as precise in 16 bits as with maxima.

Base and factor are (64, 4), see `gluon_rows`.

Legend: BN columns (keys) of a tile, n words of a thread's P.
"""

from __future__ import annotations

from triton.experimental import gluon

from onchip.kernels.gluon_rows import beside, in_fours
from onchip.kernels.hopper.gluon_names import gl

# Base 2 logarithms of a thread's sum: from where on the base moves, so that no weight reaches
# float16's end, 2^16, and what the sum becomes: then the largest of its up to 32 weights is over 1.
_LIMIT = gl.constexpr(15)
_LEFT = gl.constexpr(5)
_BIAS = gl.constexpr(127)  # of float32's exponent, which begins at bit 23


@gluon.constexpr_function
def _moved_where_over(n, kind):
    """Assembly: words of P in `kind`, their rows' factors, and by how much the bases rise.

    Outputs, n each: words, factor, rise. Inputs, n each: the left and the right weight of each
    word, the thread's sum. Word i is of row i % 2. A sum that is infinite or NaN stays.
    """
    lists = [[f"${j * n + i}" for i in range(n)] for j in range(6)]
    words, factors, rises, left, right, sums = lists
    limit = f"{2.0**_LIMIT.value:.1f}"
    text = "{ .reg .pred p; .reg .f32 x, y, top<2>, factor<2>, rise<2>; .reg .b32 e; "
    for i in range(n):
        text += f"cvt.rn.{kind}x2.f32 {words[i]}, {right[i]}, {left[i]}; "
    for r in range(2):
        text += f"mov.f32 factor{r}, 1.0; mov.f32 rise{r}, 0.0; "
    text += f"setp.ge.f32 p, {sums[0]}, {limit}; setp.ge.or.f32 p, {sums[1]}, {limit}, p; "
    text += "vote.sync.any.pred p, p, 0xffffffff; @!p bra done; "
    for r in range(2):
        text += f"mov.f32 top{r}, {sums[r]}; "
        for lane in (1, 2):
            text += f"shfl.sync.bfly.b32 x, top{r}, {lane}, 31, 0xffffffff; "
            text += f"max.f32 top{r}, top{r}, x; "
        text += f"setp.ge.f32 p, top{r}, {limit}; setp.lt.and.f32 p, top{r}, 0f7F800000, p; "
        text += f"and.b32 e, top{r}, 0x7f800000; "
        text += f"sub.s32 e, {(2 * _BIAS.value + _LEFT.value) << 23}, e; mov.b32 x, e; "
        text += f"selp.f32 factor{r}, x, 1.0, p; shr.u32 e, e, 23; "
        text += f"sub.s32 e, {_BIAS.value}, e; cvt.rn.f32.s32 x, e; selp.f32 rise{r}, x, 0.0, p; "
    for i in range(n):
        text += f"mul.f32 x, {left[i]}, factor{i % 2}; mul.f32 y, {right[i]}, factor{i % 2}; "
        text += f"cvt.rn.{kind}x2.f32 {words[i]}, y, x; "
    text += "done: "
    for i in range(n):
        text += f"mov.f32 {factors[i]}, factor{i % 2}; mov.f32 {rises[i]}, rise{i % 2}; "
    return text + "}"


@gluon.constexpr_function
def _products(n):
    """Assembly: n values of a thread times their rows' factors, if the warp has one that is not 1.

    Operands: results, values, factors; values lie in turns of two for each of two rows.
    """
    factors = (2 * n, 2 * n + 2)
    moves = " ".join(f"mov.b32 ${i}, ${n + i};" for i in range(n))
    tests = f"setp.ne.f32 p, ${factors[0]}, 1.0; setp.ne.or.f32 p, ${factors[1]}, 1.0, p;"
    products = " ".join(f"mul.f32 ${i}, ${i}, ${factors[i // 2 % 2]};" for i in range(n))
    vote = "vote.sync.any.pred p, p, 0xffffffff; @!p bra over;"
    return f"{{ .reg .pred p; {moves} {tests} {vote} {products} over: }}"


@gluon.constexpr_function
def _constraints(n, letters):
    """n operands for each letter; outputs, which come first, are written before inputs are read."""
    return ",".join(("=&" + x.lower() if x.isupper() else x) for x in letters for _ in range(n))


@gluon.jit
def weights_of(s, unit, base):
    """2^(s * unit - base) of a tile (64, BN)."""
    x = in_fours(s)
    x = gl.exp2(x * unit - beside(base, x))
    return gl.convert_layout(gl.reshape(x, [64, s.shape[1]]), s.type.layout, assert_trivial=True)


@gluon.jit
def _one(x, like):
    """(64, 4) of (64, N, 4) whose middle is all the same."""
    N: gl.constexpr = x.shape[1]
    if N == 1:
        return gl.convert_layout(gl.reshape(x, [64, 4]), like.type.layout, assert_trivial=True)
    else:
        a, _ = gl.split(gl.permute(gl.reshape(x, [64, 2, N // 2, 4]), (0, 2, 3, 1)))
        return _one(a, like)


@gluon.jit
def packed_in_range(weights, sums, p, DTYPE: gl.constexpr):
    """P (64, BN / 2) as words, like those of the step before, `p`.

    Args:
        weights: (64, BN) float32.
        sums: (64, 4), what each thread's weights sum up to.

    Returns:
        words; the factor that weights were multiplied by, which sums and O need as well; the rise
        of the base.
    """
    N: gl.constexpr = weights.shape[1] // 4
    KIND: gl.constexpr = "bf16" if DTYPE.is_bf16() else "f16"
    ASM: gl.constexpr = _moved_where_over(N, KIND)
    OPERANDS: gl.constexpr = _constraints(N, "RFFfff")
    left, right = gl.split(in_fours(weights))
    own = gl.convert_layout(sums, gl.SliceLayout(1, left.type.layout), assert_trivial=True)
    words, factor, rise = gl.inline_asm_elementwise(
        ASM, OPERANDS, [left, right, gl.expand_dims(own, 1)],
        dtype=(gl.int32, gl.float32, gl.float32), is_pure=True, pack=N)  # fmt: skip
    words = gl.reshape(words, [64, weights.shape[1] // 2])
    words = gl.convert_layout(words, p.type.layout, assert_trivial=True)
    return words, _one(factor, sums), _one(rise, sums)


@gluon.jit
def rescaled(acc, factor, C: gl.constexpr):
    """O times a factor for each row.

    Without maxima the factors are 1 in almost every step, and a warp passes over the products.
    """
    x = in_fours(acc)
    factor = beside(factor, x)
    if C.maxima:
        x = x * factor
    else:
        N: gl.constexpr = acc.shape[1] // 2
        ASM: gl.constexpr = _products(N)
        OPERANDS: gl.constexpr = _constraints(N, "Fff")
        x = gl.inline_asm_elementwise(ASM, OPERANDS, [x, factor], dtype=gl.float32, is_pure=True,
                                      pack=N)  # fmt: skip
    return gl.convert_layout(
        gl.reshape(x, [64, acc.shape[1]]), acc.type.layout, assert_trivial=True
    )
