"""Device functions of the portable backward: tiles, and the walks over queries and over keys.

The kernels that own the blocks, and the method, are in backward.py.

Legend: B batch, S_q / S_k lengths, T packed tokens, H query heads, H_kv key and value heads,
D / D_v head dimensions, BM / BN rows and columns of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from onchip.kernels.portable import backward_arguments, dropout, masks, mods
from onchip.kernels.portable.masks import Band, Terms

LOG2E = masks.LOG2E
LOG2E_REST = tl.constexpr(1.92596298909109e-08)  # log2 e less its float32
LN2 = masks.LN2
STATS_BLOCK = tl.constexpr(backward_arguments.STATS_BLOCK)


class Rows(NamedTuple):
    """Where one head's rows of q, k, v or dout of one sequence lie.

    Behind a descriptor they are found by coordinates, else by pointer and stride.
    """

    source: object  # descriptor, or pointer to the sequence's first row
    batch: object
    head: object
    first: object
    stride_row: object


class Queries(NamedTuple):
    """What a tile of queries is read from."""

    q: Rows
    dout: Rows
    lse: object  # LSE in base 2, +inf for rows that see nothing: descriptor, or pointer to row 0
    delta: object  # D, likewise
    stats_line: object
    stats_start: object
    num_rows: object


class Strides(NamedTuple):
    """Strides of sequence, row and head."""

    batch: object
    row: object
    head: object


@triton.jit
def locate(num_blocks, num_sequences, num_heads, group, LONGEST_LAST: tl.constexpr):
    """This program's block, sequence and head.

    Heads come in groups that share the L2 cache; in a group all heads' first blocks come before
    all heads' second ones.
    """
    program = tl.program_id(0)
    first = program // (group * num_blocks) * group
    rest = program - first * num_blocks
    size = tl.minimum(group, num_sequences * num_heads - first)
    block = rest // size
    index = first + rest % size
    if LONGEST_LAST:
        block = num_blocks - 1 - block
    return block, index // num_heads, index % num_heads


@triton.jit
def rows_of(source, batch, head, first, strides: Strides, SPEC: tl.constexpr):
    """`Rows` of one head of one sequence; offsets are 64-bit from here on."""
    row = strides.row * SPEC.vector
    place = batch
    if SPEC.packed:
        place = 0
    if not SPEC.described:
        source += place * (strides.batch * SPEC.vector) + head * (strides.head * SPEC.vector)
        source += tl.cast(first, tl.int64) * row
    return Rows(source, place, head, first, row)


@triton.jit
def load_tile(
    rows: Rows, start, limit, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    CLEAN: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """(BLOCK, WIDTH) from row `start` on; 0 past D.

    Rows from `limit` on are 0, except through a descriptor, which gives 0 outside of the whole
    tensor only: CLEAN clears other sequences' rows there.
    """
    index = start + tl.arange(0, BLOCK)
    columns = tl.arange(0, WIDTH)
    if SPEC.described:
        tile = rows.source.load([rows.batch, rows.head, rows.first + start, 0])
        tile = tile.reshape(BLOCK, WIDTH)
        if CLEAN:
            tile = tl.where((index < limit)[:, None], tile, 0.0)
        return tile
    else:
        base = rows.source + tl.cast(start, tl.int64) * rows.stride_row
        pointers = base + (tl.arange(0, BLOCK) * rows.stride_row)[:, None] + columns[None, :]
        if DIM < WIDTH:
            inside = (index < limit)[:, None] & (columns < DIM)[None, :]
        else:
            inside = (index < limit)[:, None]
        return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def stats_place(batch, head, q_start, num_heads, SPEC: tl.constexpr):
    """Line of LSE and D, and where a sequence begins in it: at a multiple of STATS_BLOCK.

    Dense: (B * H, S_q rounded up). Packed: (H, T_q + B * STATS_BLOCK rounded down); a sequence's
    gap to its predecessor holds the padding of that one.
    """
    if SPEC.packed:
        return head, (q_start // STATS_BLOCK + batch) * STATS_BLOCK
    else:
        return batch * num_heads + head, 0


@triton.jit
def _load_stats(source, queries: Queries, start, SPEC: tl.constexpr):
    """(BM,) of LSE or D from row `start` on; there is padding behind a sequence's last row."""
    if SPEC.describes_stats:
        tile = source.load([queries.stats_line, queries.stats_start + start])
        return tile.reshape(SPEC.block_m)
    else:
        return tl.load(source + start + tl.arange(0, SPEC.block_m))


