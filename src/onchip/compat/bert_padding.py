"""`flash_attn.bert_padding`: between padded batches and packed tokens, differentiably.

Legend: B batch, S padded length, T kept tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip import validate
from onchip.validate import reject

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of a tensor; differentiable.

    Args:
        input: (B * S, ...).
        indices: (T,) int64.

    Returns:
        (T, ...).
    """
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros with some rows set; differentiable. Of equal indices one wins, whichever.

    Args:
        values: (T, ...).
        indices: (T,) int64.
        first_axis_dim: rows of the result.

    Returns:
        (first_axis_dim, ...).
    """
    zeros = values.new_zeros(first_axis_dim, *values.shape[1:])
    return zeros.index_put((indices.long(),), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the tokens that a mask keeps; differentiable. Waits for the device.

    Args:
        hidden_states: (B, S, ...).
        attention_mask: (B, S) bool or int, 1 where there is a token.
        unused_mask: (B, S) like it, 1 where there is room for a token that does not count; it is
            packed too, and disjoint from attention_mask.

    Returns:
        As FlashAttention since 2.7: the tokens (T, ...), their indices (T,) int64 in the
        flattened batch, cu_seqlens (B + 1,) int32, the longest length, and (B,) int32 tokens
        that count in each sequence.

    Raises:
        ValueError: if the shapes of the tensor and the masks differ.
    """
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is None:
            continue
        validate.tensor(name, mask)
        if mask.dim() != 2 or mask.shape != hidden_states.shape[:2]:
            allowed = f"hidden_states' (B, S) = {tuple(hidden_states.shape[:2])}"
            reject(name, f"shape {tuple(mask.shape)}", allowed, "One entry for each token.")
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    offsets = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, offsets, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Undoes `unpad_input`: padding becomes 0; differentiable.

    Args:
        hidden_states: (T, ...).
        indices: (T,) as `unpad_input` gives.
        batch: B.
        seqlen: S.

    Returns:
        (B, S, ...).
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(
        0, (batch, seqlen)
    )
