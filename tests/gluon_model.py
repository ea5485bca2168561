"""Gluon's Hopper subset in torch, so that kernels written in it run without a GPU.

Import this module before the kernels, in a process of its own: it takes the place of Triton.
Every role of a CTA is a thread. What the hardware does later is done as late as the program
allows: a wgmma reads its operands when it is waited for, a TMA store reads shared memory when
`store_wait` (or the role's end) says that it must have, and shared memory begins as NaN. So a
buffer that is handed back too early gives wrong numbers, and a forgotten arrival a deadlock.
"""

from __future__ import annotations

import math
import random
import sys
import threading
import time
import types
from collections.abc import Callable
from types import SimpleNamespace

import torch

TIMEOUT_S = 20.0
_role = threading.local()


class Deadlock(RuntimeError):
    """A role waited for longer than any work takes."""


class Memory:
    """Shared memory: a view of a tensor."""

    def __init__(self, data: torch.Tensor, barriers: list | None = None):
        self.data = data
        self.barriers = barriers

    @property
    def dtype(self):
        return self.data.dtype

    def index(self, i):
        if self.barriers is not None:
            return self.barriers[int(i)]
        return Memory(self.data[int(i)])

    def slice(self, start, length, dim=0):
        return Memory(self.data.narrow(dim, int(start), int(length)))

    def permute(self, order):
        return Memory(self.data.permute(tuple(order)))

    def _reinterpret(self, dtype, shape, layout):
        assert self.data.is_contiguous()
        flat = self.data.view(-1).view(dtype)
        return Memory(flat[: math.prod(shape)].view(tuple(shape)))

    def load(self, layout):
        return self.data.clone()

    def store(self, x):
        assert x.shape == self.data.shape, (x.shape, self.data.shape)
        self.data.copy_(x)


class Barrier:
    """An mbarrier: turns when all arrivals and all bytes have come."""

    def __init__(self):
        self.condition = threading.Condition()
        self.count = self.pending = self.bytes = self.phase = 0

    def init(self, count):
        self.count = self.pending = count

    def _turn(self):
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            self.condition.notify_all()

    def arrive(self, count=1):
        with self.condition:
            assert self.pending >= count, "more arrivals than the barrier counts"
            self.pending -= count
            self._turn()

    def expect(self, size):
        with self.condition:
            self.bytes += size
            assert self.pending > 0, "an expectation of a full barrier"
            self.pending -= 1
            self._turn()

    def complete(self, size):
        with self.condition:
            self.bytes -= size
            self._turn()

    def wait(self, parity):
        with self.condition:
            # Waiting for parity p passes when the phase of parity p is over.
            passed = self.condition.wait_for(lambda: self.phase % 2 != parity, TIMEOUT_S)
        if not passed:
            raise Deadlock(f"{_role.name} waits for parity {parity}")


class Pending:
    """A wgmma under way."""

    def __init__(self, a, b, acc, use_acc):
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.result = None
        _role.products.append(self)

    def finish(self):
        if self.result is None:
            a = self.a.data if isinstance(self.a, Memory) else self.a
            acc = self.acc
            if isinstance(acc, Pending):
                assert acc.result is not None, "products of one accumulator finish in order"
                acc = acc.result
            self.result = a.float() @ self.b.data.float()
            if self.use_acc:
                self.result = self.result + acc
        return self.result


def _mma(a, b, acc, use_acc=True, is_async=False):
    assert is_async
    pending = Pending(a, b, acc, bool(use_acc))
    shape = acc.acc_shape if isinstance(acc, Pending) else tuple(acc.shape)
    pending.acc_shape = shape
    rows = (a.data if isinstance(a, Memory) else a).shape
    assert (rows[0], b.data.shape[1]) == shape, (rows, b.data.shape, shape)
    return pending


def _mma_wait(num_outstanding, deps):
    while len(_role.products) > num_outstanding:
        _role.products.pop(0).finish()
    for x in deps:
        assert x.result is not None, "used before it was waited for"
    found = [x.result.clone() for x in deps]
    return found[0] if len(found) == 1 else tuple(found)


