"""Launches of Triton and Gluon kernels without Triton's own dispatch.

``kernel[grid](...)`` looks at every argument of every call to find the compiled variant that
fits: 40 us and more with the arguments of an attention kernel (H200's host, 2026-11-29). Calls
of one shape differ in addresses alone, so a `Launch` is resolved once for a shape, by a first
launch through Triton, and then hands its arguments straight to the compiled kernel.

Whoever keeps a `Launch` promises that every call has arguments of the same types, None in the
same places, pointers of the same alignment to 16 bytes, and integers that the kernel does not
specialise on (`do_not_specialize`), and descriptors of the same shape and strides.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
import triton
from triton import knobs

from onchip.bounded import Bounded

#: Releases whose compiled kernels are called as `Launch` does; others go through Triton.
_DIRECT = {(3, 6)}
_MAX_DESCRIBED = 256  # addresses that a launch keeps tensor maps of


class Address:
    """What a tensor descriptor wants of a tensor."""

    __slots__ = ("_place",)

    def __init__(self, place: int):
        self._place = place

    def data_ptr(self) -> int:
        return self._place


class Described:
    """A tensor descriptor for launches after the first: what Triton reads of one, unchecked.

    Args:
        base: the tensor whose memory it describes, or its address.
        shape: sizes, outermost first.
        strides: in elements; the last is 1.
    """

    __slots__ = ("base", "padding", "shape", "strides")

    def __init__(self, base: torch.Tensor | Address, shape: list[int], strides: list[int]):
        self.base = base
        self.shape = shape
        self.strides = strides
        self.padding = "zero"


class Launch:
    """One compiled variant of a kernel on one grid and device.

    Args:
        kernel: the jitted function.
        grid: programs in up to three dimensions.
        device: index of the GPU that the arguments lie on; -1 in the interpreter.
        options: Triton's launch options (num_warps, num_stages, ...).
    """

    __slots__ = (
        "_compiled",
        "_described",
        "_device",
        "_grid",
        "_head",
        "_kernel",
        "_metas",
        "_options",
        "_run",
    )

    def __init__(self, kernel, grid: tuple[int, ...], device: int, **options):
        self._kernel = kernel
        self._grid = (*grid, 1, 1)[:3]
        self._device = device
        # exp2(s * scale - m) is one instruction where it is fused; Triton 3.10 asks to say so.
        self._options = {"enable_fp_fusion": True, **options}
        self._compiled = self._run = None
        self._head = ()
        self._metas = ()
        self._described: Bounded[tuple[int, int], list] = Bounded(_MAX_DESCRIBED)

    @property
    def is_resolved(self) -> bool:
        """Whether later calls take the short way; the first needs real `TensorDescriptor`s."""
        return self._compiled is not None

    @property
    def has_direct_way(self) -> bool:
        """Whether `prepared` gives anything."""
        return self._run is not None

    @property
    def is_direct(self) -> bool:
        """Whether what `prepared` gives may be called now."""
        return (
            self._run is not None
            and torch._C._cuda_getDevice() == self._device
            and not _has_hooks()
        )

    @property
    def takes_addresses(self) -> bool:
        """Whether what `on` gives may be called now."""
        # As `is_direct`, in one step: a decode's host time is counted in such.
        return (
            self._run is not None
            and not self._metas
            and torch._C._cuda_getDevice() == self._device
            and not _has_hooks()
        )

    def on(self, stream: int) -> tuple[Callable, tuple]:
        """The compiled launcher and its first arguments, only while `takes_addresses`.

        It launches when called with these and then every parameter, tensors as addresses.
        """
        assert self._run is not None
        return self._run, (*self._grid, stream, *self._head)

    def mapped(self, number: int, address: int, like: Described) -> list:
        """What stands for descriptor `number`, where tensors are addresses.

        Only while `is_direct`.

        Args:
            number: of the kernel's descriptors, in their order.
            address: where its memory begins.
            like: a descriptor of the same shape and strides.
        """
        found = self._described.get((number, address))
        if found is None:
            found = self._map(Described(Address(address), like.shape, like.strides), number)
        return found

    def __call__(self, *args) -> None:
        """Launches on the device's current stream.

        Args:
            *args: every parameter of the kernel in its order, constexprs included.
        """
        # Triton launches on the current device.
        if self._device >= 0 and torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                return self._launch(args)
        return self._launch(args)

    @property
    def stream(self) -> int:
        """The device's current stream."""
        return torch._C._cuda_getCurrentRawStream(self._device) if self._device >= 0 else 0

    def prepared(self, *args) -> tuple[Callable, tuple] | None:
        """The compiled launcher and what it takes on this stream; None if only Triton can launch.

        It launches when called with these, only while `is_direct`.

        Args:
            *args: as of a call. Their addresses are in the result, nothing keeps them alive.
        """
        if self._run is None:
            return None
        return self._run, (*self._grid, self.stream, *self._head, *self._flat(args))

    def _launch(self, args: tuple) -> None:
        if self._compiled is None:
            self._resolve(args)
        elif self._run is None or _has_hooks():
            self._compiled[self._grid](*args)
        else:
            stream = torch._C._cuda_getCurrentRawStream(self._device)
            self._run(*self._grid, stream, *self._head, *self._flat(args))

    def _flat(self, args: tuple) -> list:
        """Arguments as the compiled launcher wants them: addresses, tensor maps with sizes."""
        flat = []
        number = 0
        for x in args:
            kind = type(x)
            if kind is torch.Tensor:
                flat.append(x.data_ptr())
            elif kind is Described:
                flat += self._map(x, number)
                number += 1
            elif isinstance(x, torch.Tensor):  # a Parameter: its address, not the object
                flat.append(x.data_ptr())
            else:
                flat.append(x)
        return flat

    def _map(self, x: Described, number: int) -> list:
        """A tensor map and the sizes that go with it, kept by address."""
        place = (number, x.base.data_ptr())
        found = self._described.get(place)
        if found is None:
            from triton.backends.nvidia.driver import make_tensordesc_arg

            found = self._described[place] = make_tensordesc_arg(x, self._metas[number])
        return found

    def _resolve(self, args: tuple) -> None:
        compiled = self._kernel[self._grid](*args, **self._options)
        if not hasattr(compiled, "packed_metadata"):  # the interpreter compiles nothing
            return
        self._compiled = compiled
        release = tuple(int(part) for part in triton.__version__.split(".")[:2])
        if release in _DIRECT and not torch.version.hip:
            self._take_direct_way(compiled)

    def _take_direct_way(self, compiled) -> None:
        """Finds the launcher behind the wrapper that describes tensors anew in every launch."""
        launcher = compiled.run
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return
        self._metas = tuple(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        run = launcher.launch
        if self._metas:
            run = inspect.getclosurevars(run).nonlocals.get("launcher")
        if run is None or None in self._metas:
            return
        self._head = (
            compiled.function,
            launcher.launch_cooperative_grid,
            launcher.launch_pdl,
            None,
            None,
            compiled.packed_metadata,
            None,
            None,
            None,
        )
        self._run = run  # last: another thread may look at it


def _has_hooks() -> bool:
    """Whether a profiler of Triton's wants to hear of launches."""
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False
