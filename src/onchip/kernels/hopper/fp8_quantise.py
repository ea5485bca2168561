"""Quantises dense q, k and v to float8 on Hopper in one launch that reads them once, by TMA.

Method: `fp8_quantise_tiles.py`. CTAs walk over tiles of 128 rows of one head, first q's, then V's
and K's by turns; loads run ahead through a ring of tiles in shared memory. What is not finite is
treated as in `onchip.kernels.fp8_quantise`: of V's tiles, which hold no NaN once they are stored,
the rows that had one are known when K's tile comes.

Memory: q, out (B, S_q, H, D); k (B, S_k, H_kv, D); v as k, out (B, H_kv, D, columns). Shared
memory in bytes: stages x 128 x D x 2, D x 64 x 2, 8 KiB.

It does not do: packed sequences, rotary, scales of heads, no transform, other D than 64, 128 and
256 (`onchip.kernels.portable.quantise`).

Legend: B batch, S sequence length, H heads, H_kv key and value heads, D head dimension, C code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from triton.experimental import gluon

from onchip.bounded import Bounded
from onchip.kernels.fp8_layout import (
    BLOCK_K,
    BLOCK_Q,
    FLOAT8,
    Quantiser,
    Source,
    key_of_column,
    num_blocks,
    transform,
    transform_gain,
)
from onchip.kernels.hopper.arguments import num_sms
from onchip.kernels.hopper.descriptors import describe
from onchip.kernels.hopper.fp8_quantise_tiles import (
    INFINITE,
    ROWS,
    Ring,
    Sizes,
    To,
    load,
    loaded,
    place_of,
    refill,
    row_tops,
    scale_of,
    sound,
    store,
    store_rows,
    transformed,
    transposed,
)
from onchip.kernels.hopper.gluon_names import fence_async_shared, gl, new_barriers, wait_for_all
from onchip.kernels.launcher import Described, Launch
from onchip.problem import is_unaligned, needs_copy

_NUMBERS = "seqlen_q seqlen_k blocks_q blocks_k heads kv_heads num_q num_k".split()


@dataclass(frozen=True)
class QuantiserConfig:
    """How the quantiser cuts its work.

    Args:
        dim: D.
        stages: tiles in shared memory.
        warps: of a CTA.
        ctas: of a multiprocessor.
        registers: of a thread, at most.
    """

    dim: int
    stages: int
    warps: int
    ctas: int
    registers: int
    may_leak: ClassVar[bool] = False


# H200, 2026-11-30, 16k tokens of 2048 numbers, us (a copy of as many bytes 74): D = 64 89, with 3
# stages and 4 CTAs 94; 128 82, with 2 stages and 2 CTAs 86, of 4 warps 88; 256 84.
CONFIGS = {
    64: QuantiserConfig(64, 4, 4, 3, 160),
    128: QuantiserConfig(128, 4, 8, 1, 200),
    256: QuantiserConfig(256, 2, 8, 1, 255),
}


@gluon.jit
def _shared_factors(source, dtype: gl.constexpr, C: gl.constexpr):
    """The transform's blocks and V's permutation, (D / 64 + 1, 64, 64)."""
    NUMBER: gl.constexpr = C.dim // 64 + 1
    FLAT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [C.warps, 1], [1, 0])
    factors = gl.allocate_shared_memory(dtype, [NUMBER, 64, 64], FLAT)
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    place = row[:, None] * 64 + column[None, :]
    for i in gl.static_range(NUMBER):
        factors.index(i).store(gl.load(source + i * 4096 + place))
    fence_async_shared()
    wait_for_all()
    return factors


@gluon.jit
def _store_columns(parts, to: To, top, row, tile, n: Sizes, C: gl.constexpr):
    """Stores V's codes of one tile of keys, transposed; `row` is that of its head's first."""
    stride = n.blocks_k * (ROWS // 4)
    start = row.to(gl.int64) * C.dim * stride + tile * (ROWS // 4)
    scale = scale_of(top)
    gl.store(to.scales + row * n.blocks_k + tile, scale)
    for i in gl.static_range(2):
        store(parts[i] * (1.0 / scale), to.codes + start + 16 * i, stride, C.dim, C)


@gluon.jit(do_not_specialize=_NUMBERS)
def quantise_hopper(
    q_desc, k_desc, v_desc, q_codes, k_codes, v_codes, q_scales, k_scales, v_scales, matrices,
    gain: gl.float32, seqlen_q, seqlen_k, blocks_q, blocks_k, heads, kv_heads, num_q, num_k,
    C: gl.constexpr,
):  # fmt: skip
    """A CTA takes every so many-th of q's `num_q` tiles, then of the `num_k` pairs."""
    STAGES: gl.constexpr = C.stages
    DIM: gl.constexpr = C.dim
    WORDS: gl.constexpr = C.dim // 4
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.warps, 1], [16, 64, 16])
    n = Sizes(seqlen_q, seqlen_k, blocks_q, blocks_k, heads, kv_heads)
    word: gl.constexpr = gl.pointer_type(gl.int32)
    to_q = To(q_codes.to(word, bitcast=True), q_scales, gain)
    to_k = To(k_codes.to(word, bitcast=True), k_scales, gain)
    to_v = To(v_codes.to(word, bitcast=True), v_scales, gain)
    tiles = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, ROWS, DIM], q_desc.layout)
    full = new_barriers(STAGES, 1)
    factors = _shared_factors(matrices, q_desc.dtype, C)

    first = gl.program_id(0)
    step = gl.num_programs(0)
    own_q = (num_q - first + step - 1) // step
    own_k = (num_k - first + step - 1) // step
    ring = Ring(tiles, full, q_desc, k_desc, v_desc, own_q, own_q + 2 * own_k)
    for i in gl.static_range(STAGES):
        load(i, ring, n, C)
    none = gl.zeros([ROWS], gl.int1, gl.SliceLayout(1, LAYOUT))
    for i in range(own_q):
        batch, head, tile = place_of(first + i * step, heads, (blocks_q + 1) // 2)
        parts = transformed(loaded(i, ring, C), factors, C)
        refill(i, ring, n, C)
        row = (batch * seqlen_q + tile * ROWS).to(gl.int64) * heads + head
        block = (batch * heads + head) * blocks_q + 2 * tile
        store_rows(parts, none, False, to_q, row * WORDS, heads * WORDS, seqlen_q - tile * ROWS,
                   block, blocks_q - 2 * tile, 2, C)  # fmt: skip

    for i in range(own_k):
        batch, head, tile = place_of(first + i * step, kv_heads, blocks_k)
        number = own_q + 2 * i
        values = loaded(number, ring, C)
        parts = transposed(values, factors, C)
        top = gl.max(row_tops(parts), 0)
        spoilt = none
        is_spoilt = top >= INFINITE
        if is_spoilt:  # a NaN has reached other keys in the product
            spoilt = gl.convert_layout(sound(values, C) > 0, none.type.layout)
            parts = transposed(values, factors, C)
            top = gl.max(row_tops(parts), 0)
        refill(number, ring, n, C)
        _store_columns(parts, to_v, top, batch * kv_heads + head, tile, n, C)
        parts = transformed(loaded(number + 1, ring, C), factors, C)
        refill(number + 1, ring, n, C)
        row = (batch * seqlen_k + tile * ROWS).to(gl.int64) * kv_heads + head
        block = (batch * kv_heads + head) * blocks_k + tile
        store_rows(parts, spoilt, is_spoilt, to_k, row * WORDS, kv_heads * WORDS,
                   seqlen_k - tile * ROWS, block, 1, 1, C)  # fmt: skip


@lru_cache(maxsize=64)
def matrices(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(D / 64 + 1, 64, 64): the transform's first 64 columns, and which key V's columns hold.

    A product's column 8i + 2t + e is column 16t + 2i + e of the result.
    """
    column = torch.arange(64).view(4, 8, 2).transpose(0, 1).flatten()  # t, i, e
    cpu = torch.device("cpu")
    blocks = [x[:, column] for x in transform(dim, dim, torch.float32, cpu)[:, :64].split(64)]
    key = column // 16 * 16 + key_of_column(cpu)[column % 16]
    return torch.stack([*blocks, torch.eye(64)[:, key]]).to(device, dtype)


def takes(s: Source, how: Quantiser) -> bool:
    """Whether `quantise` does this, on a GPU of sm_90."""
    q, k, v = s.q, s.k, s.v
    return (
        q.dim() == 4
        and q.shape[-1] == v.shape[-1]
        and q.shape[-1] in CONFIGS
        and q.dtype in (torch.float16, torch.bfloat16)
        and how.hadamard
        and how.scale == "block"
        and s.rotary_cos is None
        and min(q.numel(), k.numel()) > 0
        and not any(needs_copy(x) or is_unaligned(x) for x in (q, k, v))
    )


def quantise(s: Source, how: Quantiser) -> tuple[Tensor, ...]:
    """`onchip.kernels.fp8_quantise.quantise` of what `takes` says."""
    assert takes(s, how)
    return quantise_with(CONFIGS[s.q.shape[-1]], s)


def quantise_with(config: QuantiserConfig, s: Source) -> tuple[Tensor, ...]:
    """`quantise` with a given config: for sweeps and tests."""
    q, k, v = s.q, s.k, s.v
    launch, shapes, rest, sizes = _resolved(q, k, v, config)
    outputs = [q.new_empty(size, dtype=FLOAT8) for size in sizes[:3]]
    outputs += [q.new_empty(size, dtype=torch.float32) for size in sizes[3:]]
    described = [Described(x, *shape) for x, shape in zip((q, k, v), shapes, strict=True)]
    if not launch.is_resolved:  # Triton looks at these, and only at the first launch
        described = [describe(x, ROWS.value, q.shape[-1]) for x in (q, k, v)]
    launch(*described, *outputs, *rest)
    return tuple(outputs)


_kept: Bounded[tuple, tuple] = Bounded(256)


def _resolved(q: Tensor, k: Tensor, v: Tensor, config: QuantiserConfig) -> tuple:
    """The launch for tensors alike; shapes of its descriptors, other arguments, output sizes."""
    key = (config, q.dtype, q.get_device(), q.shape, k.shape, q.stride(), k.stride(), v.stride())
    found = _kept.get(key)
    if found is None:
        found = _kept[key] = _resolve(q, k, v, config)
    return found


def _resolve(q: Tensor, k: Tensor, v: Tensor, config: QuantiserConfig) -> tuple:
    batch, seqlen_q, heads, dim = q.shape
    seqlen_k, kv_heads = k.shape[1:3]
    blocks_q, blocks_k = num_blocks(seqlen_q, None, BLOCK_Q), num_blocks(seqlen_k, None, BLOCK_K)
    num_q, num_k = batch * heads * -(-blocks_q // 2), batch * kv_heads * blocks_k
    grid = (min(max(num_q, num_k), config.ctas * num_sms(q.device)),)
    launch = Launch(quantise_hopper, grid, q.get_device(), num_warps=config.warps,
                    maxnreg=config.registers)  # fmt: skip
    shapes = [(x.shape, x.strides) for x in (describe(x, ROWS.value, dim) for x in (q, k, v))]
    numbers = (seqlen_q, seqlen_k, blocks_q, blocks_k, heads, kv_heads, num_q, num_k)
    rest = (matrices(dim, q.dtype, q.device), transform_gain(dim, True), *numbers, config)
    keys = (batch, kv_heads, blocks_k)
    columns = (batch, kv_heads, dim, blocks_k * BLOCK_K)
    return launch, shapes, rest, (q.shape, k.shape, columns, (batch, heads, blocks_q), keys, keys)
