"""Assembly of the Hopper float8 forward's weights, for `fp8_weights.py`.

A thread holds of each of two rows four keys of every 16; the four make a word of P. Word
2i + r is that of the i-th 16 keys and of row r. x = logit - base is one multiply-add of S, and 2^x
a straight line between powers of two, which leaves the exponential unit alone (16 results a clock):

    x + 15 as float16's subnormal number: a conversion that rounds to steps of 1/32, makes
    negative numbers 0 and keeps NaN;
    5 bits to the left: its bits are now those of the float16 number (1 + f) 2^n;
    two numbers at a time to float8

Whether P would leave float8's range is seen in the steps: `_MOST` or more. Then, in almost no
step, a warp takes the maxima of S, moves the bases of the rows concerned and makes all weights
anew.

All functions are constexpr functions, so that Triton's cache knows their text.
"""

from __future__ import annotations

from triton.experimental import gluon

from onchip.kernels import fp8_layout
from onchip.kernels.hopper.gluon_names import gl

_FIRST_ROOM = gl.constexpr(fp8_layout.FIRST_ROOM)
_ROOM = gl.constexpr(fp8_layout.ROOM)
_LIMIT = gl.constexpr(fp8_layout.LIMIT)
_NEVER = gl.constexpr(fp8_layout.NEVER)
_LINE_SHIFT = gl.constexpr(15 - fp8_layout.LOWERED)  # 15: float16's bias
_LINE_STEP = gl.constexpr(fp8_layout.LINE_STEPS * 2.0**-24)  # 2^-24: float16's least number
_MOST = gl.constexpr(int(fp8_layout.LINE_STEPS * (15 - fp8_layout.LOWERED + fp8_layout.LIMIT)))
_DECLARED = gl.constexpr(
    ".reg .pred p; .reg .f32 x<4>, line<2>, most<2>, base<2>, factor<2>, unit, step; "
    ".reg .b16 h<2>; .reg .b32 y<2>, top, any, w<16>; "
)


@gluon.constexpr_function
def _number(x):
    """A float32 literal."""
    import struct

    return "0f" + struct.pack(">f", x).hex().upper()


@gluon.constexpr_function
def _operands(first, number, lists):
    """Names of operands, from `first` on: so many lists of so many."""
    return [[f"${first + j * number + i}" for i in range(number)] for j in range(lists)]


@gluon.constexpr_function
def _fours(lists):
    """Four lists as one of four each."""
    return [list(four) for four in zip(*lists, strict=True)]


@gluon.constexpr_function
def _prepared():
    """What is added to S times `step` in each row."""
    text = ""
    for r in range(2):
        text += f"fma.rn.f32 line{r}, base{r}, {_number(-_LINE_STEP.value)}, "
        text += f"{_number(_LINE_SHIFT.value * _LINE_STEP.value)}; "
    return text


@gluon.constexpr_function
def _begun(bases, unit):
    text = _DECLARED.value + f"mov.f32 unit, {unit}; mul.f32 step, unit, "
    text += f"{_number(_LINE_STEP.value)}; mov.f32 base0, {bases[0]}; mov.f32 base1, {bases[1]}; "
    return text


@gluon.constexpr_function
def _weights(words, keys):
    """Words of some 16s of keys; `top` is the largest number of steps."""
    text = "mov.b32 top, 0; "
    for i, word in enumerate(words):
        for k, key in enumerate(keys[i]):
            text += f"fma.rn.f32 x{k}, {key}, step, line{i % 2}; "
        text += "cvt.rn.relu.f16x2.f32 y0, x1, x0; cvt.rn.relu.f16x2.f32 y1, x3, x2; "
        text += "max.s16x2 top, top, y0; max.s16x2 top, top, y1; "
        text += "shl.b32 y0, y0, 5; shl.b32 y1, y1, 5; "
        text += "cvt.rn.satfinite.e4m3x2.f16x2 h0, y0; cvt.rn.satfinite.e4m3x2.f16x2 h1, y1; "
        text += f"mov.b32 {word}, {{h0, h1}}; "
    return text


