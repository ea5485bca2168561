"""What the portable kernels are told beyond the usual: dropout, user functions, block lists.

A call without any of them passes None for all of it, and its kernels compile as if there was
nothing of the kind.

Legend: B batch, S_q / S_k lengths, H query heads.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Extras(NamedTuple):
    """A kernel's argument; what a call does not use is an empty tuple.

    None would not do: Triton passes no tuple on that holds it.
    """

    dropout_rng: object  # (2,) int64: seed, offset
    threshold: object  # the least 16 random bits that stay, as a float: those aren't specialised
    score_aux: object  # tuple of the user's tensors
    mask_aux: object
    aux_sums: object  # tuple of float32 tensors, shaped as score_aux
    block_counts: object  # (B or 1, H or 1, blocks) int32
    block_indices: object  # (B or 1, H or 1, blocks, most) int32
    list_shape: object  # these four sizes, as floats


class Context(NamedTuple):
    """Where a program is, for what depends on it."""

    batch: object
    head: object
    stream: object  # b * H + h
    seed: object
    offset: object
    seqlen_q: object
    seqlen_k: object
    extras: Extras


@triton.jit
def context_of(
    batch, head, num_heads, seqlen_q, seqlen_k, extras: Extras, HAS_DROPOUT: tl.constexpr
):  # fmt: skip
    """The Context of one head of one sequence; lengths are the sequence's own."""
    seed, offset = 0, 0
    if HAS_DROPOUT:
        seed = tl.load(extras.dropout_rng)
        offset = tl.load(extras.dropout_rng + 1).to(tl.int32)
    stream = batch * num_heads + head
    return Context(batch, head, stream, seed, offset, seqlen_q, seqlen_k, extras)
