"""Decode of sequences that begin with the same pages: those pages once for all of them.

Every sequence's queries attend to the shared pages as if they were queries of one sequence, and
to the pages of their own as usual; the two results are merged by their LSE (the cascade of Ye
et al. 2024, Cascade Inference). The shared keys are read from memory once, not once a sequence.

Legend: B sequences, S_q queries of each, H query heads, H_kv key and value heads, D / D_v head
dimensions, P pages, N page size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onchip import api, validate
from onchip.validate import reject

#: Queries that are handled as one sequence's: as many as the decode takes.
_QUERIES = 16


@dataclass(frozen=True, eq=False)
class Cascade:
    """Where a step's sequences share keys; made by `PagedKVCache.cascade`.

    Args:
        num_shared: tokens at the start that all sequences share, whole pages.
        shared_table: (1, pages) int32, the shared pages.
        shared_lengths: (1,) int32, `num_shared`.
        own_table: (B, max_pages) int32, each sequence's further pages.
        own_lengths: (B,) int32, tokens of each sequence after the shared ones.
        num_queries: most queries of a sequence.
    """

    num_shared: int
    shared_table: Tensor
    shared_lengths: Tensor
    own_table: Tensor
    own_lengths: Tensor
    num_queries: int

    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Causal attention of the last tokens of each sequence, which are in the cache already.

        The result is that of `onchip.attention_with_kvcache` with whole tables, up to rounding.
        There is no window and no ALiBi: both tell shared keys apart by the sequence's length.

        Args:
            q: (B, S_q, H, D), the last tokens of each sequence, at most `num_queries`.
            k_cache: pages (P, N, H_kv, D), e.g. `cache.k[layer]`.
            v_cache: (P, N, H_kv, D_v).
            scale, softcap, sinks, k_scale, v_scale: as `onchip.attention_with_kvcache`.

        Returns:
            out (B, S_q, H, D_v); with return_lse also lse (B, H, S_q).

        Raises:
            ValueError, TypeError: as `onchip.attention_with_kvcache`.
        """
        validate.tensor("q", q)
        validate.flag("return_lse", return_lse)
        if q.dim() == 4 and q.shape[1] > self.num_queries:
            fix = f"Make it with cache.cascade(seq_ids, num_queries={q.shape[1]})."
            reject("q", f"S_q = {q.shape[1]}", f"at most {self.num_queries}", fix)
        options = {"scale": scale, "softcap": softcap, "k_scale": k_scale, "v_scale": v_scale}
        options["return_lse"] = True
        own = api.attention_with_kvcache(
            q,
            k_cache,
            v_cache,
            cache_seqlens=self.own_lengths,
            block_table=self.own_table,
            causal=True,
            sinks=sinks,  # they join one of the parts
            **options,
        )
        if self.num_shared == 0 or q.shape[1] == 0:
            return own if return_lse else own[0]
        shared = self._over_shared(q, k_cache, v_cache, options)
        out, lse = api.merge_states(*zip(shared, own, strict=True))
        return (out, lse) if return_lse else out

    def _over_shared(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, options: dict):
        """Output and LSE over the shared keys, which all queries see in full."""
        batch, length, heads, dim = q.shape
        rows = q.reshape(-1, heads, dim)
        count = rows.shape[0]
        width = min(count, _QUERIES)
        spare = -count % width
        if spare:
            rows = torch.cat((rows, rows[:spare]))  # of which nobody reads the result
        blocks = rows.shape[0] // width
        out, lse = api.attention_with_kvcache(
            rows.view(blocks, width, heads, dim),
            k_cache,
            v_cache,
            cache_seqlens=self.shared_lengths.expand(blocks).contiguous(),
            block_table=self.shared_table.expand(blocks, -1),
            **options,
        )
        out = out.flatten(0, 1)[:count].view(batch, length, heads, -1)
        lse = lse.transpose(1, 2).flatten(0, 1)[:count]  # (B * S_q, H)
        return out, lse.view(batch, length, heads).transpose(1, 2).contiguous()


def of_pages(
    pages: list[list[int]], lengths: list[int], num_queries: int, page_size: int, to_device
) -> Cascade:
    """The `Cascade` of sequences with these pages and lengths.

    Args:
        pages: pages of each sequence.
        lengths: tokens of each sequence.
        num_queries: tokens at each sequence's end that must not be shared.
        page_size: N.
        to_device: moves a CPU tensor to where the cache is.
    """
    if not pages:
        reject("seq_ids", "none", "at least one sequence", "A step has sequences.")
    validate.count("num_queries", num_queries, 1)
    if min(lengths) < num_queries:
        allowed = f"1 to {min(lengths)}, the tokens of the shortest sequence"
        reject("num_queries", num_queries, allowed, "Append the new tokens first.")
    most = (min(lengths) - num_queries) // page_size
    count = 0
    while count < most and all(own[count] == pages[0][count] for own in pages):
        count += 1
    width = max(1, *(len(own) - count for own in pages))
    rows = [[*own[count:], *[-1] * (width - len(own) + count)] for own in pages]
    num_shared = count * page_size

    def tensor(values: list) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.int32))

    return Cascade(
        num_shared,
        tensor([pages[0][:count] or [-1]]),
        tensor([num_shared]),
        tensor(rows),
        tensor([length - num_shared for length in lengths]),
        num_queries,
    )
