"""The Hopper forward: FlashAttention-3's design in Gluon, for sm_90a.

Method (Shah et al. 2024, FlashAttention-3): one CTA a multiprocessor takes tile after tile of
queries, 64 rows for each of two or three consumer warpgroups. One warp, the producer, loads
tiles of Q, K and V by TMA as slots become free, and runs on into the next tile of queries. A
consumer multiplies with asynchronous wgmma: S = Q K^T from shared memory, O += P V with P from
registers, and makes P from S by the online softmax of FlashAttention-2.

Who waits for whom (an arrow goes from a signal to its wait):

    producer                       consumer warpgroup w
    load Q[w] ----- q_full ------> first S of the tile
    load K   ------ k_full ------> S = Q K^T ---+
    load V   ------ v_full ------> O += P V ----|---+
    slot of K <---- barrier 6.. -- S is ready <-+   |      softmax of S, meanwhile
    slot of V <---- barrier 6.. -- O is ready <-----+      P V of the tile before
    buffer of Q <-- q_empty ------ O has left through it
    next tile ----- next_full ---> and next_empty back

S of a K/V tile and P V of the one before are issued together, so that the tensor cores work on
P V while the exponentials of S are made. With `turns` the warpgroups also issue their products
one after the other, and the softmax of one runs under the products of another. The pipeline
does not drain between tiles of queries: the last P V of one is issued beside the first S of the
next. Keys are walked from the last to the first: the K/V tiles that the mask's right edge or the
end of the keys cuts come first, those that its left edge cuts last, and the loop between them
does not mask. Where the right edge stands at multiples of 128, the first warpgroup sees no more
than half of its last tile and multiplies half of its keys.

The maximum of a row costs a fifth of a step (H200, D = 128: 400 to 490 of 2,500 clocks), and is
not needed: any base m keeps exp(S - m) exact that leaves it in P's range. A K/V tile that is seen
in full therefore subtracts the maximum of the tiles that were cut, or came first, until weights
come near the end of float16's range; then a rare branch moves the row's base (`weights.py`).
Results are the same to rounding. A row whose logits rise beyond float32's range within a tile has
the sum inf.

The consumers note two kinds of rows, which `repair.py` then makes again: those whose sum is inf,
and those that became NaN although their sum did not: a hidden value is multiplied by P = 0, and
0 * NaN is NaN.

Memory: q, out (B, S_q, H, D) or (T_q, H, D); k, v (B, S_k, H_kv, D), (T_k, H_kv, D) or
pages (P, N, H_kv, D) found through block_table; lse (B, H, S_q) or (H, T_q); strides in multiples
of 16 bytes. Shared memory: q_buffers x BM x D for Q, stages x BN x (D + D_v) for K and V.

Sequences that are packed, or whose keys a tensor cuts short, differ in length: the producer
reads where they lie and tells the consumers in a note. Packed tiles are numbered along the
sequences, and a producer walks on from the one where its last tile was. Where a CTA has few tiles
of a batch whose keys a tensor cuts short, the sequences with most keys come first (`order.py`).

A launch is set up while those before it end, and a CTA finds its first tile meanwhile, if no
tensor of lengths has to be read for that.

Causal tiles differ in length too, and a counter hands them out, the longest first. Squares with
no more tiles than there are multiprocessors are folded instead: one warpgroup takes 64 rows as
far from the first row as the other's from the last, and all CTAs end at about the same time.

Fewer than 128 queries do not fill a tile. Its rows are then the heads of a group, query after
query (a box of queries x heads by TMA), and K and V are read once for all of them. Where there are
few tiles, for such queries or for more of them over long keys, the keys are cut into pieces, whose
programs merge a share of the rows each (`gluon_pieces.py`). Each CTA has one piece then, if all run
at a time: nothing is drawn or told.

It does not do: pages of other sizes than `onchip.kernels` says, quantised keys, user functions,
dropout.

Legend: B batch, S_q / S_k lengths, T packed tokens, H query heads, H_kv key and value heads,
D / D_v head dimensions, BM / BN rows (queries) and columns (keys) of a tile, W number of a
warpgroup, n sizes, C code.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon

from onchip.kernels.gluon_pieces import Partials
from onchip.kernels.hopper.arguments import lengths_of, resolved_of
from onchip.kernels.hopper.config import Config
from onchip.kernels.hopper.consumer import consumer
from onchip.kernels.hopper.gluon_names import gl
from onchip.kernels.hopper.order import order_of
from onchip.kernels.hopper.producer import producer
from onchip.kernels.hopper.repair import resolve_repair
from onchip.kernels.hopper.repeated import Repeated
from onchip.kernels.hopper.shared import Inputs, Outputs, shared_memory
from onchip.kernels.hopper.softmax import Terms
from onchip.kernels.hopper.tiles import Lengths, Sizes
from onchip.kernels.hopper.workspace import NUM_COUNTERS, floats, take
from onchip.problem import Problem, Tensors
from onchip.together import TOGETHER

_PIECE_COUNTERS = gl.constexpr(NUM_COUNTERS)
_NUMBERS = (
    "stride_table seqlen_q seqlen_k tokens_q num_heads group num_sequences num_blocks num_tiles "
    "heads_per_group left right"
).split()


@gluon.jit(do_not_specialize=_NUMBERS)
def attn_fwd_hopper(
    q_desc, k_desc, v_desc, o_desc, out, lse, counters, cu_seqlens_q, cu_seqlens_k, seqused_k,
    block_table, slopes, sinks, scale: gl.float32, softcap: gl.float32, stride_table,
    seqlen_q, seqlen_k, tokens_q, num_heads, group, num_sequences, num_blocks, num_tiles,
    heads_per_group, left, right, partials, C: gl.constexpr,
):  # fmt: skip
    """One CTA for each multiprocessor."""
    n = Sizes(seqlen_q, seqlen_k, tokens_q, num_heads, group, num_sequences, num_blocks, num_tiles,
              heads_per_group, left, right)  # fmt: skip
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, stride_table)
    terms = Terms(scale, softcap, slopes, sinks)
    at = shared_memory(q_desc, k_desc, v_desc, o_desc, C)
    if C.in_pieces:
        stats = partials + gl.cast(num_tiles, gl.int64) * (C.block_m * C.width_v)
        partials = Partials(partials, stats, counters + _PIECE_COUNTERS)
    else:
        partials = lse
    to = Outputs(o_desc, out, lse, counters, partials)
    order = order_of(counters, C.sorts)
    source = Inputs(q_desc, k_desc, v_desc, lengths, counters, order)
    # The first role runs on the kernel's own four warps and takes the registers that are left: of
    # three as many as the others, or ptxas orders its steps otherwise (H200, 2026-12-01, D = 64
    # causal 16k 611 TFLOP/s, 573 with 168).
    if C.warpgroups == 2:
        gl.warp_specialize([
            (consumer, (0, lengths, to, terms, at, n, C)),
            (consumer, (1, lengths, to, terms, at, n, C)),
            (producer, (source, at, n, C)),
        ], [4, 1], [C.registers, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (0, lengths, to, terms, at, n, C)),
            (consumer, (1, lengths, to, terms, at, n, C)),
            (consumer, (2, lengths, to, terms, at, n, C)),
            (producer, (source, at, n, C)),
        ], [4, 4, 1], [C.registers, C.registers, 32])  # fmt: skip


def launch(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Runs the forward with the config that `choose_forward` picks.

    Args:
        problem: what the call asks for.
        tensors: its data; nothing here is written.

    Returns:
        out (B, S_q, H, D_v) or (T_q, H, D_v) and lse (B, H, S_q) or (H, T_q) float32, both
        contiguous and written in every element.
    """
    return launch_with(None, problem, tensors)


