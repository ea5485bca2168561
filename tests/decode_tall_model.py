"""Script: runs the tall decode's roles in `gluon_model`; saves what they wrote.

Programs run one after another, in an order of which no result may depend. So a claim is answered
at once, and nobody waits for a neighbour that has claimed and is not done: that is left to the GPU.
Where a case says `abreast` all of them run at once.

Usage: decode_tall_model.py CASES.json OUT.pt
"""

from __future__ import annotations

import json
import math
import random
import sys
import types
from dataclasses import replace
from functools import partial

from tests import hopper_forward_model as model
from tests.gluon_model import (
    Deadlock,
    Memory,
    Pointer,
    _role,
    launch_abreast,
    program,
    set_program,
)

gl = model.gl

import torch  # noqa: E402


class Address(Pointer):
    """A pointer that knows what it points to."""

    @property
    def dtype(self):
        return types.SimpleNamespace(element_ty=self.x.dtype)

    def __add__(self, other):
        return Address(self.x, self.offset + other)


class Panels:
    """A descriptor of (P, N / 8, H_kv * D / 64, 8, 64): boxes of rows of one head."""

    def __init__(self, x: torch.Tensor, rows: int):
        self.x, self.rows, self.dtype, self.layout = x, rows, x.dtype, None

    def read(self, place):
        page, group, panel, row, column = (int(p) for p in place)
        panels = self.x.shape[-1] // 64
        assert group >= 0 and panel % panels == row == column == 0
        if not 0 <= page < len(self.x):
            return torch.zeros(self.rows // 8, panels, 8, 64, dtype=self.dtype)
        found = self.x[page, group * 8 : group * 8 + self.rows, panel // panels]
        past = found.new_zeros(self.rows - len(found), found.shape[-1])
        return _in_panels(torch.cat((found, past)))


def _in_panels(rows):
    """Rows as they lie in shared memory: 8 of 64 columns, then their next columns."""
    return rows.view(-1, 8, rows.shape[-1] // 64, 64).transpose(1, 2)


class Boxes:
    """A ring of tiles as boxes of a descriptor."""

    def __init__(self, tiles, descriptor, shape):
        self.data, self.shape = tiles.data, tuple(shape)

    def index(self, i):
        if len(self.shape) == 5:
            return Memory(self.data[int(i)])
        slot, page = divmod(int(i), self.shape[0] // len(self.data))
        rows = self.shape[2] * 8
        return Memory(_in_panels(self.data[slot, page * rows : (page + 1) * rows]))


def _cast(x, dtype):
    return x.to(dtype) if isinstance(x, torch.Tensor) else x


def _reduced(x, dim, combine):
    found = x.select(dim, 0)
    for i in range(1, x.shape[dim]):
        found = combine(found, x.select(dim, i))
    return int(found) if found.dim() == 0 else found


_LANGUAGE = {
    "cast": _cast,
    "cdiv": lambda a, b: -(-a // b),
    "program_id": lambda axis: _role.program[axis],
    "num_programs": lambda axis: model._cta.programs[axis],
    "min": model._reduce(lambda x, dim: x.amin(dim)),
    "reduce": lambda x, dim, combine: _reduced(x, dim, combine),
    "associative_scan": lambda x, dim, add: x.cumsum(dim),
}
for _name, _value in _LANGUAGE.items():
    setattr(gl, _name, _value)
_tools = types.ModuleType("triton.tools.tensor_descriptor")
_tools.TensorDescriptor = None
sys.modules["triton.tools"] = types.ModuleType("triton.tools")
sys.modules["triton.tools.tensor_descriptor"] = _tools

from onchip.kernels import gluon_pieces  # noqa: E402
from onchip.kernels.portable import decode_tall, decode_tall_results, decode_tall_tiles  # noqa: E402
from onchip.kernels.portable.decode_config import choose_decode  # noqa: E402
from onchip.kernels.portable.decode_spec import decode_numbers, decode_spec  # noqa: E402
from tests.portable_cases import Case, build  # noqa: E402

# The model's roles are threads of one program; nobody else writes meanwhile.
gluon_pieces.wait_for_all = lambda: None
decode_tall.as_tiles = Boxes
decode_tall.in_pieces = lambda tiles, descriptor, number, rows: model.Pieces(tiles, rows)
decode_tall_results.claim = lambda branch, start, span, to, w, warpgroups: gl.atomic_add(
    gluon_pieces._match(branch, start, span, to, w, warpgroups), 1
)
decode_tall_results.is_second = lambda claimed: int(torch.as_tensor(claimed).sum()) > 0
# Words are assembly; here P stays what they hold.
decode_tall_tiles.packed = lambda weights, dtype, spec: weights.to(dtype)
decode_tall_tiles.operand = lambda p, dtype, spec: p
decode_tall_tiles._marks = lambda words, dtype: (words & 0x7F807F80) + 0x00800080


def run(problem, tensors, changes: dict, abreast: bool, num_sms=4):
    """out and lse; what the kernel does not write stays NaN."""
    config = replace(choose_decode(problem, num_sms), **changes)
    assert config.tall
    # No launch merges here, however many pieces there are.
    spec = replace(decode_spec(config, problem, tensors), merged_rows=0)
    q, k, v = tensors.q, tensors.k, tensors.v
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    rows = q.shape[:1] if q.dim() == 3 else q.shape[:2]
    lse = torch.full((*rows[:-1], problem.num_heads, rows[-1]), torch.nan)
    units, programs = problem.num_kv_heads * config.row_blocks, config.programs(problem, num_sms)
    outs = torch.full((units * programs, spec.kept, spec.width), torch.nan)
    stats = torch.full((units * programs, spec.kept, 2), torch.nan)
    counters = torch.zeros(units * programs * (spec.rows // 32), dtype=torch.int32)
    spec = decode_tall.tall_of(spec, (k, v))
    small = spec.pages_in_tile > 1
    height, width = (spec.page_size, 64) if small else (spec.block_n, spec.width)
    flat = [x.as_strided((_span(x),), (1,)) for x in (q, v)]
    described = [model.Tiles(x, height, width) for x in (k, v)]
    if spec.whole_rows:
        described = [Panels(x, height) for x in (k, v)]
    t = tensors
    optional = (t.block_table, t.cu_seqlens_q, t.seqused_k, None, None, t.sinks, None, None)
    pointers = [None if x is None else Address(x) for x in optional]
    given = (Address(flat[0]), *described, Address(flat[1]), Address(out), Address(lse))
    partials = (Address(outs), Address(stats), Address(counters))
    numbers = (*decode_numbers(spec, config, problem, tensors), num_sms)
    model._cta.programs = (units, programs)
    order = [(x, y) for x in range(units) for y in range(programs)]
    random.Random(0).shuffle(order)
    model._cta.barriers = {place: model.NamedBarriers() for place in order}
    arguments = (*given, *pointers, *partials, *numbers, spec, config.num_stages)
    if abreast:
        launch_abreast(partial(_program_of, order), len(order), *arguments)
    else:
        for place in order:
            set_program(place)
            decode_tall.attn_decode_tall(*arguments)
    assert not counters.any(), "counters are not as they were found"
    return out, lse


def _program_of(order: list[tuple[int, int]], *arguments) -> None:
    """One program of several that run at once."""
    set_program(order[program()])
    decode_tall.attn_decode_tall(*arguments)


def _span(x) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))


def main(cases_file: str, out_file: str) -> None:
    with open(cases_file) as file:
        entries = json.load(file)
    found = []
    for entry in entries:
        fields = {n: tuple(x) if isinstance(x, list) else x for n, x in entry["case"].items()}
        call = build(Case(**{**fields, "dtype": torch.bfloat16}))
        problem = replace(call.problem, arch="sm_90")
        poison(call, entry.get("poison"))
        if entry.get("outweighs"):
            outweigh(call)
        if entry.get("heads_first"):
            for name in "kv":  # (P, H_kv, N, D) in memory
                x = getattr(call.tensors, name).transpose(1, 2).contiguous().transpose(1, 2)
                setattr(call.tensors, name, x)
        try:
            found.append(run(problem, call.tensors, entry["config"], "abreast" in entry))
        except (AssertionError, Deadlock) as error:
            found.append(f"{type(error).__name__}: {error}")
    torch.save(found, out_file)


def outweigh(call) -> None:
    """Infinity in two tiles of keys; the last key, in the later one, outweighs all others."""
    last, case = call.case.lengths_k[0] - 1, call.case
    key = 60 * call.sequences[0][0][-1, 0]
    for token, column in ((last - 1, 7), (last, 3)):
        page, row = call.tensors.block_table[0, token // case.page], token % case.page
        call.tensors.v[page, row, 0, column] = math.inf
    call.tensors.k[page, row, 0] = key


def poison(call, value: float | None) -> None:
    """Puts a value that is not finite into the last value of the first sequence."""
    if value is not None:
        last, case = call.case.lengths_k[0] - 1, call.case
        page = call.tensors.block_table[0, last // case.page]
        for x in (call.tensors.v[page, last % case.page], call.sequences[0][2][last]):
            x[0, 3] = value


if __name__ == "__main__":
    main(*sys.argv[1:])
