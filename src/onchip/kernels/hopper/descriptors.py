"""TMA's descriptors of the Hopper forward's tensors.

Legend: B batch, S length, T packed tokens, H heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from onchip.kernels.hopper.config import WARPGROUP_ROWS
from onchip.kernels.hopper.gluon_names import TensorDescriptor
from onchip.problem import Tensors

_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
}


def descriptors(code, tensors: Tensors, out: Tensor) -> list[TensorDescriptor]:
    """q, k, v and out, read and written in tiles of one head's rows."""
    width_o = code.width_v // 2 if code.q_buffers == 1 else code.width_v
    return [
        describe(tensors.q, WARPGROUP_ROWS, code.width, code.heads),
        describe(tensors.k, code.box[0], code.box[1] or code.width),
        describe(tensors.v, code.box[0], code.box[1] or code.width_v),
        describe(out, WARPGROUP_ROWS, width_o, code.heads),
    ]


def describe(x: Tensor, rows: int, width: int, heads: int = 1) -> TensorDescriptor:
    """(B, H, S, D), B = 1 when packed, in tiles of so many rows of one head.

    With several heads side by side (B, S, H, D), in tiles of so many rows of all of them.
    """
    x = x.unsqueeze(0) if x.dim() == 3 else x
    if heads == 1:
        x = x.transpose(1, 2)
    # A dimension of size 1 may have any stride, which TMA would refuse.
    unit = 16 // x.element_size()
    row = -(-x.shape[-1] // unit) * unit
    strides = [row if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
    block = [1, 1, rows, width] if heads == 1 else [1, rows // heads, heads, width]
    dtype = _DTYPES[x.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(x, list(x.shape), [*strides[:3], 1], block, layout)