def repeat_launch(problem: Problem, tensors: Tensors, wants_lse: bool) -> Repeated | None:
    """See `onchip.kernels.Kernel.load_repeat`; addresses from q to v_scale."""
    if tensors.cu_seqlens_k is not None or tensors.k.numel() == 0:
        return None
    out = tensors.q.new_empty(*tensors.q.shape[:-1], problem.head_dim_v)
    return Repeated(resolved_of(attn_fwd_hopper, None, problem, tensors, out), out, wants_lse)


def launch_with(config: Config | None, problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """`launch` with a given config, or the chosen one: for sweeps and tests."""
    q, k = tensors.q, tensors.k
    out = q.new_empty(*q.shape[:-1], problem.head_dim_v)
    rows = q.shape[:1] if q.dim() == 3 else q.shape[:2]
    lse = q.new_empty(*rows[:-1], problem.num_heads, rows[-1], dtype=torch.float32)
    if out.numel() == 0 or problem.seqlen_q == 0:
        return out, lse
    if k.numel() == 0:
        return _without_keys(tensors, out, lse)
    with TOGETHER:
        _launch_on(config, problem, tensors, out, lse)
    return out, lse


def _launch_on(
    config: Config | None, problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor
) -> None:
    """The forward and, where hidden values could spoil rows, the repair. Mutates: out, lse."""
    q, k, v = tensors.q, tensors.k, tensors.v
    found = resolved_of(attn_fwd_hopper, config, problem, tensors, out)
    optional = (*lengths_of(tensors), tensors.alibi_slopes, tensors.sinks)
    partials = floats(q.device, found.num_floats) if found.num_floats else None
    given = (q, k, v, out, lse, take(q.device, found.num_counters), *optional, partials)
    addresses = tuple([0 if x is None else x.data_ptr() for x in given])
    if found.replay(addresses):
        return
    if found.leaks:
        resolve_repair(problem, found, tensors)
    calls = found.calls(found.described(q, k, v, out), given)
    for kernel, values in calls:
        kernel(*values)
    found.remember(addresses, calls)


def _without_keys(tensors: Tensors, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Memory without a single key: TMA could not describe it. Mutates: out, lse."""
    lse.fill_(-torch.inf)
    if tensors.sinks is not None:
        lse.copy_(tensors.sinks[:, None].expand(lse.shape))
    return out.zero_(), lse
