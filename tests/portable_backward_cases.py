"""What the portable backward receives for a `Case` and the check of what it returns.

Legend: B batch, S_q / S_k lengths, T packed tokens, H query heads, H_kv key and value heads,
D / D_v head dimensions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from onchip import reference
from onchip.problem import Saved
from tests.portable_cases import Call
from tests.tolerance import assert_close_to_oracle


class Own(NamedTuple):
    """One sequence's inputs with B = 1, and the keywords of the reference."""

    q: Tensor  # (1, S_q, H, D)
    k: Tensor  # (1, S_k, H_kv, D)
    v: Tensor  # (1, S_k, H_kv, D_v)
    dout: Tensor  # (1, S_q, H, D_v)
    dlse: Tensor | None  # (1, H, S_q)
    features: dict


def _own(call: Call, b: int, dout: Tensor, dlse: Tensor | None) -> Own:
    case = call.case
    start = sum(case.lengths_q[:b])
    rows = slice(start, start + case.lengths_q[b])
    slopes = call.tensors.alibi_slopes
    features = {
        "causal": case.causal,
        "window": case.window,
        "softcap": case.softcap,
        "scale": case.scale,
        "alibi_slopes": slopes if slopes is None or case.alibi == 1 else slopes[b],
        "sinks": call.tensors.sinks,
        "extras": None if call.extras is None else call.extras[b],
    }
    inputs = (x[None].to(dout.device) for x in call.sequences[b])
    if case.packed:
        own_dlse = None if dlse is None else dlse[None, :, rows]
        return Own(*inputs, dout[None, rows], own_dlse, features)
    return Own(*inputs, dout[b : b + 1], None if dlse is None else dlse[b : b + 1], features)


def saved_of(call: Call, with_dlse: bool = True, strided: bool = False, seed: int = 1) -> Saved:
    """Random gradients, and the oracle's output and LSE as a forward would have left them."""
    case, device = call.case, call.tensors.q.device
    g = torch.Generator().manual_seed(seed)
    q = call.tensors.q
    shape = (*q.shape[:-1], case.dim_v)
    if strided:
        wide = torch.full((*shape[:-2], shape[-2] + 2, shape[-1] + 3), math.nan, dtype=q.dtype)
        wide = wide.to(device)
        dout = wide[..., 1:-1, 1 : 1 + case.dim_v]
        dout.copy_(torch.randn(shape, generator=g))
    else:
        dout = torch.randn(shape, generator=g).to(q.dtype).to(device)
    rows = shape[:-2]
    lse_shape = (*rows[:-1], case.heads, rows[-1])
    dlse = torch.randn(lse_shape, generator=g).to(device) if with_dlse else None
    out = torch.full(shape, math.nan, dtype=q.dtype, device=device)
    lse = torch.full(lse_shape, math.nan, device=device)
    start = 0
    for b, length in enumerate(case.lengths_q):
        own = _own(call, b, dout, dlse)
        own_out, own_lse = reference.attention(own.q, own.k, own.v, **own.features)
        if case.packed:
            out[start : start + length] = own_out[0]
            lse[:, start : start + length] = own_lse[0]
        else:
            out[b], lse[b] = own_out[0], own_lse[0]
        start += length
    return Saved(dout, dlse, out, lse)


def check_gradients(call: Call, saved: Saved, gradients) -> None:
    """Holds every sequence's gradients against the oracle's, by the contract's rule."""
    case, tensors = call.case, call.tensors
    dq, dk, dv, dsinks = gradients
    for name, x, given in zip(("dq", "dk", "dv"), gradients, (tensors.q, tensors.k, tensors.v)):  # noqa: B905
        assert x.shape == given.shape and x.dtype == given.dtype and x.is_contiguous(), name
    total_sinks, eager_sinks = 0, 0
    # P = exp(S - LSE) inherits the rounding of S and of the LSE that was left as a float32.
    finite = saved.lse[saved.lse.isfinite()].abs()
    ulps = 4.0
    if case.dtype == torch.float32 and finite.numel():
        ulps += 2 * float(finite.max())
    spans_k = _key_spans(call)
    start = 0
    for b, length in enumerate(case.lengths_q):
        own = _own(call, b, saved.dout, saved.dlse)
        oracle = reference.attention_backward(*own[:5], **own.features)
        eager = _eager(own)
        rows, keys = slice(start, start + length), spans_k[b]
        start += length
        used = slice(0, case.lengths_k[b])
        mine = (dq[rows], dk[keys], dv[keys]) if case.packed else (dq[b], dk[b], dv[b])
        pairs = zip(("dq", "dk", "dv"), mine, oracle, eager)  # noqa: B905 (sinks last)
        for name, x, want, plain in pairs:
            if name != "dq":
                assert not x[used.stop :].any(), f"{name} of unused keys of sequence {b}"
                x = x[used]
            if x.numel():
                assert_close_to_oracle(x[None], want, plain, f"{name} of sequence {b}", ulps)
        if dsinks is not None:
            total_sinks, eager_sinks = total_sinks + oracle.dsinks, eager_sinks + eager[3]
    assert (dsinks is None) == (tensors.sinks is None)
    if dsinks is not None:
        # D is made of the stored output, so its rounding is that of q's dtype.
        ulps = 4 * torch.finfo(case.dtype).eps / torch.finfo(dsinks.dtype).eps
        assert_close_to_oracle(dsinks, total_sinks, eager_sinks, "dsinks", ulps)


def _key_spans(call: Call) -> list[slice]:
    if not call.case.packed:
        return [slice(None)] * len(call.case.lengths_k)
    offsets = call.tensors.cu_seqlens_k.tolist()
    return [slice(a, b) for a, b in zip(offsets, offsets[1:], strict=False)]


def _eager(own: Own) -> list[Tensor]:
    """Gradients by PyTorch's autograd in the inputs' dtype."""
    inputs = [x.detach().clone().requires_grad_() for x in own[:3]]
    features = own.features
    if features["sinks"] is not None:
        features = {**features, "sinks": features["sinks"].clone().requires_grad_()}
        inputs.append(features["sinks"])
    out, lse = reference.eager(*inputs[:3], **features)
    lse = lse.where(lse > -torch.inf, 0.0)
    total = (out * own.dout).sum()
    if own.dlse is not None:
        total = total + (lse * own.dlse.to(lse.dtype)).sum()
    found = torch.autograd.grad(total, inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]
