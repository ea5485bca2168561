"""What each ingredient of float8 attention buys: errors against float64.

On a Hopper GPU the kernel is measured, beside bfloat16 and FlashAttention-3's float8 where its
package is installed; elsewhere the arithmetic is `onchip.kernels.fp8_emulated`'s. Inputs are
FlashAttention-3's (section 4.3): N(0, 1), and on one entry in a thousand N(0, 100) on top; without
these where ways of summing are compared. D = 128, rows of several heads that see every key.

Usage: python benchmarks/fp8_error.py [--seqlen 1024,8192,...] [--rows 512] [--heads 16]
                                    [--json OUT.json] [--plot FOLDER]
       python benchmarks/fp8_error.py --from OUT.json --plot docs/figures
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import onchip
from onchip.kernels.fp8_emulated import Accumulation
from onchip.problem import Op, Params, Problem, Tensors

HEAD_DIM = 128
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICE = "cuda" if ON_HOPPER else "cpu"
# The model of the tensor cores' accumulator takes every product by itself: fewer rows.
SUM_ROWS, SUM_HEADS = (128, 8) if ON_HOPPER else (16, 2)
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
    x = torch.randn(shape, generator=generator, device=DEVICE)
    if outliers:
        spikes = torch.rand(shape, generator=generator, device=DEVICE) < 1e-3
        x += torch.randn(shape, generator=generator, device=DEVICE) * 10 * spikes
    return x


def case_of(seqlen: int, rows: int, heads: int, mean: float = 0.0, outliers: bool = True) -> Case:
    """bfloat16 inputs whose values have a mean, and the oracle's output."""
    g = torch.Generator(DEVICE).manual_seed(seqlen)
    q, k, v = (inputs(n, heads, g, outliers) for n in (rows, seqlen, seqlen))
    q, k, v = q.bfloat16(), k.bfloat16(), (v + mean).bfloat16()
    outs = []
    for h in range(heads):  # a head at a time: float64 of all would not fit
        s = q[0, :, h].double() @ k[0, :, h].double().T * HEAD_DIM**-0.5
        outs.append(s.softmax(-1) @ v[0, :, h].double())
    return Case(q, k, v, torch.stack(outs, 1)[None])


def attend(case: Case, two_level: bool = True, **how) -> torch.Tensor:
    """float8 attention with P V summed in one way or the other."""
    x = onchip.quantize_qkv(case.q, case.k, case.v, **how)
    lengths = (case.q.shape[1], case.k.shape[1])
    # float32 output on a CPU, where the model's own errors are looked at.
    dtype = "bfloat16" if ON_HOPPER else "float32"
    params = Params(*lengths, -1, -1, HEAD_DIM**-0.5, 0.0, False, 0, "", out_dtype=dtype)
    tensors = Tensors(x.q, x.k, x.v, scales=(x.q_scale, x.k_scale, x.v_scale))
    problem = Problem.of(Op.FORWARD, tensors, params)
    if ON_HOPPER:
        from onchip.kernels.hopper import fp8, fp8_config

        config = replace(fp8_config.choose_fp8(problem), two_level=two_level)
        return fp8.launch_with(config, problem, tensors)[0]
    from onchip.kernels import fp8_emulated

    way = Accumulation.FLOAT32 if two_level else Accumulation.TENSOR_CORE
    return fp8_emulated.launch(problem, tensors, way)[0]


def fa3_float8(case: Case) -> torch.Tensor:
    """FlashAttention-3's float8: one scale a tensor, no transform, the tensor cores' sums."""
    import flash_attn_interface  # type: ignore[import-not-found]

    scales = [x.float().abs().amax() / 448 for x in (case.q, case.k, case.v)]
    codes = [(x.float() / s).to(torch.float8_e4m3fn)
             for x, s in zip((case.q, case.k, case.v), scales, strict=True)]  # fmt: skip
    names = ("q_descale", "k_descale", "v_descale")
    wide = [s.expand(1, case.q.shape[2]).contiguous() for s in scales]
    out = flash_attn_interface.flash_attn_func(*codes, **dict(zip(names, wide, strict=True)))
    return out[0] if isinstance(out, tuple) else out


