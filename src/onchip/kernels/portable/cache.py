"""Append to a paged cache on a GPU: keys and values of new tokens go to their slots, one launch.

Slot s is token s % N of page s // N; slot -1 stores nothing. Stored values are divided by the
cache's scale, which reading multiplies by; float8 saturates instead of becoming NaN.

A program copies one head of one token, keys and values. Offsets are 64-bit. Memory: k, v
(T, H_kv, D) and the caches (P, N, H_kv, D), any strides with the last one 1.

Legend: T tokens, H_kv key and value heads, D / D_v head dimensions, P pages, N page size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onchip.kernels.launcher import Launch
from onchip.problem import Problem

FLOAT8_MAX = tl.constexpr(448.0)  # of e4m3fn
_NUMBERS = (
    "page_size stride_kt stride_kh stride_vt stride_vh stride_kp stride_kn stride_kc stride_vp "
    "stride_vn stride_vc"
).split()


@triton.jit
def _converted(x, scale, head, cache):
    """As the cache stores it."""
    if scale is not None:
        x = x.to(tl.float32) / tl.load(scale + head)
    if cache.dtype.element_ty == tl.float8e4nv:
        x = x.to(tl.float32)
        bounded = tl.minimum(tl.maximum(x, -FLOAT8_MAX), FLOAT8_MAX)
        x = tl.where(x == x, bounded, x)
    return x.to(cache.dtype.element_ty)


@triton.jit(do_not_specialize=_NUMBERS)
def kv_store_portable(
    k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, page_size,
    stride_kt: tl.int64, stride_kh: tl.int64, stride_vt: tl.int64, stride_vh: tl.int64,
    stride_kp: tl.int64, stride_kn: tl.int64, stride_kc: tl.int64,
    stride_vp: tl.int64, stride_vn: tl.int64, stride_vc: tl.int64,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: one head of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    page, offset = slot // page_size, slot % page_size
    column = tl.arange(0, WIDTH)
    source = k + token * stride_kt + head * stride_kh
    x = tl.load(source + column, mask=column < DIM, other=0.0)
    target = k_cache + page * stride_kp + offset * stride_kn + head * stride_kc
    tl.store(target + column, _converted(x, k_scale, head, k_cache), mask=column < DIM)
    source = v + token * stride_vt + head * stride_vh
    x = tl.load(source + column, mask=column < DIM_V, other=0.0)
    target = v_cache + page * stride_vp + offset * stride_vn + head * stride_vc
    tl.store(target + column, _converted(x, v_scale, head, v_cache), mask=column < DIM_V)


def launch(
    problem: Problem,
    k: torch.Tensor,  # (T, H_kv, D)
    v: torch.Tensor,  # (T, H_kv, D_v)
    k_cache: torch.Tensor,  # (P, N, H_kv, D)
    v_cache: torch.Tensor,  # (P, N, H_kv, D_v)
    slot_mapping: torch.Tensor,  # (T,)
    k_scale: torch.Tensor | None,  # (H_kv,)
    v_scale: torch.Tensor | None,  # (H_kv,)
) -> None:
    """Writes each token into its slot.

    Mutates:
        k_cache, v_cache: the slots named by slot_mapping.
    """
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    pointers = (k, v, k_cache, v_cache, slot_mapping.contiguous(), k_scale, v_scale)
    strides = (*k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3])
    aligned = tuple(None if x is None else x.data_ptr() % 16 for x in pointers)
    # The entry keeps the Problem alive, so its id is its own.
    key = (id(problem), k.device, strides, aligned, slot_mapping.dtype)
    found = _launches.get(key)
    if found is None:
        if len(_launches) >= _MAX_LAUNCHES:
            _launches.clear()
        found = _launches[key] = (_resolve(problem, k), problem)
    width = triton.next_power_of_2(max(problem.head_dim, problem.head_dim_v))
    found[0](
        *pointers, problem.page_size, *strides, problem.head_dim, problem.head_dim_v, width
    )  # fmt: skip


def _resolve(problem: Problem, k: torch.Tensor) -> Launch:
    index = k.device.index if k.device.type == "cuda" else -1
    grid = (k.shape[0], problem.num_kv_heads)
    return Launch(kv_store_portable, grid, index, num_warps=1)


_launches: dict[tuple, tuple[Launch, Problem]] = {}
_MAX_LAUNCHES = 1024  # a bound on memory for servers whose shapes never repeat
