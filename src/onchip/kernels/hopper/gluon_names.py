"""Gluon's names that the Hopper kernels use; see `onchip.kernels.gluon_names`."""

from __future__ import annotations

from onchip.kernels.gluon_names import (  # noqa: F401
    TensorDescriptor,
    as_tile,
    as_tiles,
    builtin,
    fence_async_shared,
    gl,
    in_pieces,
    mbarrier,
    new_barriers,
    tma,
    tma_load,
    tma_reduce_add,
    tma_store,
    wait_for_all,
    warpgroup_mma,
    warpgroup_mma_wait,
)
