"""Device functions of `decode_direct` behind the walk: see `decode_results`.

Legend: D head dimension, ROWS query heads of a group, padded to 8, KEPT to a power of two.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

LOWEST = gl.constexpr(-3.0e38)  # the maximum of nothing
_LOG2E = gl.constexpr(1.4426950408889634)
_LN2 = gl.constexpr(0.6931471805599453)


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


@constexpr_function
def _met(spec, warps):
    """Layout of all warps' statistics (W, D, ROWS): a thread has its entries of all of them."""
    entries = min(8, spec.dim * spec.rows // (32 * warps))
    lanes = spec.dim // entries
    return gl.BlockedLayout(
        [warps, entries, 1], [1, lanes, 32 // lanes], [1, 1, warps], [1, 2, 0]
    )  # fmt: skip


@gluon.jit
def meet(acc, maximum, denominator, SPEC: gl.constexpr):
    """One set of statistics from those of the warps: (D, ROWS), (ROWS,), (ROWS,).

    They change places as they are and are added up inside of threads. H200, 2026-11-30, from a
    piece's last tile until it is put aside: 2.3 us with reductions over warps, 1.1 with this.
    """
    MET: gl.constexpr = _met(SPEC, gl.num_warps())
    OUTER: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, MET))
    if SPEC.is_float8:  # see `paired`
        acc = gl.reshape(acc, [gl.num_warps(), SPEC.dim // 8, 8, SPEC.rows])
        acc = gl.reshape(gl.permute(acc, [0, 2, 1, 3]), [gl.num_warps(), SPEC.dim, SPEC.rows])
    maximum = gl.convert_layout(maximum, gl.SliceLayout(1, MET))
    denominator = gl.convert_layout(denominator, gl.SliceLayout(1, MET))
    acc = gl.convert_layout(acc, MET)
    top = gl.max(maximum, 0)
    weight = gl.exp2(maximum - gl.expand_dims(top, 0))
    total = gl.sum(denominator * weight, 0)
    acc = gl.sum(acc * gl.expand_dims(weight, 1), 0)
    return acc, gl.convert_layout(top, OUTER), gl.convert_layout(total, OUTER)


@gluon.jit
def finish(acc, top, total, out, lse, sinks, batch, kv_head, num_heads, v_factor,
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
    feature = gl.arange(0, SPEC.dim, gl.SliceLayout(1, acc.type.layout))
    inverse = gl.where(total == 0.0, 0.0, v_factor / total)
    place = (batch.to(gl.int64) * num_heads + head) * SPEC.dim
    result = (acc * inverse[None, :]).to(out.dtype.element_ty)
    gl.store(out + place[None, :] + feature[:, None], result, mask=inside[None, :])
    result = gl.where(total == 0.0, float("-inf"), (top + gl.log2(total)) * _LN2)
    gl.store(lse + batch.to(gl.int64) * num_heads + head, result, mask=inside)


@gluon.jit
def put_aside(acc, top, total, partial_out, partial_stats, place, SPEC: gl.constexpr):
    """Stores a piece's statistics as number `place`; see `decode_results.put_aside`."""
    row = gl.arange(0, SPEC.rows, gl.SliceLayout(0, acc.type.layout))
    feature = gl.arange(0, SPEC.dim, gl.SliceLayout(1, acc.type.layout))
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
    top = gl.full([KEPT], LOWEST, gl.float32, gl.SliceLayout(0, STATS))
    total = gl.zeros([KEPT], gl.float32, gl.SliceLayout(0, STATS))
    acc = gl.zeros([DIM, KEPT], gl.float32, SUMS)
    for start in range(0, count, AT_ONCE):
        seen = (start + piece < count)[:, None]
        at = (place + start + piece)[:, None] * KEPT + row[None, :]
        # Straight from L2: other SMs wrote it.
        tops = gl.load(partial_stats + at * 2, mask=seen, other=LOWEST, cache_modifier=".cg")
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
def finish_merged(partial_out, partial_stats, place, count, out, lse, sinks, batch, kv_head,
                   num_heads, v_factor, SPEC: gl.constexpr):  # fmt: skip
    """Merges all pieces of a sequence and writes its output."""
    acc, top, total = _merged(partial_out, partial_stats, place, count, SPEC)
    finish(acc, top, total, out, lse, sinks, batch, kv_head, num_heads, v_factor, SPEC)
