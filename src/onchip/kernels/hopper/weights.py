"""Weights of the Hopper forward, and what else changes where a row's base moves.

P = 2^(logit - base). With maxima the base is a row's largest logit so far. Without, it is the
largest one of the tiles that an edge cuts, or of the first, until weights come near the end of
P's range. The sums of a thread's weights tell that: a warp votes on them, and in almost no step
goes into a branch that multiplies the weights of the rows concerned, which are still in float32,
by a power of two, and with them the sums and O so far. That is the last thing in a step, which
bfloat16 need not wait for: where it is quicker its bases lag (`softmax.grown`).

No base is far above its row's maximum, so that no weight is lost that maxima would keep. But the
largest weight is 1 with maxima, which float16 rounds to itself, and here any number.

Base and factor are (64, 4), see `gluon_rows`.

Legend: BN columns (keys) of a tile, D_v head dimension of the values, n operands of a thread.
"""

from __future__ import annotations

from triton.experimental import gluon

from onchip.kernels.gluon_rows import beside, in_fours, out_of_fours
from onchip.kernels.hopper.gluon_names import gl

# Base 2 logarithms of a thread's sum: from where on the base moves, so that no weight reaches
# float16's end, 2^16, and what the sum becomes: then the largest of its up to 32 weights is over 1.
_LIMIT = gl.constexpr(15)
_LEFT = gl.constexpr(5)
_BIAS = gl.constexpr(127)  # of float32's exponent, which begins at bit 23


@gluon.constexpr_function
def _moved(r, top, l, m):
    """Assembly: a row's factor, and its `l` and `m` made anew. A sum of inf or NaN moves nothing.

    A factor is 2^(_LEFT - exponent of the row's largest sum).
    """
    limit = f"{2.0**_LIMIT.value:.1f}"
    text = f"mov.f32 top, {top}; "
    for lane in (1, 2):
        text += f"shfl.sync.bfly.b32 x, top, {lane}, 31, 0xffffffff; max.f32 top, top, x; "
    text += f"setp.ge.f32 p, top, {limit}; setp.lt.and.f32 p, top, 0f7F800000, p; "
    text += "mov.b32 e, top; and.b32 e, e, 0x7f800000; "
    text += f"sub.s32 e, {(2 * _BIAS.value + _LEFT.value) << 23}, e; mov.b32 x, e; "
    text += f"selp.f32 factor{r}, x, 1.0, p; shr.u32 e, e, 23; sub.s32 e, {_BIAS.value}, e; "
    text += "cvt.rn.f32.s32 x, e; selp.f32 x, x, 0.0, p; "
    return text + f"add.f32 {m}, {m}, x; mul.f32 {l}, {l}, factor{r}; "


@gluon.constexpr_function
def _assembly(n, kind, num_words, num_sums):
    """Words of P in a 16-bit `kind`; O, sums and bases, made anew where bases move.

    Operands are lists of n, of which the i-th is of row i % 2. Outputs: words, O, `l`, `m`.
    Inputs: the left and the right weights of words, O in the registers of the output, `l`, `m`,
    sums of the tile's weights.
    """
    sizes = (num_words, num_sums, 1, 1, num_words, num_words, num_sums, 1, 1, 1)
    lists = []
    for j, size in enumerate(sizes):
        start = sum(sizes[:j]) * n
        lists.append([f"${start + i}" for i in range(size * n)])
    words, o, new_l, new_m, left, right, _, l, m, sums = lists
    limit = f"{2.0**_LIMIT.value:.1f}"
    packed = [f"cvt.rn.{kind}x2.f32" for _ in words]
    text = "{ .reg .pred p; .reg .f32 x, y, top, factor<2>, l<2>, m<2>; .reg .b32 e; "
    text += f"mov.f32 l0, {l[0]}; mov.f32 l1, {l[1]}; mov.f32 m0, {m[0]}; mov.f32 m1, {m[1]}; "
    for i, word in enumerate(words):
        text += f"{packed[i]} {word}, {right[i]}, {left[i]}; "
    text += f"setp.ge.f32 p, {sums[0]}, {limit}; setp.ge.or.f32 p, {sums[1]}, {limit}, p; "
    text += "vote.sync.any.pred p, p, 0xffffffff; @!p bra done; "
    text += _moved(0, sums[0], "l0", "m0") + _moved(1, sums[1], "l1", "m1")
    for i, word in enumerate(words):
        text += f"mul.f32 x, {left[i]}, factor{i % 2}; mul.f32 y, {right[i]}, factor{i % 2}; "
        text += f"{packed[i]} {word}, y, x; "
    for i, x in enumerate(o):
        text += f"mul.f32 {x}, {x}, factor{i % 2}; "
    text += "done: "
    for i in range(n):
        text += f"mov.f32 {new_l[i]}, l{i % 2}; mov.f32 {new_m[i]}, m{i % 2}; "
    return text + "}"


@gluon.constexpr_function
def _constraints(n, num_words, num_sums):
    """Of `_assembly`'s operands; outputs are written before all inputs are read.

    O stays in its registers: copies spill where three warpgroups share them (D = 64, causal).
    """
    first = n * num_words
    outputs = ["=&r"] * first + ["=&f"] * (n * (num_sums + 2))
    tied = [str(i) for i in range(first, first + n * num_sums)]
    return ",".join([*outputs, *["f"] * (2 * first), *tied, *["f"] * (3 * n)])


