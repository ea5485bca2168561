"""Device functions of `decode_direct` that move tiles: copies, operands from shared memory.

Legend: W warps, D head dimension, N page size, ROWS query heads of a group, padded to 8.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.runtime.jit import constexpr_function

from onchip.kernels.gluon_names import as_tile


class Cache(NamedTuple):
    """The keys and values of one sequence and head."""

    table: object  # its row of the block table
    k: object
    v: object
    stride_kb: object
    stride_ks: object
    stride_vb: object
    stride_vs: object
    first: object  # first token that is seen
    last: object  # last one; -1 where there is none
    held: object  # last one that is read from memory: where the call appends, the one before


@constexpr_function
def copied(spec, warps):
    """Layout of a tile (W, 16, D) on its way to shared memory, 16 bytes a thread."""
    vector = 4 if spec.is_float8 else 8  # float8 as words of four
    lanes = width_of(spec) // vector
    return gl.BlockedLayout([1, 1, vector], [1, 32 // lanes, lanes], [warps, 1, 1], [2, 1, 0])


@constexpr_function
def _stored(spec, as_bytes):
    """How its rows lie in shared memory, so that a warp reads without conflicts."""
    vector = 4 if spec.is_float8 else 8
    phases = min(8, width_of(spec) // vector)
    vector = 4 * vector if as_bytes else vector
    return gl.SwizzledSharedLayout(vector, 8 // phases, phases, [2, 1, 0])


if hasattr(async_copy, "async_load"):

    @gluon.jit
    def _copy(target, source, mask):
        """Starts to copy; what is masked becomes 0 (Triton 3.8 and later)."""
        async_copy.async_load(target, source, mask=mask)

else:

    @gluon.jit
    def _copy(target, source, mask):
        """Starts to copy; what is masked becomes 0 (3.6 and 3.7)."""
        async_copy.async_copy_global_to_shared(target, source, mask=mask)


@gluon.jit
def meet_other_launches():
    """Waits until earlier launches are done, and lets the next one be set up meanwhile.

    Does nothing in a launch without `launch_pdl`.
    """
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r",
        [gl.full([32 * gl.num_warps()], 0, gl.int32, LANES)], dtype=gl.int32, is_pure=False,
        pack=1)  # fmt: skip


@gluon.jit
def settle(x):
    """`x`, which is not the least number but one, is there before what follows.

    The assembler moves loads down to where they are used, but not over a trap.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.s32 p, $1, -2147483647; @p trap; mov.b32 $0, $1; }", "=r,r", [x],
        dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@constexpr_function
def width_of(spec):
    """Elements, or words, of a row of K or V."""
    return spec.dim // 4 if spec.is_float8 else spec.dim


@constexpr_function
def _by_token(spec):
    """Whether a warp's sixteen tokens may lie in several pages."""
    return spec.page_size % 16 != 0


@constexpr_function
def has_edge(spec):
    """Whether a sequence's first tokens may be hidden."""
    return spec.has_left or spec.has_first