class Descriptor:
    """(1, B, S, H, D) or, packed, (T, H, D); a line of statistics; or rows of a float32 sum."""

    def __init__(self, x: torch.Tensor, box: list[int]):
        self.x, self.box = x, box
        self.dtype = x.dtype
        self.layout = None
        self.block_shape = box

    def _span(self, place):
        if len(place) < 5:
            return self.x, [int(p) for p in place]
        zero, batch, row, head, column = map(int, place)
        if self.x.dim() == 4:
            assert zero == 0
            rows = self.x[batch, :, head]
            return rows, [row, column]
        assert zero == 1 << 30
        end = batch
        # The row is 2^30 - length + its place in the sequence, which ends before `end`.
        return (self.x[:, head], end), [row - (1 << 30) + end, column]

    def read(self, place):
        rows, first = self._span(place)
        if isinstance(rows, tuple):
            data, end = rows
            rows = data[:end]
        start = first[0]
        if rows.dim() == 1:
            return rows[start : start + self.box[0]]
        height, width = (self.box[2], self.box[4]) if len(self.box) == 5 else self.box
        column = first[1]
        piece = rows[start : start + height, column : column + width]
        out = torch.zeros(height, width, dtype=self.x.dtype)
        out[: piece.shape[0], : piece.shape[1]] = piece
        return out

    def write(self, place, data, add=False):
        rows, first = self._span(place)
        if isinstance(rows, tuple):
            rows = rows[0][: rows[1]]
        height, width = (self.box[2], self.box[4]) if len(self.box) == 5 else self.box
        data = data.reshape(height, width)
        to = rows[first[0] : first[0] + height, first[1] : first[1] + width]
        data = data[: to.shape[0], : to.shape[1]]
        with _memory_lock:
            to.add_(data) if add else to.copy_(data)


_memory_lock = threading.RLock()


def _load(desc, place, bar, to):
    data = desc.read(place)
    to.data.copy_(data.reshape(to.data.shape))
    bar.complete(data.numel() * data.element_size())


def _later(action: Callable[[], None]) -> None:
    _role.stores.append(action)


def _store_wait(pendings):
    while len(_role.stores) > pendings:
        _role.stores.pop(0)()


class Pointer:
    """A tensor's memory from an offset on."""

    def __init__(self, x, offset=0):
        self.x, self.offset = x, offset

    @property
    def dtype(self):
        return types.SimpleNamespace(element_ty=self.x.dtype)

    def __add__(self, other):
        return Pointer(self.x, self.offset + other)


def _gl_load(pointer, mask=None, other=None, cache_modifier=""):
    flat = pointer.x.view(-1)
    if isinstance(pointer.offset, torch.Tensor):
        index = pointer.offset
        if mask is not None:
            index = index.where(mask, torch.zeros_like(index))
        found = flat[index]
        return found if mask is None else found.where(mask, torch.full_like(found, other))
    return int(flat[pointer.offset])


def _gl_store(pointer, value, mask=None):
    with _memory_lock:
        mask = torch.ones_like(value, dtype=torch.bool) if mask is None else mask
        mask = mask.expand(value.shape)
        index = (pointer.offset + torch.zeros_like(value, dtype=torch.int64))[mask]
        pointer.x.view(-1)[index] = value[mask]


def _atomic_add(pointer, value, mask=None, sem=None):
    if mask is not None:  # one thread at most
        if not mask.any():
            return torch.zeros_like(value)
        one = pointer.x, pointer.offset[mask].item()
        return torch.full_like(value, _atomic_add(Pointer(*one), value[mask].item()))
    with _memory_lock:
        flat = pointer.x.view(-1)
        before = int(flat[pointer.offset])
        flat[pointer.offset] += value
    if value == 0:
        threading.Event().wait(0.0005)
    return before


def _atomic_cas(pointer, expected, value, sem=None):
    with _memory_lock:
        flat = pointer.x.view(-1)
        before = int(flat[pointer.offset])
        if before == expected:
            flat[pointer.offset] = value
    return before


def _where(condition, a, b):
    if isinstance(condition, torch.Tensor):
        kind = next((x for x in (a, b) if isinstance(x, torch.Tensor)), condition.float())
        a, b = (x if isinstance(x, torch.Tensor) else torch.full_like(kind, x) for x in (a, b))
        return torch.where(condition, a, b)
    return a if condition else b