@gluon.constexpr_function
def _products(n):
    """Assembly: a thread's n values of two rows, times the rows' factors if the warp has one not 1.

    Operands: results, values, factors; values lie in turns of two for each of the rows.
    """
    factors = (2 * n, 2 * n + 2)
    moves = " ".join(f"mov.b32 ${i}, ${n + i};" for i in range(n))
    tests = f"setp.ne.f32 p, ${factors[0]}, 1.0; setp.ne.or.f32 p, ${factors[1]}, 1.0, p;"
    products = " ".join(f"mul.f32 ${i}, ${i}, ${factors[i // 2 % 2]};" for i in range(n))
    vote = "vote.sync.any.pred p, p, 0xffffffff; @!p bra over;"
    return f"{{ .reg .pred p; {moves} {tests} {vote} {products} over: }}"


@gluon.constexpr_function
def _constraints_of_products(n):
    return ",".join(["=&f"] * n + ["f"] * (2 * n))


@gluon.constexpr_function
def _types(num_words, num_floats):
    return (gl.int32,) * num_words + (gl.float32,) * num_floats


@gluon.jit
def weights_of(s, unit, base):
    """2^(s * unit - base) of a tile (64, BN)."""
    x = in_fours(s)
    return out_of_fours(gl.exp2(x * unit - beside(base, x)), s)


@gluon.jit
def rescaled(acc, factor, C: gl.constexpr):
    """O times a factor for each row, which is 1 in almost every step where bases lag."""
    x = in_fours(acc)
    factor = beside(factor, x)
    if C.lags:
        N: gl.constexpr = acc.shape[1] // 2
        ASM: gl.constexpr = _products(N)
        OPERANDS: gl.constexpr = _constraints_of_products(N)
        x = gl.inline_asm_elementwise(ASM, OPERANDS, [x, factor], dtype=gl.float32, is_pure=True,
                                      pack=N)  # fmt: skip
    else:
        x = x * factor
    return out_of_fours(x, acc)


@gluon.jit
def _pieces(x, like):
    """(64, N, 4) as a tuple of pieces of the middle that are laid out like `like`."""
    if x.shape[1] == like.shape[1]:
        return (gl.convert_layout(x, like.type.layout, assert_trivial=True),)
    else:
        x = gl.permute(gl.reshape(x, [64, 2, x.shape[1] // 2, 4]), (0, 2, 3, 1))
        a, b = gl.split(x)
        return _pieces(a, like) + _pieces(b, like)


@gluon.jit
def _joined(pieces, START: gl.constexpr, NUMBER: gl.constexpr):
    """`_pieces` undone for some of a tuple."""
    if NUMBER == 1:
        return pieces[START]
    else:
        a = _joined(pieces, START, NUMBER // 2)
        b = _joined(pieces, START + NUMBER // 2, NUMBER // 2)
        return gl.reshape(gl.permute(gl.join(a, b), (0, 3, 1, 2)), [64, 2 * a.shape[1], 4])


@gluon.jit
def _spread(x, like):
    """(64, 4) for arithmetic with (64, N, 4)."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, like.type.layout)
    return gl.expand_dims(gl.convert_layout(x, LAYOUT, assert_trivial=True), 1)


@gluon.jit
def _one(x, like):
    """(64, 4) of (64, N, 4) whose middle is all the same."""
    if x.shape[1] == 1:
        return gl.convert_layout(gl.reshape(x, [64, 4]), like.type.layout, assert_trivial=True)
    else:
        x = gl.permute(gl.reshape(x, [64, 2, x.shape[1] // 2, 4]), (0, 2, 3, 1))
        a, _ = gl.split(x)
        return _one(a, like)


@gluon.jit
def packed_in_range(weights, sums, p, acc, l, m, DTYPE: gl.constexpr):
    """P of a tile, with bases moved where its weights would leave P's range.

    Args:
        weights: (64, BN) float32.
        sums: (64, 4), what each thread's weights sum up to.
        p: words (64, BN / 2) of the step before.
        acc: O so far (64, D_v).
        l, m: sums, this tile's among them, and base (64, 4).

    Returns:
        P as words like `p`; acc, l and m.
    """
    BN: gl.constexpr = weights.shape[1]
    WIDTH: gl.constexpr = acc.shape[1]
    PIECE: gl.constexpr = min(BN, WIDTH)
    WORDS: gl.constexpr = BN // PIECE
    HALF: gl.constexpr = WIDTH // PIECE  # pieces of O's even columns
    left, right = gl.split(in_fours(weights))
    even, odd = gl.split(in_fours(acc))
    like = even
    if BN < WIDTH:
        like = left
    operands = _pieces(left, like) + _pieces(right, like) + _pieces(even, like) + _pieces(odd, like)
    operands = operands + (_spread(l, like), _spread(m, like), _spread(sums, like))
    KIND: gl.constexpr = "bf16" if DTYPE.is_bf16() else "f16"
    ASM: gl.constexpr = _assembly(PIECE // 4, KIND, WORDS, 2 * HALF)
    OPERANDS: gl.constexpr = _constraints(PIECE // 4, WORDS, 2 * HALF)
    TYPES: gl.constexpr = _types(WORDS, 2 * HALF + 2)
    found = gl.inline_asm_elementwise(ASM, OPERANDS, operands, dtype=TYPES, is_pure=True,
                                      pack=PIECE // 4)  # fmt: skip
    words = gl.reshape(_joined(found, 0, WORDS), [64, BN // 2])
    words = gl.convert_layout(words, p.type.layout, assert_trivial=True)
    o = gl.join(_joined(found, WORDS, HALF), _joined(found, WORDS + HALF, HALF))
    return (
        words,
        out_of_fours(o, acc),
        _one(found[WORDS + 2 * HALF], l),
        _one(found[WORDS + 2 * HALF + 1], m),
    )
