"""What Gluon renamed between the releases of Triton that this package runs on; barriers, waits.

The names are chosen where they are defined: Triton 3.6 looks up the names in both branches of
an `if` inside of a kernel.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
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
    def as_tile(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """The same shared memory as a tile of another type and shape (3.9)."""
        return memory.reinterpret(DTYPE, SHAPE, LAYOUT)

    @gluon.jit
    def as_tiles(memory, descriptor, SHAPE: gl.constexpr):
        """The same shared memory in another shape, laid out for a descriptor (3.9)."""
        return memory.reinterpret(descriptor.dtype, SHAPE, descriptor.layout)

else:

    @gluon.jit
    def as_tile(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """The same shared memory as a tile of another type and shape (3.6 to 3.8)."""
        return memory._reinterpret(DTYPE, SHAPE, LAYOUT)

    @gluon.jit
    def as_tiles(memory, descriptor, SHAPE: gl.constexpr):
        """The same shared memory in another shape, laid out for a descriptor (3.6 to 3.8)."""
        return memory._reinterpret(descriptor.dtype, SHAPE, descriptor.layout)


if hasattr(gl, "thread_barrier"):

    @gluon.jit
    def wait_for_all():
        """Waits for the role's other threads (3.6)."""
        gl.thread_barrier()

else:

    @gluon.jit
    def wait_for_all():
        """Waits for the role's other threads (3.7 and later)."""
        gl.barrier()


@gluon.jit
def meet_other_launches(NUM_WARPS: gl.constexpr):
    """Waits until earlier launches are done, and lets the next one be set up meanwhile.

    A launch that was told to (`launch_pdl`) starts as soon as the one before lets it, and waits
    here; where neither was, this does nothing.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    x = gl.full([32 * NUM_WARPS], 0, gl.int32, layout)
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r",
        [x], dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def new_barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """mbarriers that turn after COUNT arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(NUMBER):
        mbarrier.init(bars.index(j), count=COUNT)
    return bars


@gluon.jit
def in_pieces(tiles, descriptor, NUMBER: gl.constexpr, ROWS: gl.constexpr):
    """The same shared memory as so many tiles of a descriptor, 64 columns each."""
    SHAPE: gl.constexpr = [NUMBER, 1, 1, ROWS, 64]
    return as_tiles(tiles, descriptor, SHAPE)


if hasattr(tma, "async_atomic_add"):

    @gluon.jit
    def tma_reduce_add(descriptor, place, tile):
        """Memory += a tile (cp.reduce.async.bulk.tensor); `tma.store_wait` waits for it (3.8)."""
        tma.async_atomic_add(descriptor, place, tile)

else:

    @builtin
    def tma_reduce_add(descriptor, place, tile, _semantic=None):
        """Memory += a tile (cp.reduce.async.bulk.tensor); `tma.store_wait` waits for it."""
        place = _semantic._convert_to_ir_values(place, require_i64=False)
        _semantic.builder.create_async_tma_reduce(
            ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, place, tile.handle
        )
