"""The decode of many query rows on Hopper, in Gluon: K and V are read once for up to 128 rows.

Method: one CTA takes a piece of a sequence's keys for one head of K and up to 128 rows (queries of
the sequence x heads of the group; row r is query r // group and head r % group). Producers of one
warp load tiles of K and V by TMA into rings of slots, by page where keys are paged. One or two
consumer warpgroups, 64 rows each, multiply with wgmma: S = Q K^T with Q in registers, online
softmax, O += P V with P in registers. S of a tile is issued together with P V of the one before.
With two consumers and tiles of 64 keys one producer loads K and one V: with pages of 16 a single
warp takes about as long to ask for a tile as the products take.

Who waits for whom (an arrow goes from a signal to its wait):

    producers                      each consumer
    load K ------- k_full -------> S = Q K^T ---+
    load V ------- v_full -------> O += P V ----|---+
    slot of K <--- k_empty ------- S is ready <-+   |   (with one producer: O is ready)
    slot of V <--- v_empty ------- O is ready <-----+   (with one producer not used)

Keys are walked from the last to the first: the tiles that some row does not see in full come
first. Their values must be fit to be multiplied by 0: what lies past the sequence's end becomes 0
in shared memory, and so does what is not finite, which is added at the end, to exactly the rows
that see it.

Pieces are cut as `decode` cuts them and merged as `gluon_pieces` says.

It does not do: D other than 128, windows to the left, left padding, softcap, ALiBi, float8, pages
that neither divide a tile nor are a multiple of it.

Legend: B batch, S_q queries, S_k keys, H_kv key and value heads, D head dimension, P pages, N page
size, BN keys of a tile, W consumer warpgroups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon

from onchip.kernels.gluon_names import (
    TensorDescriptor,
    gl,
    in_pieces,
    mbarrier,
    meet_other_launches,
    new_barriers,
    tma_load,
)
from onchip.kernels.gluon_pieces import POLLS, Partials
from onchip.kernels.launcher import Launch
from onchip.kernels.portable.decode_cuts import located, pieces
from onchip.kernels.portable.decode_spec import NUMBERS, DecodeSpec
from onchip.kernels.portable.decode_tall_tiles import (
    Numbers,
    Piece,
    Results,
    Ring,
    Source,
    consumer,
)

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@dataclass(frozen=True)
class Tall:
    """What the compiled code depends on: a `DecodeSpec`, whose fields are read through this.

    Args:
        spec: see there.
        waits: how often a program looks for its sequence's others, see `gluon_pieces`.
    """

    spec: DecodeSpec
    waits: int = 0

    def __getattr__(self, name: str):
        return getattr(object.__getattribute__(self, "spec"), name)

    @property
    def pages_in_tile(self) -> int:
        """Pages that a tile's keys lie in, each copied on its own; 1 where they lie together."""
        return max(1, self.block_n // self.page_size) if self.page_size else 1

    @property
    def is_joint(self) -> bool:
        """Whether one producer loads K and V, whose slots become free together.

        H200, 2026-11-30, 8 sequences of 16k, us, so and with two producers and slots of their own:
        64 rows 138.3 and 139.9, 128 rows 144.8 and 142.9, in tiles of 128 keys 147.6 to 152.6.
        """
        return self.rows == 64 or self.block_n > 64

    @property
    def has_words(self) -> bool:
        """Whether P is handed from step to step as words: its tiles are walked in two loops."""
        return True

    def described(self, x: Tensor) -> TensorDescriptor:
        """K or V as (B or P, H_kv, S_k or N, D), in the boxes that one instruction copies."""
        x = x.transpose(1, 2)
        # A dimension of size 1 may have any stride, which TMA would refuse.
        strides = [x.shape[-1] if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
        small = self.pages_in_tile > 1
        block = [1, 1, self.page_size, 64] if small else [1, 1, self.block_n, 128]
        layout = gl.NVMMASharedLayout.get_default_for(block, _DTYPES[x.dtype])
        return TensorDescriptor(x, list(x.shape), [*strides[:3], 1], block, layout)


@gluon.jit
def _cut(seqused_k, num_sequences, splits, num_sms, SPEC: gl.constexpr):
    """Sequence, piece, pieces and first program; unequal lengths get `sm_pieces` an SM, about."""
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    every = gl.arange(0, SPEC.batch_padded, FLAT)
    lengths = gl.load(seqused_k + every, mask=every < num_sequences, other=0)
    tiles = gl.cdiv(lengths, SPEC.block_n)
    return located(every, tiles, num_sequences, splits, SPEC.sm_pieces * num_sms, SPEC)


@gluon.jit
def _piece(
    cu_seqlens_q, seqused_k, num_sequences, seqlen_q, seqlen_k, splits, num_sms,
    SPEC: gl.constexpr,
):  # fmt: skip
    """What this CTA walks."""
    if SPEC.batch_padded == 1:
        batch = gl.program_id(1) // splits
        index = gl.program_id(1) % splits
        first_program = batch * splits
        count = splits
        exists = batch >= 0
    else:
        batch, index, count, first_program = _cut(seqused_k, num_sequences, splits, num_sms, SPEC)
        exists = batch < num_sequences
        batch = gl.minimum(batch, num_sequences - 1)
    length = seqlen_k
    if seqused_k is not None:
        length = gl.load(seqused_k + batch)
    q_start = 0
    num_queries = seqlen_q
    if SPEC.packed_q:
        q_start = gl.load(cu_seqlens_q + batch)
        num_queries = gl.load(cu_seqlens_q + batch + 1) - q_start
    tiles = gl.cdiv(length, SPEC.block_n)
    if SPEC.batch_padded == 1:
        count = pieces(tiles, splits, SPEC)
        exists = index < count
    unit = gl.program_id(0)
    row_start = (unit % SPEC.row_blocks) * SPEC.rows
    exists = exists & (row_start < num_queries * SPEC.group)
    size = gl.cdiv(tiles, gl.maximum(count, 1))
    start = index * size
    stop = gl.maximum(gl.minimum(start + size, tiles), start + 1)
    return Piece(batch, unit // SPEC.row_blocks, row_start, q_start, num_queries, length, start,
                 stop, count, index, first_program, exists)  # fmt: skip


@gluon.jit
def _ring(k, v, SPEC: gl.constexpr, STAGES: gl.constexpr):
    W: gl.constexpr = SPEC.rows // 64
    BN: gl.constexpr = SPEC.block_n
    FLAT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # Barriers that nobody uses must not begin: Triton (3.6) gives their memory to scratch.
    k_empty = new_barriers(STAGES, W)
    v_empty = k_empty if SPEC.is_joint else new_barriers(STAGES, W)
    return Ring(
        gl.allocate_shared_memory(k.dtype, [W, 64, 128], FLAT),
        gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BN, 128], k.layout),
        gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BN, 128], v.layout),
        new_barriers(STAGES, 1), new_barriers(STAGES, 1),
        k_empty, v_empty,
    )  # fmt: skip