@triton.jit
def _scores(products, rows, columns, terms: Terms, band: Band, SPEC: tl.constexpr):
    """Logits before the mask (natural for float32, else base 2), and what their gradient needs.

    That is the softcap's derivative, and the natural logits that the user's function got.
    `rows` and `columns` broadcast to the tile, whichever way it lies.
    """
    scores = products * terms.scale
    slope = 1.0
    if SPEC.has_softcap:
        bent = masks.tanh(scores, SPEC.is_float32)
        scores = terms.softcap * bent
        slope = 1.0 - bent * bent
    if SPEC.alibi_dim > 0:
        scores += masks.alibi(rows, columns, band.shift, terms.slope)
    natural = scores
    if SPEC.functions.score is not None:
        unit = 1.0 if SPEC.is_float32 else LOG2E
        natural = scores * (1.0 / unit)
        scores = mods.scored(natural, rows, columns, terms.context, SPEC) * unit
    return scores, slope, natural


@triton.jit
def _exp(x):
    """exp(x) without the rounding of x log2(e), which counts where |x| is large."""
    product = x * LOG2E
    rest = tl.fma(x, tl.full(x.shape, LOG2E, tl.float32), -product) + x * LOG2E_REST
    rest = tl.where(x > -1e30, rest, 0.0)  # -inf - -inf
    return tl.exp2(product) * (1.0 + rest * LN2)


@triton.jit
def _weights(scores, lse, seen, MASKED: tl.constexpr, SPEC: tl.constexpr):
    """P, 0 where hidden."""
    exponent = scores - lse
    if SPEC.is_float32:
        weights = _exp(exponent)
    else:
        weights = tl.exp2(exponent)
    if MASKED:
        weights = tl.where(seen, weights, 0.0)
    return weights


