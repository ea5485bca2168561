"""Maths used unchanged by two or more kernels and by the layers above them.

Legend: B batch, S tokens, H heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool = False
) -> Tensor:
    """Rotates pairs of features by the angle of each token's position.

    (a, b) -> (a cos - b sin, b cos + a sin), where a and b are the halves of the first
    rotary_dim features, or the even and odd ones when interleaved; features past rotary_dim
    stay. Computed in float32 (Su et al. 2021, RoFormer, eq. 34).

    Args:
        x: (..., S, H, D).
        cos: (S_max, rotary_dim / 2).
        sin: (S_max, rotary_dim / 2).
        positions: (..., S) integers.
        interleaved: which features make a pair.

    Returns:
        A new tensor as x.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos = cos[positions].to(dtype).unsqueeze(-2)  # (..., S, 1, rotary_dim / 2)
    sin = sin[positions].to(dtype).unsqueeze(-2)
    half = cos.shape[-1]
    turned = x[..., : 2 * half].to(dtype)
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((rotated.to(x.dtype), x[..., 2 * half :]), dim=-1)
