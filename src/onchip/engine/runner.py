"""From a batch of sequences to one token for each: tensors in, model, sampling.

Legend: B sequences, T tokens of this step.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from onchip.engine.model import Decoder
from onchip.engine.sampling import sample
from onchip.engine.scheduler import Batch
from onchip.nn import StepContext
from onchip.paging.cache import PagedKVCache


class Runner:
    """Runs a model over the sequences of a cache.

    Args:
        model: bound to the cache here.
        cache: its keys and values.
    """

    def __init__(self, model: Decoder, cache: PagedKVCache):
        self.model = model
        self.cache = cache
        self.device = cache.device
        model.bind(cache)

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[int]:
        """Computes the next token of each sequence.

        Args:
            batch: from the scheduler.

        Returns:
            B token ids.

        Mutates: the cache's tensors, num_cached of each sequence, and its generator.
        """
        logits = self.logits(batch)
        params = [seq.params for seq in batch.sequences]
        return sample(logits, params, [seq.generator for seq in batch.sequences])

    def logits(self, batch: Batch) -> Tensor:
        """Scores of each sequence's next token.

        Returns:
            (B, V) float32.

        Mutates: the cache's tensors and num_cached of each sequence.
        """
        sequences = batch.sequences
        starts = [seq.num_cached for seq in sequences]
        ends = [seq.num_tokens for seq in sequences]
        token_ids, positions = [], []
        for seq, start, end in zip(sequences, starts, ends, strict=True):
            token_ids += seq.token_ids[start:] if batch.is_prefill else seq.output_ids[-1:]
            positions += range(start, end)
        ctx = self._context(batch, starts, ends)
        hidden = self.model(self._tensor(token_ids), self._tensor(positions), ctx)
        if batch.is_prefill:
            hidden = hidden[ctx.cu_seqlens_q[1:].long() - 1]  # type: ignore[index]
        for seq, end in zip(sequences, ends, strict=True):
            seq.num_cached = end
        return self.model.logits(hidden)

    def _context(self, batch: Batch, starts: list[int], ends: list[int]) -> StepContext:
        ids = [seq.cache_id for seq in batch.sequences if seq.cache_id is not None]
        assert len(ids) == len(batch.sequences)
        slots = self.cache.slot_mapping(ids, starts, ends)
        if batch.is_prefill:
            assert not any(starts), "a prefill starts with an empty cache"
            cu_seqlens = self._tensor([0, *accumulate(ends)], torch.int32)
            return StepContext(
                is_prefill=True,
                cu_seqlens_q=cu_seqlens,
                cu_seqlens_k=cu_seqlens,
                max_seqlen_q=max(ends),
                max_seqlen_k=max(ends),
                slot_mapping=slots,
            )
        return StepContext(
            is_prefill=False,
            slot_mapping=slots,
            context_lens=self._tensor(ends, torch.int32),
            block_table=self.cache.block_table(ids),
        )

    def _tensor(self, values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)
