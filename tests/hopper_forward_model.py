"""Script: runs the Hopper forward's roles in `gluon_model`; saves what they wrote.

Beside what the model has: named barriers that refuse an arrival too many, 4-dimensional
descriptors that are zero outside, and the arithmetic of the softmax. All CTAs share one counter
and run one after the other: the first takes most tiles, which tries the pipeline across tiles.

Usage: hopper_forward_model.py CASES.json OUT.pt
"""

from __future__ import annotations

import json
import math
import re
import sys
import threading
import types
from types import SimpleNamespace

from tests import gluon_model
from tests.gluon_model import Deadlock, Memory, Pointer

gl = gluon_model.install().gl

import torch  # noqa: E402


class Array(torch.Tensor):
    """A tensor that says that it has a layout."""

    @property
    def type(self):
        return SimpleNamespace(layout=None)


class NamedBarriers:
    """A CTA's sixteen: each opens when as many threads as it expects have come."""

    def __init__(self):
        self.condition = threading.Condition()
        self.arrived = [0] * 16
        self.opened = [0] * 16

    def arrive(self, number: int, threads: int, expected: int) -> int:
        assert 6 <= number < 16, f"barrier {number}"
        with self.condition:
            generation = self.opened[number]
            self.arrived[number] += threads
            assert self.arrived[number] <= expected, f"barrier {number}: too many arrivals"
            if self.arrived[number] == expected:
                self.arrived[number] = 0
                self.opened[number] += 1
                self.condition.notify_all()
            return generation

    def sync(self, number: int, threads: int, expected: int) -> None:
        generation = self.arrive(number, threads, expected)
        with self.condition:
            opened = self.condition.wait_for(
                lambda: self.opened[number] > generation, gluon_model.TIMEOUT_S
            )
        if not opened:
            raise Deadlock(f"barrier {number}")


class Tiles:
    """A descriptor of (B, H, S, D): boxes of rows of one head."""

    def __init__(self, x: torch.Tensor, rows: int, width: int):
        x = x[None] if x.dim() == 3 else x
        self.x, self.rows, self.width = x.transpose(1, 2), rows, width
        self.dtype, self.layout = x.dtype, None

    def _parts(self, place):
        batch, head, row, column = (int(p) for p in place)
        sizes = self.x.shape
        if not (0 <= batch < sizes[0] and 0 <= head < sizes[1]):
            return None, None
        assert row >= 0 and column >= 0, "a tile begins before its tensor"
        inside = self.x[batch, head, row : row + self.rows, column : column + self.width]
        return inside, inside.shape

    def read(self, place):
        inside, shape = self._parts(place)
        box = torch.zeros(self.rows, self.width, dtype=self.dtype)
        if shape is not None:
            box[: shape[0], : shape[1]] = inside
        return box

    def write(self, place, data):
        inside, shape = self._parts(place)
        inside.copy_(data.reshape(self.rows, self.width)[: shape[0], : shape[1]])


