"""The Hopper float8 forward, for sm_90a: `forward.py`'s design with 8-bit wgmma.

Method and who waits for whom: `forward.py`; arithmetic: `onchip.kernels.fp8_emulated`, whose
results these are; what differs for a consumer: `fp8_consumer.py`.

Memory: q, k (B, S, H, D) or (T, H, D) float8; v (B, H_kv, D_v, columns) or (H_kv, D_v, columns);
scales (B, H or H_kv, blocks); out as q with D_v in 16 bits; lse (B, H, S_q) or (H, T_q). Shared
memory in bytes: q_buffers x BM x D, stages x BN x (D + D_v), BM x D_v x 2 / parts for O, and 1 KiB.

It does not do: pages, D over 256, float32 output.

Legend: B batch, S sequence length, T packed tokens, H query heads, H_kv key and value heads,
D / D_v head dimensions, BM / BN rows (queries) and columns (keys) of a tile, n sizes, C code.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon

from onchip.bounded import Bounded
from onchip.kernels.hopper.arguments import (
    Code,
    Resolved,
    code_of,
    factors_of,
    num_sms,
    sizes_of,
)
from onchip.kernels.hopper.config import WARPGROUP_ROWS
from onchip.kernels.hopper.descriptors import describe
from onchip.kernels.hopper.fp8_config import FP8Config, choose_fp8
from onchip.kernels.hopper.fp8_consumer import fp8_consumer
from onchip.kernels.hopper.fp8_producer import fp8_producer
from onchip.kernels.hopper.fp8_walk import ONES, Scales, Tiles
from onchip.kernels.hopper.gluon_names import TensorDescriptor, fence_async_shared, gl, new_barriers
from onchip.kernels.hopper.shared import Inputs, Outputs
from onchip.kernels.hopper.softmax import Terms
from onchip.kernels.hopper.tiles import NOTE_SIZE, Lengths, Notes, Sizes
from onchip.kernels.hopper.workspace import take
from onchip.kernels.launcher import Launch
from onchip.problem import Problem, Tensors
from onchip.together import TOGETHER

_NUM_TILES = 7  # place in `tiles.Sizes`
_NUMBERS = (
    "qb qh qn kb kh kn vb vh vn seqlen_q seqlen_k tokens_q num_heads group num_sequences "
    "num_blocks num_tiles heads_per_group left right"
).split()


@gluon.jit
def _store_ones(tile):
    """As bits: ptxas (12.9) leaves every other byte of a constant's conversion undefined."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, 4], [1, 0])
    bits = gl.full([tile.shape[0], tile.shape[1]], 0x38, gl.int8, LAYOUT)
    tile.store(bits.to(gl.float8e4nv, bitcast=True))
    fence_async_shared()


@gluon.jit
def _shared_memory(q_desc, k_desc, v_desc, o_desc, C: gl.constexpr):
    NUM_Q: gl.constexpr = C.q_buffers * C.warpgroups
    NUM_O: gl.constexpr = C.warpgroups
    STAGES: gl.constexpr = C.stages
    BN: gl.constexpr = C.block_n
    WIDTH: gl.constexpr = C.width
    WIDTH_V: gl.constexpr = C.width_v
    WIDTH_O: gl.constexpr = C.width_v // C.parts
    q = gl.allocate_shared_memory(q_desc.dtype, [NUM_Q, 1, 1, 64, WIDTH], q_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BN, WIDTH], k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, WIDTH_V, BN], v_desc.layout)
    o = gl.allocate_shared_memory(o_desc.dtype, [NUM_O, 1, 1, 64, WIDTH_O], o_desc.layout)
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    slots = gl.allocate_shared_memory(gl.int32, [2 * NOTE_SIZE, 1], layout)
    notes = Notes(slots, new_barriers(2, 1), new_barriers(2, C.warpgroups))
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    ones = gl.allocate_shared_memory(gl.float8e4nv, [ONES, BN], flat)
    _store_ones(ones)
    return Tiles(
        q, k, v, o,
        new_barriers(NUM_Q, 1), new_barriers(NUM_Q, 1),
        new_barriers(STAGES, 1), new_barriers(STAGES, 1), notes,
        ones,
    )  # fmt: skip


@gluon.jit(do_not_specialize=_NUMBERS)
def attn_fwd_fp8_hopper(
    q_desc, k_desc, v_desc, o_desc, out, lse, counters, q_scale, k_scale, v_scale,
    cu_seqlens_q, cu_seqlens_k, seqused_k, slopes, sinks,
    qb, qh, qn, kb, kh, kn, vb, vh, vn, scale: gl.float32, softcap: gl.float32,
    seqlen_q, seqlen_k, tokens_q, num_heads, group, num_sequences, num_blocks, num_tiles,
    heads_per_group, left, right, C: gl.constexpr,
):  # fmt: skip
    """One CTA for each multiprocessor."""
    n = Sizes(seqlen_q, seqlen_k, tokens_q, num_heads, group, num_sequences, num_blocks, num_tiles,
              heads_per_group, left, right)  # fmt: skip
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_k, seqused_k, 0)
    terms = Terms(scale, softcap, slopes, sinks)
    scales = Scales(q_scale, k_scale, v_scale, (qb, qh, qn), (kb, kh, kn), (vb, vh, vn))
    at = _shared_memory(q_desc, k_desc, v_desc, o_desc, C)
    to = Outputs(o_desc, out, lse, counters, counters)
    source = Inputs(q_desc, k_desc, v_desc, lengths, counters, counters)
    # The first role runs on the kernel's own four warps and takes the registers that are left.
    if C.warpgroups == 2:
        gl.warp_specialize([
            (fp8_consumer, (0, lengths, to, terms, scales, at, n, C)),
            (fp8_consumer, (1, lengths, to, terms, scales, at, n, C)),
            (fp8_producer, (source, at, n, C)),
        ], [4, 1], [C.registers, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (fp8_consumer, (0, lengths, to, terms, scales, at, n, C)),
            (fp8_consumer, (1, lengths, to, terms, scales, at, n, C)),
            (fp8_consumer, (2, lengths, to, terms, scales, at, n, C)),
            (fp8_producer, (source, at, n, C)),
        ], [4, 4, 1], [C.registers, C.registers, 24])  # fmt: skip


