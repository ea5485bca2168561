"""Calls of the portable forward with every feature, poisoned, and their check by sequence.

Legend: B batch, S_q / S_k lengths, T packed tokens, H query heads, H_kv key and value heads,
D / D_v head dimensions, P pages, N page size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from onchip import reference
from onchip.problem import Mask, Op, Params, Problem, Tensors
from tests.problems import offsets
from tests.tolerance import assert_close_to_oracle


@dataclass(frozen=True)
class Case:
    """One call; lengths_q and lengths_k have an entry per sequence.

    Memory past `lengths_k` (and before `first`) exists and is NaN unless the layout is packed
    without `used`, where the next sequence follows at once.
    """

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    heads: int = 2
    kv_heads: int = 1
    dim: int = 32
    dim_v: int = 32
    dtype: torch.dtype = torch.float16
    packed: bool = False
    page: int = 0
    used: bool = False
    first: tuple[int, ...] = ()
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    scale: float | None = None
    alibi: int = 0
    sinks: bool = False
    strided: bool = False


@dataclass
class Call:
    """A case's data: the tensors as the kernel gets them, and each sequence's own."""

    case: Case
    problem: Problem
    tensors: Tensors
    sequences: list[tuple]  # q (S_q, H, D), k (S_k, H_kv, D), v (S_k, H_kv, D_v)
    extras: list[reference.Extras] | None = None  # of each sequence


def _poisoned(parts: list[torch.Tensor], spare: int) -> list[torch.Tensor]:
    return [torch.cat((x, x.new_full((spare, *x.shape[1:]), math.nan))) for x in parts]


def _dense(parts: list[torch.Tensor]) -> torch.Tensor:
    longest = max(len(x) for x in parts)
    return torch.stack([_poisoned([x], longest - len(x))[0] for x in parts])


def _pages(parts: list[torch.Tensor], size: int, order: list[int]):
    """(P, N, H_kv, D) with NaN where no token lies, and the table (B, max_pages)."""
    counts = [-(-len(x) // size) for x in parts]
    pages = parts[0].new_full((len(order), size, *parts[0].shape[1:]), math.nan)
    table = torch.full((len(parts), max(counts) + 1), -1, dtype=torch.int32)
    free = iter(order)
    for b, x in enumerate(parts):
        for i in range(counts[b]):
            page = table[b, i] = next(free)
            piece = x[i * size : (i + 1) * size]
            pages[page, : len(piece)] = piece
    return pages, table


def build(case: Case, device: str = "cpu", seed: int = 0) -> Call:
    """Random data for a case; everything that no row may see is NaN."""
    g = torch.Generator().manual_seed(seed)

    def random(lengths, heads, dim):
        return [torch.randn(n, heads, dim, generator=g).to(case.dtype) for n in lengths]

    qs = random(case.lengths_q, case.heads, case.dim)
    ks = random(case.lengths_k, case.kv_heads, case.dim)
    vs = random(case.lengths_k, case.kv_heads, case.dim_v)
    for b, first in enumerate(case.first):
        ks[b][:first] = vs[b][:first] = math.nan
    tensors = Tensors(torch.cat(qs) if case.packed else torch.stack(qs), ks[0], vs[0])
    if case.packed:
        tensors.cu_seqlens_q = offsets(case.lengths_q)
    spare = 5 if case.used else 0
    _place_keys(case, tensors, _poisoned(ks, spare), _poisoned(vs, spare), ks, vs, g)
    if case.used or case.page:
        tensors.seqused_k = torch.tensor(case.lengths_k, dtype=torch.int32)
    if case.first:
        tensors.leftpad_k = torch.tensor(case.first, dtype=torch.int32)
    if case.alibi:
        shape = (len(qs), case.heads)[2 - case.alibi :]
        tensors.alibi_slopes = torch.rand(shape, generator=g)
    if case.sinks:
        tensors.sinks = torch.randn(case.heads, generator=g)
    if case.strided:
        tensors.q, tensors.k, tensors.v = map(_strided, (tensors.q, tensors.k, tensors.v))
    for name in Tensors.__slots__:
        x = getattr(tensors, name)
        # .to(device) would make a strided tensor dense on the way.
        moves = isinstance(x, torch.Tensor) and device != "cpu"
        setattr(tensors, name, _moved(x, device) if moves else x)
    return Call(case, _problem(case, tensors), tensors, list(zip(qs, ks, vs, strict=True)))


def _place_keys(case: Case, tensors: Tensors, ks, vs, real_ks, real_vs, g) -> None:
    if case.page:
        count = sum(-(-n // case.page) for n in case.lengths_k) + 2
        order = torch.randperm(count, generator=g).tolist()
        tensors.k, tensors.block_table = _pages(real_ks, case.page, order)
        tensors.v, _ = _pages(real_vs, case.page, order)
    elif case.packed:
        tensors.k, tensors.v = torch.cat(ks), torch.cat(vs)
        tensors.cu_seqlens_k = offsets([len(x) for x in ks])
    else:
        tensors.k, tensors.v = _dense(ks), _dense(vs)


def _strided(x: torch.Tensor) -> torch.Tensor:
    """The same values with odd strides, surrounded by NaN."""
    shape = (*x.shape[:-2], x.shape[-2] + 1, x.shape[-1] + 3)
    wide = x.new_full(shape, math.nan)
    view = wide[..., 1:, 2 : 2 + x.shape[-1]]
    return view.copy_(x)


def _moved(x: torch.Tensor, device: str) -> torch.Tensor:
    base = torch.full((x.storage_offset() + _span(x),), math.nan, device=device).to(x.dtype)
    return base.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(x)


def _span(x: torch.Tensor) -> int:
    return 1 + sum(max(n - 1, 0) * s for n, s in zip(x.shape, x.stride(), strict=True))


def _problem(case: Case, tensors: Tensors) -> Problem:
    mask = Mask.of(case.causal, case.window)
    scale = case.dim**-0.5 if case.scale is None else case.scale
    longest = tensors.k.shape[1] if tensors.k.dim() == 4 and not case.page else 0
    params = Params(
        max(case.lengths_q), max(longest, *case.lengths_k, 0), mask.left, mask.right, scale,
        case.softcap, False, 0, "",
    )  # fmt: skip
    return Problem.of(Op.FORWARD, tensors, params)


def check(call: Call, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Holds every sequence of a result against the oracle, by the contract's rule."""
    case = call.case
    start = 0
    for b, (q, k, v) in enumerate(call.sequences):
        rows = slice(start, start + len(q))
        start += len(q)
        own_out, own_lse = (out[rows], lse[:, rows]) if case.packed else (out[b], lse[b])
        if not len(q):
            continue
        first = case.first[b] if case.first else 0
        inputs = [x[None] for x in (q, k[first:], v[first:])]
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
        device = out.device
        inputs = [x.to(device) for x in inputs]
        oracle, oracle_lse = reference.attention(*inputs, **features)
        eager, eager_lse = reference.eager(*inputs, **features)
        assert own_out.dtype == case.dtype and own_lse.dtype == torch.float32
        assert_close_to_oracle(own_out[None], oracle, eager, f"out of sequence {b}")
        assert_close_to_oracle(own_lse[None], oracle_lse, eager_lse, f"lse of sequence {b}")
