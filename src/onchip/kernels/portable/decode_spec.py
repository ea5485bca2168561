"""What the portable decode's launch hands to its kernel: the compiled part and the numbers.

Legend: B batch, S_q queries of a sequence, T packed tokens, H query heads, H_kv key and value
heads, D / D_v head dimensions, N page size, BN keys of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onchip.kernels.compiled import Compiled
from onchip.kernels.portable.arguments import (
    LOG2E,
    edges_of,
    factors_of,
    is_packed,
    precision_of,
    strides_of,
)
from onchip.kernels.portable.config import padded
from onchip.kernels.portable.decode_config import DecodeConfig, suits_direct
from onchip.problem import Layout, NewTokens, Problem, Tensors, needs_copy


@dataclass(frozen=True)
class DecodeSpec(Compiled):
    """What the compiled code depends on; everything else is a run-time value.

    Args:
        rows: query rows of a program.
        kept: rows of it that can exist, a power of two.
        row_blocks: programs that share a sequence's rows.
        group: query heads of one head of K.
        groups: groups of tokens with statistics of their own, 0 in the wide walk.
        block_n: BN.
        dim: D.
        dim_v: D_v.
        width: D padded to a power of two.
        width_v: D_v padded.
        several: whether a sequence has more than one query.
        has_left: whether the mask has a left edge.
        has_right: whether it has a right edge that hides a key from some row.
        has_first: whether keys may begin after the sequence's first row.
        has_softcap: whether logits are capped.
        alibi_dim: dimensions of the slopes, 0 for none.
        page_size: N; 0 when a sequence's keys lie in one piece.
        packed_q: whether queries are packed.
        vector: strides come in units of so many elements.
        is_float32: whether q is float32.
        is_float8: whether keys and values are float8.
        precision: of float32 matrix products.
        batch_padded: power of two >= B where unequal lengths are cut evenly, else 1.
        min_tiles: fewest tiles in a piece.
        sm_pieces: pieces of unequal sequences that an SM gets, about.
        merges: whether a sequence can be cut at all.
        merged_rows: rows of a program of the launch that merges, 0 where pieces meet in their own.
        shares: parts of 64 rows that pieces share out among themselves, 0 where they do not.
        by_word: whether page ids are read by an instruction that Triton can't make asynchronous.
        appends: whether each sequence's last token is not in the cache yet but given apart.
        rotary_pairs: pairs of features that turn by that token's position, 0 for none.
        interleaved: whether pairs are (0, 1), (2, 3), ... and not halves.
    """

    rows: int
    kept: int
    row_blocks: int
    group: int
    groups: int
    block_n: int
    dim: int
    dim_v: int
    width: int
    width_v: int
    several: bool
    has_left: bool
    has_right: bool
    has_first: bool
    has_softcap: bool
    alibi_dim: int
    page_size: int
    packed_q: bool
    vector: int
    is_float32: bool
    is_float8: bool
    precision: str
    batch_padded: int
    min_tiles: int
    sm_pieces: int
    merges: bool
    merged_rows: int
    shares: int
    by_word: bool
    appends: bool = False
    rotary_pairs: int = 0
    interleaved: bool = False


#: Entries of a piece's output that the last program merges at once; more take a launch.
_MERGED_AT_ONCE = 1024
#: Pieces of a sequence that the tall walk's programs merge among themselves at most, unless they
#: share rows out or are cut on the device; see `decode_config._share_rows`.
_MOST_AMONG_THEMSELVES = 8
#: Entries of a program of that launch.
_MERGED_APART = 512


def _merged_rows(config: DecodeConfig, kept: int, problem: Problem) -> int:
    kept, width_v = min(kept, config.rows), padded(problem.head_dim_v)
    few = config.splits <= _MOST_AMONG_THEMSELVES
    if config.tall and (config.shares or few or config.balanced):
        return 0
    if kept * width_v <= _MERGED_AT_ONCE:
        return 0
    return max(1, min(kept, _MERGED_APART // width_v))


def decode_spec(
    config: DecodeConfig, problem: Problem, tensors: Tensors, new: NewTokens | None = None
) -> DecodeSpec:
    """The spec of a call, which appends where `new` is given: see `appends_itself`."""
    assert problem.seqused_k or not config.balanced, "lengths that are all alike need no balance"
    assert not config.shares or config.splits <= config.shares, "each piece merges a share of rows"
    several = problem.seqlen_q > 1
    cut = config.splits > 1 or config.balanced
    table = tensors.block_table
    in_one_piece = table is None or table.shape[1] == 1
    kept = 1 << max(0, problem.seqlen_q * problem.group - 1).bit_length()
    return DecodeSpec(
        rows=config.rows,
        kept=min(kept, config.rows),
        row_blocks=config.row_blocks,
        group=problem.group,
        groups=config.groups,
        block_n=config.block_n,
        dim=problem.head_dim,
        dim_v=problem.head_dim_v,
        width=padded(problem.head_dim),
        width_v=padded(problem.head_dim_v),
        several=several,
        has_left=problem.mask.left >= 0,
        has_right=several and problem.mask.right >= 0,
        has_first=problem.leftpad,
        has_softcap=problem.softcap > 0,
        alibi_dim=problem.alibi,
        page_size=0 if in_one_piece else problem.page_size,
        packed_q=problem.layout_q is Layout.PACKED,
        vector=vector_of(tensors),
        is_float32=problem.dtype == torch.float32,
        is_float8=problem.kv_dtype.itemsize == 1,
        precision=precision_of(problem),
        batch_padded=max(2, 1 << (problem.batch - 1).bit_length()) if config.balanced else 1,
        min_tiles=config.min_tiles,
        sm_pieces=config.sm_pieces,
        merges=cut,
        merged_rows=_merged_rows(config, kept, problem) if cut else 0,
        shares=config.shares,
        by_word=problem.arch.startswith("sm_"),
        appends=new is not None,
        rotary_pairs=0 if new is None or new.rotary_cos is None else new.rotary_cos.shape[1],
        interleaved=new is not None and new.rotary_cos is not None and new.interleaved,
    )


def vector_of(tensors: Tensors) -> int:
    """16 bytes of elements where every row of q, k and v begins at a multiple of 16 bytes.

    The unit of q's strides is that of the cache's dtype too, so that there is one only.
    """
    unit = 16 // tensors.k.element_size()
    for x in (tensors.q, tensors.k, tensors.v):
        if x.data_ptr() % 16 or any(step % unit for step in strides_of(x, is_packed(x))):
            return 1
    return unit


def appends_itself(problem: Problem, tensors: Tensors, new: NewTokens) -> bool:
    """Whether `decode_direct`, where it walks, can append too: one 16-bit token a sequence.

    All else takes the append's own launch. Tokens that are stored get the same bits by both; one
    that has no place (page -1, a full table) is attended to here, and read from the cache there.

    Args:
        problem: the attention's.
        tensors: its tensors, q and lengths as they are before the append.
        new: what is appended.
    """
    k, v = new.k, new.v
    unit = 16 // k.element_size()
    given = (new.cache_seqlens, new.rotary_cos, new.rotary_sin, tensors.leftpad_k, tensors.sinks)
    return (
        suits_direct(problem)
        and k.shape[1] == 1
        and problem.seqlen_k > 0
        and problem.kv_dtype == problem.dtype == k.dtype == v.dtype
        and not problem.kv_scales
        and new.slot_mapping is None
        and not any(needs_copy(x) for x in (new.q, k, v, new.block_table))
        and all(step % unit == 0 for x in (k, v) for step in strides_of(x, False))
        and (k.data_ptr() | v.data_ptr()) % 16 == 0
        and all(x is None or x.is_contiguous() for x in given)
        # Keys and values in the same place would be read as what was written last.
        and new.k_cache.data_ptr() != new.v_cache.data_ptr()
        and vector_of(tensors) > 1
    )


#: The kernels' run-time numbers, of which Triton makes no variants.
NUMBERS = (
    "stride_qb stride_qs stride_qh stride_kb stride_ks stride_kh stride_vb stride_vs stride_vh "
    "stride_table num_sequences seqlen_q seqlen_k tokens_q num_heads splits left right num_sms"
).split()
#: Those of appended tokens, behind num_sms.
NEW_NUMBERS = "stride_new_kb stride_new_kh stride_new_vb stride_new_vh".split()


def new_numbers(spec: DecodeSpec, new: NewTokens | None) -> tuple[int | None, ...]:
    """`NEW_NUMBERS` of a call."""
    if new is None:
        return (None,) * len(NEW_NUMBERS)
    strides = (strides_of(x, False) for x in (new.k, new.v))
    return tuple(step // spec.vector for batch, _, head in strides for step in (batch, head))


def decode_numbers(spec: DecodeSpec, config: DecodeConfig, problem: Problem, tensors: Tensors):
    """The kernel's run-time numbers, from stride_qb to softcap."""
    inputs = (tensors.q, tensors.k, tensors.v)
    strides = [step // spec.vector for x in inputs for step in strides_of(x, is_packed(x))]
    table = tensors.block_table
    seqlen_k = problem.seqlen_k
    if table is not None:  # `decode_direct` reads a table's entries before it knows the lengths
        seqlen_k = min(seqlen_k, table.shape[1] * problem.page_size)
    return (
        *strides,
        0 if table is None else table.stride(0),
        problem.batch,
        problem.seqlen_q,
        seqlen_k,
        problem.tokens_q,
        problem.num_heads,
        config.splits,
        *edges_of(problem),
        *factors_of(problem, LOG2E),
    )
