"""One dense call to measure: its sizes, its Problem, its random inputs.

Legend: B batch, N sequence length, H heads, H_kv key and value heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.analysis import cost
from onchip.problem import Layout, Mask, Op, Problem, device_arch


@dataclass(frozen=True)
class Case:
    """A dense square call.

    Args:
        batch: B.
        length: N, queries and keys.
        heads: H.
        kv_heads: H_kv.
        head_dim: D.
        causal: whether no query sees a later key.
        dtype: of q, k and v, by name.
        device: "cpu" or "cuda".
    """

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    dtype: str
    device: str

    def __post_init__(self):
        for name in ("batch", "length", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}; allowed: 1 or more")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads: got {self.kv_heads}; allowed: a divisor of heads, {self.heads}"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return getattr(torch, self.dtype)

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return self.head_dim**-0.5

    @property
    def input_bytes(self) -> int:
        """Bytes of `inputs`."""
        rows = 2 * self.batch * self.length * (self.heads + self.kv_heads)
        return rows * self.head_dim * self.torch_dtype.itemsize

    def problem(self, op: Op = Op.FORWARD) -> Problem:
        """The Problem that the call poses."""
        place = torch.device(self.device)
        return Problem(
            op=op,
            device=self.device,
            arch=device_arch(place) if self.device == "cuda" else "",
            dtype=self.torch_dtype,
            kv_dtype=self.torch_dtype,
            layout_q=Layout.DENSE,
            layout_k=Layout.DENSE,
            batch=self.batch,
            seqlen_q=self.length,
            seqlen_k=self.length,
            tokens_q=self.batch * self.length,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim,
            mask=Mask.of(self.causal, (-1, -1)),
            scale=self.scale,
        )

    def flops(self, part: str) -> int:
        """FLOPs that the call needs: of the forward, and of the backward too in part "both"."""
        problem = self.problem()
        forward = cost.flops(problem)
        return forward + (cost.flops(replace(problem, op=Op.BACKWARD)) if part == "both" else 0)

    def inputs(self, seed: int = 0) -> Inputs:
        """Random q, k, v and the gradient on out, normally distributed."""
        generator = torch.Generator(self.device).manual_seed(seed)
        rows = (self.batch, self.length)
        shapes = [(*rows, heads, self.head_dim) for heads in (self.heads, *[self.kv_heads] * 2)]
        return Inputs(*(self._random(shape, generator) for shape in (*shapes, shapes[0])))

    def _random(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator, device=self.device, dtype=self.torch_dtype)


class Inputs(NamedTuple):
    """What a case computes with."""

    q: Tensor  # (B, N, H, D)
    k: Tensor  # (B, N, H_kv, D)
    v: Tensor  # (B, N, H_kv, D)
    dout: Tensor  # (B, N, H, D)
