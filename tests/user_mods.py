"""User functions for tests and for docs/mods.md, each with what it means in plain torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def same_document(b, h, i, j, documents, length):
    """Documents packed into one row: a query sees its own document only."""
    row = documents + b * tl.load(length)
    return tl.load(row + i) == tl.load(row + j)


@triton.jit
def prefix_or_causal(b, h, i, j, prefix):
    """Prefix-LM: the prefix is seen by all, what follows causally."""
    return (j < tl.load(prefix + b)) | (j <= i)


BUCKETS = tl.constexpr(8)


@triton.jit
def bucket(i, j):
    """Distance from -4 to 3, clamped."""
    return tl.minimum(tl.maximum(i - j, -4), 3) + 4


@triton.jit
def relative_bias(score, b, h, i, j, bias):
    """T5: a learned number for each head and bucket of distance; bias is (H, 8)."""
    return score + tl.load(bias + h * BUCKETS + bucket(i, j))


@triton.jit
def relative_bias_grad(dscore, score, b, h, i, j, bias, dbias):
    tl.atomic_add(dbias + h * BUCKETS + bucket(i, j), dscore)


@triton.jit
def bent(score, b, h, i, j, factor):
    """Not linear in the score: needs a derivative."""
    return score + tl.load(factor + h) * score * score


@triton.jit
def bent_grad(dscore, score, b, h, i, j, factor):
    return dscore * (1 + 2 * tl.load(factor + h) * score)


def buckets(seqlen_q: int, seqlen_k: int, device="cpu") -> torch.Tensor:
    """(S_q, S_k) of `bucket`."""
    i, j = (torch.arange(n, device=device) for n in (seqlen_q, seqlen_k))
    return (i[:, None] - j).clamp(-4, 3) + 4


def with_relative_bias(bias: torch.Tensor):
    """`relative_bias` on whole matrices."""
    return lambda s: s + bias.to(s.dtype)[:, buckets(*s.shape[-2:], s.device)]


def with_bend(factor: torch.Tensor):
    """`bent` on whole matrices."""
    return lambda s: s + factor.to(s.dtype)[:, None, None] * s * s
