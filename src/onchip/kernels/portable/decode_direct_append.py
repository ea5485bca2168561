"""Device functions of `decode_direct` that append: a sequence's new key and value, its turned q.

One program walks the tile that the new token falls in: it writes the token to the cache, and
puts it into its copy of the tile. Nobody reads the new token from the cache, whose memory
may still hold anything there; so no program waits for another one's writes.

Legend: W warps, D head dimension, ROWS query heads of a group, padded to 8.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from onchip.kernels.gluon_names import wait_for_all
from onchip.kernels.portable.decode_direct_tiles import Cache, copied


class New(NamedTuple):
    """A sequence's new token, of one head of K, and the queries that turn as it does."""

    q: object  # the group's first head
    stride_qh: object
    k: object
    v: object
    cos: object  # of the token's position; None where nothing turns
    sin: object
    row: object  # of a cache whose sequences lie in one piece; below 0 stores nothing
    room: object  # tokens that the table has room for: past it nothing is stored


@constexpr_function
def _beside(dim, warps):
    """Layout of rows (ROWS, D), neighbouring threads side by side."""
    return gl.BlockedLayout([1, dim // 32], [1, 32], [warps, 1], [1, 0])


@constexpr_function
def _row(warps):
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit
def new_rows(KIND: gl.constexpr, SPEC: gl.constexpr):
    """Shared memory of the new key and value (2, D)."""
    return gl.allocate_shared_memory(
        KIND, [2, SPEC.dim], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )  # fmt: skip


@gluon.jit
def _gathered(source, column, seen, wanted, new: New, SPEC: gl.constexpr):
    """16-bit features `column` of what begins at `source`, their partners, and the angle.

    Args:
        source: where rows begin.
        column: features.
        seen: which of them exist.
        wanted: of which ones the angle is wanted.
        new: where the angle is.
        SPEC: what is compiled.
    """
    PAIRS: gl.constexpr = SPEC.rotary_pairs
    x = gl.load(source + column, mask=seen, other=0.0)
    if PAIRS == 0:
        return x, x, x, x
    else:
        turns = column < 2 * PAIRS
        if SPEC.interleaved:
            pair, partner = column // 2, column ^ 1
        else:
            pair = gl.where(column < PAIRS, column, column - PAIRS)
            partner = gl.where(column < PAIRS, column + PAIRS, column - PAIRS)
        other = gl.load(source + partner, mask=seen & turns, other=0.0)
        turns = turns & wanted
        c = gl.load(new.cos + pair, mask=turns, other=1.0)
        s = gl.load(new.sin + pair, mask=turns, other=0.0)
        return x, other, c, s


@gluon.jit
def _turned(x, other, c, s, column, SPEC: gl.constexpr):
    """Features, turned by the token's angle.

    Products and sum are rounded one by one, as torch's rotation rounds them, whatever the
    kernel's other arithmetic is fused to.
    """
    PAIRS: gl.constexpr = SPEC.rotary_pairs
    if PAIRS == 0:
        return x
    else:
        is_first = column % 2 == 0 if SPEC.interleaved else column < PAIRS
        other = other.to(gl.float32)
        other = gl.where(is_first, -other, other)
        y = gl.inline_asm_elementwise(
            "{ .reg .f32 a, b; mul.rn.f32 a, $1, $2; mul.rn.f32 b, $3, $4; add.rn.f32 $0, a, b; }",
            "=f,f,f,f,f", [x.to(gl.float32), c.to(gl.float32), other, s.to(gl.float32)],
            dtype=gl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        return gl.where(column < 2 * PAIRS, y.to(x.dtype), x)


@gluon.jit
def gathered_queries(new: New, SPEC: gl.constexpr):
    """What `turned_queries` turns: all threads together load q once."""
    EACH: gl.constexpr = _beside(SPEC.dim, gl.num_warps())
    row = gl.arange(0, SPEC.rows, gl.SliceLayout(1, EACH))[:, None]
    column = gl.arange(0, SPEC.dim, gl.SliceLayout(0, EACH))[None, :]
    source = new.q + row * new.stride_qh
    return _gathered(source, column, row < SPEC.group, column >= 0, new, SPEC)


@gluon.jit
def turned_queries(gathered, SPEC: gl.constexpr, MMA: gl.constexpr):
    """q (W, D, ROWS) of a group's heads, turned, the same for all warps; see `load_queries`."""
    W: gl.constexpr = gl.num_warps()
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    column = gl.arange(0, SPEC.dim, gl.SliceLayout(0, _beside(SPEC.dim, W)))[None, :]
    x, other, c, s = gathered
    x = _turned(x, other, c, s, column, SPEC)
    held = gl.allocate_shared_memory(
        x.dtype, [SPEC.rows, SPEC.dim], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    )  # fmt: skip
    held.store(x)
    wait_for_all()
    x = gl.expand_dims(held.permute([1, 0]).load(gl.SliceLayout(0, B)), 0)
    warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, B)))
    x, _ = gl.broadcast(x, warp[:, None, None])
    return x