class Groups(Tiles):
    """A descriptor of (B, S, H, D): boxes of rows, `heads` neighbours of each query."""

    def __init__(self, x: torch.Tensor, rows: int, width: int, heads: int):
        super().__init__(x, rows, width)
        self.heads = heads

    def _box(self, place):
        batch, query, head, column = (int(p) for p in place)
        assert query >= 0, "a tile begins before its tensor"
        queries = slice(query, query + self.rows // self.heads)
        found = self.x.transpose(1, 2)[batch, queries, head : head + self.heads]
        assert found.shape[1] == self.heads
        return found[..., column : column + self.width]

    def read(self, place):
        inside = self._box(place)
        box = torch.zeros(self.rows // self.heads, self.heads, self.width, dtype=self.dtype)
        box[: inside.shape[0], :, : inside.shape[2]] = inside
        return box

    def write(self, place, data):
        inside = self._box(place)
        box = data.reshape(-1, self.heads, self.width)
        inside.copy_(box[: inside.shape[0], :, : inside.shape[2]])


class Pieces:
    """A ring of tiles as pieces of some rows and 64 columns, as they lie in shared memory."""

    def __init__(self, tiles: Memory, rows: int):
        self.data, self.rows = tiles.data, rows

    def index(self, i):
        height, width = self.data.shape[-2:]
        pages, panels = height // self.rows, width // 64
        slot, rest = divmod(int(i), panels * pages)
        panel, page = divmod(rest, pages)
        rows = slice(page * self.rows, (page + 1) * self.rows)
        return Memory(self.data[slot][..., rows, panel * 64 : (panel + 1) * 64])


_cta = SimpleNamespace(barriers={}, programs=1)  # of each program


def _columns(x):
    """What is left of the numbers of columns in fours without a thread's pair."""
    return 8 * torch.arange(x.shape[1])[:, None, None] + torch.arange(2)


def _assembly(text, constraints, args, **kwargs):
    if "vote" in text:  # see `weights.rescaled`
        return _array(args[0] * args[1])
    if "mul.f32 x, " in text:  # see `logits.logits`
        x = args[0] * args[1]
        if "rcp.approx" in text:
            x = args[2] + args[3] / (torch.exp2(x) + 1)
        if "abs.f32" in text:
            x = x + args[-1] * (args[-2] - _columns(x)).abs()
        return _array(x)
    if "0fFF800000" in text:  # see `logits.masked`
        x, *limits = args
        column = _columns(x)
        seen = torch.ones_like(x, dtype=torch.bool)
        if "setp.ge" in text:
            seen = seen & (limits[-1] >= column)
        if "setp.le" in text:
            seen = seen & (limits[0] <= column)
        return _array(x.where(seen, torch.full_like(x, -torch.inf)))
    found = re.search(r"bar\.(arrive|sync) \$1, (\d+)", text)
    if found:
        number, threads = int(args[0].flatten()[0]), args[0].numel()
        getattr(_cta.barriers[gluon_model.program()], found[1])(number, threads, int(found[2]))
    return args[0]


def _is_array(x) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() > 0


def _either(pick, elementwise):
    def choose(a, b):
        if _is_array(a) or _is_array(b):
            arrays = (x if isinstance(x, torch.Tensor) else torch.tensor(x) for x in (a, b))
            return elementwise(*arrays)
        return pick(int(a), int(b))

    return choose


def _load(pointer, mask=None, other=None, cache_modifier=""):
    flat = pointer.x.view(-1)
    if mask is False:
        return other
    if not _is_array(pointer.offset):
        return flat[int(pointer.offset)].item()
    if mask is None:
        return _array(flat[pointer.offset])
    index, mask = torch.broadcast_tensors(pointer.offset, torch.as_tensor(mask))
    found = flat[index.where(mask, torch.zeros_like(index))]
    return _array(found.where(mask, torch.full_like(found, other)))


def _store(pointer, value, mask=None):
    flat = pointer.x.view(-1)
    if not _is_array(pointer.offset):
        flat[int(pointer.offset)] = value
        return
    index, value, mask = torch.broadcast_tensors(pointer.offset, value, mask)
    chosen = mask.bool()
    assert int(index[chosen].min() if chosen.any() else 0) >= 0
    flat[index[chosen]] = value[chosen].to(flat.dtype)


def _wait(num_outstanding, deps):
    return gluon_model._mma_wait(num_outstanding, deps).as_subclass(Array)


def _reduce(function):
    def reduce(x, dim):
        found = function(x, dim)
        return int(found) if found.dim() == 0 else found

    return reduce


def _array(x) -> Array:
    return x.as_subclass(Array)


_LANGUAGE = {
    "minimum": _either(min, torch.minimum),
    "maximum": _either(max, torch.maximum),
    "max": _reduce(lambda x, dim: x.amax(dim)),
    "sum": _reduce(lambda x, dim: x.sum(dim)),
    "log2": torch.log2,
    "join": lambda a, b: torch.stack((a, b), -1),
    "zeros_like": torch.zeros_like,
    "abs": torch.abs,
    "reshape": lambda x, shape: x.reshape(tuple(shape)),
    "permute": lambda x, order: x.permute(tuple(order)),
    "split": lambda x: (x[..., 0], x[..., 1]),
    "convert_layout": lambda x, layout, assert_trivial=False: x,
    "cast": lambda x, dtype: x,
    "full": lambda shape, value, dtype, layout: _array(
        torch.full(tuple(shape), value, dtype=dtype)
    ),
    "full_like": torch.full_like,
    "zeros": lambda shape, dtype, layout: _array(torch.zeros(tuple(shape), dtype=dtype)),
    "arange": lambda start, end, layout=None: _array(torch.arange(start, end)),
    "load": _load,
    "store": _store,
    "num_programs": lambda axis: _cta.programs,
    "inline_asm_elementwise": _assembly,
    "SwizzledSharedLayout": lambda *args: None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
for _name, _value in _LANGUAGE.items():
    setattr(gl, _name, _value)
sys.modules["triton.experimental.gluon.language.nvidia.hopper"].warpgroup_mma_wait = _wait
sys.modules["triton"].knobs = SimpleNamespace()
sys.modules["triton"].language = sys.modules["triton.language"]
sys.modules["triton.language.extra"] = types.ModuleType("triton.language.extra")
sys.modules["triton.language.extra.cuda"] = SimpleNamespace(
    gdc_launch_dependents=None, gdc_wait=None
)
Memory.reshape = lambda self, shape: Memory(self.data.reshape(tuple(shape)))

from onchip.kernels import gluon_pieces  # noqa: E402
from onchip.kernels.hopper import arguments, consumer, forward, producer  # noqa: E402
from onchip.kernels.hopper.config import Config, choose_forward  # noqa: E402
from tests.portable_cases import Case, build  # noqa: E402

# A program's roles are threads of the model; nobody else writes meanwhile.
gluon_pieces.wait_for_all = lambda: None
producer.in_pieces = lambda tiles, descriptor, number, rows: Pieces(tiles, rows)
# Words are assembly; here P stays what they hold.
consumer.packed = lambda weights, dtype, code: weights.to(dtype)
consumer.operand = lambda p, dtype, code: p


_sequence_at = producer.sequence_at


def _checked_sequence_at(rank, order, sorts):
    found = _sequence_at(rank, order, sorts)
    assert found == _cta.order[rank], f"sequence {found} where {_cta.order[rank]} is due"
    return found


producer.sequence_at = _checked_sequence_at


def _order(seqused_k: torch.Tensor | None) -> list[int]:
    """Sequences as producers should take them: the longest first, if they differ and are long."""
    lengths = [] if seqused_k is None else seqused_k.tolist()
    every, longest = list(range(len(lengths))), max(lengths, default=0)
    differ = longest * len(lengths) * 4 > sum(lengths) * 5
    if differ and longest * 8 > len(lengths) ** 2:
        every.sort(key=lambda i: -lengths[i])
    return every


def _packed_in_range(weights, sums, p, acc, l, m, dtype):
    """`weights.packed_in_range`, whose P is what words hold."""
    top = sums.amax(1, keepdim=True).expand(sums.shape)
    rise = torch.floor(torch.log2(top)) - 5.0
    rise = torch.where((top >= 2.0**15) & (top < math.inf), rise, torch.zeros_like(top))
    factor = torch.exp2(-rise)
    return (weights * factor[:, :1]).to(dtype), acc * factor[:, :1], l * factor, m + rise


consumer.packed_in_range = _packed_in_range


def run(problem, tensors, programs: int, config: Config | None = None, delay: float | None = None):
    """out, lse and counters as the kernel leaves them; what it does not write stays NaN."""
    code = arguments.code_for(config or choose_forward(problem), problem, programs)
    sizes = arguments.sizes_of(code, problem, programs)
    q, k, v = tensors.q, tensors.k, tensors.v
    out = torch.full((*q.shape[:-1], problem.head_dim_v), torch.nan, dtype=q.dtype)
    rows = q.shape[:1] if q.dim() == 3 else q.shape[:2]
    lse = torch.full((*rows[:-1], problem.num_heads, rows[-1]), torch.nan)
    num_tiles = sizes[arguments._NUM_TILES]
    num_counters = num_tiles * code.warpgroups * 2 * code.in_pieces
    counters = torch.zeros(4 + num_counters, dtype=torch.int32)
    partials = torch.full((num_tiles * code.block_m * (code.width_v + 2),), torch.nan)
    height, width = code.box
    width_o = code.width_v // 2 if code.q_buffers == 1 else code.width_v
    rows = [Tiles(x, 64, w) for x, w in ((q, code.width), (out, width_o))]
    if code.heads > 1:
        rows = [Groups(x, 64, w, code.heads) for x, w in ((q, code.width), (out, width_o))]
    descriptors = (
        rows[0],
        Tiles(k, height, width or code.width),
        Tiles(v, height, width or code.width_v),
        rows[1],
    )
    optional = (*arguments.lengths_of(tensors), tensors.alibi_slopes, tensors.sinks)
    pointers = [Pointer(x) for x in (out, lse, counters)]
    pointers += [None if x is None else Pointer(x) for x in optional]
    numbers = (*arguments.factors_of(problem), arguments.stride_of(tensors.block_table), *sizes)
    _cta.programs = min(programs, num_tiles)
    _cta.order = _order(tensors.seqused_k)
    _cta.barriers = {program: NamedBarriers() for program in range(_cta.programs)}
    given = (*descriptors, *pointers, *numbers, Pointer(partials), code)
    if delay is None:
        gluon_model.launch(forward.attn_fwd_hopper, _cta.programs, *given)
    else:
        run_abreast = gluon_model.launch_abreast
        run_abreast(forward.attn_fwd_hopper, _cta.programs, *given, delay=delay)
    assert int(counters[0]) == 0, "the counter of tiles is not as it was found"
    assert not counters[4:].any(), "counters of pieces are not as they were found"
    return out, lse, counters[:4]


def main(cases_file: str, out_file: str) -> None:
    with open(cases_file) as file:
        entries = json.load(file)
    found = []
    for entry in entries:
        fields = {n: tuple(x) if isinstance(x, list) else x for n, x in entry["case"].items()}
        call = build(Case(**fields), seed=entry.get("seed", 0))
        spoil(call, entry.get("poison"))
        raise_keys(call, entry.get("rise"))
        config = Config(**entry["config"]) if "config" in entry else None
        try:
            programs, delay = entry.get("programs", 3), entry.get("delay")
            found.append(run(call.problem, call.tensors, programs, config, delay))
        except (AssertionError, Deadlock) as error:
            found.append(f"{type(error).__name__}: {error}")
    torch.save(found, out_file)


def spoil(call, poison: float | None) -> None:
    """Puts a value that is not finite into two rows of V of the first sequence. Mutates: call."""
    if poison is not None:
        for x in (call.tensors.v[0], call.sequences[0][2]):
            x[30, 0, 3] = x[155, 0] = poison


def raise_keys(call, rise: float | None) -> None:
    """Makes logits of the first keys, which are walked last, much larger. Mutates: call."""
    if rise is not None:
        for x in (call.tensors.k[0], call.sequences[0][1]):
            x[:40] *= rise


if __name__ == "__main__":
    main(*sys.argv[1:])
