"""What Gluon renamed between the releases of Triton that this package runs on.

The names are chosen where they are defined: Triton 3.6 looks up the names in both branches of
an `if` inside of a kernel.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (  # noqa: F401
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: F401

if hasattr(tma, "async_load"):

    @gluon.jit
    def tma_load(descriptor, place, barrier, tile):
        """Starts to copy a tile of global memory; the barrier counts its bytes (3.8 and later)."""
        tma.async_load(descriptor, place, barrier, tile)

    @gluon.jit
    def tma_store(descriptor, place, tile):
        """Starts to copy a tile to global memory; `tma.store_wait` waits for it."""
        tma.async_store(descriptor, place, tile)

else:

    @gluon.jit
    def tma_load(descriptor, place, barrier, tile):
        """Starts to copy a tile of global memory; the barrier counts its bytes (3.6, 3.7)."""
        tma.async_copy_global_to_shared(descriptor, place, barrier, tile)

    @gluon.jit
    def tma_store(descriptor, place, tile):
        """Starts to copy a tile to global memory; `tma.store_wait` waits for it."""
        tma.async_copy_shared_to_global(descriptor, place, tile)


if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def in_pieces(tiles, descriptor, NUMBER: gl.constexpr, ROWS: gl.constexpr):
        """The same shared memory as so many tiles of a descriptor, 64 columns each (3.9)."""
        shape: gl.constexpr = [NUMBER, 1, 1, ROWS, 64]
        return tiles.reinterpret(descriptor.dtype, shape, descriptor.layout)

else:

    @gluon.jit
    def in_pieces(tiles, descriptor, NUMBER: gl.constexpr, ROWS: gl.constexpr):
        """The same shared memory as so many tiles of a descriptor, 64 columns each."""
        shape: gl.constexpr = [NUMBER, 1, 1, ROWS, 64]
        return tiles._reinterpret(descriptor.dtype, shape, descriptor.layout)