def launch(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Runs the forward with the config that `choose_fp8` picks.

    Args:
        problem: what the call asks for.
        tensors: its data, as `onchip.quantize_qkv` makes them; nothing here is written.

    Returns:
        out as q with D_v, of `problem.out_dtype`; lse (B, H, S_q) or (H, T_q) float32.
    """
    return launch_with(None, problem, tensors)


def launch_with(
    config: FP8Config | None, problem: Problem, tensors: Tensors
) -> tuple[Tensor, Tensor]:
    """`launch` with a given config, or the chosen one: for sweeps and tests."""
    q = tensors.q
    dtype = getattr(torch, problem.out_dtype)
    out = q.new_empty(*q.shape[:-1], problem.head_dim_v, dtype=dtype)
    rows = q.shape[:1] if q.dim() == 3 else q.shape[:2]
    lse = q.new_empty(*rows[:-1], problem.num_heads, rows[-1], dtype=torch.float32)
    if out.numel() > 0:
        with TOGETHER:
            _launch_on(take(q.device), config, problem, tensors, out, lse)
    return out, lse


def _launch_on(
    counters: Tensor, config: FP8Config | None, problem: Problem, tensors: Tensors, out: Tensor,
    lse: Tensor,
) -> None:  # fmt: skip
    """Mutates: out, lse."""
    q, k, v = tensors.q, tensors.k, tensors.v
    ints, floats = _optional(tensors)
    found = _resolved_of(config, problem, tensors, out)
    given = (q, k, v, out, lse, counters, *tensors.scales, *ints, *floats)
    addresses = tuple([0 if x is None else x.data_ptr() for x in given])
    if found.replay(addresses):
        return
    arguments = (
        *found.described(q, k, v, out),
        out,
        lse,
        counters,
        *tensors.scales,
        *(counters if x is None else x for x in ints),
        *(lse if x is None else x for x in floats),
        *found.numbers,
        found.code,
    )
    found.launch(*arguments)
    found.remember(addresses, [(found.launch, arguments)])


def _optional(tensors: Tensors) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """Integer and floating tensors that a call may lack."""
    ints = (tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.seqused_k)
    return ints, (tensors.alibi_slopes, tensors.sinks)


_kept: Bounded[tuple, Resolved] = Bounded(1024)


def _resolved_of(
    config: FP8Config | None, problem: Problem, tensors: Tensors, out: Tensor
) -> Resolved:
    """The launch for calls alike: same problem, shapes and strides."""
    q, k, v = tensors.q, tensors.k, tensors.v
    ints, floats = _optional(tensors)
    key = (id(problem), config, q.get_device(), q.stride(), k.stride(), v.stride(), k.shape)
    key += (v.shape, tuple(x.stride() for x in tensors.scales))
    # A change of these means another signature of the kernel.
    key += tuple(
        None if x is None else (x.dtype, x.data_ptr() & 15)
        for x in (*tensors.scales, *ints, *floats)
    )
    found = _kept.get(key)
    if found is None or not found.launch.is_resolved:
        found = _resolve(config or choose_fp8(problem), problem, tensors, out)
        _kept[key] = found
    return found


def _resolve(config: FP8Config, problem: Problem, tensors: Tensors, out: Tensor) -> Resolved:
    code = code_of(config, problem)
    sizes = sizes_of(code, problem)
    grid = (min(num_sms(tensors.q.device), sizes[_NUM_TILES]),)
    launch = Launch(attn_fwd_fp8_hopper, grid, tensors.q.get_device(), num_warps=4)
    strides = (stride for x in tensors.scales for stride in x.stride())
    numbers = (*strides, *factors_of(problem), *sizes)
    return Resolved(problem, launch, _descriptors(code, tensors, out), numbers, code)


def _descriptors(code: Code, tensors: Tensors, out: Tensor) -> list[TensorDescriptor]:
    """q, k, v and out, read and written in tiles of one head."""
    v = tensors.v if tensors.v.dim() == 4 else tensors.v.unsqueeze(0)
    block = [1, 1, code.width_v, code.block_n]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv)
    return [
        describe(tensors.q, WARPGROUP_ROWS, code.width),
        describe(tensors.k, code.block_n, code.width),
        TensorDescriptor(v, list(v.shape), list(v.stride()), block, layout),
        describe(out, WARPGROUP_ROWS, code.width_v // code.parts),
    ]