@gluon.jit
def _load(desc, barrier, tiles, slot, ids, row, kv_head, SPEC: gl.constexpr, STAGES: gl.constexpr):
    """Starts to copy BN rows of K or V to a slot, from row `row` of a page or sequence on.

    Of pages that hold less than a tile each is copied by instructions of its own, 64 columns
    each: in shared memory 64 columns of a tile lie together, row after row.
    """
    mbarrier.expect(barrier, SPEC.block_n * 256)
    if SPEC.pages_in_tile == 1:
        tma_load(desc, [ids[0], kv_head, row, 0], barrier, tiles.index(slot))
    else:
        PAGES: gl.constexpr = SPEC.pages_in_tile
        NUMBER: gl.constexpr = STAGES * PAGES * 2
        parts = in_pieces(tiles, desc, NUMBER, SPEC.page_size)
        for i in gl.static_range(PAGES):
            for j in gl.static_range(2):
                to = parts.index((slot * 2 + j) * PAGES + i)
                tma_load(desc, [ids[i], kv_head, 0, j * 64], barrier, to)


@gluon.jit
def _page_id(table, key, length, SPEC: gl.constexpr):
    """The page of a key; past the sequence's end one that does not exist, which reads as 0."""
    return gl.load(table + key // SPEC.page_size, mask=key < length, other=1 << 30)


@gluon.jit
def _ids(table, tile, piece: Piece, SPEC: gl.constexpr):
    """Pages of a tile of keys, or the sequence's place where its keys lie in one piece."""
    if SPEC.page_size == 0:
        return (table,)
    else:
        PAGES: gl.constexpr = SPEC.pages_in_tile
        key = tile * SPEC.block_n
        ids = (_page_id(table, key, piece.length, SPEC),)
        for i in gl.static_range(1, PAGES):
            ids = ids + (_page_id(table, key + i * SPEC.page_size, piece.length, SPEC),)
        return ids


@gluon.jit
def _load_tile(
    k, v, at: Ring, tile, count, ids, kv_head, WHAT: gl.constexpr, SPEC: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Loads a tile, the CTA's number `count`, as soon as its slots are free."""
    slot = count % STAGES
    phase = ((count // STAGES) & 1) ^ 1
    row = tile * SPEC.block_n
    if SPEC.page_size > 0:
        row = row % SPEC.page_size
    if WHAT != "v":
        mbarrier.wait(at.k_empty.index(slot), phase)
        _load(k, at.k_full.index(slot), at.k, slot, ids, row, kv_head, SPEC, STAGES)
    if WHAT != "k":
        if not SPEC.is_joint:
            mbarrier.wait(at.v_empty.index(slot), phase)
        _load(v, at.v_full.index(slot), at.v, slot, ids, row, kv_head, SPEC, STAGES)


@gluon.jit
def _load_piece(k, v, table, piece: Piece, at: Ring, WHAT: gl.constexpr, SPEC: gl.constexpr,
                STAGES: gl.constexpr):  # fmt: skip
    """Loads the piece's tiles, the last one first, as slots become free.

    Pages are looked up a tile ahead, so that a slot never waits for the table.
    """
    ids = _ids(table, piece.stop - 1, piece, SPEC)
    for count in range(piece.stop - piece.start):
        tile = piece.stop - 1 - count
        following = _ids(table, gl.maximum(tile - 1, piece.start), piece, SPEC)
        _load_tile(k, v, at, tile, count, ids, piece.kv_head, WHAT, SPEC, STAGES)
        ids = following


@gluon.jit
def producer(k, v, table, piece: Piece, at: Ring, WHAT: gl.constexpr, SPEC: gl.constexpr,
             STAGES: gl.constexpr):  # fmt: skip
    """Loads what the consumers will read, if there is such a piece: "k", "v" or both ("kv")."""
    if piece.exists:
        _load_piece(k, v, table, piece, at, WHAT, SPEC, STAGES)


@gluon.jit
def _place(block_table, stride_table, batch, SPEC: gl.constexpr):
    """A sequence's row of the table or, where its keys lie in one piece, their index."""
    if SPEC.page_size > 0:
        return block_table + gl.cast(batch, gl.int64) * stride_table
    elif block_table is not None:
        return gl.load(block_table + gl.cast(batch, gl.int64) * stride_table)
    else:
        return batch


@gluon.jit(do_not_specialize=NUMBERS)
def attn_decode_tall(
    q, k, v, values, out, lse, block_table, cu_seqlens_q, seqused_k, leftpad_k, alibi_slopes, sinks,
    k_scale, v_scale, partial_out, partial_stats, counters,
    stride_qb: gl.int64, stride_qs: gl.int64, stride_qh: gl.int64,
    stride_kb: gl.int64, stride_ks: gl.int64, stride_kh: gl.int64,
    stride_vb: gl.int64, stride_vs: gl.int64, stride_vh: gl.int64, stride_table: gl.int64,
    num_sequences, seqlen_q, seqlen_k, tokens_q: gl.int64, num_heads, splits, left, right,
    scale: gl.float32, softcap: gl.float32, num_sms,
    SPEC: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One CTA: up to 128 rows of one head of K against a piece of a sequence."""
    meet_other_launches(4)
    piece = _piece(cu_seqlens_q, seqused_k, num_sequences, seqlen_q, seqlen_k, splits, num_sms,
                   SPEC)  # fmt: skip
    table = _place(block_table, stride_table, piece.batch, SPEC)
    n = Numbers(stride_qb, stride_qs, stride_qh, stride_vb, stride_vs, stride_vh, seqlen_q,
                tokens_q, num_heads, right, scale)  # fmt: skip
    # What a call does not have is any pointer.
    HAS_SINKS: gl.constexpr = sinks is not None
    if not HAS_SINKS:
        sinks = lse
    if not SPEC.merges:
        partial_out = lse
        partial_stats = lse
        counters = lse
    to = Results(out, lse, sinks, Partials(partial_out, partial_stats, counters))
    source = Source(q, values, table)
    at = _ring(k, v, SPEC, STAGES)
    if SPEC.rows == 64:
        gl.warp_specialize([
            (consumer, (0, source, to, piece, at, n, HAS_SINKS, SPEC, STAGES)),
            (producer, (k, v, table, piece, at, "kv", SPEC, STAGES)),
        ], [1], [24])  # fmt: skip
    elif SPEC.is_joint:
        gl.warp_specialize([
            (consumer, (0, source, to, piece, at, n, HAS_SINKS, SPEC, STAGES)),
            (consumer, (1, source, to, piece, at, n, HAS_SINKS, SPEC, STAGES)),
            (producer, (k, v, table, piece, at, "kv", SPEC, STAGES)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (0, source, to, piece, at, n, HAS_SINKS, SPEC, STAGES)),
            (consumer, (1, source, to, piece, at, n, HAS_SINKS, SPEC, STAGES)),
            (producer, (k, v, table, piece, at, "k", SPEC, STAGES)),
            (producer, (k, v, table, piece, at, "v", SPEC, STAGES)),
        ], [4, 1, 1], [240, 24, 24])  # fmt: skip


def tall_of(spec: DecodeSpec, num_programs: int, num_sms: int) -> Tall:
    """Programs wait for others only where all run at once: of 64 rows two on an SM."""
    at_once = num_sms * (2 if spec.rows == 64 else 1)
    return Tall(spec, POLLS if spec.merges and num_programs <= at_once else 0)


def launcher(spec: Tall, grid: tuple[int, int], device: int) -> Launch:
    """Of 64 rows two CTAs run on an SM: half of its registers for each."""
    options = {"maxnreg": 128} if spec.rows == 64 else {}
    # A dependent launch: it is set up while what runs before it ends.
    return Launch(attn_decode_tall, grid, device, num_warps=4, launch_pdl=True, **options)
