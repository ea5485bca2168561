"""Which blocks of pairs a mask function lets anything through in: the kernel behind block lists.

Method: a program asks the function for every pair of one block, tile by tile, and writes one
flag. A stable sort of the flags gives the lists, in ascending order.

Memory: a byte for each block of flags, and 4 for each entry of the two lists.

Legend: B batch, S_q / S_k lengths, H query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.kernels.compiled import Compiled
from onchip.kernels.launcher import Launch
from onchip.kernels.portable.config import fitted
from onchip.kernels.portable.extras import Functions
from onchip.mods import MaskMod


@dataclass(frozen=True)
class Spec(Compiled):
    """What the compiled code depends on.

    Args:
        block_q, block_k: queries and keys of a block.
        tile_q, tile_k: of a tile; they divide the block.
        functions: holds the mask function.
    """

    block_q: int
    block_k: int
    tile_q: int
    tile_k: int
    functions: Functions


@triton.jit(do_not_specialize=["num_heads", "seqlen_q", "seqlen_k"])
def mask_blocks_portable(flags, aux, num_heads, seqlen_q, seqlen_k, SPEC: tl.constexpr):
    """One program: the flag of one block; `flags` is (B, H, query blocks, key blocks) int8."""
    blocks_q, blocks_k = tl.cdiv(seqlen_q, SPEC.block_q), tl.cdiv(seqlen_k, SPEC.block_k)
    program = tl.program_id(0)
    block_k = program % blocks_k
    block_q = program // blocks_k % blocks_q
    index = program // blocks_k // blocks_q
    batch, head = index // num_heads, index % num_heads
    any_seen = 0
    for m in tl.range(0, SPEC.block_q, SPEC.tile_q):
        for n in tl.range(0, SPEC.block_k, SPEC.tile_k):
            rows = (block_q * SPEC.block_q + m + tl.arange(0, SPEC.tile_q))[:, None]
            columns = (block_k * SPEC.block_k + n + tl.arange(0, SPEC.tile_k))[None, :]
            seen = (rows < seqlen_q) & (columns < seqlen_k)
            # Loads by positions must stay inside of the sequence.
            i, j = tl.minimum(rows, seqlen_q - 1), tl.minimum(columns, seqlen_k - 1)
            seen &= SPEC.functions.mask(batch, head, i, j, *aux)
            any_seen = tl.maximum(any_seen, tl.max(tl.max(seen.to(tl.int32), 1), 0))
    tl.store(flags + program, any_seen.to(tl.int8))


def lists(
    mask_mod: MaskMod, sizes: tuple[int, int, int, int], block: tuple[int, int],
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Counts and indices for query blocks, then for key blocks: `onchip.BlockList`'s tensors.

    Args:
        mask_mod: the function and its tensors, on `device`.
        sizes: B, H, S_q, S_k.
        block: queries and keys of a block.
        device: where the function runs.
    """
    batch, heads, seqlen_q, seqlen_k = sizes
    shape = (batch, heads, triton.cdiv(seqlen_q, block[0]), triton.cdiv(seqlen_k, block[1]))
    flags = torch.empty(shape, dtype=torch.int8, device=device)
    if flags.numel() > 0:
        functions = Functions(mask=mask_mod.fn, fingerprint=mask_mod.key)
        spec = Spec(*block, fitted(32, block[0]), fitted(128, block[1]), functions)
        launch = Launch(mask_blocks_portable, (flags.numel(),), flags.get_device(), num_warps=4)
        launch(flags, tuple(mask_mod.aux), heads, seqlen_q, seqlen_k, spec)
    return *_listed(flags), *_listed(flags.transpose(2, 3))


def _listed(flags: Tensor) -> tuple[Tensor, Tensor]:
    """Counts and ascending indices of the flags that are set, along the last dimension."""
    counts = flags.sum(-1, dtype=torch.int32).contiguous()
    order = flags.argsort(dim=-1, descending=True, stable=True)
    return counts, order.to(torch.int32).contiguous()
