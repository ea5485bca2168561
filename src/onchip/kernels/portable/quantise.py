"""Quantises q, k and v to float8 in one launch that reads them once.

A program takes one block of one head: 64 queries, or 128 keys with their values. Rows are
rotated (optionally), multiplied by the transform of `onchip.kernels.fp8_layout` on the matrix
units, and divided by the block's scale. What is not finite is treated as in
`onchip.kernels.fp8_quantise`, which says the same in torch.

A scale for a head or tensor needs its largest entry first: a launch before finds those of
blocks. Values that are float8 already are only laid out (`RAW`).

Memory: q, out (B, S_q, H, D) or (T_q, H, D); k (B, S_k, H_kv, D) or (T_k, H_kv, D); v as k with
D_v, out (B, H_kv, D_v, columns) or (H_kv, D_v, columns). Inputs may have any strides with the
last one 1.

Legend: B batch, S sequence length, T packed tokens, H heads, H_kv key and value heads, D / D_v
head dimensions, N blocks.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.kernels import fp8_layout
from onchip.kernels.fp8_layout import (
    FLOAT8,
    Quantiser,
    Source,
    expanded,
    num_blocks,
    transform,
    transform_gain,
)
from onchip.kernels.fp8_quantise import Blocks, shared_scales
from onchip.kernels.portable.arguments import are_aligned, strides_of
from onchip.kernels.portable.quantise_tiles import (
    Cut,
    Side,
    Spec,
    quantise_keys,
    quantise_queries,
)
from onchip.problem import needs_copy

_NUMBERS = (
    "num_queries batch seqlen_q seqlen_k blocks_q blocks_k num_heads num_kv_heads stride_qb "
    "stride_qs stride_qh stride_kb stride_ks stride_kh stride_vb stride_vs stride_vh"
).split()


@triton.jit(do_not_specialize=_NUMBERS)
def quantise_portable(
    q, k, v, q_codes, k_codes, v_codes, q_scales, k_scales, v_scales, cu_seqlens_q, cu_seqlens_k,
    seqused_k, cos, sin, matrix, gain: tl.float32, num_queries, batch, seqlen_q, seqlen_k,
    blocks_q, blocks_k, num_heads, num_kv_heads,
    stride_qb: tl.int64, stride_qs: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_ks: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vs: tl.int64, stride_vh: tl.int64, SPEC: tl.constexpr,
):  # fmt: skip
    """One program: one block of one head; the first `num_queries` have queries."""
    queries = Cut(cu_seqlens_q, None, seqlen_q, blocks_q, batch, num_heads)
    keys = Cut(cu_seqlens_k, seqused_k, seqlen_k, blocks_k, batch, num_kv_heads)
    program = tl.program_id(0)
    if program < num_queries:
        side = Side(q, stride_qb, stride_qs, stride_qh, q_codes, q_scales, gain)
        quantise_queries(program // num_heads, program % num_heads, side, queries, keys, cos, sin,
                          matrix, SPEC)  # fmt: skip
    else:
        program -= num_queries
        k_side = Side(k, stride_kb, stride_ks, stride_kh, k_codes, k_scales, gain)
        v_side = Side(v, stride_vb, stride_vs, stride_vh, v_codes, v_scales, 1.0)
        quantise_keys(program // num_kv_heads, program % num_kv_heads, k_side, v_side, keys, cos,
                       sin, matrix, SPEC)  # fmt: skip


class _Sizes(NamedTuple):
    """Host-side numbers of one call."""

    batch: int
    blocks_q: int  # of a dense sequence, or of all packed ones
    blocks_k: int
    all_q: int  # of all sequences
    all_k: int


def _sizes(s: Source) -> _Sizes:
    packed = s.cu_seqlens_q is not None
    batch = s.cu_seqlens_q.shape[0] - 1 if packed else s.q.shape[0]
    count = batch if packed else None
    blocks = [
        num_blocks(x.shape[-3], count, size)
        for x, size in ((s.q, fp8_layout.BLOCK_Q), (s.k, fp8_layout.BLOCK_K))
    ]
    every = blocks if packed else [n * batch for n in blocks]
    return _Sizes(batch, *blocks, *every)


def quantise(source: Source, how: Quantiser) -> tuple[Tensor, ...]:
    """`onchip.kernels.fp8_quantise.quantise`, in one launch (two with shared scales)."""
    s = _readable(source)
    n = _sizes(s)
    packed = s.cu_seqlens_q is not None
    heads = (s.q.shape[-2], s.k.shape[-2], s.k.shape[-2])
    blocks = (n.blocks_q, n.blocks_k, n.blocks_k)
    lead = () if packed else (n.batch,)
    own = [
        s.q.new_empty(*lead, h, b, dtype=torch.float32) for h, b in zip(heads, blocks, strict=True)
    ]
    codes = (
        torch.empty(s.q.shape, dtype=FLOAT8, device=s.q.device),
        torch.empty(s.k.shape, dtype=FLOAT8, device=s.q.device),
        _new_columns(s, n),
    )
    gain = transform_gain(s.q.shape[-1], how.hadamard)
    if how.scale == "block":
        _run(s, how, n, codes, own, gain)
        scales = [x.expand(n.batch, -1, -1) if packed else x for x in own]
        return *codes, *scales
    _run(s, how, n, codes, own, 1.0, only_largest=True)
    shared = [_shared(s, how, x, part) for x, part in zip(own, "qkv", strict=True)]
    _run(s, how, n, codes, shared, 1.0, given=True)
    gains = (gain, gain, 1.0)
    parts = zip(shared, gains, blocks, strict=True)
    return *codes, *[expanded(x * g, b) for x, g, b in parts]


def relaid(source: Source) -> tuple[Tensor, Tensor]:
    """`onchip.kernels.fp8_quantise.relaid`, in one launch."""
    s = _readable(source)
    n = _sizes(s)
    k, v = torch.empty(s.k.shape, dtype=FLOAT8, device=s.k.device), _new_columns(s, n)
    nothing = s.k.new_empty(0, dtype=torch.float32)
    _run(s, Quantiser(hadamard=False), n, (s.q, k, v), [nothing] * 3, 1.0, raw=True)
    return k, v


def _readable(s: Source) -> Source:
    """With copies of what can't be read in place."""
    parts = {name: getattr(s, name) for name in ("q", "k", "v")}
    copies = {name: x.contiguous() for name, x in parts.items() if needs_copy(x)}
    tables = {
        name: x.contiguous()
        for name in ("rotary_cos", "rotary_sin", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")
        if (x := getattr(s, name)) is not None
    }
    return replace(s, **copies, **tables)


def _new_columns(s: Source, n: _Sizes) -> Tensor:
    lead = () if s.cu_seqlens_q is not None else (n.batch,)
    shape = (*lead, *s.v.shape[-2:], n.blocks_k * fp8_layout.BLOCK_K)
    return torch.empty(shape, dtype=FLOAT8, device=s.v.device)


def _shared(s: Source, how: Quantiser, largest: Tensor, part: str) -> Tensor:
    """Scales (B, H) from the blocks' largest entries, for one of q, k and v."""
    packed = s.cu_seqlens_q is not None
    largest = largest.t() if packed else largest.transpose(1, 2).flatten(0, 1)  # (N, H)
    if part == "q":
        blocks = Blocks(s.q, s.cu_seqlens_q, None, fp8_layout.BLOCK_Q)
    else:
        blocks = Blocks(s.k, s.cu_seqlens_k, None, fp8_layout.BLOCK_K)
    return shared_scales(largest, blocks, how.scale).contiguous()


def _run(
    s: Source, how: Quantiser, n: _Sizes, codes: tuple, scales: list, gain: float,
    only_largest: bool = False, given: bool = False, raw: bool = False,
) -> None:  # fmt: skip
    """One launch. Mutates: codes, and scales unless given."""
    programs_q = 0 if raw else n.all_q * s.q.shape[-2]
    programs = programs_q + n.all_k * s.k.shape[-2]
    if programs == 0:
        return
    dim, dim_v = s.q.shape[-1], s.v.shape[-1]
    spec = Spec(
        dim=dim,
        dim_v=dim_v,
        width=max(64, triton.next_power_of_2(dim)),  # a quarter is what `tl.dot` takes
        width_v=max(16, triton.next_power_of_2(dim_v)),
        half=0 if s.rotary_cos is None else s.rotary_cos.shape[1],
        positions=0 if s.rotary_cos is None else s.rotary_cos.shape[0],
        interleaved=how.rotary_interleaved,
        hadamard=how.hadamard,
        only_largest=only_largest,
        given=given,
        raw=raw,
        precision="ieee",
        native=_converts(s.q.device),
        vector=16 // s.q.element_size() if are_aligned(s.q, s.k, s.v) else 1,
    )
    matrix = _matrix(dim, spec.width, s.q.dtype, s.q.device) if how.hadamard else None
    packed = s.cu_seqlens_q is not None
    strides = [n // spec.vector for x in (s.q, s.k, s.v) for n in strides_of(x, packed)]
    # Bytes: not every GPU's Triton knows float8.
    inputs = [x.view(torch.uint8) if raw else x for x in (s.q, s.k, s.v)]
    codes = [x.view(torch.uint8) for x in codes]
    with _on(s.q.device):
        quantise_portable[(programs,)](
            *inputs, *codes, *scales, s.cu_seqlens_q, s.cu_seqlens_k, s.seqused_k,
            s.rotary_cos, s.rotary_sin, matrix, gain, programs_q, n.batch, s.q.shape[-3],
            s.k.shape[-3], n.blocks_q, n.blocks_k, s.q.shape[-2], s.k.shape[-2], *strides, spec,
            num_warps=_num_warps(spec),
        )  # fmt: skip


@lru_cache(maxsize=64)
def _matrix(dim: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(width, width): the transform, columns in the order of `quantise_tiles._transformed`."""
    columns = transform(dim, width, dtype, device).unflatten(1, (-1, 4, 8, 2))  # t, i, e
    return columns.transpose(2, 3).flatten(1).contiguous()


def _num_warps(spec: Spec) -> int:
    """H200, 16k tokens of 2048 numbers: D = 128 142 us with 4, 199 with 8; 256 387 and 201."""
    few = 4 if spec.half == 0 else 8  # what rotary needs does not fit into 4
    return {64: 4, 128: few, 256: 16}.get(max(64, spec.width, spec.width_v), 16)


def _converts(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _on(device: torch.device):
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
