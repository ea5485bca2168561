"""The decode of one query a sequence on Hopper, in Gluon: operands go straight to their places.

The method is `decode`'s narrow walk: tokens are the matrix product's M side, each warp has
sixteen of a tile's tokens and statistics of its own, and warps meet at the end. Layouts are
chosen here, where Triton chooses them there: float8 values are paired with the next token's in
registers, where Triton turns them by way of shared memory, and P is turned by movmatrix. That
leaves one barrier a tile and at most 128 registers a thread, so that four programs run on an SM.

Of several pieces of a sequence each puts its statistics aside, and the last one to arrive at a
counter merges them, as in `decode`. Launches overlap: the next one is set up while this one runs,
and waits for its end before it reads anything (programmatic dependent launch).

It may append too: one new token a sequence, turned with the queries (`decode_direct_append`).

It does not do: several queries, D other than 64 and 128, softcap, ALiBi; appends to float8.

Legend: W warps, D head dimension, N page size, ROWS query heads of a group, padded to 8, KEPT to
a power of two.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.runtime.jit import constexpr_function

from onchip.kernels.gluon_names import wait_for_all
from onchip.kernels.portable.decode_cuts import dealt
from onchip.kernels.portable.decode_direct_append import (
    New,
    append,
    gathered_queries,
    gathered_token,
    new_rows,
    put_in,
    turned_queries,
)
from onchip.kernels.portable.decode_direct_results import (
    LOWEST,
    finish,
    finish_merged,
    meet,
    put_aside,
)
from onchip.kernels.portable.decode_direct_tiles import (
    Cache,
    fetch,
    has_edge,
    hidden,
    load_queries,
    meet_other_launches,
    page_ids,
    paired,
    prepared,
    rings,
    settle,
    turned,
    width_of,
)
from onchip.kernels.portable.decode_spec import NEW_NUMBERS, NUMBERS


@constexpr_function
def _flat(spec, warps):
    """Layout of all sequences, of up to 256 in each warp, which then needs no other."""
    return gl.BlockedLayout([max(1, min(8, spec.batch_padded // 32))], [32], [warps], [0])


@gluon.jit
def _edge(lengths, first, left, SPEC: gl.constexpr):
    """First token that is seen; works on vectors too."""
    if SPEC.has_left:
        first = gl.maximum(first, lengths - 1 - left)
    return first


@gluon.jit
def _tiles(length, first, SPEC: gl.constexpr):
    """First tile that is seen, and how many follow; works on vectors too."""
    if has_edge(SPEC):
        tile = gl.minimum(first, length) // SPEC.block_n
        return tile, gl.where(first < length, gl.cdiv(length, SPEC.block_n) - tile, 0)
    else:
        return length * 0, gl.cdiv(length, SPEC.block_n)


@gluon.jit
def _locate(seqused_k, leftpad_k, num_sequences, left, splits, num_sms, SPEC: gl.constexpr):
    """Sequence, piece, pieces, first program and tiles of a piece; see `dealt`."""
    every = gl.arange(0, SPEC.batch_padded, _flat(SPEC, gl.num_warps()))
    seen = every < num_sequences
    lengths = gl.load(seqused_k + every, mask=seen, other=0)
    if SPEC.appends:
        lengths = gl.where(seen, lengths + 1, 0)
    first = lengths * 0
    if SPEC.has_first:
        first = gl.load(leftpad_k + every, mask=seen, other=0)
    _, tiles = _tiles(lengths, _edge(lengths, first, left, SPEC), SPEC)
    return dealt(every, tiles, num_sequences, splits, SPEC.sm_pieces * num_sms, SPEC)


@gluon.jit
def _ask(address, wanted):
    """Asks for what lies at addresses into L2; nothing waits for it."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, $2; }",
        "=r,l,r", [address.to(gl.int64, bitcast=True), wanted.to(gl.int32)], dtype=gl.int32,
        is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def _ask_ahead(q, block_table, seqused_k, stride_qb, stride_qh, stride_table, seqlen_k, splits,
               SPEC: gl.constexpr):  # fmt: skip
    """Asks for what a program begins with, while earlier launches run: what they change is seen.

    H200, 2026-11-30, us, without and with: one of 4k 7.15 and 6.93, with 32/32 heads 20.15 and
    19.97, one of 32k 36.4 and 36.3. Keys are not asked for: what the next launch gets early is
    taken from the present one, 20.4 with three tiles of each piece.
    """
    every = gl.arange(0, 32 * gl.num_warps(), gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    batch, index = gl.program_id(1) // splits, gl.program_id(1) % splits
    row = every * 8 // SPEC.dim
    place = batch.to(gl.int64) * stride_qb
    place = (place + (gl.program_id(0) * SPEC.group + row) * stride_qh) * SPEC.vector
    _ask(q + (place + every * 8 % SPEC.dim), row < SPEC.group)
    if SPEC.page_size > 0:
        place, wanted = _first_entries(index, splits, seqlen_k, SPEC)
        _ask(block_table + batch.to(gl.int64) * stride_table + place, wanted)
    if seqused_k is not None:
        _ask(seqused_k + batch + every * 0, every == 0)


@gluon.jit
def _first_entries(tile, step, seqlen_k, SPEC: gl.constexpr):
    """Places in a table, one for each thread, of what four tiles need of it, and which exist."""
    every = gl.arange(0, 32 * gl.num_warps(), gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    token = (tile + every % 4 * step) * SPEC.block_n + every // 4 * 16 % SPEC.block_n
    return token // SPEC.page_size, token < seqlen_k


@gluon.jit
def _touch(table, tile, step, seqlen_k, SPEC: gl.constexpr):
    """Asks for what four tiles need of the table, before the sequence's length is known.

    Once the result is there all of it is in L1. What entries past the end hold plays no part.
    """
    place, exists = _first_entries(tile, step, seqlen_k, SPEC)
    return gl.load(table + place, mask=exists, other=0)


@gluon.jit
def _start(k_ring, v_ring, start, stop, step, cache: Cache, SPEC: gl.constexpr,
           STAGES: gl.constexpr):  # fmt: skip
    """Starts the first copies; the page ids of the tile after them.

    All ids are asked for before any copy begins: no tile waits for another one's.
    """
    ids = (page_ids(cache, start, SPEC),)
    for s in gl.static_range(1, STAGES):
        ids = ids + (page_ids(cache, start + s * step, SPEC),)
    if SPEC.page_size > 0:
        for s in gl.static_range(STAGES):
            settle(ids[s])
    for s in gl.static_range(STAGES - 1):
        if start + s * step < stop:
            fetch(k_ring.index(s), v_ring.index(s), ids[s], start + s * step, cache, SPEC)
        async_copy.commit_group()
    return ids[STAGES - 1]


@gluon.jit
def _attend(keys, values, tile, cache: Cache, queries, scale, acc, maximum, denominator,
            SPEC: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Statistics of each warp with a tile more."""
    W: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = SPEC.rows
    F8: gl.constexpr = SPEC.is_float8
    key = keys.load(gl.DotOperandLayout(0, MMA, 4 if F8 else 2))
    if F8:
        key = key.to(gl.float16)
    scores = mma_v2(key, queries, gl.zeros([W, 16, ROWS], gl.float32, MMA))
    scores = scores * gl.expand_dims(scale, 1)
    scores = gl.where(hidden(tile, cache, SPEC, MMA), float("-inf"), scores)
    now = gl.maximum(maximum, gl.max(scores, 1))
    rescale = gl.exp2(maximum - now)
    p = gl.exp2(scores - gl.expand_dims(now, 1))
    denominator = denominator * rescale + gl.sum(p, 1)
    acc = acc * gl.expand_dims(rescale, 1)
    if F8:
        value = paired(values, SPEC, MMA)
    else:
        value = values.permute([0, 2, 1]).load(gl.DotOperandLayout(0, MMA, 2))
    return mma_v2(value, turned(p.to(value.dtype), ROWS, MMA), acc), now, denominator


@gluon.jit
def _walk(start, stop, step, cache: Cache, x, factor, new: New, is_last, SPEC: gl.constexpr,
          MMA: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Statistics of each warp over every `step`th tile of [start, stop), for the queries x.

    Args:
        start, stop, step: tiles.
        cache: where they are.
        x: queries; unused where they turn.
        factor: of logits.
        new: what is appended, where the call appends.
        is_last: whether it is this program that appends.
        SPEC, MMA, STAGES: what is compiled.
    """
    W: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = SPEC.rows
    DIM: gl.constexpr = SPEC.dim
    k_ring, v_ring, keys = rings(cache, SPEC, STAGES)
    if SPEC.appends:
        # H200, 2026-11-30, us, with these loads behind the first copies and before them: one of
        # 4k 7.47 and 6.98 (6.55 without an append), with 32/32 heads 20.7 and 20.2 (19.6).
        token = gathered_token(new, is_last, cache, SPEC)
        if SPEC.rotary_pairs > 0:
            x = gathered_queries(new, SPEC)
    ids = _start(k_ring, v_ring, start, stop, step, cache, SPEC, STAGES)
    if SPEC.appends:  # while the first tiles are on their way
        rows = new_rows(cache.k.dtype.element_ty, SPEC)
        if SPEC.rotary_pairs > 0:
            x = turned_queries(x, SPEC, MMA)
        if is_last:
            append(token, rows, cache, SPEC)
    queries, scale = prepared(x, factor, SPEC, MMA)
    acc = gl.zeros([W, DIM, ROWS], gl.float32, MMA)
    maximum = gl.full([W, ROWS], LOWEST, gl.float32, gl.SliceLayout(1, MMA))
    denominator = gl.zeros([W, ROWS], gl.float32, gl.SliceLayout(1, MMA))
    slot = 0
    ahead = STAGES - 1
    before = stop
    if SPEC.appends:
        before = gl.where(is_last, cache.last // SPEC.block_n, stop)
    for tile in range(start, before, step):
        async_copy.wait_group(STAGES - 2)
        wait_for_all()  # all copies are there, and all warps are done with the tile before
        later = tile + (STAGES - 1) * step
        if later < stop:
            fetch(k_ring.index(ahead), v_ring.index(ahead), ids, later, cache, SPEC)
            ids = page_ids(cache, later + step, SPEC)
        async_copy.commit_group()
        acc, maximum, denominator = _attend(
            keys.index(slot), v_ring.index(slot), tile, cache, queries, scale, acc, maximum,
            denominator, SPEC, MMA
        )  # fmt: skip
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
        ahead = gl.where(ahead == STAGES - 1, 0, ahead + 1)
    async_copy.wait_group(0)
    wait_for_all()
    if SPEC.appends:  # noqa: SIM102 (one is decided by the compiler, one at run time)
        # Apart from the loop, whose copies begin later where it holds this too: with it one of
        # 32k takes 38.4 us, 36.1 without (35.8 without an append), 16 of 4k 70.2 and 64.5 (63.9;
        # H200, 2026-11-30).
        if is_last & (start < stop):
            put_in(k_ring.index(slot), v_ring.index(slot), rows, cache, SPEC)
            acc, maximum, denominator = _attend(
                keys.index(slot), v_ring.index(slot), before, cache, queries, scale, acc, maximum,
                denominator, SPEC, MMA
            )  # fmt: skip
    return acc, maximum, denominator


@gluon.jit(do_not_specialize=(*NUMBERS, *NEW_NUMBERS))
def attn_decode_direct(
    q, k, v, out, lse, block_table, cu_seqlens_q, seqused_k, leftpad_k, alibi_slopes, sinks,
    k_scale, v_scale, new_k, new_v, rotary_cos, rotary_sin, partial_out, partial_stats, counters,
    stride_qb: gl.int64, stride_qs: gl.int64, stride_qh: gl.int64,
    stride_kb: gl.int64, stride_ks: gl.int64, stride_kh: gl.int64,
    stride_vb: gl.int64, stride_vs: gl.int64, stride_vh: gl.int64, stride_table: gl.int64,
    num_sequences, seqlen_q, seqlen_k, tokens_q: gl.int64, num_heads, splits, left, right,
    scale: gl.float32, softcap: gl.float32, num_sms,
    stride_new_kb, stride_new_kh, stride_new_vb, stride_new_vh,
    SPEC: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program: the heads of one group against a piece of a sequence."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1, 1], [1, 16, 8])
    kv_head = gl.program_id(0)
    if SPEC.batch_padded == 1:
        _ask_ahead(q, block_table, seqused_k, stride_qb, stride_qh, stride_table, seqlen_k, splits,
                   SPEC)  # fmt: skip
    meet_other_launches()
    if SPEC.batch_padded == 1:
        batch = gl.program_id(1) // splits
        index = gl.program_id(1) % splits
        first_program = batch * splits
        count = splits
        if SPEC.page_size > 0:
            own_table = block_table + batch.to(gl.int64) * stride_table
            touched = _touch(own_table, index, splits, seqlen_k, SPEC)
    else:
        batch, index, count, first_program, size = _locate(
            seqused_k, leftpad_k, num_sequences, left, splits, num_sms, SPEC
        )
        if batch >= num_sequences:
            return
    length = seqlen_k
    if seqused_k is not None:
        length = gl.load(seqused_k + batch)
    if SPEC.appends:
        length += 1
    first = 0
    if leftpad_k is not None:
        first = gl.load(leftpad_k + batch)
    first = _edge(length, first, left, SPEC)
    first_tile, tiles = _tiles(length, first, SPEC)
    if SPEC.batch_padded == 1:
        # A piece has every so many'th tile, so that its first one does not hang on the length.
        count = gl.maximum(gl.minimum(splits, gl.cdiv(tiles, SPEC.min_tiles)), 1)
        if index >= count:
            return
        start, stop, step = first_tile + index, first_tile + tiles, count
        if SPEC.page_size > 0:
            settle(touched >> 1)  # halved: entries past the end may hold what traps
    else:
        # H200, 2026-11-30: one sequence of 128k beside 63 of 1k takes 193 us with pieces of
        # neighbouring tiles, 206 with every so many'th.
        start = first_tile + index * size
        stop = gl.minimum(start + size, first_tile + tiles)
        step = 1

    table = block_table
    row = batch.to(gl.int64)
    if SPEC.page_size > 0:
        table = block_table + row * stride_table
        row = row * 0
    elif block_table is not None:
        row = gl.load(block_table + row * stride_table).to(gl.int64)
    own_row = row
    if SPEC.appends:  # a row below 0 stores nothing, and nothing of it is read either
        row = gl.maximum(row, 0)
    keys, values = k, v
    if SPEC.is_float8:
        keys = k.to(gl.pointer_type(gl.int32))
        values = v.to(gl.pointer_type(gl.int32))
    UNIT: gl.constexpr = SPEC.vector * width_of(SPEC) // SPEC.dim
    keys += (kv_head * stride_kh + row * stride_kb) * UNIT
    values += (kv_head * stride_vh + row * stride_vb) * UNIT
    held = length - 1
    if SPEC.appends:  # what is read as the first token of none is put right with the new one
        held = gl.maximum(held - 1, 0)
    cache = Cache(table, keys, values, stride_kb, stride_ks, stride_vb, stride_vs, first,
                   length - 1, held)  # fmt: skip
    v_factor = 1.0
    if k_scale is not None:
        scale = scale * gl.load(k_scale + kv_head)
    if v_scale is not None:
        v_factor = gl.load(v_scale + kv_head)
    new, is_last, x = 0, 0, 0
    if SPEC.appends:
        wide, last_tile = batch.to(gl.int64), first_tile + tiles - 1
        place = (wide * stride_qb + kv_head * SPEC.group * stride_qh) * SPEC.vector
        place_k = (wide * stride_new_kb + kv_head.to(gl.int64) * stride_new_kh) * SPEC.vector
        place_v = (wide * stride_new_vb + kv_head.to(gl.int64) * stride_new_vh) * SPEC.vector
        cos, sin = rotary_cos, rotary_sin
        if SPEC.rotary_pairs > 0:
            cos += cache.last.to(gl.int64) * SPEC.rotary_pairs
            sin += cache.last.to(gl.int64) * SPEC.rotary_pairs
        new = New(q + place, stride_qh * SPEC.vector, new_k + place_k, new_v + place_v, cos, sin,
                  own_row, seqlen_k)  # fmt: skip
        is_last = (last_tile < stop) & ((last_tile - start) % step == 0)
    if SPEC.rotary_pairs == 0:
        x = load_queries(q, batch, kv_head, stride_qb, stride_qh, SPEC, MMA)
    acc, top, total = _walk(start, stop, step, cache, x, scale, new, is_last, SPEC, MMA, STAGES)
    acc, top, total = meet(acc, top, total, SPEC)
    if count == 1:
        finish(acc, top, total, out, lse, sinks, batch, kv_head, num_heads, v_factor, SPEC)
    elif SPEC.merges:
        place = kv_head.to(gl.int64) * gl.num_programs(1) + first_program
        put_aside(acc, top, total, partial_out, partial_stats, place + index, SPEC)
        wait_for_all()  # all threads' stores come before the one thread's count
        counter = counters + batch * gl.num_programs(0) + kv_head
        if gl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
            finish_merged(partial_out, partial_stats, place, count, out, lse, sinks, batch, kv_head,
                           num_heads, v_factor, SPEC)  # fmt: skip
            gl.store(counter, 0)