@gluon.constexpr_function
def _moved(keys):
    """Bases of rows whose largest logit is `LIMIT` above them, in `most`; others as they are."""
    text = ""
    for i, four in enumerate(keys):
        for k, key in enumerate(four):
            first = i < 2 and k == 0
            text += f"max.f32 most{i % 2}, {key if first else f'most{i % 2}'}, {key}; "
    for r in range(2):
        for lane in (1, 2):
            text += f"shfl.sync.bfly.b32 x0, most{r}, {lane}, 31, 0xffffffff; "
            text += f"max.f32 most{r}, most{r}, x0; "
        text += f"mul.f32 most{r}, most{r}, unit; sub.f32 x0, most{r}, base{r}; "
        text += f"setp.le.f32 p, base{r}, {_number(_NEVER.value)}; "
        text += f"selp.f32 x1, {_number(-_FIRST_ROOM.value)}, {_number(-_ROOM.value)}, p; "
        text += f"add.f32 most{r}, most{r}, x1; setp.ge.f32 p, x0, {_number(_LIMIT.value)}; "
        text += f"selp.f32 most{r}, most{r}, base{r}, p; "
    return text


@gluon.constexpr_function
def _none_is_over():
    """Jumps to `done` if no weight of the warp is at the end of float8's range."""
    text = f"add.u32 any, top, {(0x8000 - _MOST.value) * 0x10001}; and.b32 any, any, 0x80008000; "
    text += "setp.ne.u32 p, any, 0; "
    return text + "vote.sync.any.pred p, p, 0xffffffff; @!p bra done; "


@gluon.constexpr_function
def next_tile(n):
    """Weights of a further tile, made anew where a base has to move.

    Outputs, n each: words of both halves of the keys; base; factor on sums so far. Inputs: the
    four keys of each word of both halves; base; unit.
    """
    lower, upper, new_bases, factors = _operands(0, n, 4)
    *keys, bases, units = _operands(4 * n, n, 10)
    keys = _fours(keys[:4]) + _fours(keys[4:])
    words = [f"w{i}" for i in range(2 * n)]
    text = "{ " + _begun(bases, units[0]) + _prepared() + _weights(words, keys)
    text += "mov.f32 factor0, 0f3F800000; mov.f32 factor1, 0f3F800000; "
    text += _none_is_over() + _moved(keys)
    for r in range(2):
        text += f"sub.f32 factor{r}, base{r}, most{r}; mov.f32 base{r}, most{r}; "
        text += f"ex2.approx.ftz.f32 factor{r}, factor{r}; "
    text += _prepared() + _weights(words, keys) + "done: "
    for i in range(n):
        text += f"mov.b32 {lower[i]}, w{i}; mov.b32 {upper[i]}, w{n + i}; "
        text += f"mov.f32 {new_bases[i]}, base{i % 2}; mov.f32 {factors[i]}, factor{i % 2}; "
    return text + "}"


@gluon.constexpr_function
def first_tile(n):
    """Weights of a row's first tile.

    Outputs, n each: words of both halves; base. Inputs: the four keys of each word of both halves;
    unit.
    """
    lower, upper, new_bases = _operands(0, n, 3)
    *keys, units = _operands(3 * n, n, 9)
    keys = _fours(keys[:4]) + _fours(keys[4:])
    never = _number(_NEVER.value)
    text = "{ " + _begun([never, never], units[0]) + _moved(keys)
    text += "mov.f32 base0, most0; mov.f32 base1, most1; " + _prepared()
    text += _weights(lower + upper, keys)
    return text + "".join(f"mov.f32 {x}, base{i % 2}; " for i, x in enumerate(new_bases)) + "}"


@gluon.constexpr_function
def constraints(n, outputs, inputs):
    """Constraints of n operands for each letter; outputs are written before inputs are read."""
    letters = [f"=&{kind}" for kind in outputs] + list(inputs)
    return ",".join(kind for kind in letters for _ in range(n))
