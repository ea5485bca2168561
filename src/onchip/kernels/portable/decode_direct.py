"""The decode of one query a sequence on Hopper, in Gluon: operands go straight to their places.

The method is `decode`'s narrow walk: tokens are the matrix product's M side, each warp has
sixteen of a tile's tokens and statistics of its own, and warps meet at the end. Layouts are
chosen here, where Triton chooses them there: float8 values are paired with the next token's in
registers, where Triton turns them by way of shared memory, and P is turned by movmatrix. That
leaves one barrier a tile, and 96 to 122 registers a thread, so that four programs run
on an SM.

Of several pieces of a sequence each puts its statistics aside, and the last one to arrive at a
counter merges them, as in `decode`.

It does not do: several queries, D other than 64 and 128, softcap, ALiBi.

Legend: W warps, D head dimension, N page size, ROWS query heads of a group, padded to 8, KEPT to
a power of two.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.runtime.jit import constexpr_function

_LOWEST = gl.constexpr(-3.0e38)  # the maximum of nothing
_LOG2E = gl.constexpr(1.4426950408889634)
_LN2 = gl.constexpr(0.6931471805599453)
_NUMBERS = (
    "stride_qb stride_qs stride_qh stride_kb stride_ks stride_kh stride_vb stride_vs stride_vh "
    "stride_table num_sequences seqlen_q seqlen_k tokens_q num_heads splits left right num_sms"
).split()


class _Cache(NamedTuple):
    """The keys and values of one sequence and head."""

    table: object  # its row of the block table
    k: object
    v: object
    stride_kb: object
    stride_ks: object
    stride_vb: object
    stride_vs: object
    first: object  # first token that is seen
    last: object  # last one


@constexpr_function
def _copied(spec, warps):
    """Layout of a tile (W, 16, D) on its way to shared memory, 16 bytes a thread."""
    vector = 4 if spec.is_float8 else 8  # float8 as words of four
    lanes = _width(spec) // vector
    return gl.BlockedLayout([1, 1, vector], [1, 32 // lanes, lanes], [warps, 1, 1], [2, 1, 0])


@constexpr_function
def _stored(spec, as_bytes):
    """How its rows lie in shared memory, so that a warp reads without conflicts."""
    vector = 4 if spec.is_float8 else 8
    phases = min(8, _width(spec) // vector)
    vector = 4 * vector if as_bytes else vector
    return gl.SwizzledSharedLayout(vector, 8 // phases, phases, [2, 1, 0])


if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def _as_bytes(words, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """Shared memory seen as float8 (Triton 3.9 and later)."""
        return words.reinterpret(gl.float8e4nv, SHAPE, LAYOUT)

else:

    @gluon.jit
    def _as_bytes(words, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """Shared memory seen as float8 (3.6 to 3.8)."""
        return words._reinterpret(gl.float8e4nv, SHAPE, LAYOUT)


@constexpr_function
def _width(spec):
    """Elements, or words, of a row of K or V."""
    return spec.dim // 4 if spec.is_float8 else spec.dim


@constexpr_function
def _by_token(spec):
    """Whether a warp's sixteen tokens may lie in several pages."""
    return spec.page_size % 16 != 0


@constexpr_function
def _has_edge(spec):
    """Whether a sequence's first tokens may be hidden."""
    return spec.has_left or spec.has_first


