"""Calls of the Hopper float8 forward, the same in the model's process and in the test's."""

from __future__ import annotations

import torch

import onchip
from onchip.problem import Mask, Op, Params, Problem, Tensors
from tests import fp8_cases


def posed(
    lengths, dim=64, heads=2, kv_heads=1, causal=False, window=(-1, -1), packed=False, seed=0,
    softcap=0.0, slopes=(),
) -> tuple[Problem, Tensors]:  # fmt: skip
    """A problem with its quantised tensors; `lengths` are (S_q, S_k) of each sequence.

    Args:
        lengths: one pair for a dense call, any number where packed.
        dim: D.
        heads: H.
        kv_heads: H_kv.
        causal: as of `onchip.attention`.
        window: as of `onchip.attention`.
        packed: whether sequences follow one another in memory.
        seed: of the inputs.
        softcap: as of `onchip.attention`.
        slopes: of ALiBi, one for each head, or none.
    """
    tokens = [sum(n) for n in zip(*lengths, strict=True)]
    q, k, v = (
        fp8_cases.with_outliers(n, h, dim, seed=seed + i, dtype=torch.bfloat16)
        for i, (n, h) in enumerate(
            ((tokens[0], heads), (tokens[1], kv_heads), (tokens[1], kv_heads))
        )
    )
    offsets = [None, None]
    if packed:
        offsets = [torch.tensor([0, *n]).cumsum(0).int() for n in zip(*lengths, strict=True)]
    else:
        q, k, v = q[None], k[None], v[None]
    x = onchip.quantize_qkv(q, k, v, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1])
    tensors = Tensors(x.q, x.k, x.v, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1],
                      scales=(x.q_scale, x.k_scale, x.v_scale))  # fmt: skip
    tensors.alibi_slopes = torch.tensor(slopes) if slopes else None
    mask = Mask.of(causal, tuple(window))
    longest = [max(n) for n in zip(*lengths, strict=True)]
    params = Params(*longest, mask.left, mask.right, dim**-0.5, softcap, False, 0, "",
                    out_dtype="bfloat16")  # fmt: skip
    return Problem.of(Op.FORWARD, tensors, params), tensors
