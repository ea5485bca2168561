"""Device functions of the decode's walk over the keys; see `decode` for the method and legend.

A tile's tokens are (W, R) in the narrow walk and (BN,) in the wide one. Scores are (W, R, ROWS)
and (ROWS, BN), so tokens are dimension 1 of both, outputs (W, D_v, ROWS) and (ROWS, D_v).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from onchip.kernels.portable import masks

#: The maximum of nothing: finite, so that a difference of two is never NaN.
LOWEST = tl.constexpr(-3.0e38)


class Keys(NamedTuple):
    """Where one head of k or v lies; strides in units of SPEC.vector elements."""

    source: object
    stride_page: object  # of a sequence, without pages
    stride_row: object


class Edges(NamedTuple):
    """Keys that the rows see: [start, stop) at least one of them, [low, high) each one."""

    start: object
    stop: object
    low: object  # (ROWS,)
    high: object  # (ROWS,)
    position: object  # (ROWS,), the row's own place among the keys


class Terms(NamedTuple):
    """What turns Q K^T into base 2 logits; (ROWS,) where rows differ."""

    scale: object  # scale * log2(e); with a softcap, scale / softcap
    softcap: object  # softcap * log2(e)
    slope: object  # ALiBi slope * log2(e)


class Stats(NamedTuple):
    """What a walk has gathered: output before the division, maximum (base 2), denominator."""

    acc: object
    maximum: object
    denominator: object


@triton.jit
def row_edges(query, length, num_queries, first_key, left, right, SPEC: tl.constexpr):
    """`Edges` of rows whose queries are numbers `query` of their sequence."""
    position = query + (length - num_queries)
    start = 0
    low = position * 0
    high = low + length
    if SPEC.has_first:
        start = first_key
        low += first_key
    if SPEC.has_left:
        start = tl.maximum(start, length - num_queries - left)
        low = tl.maximum(low, position - left)
    if SPEC.has_right:
        high = tl.minimum(high, position + right + 1)
    return Edges(start, length, low, high, position)


@triton.jit
def _along_rows(x, SPEC: tl.constexpr):
    """A vector of the rows, as it broadcasts against scores."""
    if SPEC.groups == 0:
        return x[:, None]
    else:
        return x[None, None, :]


@triton.jit
def _along_tokens(x, SPEC: tl.constexpr):
    """A value for each token, as it broadcasts against scores."""
    if SPEC.groups == 0:
        return x[None, :]
    else:
        return x[:, :, None]


@triton.jit
def _tokens(SPEC: tl.constexpr):
    """Numbers of a tile's tokens, and their group of a quarter of the tile."""
    BN: tl.constexpr = SPEC.block_n
    if SPEC.groups == 0:
        token = tl.arange(0, BN)
        return token, token // (BN // 4)
    else:
        R: tl.constexpr = BN // SPEC.groups
        group = tl.arange(0, SPEC.groups)[:, None]
        return group * R + tl.arange(0, R)[None, :], group


