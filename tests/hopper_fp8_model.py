"""Script: runs the Hopper float8 forward's roles in `gluon_model`; saves what they wrote.

Usage: hopper_fp8_model.py CASES.json OUT.pt
"""

from __future__ import annotations

import json
import sys

import torch

from tests import gluon_model
from tests.hopper_forward_model import (  # takes Triton's place
    Array,
    Deadlock,
    NamedBarriers,
    Pointer,
    Tiles,
    _cta,
    gl,
)


def _greater(a, b):
    if any(isinstance(x, torch.Tensor) and x.dim() > 0 for x in (a, b)):
        return torch.maximum(*(x if isinstance(x, torch.Tensor) else torch.tensor(x)
                               for x in (a, b)))  # fmt: skip
    return max(a, b)


def _wait(num_outstanding, deps):
    """Also takes sums that a product is not to be issued before."""
    pending = [x for x in deps if isinstance(x, gluon_model.Pending)]
    gluon_model._mma_wait(num_outstanding, pending or [_Nothing()])
    found = [x.result.clone().as_subclass(Array) if x in pending else x for x in deps]
    return found[0] if len(found) == 1 else tuple(found)


class _Nothing:
    result = torch.zeros(1)


gl.maximum = _greater
gl.zeros_like = lambda x: torch.zeros_like(x)

from onchip.kernels import fp8_emulated  # noqa: E402
from onchip.kernels.fp8_layout import (  # noqa: E402
    FIRST_ROOM,
    LIMIT,
    NEVER,
    ROOM,
    key_of_column,
)
from onchip.kernels.hopper import arguments, fp8, fp8_consumer, fp8_walk  # noqa: E402
from onchip.kernels.hopper.fp8_config import FP8Config  # noqa: E402
from tests.hopper_fp8_cases import posed  # noqa: E402

_ORDER = key_of_column(torch.device("cpu"))


def _rounded(logits, base):
    """Weights in float8, in the order of V's columns."""
    p = fp8_emulated.weights(logits - base).unflatten(1, (-1, 16))[..., _ORDER].flatten(1)
    return p.to(torch.float8_e4m3fn).as_subclass(Array)


def _moved(logits, base):
    highest = logits.amax(1, keepdim=True)
    room = torch.where(base == NEVER, FIRST_ROOM, ROOM)
    return torch.where(highest - base >= LIMIT, highest - room, base).as_subclass(Array)


def _first_weights(s, unit):
    base = _moved(s * unit, torch.full((64, 1), NEVER))
    return _rounded(s * unit, base), base


def _weights(s, unit, base):
    new = _moved(s * unit, base)
    return _rounded(s * unit, new), new, (base - new).exp2().as_subclass(Array)


# Words, and the assembly that makes them, are numbers here.
_NUMBERS = {
    "weights": _weights,
    "first_weights": _first_weights,
    "operand": lambda words, layout: words,
    "times": lambda x, factor: x * factor,
    "quotient": lambda x, y: x / y,
    "warpgroup_mma_wait": _wait,
}
for _module in (fp8_consumer, fp8_walk):
    for _name in _NUMBERS.keys() & vars(_module).keys():
        setattr(_module, _name, _NUMBERS[_name])
fp8._store_ones = lambda tile: tile.data.fill_(1.0)


def run(problem, tensors, programs: int, config: FP8Config):
    """out and lse as the kernel leaves them; what it does not write stays NaN."""
    code = arguments.code_of(config, problem)
    sizes = arguments.sizes_of(code, problem)
    q, v = tensors.q, tensors.v
    out = torch.full((*q.shape[:-1], problem.head_dim_v), torch.nan, dtype=torch.bfloat16)
    rows = q.shape[:1] if q.dim() == 3 else q.shape[:2]
    lse = torch.full((*rows[:-1], problem.num_heads, rows[-1]), torch.nan)
    counters = torch.zeros(4, dtype=torch.int32)
    descriptors = (
        Tiles(q, 64, code.width),
        Tiles(tensors.k, code.block_n, code.width),
        Tiles((v if v.dim() == 4 else v[None]).transpose(1, 2), code.width_v, code.block_n),
        Tiles(out, 64, code.width_v // code.parts),
    )
    optional = (tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.seqused_k,
                tensors.alibi_slopes, tensors.sinks)  # fmt: skip
    scales = [torch.as_strided(x, (x.untyped_storage().nbytes() // 4,), (1,), 0)
              for x in tensors.scales]  # fmt: skip
    pointers = [Pointer(x) for x in (out, lse, counters, *scales)]
    pointers += [None if x is None else Pointer(x) for x in optional]
    strides = [n for x in tensors.scales for n in x.stride()]
    _cta.programs = min(programs, sizes[7])
    _cta.barriers = {program: NamedBarriers() for program in range(_cta.programs)}
    factors = arguments.factors_of(problem)
    given = (*descriptors, *pointers, *strides, *factors, *sizes, code)
    gluon_model.launch(fp8.attn_fwd_fp8_hopper, _cta.programs, *given)
    assert int(counters[0]) == 0, "the counter of tiles is not as it was found"
    return out, lse


def main(cases_file: str, out_file: str) -> None:
    with open(cases_file) as file:
        cases = json.load(file)
    found = []
    for case in cases:
        problem, tensors = posed(**case["inputs"])
        try:
            found.append(
                run(problem, tensors, case.get("programs", 3), FP8Config(**case["config"]))
            )
        except (AssertionError, Deadlock) as error:
            found.append(f"{type(error).__name__}: {error}")
    torch.save(found, out_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