@constexpr_function
def _held(spec, warps):
    """Which words of a float8 tile (W, 16, D / 4) a thread has: see `paired`."""
    each = [1 << i for i in range((spec.dim // 32).bit_length() - 1)]
    lanes = [spec.dim // 32 * i for i in (1, 2, 4)]
    return gl.DistributedLinearLayout(
        reg_bases=[*([0, 0, i] for i in each), [0, 1, 0], [0, 8, 0]],
        lane_bases=[[0, 2, 0], [0, 4, 0], *([0, 0, i] for i in lanes)],
        warp_bases=[[1 << i, 0, 0] for i in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[warps, 16, spec.dim // 4],
    )


@gluon.jit
def _tokens(tile, SPEC: gl.constexpr):
    """A tile's tokens (W, 16) as they are copied."""
    EACH: gl.constexpr = gl.SliceLayout(2, copied(SPEC, gl.num_warps()))
    warp = gl.arange(0, gl.num_warps(), gl.SliceLayout(1, EACH))
    lane = gl.arange(0, 16, gl.SliceLayout(0, EACH))
    return tile * SPEC.block_n + warp[:, None] * 16 + lane[None, :]


@gluon.jit
def _within(token, cache: Cache, SPEC: gl.constexpr):
    """The token, or the nearest one that is seen and held: what is hidden is never read."""
    if has_edge(SPEC):
        token = gl.maximum(token, cache.first)
    return gl.minimum(token, cache.held)


@gluon.jit
def page_ids(cache: Cache, tile, SPEC: gl.constexpr):
    """The pages of a tile's tokens, one a warp (W,) or one each (W, 16)."""
    EACH: gl.constexpr = gl.SliceLayout(2, copied(SPEC, gl.num_warps()))
    warp = gl.arange(0, gl.num_warps(), gl.SliceLayout(1, EACH))
    if SPEC.page_size == 0:
        return warp * 0
    else:
        if _by_token(SPEC):
            token = _within(_tokens(tile, SPEC), cache, SPEC)
        else:
            # Sixteen tokens of which any is seen lie in the page of that one.
            token = gl.minimum(tile * SPEC.block_n + warp * 16, cache.held)
            if has_edge(SPEC):
                token = gl.maximum(token, gl.minimum(cache.first, cache.held) // 16 * 16)
        # The table of a sequence without tokens may have no entries.
        any_seen = token * 0 <= cache.held
        if SPEC.appends:
            any_seen = token * 0 < cache.last
        return gl.load(cache.table + token // SPEC.page_size, mask=any_seen, other=0)


@gluon.jit
def _rows(ids, tile, stride_page, stride_row, cache: Cache, SPEC: gl.constexpr):
    """Places of a tile's rows (W, 16, 1), in elements or words, from a head's start.

    Another row stands for what is not seen, and weighs nothing.
    """
    EACH: gl.constexpr = gl.SliceLayout(2, copied(SPEC, gl.num_warps()))
    UNIT: gl.constexpr = SPEC.vector * width_of(SPEC) // SPEC.dim
    if _by_token(SPEC):
        row = _within(_tokens(tile, SPEC), cache, SPEC) % SPEC.page_size
    else:
        warp = gl.arange(0, gl.num_warps(), gl.SliceLayout(1, EACH))
        lane = gl.arange(0, 16, gl.SliceLayout(0, EACH))
        start = gl.minimum(tile * SPEC.block_n + warp * 16, cache.held // 16 * 16)
        row = gl.minimum(lane[None, :], (cache.held - start)[:, None])
        if SPEC.page_size > 0:
            start = start % SPEC.page_size
        row += start[:, None]
        ids = ids[:, None]
    return (ids.to(gl.int64) * (stride_page * UNIT) + row * (stride_row * UNIT))[:, :, None]


@gluon.jit
def fetch(keys, values, ids, tile, cache: Cache, SPEC: gl.constexpr):
    """Starts to copy a tile of K and one of V."""
    LAYOUT: gl.constexpr = copied(SPEC, gl.num_warps())
    column = gl.arange(0, width_of(SPEC), gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    column = column[None, None, :]
    rows = _rows(ids, tile, cache.stride_kb, cache.stride_ks, cache, SPEC)
    _copy(keys, cache.k + (rows + column), None)
    rows = _rows(ids, tile, cache.stride_vb, cache.stride_vs, cache, SPEC)
    # V of what is not seen becomes 0: 0 times a number that is not finite is not 0.
    token = _tokens(tile, SPEC)[:, :, None]
    seen = token <= cache.held
    if has_edge(SPEC):
        seen = seen & (token >= cache.first)
    _copy(values, cache.v + (rows + column), seen)


@gluon.jit
def rings(cache: Cache, SPEC: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory of K and V, and K as its elements are read."""
    W: gl.constexpr = gl.num_warps()
    KIND: gl.constexpr = cache.k.dtype.element_ty
    SHAPE: gl.constexpr = (STAGES, W, 16, width_of(SPEC))
    k_ring = gl.allocate_shared_memory(KIND, SHAPE, _stored(SPEC, False))
    v_ring = gl.allocate_shared_memory(KIND, SHAPE, _stored(SPEC, False))
    keys = k_ring
    if SPEC.is_float8:
        DIM: gl.constexpr = SPEC.dim
        keys = as_tile(k_ring, gl.float8e4nv, [STAGES, W, 16, DIM], _stored(SPEC, True))
    return k_ring, v_ring, keys


@gluon.jit
def hidden(tile, cache: Cache, SPEC: gl.constexpr, MMA: gl.constexpr):
    """Which of a tile's tokens (W, 16, 1) are not seen."""
    warp = gl.arange(0, gl.num_warps(), gl.SliceLayout(1, gl.SliceLayout(2, MMA)))
    lane = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, MMA)))
    token = tile * SPEC.block_n + warp[:, None, None] * 16 + lane[None, :, None]
    hidden = token > cache.last
    if has_edge(SPEC):
        hidden = hidden | (token < cache.first)
    return hidden


@gluon.jit
def load_queries(q, batch, kv_head, stride_qb, stride_qh, SPEC: gl.constexpr, MMA: gl.constexpr):
    """q (W, D, ROWS) of a group's heads, the same for all warps, 0 past the last one.

    Each warp loads it as a product's second operand: it need not change its place.
    """
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 4 if SPEC.is_float8 else 2)
    warp = gl.arange(0, gl.num_warps(), gl.SliceLayout(1, gl.SliceLayout(2, B)))
    column = gl.arange(0, SPEC.dim, gl.SliceLayout(0, gl.SliceLayout(2, B)))
    row = gl.arange(0, SPEC.rows, gl.SliceLayout(0, gl.SliceLayout(1, B)))
    head = (warp * 0)[:, None, None] + (kv_head * SPEC.group + row)[None, None, :]
    at = batch.to(gl.int64) * (stride_qb * SPEC.vector) + head * (stride_qh * SPEC.vector)
    inside = (row < SPEC.group)[None, None, :]
    return gl.load(q + (at + column[None, :, None]), mask=inside, other=0.0)


@gluon.jit
def prepared(x, factor, SPEC: gl.constexpr, MMA: gl.constexpr):
    """q (W, D, ROWS), and what turns products into base 2 logits (W, ROWS).

    For float8 keys each row is scaled by a power of two first, so that it fits in float16.
    """
    TERMS: gl.constexpr = gl.SliceLayout(1, MMA)
    scale = gl.full([gl.num_warps(), SPEC.rows], 1.0, gl.float32, TERMS) * factor
    if SPEC.is_float8:
        x = x.to(gl.float32)
        top = gl.max(gl.abs(x), 1)
        exponent = gl.where(top > 0.0, gl.floor(gl.log2(gl.maximum(top, 1e-30))), 0.0)
        x = (x * gl.expand_dims(gl.exp2(-exponent), 1)).to(gl.float16)
        scale = gl.convert_layout(gl.exp2(exponent), TERMS) * factor
    return x, scale


@gluon.jit
def paired(words, SPEC: gl.constexpr, MMA: gl.constexpr):
    """V^T of a float8 tile as float16 (W, D, 16): row 8 n + g is feature D / 8 g + n.

    A thread holds what it multiplies: D / 8 features of two pairs of tokens, as words of four.
    Bytes of a pair of tokens are laid side by side (prmt) and widened together.
    """
    W: gl.constexpr = gl.num_warps()
    DIM: gl.constexpr = SPEC.dim
    EACH: gl.constexpr = DIM // 32  # words
    pairs = gl.permute(gl.reshape(words.load(_held(SPEC, W)), [W, 8, 2, 8 * EACH]), [0, 1, 3, 2])
    even, odd = gl.split(pairs)
    a0, a1, b0, b1, c0, c1, d0, d1 = gl.inline_asm_elementwise(
        "{ .reg .b32 lo, hi, x; .reg .b16 l, h; "
        "prmt.b32 lo, $8, $9, 0x5140; prmt.b32 hi, $8, $9, 0x7362; "
        "mov.b32 {l, h}, lo; cvt.rn.f16x2.e4m3x2 x, l; mov.b32 {$0, $1}, x; "
        "cvt.rn.f16x2.e4m3x2 x, h; mov.b32 {$2, $3}, x; "
        "mov.b32 {l, h}, hi; cvt.rn.f16x2.e4m3x2 x, l; mov.b32 {$4, $5}, x; "
        "cvt.rn.f16x2.e4m3x2 x, h; mov.b32 {$6, $7}, x; }",
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [even, odd], dtype=(gl.float16,) * 8, is_pure=True, pack=1,
    )  # fmt: skip
    first = gl.join(gl.join(a0, a1), gl.join(c0, c1))  # bytes 0 and 2 of a word
    second = gl.join(gl.join(b0, b1), gl.join(d0, d1))
    v = gl.reshape(gl.join(first, second), [W, 8, 8, EACH, 2, 4])  # (pair, g, word, token, byte)
    v = gl.reshape(gl.permute(v, [0, 3, 5, 2, 1, 4]), [W, DIM, 16])
    return gl.convert_layout(v, gl.DotOperandLayout(0, MMA, 2))


@gluon.jit
def turned(p, ROWS: gl.constexpr, MMA: gl.constexpr):
    """P^T (W, 16, ROWS) in 16 bit as a product's second operand.

    movmatrix turns 8 x 8 matrices of a warp: what was (token, heads of a thread) is (head, tokens
    of a thread). The reshapes give that its name.
    """
    W: gl.constexpr = gl.num_warps()
    bits = gl.reshape(p.to(gl.int16, bitcast=True), [W, 16, ROWS // 2, 2])
    a, b = gl.split(bits)
    x, y = gl.inline_asm_elementwise(
        "{ .reg .b32 x, y; mov.b32 x, {$2, $3}; "
        "movmatrix.sync.aligned.m8n8.trans.b16 y, x; mov.b32 {$0, $1}, y; }",
        "=h,=h,h,h", [a, b], dtype=(gl.int16, gl.int16), is_pure=True, pack=1,
    )  # fmt: skip
    z = gl.reshape(gl.join(x, y), [W, 2, 8, ROWS // 8, 4, 2])
    z = gl.reshape(gl.permute(z, [0, 1, 4, 5, 3, 2]), [W, 16, ROWS])
    return gl.convert_layout(z, gl.DotOperandLayout(1, MMA, 2)).to(p.dtype, bitcast=True)