@triton.jit
def _score_gradient(
    weights, products, delta, slope, natural, rows, columns, seen, terms: Terms,
    MASKED: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """dS = P * (dP - D), through the user's function and the softcap; 0 where hidden."""
    gradient = weights * (products - delta)
    if SPEC.functions.grad is not None:
        gradient = mods.score_gradient(gradient, natural, rows, columns, terms.context, SPEC)
    if SPEC.has_softcap:
        gradient = gradient * slope
    if MASKED:
        gradient = tl.where(seen, gradient, 0.0)
    return gradient


@triton.jit
def _seen(rows, columns, band: Band, terms: Terms, MASKED: tl.constexpr, SPEC: tl.constexpr):
    """Which pairs of a tile the mask lets through; True where it lets all."""
    if MASKED:
        seen = masks.visible(
            rows, columns, band.seqlen_k, band.shift, band.first_key, band.left, band.right,
            SPEC.has_left, SPEC.has_right,
        )  # fmt: skip
        if SPEC.hides_by_function:
            seen &= mods.let_through(rows, columns, terms.context, SPEC)
        return seen
    else:
        return True


@triton.jit
def _add_to_dq(ds_t, k, dq_sum: Rows, start, num_rows, SPEC: tl.constexpr):
    """Adds dS K of one tile to the float32 dQ."""
    part = tl.dot(tl.trans(ds_t), k, input_precision=SPEC.precision)  # (BM, D)
    if SPEC.reduction == "tma":
        source = dq_sum.source
        block = part.reshape(1, 1, SPEC.block_m, SPEC.width)
        source.atomic_add([dq_sum.batch, dq_sum.head, start, 0], block)
    else:
        rows = start + tl.arange(0, SPEC.block_m)
        columns = tl.arange(0, SPEC.width)
        inside = (rows < num_rows)[:, None] & (columns < SPEC.dim)[None, :]
        base = dq_sum.source + tl.cast(start, tl.int64) * dq_sum.stride_row
        offsets = tl.arange(0, SPEC.block_m) * dq_sum.stride_row
        pointers = base + offsets[:, None] + columns[None, :]
        tl.atomic_add(pointers, part, mask=inside, sem="relaxed")


@triton.jit
def _walk_queries(
    dk, dv, k, v, column_start, start, stop, queries: Queries, dq_sum, band: Band, terms: Terms,
    SPEC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the rows [start, stop), whole tiles, to a block's dK and dV. Tiles lie (BN, BM).

    With a block list, rows are counted along the list. One of the two stays as it is where
    SPEC.makes says so.
    """
    BM: tl.constexpr = SPEC.block_m
    CLEAN: tl.constexpr = SPEC.foreign_rows and MASKED
    columns = column_start + tl.arange(0, SPEC.block_n)[:, None]
    line = mods.list_line(terms.context, column_start, SPEC.list_n, SPEC.list_m)
    for at in tl.range(start, stop, BM):
        m = at
        if SPEC.list_m > 0:
            m = mods.listed(line, at, SPEC.list_m)
        index = m + tl.arange(0, BM)
        rows = index[None, :]
        q = load_tile(queries.q, m, queries.num_rows, BM, SPEC.dim, SPEC.width, CLEAN, SPEC)
        lse = _load_stats(queries.lse, queries, m, SPEC)
        products = tl.dot(k, tl.trans(q), input_precision=SPEC.precision)
        scores, slope, natural = _scores(products, rows, columns, terms, band, SPEC)
        seen = _seen(rows, columns, band, terms, MASKED, SPEC)
        weights = _weights(scores, lse[None, :], seen, MASKED, SPEC)
        dout = load_tile(
            queries.dout, m, queries.num_rows, BM, SPEC.dim_v, SPEC.width_v, CLEAN, SPEC
        )
        kept_weights = weights
        if SPEC.has_dropout:  # dV's factor 1 / (1 - p) waits for the end
            kept = dropout.kept(m, column_start, terms.context, BM, SPEC.block_n)
            kept = tl.trans(kept)
            kept_weights = tl.where(kept, weights, 0.0)
        if SPEC.makes != "dk":
            dv = tl.dot(kept_weights.to(dout.dtype), dout, dv, input_precision=SPEC.precision)
        if SPEC.makes != "dv":
            delta = _load_stats(queries.delta, queries, m, SPEC)
            products = tl.dot(v, tl.trans(dout), input_precision=SPEC.precision)
            if SPEC.has_dropout:
                products = tl.where(kept, products * dropout.keep_scale(terms.context), 0.0)
            if SPEC.functions.aux_grad is not None:
                behind = weights * (products - delta[None, :])
                mods.add_aux_gradients(behind, natural, rows, columns, terms.context, SPEC)
            ds = _score_gradient(
                weights, products, delta[None, :], slope, natural, rows, columns, seen, terms,
                MASKED, SPEC,
            )  # fmt: skip
            ds = ds.to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision=SPEC.precision)
            if SPEC.reduction != "none":
                _add_to_dq(ds, k, dq_sum, m, queries.num_rows, SPEC)
    return dk, dv


@triton.jit
def walk_all_queries(
    dk, dv, k, v, column_start, column_end, queries: Queries, dq_sum, band: Band, terms: Terms,
    SPEC: tl.constexpr,
):  # fmt: skip
    """A head's part of a block's dK and dV: up to three walks, of which the middle is unmasked.

    Rows past S_q need no mask: they are 0, and their LSE of +inf makes P 0. Keys past S_k make
    rubbish in their own rows of dK and dV, which are not stored; but not so in dQ.
    """
    BM: tl.constexpr = SPEC.block_m
    any_start, any_end = masks.rows_seeing_any(
        column_start, column_end, queries.num_rows, band.shift, band.left, band.right,
        SPEC.has_left, SPEC.has_right,
    )  # fmt: skip
    if SPEC.list_m > 0:
        start, stop = mods.listed_span(
            terms.context, column_start, any_start, any_end, SPEC.list_n, SPEC.list_m, BM
        )
        return _walk_queries(
            dk, dv, k, v, column_start, start, stop, queries, dq_sum, band, terms, SPEC, True
        )
    all_start, all_end = masks.rows_seeing_all(
        column_start, column_end, queries.num_rows, band.shift, band.left, band.right,
        SPEC.has_left, SPEC.has_right,
    )  # fmt: skip
    if not SPEC.foreign_rows:
        all_end = tl.where(all_end == queries.num_rows, tl.cdiv(all_end, BM) * BM, all_end)
    start = any_start // BM * BM
    stop = tl.maximum(start, tl.cdiv(any_end, BM) * BM)
    if SPEC.in_one_walk:
        return _walk_queries(
            dk, dv, k, v, column_start, start, stop, queries, dq_sum, band, terms, SPEC, True
        )
    full_start = start
    if SPEC.has_right:
        full_start = tl.minimum(tl.maximum(start, tl.cdiv(all_start, BM) * BM), stop)
    full_end = tl.minimum(tl.maximum(full_start, all_end // BM * BM), stop)
    if SPEC.reduction != "none":
        full_end = tl.where(column_end < column_start + SPEC.block_n, full_start, full_end)
    if SPEC.has_right:
        dk, dv = _walk_queries(
            dk, dv, k, v, column_start, start, full_start, queries, dq_sum, band, terms, SPEC, True
        )
    dk, dv = _walk_queries(
        dk, dv, k, v, column_start, full_start, full_end, queries, dq_sum, band, terms, SPEC, False
    )
    if SPEC.has_left or SPEC.foreign_rows or SPEC.reduction != "none":
        dk, dv = _walk_queries(
            dk, dv, k, v, column_start, full_end, stop, queries, dq_sum, band, terms, SPEC, True
        )
    return dk, dv


@triton.jit
def _walk_keys(
    dq, q, dout, lse, delta, row_start, start, stop, keys: Rows, values: Rows, band: Band,
    terms: Terms, SPEC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the keys [start, stop), whole tiles, to a block's dQ. Tiles lie (BM, BN)."""
    BN: tl.constexpr = SPEC.block_n
    CLEAN: tl.constexpr = SPEC.foreign_keys and MASKED
    rows = row_start + tl.arange(0, SPEC.block_m)[:, None]
    line = mods.list_line(terms.context, row_start, SPEC.list_m, SPEC.list_n)
    for at in tl.range(start, stop, BN):
        n = at
        if SPEC.list_n > 0:
            n = mods.listed(line, at, SPEC.list_n)
        columns = n + tl.arange(0, BN)[None, :]
        k = load_tile(keys, n, band.seqlen_k, BN, SPEC.dim, SPEC.width, CLEAN, SPEC)
        products = tl.dot(q, tl.trans(k), input_precision=SPEC.precision)
        v = load_tile(values, n, band.seqlen_k, BN, SPEC.dim_v, SPEC.width_v, CLEAN, SPEC)
        products_v = tl.dot(dout, tl.trans(v), input_precision=SPEC.precision)
        if SPEC.has_dropout:
            kept = dropout.kept(row_start, n, terms.context, SPEC.block_m, BN)
            products_v = tl.where(kept, products_v * dropout.keep_scale(terms.context), 0.0)
        scores, slope, natural = _scores(products, rows, columns, terms, band, SPEC)
        seen = _seen(rows, columns, band, terms, MASKED, SPEC)
        weights = _weights(scores, lse, seen, MASKED, SPEC)
        ds = _score_gradient(
            weights, products_v, delta, slope, natural, rows, columns, seen, terms, MASKED, SPEC
        )
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=SPEC.precision)
    return dq


@triton.jit
def walk_all_keys(
    q, dout, lse, delta, row_start, row_end, keys: Rows, values: Rows, band: Band, terms: Terms,
    SPEC: tl.constexpr,
):  # fmt: skip
    """dQ of a block, before its scale: up to three walks, of which the middle is unmasked."""
    BM: tl.constexpr = SPEC.block_m
    BN: tl.constexpr = SPEC.block_n
    WIDTH: tl.constexpr = SPEC.width
    dq = tl.zeros([BM, WIDTH], tl.float32)
    if SPEC.in_one_walk:
        start, stop = mods.keys_to_walk(row_start, row_end, band, terms, SPEC)
        return _walk_keys(
            dq, q, dout, lse, delta, row_start, start, stop, keys, values, band, terms, SPEC, True
        )
    any_start, any_end = masks.keys_seen_by_any(
        row_start, row_end, *band, SPEC.has_left, SPEC.has_right
    )
    all_start, all_end = masks.keys_seen_by_all(
        row_start, row_end, *band, SPEC.has_left, SPEC.has_right
    )
    full_start = any_start // BN * BN
    if SPEC.has_left:
        start = full_start
        full_start = tl.minimum(tl.cdiv(all_start, BN), tl.cdiv(any_end, BN)) * BN
        dq = _walk_keys(
            dq, q, dout, lse, delta, row_start, start, full_start, keys, values, band, terms,
            SPEC, True,
        )  # fmt: skip
    full_end = tl.maximum(full_start, all_end // BN * BN)
    dq = _walk_keys(
        dq, q, dout, lse, delta, row_start, full_start, full_end, keys, values, band, terms,
        SPEC, False,
    )  # fmt: skip
    return _walk_keys(
        dq, q, dout, lse, delta, row_start, full_end, any_end, keys, values, band, terms,
        SPEC, True,
    )  # fmt: skip


@triton.jit
def store_rows(pointer, value, start, num_rows, stride_row, SPEC: tl.constexpr, IS_V: tl.constexpr):
    """Writes the rows below `num_rows` of a (BLOCK, WIDTH) tile that begins at row `start`."""
    BLOCK: tl.constexpr = value.shape[0]
    DIM: tl.constexpr = SPEC.dim_v if IS_V else SPEC.dim
    WIDTH: tl.constexpr = SPEC.width_v if IS_V else SPEC.width
    rows = start + tl.arange(0, BLOCK)
    columns = tl.arange(0, WIDTH)
    pointers = pointer + tl.cast(rows, tl.int64)[:, None] * stride_row + columns[None, :]
    inside = (rows < num_rows)[:, None] & (columns < DIM)[None, :]
    tl.store(pointers, value.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def head_slope(alibi_slopes, batch, head, num_heads, SPEC: tl.constexpr):
    """A head's ALiBi slope in the logits' base; 0 without ALiBi."""
    if SPEC.alibi_dim > 0:
        unit = 1.0 if SPEC.is_float32 else LOG2E
        return unit * masks.alibi_slope(alibi_slopes, batch, head, num_heads, SPEC.alibi_dim == 2)
    else:
        return 0.0