def _tried(found: dict, name: str, case: Case, call: Callable[[Case], torch.Tensor]) -> None:
    with contextlib.suppress(ModuleNotFoundError):
        found[name] = case.error(call(case))


def measured(seqlen: int, rows: int, heads: int) -> dict:
    """All errors of one length."""
    case = case_of(seqlen, rows, heads)
    found = {"bfloat16": case.error(onchip.attention(case.q, case.k, case.v))}
    _tried(found, "FlashAttention-3's float8", case, fa3_float8)
    for name, how in INGREDIENTS.items():
        found[name] = case.error(attend(case, **how))
    both = INGREDIENTS["block scales, transform"]
    if ON_HOPPER:
        found["one level, block scales, transform"] = case.error(attend(case, False, **both))
    for mean in (0.0, 1.0):
        small = case_of(seqlen, SUM_ROWS, SUM_HEADS, mean, outliers=False)
        for two_level in (True, False):
            name = f"{'two levels' if two_level else 'one level'}, values of mean {mean:g}"
            found[name] = small.error(attend(small, two_level))
        _tried(found, f"FlashAttention-3's float8, values of mean {mean:g}", small, fa3_float8)
        small_out = onchip.attention(small.q, small.k, small.v)
        found[f"bfloat16, values of mean {mean:g}"] = small.error(small_out)
    return found


_PLOTS = {
    "fp8_ingredients": (
        "rmse",
        "RMSE against float64, N(0, 1) with outliers",
        ("FlashAttention-3's float8", "tensor scales", "block scales", "tensor scales, transform",
         "block scales, transform", "bfloat16"),
    ),
    "fp8_accumulation": (
        "relative",
        "relative error, values of mean 1",
        ("FlashAttention-3's float8, values of mean 1", "one level, values of mean 1",
         "two levels, values of mean 1", "bfloat16, values of mean 1"),
    ),
}  # fmt: skip


def plot(found: dict, folder: Path) -> None:
    """Writes one SVG for each entry of `_PLOTS`."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "onchip"  # the same file for the same numbers
    folder.mkdir(parents=True, exist_ok=True)
    lengths = sorted(map(int, found))
    for name, (which, title, lines) in _PLOTS.items():
        figure = Figure(figsize=(6.4, 3.8), layout="constrained")
        axes = figure.subplots()
        for line in lines:
            points = [(n, found[str(n)][line][which]) for n in lengths if line in found[str(n)]]
            if points:
                label = line.removesuffix(", values of mean 1")
                axes.plot(*zip(*points, strict=True), marker="o", label=label)
        axes.set(xscale="log", yscale="log", xlabel="keys", title=title)
        axes.set_xticks(lengths, [f"{n // 1024}k" for n in lengths], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def main() -> None:
    """Prints a table and writes JSON and plots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqlen", default="1024,4096,8192,65536,131072")
    parser.add_argument("--rows", type=int, default=512 if ON_HOPPER else 128, help="of each head")
    parser.add_argument("--heads", type=int, default=16 if ON_HOPPER else 8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, metavar="FOLDER")
    parser.add_argument("--from", type=Path, dest="source", help="plots these results")
    options = parser.parse_args()
    if options.source:
        plot(json.loads(options.source.read_text(encoding="utf-8")), options.plot)
        return
    found = {}
    for seqlen in map(int, options.seqlen.split(",")):
        found[str(seqlen)] = measured(seqlen, options.rows, options.heads)
        print(seqlen, flush=True)
        for name, error in found[str(seqlen)].items():
            print(f"  {name:42} {error['rmse']:.2e}  {error['relative']:.4f}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
