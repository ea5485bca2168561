"""FlashAttention-3's float8 inputs, as onchip takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onchip import fp8
from onchip.compat.spelling import refuse_given, unsupported

_ONLY = "Only float8_e4m3fn q, k and v have a scale: leave it out."


def inputs(
    q: Any, k: Any, v: Any, descales: dict[str, Tensor | None], **lengths: Any
) -> tuple[Any, Any, Any]:
    """q, k and v for `onchip.attention`: one `FP8QKV` in place of float8 tensors.

    Args:
        q, k, v: as given.
        descales: q_descale, k_descale, v_descale, each (B, H_kv) float32.
        **lengths: cu_seqlens_q, cu_seqlens_k, seqused_k of packed sequences.

    Raises:
        NotImplementedError: for another float8, and for descales of 16-bit tensors.
    """
    if not isinstance(q, Tensor) or not q.is_floating_point() or q.dtype.itemsize > 1:
        refuse_given(_ONLY, **descales)
        return q, k, v
    if q.dtype != torch.float8_e4m3fn:
        fix = "Use q.to(torch.float8_e4m3fn), k and v alike."
        unsupported("q", f"dtype {q.dtype}", "float8_e4m3fn, or 16-bit and more", fix)
    return fp8.from_fp8(q, k, v, **descales, **lengths), None, None
