"""Checks of values that live in tensors: lengths, page tables, slots.

They read the values on the host, so on a GPU they run only under ONCHIP_CHECK=1; for CPU
tensors they always run. Errors have the form of `onchip.validate`.

Legend: B batch, T packed tokens, P pages, N page size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onchip import env
from onchip.problem import Params, Tensors
from onchip.validate import reject


def visible(q: Tensor) -> bool:
    """Whether values in tensors are to be checked: on a CPU, or under ONCHIP_CHECK=1."""
    if torch.compiler.is_compiling() or q.is_meta or type(q).__name__ == "FakeTensor":
        return False
    return q.device.type == "cpu" or env.CHECK.get()


def cu_seqlens(name: str, x: Tensor, total: int, tokens: str, exact: bool, longest: int) -> None:
    """Requires offsets that start at 0, never decrease and end where the tokens end."""
    offsets = x.tolist()
    if offsets[0] != 0:
        fix = "Prepend a 0 to the running sum of the lengths."
        reject(name, f"first offset {offsets[0]}", "0", fix)
    for b, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        if end < start:
            fix = "Offsets are a running sum of lengths."
            reject(name, f"{start} then {end} at sequence {b}", "non-decreasing offsets", fix)
    if offsets[-1] > total or (exact and offsets[-1] != total):
        allowed = f"{'' if exact else 'at most '}{total}, the tokens of {tokens}"
        reject(name, f"last offset {offsets[-1]}", allowed, "Every token belongs to a sequence.")
    longest_here = max(
        (end - start for start, end in zip(offsets, offsets[1:], strict=False)), default=0
    )
    if longest_here > longest:
        twin = name.replace("cu_seqlens", "max_seqlen")
        fix = f"Pass {twin} >= {longest_here}."
        reject(twin, longest, f">= the longest sequence, {longest_here}", fix)


def lengths_within(name: str, lengths: list[int], most: list[int], what: str) -> None:
    """Requires each sequence's length in [0, most]."""
    for b, (length, limit) in enumerate(zip(lengths, most, strict=True)):
        if not 0 <= length <= limit:
            got = f"{length} for sequence {b}"
            reject(name, got, f"0 to {limit}, {what}", f"Correct {name}[{b}].")