@triton.jit
def _word(pointers):
    """Loads int32 words: of a plain load Triton would make an asynchronous copy, and wait."""
    return tl.inline_asm_elementwise(
        "ld.global.nc.b32 $0, [$1];", "=r,l", [pointers], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _pages(table, tile, length, SPEC: tl.constexpr):
    """Page ids of a tile: one scalar if it lies in one page, four if quarters do, else one each.

    Scalars, since a small vector would be fetched by an asynchronous copy that is waited for at
    once. Tokens past the end repeat the last entry that counts: what follows is never read.
    """
    BN: tl.constexpr = SPEC.block_n
    N: tl.constexpr = SPEC.page_size
    R: tl.constexpr = BN // 4
    last = tl.maximum(length - 1, 0)
    if N == 0:
        return 0, 0, 0, 0
    elif N % BN == 0:
        page = tl.load(table + tile * BN // N)
        return page, page, page, page
    elif N % R == 0:
        page0 = tl.load(table + tile * BN // N)
        page1 = tl.load(table + tl.minimum(tile * BN + R, last) // N)
        page2 = tl.load(table + tl.minimum(tile * BN + 2 * R, last) // N)
        page3 = tl.load(table + tl.minimum(tile * BN + 3 * R, last) // N)
        return page0, page1, page2, page3
    else:
        token, _ = _tokens(SPEC)
        index = tl.minimum(tile * BN + token, last) // N
        if SPEC.by_word:
            return _word(table + index), 0, 0, 0
        else:
            return tl.load(table + index), 0, 0, 0


@triton.jit
def _no_pages(SPEC: tl.constexpr):
    """What `_pages` returns, before there is a tile."""
    if SPEC.page_size > 0 and SPEC.page_size % (SPEC.block_n // 4) != 0:
        token, _ = _tokens(SPEC)
        return token * 0, 0, 0, 0
    else:
        return 0, 0, 0, 0


@triton.jit
def _in_page(tile, token, SPEC: tl.constexpr):
    """Place in its page of a token of a tile; the same in all tiles where pages divide a tile."""
    if SPEC.block_n % SPEC.page_size == 0:
        return token % SPEC.page_size
    else:
        return (tile * SPEC.block_n + token) % SPEC.page_size


@triton.jit
def _offsets(keys: Keys, pages, tile, batch, SPEC: tl.constexpr):
    """Elements from a head's start to each token of a tile, 64-bit."""
    BN: tl.constexpr = SPEC.block_n
    N: tl.constexpr = SPEC.page_size
    R: tl.constexpr = BN // 4
    row = keys.stride_row * SPEC.vector
    page = keys.stride_page * SPEC.vector
    token, group = _tokens(SPEC)
    if N == 0:
        return pages[0] * page + tl.cast(tile * BN, tl.int64) * row + token * row
    elif N % R == 0:
        if N % BN == 0:
            ids = pages[0]
            return ids * page + tl.cast(tile * BN % N, tl.int64) * row + token * row
        else:
            early = tl.where(group == 0, pages[0], pages[1])
            ids = tl.where(group < 2, early, tl.where(group == 2, pages[2], pages[3]))
            return ids * page + _in_page(tile, group * R, SPEC) * row + token % R * row
    else:
        return pages[0] * page + _in_page(tile, token, SPEC) * row


@triton.jit
def _load(keys: Keys, offsets, seen, TRANSPOSED: tl.constexpr, DIM: tl.constexpr,
          WIDTH: tl.constexpr):  # fmt: skip
    """Rows at `offsets`, dimension last; TRANSPOSED has it before the tokens of a group."""
    columns = tl.arange(0, WIDTH)
    if TRANSPOSED:
        pointers = keys.source + offsets[:, None, :] + columns[None, :, None]
        inside = seen[:, None, :]
        if DIM < WIDTH:
            inside = inside & (columns < DIM)[None, :, None]
    else:
        axis: tl.constexpr = len(offsets.shape)
        pointers = keys.source + tl.expand_dims(offsets, axis) + columns
        inside = tl.expand_dims(seen, axis)
        if DIM < WIDTH:
            inside = inside & (columns < DIM)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _load_widened(values: Keys, offsets, seen, SPEC: tl.constexpr):
    """Float8 values as float16, dimension last.

    Read as words of four and widened before they change places: as float8 Triton would turn them
    for the matrix product byte by byte.
    """
    columns = tl.arange(0, SPEC.width_v // 4)
    axis: tl.constexpr = len(offsets.shape)
    words = values.source.to(tl.pointer_type(tl.int32)) + tl.expand_dims(offsets // 4, axis)
    inside = tl.expand_dims(seen, axis)
    if SPEC.dim_v < SPEC.width_v:
        inside = inside & (columns < SPEC.dim_v // 4)
    word = tl.load(words + columns, mask=inside, other=0)
    a, b, c, d = tl.inline_asm_elementwise(
        "{ .reg .b16 low, high; .reg .b32 x, y; mov.b32 {low, high}, $4; "
        "cvt.rn.f16x2.e4m3x2 x, low; cvt.rn.f16x2.e4m3x2 y, high; "
        "mov.b32 {$0, $1}, x; mov.b32 {$2, $3}, y; }",
        "=h,=h,=h,=h,r", [word], dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True, pack=1,
    )  # fmt: skip
    v = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(v, offsets.shape + [SPEC.width_v])


@triton.jit
def _scores(products, token, edges: Edges, terms: Terms, SPEC: tl.constexpr):
    """Base 2 logits: scale, softcap, ALiBi; keys that a row does not see are not hidden yet."""
    if SPEC.is_float8:
        scores = products * _along_rows(terms.scale, SPEC)
    else:
        scores = products * terms.scale
    if SPEC.has_softcap:
        scores = terms.softcap * masks.tanh(scores, SPEC.is_float32)
    if SPEC.alibi_dim > 0:
        distance = _along_rows(edges.position, SPEC) - _along_tokens(token, SPEC)
        scores -= _along_rows(terms.slope, SPEC) * tl.abs(distance).to(tl.float32)
    return scores


@triton.jit
def _visible(token, seen, edges: Edges, SPEC: tl.constexpr):
    """Which keys each row sees; with one query every row sees what is loaded."""
    result = _along_tokens(seen, SPEC)
    if SPEC.several and SPEC.has_left:
        result = result & (_along_tokens(token, SPEC) >= _along_rows(edges.low, SPEC))
    if SPEC.several and SPEC.has_right:
        result = result & (_along_tokens(token, SPEC) < _along_rows(edges.high, SPEC))
    return result


@triton.jit
def _products(queries, k, SPEC: tl.constexpr):
    if SPEC.groups == 0:
        return tl.dot(queries, tl.trans(k), input_precision=SPEC.precision)
    else:
        return tl.dot(k, queries, input_precision=SPEC.precision)


@triton.jit
def _add_values(acc, weights, v, SPEC: tl.constexpr):
    if SPEC.groups == 0:
        return tl.dot(weights.to(v.dtype), v, acc, input_precision=SPEC.precision)
    else:
        return tl.dot(v, weights.to(v.dtype), acc, input_precision=SPEC.precision)


@triton.jit
def _add_nonfinite(acc, visible, v, SPEC: tl.constexpr):
    """Adds the values that are not finite to exactly the rows that see them."""
    ones = visible.to(tl.float16)
    v = v.to(tl.float32)
    none = tl.zeros_like(acc)
    nans = _add_values(none, ones, (v != v).to(tl.float16), SPEC)
    ups = _add_values(none, ones, (v == float("inf")).to(tl.float16), SPEC)
    downs = _add_values(none, ones, (v == float("-inf")).to(tl.float16), SPEC)
    acc = tl.where(ups > 0.0, acc + float("inf"), acc)
    acc = tl.where(downs > 0.0, acc - float("inf"), acc)
    return tl.where(nans > 0.0, float("nan"), acc)


@triton.jit
def _nothing(SPEC: tl.constexpr):
    ROWS: tl.constexpr = SPEC.rows
    WIDTH_V: tl.constexpr = SPEC.width_v
    W: tl.constexpr = SPEC.groups
    if W == 0:
        return Stats(
            tl.zeros([ROWS, WIDTH_V], tl.float32),
            tl.full([ROWS], LOWEST, tl.float32),
            tl.zeros([ROWS], tl.float32),
        )
    else:
        return Stats(
            tl.zeros([W, WIDTH_V, ROWS], tl.float32),
            tl.full([W, ROWS], LOWEST, tl.float32),
            tl.zeros([W, ROWS], tl.float32),
        )


@triton.jit
def _walk(
    queries, keys: Keys, values: Keys, table, batch, start, stop, edges: Edges, terms: Terms,
    SPEC: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Statistics of the tiles [start, stop). CAREFUL keeps what is not finite to its rows."""
    NARROW: tl.constexpr = SPEC.groups > 0
    PAGED: tl.constexpr = SPEC.page_size > 0
    stats = _nothing(SPEC)
    acc, maximum, denominator = stats.acc, stats.maximum, stats.denominator
    page0, page1, page2, page3 = _no_pages(SPEC)
    if PAGED:
        if start < stop:
            page0, page1, page2, page3 = _pages(table, start, edges.stop, SPEC)
    elif table is None:
        page0 = batch
    elif start < stop:
        page0 = tl.load(table)
    lane, _ = _tokens(SPEC)
    for tile in tl.range(start, stop, num_stages=1 if CAREFUL else None):
        token = tile * SPEC.block_n + lane
        seen = token < edges.stop
        if SPEC.has_left or SPEC.has_first:
            seen = seen & (token >= edges.start)
        pages = (page0.to(tl.int64), page1, page2, page3)
        if PAGED:
            # Asked for a tile ahead, so that a tile's loads never wait for the table.
            page0, page1, page2, page3 = _pages(table, tl.minimum(tile + 1, stop - 1), edges.stop,
                                                SPEC)  # fmt: skip
        places = _offsets(keys, pages, tile, batch, SPEC)
        k = _load(keys, places, seen, False, SPEC.dim, SPEC.width)
        places = _offsets(values, pages, tile, batch, SPEC)
        if SPEC.by_word and SPEC.is_float8 and SPEC.vector > 1 and SPEC.dim_v % 4 == 0:
            v = _load_widened(values, places, seen, SPEC)
            if NARROW:
                v = tl.trans(v, (0, 2, 1))
        else:
            v = _load(values, places, seen, NARROW, SPEC.dim_v, SPEC.width_v)
        if SPEC.is_float8:
            k, v = k.to(tl.float16), v.to(tl.float16)
        scores = _scores(_products(queries, k, SPEC), token, edges, terms, SPEC)
        visible = _visible(token, seen, edges, SPEC)
        scores = tl.where(visible, scores, float("-inf"))
        now = tl.maximum(maximum, tl.max(scores, 1))
        rescale = tl.exp2(maximum - now)
        weights = tl.exp2(scores - tl.expand_dims(now, 1))
        denominator = denominator * rescale + tl.sum(weights, 1)
        acc = acc * tl.expand_dims(rescale, 1)
        if CAREFUL:
            finite = tl.where(tl.abs(v.to(tl.float32)) < float("inf"), v, 0.0)
            acc = _add_values(acc, weights, finite, SPEC)
            acc = _add_nonfinite(acc, visible, v, SPEC)
        else:
            acc = _add_values(acc, weights, v, SPEC)
        maximum = now
    return Stats(acc, maximum, denominator)


@triton.jit
def _has_leak(stats: Stats):
    """Whether an output is not finite though its row's weights are: some value was not."""
    spoilt = (tl.sum(stats.acc * 0.0, 1) != 0.0) & (stats.denominator == stats.denominator)
    flat = tl.ravel(spoilt.to(tl.int32))
    return tl.max(flat, 0) > 0


@triton.jit
def attend(
    queries, keys: Keys, values: Keys, table, batch, start, stop, edges: Edges, terms: Terms,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Statistics of the rows over the tiles [start, stop)."""
    W: tl.constexpr = SPEC.groups
    WIDTH: tl.constexpr = SPEC.width
    ROWS: tl.constexpr = SPEC.rows
    if W > 0:
        queries = tl.broadcast_to(queries[None, :, :], [W, WIDTH, ROWS])
    stats = _walk(queries, keys, values, table, batch, start, stop, edges, terms, SPEC, False)
    acc, maximum, denominator = stats.acc, stats.maximum, stats.denominator
    if SPEC.several and (SPEC.has_left or SPEC.has_right):  # noqa: SIM102 (see `decode`)
        # A row's weight of a key that it does not see is 0, and 0 * NaN is NaN. To look for
        # that in every tile would cost time always; one look at the result costs next to none.
        if _has_leak(stats):
            again = _walk(queries, keys, values, table, batch, start, stop, edges, terms, SPEC,
                          True)  # fmt: skip
            acc, maximum, denominator = again.acc, again.maximum, again.denominator
    return Stats(acc, maximum, denominator)


@triton.jit
def merge_groups(stats: Stats):
    """One set of statistics from those of the groups: (D_v, ROWS), (ROWS,), (ROWS,)."""
    top = tl.max(stats.maximum, 0)
    weights = tl.exp2(stats.maximum - top[None, :])
    acc = tl.sum(stats.acc * weights[:, None, :], 0)
    return Stats(acc, top, tl.sum(stats.denominator * weights, 0))