def _run_roles(functions_and_args, warps, registers):
    assert len(warps) == len(registers) == len(functions_and_args) - 1
    program, errors = _role.program, []

    def run(function, arguments, warps_of):
        _role.program, _role.name, _role.warps = program, function.__name__, warps_of
        _role.products, _role.stores = [], []
        try:
            function(*arguments)
            assert not _role.products, f"{function.__name__} leaves products unfinished"
            _store_wait(0)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(f, args, w))
        for (f, args), w in zip(functions_and_args, [4, *warps], strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        real = [e for e in errors if not isinstance(e, Deadlock)]
        raise (real or errors)[0]


def set_program(program: int) -> None:
    """Makes this thread a program: for device functions that are called on their own."""
    _role.program = program


def program() -> int:
    """This thread's program."""
    return _role.program


def launch(kernel, programs: int, *arguments) -> None:
    """Runs a kernel's programs one after the other, in the order in which a GPU starts them."""
    for program in range(programs):
        _role.program = program
        kernel(*arguments)


def launch_abreast(kernel, programs: int, *arguments, delay: float = 0.0) -> None:
    """Runs all programs at once: for kernels whose programs wait for each other.

    Each begins up to `delay` seconds late.
    """
    errors = []

    def run(program):
        _role.program = program
        time.sleep(random.uniform(0.0, delay))
        try:
            kernel(*arguments)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(programs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _allocate(dtype, shape, layout=None):
    if layout == "barriers":
        return Memory(torch.empty(0), [Barrier() for _ in range(shape[0])])
    return Memory(torch.full(tuple(shape), float("nan")).to(dtype))


def _assembly(text, *args, **kwargs):
    """Only the waits that kernels write as assembly."""
    if "cp.async.bulk.wait_group" in text:
        _store_wait(int(text.split(";")[0].split()[-1]))
    elif "bar.sync" in text:
        raise NotImplementedError("replace the function that holds the named barrier")


def _jit(function=None, **options):
    return function if function is not None else (lambda f: f)


def _layout(*args, **kwargs):
    return (args, tuple(kwargs.items()))


def _new_language() -> types.ModuleType:
    gl = types.ModuleType("triton.experimental.gluon.language")
    both = {
        "minimum": lambda a, b: min(a, b),
        "maximum": lambda a, b: max(a, b),
        "where": _where,
        "exp2": torch.exp2,
        "zeros": lambda shape, dtype, layout: torch.zeros(tuple(shape), dtype=dtype),
        "full": lambda shape, value, dtype, layout: torch.full(tuple(shape), value, dtype=dtype),
        "arange": lambda start, end, layout=None: torch.arange(start, end),
        "expand_dims": lambda x, dim: x.unsqueeze(dim),
        "convert_layout": lambda x, layout, assert_trivial=False: x,
        "join": lambda a, b: torch.stack((a, b), -1),
        "load": _gl_load,
        "atomic_add": _atomic_add,
        "atomic_cas": _atomic_cas,
        "program_id": lambda axis: _role.program,
        "num_warps": lambda: getattr(_role, "warps", 4),
        "thread_barrier": lambda: None,
        "static_range": range,
        "allocate_shared_memory": _allocate,
        "warp_specialize": _run_roles,
        "inline_asm_elementwise": _assembly,
        "store": _gl_store,
        "cast": lambda x, dtype, bitcast=False: x.view(dtype) if bitcast else x,
        "constexpr": lambda x: x,
        "NVMMASharedLayout": _layout,
        "SharedLinearLayout": _layout,
        "NVMMADistributedLayout": _layout,
        "DistributedLinearLayout": _layout,
        "DotOperandLayout": _layout,
        "SliceLayout": _layout,
        "BlockedLayout": _layout,
        "tensor": object,
        "shared_memory_descriptor": Memory,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float8e4nv": torch.float8_e4m3fn,
        "int16": torch.int16,
        "int32": torch.int32,
        "int64": torch.int64,
    }
    for name, value in both.items():
        setattr(gl, name, value)
    return gl


def install() -> SimpleNamespace:
    """Puts this module in Triton's place. Mutates: sys.modules."""
    gl = _new_language()
    mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: "barriers",
        init=lambda bar, count: bar.init(count),
        expect=lambda bar, size: bar.expect(int(size)),
        arrive=lambda bar, count=1, pred=True: bar.arrive(count) if pred else None,
        wait=lambda bar, parity, pred=True: bar.wait(int(parity)) if pred else None,
    )
    tma = SimpleNamespace(
        async_copy_global_to_shared=_load,
        async_copy_shared_to_global=lambda d, place, x: _later(lambda: d.write(place, x.data)),
        store_wait=_store_wait,
    )
    modules = {
        "triton": {"jit": _jit, "cdiv": lambda a, b: -(-a // b)},
        "triton._C": {},
        "triton._C.libtriton": {"ir": None},
        "triton.language": {"constexpr": lambda x: x, "int64": int, "float32": float},
        "triton.language.core": {"_aggregate": lambda cls: cls},
        "triton.experimental": {},
        "triton.experimental.gluon": {
            "jit": _jit, "constexpr_function": lambda f: f, "language": gl,
        },
        "triton.experimental.gluon.language._core": {"builtin": lambda f: f},
        "triton.experimental.gluon.language.nvidia": {},
        "triton.experimental.gluon.language.nvidia.hopper": {
            "fence_async_shared": lambda: None, "mbarrier": mbarrier, "tma": tma,
            "warpgroup_mma": _mma, "warpgroup_mma_wait": _mma_wait,
        },
        "triton.experimental.gluon.nvidia": {},
        "triton.experimental.gluon.nvidia.hopper": {"TensorDescriptor": Descriptor},
    }  # fmt: skip
    sys.modules[gl.__name__] = gl
    for name, content in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        sys.modules[name] = module
    return SimpleNamespace(gl=gl)


def reduce_add(descriptor, coordinates, source):
    """`tma_reduce_add` of the model."""
    place = [int(x) for x in coordinates]
    _later(lambda: descriptor.write(place, source.data.clone(), add=True))


def wait_turn(counter, turn):
    """`gluon_backward.wait_turn` of the model."""
    while _atomic_add(counter, 0) < turn:
        pass
