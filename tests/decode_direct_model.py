"""Script: runs the decode of one query in torch, in place of Gluon; saves what it wrote.

Programs run one after another, in an order of which no result may depend. A copy to shared memory
reads and arrives when it is waited for, and no sooner. Layouts play no part here.

Usage: decode_direct_model.py CASES.json OUT.pt
"""

from __future__ import annotations

import json
import random
import sys
import types
from dataclasses import replace
from types import SimpleNamespace

from tests import gluon_model

gl = gluon_model.install().gl

import torch  # noqa: E402


class Address(gluon_model.Pointer):
    """A tensor's memory from an offset on, or from many."""

    def __add__(self, other):
        return Address(self.x, self.offset + other)

    __iadd__ = __add__


class Copies:
    """Copies to shared memory under way: what is there when they begin comes when they are waited
    for, so a program that reads its own store of a moment ago finds what was there before.
    """

    def __init__(self):
        self.groups, self.current = [], []

    def start(self, target, source, mask=None):
        self.current.append((target, _load(source, mask, 0.0)))

    def commit_group(self):
        self.groups.append(self.current)
        self.current = []

    def wait_group(self, pending):
        while len(self.groups) > pending:
            for target, found in self.groups.pop(0):
                target.data.copy_(found)


_copies = Copies()
_program = SimpleNamespace(ids=(0, 0), grid=(1, 1))


def _load(pointer, mask=None, other=None, cache_modifier=""):
    """Fails where a place that is not masked lies outside of the tensor."""
    flat, index = pointer.x.view(-1), torch.as_tensor(pointer.offset)
    if mask is None:
        assert bool((index >= 0).all()), "a place before the tensor"
        return flat[index].clone()
    index, mask = torch.broadcast_tensors(index, torch.as_tensor(mask))
    assert bool((index[mask] >= 0).all()), "a place before the tensor"
    found = flat[index.where(mask, torch.zeros_like(index))] if mask.any() else None
    spare = torch.full(index.shape, other, dtype=flat.dtype)
    return spare if found is None else found.where(mask, spare)


def _store(pointer, value, mask=True):
    value, index = torch.as_tensor(value), torch.as_tensor(pointer.offset)
    value, index, mask = torch.broadcast_tensors(value, index, torch.as_tensor(mask))
    assert bool((index[mask] >= 0).all()), "a place before the tensor"
    pointer.x.view(-1)[index[mask]] = value[mask].to(pointer.x.dtype)


def _atomic_add(pointer, value, sem=None):
    before = _load(pointer).clone()
    _store(pointer, before + value)
    return before


def _where(condition, a, b):
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    return torch.where(torch.as_tensor(condition), a, b)


def _assembly(text, *args, **kwargs):
    """The one that turns features."""
    assert "mul.rn.f32" in text, text
    x, c, other, s = args[1]
    return x * c + other * s


def _product(a, b):
    """In float32; bits that do not depend on how operands lie in memory."""
    return torch.matmul(a.float().contiguous(), b.float().contiguous())


