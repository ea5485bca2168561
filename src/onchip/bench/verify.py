"""The error rule of the contract, held over whole results of any length.

max|x - oracle| <= 2 max|eager - oracle| + a few ulps of the output's scale. Gradients of keys
and values are sums over queries, so that the oracle goes through blocks of rows and never holds
more than `_MOST_SCORES` scores. Of many heads the first and the last are held.

Legend: N sequence length, H heads, G query heads of a key/value head, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from onchip import reference
from onchip.bench.cases import Case, Inputs

NAMES = ("out", "dq", "dk", "dv")
_MOST_SCORES = 1 << 24
_ULPS = 4


class Expected(NamedTuple):
    """What one key/value head's results must be, and how far off they may be."""

    batch: int
    kv_head: int
    values: tuple[Tensor, ...]  # out, and dq, dk, dv in part "both"; float64
    allowed: tuple[float, ...]


def expected(case: Case, inputs: Inputs, part: str) -> list[Expected]:
    """The oracle's results for the heads that are held."""
    places = dict.fromkeys([(0, 0), (case.batch - 1, case.kv_heads - 1)])
    return [_of_head(case, inputs, part, *place) for place in places]


def fault(results: tuple[Tensor, ...], wanted: list[Expected], group: int) -> str:
    """What is wrong with a method's results; empty if they keep the error rule.

    Args:
        results: out, and dq, dk, dv in part "both", each (B, N, H, D).
        wanted: what `expected` gave.
        group: query heads of a key/value head.
    """
    for want in wanted:
        for name, x, value, allowed in zip(NAMES, results, want.values, want.allowed, strict=False):
            got = x[want.batch : want.batch + 1, :, _heads(name, want.kv_head, group)].double()
            if got.shape != value.shape:
                return f"{name}: shape {tuple(got.shape)}, not {tuple(value.shape)}"
            error = (got - value).abs().max().item()
            if not error <= allowed:
                return f"{name}: error {error:.2e}, allowed are {allowed:.2e}"
    return ""


def _heads(name: str, kv_head: int, group: int) -> slice:
    """Heads of a result that belong to one key/value head."""
    if name in ("dk", "dv"):
        return slice(kv_head, kv_head + 1)
    return slice(kv_head * group, (kv_head + 1) * group)


def _of_head(case: Case, inputs: Inputs, part: str, batch: int, kv_head: int) -> Expected:
    group = case.heads // case.kv_heads
    one = slice(batch, batch + 1)
    q, dout = (x[one, :, _heads("out", kv_head, group)] for x in (inputs.q, inputs.dout))
    k, v = (x[one, :, _heads("dk", kv_head, group)] for x in (inputs.k, inputs.v))
    num = 4 if part == "both" else 1
    exact, eager = _zeros(q, k, num), _zeros(q, k, num)
    for rows, keys in _blocks(case, group):
        given = (q[:, rows], k[:, keys], v[:, keys])
        for sums, compute in ((exact, _oracle), (eager, _eager)):
            found = compute(*given, dout[:, rows], case.causal, part)
            for name, total, x in zip(NAMES, sums, found, strict=False):
                total[:, rows if name in ("out", "dq") else keys] += x
    allowed = []
    for want, plain in zip(exact, eager, strict=True):
        scale = want.abs().max().clamp(min=1e-3).item()
        ulps = _ULPS * torch.finfo(case.torch_dtype).eps * scale
        allowed.append(2 * (plain - want).abs().max().item() + ulps)
    return Expected(batch, kv_head, exact, tuple(allowed))


def _zeros(q: Tensor, k: Tensor, num: int) -> tuple[Tensor, ...]:
    """Sums of out, dq, dk, dv to begin with."""
    return tuple(torch.zeros_like(x, dtype=torch.float64) for x in (q, q, k, k)[:num])


def _blocks(case: Case, group: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of rows and the keys that they see: causal masks stay aligned at the bottom right."""
    rows = max(1, _MOST_SCORES // (case.length * group))
    for start in range(0, case.length, rows):
        stop = min(start + rows, case.length)
        yield slice(start, stop), slice(0, stop if case.causal else case.length)


def _oracle(q, k, v, dout, causal: bool, part: str) -> tuple[Tensor, ...]:
    with torch.no_grad():
        out = reference.attention(q, k, v, causal=causal)[0]
        if part == "forward":
            return (out,)
        return (out, *reference.attention_backward(q, k, v, dout, causal=causal)[:3])


def _eager(q, k, v, dout, causal: bool, part: str) -> tuple[Tensor, ...]:
    if part == "forward":
        with torch.no_grad():
            return (reference.eager(q, k, v, causal=causal)[0],)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = reference.eager(*leaves, causal=causal)[0]
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))