@gluon.jit
def gathered_token(new: New, is_last, cache: Cache, SPEC: gl.constexpr):
    """What `append` writes and its page, where this program does it: loads under way with q's."""
    column = gl.arange(0, SPEC.dim, _row(gl.num_warps()))
    seen = (column >= 0) & is_last
    k, other, c, s = _gathered(new.k, column, seen, seen, new, SPEC)
    v = gl.load(new.v + column, mask=seen, other=0.0)
    fits, page = cache.last < new.room, new.row
    if SPEC.page_size > 0:
        place = cache.table + cache.last // SPEC.page_size
        page = gl.load(place, mask=is_last & fits, other=-1).to(gl.int64)
    return k, other, c, s, v, fits & (page >= 0), page


@gluon.jit
def append(gathered, rows, cache: Cache, SPEC: gl.constexpr):
    """Writes the new token to the cache and to `rows`, as it is stored."""
    column = gl.arange(0, SPEC.dim, _row(gl.num_warps()))
    k, other, c, s, v, stored, page = gathered
    k = _turned(k, other, c, s, column, SPEC)
    rows.index(0).store(k)
    rows.index(1).store(v)
    place_k, place_v = cache.last * cache.stride_ks, cache.last * cache.stride_vs
    if SPEC.page_size > 0:
        offset = cache.last % SPEC.page_size
        place_k = page * cache.stride_kb + offset * cache.stride_ks
        place_v = page * cache.stride_vb + offset * cache.stride_vs
    stored = stored & (column >= 0)
    gl.store(cache.k + place_k * SPEC.vector + column, k, mask=stored)
    gl.store(cache.v + place_v * SPEC.vector + column, v, mask=stored)


@constexpr_function
def _rows_at_once(spec):
    """Rows of a tile that a warp copies by one instruction."""
    return 32 * 8 // spec.dim


@constexpr_function
def _apart(spec, warps):
    """`copied` of (W, 16 / R, R, D), R rows at once."""
    rows = _rows_at_once(spec)
    return gl.BlockedLayout([1, 1, 1, 8], [1, 1, rows, 32 // rows], [warps, 1, 1, 1], [3, 2, 1, 0])


@gluon.jit
def _is(token, SPEC: gl.constexpr):
    """Which row of its tile a token is: (W, 16, 1), as rows are copied.

    Rows of a thread are told apart by constants: numbers of rows would take registers all along.
    """
    W: gl.constexpr = gl.num_warps()
    R: gl.constexpr = _rows_at_once(SPEC)
    APART: gl.constexpr = gl.SliceLayout(3, _apart(SPEC, W))
    warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, APART)))[:, None, None]
    several = gl.arange(0, 16 // R, gl.SliceLayout(0, gl.SliceLayout(2, APART)))[None, :, None]
    one = gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(1, APART)))[None, None, :]
    row = token % SPEC.block_n
    own = (warp == row // 16) & (one == row % R) & (several == row % 16 // R)
    EACH: gl.constexpr = gl.SliceLayout(2, copied(SPEC, W))
    return gl.convert_layout(gl.reshape(own, [W, 16]), EACH)[:, :, None]


@gluon.jit
def put_in(keys, values, rows, cache: Cache, SPEC: gl.constexpr):
    """Puts the new token in its place in a tile of K and V that has arrived; waits for all."""
    EACH: gl.constexpr = copied(SPEC, gl.num_warps())
    COLUMN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, EACH))
    is_new = _is(cache.last, SPEC)
    key = rows.index(0).load(COLUMN)[None, None, :]
    keys.store(gl.where(is_new, key, keys.load(EACH)))
    value = rows.index(1).load(COLUMN)[None, None, :]
    values.store(gl.where(is_new, value, values.load(EACH)))
    wait_for_all()
