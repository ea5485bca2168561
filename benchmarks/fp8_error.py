"""What each ingredient of float8 attention buys: errors against float64, on a CPU.

The arithmetic is that of `onchip.kernels.fp8_emulated`. Inputs are FlashAttention-3's
(section 4.3): N(0, 1), and on one entry in a thousand N(0, 100) on top; without these where ways
of summing are compared. D = 128, rows of several heads that see every key.

Usage: python benchmarks/fp8_error.py [--seqlen 1024,8192,...] [--rows 128] [--heads 8]
                                    [--json OUT.json]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

import torch

import onchip
from onchip.kernels.fp8_emulated import Accumulation, launch
from onchip.problem import Op, Params, Problem, Tensors

HEAD_DIM = 128
# The model of the tensor cores' accumulator takes every product by itself: fewer rows.
MODEL_ROWS, MODEL_HEADS = 16, 2
INGREDIENTS = {
    "tensor scales": {"scale": "tensor", "hadamard": False},
    "block scales": {"scale": "block", "hadamard": False},
    "tensor scales, transform": {"scale": "tensor", "hadamard": True},
    "block scales, transform": {"scale": "block", "hadamard": True},
}


@dataclass(frozen=True)
class Case:
    """Inputs of one length, with their float64 output."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    want: torch.Tensor

    def error(self, out: torch.Tensor) -> dict[str, float]:
        """RMSE, and relative to the output's own root mean square."""
        off = (out.double() - self.want).pow(2).mean().sqrt()
        return {"rmse": float(off), "relative": float(off / self.want.pow(2).mean().sqrt())}


def inputs(
    rows: int, heads: int, generator: torch.Generator, outliers: bool = True
) -> torch.Tensor:
    """(1, rows, heads, D)."""
    shape = (1, rows, heads, HEAD_DIM)
    if not outliers:
        return torch.randn(shape, generator=generator)
    spikes = torch.rand(shape, generator=generator) < 1e-3
    large = torch.randn(shape, generator=generator) * 10 * spikes
    return torch.randn(shape, generator=generator) + large


def case_of(seqlen: int, rows: int, heads: int, mean: float = 0.0, outliers: bool = True) -> Case:
    """Inputs whose values have a mean, and the oracle's output."""
    g = torch.Generator().manual_seed(seqlen)
    q, k, v = (inputs(n, heads, g, outliers) for n in (rows, seqlen, seqlen))
    v += mean
    outs = []
    for h in range(heads):  # a head at a time: float64 of all would not fit
        s = q[0, :, h].double() @ k[0, :, h].double().T * HEAD_DIM**-0.5
        outs.append(s.softmax(-1) @ v[0, :, h].double())
    return Case(q, k, v, torch.stack(outs, 1)[None])


def by_accumulation(case: Case, accumulation: Accumulation) -> torch.Tensor:
    """Block scales and transform, summed in one way or the other."""
    x = onchip.quantize_qkv(case.q, case.k, case.v)
    lengths = (case.q.shape[1], case.k.shape[1])
    params = Params(*lengths, -1, -1, HEAD_DIM**-0.5, 0.0, False, 0, "", out_dtype="float32")
    tensors = Tensors(x.q, x.k, x.v, scales=(x.q_scale, x.k_scale, x.v_scale))
    return launch(Problem.of(Op.FORWARD, tensors, params), tensors, accumulation)[0]


def measured(seqlen: int, rows: int, heads: int) -> dict:
    """All errors of one length."""
    case = case_of(seqlen, rows, heads)
    qkv = (case.q, case.k, case.v)
    found = {"bfloat16": case.error(onchip.attention(*[x.bfloat16() for x in qkv]))}
    for name, how in INGREDIENTS.items():
        found[name] = case.error(onchip.attention(onchip.quantize_qkv(*qkv, **how)))
    for mean in (0.0, 1.0):
        small = case_of(seqlen, MODEL_ROWS, MODEL_HEADS, mean, outliers=False)
        for way in Accumulation:
            name = f"{way.name.lower()}, values of mean {mean:g}"
            found[name] = small.error(by_accumulation(small, way))
    return found


def main() -> None:
    """Prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqlen", default="1024,8192,65536,131072")
    parser.add_argument("--rows", type=int, default=128, help="of each head")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--json")
    options = parser.parse_args()
    found = {}
    for seqlen in map(int, options.seqlen.split(",")):
        found[seqlen] = measured(seqlen, options.rows, options.heads)
        print(seqlen, flush=True)
        for name, error in found[seqlen].items():
            print(f"  {name:40} {error['rmse']:.2e}  {error['relative']:.3f}", flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
