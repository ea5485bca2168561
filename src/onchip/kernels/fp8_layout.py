"""How quantised queries, keys and values lie in memory: blocks, their scales, V's key order.

Rows are cut into blocks, `BLOCK_Q` queries or `BLOCK_K` keys, each with a scale of its own for
each head. Of packed sequences every sequence begins a new block: sequence b's first block is
``cu_seqlens[b] // block + b``. That needs no sum over the lengths, which only the device knows,
and leaves room enough: floor(x + y) + 1 >= floor(x) + ceil(y). Some blocks stay empty.

V is stored as (..., H_kv, D_v, columns), blocks of BLOCK_K columns. wgmma takes an 8-bit second
operand only with its summed dimension contiguous, and hands a thread the accumulator's columns
{2t, 2t + 1, 8 + 2t, 8 + 2t + 1} of every 16, where it wants {4t, ..., 4t + 3} of its first
operand. So within 16 keys, key 8a + 2t + c lies in column 4t + 2a + c: P then goes from the
first product to the second without leaving its registers.

Legend: B batch, S sequence length, T packed tokens, H heads, D head dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
#: Queries of a block: what one warpgroup multiplies.
BLOCK_Q = 64
#: Keys of a block; tiles of kernels divide it.
BLOCK_K = 128
#: Largest finite float8_e4m3fn.
LARGEST = 448.0
#: P = 2^(logit - base) is rounded. A row's first base puts its largest logit so far at P = 2^4, so
#: that it may grow; a later one puts it at 2^8, since then few are expected to rise further.
FIRST_ROOM, ROOM = 4.0, 8.0
#: A base stays while no logit is this far above it: P would be rounded to e4m3's largest, 448.
LIMIT = math.log2(432.0)
#: The base of a row that has seen no key.
NEVER = -1.0e30
#: A weight is on a straight line between two powers of two, 2^x as (1 + f) 2^n: too large by up to
#: 6 %. All are lowered by 2^-LOWERED, which makes their mean, and so the LSE, right.
LOWERED = 0.0577
#: And x is rounded to this part of 1.
LINE_STEPS = 32
#: Blocks whose largest entry is smaller lose it; keeps ratios of scales finite.
SMALLEST = 2.0**-60
#: e4m3's NaN, as a byte.
NAN_CODE = 0x7F


@dataclass(frozen=True)
class Quantiser:
    """What a quantisation does, beside its data.

    Args:
        scale: "block", "head" (one scale for a sequence's head) or "tensor".
        hadamard: whether q and k are transformed.
        rotary_interleaved: which features make a pair, where cos and sin are given.
    """

    scale: str = "block"
    hadamard: bool = True
    rotary_interleaved: bool = False


@dataclass
class Source:
    """The tensors of one quantisation.

    Args:
        q: (B, S_q, H, D) or (T_q, H, D).
        k: (B, S_k, H_kv, D) or (T_k, H_kv, D).
        v: as k, with D_v.
        cu_seqlens_q: (B + 1,) int32, packed only.
        cu_seqlens_k: (B + 1,) int32, packed only.
        seqused_k: (B,) int32; later keys are left out, as if they were 0.
        rotary_cos: (S_max, rotary_dim / 2).
        rotary_sin: as rotary_cos.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None


def num_blocks(tokens: int, batch: int | None, block: int) -> int:
    """Blocks of a dense sequence (`batch` None), or of packed ones."""
    return -(-tokens // block) if batch is None else tokens // block + batch


def first_blocks(cu_seqlens: Tensor, block: int) -> Tensor:
    """(B,) where each packed sequence's blocks begin."""
    starts = cu_seqlens[:-1]
    steps = torch.arange(starts.shape[0], dtype=starts.dtype, device=starts.device)
    return starts // block + steps


def expanded(scales: Tensor, blocks: int) -> Tensor:
    """Scales (B, H) that all of a sequence's blocks share, as (B, H, N)."""
    return scales[..., None].expand(-1, -1, blocks)


@lru_cache(maxsize=8)
def key_of_column(device: torch.device) -> Tensor:
    """(16,) which of 16 keys lies in each column of V."""
    keys = torch.arange(16).view(2, 4, 2)  # a, t, c
    return keys.transpose(0, 1).reshape(16).to(device)


def transformed_block(dim: int) -> int:
    """The largest power of two that divides a head dimension: what one Hadamard matrix spans."""
    return dim & -dim


@lru_cache(maxsize=64)
def transform(dim: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(width, width): random signs, then Hadamard matrices of size p over blocks of p, over p.

    Orthogonal but for the factor ``p ** -0.5``, which the scales give back: so every entry is a
    power of two, products with it are exact, and sums never overflow. Rows and columns past
    `dim` are 0.

    Args:
        dim: D.
        width: D or what a kernel pads it to.
        dtype: of the result.
        device: of the result.
    """
    p = transformed_block(dim)
    # The signs are part of the format: the same for every call, or caches of keys would break.
    signs = torch.randint(2, (dim,), generator=torch.Generator().manual_seed(dim)) * 2 - 1
    matrix = torch.zeros(width, width)
    matrix[:dim, :dim] = torch.block_diag(*[_hadamard(p)] * (dim // p)) * signs[:, None] / p
    return matrix.to(device, dtype)


def _hadamard(size: int) -> Tensor:
    """(size, size) of 1 and -1 (Sylvester's construction)."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def transform_gain(dim: int, hadamard: bool) -> float:
    """What a transformed entry must be multiplied by for the transform to be orthogonal."""
    return transformed_block(dim) ** 0.5 if hadamard else 1.0
