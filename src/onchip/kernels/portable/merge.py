"""Merges attention over disjoint sets of keys, in one launch for all parts.

lse = log(sum_s exp(lse_s)), out = sum_s exp(lse_s - lse) out_s, in float32; see
`onchip.merge_states`. A program takes some rows, a row being one head of one query.

Memory: outs (B, S_q, H, D_v) or (T_q, H, D_v) and lses (B, H, S_q) or (H, T_q), contiguous.

Legend: B batch, S_q queries, T packed tokens, H query heads, D_v head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Parts that one launch takes: its code has a copy of the loop's body for each.
MAX_PARTS = 16
_ENTRIES = 1024  # of a program: 8 for each thread of 4 warps


@triton.jit(do_not_specialize=["num_rows", "length"])
def merge_portable(
    outs, lses, out, lse, num_rows: tl.int64, length: tl.int64, HEADS: tl.constexpr,
    DIM_V: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    token, head = row // HEADS, row % HEADS
    place = (token // length * HEADS + head) * length + token % length
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for i in tl.static_range(len(lses)):
        part = tl.load(lses[i] + place, mask=inside, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, part)
    top = tl.where(tl.abs(top) < float("inf"), top, 0.0)
    column = tl.arange(0, WIDTH_V)[None, :]
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH_V], tl.float32)
    for i in tl.static_range(len(outs)):
        part = tl.load(lses[i] + place, mask=inside, other=float("-inf")).to(tl.float32)
        mass = tl.exp(part - top)
        total += mass
        # A part without mass counts for nothing, whatever its output holds.
        counts = (inside & (mass != 0.0))[:, None] & (column < DIM_V)
        values = tl.load(outs[i] + (row * DIM_V)[:, None] + column, mask=counts, other=0.0)
        acc += values.to(tl.float32) * mass[:, None]
    inverse = tl.where(total == 0.0, 0.0, 1.0 / total)
    seen = inside[:, None] & (column < DIM_V)
    result = (acc * inverse[:, None]).to(out.dtype.element_ty)
    tl.store(out + (row * DIM_V)[:, None] + column, result, mask=seen)
    result = tl.where(total == 0.0, float("-inf"), tl.log(total) + top)
    tl.store(lse + place, result.to(lse.dtype.element_ty), mask=inside)


def launch(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merges up to MAX_PARTS parts, as `onchip.merge_states`.

    Returns:
        out as one of outs; lse as one of lses; both new.
    """
    assert 0 < len(outs) <= MAX_PARTS
    outs = tuple(x.contiguous() for x in outs)
    lses = tuple(x.contiguous() for x in lses)
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    heads, dim_v = out.shape[-2:]
    width = max(1, triton.next_power_of_2(dim_v))  # without features there are LSEs to merge
    rows = max(1, _ENTRIES // width)
    num_rows = lse.numel()
    if num_rows:
        grid = (triton.cdiv(num_rows, rows),)
        with _on(out.device):
            merge_portable[grid](
                outs, lses, out, lse, num_rows, lse.shape[-1], heads, dim_v, width, rows
            )
    return out, lse


def _on(device: torch.device):
    """Makes a device current: Triton launches there. -1 changes nothing."""
    return torch.cuda.device(device if device.type == "cuda" else -1)