_LANGUAGE = {
    "load": _load,
    "store": _store,
    "atomic_add": _atomic_add,
    "where": _where,
    "minimum": lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
    "maximum": lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
    "program_id": lambda axis: torch.tensor(_program.ids[axis]),
    "num_programs": lambda axis: _program.grid[axis],
    "num_warps": lambda: 4,
    "cdiv": lambda a, b: -(-a // b),
    "sum": lambda x, dim: x.sum(dim),
    "max": lambda x, dim: x.amax(dim),
    "min": lambda x, dim: x.amin(dim),
    "log2": torch.log2,
    "broadcast": lambda a, b: torch.broadcast_tensors(a, b),
    "reshape": lambda x, shape: x.reshape(shape),
    "associative_scan": lambda x, dim, add: x.cumsum(dim),
    "inline_asm_elementwise": _assembly,
    "SwizzledSharedLayout": gluon_model._layout,
}
for _name, _value in _LANGUAGE.items():
    setattr(gl, _name, _value)
_MODULES = {
    "triton.tools": {},
    "triton.tools.tensor_descriptor": {"TensorDescriptor": None},
    "triton.runtime": {},
    "triton.runtime.jit": {"constexpr_function": lambda f: f},
    "triton.experimental.gluon.language.nvidia.ampere": {
        "async_copy": SimpleNamespace(
            async_copy_global_to_shared=_copies.start,
            commit_group=_copies.commit_group,
            wait_group=_copies.wait_group,
        ),
        "mma_v2": lambda a, b, acc: _product(a, b) + acc,
    },
}  # fmt: skip
for _name, _content in _MODULES.items():
    _module = types.ModuleType(_name)
    _module.__dict__.update(_content)
    sys.modules[_name] = _module
torch.Tensor.type = property(lambda self: SimpleNamespace(layout=None))

from onchip.kernels.common import apply_rotary  # noqa: E402
from onchip.kernels.portable import decode_direct, decode_direct_tiles  # noqa: E402
from onchip.kernels.portable.decode_config import choose_decode  # noqa: E402
from onchip.kernels.portable.decode_spec import (  # noqa: E402
    decode_numbers,
    decode_spec,
    new_numbers,
)
from onchip.problem import Layout, NewTokens  # noqa: E402
from tests.portable_cases import Case, build  # noqa: E402

decode_direct._ask = lambda address, wanted: None
decode_direct.meet_other_launches = lambda: None
decode_direct.turned = lambda p, rows, mma: p
for _module in (decode_direct, decode_direct_tiles):
    _module.settle = lambda x: None


def run(problem, tensors, changes: dict, new: NewTokens | None = None, num_sms=4):
    """out and lse; what the kernel does not write stays NaN. Mutates: new's caches."""
    config = replace(choose_decode(problem, num_sms), **changes)
    assert config.direct
    t, spec = tensors, decode_spec(config, problem, tensors, new)
    grid = (problem.num_kv_heads, config.programs(problem, num_sms))
    out = torch.full(t.q.shape, torch.nan, dtype=t.q.dtype)
    lse = torch.full((problem.batch, problem.num_heads, 1), torch.nan)
    outs = torch.full((grid[0] * grid[1], spec.kept, spec.dim), torch.nan)
    stats = torch.full((*outs.shape[:2], 2), torch.nan)
    counters = torch.zeros(problem.batch * grid[0], dtype=torch.int32)
    optional = (None, t.seqused_k, t.leftpad_k, None, t.sinks, None, None)
    fresh = (None,) * 4 if new is None else (new.k, new.v, new.rotary_cos, new.rotary_sin)
    given = (t.q, t.k, t.v, out, lse, t.block_table, *optional, *fresh, outs, stats, counters)
    pointers = [None if x is None else Address(_flat(x)) for x in given]
    numbers = (*decode_numbers(spec, config, problem, tensors), num_sms, *new_numbers(spec, new))
    order = [(x, y) for x in range(grid[0]) for y in range(grid[1])]
    random.Random(0).shuffle(order)
    _program.grid = grid
    for _program.ids in order:
        decode_direct.attn_decode_direct(*pointers, *numbers, spec, config.num_stages)
        assert not any(_copies.groups) and not _copies.current, "copies nobody waited for"
    assert not counters.any(), "counters are not as they were found"
    return out, lse


def _flat(x: torch.Tensor) -> torch.Tensor:
    """The tensor's own memory in one dimension, which stores go to."""
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((span,), (1,))


def appended(tensors, pairs: int, interleaved: bool, spoilt: bool) -> NewTokens:
    """One new token a sequence, the last of those that were there; its place becomes NaN.

    Mutates: tensors, whose caches lack it and whose lengths are those before.
    """
    t, generator = tensors, torch.Generator().manual_seed(0)
    batch, (_, size, kv_heads, dim) = t.q.shape[0], t.k.shape
    t.seqused_k = t.seqused_k - 1
    if t.block_table is None:
        t.block_table = torch.arange(batch, dtype=torch.int32)[:, None]
    for b, length in enumerate(t.seqused_k.tolist()):
        t.k[t.block_table[b, length // size], length % size] = torch.nan
        t.v[t.block_table[b, length // size], length % size] = torch.nan
    if spoilt:  # as in a batch that is padded
        assert t.seqused_k[-1] == 0
        t.block_table[-1] = -1
    k, v = (
        torch.randn(batch, 1, kv_heads, dim, generator=generator).to(t.q.dtype) for _ in range(2)
    )
    angles = [torch.randn(4096, pairs, generator=generator) if pairs else None for _ in range(2)]
    return NewTokens(
        t.q, k, v, t.k, t.v, t.seqused_k, t.block_table, None, *angles, interleaved=interleaved
    )


def by_two(new: NewTokens, tensors):
    """Tensors as the attention would read them after an append of its own."""
    k, q, places = new.k, new.q, new.cache_seqlens[:, None].long()
    if new.rotary_cos is not None and new.rotary_sin is not None:
        angles = (new.rotary_cos, new.rotary_sin, places, new.interleaved)
        k, q = apply_rotary(k, *angles), apply_rotary(q, *angles)
    caches, size = (new.k_cache.clone(), new.v_cache.clone()), new.k_cache.shape[1]
    pages = new.block_table.long().gather(1, places // size)
    stored = pages[:, 0] >= 0
    for cache, x in zip(caches, (k, new.v), strict=True):
        cache[pages[stored], (places % size)[stored]] = x[stored]
    lengths = new.cache_seqlens + stored.int()
    return replace(tensors, q=q, k=caches[0], v=caches[1], seqused_k=lengths)


def main(cases_file: str, out_file: str) -> None:
    with open(cases_file) as file:
        entries = json.load(file)
    found = []
    for entry in entries:
        fields = {n: tuple(x) if isinstance(x, list) else x for n, x in entry["case"].items()}
        call = build(Case(**{**fields, "dtype": getattr(torch, entry["dtype"])}))
        problem, tensors = replace(call.problem, arch="sm_90"), call.tensors
        try:
            if "new" not in entry:
                found.append({"got": run(problem, tensors, entry["config"])})
                continue
            new = appended(tensors, **entry["new"])
            pages, size = len(tensors.k), tensors.k.shape[1]
            problem = replace(problem, layout_k=Layout.PAGED, page_size=size, num_pages=pages,
                              seqlen_k=size * new.block_table.shape[1])  # fmt: skip
            other = by_two(new, tensors)
            got = run(problem, tensors, entry["config"], new)
            wanted = run(problem, other, entry["config"])
            caches = {"caches": (tensors.k, tensors.v), "wanted_caches": (other.k, other.v)}
            found.append({"got": got, "wanted": wanted} | caches)
        except (AssertionError, IndexError) as error:
            found.append(f"{type(error).__name__}: {error}")
    torch.save(found, out_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