def pages_within(block_table: Tensor, lengths: list[int], page_size: int, num_pages: int) -> None:
    """Requires valid page ids wherever a sequence has tokens; entries past them are not read."""
    counts = [-(-length // page_size) for length in lengths]
    needed = torch.tensor(counts, device=block_table.device)
    columns = torch.arange(block_table.shape[1], device=block_table.device)
    bad = (block_table < 0) | (block_table >= num_pages)
    bad &= columns < needed[:, None]
    if bool(bad.any()):
        b, column = bad.nonzero()[0].tolist()
        got = f"page {int(block_table[b, column])} at [{b}, {column}]"
        fix = f"Sequence {b} has {lengths[b]} tokens and needs {counts[b]} valid pages."
        reject("block_table", got, f"0 to {num_pages - 1}", fix)


def places_apart(
    name: str, table: Tensor, lengths: Tensor, num_new: int, page_size: int, num_pages: int
) -> None:
    """Requires that appended tokens take no place that a sequence reads, nor one another's.

    Args:
        name: of the argument that the table is, or is made of.
        table: (B, max_pages) valid page ids where sequences have tokens, new ones included.
        lengths: (B,) tokens of each sequence before the call.
        num_new: S_new, tokens that each sequence gets.
        page_size: N.
        num_pages: P.
    """
    table, before = table.long(), lengths.long()[:, None]
    starts = page_size * torch.arange(table.shape[1], device=table.device)
    used = (before - starts).clamp(0, page_size)  # tokens of each page that its sequence reads
    read = table.new_zeros(num_pages)
    read.scatter_reduce_(0, table.where(used > 0, 0).flatten(), used.flatten(), "amax")
    position = before + torch.arange(num_new, device=table.device)
    page, offset = table.gather(1, position // page_size), position % page_size
    new = (page * page_size + offset).flatten()
    _, which, counts = new.unique(return_inverse=True, return_counts=True)
    taken = (offset < read[page]).flatten() | (counts[which] > 1)
    if bool(taken.any()):
        i = int(taken.nonzero()[0, 0])
        got = f"place {int(new[i])} (page * N + offset) for a new token of sequence {i // num_new}"
        allowed = "a place that no sequence reads and no other new token takes"
        reject(name, got, allowed, "Copy a page that sequences share before one appends.")


def slots_within(slot_mapping: Tensor, num_slots: int) -> None:
    """Requires slots in [-1, P * N)."""
    if slot_mapping.numel() == 0:
        return
    low, high = slot_mapping.aminmax()
    if int(low) < -1 or int(high) >= num_slots:
        got = int(low) if int(low) < -1 else int(high)
        where = int((slot_mapping == got).nonzero()[0, 0])
        allowed = f"-1 (do not store) to {num_slots - 1}, page * N + offset"
        fix = "Nothing was stored; correct the slot."
        reject("slot_mapping", f"{got} for token {where}", allowed, fix)


def varlen_values(t: Tensors, params: Params) -> None:
    """Checks lengths and page tables of a packed call (reads them on the host)."""
    assert t.cu_seqlens_q is not None
    longest_q, longest_k = params.max_seqlen_q, params.max_seqlen_k
    cu_seqlens("cu_seqlens_q", t.cu_seqlens_q, t.q.shape[0], "q", True, longest_q)
    batch = t.cu_seqlens_q.shape[0] - 1
    capacity = None
    if t.block_table is not None:
        capacity = [t.block_table.shape[1] * t.k.shape[1]] * batch
    lengths = None
    if t.cu_seqlens_k is not None:
        total = t.k.shape[0] if capacity is None else sum(capacity)
        cu_seqlens("cu_seqlens_k", t.cu_seqlens_k, total, "k", False, longest_k)
        lengths = t.cu_seqlens_k.diff().tolist()
    if t.seqused_k is not None:
        most = capacity if lengths is None else lengths
        assert most is not None
        lengths = t.seqused_k.tolist()
        lengths_within("seqused_k", lengths, most, "the keys that the sequence has")
    assert lengths is not None
    if t.block_table is not None and capacity is not None:
        lengths_within("cu_seqlens_k", lengths, capacity, "what block_table can hold")
        pages_within(t.block_table, lengths, t.k.shape[1], t.k.shape[0])
    if lengths and max(lengths) > longest_k:
        fix = f"Pass max_seqlen_k >= {max(lengths)}."
        reject("max_seqlen_k", longest_k, f">= the longest sequence, {max(lengths)}", fix)


def rotary_reach(num_positions: int, longest: int) -> None:
    """Requires tables of cosines and sines that reach the longest sequence's last key."""
    if longest > num_positions:
        fix = "Make the tables as long as the longest sequence."
        reject("rotary_cos", f"{num_positions} positions", f"at least {longest}", fix)


def cache_values(c, table: Tensor, num_new: int) -> None:
    """Checks lengths, tables and slots of a cache call (reads them on the host)."""
    page_size, num_pages = c.k_cache.shape[1], c.k_cache.shape[0]
    lengths = c.cache_seqlens.tolist()
    room = [table.shape[1] * page_size - num_new] * len(lengths)
    what = "what the cache holds" + (f" less {num_new} new tokens" if num_new else "")
    lengths_within("cache_seqlens", lengths, room, what)
    totals = [length + num_new for length in lengths]
    if c.block_table is not None:
        pages_within(table, totals, page_size, num_pages)
    elif c.cache_batch_idx is not None:
        lengths_within(
            "cache_batch_idx",
            table.flatten().tolist(),
            [num_pages - 1] * len(lengths),
            "a row of the cache",
        )
    if c.cache_leftpad is not None:
        pads = c.cache_leftpad.tolist()
        lengths_within("cache_leftpad", pads, totals, "the tokens in the cache")
    if c.slot_mapping is not None:
        slots_within(c.slot_mapping, num_pages * page_size)
    elif num_new and lengths:
        name = "cache_batch_idx" if c.block_table is None else "block_table"
        places_apart(name, table, c.cache_seqlens, num_new, page_size, num_pages)
    if c.rotary_cos is not None:
        rotary_reach(c.rotary_cos.shape[0], max(totals, default=0))
