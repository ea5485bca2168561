"""The decode of many query rows on Hopper, in Gluon: K and V are read once for up to 128 rows.

Method: one CTA takes a piece of a sequence's keys for one head of K and up to 128 rows, at D = 64
and 256 up to 64 (queries of the sequence x heads of the group; row r is query r // group and head
r % group). Producers of one warp load tiles of K and V by TMA into rings of slots, by page where
keys are paged. One or two consumer warpgroups, 64 rows each, multiply with wgmma: S = Q K^T with Q
in registers (D = 256: in shared memory), online softmax, O += P V with P in registers. S of a tile
is issued together with P V of the one before. With two consumers and tiles of 64 keys one producer
loads K and one V.

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

Pieces are cut as `decode_tall_cuts` says. They share rows out or are joined by neighbours, as
`gluon_pieces` says, or are put aside for a launch that merges (`decode_config._share_rows`,
`decode_spec`).

It does not do: D other than 64, 128 and 256, windows to the left, left padding, softcap, ALiBi,
float8, pages that neither divide a tile nor are a multiple of it.

Legend: B batch, S_q queries, S_k keys, H_kv key and value heads, D head dimension, P pages, N page
size, BN keys of a tile, W consumer warpgroups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon

from onchip.kernels.compiled import Compiled
from onchip.kernels.gluon_names import (
    TensorDescriptor,
    as_tiles,
    gl,
    in_pieces,
    mbarrier,
    meet_other_launches,
    new_barriers,
    tma_load,
)
from onchip.kernels.gluon_pieces import POLLS, Partials
from onchip.kernels.launcher import Launch
from onchip.kernels.portable.decode_spec import NUMBERS, DecodeSpec
from onchip.kernels.portable.decode_tall_cuts import (
    Lengths,
    Piece,
    piece_of,
)
from onchip.kernels.portable.decode_tall_results import Numbers, Results
from onchip.kernels.portable.decode_tall_tiles import (
    Ring,
    Source,
    attend,
    place_of,
    tile_layout,
)

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@dataclass(frozen=True)
class Tall(Compiled):
    """What the compiled code depends on: a `DecodeSpec`, whose fields are read through this.

    Args:
        spec: see there.
        whole_rows: whether one instruction copies all columns of a page's or tile's rows: in
            shared memory 8 rows of 64 columns lie together, then the same rows' next 64.
    """

    spec: DecodeSpec
    whole_rows: bool = False

    def __getattr__(self, name: str):
        return getattr(object.__getattribute__(self, "spec"), name)

    @property
    def panels(self) -> int:
        """Panels of 64 columns in which a row lies in shared memory."""
        return self.width // 64

    @property
    def pages_in_tile(self) -> int:
        """Pages that a tile's keys lie in, each copied on its own; 1 where they lie together."""
        return max(1, self.block_n // self.page_size) if self.page_size else 1

    @property
    def is_joint(self) -> bool:
        """Whether one producer loads K and V, whose slots become free together.

        H200, 2026-11-30, 8 sequences of 16k, us, so and with two producers and slots of their own:
        64 rows 138.3 and 139.9, 128 rows 144.8 and 142.9, in tiles of 128 keys 147.6 to 152.6;
        2026-12-01, D = 256, 8 of 8k, 32 rows 132.5 and 133.5, one of 32k 72.7 and 74.5.
        """
        return self.rows == 64 or self.block_n > 64

    @property
    def q_in_registers(self) -> bool:
        """Whether Q is wgmma's operand in registers; 256 columns leave no room beside O."""
        return self.width <= 128

    @property
    def joins(self) -> bool:
        """Whether there may be pieces that neighbours join: all, or those of unequal sequences."""
        return self.merged_rows == 0 and (self.shares == 0 or self.batch_padded > 1)

    @property
    def polls(self) -> int:
        """How often a piece that shares rows looks for the others."""
        return POLLS

    @property
    def has_words(self) -> bool:
        """Whether P is handed from step to step as words: its tiles are walked in two loops."""
        return True

    def described(self, x: Tensor) -> TensorDescriptor:
        """K or V in the boxes that one instruction copies.

        (P, N / 8, H_kv * D / 64, 8, 64) where `whole_rows`, else (B or P, H_kv, S_k or N, D).
        """
        if self.whole_rows:
            num_pages, rows, heads, _ = x.shape
            page, row, _, _ = x.stride()
            shape = [num_pages, rows // 8, heads * self.panels, 8, 64]
            strides = [page, row * 8, 64, row, 1]
            block = [1, min(self.page_size, self.block_n) // 8, self.panels, 8, 64]
        else:
            x = x.transpose(1, 2)
            shape, strides = list(x.shape), [*x.stride()[:3], 1]
            small = self.pages_in_tile > 1
            block = [1, 1, self.page_size, 64] if small else [1, 1, self.block_n, self.width]
        # A dimension of size 1 may have any stride, which TMA would refuse.
        strides = [self.width if n == 1 else s for n, s in zip(shape, strides, strict=True)]
        layout = gl.NVMMASharedLayout.get_default_for(block, _DTYPES[x.dtype])
        return TensorDescriptor(x, shape, strides, block, layout)


@gluon.jit
def _ring(k, SPEC: gl.constexpr, STAGES: gl.constexpr):
    W: gl.constexpr = SPEC.rows // 64
    BN: gl.constexpr = SPEC.block_n
    FLAT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    WIDTH: gl.constexpr = SPEC.width
    LAYOUT: gl.constexpr = tile_layout(BN, WIDTH, 16, SPEC.whole_rows)
    # Barriers that nobody uses must not begin: Triton (3.6) gives their memory to scratch.
    k_empty = new_barriers(STAGES, W)
    v_empty = k_empty if SPEC.is_joint else new_barriers(STAGES, W)
    return Ring(
        gl.allocate_shared_memory(k.dtype, [W, 64, WIDTH], FLAT),
        gl.allocate_shared_memory(k.dtype, [STAGES, BN, WIDTH], LAYOUT),
        gl.allocate_shared_memory(k.dtype, [STAGES, BN, WIDTH], LAYOUT),
        new_barriers(STAGES, 1), new_barriers(STAGES, 1),
        k_empty, v_empty,
    )  # fmt: skip


@gluon.jit
def _load(desc, barrier, tiles, slot, ids, row, kv_head, SPEC: gl.constexpr, STAGES: gl.constexpr):
    """Starts to copy BN rows of K or V to a slot, from row `row` of a page or sequence on.

    Of pages that hold less than a tile each is copied by instructions of its own. Where panels of
    64 columns do not come together each has its own: in shared memory they lie apart then, row
    after row.
    """
    mbarrier.expect(barrier, SPEC.block_n * SPEC.width * 2)
    PAGES: gl.constexpr = SPEC.pages_in_tile
    PANELS: gl.constexpr = SPEC.panels
    if SPEC.whole_rows:
        SHAPE: gl.constexpr = [STAGES * PAGES, 1, SPEC.block_n // PAGES // 8, PANELS, 8, 64]
        parts = as_tiles(tiles, desc, SHAPE)
        for i in gl.static_range(PAGES):
            place = [ids[i], row // 8, kv_head * PANELS, 0, 0]
            tma_load(desc, place, barrier, parts.index(slot * PAGES + i))
    elif PAGES == 1:
        WHOLE: gl.constexpr = [STAGES, 1, 1, SPEC.block_n, SPEC.width]
        whole = as_tiles(tiles, desc, WHOLE)
        tma_load(desc, [ids[0], kv_head, row, 0], barrier, whole.index(slot))
    else:
        NUMBER: gl.constexpr = STAGES * PAGES * PANELS
        parts = in_pieces(tiles, desc, NUMBER, SPEC.page_size)
        for i in gl.static_range(PAGES):
            for j in gl.static_range(PANELS):
                to = parts.index((slot * PANELS + j) * PAGES + i)
                tma_load(desc, [ids[i], kv_head, 0, j * 64], barrier, to)


@gluon.jit
def _pages(table, block, length, SPEC: gl.constexpr):
    """Ids of 32 pages, one in each lane; past the sequence's end pages that read as 0."""
    page = block * 32 + gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    inside = (page >= 0) & (page * SPEC.page_size < length)
    return gl.load(table + page, mask=inside, other=1 << 30)


@gluon.jit
def _id(pages, lane):
    """One of `_pages`, by one instruction."""
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    return gl.sum(gl.where(lanes == lane, pages, 0), 0)


@gluon.jit
def _ids(pages, key, SPEC: gl.constexpr):
    """Pages of the tile whose first key is `key`, of the 32 that it is among."""
    PAGES: gl.constexpr = SPEC.pages_in_tile
    lane = key // SPEC.page_size % 32
    ids = (_id(pages, lane),)
    for i in gl.static_range(1, PAGES):
        ids = ids + (_id(pages, lane + i),)
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

    Pages are looked up 32 at a time and ahead of their tiles: with a load for each id the assembler
    waits for the next tile's ids before it asks for this tile's keys.
    """
    if SPEC.page_size == 0:
        for i in range(piece.stop - piece.start):
            _load_tile(k, v, at, piece.stop - 1 - i, i, (table,), piece.kv_head, WHAT, SPEC,
                       STAGES)  # fmt: skip
    else:
        IN_BLOCK: gl.constexpr = 32 * SPEC.page_size // SPEC.block_n
        count = 0
        end = piece.stop
        block = (end - 1) // IN_BLOCK
        following = _pages(table, block, piece.length, SPEC)
        while end > piece.start:
            pages = following
            following = _pages(table, block - 1, piece.length, SPEC)
            start = gl.maximum(block * IN_BLOCK, piece.start)
            for i in range(end - start):
                tile = end - 1 - i
                ids = _ids(pages, tile * SPEC.block_n, SPEC)
                _load_tile(k, v, at, tile, count + i, ids, piece.kv_head, WHAT, SPEC, STAGES)
            count += end - start
            end = start
            block -= 1


@gluon.jit
def producer(k, v, source: Source, piece: Piece, at: Ring, WHAT: gl.constexpr, SPEC: gl.constexpr,
             STAGES: gl.constexpr):  # fmt: skip
    """Loads what the consumers will read, if there is such a piece: "k", "v" or both ("kv")."""
    if piece.exists:
        _load_piece(k, v, place_of(source, piece.batch, SPEC), piece, at, WHAT, SPEC, STAGES)


@gluon.jit
def consumer(
    W: gl.constexpr, source: Source, to: Results, piece: Piece, at: Ring, n: Numbers,
    HAS_SINKS: gl.constexpr, SPEC: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """64 rows of the piece, if there is one."""
    if piece.exists:
        attend(W, source, to, piece, at, n, HAS_SINKS, SPEC, STAGES)


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
    lengths = Lengths(cu_seqlens_q, seqused_k, num_sequences, seqlen_q, seqlen_k, splits, num_sms)
    piece = piece_of(lengths, SPEC)
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
    source = Source(q, values, block_table, stride_table)
    at = _ring(k, SPEC, STAGES)
    if SPEC.rows == 64:
        gl.warp_specialize([
            (consumer, (0, source, to, piece, at, n, HAS_SINKS, SPEC, STAGES)),
            (producer, (k, v, source, piece, at, "kv", SPEC, STAGES)),
        ], [1], [24])  # fmt: skip
    elif SPEC.is_joint:
        gl.warp_specialize([
            (consumer, (0, source, to, piece, at, n, HAS_SINKS, SPEC, STAGES)),
            (consumer, (1, source, to, piece, at, n, HAS_SINKS, SPEC, STAGES)),
            (producer, (k, v, source, piece, at, "kv", SPEC, STAGES)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (0, source, to, piece, at, n, HAS_SINKS, SPEC, STAGES)),
            (consumer, (1, source, to, piece, at, n, HAS_SINKS, SPEC, STAGES)),
            (producer, (k, v, source, piece, at, "k", SPEC, STAGES)),
            (producer, (k, v, source, piece, at, "v", SPEC, STAGES)),
        ], [4, 1, 1], [240, 24, 24])  # fmt: skip


def tall_of(spec: DecodeSpec, keys: tuple[Tensor, Tensor]) -> Tall:
    """What a call's spec, K and V compile to."""
    whole_rows = spec.page_size > 0 and spec.page_size % 8 == 0
    whole_rows = whole_rows and all(x.shape[2] == 1 or x.stride(2) == spec.width for x in keys)
    return Tall(spec, whole_rows)


def launcher(spec: Tall, grid: tuple[int, int], device: int) -> Launch:
    """Of 64 rows of up to 128 columns two CTAs run on an SM: half of its registers for each."""
    options = {"maxnreg": 128} if spec.rows == 64 and spec.width <= 128 else {}
    # A dependent launch: it is set up while what runs before it ends.
    return Launch(attn_decode_tall, grid, device, num_warps=4, launch_pdl=True, **options)
