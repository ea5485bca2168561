"""Block lists: made from a mask function, and held against a call's shapes.

Legend: B batch, S_q / S_k lengths, H query heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onchip import validate
from onchip.mods import BlockList, MaskMod, check_block
from onchip.validate import reject


def block_list(
    mask_mod: MaskMod,
    B: int,
    H: int,
    S_q: int,
    S_k: int,
    *,
    block: tuple[int, int] = (128, 128),
    device: torch.device | str | None = None,
) -> BlockList:
    """The blocks in which a mask function lets some pair through, for `MaskMod(..., blocks=...)`.

    Asks the function once for every pair, on the device, and keeps a flag for each block. Make
    the list once for a mask, not in every call; nothing here waits for the device. Causal and
    window are the call's own: kernels pass over what these hide of the listed blocks.

    Args:
        mask_mod: the function and its tensors; a list that it has already is not read.
        B: sequences; 1 where the mask is the same for all of them (it is asked with b = 0).
        H: query heads; 1 likewise.
        S_q: queries of a sequence; for packed ones max_seqlen_q, and then the function is asked
            about positions past the end of shorter sequences, too.
        S_k: keys of a sequence; likewise.
        block: queries and keys of a block, multiples of 16. Smaller blocks hide more, but below
            128 the kernels' tiles shrink with them.
        device: a GPU; None for that of the function's tensors, or the current one.

    Returns:
        A `BlockList` with ascending lists for each b < B and h < H.

    Raises:
        ValueError, TypeError: for an argument out of its range, naming it.
    """
    if not isinstance(mask_mod, MaskMod):
        fix = "Wrap the function: onchip.MaskMod(function)."
        reject("mask_mod", type(mask_mod).__name__, "an onchip.MaskMod", fix, TypeError)
    for name, size, least in (("B", B, 1), ("H", H, 1), ("S_q", S_q, 0), ("S_k", S_k, 0)):
        validate.count(name, size, least)
        if size >= 2**31:
            reject(name, size, f"an int from {least} to 2**31 - 1", "Lengths are 32-bit.")
    check_block("block", block)
    place = _place(mask_mod, device)

    from onchip.kernels.portable import blocks

    return BlockList(*blocks.lists(mask_mod, (B, H, S_q, S_k), block, place), block)


def _place(mask_mod: MaskMod, device: torch.device | str | None) -> torch.device:
    """Where the function is asked."""
    if device is None:
        device = mask_mod.aux[0].device if mask_mod.aux else "cuda"
    place = torch.empty(0, device=device).device  # "cuda" becomes the current one
    # Triton's interpreter runs on a CPU.
    interpreted = type(mask_mod.fn).__name__ == "InterpretedFunction"
    if place.type not in ("cuda", "cpu" if interpreted else "cuda"):
        fix = "Functions are compiled: make the list where attention runs."
        reject("device", place, "a GPU that Triton supports", fix)
    for x in mask_mod.aux:
        if x.device != place:
            fix = "Move it, or leave device out."
            reject("mask_mod.aux", f"device {x.device}", f"device {place}", fix)
        if not x.is_contiguous():
            fix = "Functions get pointers: pass x.contiguous()."
            reject("mask_mod.aux", f"strides {x.stride()}", "contiguous tensors", fix)
    return place


def check(q: Tensor, batch: int, seqlen_q: int, seqlen_k: int, mods) -> None:
    """Requires the block list of `prepare.Mods` to be for a call's sequences, heads and lengths."""
    blocks = None if mods.mask is None else mods.mask.blocks
    if blocks is None:
        return
    name, (block_q, block_k) = "mask_mod.blocks", blocks.block
    validate.same_device(name, blocks.key_counts, q)
    most = (batch, q.shape[-2], -(-seqlen_q // block_q), -(-seqlen_k // block_k))
    outer = zip(blocks.shape, most[:2], strict=False)
    if blocks.shape[2:] != most[2:] or any(got not in (1, want) for got, want in outer):
        allowed = f"(B or 1, H or 1, query blocks, key blocks) of {most}"
        fix = f"Make it with onchip.block_list(mask_mod, B, H, {seqlen_q}, {seqlen_k})."
        reject(name, blocks.shape, allowed, fix)


def check_values(blocks: BlockList) -> None:
    """Requires lists that name existing blocks in ascending order (reads them on the host)."""
    _, _, num_queries, num_keys = blocks.shape
    for side, num_blocks in (("key", num_keys), ("query", num_queries)):
        counts, indices = getattr(blocks, f"{side}_counts"), getattr(blocks, f"{side}_indices")
        most = indices.shape[3]
        wrong = (counts < 0) | (counts > most)
        if bool(wrong.any()):
            got, fix = int(counts[wrong][0]), "Counts say how many indices are used."
            reject(f"mask_mod.blocks.{side}_counts", got, f"0 to {most}", fix)
        used = torch.arange(most, device=counts.device) < counts[..., None]
        wrong = used & ((indices < 0) | (indices >= num_blocks))
        wrong[..., 1:] |= used[..., 1:] & (indices[..., 1:] <= indices[..., :-1])
        if bool(wrong.any()):
            at = tuple(wrong.nonzero()[0].tolist())
            allowed = f"0 to {num_blocks - 1}, ascending in each list"
            got, fix = f"{int(indices[at])} at {list(at)}", "Sort each list."
            reject(f"mask_mod.blocks.{side}_indices", got, allowed, fix)