@constexpr_function
def _loaded(spec, warps):
    """Layout of q (D, ROWS)."""
    return gl.BlockedLayout([8, 1], [spec.dim // 8, 256 // spec.dim], [1, warps], [0, 1])


@constexpr_function
def _held(spec, warps):
    """Which words of a float8 tile (W, 16, D / 4) a thread has: see `_paired`."""
    each = [1 << i for i in range((spec.dim // 32).bit_length() - 1)]
    lanes = [spec.dim // 32 * i for i in (1, 2, 4)]
    return gl.DistributedLinearLayout(
        reg_bases=[*([0, 0, i] for i in each), [0, 1, 0], [0, 8, 0]],
        lane_bases=[[0, 2, 0], [0, 4, 0], *([0, 0, i] for i in lanes)],
        warp_bases=[[1 << i, 0, 0] for i in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[warps, 16, spec.dim // 4],
    )


@constexpr_function
def _flat(spec, warps):
    """Layout of all sequences, of up to 256 in each warp, which then needs no other."""
    return gl.BlockedLayout([max(1, min(8, spec.batch_padded // 32))], [32], [warps], [0])


@constexpr_function
def _merging(spec, warps):
    """Layout of pieces (AT_ONCE, D, KEPT): a thread has its entries of all of them."""
    heads = min(spec.kept, warps)
    entries = max(1, spec.dim * heads // (32 * warps))
    return gl.BlockedLayout([1, entries, 1], [1, 32, 1], [1, warps // heads, heads], [1, 2, 0])


@constexpr_function
def _at_once(spec, warps):
    """Pieces that are merged at once: up to 64 registers a thread."""
    return min(16, 16 * warps // spec.kept)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _pieces(tiles, wanted, SPEC: gl.constexpr):
    """Pieces that a sequence really gets, at least one; see `decode._pieces`."""
    size = gl.maximum(gl.cdiv(tiles, gl.maximum(wanted, 1)), SPEC.min_tiles)
    return gl.maximum(gl.cdiv(tiles, size), 1)


@gluon.jit
def _edge(lengths, first, left, SPEC: gl.constexpr):
    """First token that is seen; works on vectors too."""
    if SPEC.has_left:
        first = gl.maximum(first, lengths - 1 - left)
    return first


@gluon.jit
def _tiles(length, first, SPEC: gl.constexpr):
    """First tile that is seen, and how many follow; works on vectors too."""
    if _has_edge(SPEC):
        tile = gl.minimum(first, length) // SPEC.block_n
        return tile, gl.where(first < length, gl.cdiv(length, SPEC.block_n) - tile, 0)
    else:
        return length * 0, gl.cdiv(length, SPEC.block_n)


@gluon.jit
def _locate(seqused_k, leftpad_k, num_sequences, left, splits, num_sms, SPEC: gl.constexpr):
    """Sequence, piece, pieces and first program; the cut of `decode._shares` and `_locate`."""
    program = gl.program_id(1)
    every = gl.arange(0, SPEC.batch_padded, _flat(SPEC, gl.num_warps()))
    seen = every < num_sequences
    lengths = gl.load(seqused_k + every, mask=seen, other=0)
    first = lengths * 0
    if SPEC.has_first:
        first = gl.load(leftpad_k + every, mask=seen, other=0)
    _, tiles = _tiles(lengths, _edge(lengths, first, left, SPEC), SPEC)
    total = gl.sum(tiles, 0)
    unequal = gl.max(tiles, 0) * num_sequences * 4 > total * 5
    work = gl.maximum(total * gl.num_programs(0), 1)
    wanted = gl.where(unequal, gl.cdiv(tiles * num_sms * 3, work), splits)
    counts = gl.where(seen, _pieces(tiles, wanted, SPEC), 0)
    ends = gl.associative_scan(counts, 0, _add)
    batch = gl.sum((ends <= program).to(gl.int32), 0)
    end = gl.min(gl.where(ends > program, ends, 2147483647), 0)
    count = gl.sum(gl.where(every == batch, counts, 0), 0)
    return batch, program - (end - count), count, end - count


@gluon.jit
def _tokens(tile, SPEC: gl.constexpr):
    """A tile's tokens (W, 16) as they are copied."""
    EACH: gl.constexpr = gl.SliceLayout(2, _copied(SPEC, gl.num_warps()))
    warp = gl.arange(0, gl.num_warps(), gl.SliceLayout(1, EACH))
    lane = gl.arange(0, 16, gl.SliceLayout(0, EACH))
    return tile * SPEC.block_n + warp[:, None] * 16 + lane[None, :]


@gluon.jit
def _within(token, cache: _Cache, SPEC: gl.constexpr):
    """The token, or the nearest one that is seen: what is hidden is never read."""
    if _has_edge(SPEC):
        token = gl.maximum(token, cache.first)
    return gl.minimum(token, cache.last)


@gluon.jit
def _page_ids(cache: _Cache, tile, SPEC: gl.constexpr):
    """The pages of a tile's tokens, one a warp (W,) or one each (W, 16)."""
    EACH: gl.constexpr = gl.SliceLayout(2, _copied(SPEC, gl.num_warps()))
    warp = gl.arange(0, gl.num_warps(), gl.SliceLayout(1, EACH))
    if SPEC.page_size == 0:
        return warp * 0
    elif _by_token(SPEC):
        token = _within(_tokens(tile, SPEC), cache, SPEC)
    else:
        # Sixteen tokens of which any is seen lie in the page of that one.
        token = gl.minimum(tile * SPEC.block_n + warp * 16, cache.last)
        if _has_edge(SPEC):
            token = gl.maximum(token, gl.minimum(cache.first, cache.last) // 16 * 16)
    return gl.load(cache.table + token // SPEC.page_size)


@gluon.jit
def _rows(ids, tile, stride_page, stride_row, cache: _Cache, SPEC: gl.constexpr):
    """Places of a tile's rows (W, 16, 1), in elements or words, from a head's start.

    Another row stands for what is not seen, and weighs nothing.
    """
    EACH: gl.constexpr = gl.SliceLayout(2, _copied(SPEC, gl.num_warps()))
    UNIT: gl.constexpr = SPEC.vector * _width(SPEC) // SPEC.dim
    if _by_token(SPEC):
        row = _within(_tokens(tile, SPEC), cache, SPEC) % SPEC.page_size
    else:
        warp = gl.arange(0, gl.num_warps(), gl.SliceLayout(1, EACH))
        lane = gl.arange(0, 16, gl.SliceLayout(0, EACH))
        start = gl.minimum(tile * SPEC.block_n + warp * 16, cache.last // 16 * 16)
        row = gl.minimum(lane[None, :], (cache.last - start)[:, None])
        if SPEC.page_size > 0:
            start = start % SPEC.page_size
        row += start[:, None]
        ids = ids[:, None]
    return (ids.to(gl.int64) * (stride_page * UNIT) + row * (stride_row * UNIT))[:, :, None]


@gluon.jit
def _fetch(keys, values, ids, tile, cache: _Cache, SPEC: gl.constexpr):
    """Starts to copy a tile of K and one of V."""
    LAYOUT: gl.constexpr = _copied(SPEC, gl.num_warps())
    column = gl.arange(0, _width(SPEC), gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    column = column[None, None, :]
    rows = _rows(ids, tile, cache.stride_kb, cache.stride_ks, cache, SPEC)
    async_copy.async_copy_global_to_shared(keys, cache.k + (rows + column))
    rows = _rows(ids, tile, cache.stride_vb, cache.stride_vs, cache, SPEC)
    # V of what is not seen becomes 0: 0 times a number that is not finite is not 0.
    token = _tokens(tile, SPEC)[:, :, None]
    seen = token <= cache.last
    if _has_edge(SPEC):
        seen = seen & (token >= cache.first)
    async_copy.async_copy_global_to_shared(values, cache.v + (rows + column), mask=seen)


@gluon.jit
def _load_queries(q, batch, kv_head, stride_qb, stride_qh, SPEC: gl.constexpr):
    """q (D, ROWS) of a group's heads, 0 past the last one."""
    LOADED: gl.constexpr = _loaded(SPEC, gl.num_warps())
    head = gl.arange(0, SPEC.rows, gl.SliceLayout(0, LOADED))
    column = gl.arange(0, SPEC.dim, gl.SliceLayout(1, LOADED))
    at = batch.to(gl.int64) * (stride_qb * SPEC.vector)
    at += (kv_head * SPEC.group + head) * (stride_qh * SPEC.vector)
    mask = (head < SPEC.group)[None, :]
    return gl.load(q + at[None, :] + column[:, None], mask=mask, other=0.0)


@gluon.jit
def _queries(x, factor, SPEC: gl.constexpr, MMA: gl.constexpr):
    """q (W, D, ROWS), the same for all warps, and what turns products into base 2 logits.

    For float8 keys each row is scaled by a power of two first, so that it fits in float16.
    """
    W: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = SPEC.rows
    DIM: gl.constexpr = SPEC.dim
    scale = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(0, x.type.layout)) * factor
    if SPEC.is_float8:
        x = x.to(gl.float32)
        top = gl.max(gl.abs(x), 0)
        exponent = gl.where(top > 0.0, gl.floor(gl.log2(gl.maximum(top, 1e-30))), 0.0)
        x = (x * gl.exp2(-exponent)[None, :]).to(gl.float16)
        scale = gl.exp2(exponent) * factor
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 4 if SPEC.is_float8 else 2)
    shape = gl.zeros([W, DIM, ROWS], x.dtype, B)
    own, shape = gl.broadcast(gl.convert_layout(x, gl.SliceLayout(0, B))[None, :, :], shape)
    return own, gl.convert_layout(scale, gl.SliceLayout(0, gl.SliceLayout(1, MMA)))


@gluon.jit
def _paired(words, SPEC: gl.constexpr, MMA: gl.constexpr):
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
def _turned(p, ROWS: gl.constexpr, MMA: gl.constexpr):
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


@gluon.jit
def _start(k_ring, v_ring, start, stop, cache: _Cache, SPEC: gl.constexpr, STAGES: gl.constexpr):
    """Starts the first copies; the page ids of the tile after them."""
    for s in gl.static_range(STAGES - 1):
        if start + s < stop:
            ids = _page_ids(cache, start + s, SPEC)
            _fetch(k_ring.index(s), v_ring.index(s), ids, start + s, cache, SPEC)
        async_copy.commit_group()
    return _page_ids(cache, start + STAGES - 1, SPEC)


@gluon.jit
def _meet(acc, maximum, denominator, SPEC: gl.constexpr, MMA: gl.constexpr):
    """One set of statistics from those of the warps: (D, ROWS), (ROWS,), (ROWS,)."""
    HEADS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, MMA))
    top = gl.max(maximum, 0)
    weight = gl.exp2(maximum - gl.expand_dims(top, 0))
    total = gl.sum(denominator * weight, 0)
    acc = gl.sum(acc * gl.expand_dims(weight, 1), 0)
    return acc, gl.convert_layout(top, HEADS), gl.convert_layout(total, HEADS)


@gluon.jit
def _finish(acc, top, total, out, lse, sinks, batch, kv_head, num_heads, v_factor, feature,
            SPEC: gl.constexpr):  # fmt: skip
    """Adds the sink, divides and writes acc (D, heads); see `decode_results.finish`."""
    row = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    head = kv_head * SPEC.group + row
    inside = row < SPEC.group
    if sinks is not None:
        sink = gl.load(sinks + head, mask=inside, other=float("-inf")).to(gl.float32) * _LOG2E
        both = gl.maximum(top, sink)
        rescale = gl.exp2(top - both)
        total = total * rescale + gl.exp2(sink - both)
        acc = acc * rescale[None, :]
        top = both
    inverse = gl.where(total == 0.0, 0.0, v_factor / total)
    place = (batch.to(gl.int64) * num_heads + head) * SPEC.dim
    result = (acc * inverse[None, :]).to(out.dtype.element_ty)
    gl.store(out + place[None, :] + feature[:, None], result, mask=inside[None, :])
    result = gl.where(total == 0.0, float("-inf"), (top + gl.log2(total)) * _LN2)
    gl.store(lse + batch.to(gl.int64) * num_heads + head, result, mask=inside)


@gluon.jit
def _put_aside(acc, top, total, partial_out, partial_stats, place, feature, SPEC: gl.constexpr):
    """Stores a piece's statistics as number `place`; see `decode_results.put_aside`."""
    row = gl.arange(0, SPEC.rows, gl.SliceLayout(0, acc.type.layout))
    kept = row < SPEC.kept
    at = place * SPEC.kept + row
    gl.store(partial_out + at[None, :] * SPEC.dim + feature[:, None], acc, mask=kept[None, :])
    gl.store(partial_stats + at * 2, top, mask=kept)
    gl.store(partial_stats + at * 2 + 1, total, mask=kept)


@gluon.jit
def _merged(partial_out, partial_stats, place, count, SPEC: gl.constexpr):
    """`count` pieces from number `place` on: (D, KEPT), (KEPT,), (KEPT,).

    Sums over pieces stay inside a thread, in the order of the keys; see `decode_results.merged`.
    """
    AT_ONCE: gl.constexpr = _at_once(SPEC, gl.num_warps())
    KEPT: gl.constexpr = SPEC.kept
    DIM: gl.constexpr = SPEC.dim
    LAYOUT: gl.constexpr = _merging(SPEC, gl.num_warps())
    STATS: gl.constexpr = gl.SliceLayout(1, LAYOUT)  # (AT_ONCE, KEPT)
    SUMS: gl.constexpr = gl.SliceLayout(0, LAYOUT)  # (D, KEPT)
    piece = gl.arange(0, AT_ONCE, gl.SliceLayout(1, STATS))
    row = gl.arange(0, KEPT, gl.SliceLayout(0, STATS))
    feature = gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    top = gl.full([KEPT], _LOWEST, gl.float32, gl.SliceLayout(0, STATS))
    total = gl.zeros([KEPT], gl.float32, gl.SliceLayout(0, STATS))
    acc = gl.zeros([DIM, KEPT], gl.float32, SUMS)
    for start in range(0, count, AT_ONCE):
        seen = (start + piece < count)[:, None]
        at = (place + start + piece)[:, None] * KEPT + row[None, :]
        # Straight from L2: other SMs wrote it.
        tops = gl.load(partial_stats + at * 2, mask=seen, other=_LOWEST, cache_modifier=".cg")
        sums = gl.load(partial_stats + at * 2 + 1, mask=seen, other=0.0, cache_modifier=".cg")
        entry = gl.expand_dims(at, 1) * DIM + feature[None, :][:, :, None]
        outs = gl.load(partial_out + entry, mask=gl.expand_dims(seen, 1), other=0.0,
                       cache_modifier=".cg")  # fmt: skip
        now = gl.maximum(top, gl.max(tops, 0))
        rescale = gl.exp2(top - now)
        weights = gl.exp2(tops - now[None, :])
        total = total * rescale + gl.sum(sums * weights, 0)
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(0, SUMS))[None, :]
        acc += gl.sum(outs * gl.expand_dims(weights, 1), 0)
        top = now
    top = gl.convert_layout(top, gl.SliceLayout(0, SUMS))
    return acc, top, gl.convert_layout(total, gl.SliceLayout(0, SUMS))


@gluon.jit
def _finish_merged(partial_out, partial_stats, place, count, out, lse, sinks, batch, kv_head,
                   num_heads, v_factor, SPEC: gl.constexpr):  # fmt: skip
    """Merges all pieces of a sequence and writes its output."""
    acc, top, total = _merged(partial_out, partial_stats, place, count, SPEC)
    feature = gl.arange(0, SPEC.dim, gl.SliceLayout(1, acc.type.layout))
    _finish(acc, top, total, out, lse, sinks, batch, kv_head, num_heads, v_factor, feature, SPEC)


@gluon.jit
def _rings(cache: _Cache, SPEC: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory of K and V, and K as its elements are read."""
    W: gl.constexpr = gl.num_warps()
    KIND: gl.constexpr = cache.k.dtype.element_ty
    SHAPE: gl.constexpr = (STAGES, W, 16, _width(SPEC))
    k_ring = gl.allocate_shared_memory(KIND, SHAPE, _stored(SPEC, False))
    v_ring = gl.allocate_shared_memory(KIND, SHAPE, _stored(SPEC, False))
    keys = k_ring
    if SPEC.is_float8:
        DIM: gl.constexpr = SPEC.dim
        keys = _as_bytes(k_ring, [STAGES, W, 16, DIM], _stored(SPEC, True))
    return k_ring, v_ring, keys


@gluon.jit
def _hidden(tile, cache: _Cache, SPEC: gl.constexpr, MMA: gl.constexpr):
    """Which of a tile's tokens (W, 16, 1) are not seen."""
    warp = gl.arange(0, gl.num_warps(), gl.SliceLayout(1, gl.SliceLayout(2, MMA)))
    lane = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, MMA)))
    token = tile * SPEC.block_n + warp[:, None, None] * 16 + lane[None, :, None]
    hidden = token > cache.last
    if _has_edge(SPEC):
        hidden = hidden | (token < cache.first)
    return hidden


@gluon.jit
def _walk(start, stop, cache: _Cache, x, factor, SPEC: gl.constexpr, MMA: gl.constexpr,
          STAGES: gl.constexpr):  # fmt: skip
    """Statistics of each warp over the tiles [start, stop), for the queries x."""
    W: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = SPEC.rows
    DIM: gl.constexpr = SPEC.dim
    F8: gl.constexpr = SPEC.is_float8
    k_ring, v_ring, keys = _rings(cache, SPEC, STAGES)
    ids = _start(k_ring, v_ring, start, stop, cache, SPEC, STAGES)
    queries, scale = _queries(x, factor, SPEC, MMA)
    acc = gl.zeros([W, DIM, ROWS], gl.float32, MMA)
    maximum = gl.full([W, ROWS], _LOWEST, gl.float32, gl.SliceLayout(1, MMA))
    denominator = gl.zeros([W, ROWS], gl.float32, gl.SliceLayout(1, MMA))
    slot = 0
    ahead = STAGES - 1
    for tile in range(start, stop):
        async_copy.wait_group(STAGES - 2)
        gl.thread_barrier()  # all copies are there, and all warps are done with the tile before
        if tile + STAGES - 1 < stop:
            _fetch(k_ring.index(ahead), v_ring.index(ahead), ids, tile + STAGES - 1, cache, SPEC)
            ids = _page_ids(cache, tile + STAGES, SPEC)
        async_copy.commit_group()
        key = keys.index(slot).load(gl.DotOperandLayout(0, MMA, 4 if F8 else 2))
        if F8:
            key = key.to(gl.float16)
        scores = mma_v2(key, queries, gl.zeros([W, 16, ROWS], gl.float32, MMA))
        scores = scores * scale[None, None, :]
        scores = gl.where(_hidden(tile, cache, SPEC, MMA), float("-inf"), scores)
        now = gl.maximum(maximum, gl.max(scores, 1))
        rescale = gl.exp2(maximum - now)
        p = gl.exp2(scores - gl.expand_dims(now, 1))
        denominator = denominator * rescale + gl.sum(p, 1)
        acc = acc * gl.expand_dims(rescale, 1)
        if F8:
            value = _paired(v_ring.index(slot), SPEC, MMA)
        else:
            value = v_ring.index(slot).permute([0, 2, 1]).load(gl.DotOperandLayout(0, MMA, 2))
        acc = mma_v2(value, _turned(p.to(value.dtype), ROWS, MMA), acc)
        maximum = now
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
        ahead = gl.where(ahead == STAGES - 1, 0, ahead + 1)
    async_copy.wait_group(0)
    gl.thread_barrier()
    return acc, maximum, denominator


@gluon.jit(do_not_specialize=_NUMBERS)
def attn_decode_direct(
    q, k, v, out, lse, block_table, cu_seqlens_q, seqused_k, leftpad_k, alibi_slopes, sinks,
    k_scale, v_scale, partial_out, partial_stats, counters,
    stride_qb: gl.int64, stride_qs: gl.int64, stride_qh: gl.int64,
    stride_kb: gl.int64, stride_ks: gl.int64, stride_kh: gl.int64,
    stride_vb: gl.int64, stride_vs: gl.int64, stride_vh: gl.int64, stride_table: gl.int64,
    num_sequences, seqlen_q, seqlen_k, tokens_q: gl.int64, num_heads, splits, left, right,
    scale: gl.float32, softcap: gl.float32, num_sms,
    SPEC: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program: the heads of one group against a piece of a sequence."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1, 1], [1, 16, 8])
    kv_head = gl.program_id(0)
    if SPEC.batch_padded == 1:
        batch = gl.program_id(1) // splits
        index = gl.program_id(1) % splits
        first_program = batch * splits
        count = splits
    else:
        batch, index, count, first_program = _locate(
            seqused_k, leftpad_k, num_sequences, left, splits, num_sms, SPEC
        )
        if batch >= num_sequences:
            return
    length = seqlen_k
    if seqused_k is not None:
        length = gl.load(seqused_k + batch)
    first = 0
    if leftpad_k is not None:
        first = gl.load(leftpad_k + batch)
    first = _edge(length, first, left, SPEC)
    first_tile, tiles = _tiles(length, first, SPEC)
    if SPEC.batch_padded == 1:
        count = _pieces(tiles, splits, SPEC)
        if index >= count:
            return
    size = gl.cdiv(tiles, count)
    start = first_tile + index * size
    stop = gl.minimum(start + size, first_tile + tiles)

    table = block_table
    row = batch.to(gl.int64)
    if SPEC.page_size > 0:
        table = block_table + row * stride_table
        row = row * 0
    elif block_table is not None:
        row = gl.load(block_table + row * stride_table).to(gl.int64)
    keys, values = k, v
    if SPEC.is_float8:
        keys = k.to(gl.pointer_type(gl.int32))
        values = v.to(gl.pointer_type(gl.int32))
    UNIT: gl.constexpr = SPEC.vector * _width(SPEC) // SPEC.dim
    keys += (kv_head * stride_kh + row * stride_kb) * UNIT
    values += (kv_head * stride_vh + row * stride_vb) * UNIT
    cache = _Cache(table, keys, values, stride_kb, stride_ks, stride_vb, stride_vs, first,
                   gl.maximum(length - 1, 0))  # fmt: skip
    v_factor = 1.0
    if k_scale is not None:
        scale = scale * gl.load(k_scale + kv_head)
    if v_scale is not None:
        v_factor = gl.load(v_scale + kv_head)
    x = _load_queries(q, batch, kv_head, stride_qb, stride_qh, SPEC)
    acc, top, total = _walk(start, stop, cache, x, scale, SPEC, MMA, STAGES)
    acc, top, total = _meet(acc, top, total, SPEC, MMA)
    feature = gl.arange(0, SPEC.dim, gl.SliceLayout(1, acc.type.layout))
    if SPEC.is_float8:  # see `_paired`
        feature = feature % 8 * (SPEC.dim // 8) + feature // 8
    if count == 1:
        _finish(acc, top, total, out, lse, sinks, batch, kv_head, num_heads, v_factor, feature,
                SPEC)  # fmt: skip
    elif SPEC.merges:
        place = kv_head.to(gl.int64) * gl.num_programs(1) + first_program
        _put_aside(acc, top, total, partial_out, partial_stats, place + index, feature, SPEC)
        gl.thread_barrier()  # all threads' stores come before the one thread's count
        counter = counters + batch * gl.num_programs(0) + kv_head
        if gl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
            _finish_merged(partial_out, partial_stats, place, count, out, lse, sinks, batch, kv_head,
                           num_heads, v_factor, SPEC)  # fmt: skip
            gl.store(counter, 0)
