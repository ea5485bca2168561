"""LLM: a model file in, text out.

    llm = LLM("model.gguf")
    for result in llm.generate(["The sky is", "One, two,"], SamplingParams(max_tokens=32)):
        print(result.text)

The engine is `step()`: schedule, run, take the tokens. Everything else is words around it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from onchip import validate
from onchip.engine.runner import Runner
from onchip.engine.sampling import SamplingParams
from onchip.engine.scheduler import Scheduler
from onchip.engine.sequence import Sequence as Running
from onchip.engine.tokenizer import Messages, TextStream, load_tokenizer
from onchip.engine.weights import Progress, load_model, open_checkpoint
from onchip.paging.cache import PagedKVCache

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Result:
    """What became of one prompt.

    Args:
        text: the new text.
        token_ids: the new tokens, a stop token included.
        prompt_ids: the prompt's tokens.
        finish_reason: "stop" or "length".
    """

    text: str
    token_ids: list[int]
    prompt_ids: list[int]
    finish_reason: str


@dataclass(frozen=True)
class Token:
    """One new token of a stream.

    Args:
        index: which prompt.
        token_id: the token.
        text: the text that became final with it; may be empty.
        finish_reason: "stop" or "length" with the last one, None before.
    """

    index: int
    token_id: int
    text: str
    finish_reason: str | None


@dataclass
class Stats:
    """Work done since an LLM was made.

    Args:
        prefill_tokens, prefill_s: prompt tokens and the seconds they took.
        decode_tokens, decode_s: tokens made one at a time, and their seconds.
        peak_pages: most pages in use at once.
    """

    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0
    peak_pages: int = 0


class LLM:
    """A model, its paged cache and the loop that feeds them.

    Args:
        path: a Hugging Face folder (config.json, safetensors, tokenizer.json) or a GGUF file, of
            the Llama family or Qwen3.
        dtype: of matrices and cache, float32, bfloat16 or float16; None for `default_dtype`.
        device: where the model runs.
        page_size: N, tokens of a page, any number from 1.
        cache_tokens: tokens that the cache holds, rounded up to whole pages.
        max_num_seqs: sequences that run together.
        max_batch_tokens: prompt tokens of one step; a longer prompt runs alone.
        progress: called while loading with (parameters done, parameters in all).

    Attributes:
        tokenizer: see `Tokenizer`.
        max_length: most tokens of a sequence, prompt included, whose keys and values can be
            kept: the model's context or the cache, whichever is smaller.
        stats: work done so far.

    Raises:
        ValueError: if the files are not a whole model of a kind that is implemented, or a number
            is below 1.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        page_size: int = 16,
        cache_tokens: int = 8192,
        max_num_seqs: int = 16,
        max_batch_tokens: int = 4096,
        progress: Progress | None = None,
    ):
        counts = {
            "page_size": page_size,
            "cache_tokens": cache_tokens,
            "max_num_seqs": max_num_seqs,
            "max_batch_tokens": max_batch_tokens,
        }
        for name, value in counts.items():
            validate.count(name, value, 1)
        device = torch.device(device)
        dtype = default_dtype(device) if dtype is None else dtype
        if dtype not in _DTYPES:
            allowed = ", ".join(map(str, _DTYPES))
            raise ValueError(f"dtype: got {dtype!r}; allowed: {allowed}. None chooses for you.")
        num_pages = -(-cache_tokens // page_size)
        checkpoint = open_checkpoint(path)
        self.config = config = checkpoint.config
        self.tokenizer = load_tokenizer(checkpoint)
        self.cache = PagedKVCache(
            config.num_layers,
            num_pages,
            page_size,
            config.num_kv_heads,
            config.head_dim,
            dtype,
            device,
        )
        self.runner = Runner(load_model(checkpoint, dtype, device, progress), self.cache)
        self.scheduler = Scheduler(self.cache, max_num_seqs, max_batch_tokens)
        self.max_length = min(config.max_context, num_pages * page_size)
        self.stats = Stats()

    def step(self) -> list[Running]:
        """One turn of the engine: schedule, run, take the tokens.

        Returns:
            The sequences that got a token; none if there was nothing to do.

        Mutates: the cache, the scheduler, the sequences and the stats.
        """
        started = time.perf_counter()
        batch = self.scheduler.schedule()
        if not batch.sequences:
            return []
        try:
            token_ids = self.runner.run(batch)
        except BaseException:
            self.scheduler.preempt(batch.sequences)
            raise
        self._count(batch, time.perf_counter() - started)
        for seq, token_id in zip(batch.sequences, token_ids, strict=True):
            seq.take(token_id, self.max_length)
        self.scheduler.finish(seq for seq in batch.sequences if seq.finish_reason)
        return batch.sequences

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Result]:
        """Continues prompts, together.

        Args:
            prompts: texts or lists of token ids; one alone is a list of one.
            params: for all, or one a prompt; greedy when None.

        Returns:
            One Result a prompt, in order.

        Raises:
            ValueError: for a prompt that is empty, has unknown tokens or is longer than
                max_length; before anything runs.
        """
        sequences = self._sequences(prompts, params)
        for _ in self._run(sequences):
            pass
        return [_result(seq) for seq in sequences]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Token]:
        """As `generate`, giving each token as it comes.

        The prompts are checked at once, they run as the iterator is read, and leaving it early
        frees what they used.
        """
        return self._run(self._sequences(prompts, params))

    def chat(self, messages: Messages, params: SamplingParams | None = None) -> Result:
        """Answers a chat, in the model's own format.

        Args:
            messages: {"role": "user", "content": "..."} each, oldest first.
            params: greedy when None.

        Raises:
            ValueError: if the model has no chat template, or as `generate`.
        """
        return self.generate([self.tokenizer.encode_chat(messages)], params)[0]

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None
    ) -> Iterator[Token]:
        """As `chat`, giving each token as it comes."""
        return self.stream([self.tokenizer.encode_chat(messages)], params)

    def _run(self, sequences: list[Running]) -> Iterator[Token]:
        num_given = [0] * len(sequences)
        self.scheduler.add(sequences)
        try:
            while any(seq.finish_reason is None for seq in sequences):
                self.step()
                # Another iterator's steps may have made some of these tokens.
                for index, seq in enumerate(sequences):
                    for at in range(num_given[index], len(seq.output_ids)):
                        yield _token(seq, index, at)
                    num_given[index] = len(seq.output_ids)
        finally:
            self.scheduler.finish(sequences)

    def _sequences(self, prompts, params) -> list[Running]:
        if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
            prompts = [prompts]
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(
                f"params: got {len(params)} for {len(prompts)} prompts; allowed: one for all or "
                f"one a prompt. Give as many."
            )
        return [
            self._sequence(i, *pair) for i, pair in enumerate(zip(prompts, params, strict=True))
        ]

    def _sequence(self, index: int, prompt: Prompt, params: SamplingParams) -> Running:
        name = f"prompts[{index}]"
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise ValueError(f"{name}: is empty; allowed: at least one token. Give some text.")
        if not all(isinstance(i, int) and 0 <= i < self.config.vocab_size for i in ids):
            allowed = f"ids from 0 to {self.config.vocab_size - 1}"
            raise ValueError(f"{name}: has other token ids; allowed: {allowed}. Use the tokenizer.")
        if len(ids) > self.max_length:
            raise ValueError(
                f"{name}: has {len(ids)} tokens; allowed: {self.max_length}, the smaller of the "
                f"model's context ({self.config.max_context}) and the cache "
                f"({self.cache.num_pages * self.cache.page_size}). Shorten it, or raise "
                f"cache_tokens if the cache is the smaller."
            )
        own = () if params.ignore_eos else self.config.eos_token_ids
        stop_ids = frozenset((*own, *params.stop_token_ids))
        return Running(ids, params, stop_ids, TextStream(self.tokenizer, params.stop))

    def _count(self, batch, seconds: float) -> None:
        stats = self.stats
        stats.peak_pages = max(stats.peak_pages, self.cache.pool.num_used)
        if batch.is_prefill:
            stats.prefill_tokens += sum(seq.num_tokens for seq in batch.sequences)
            stats.prefill_s += seconds
        else:
            stats.decode_tokens += len(batch.sequences)
            stats.decode_s += seconds


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on GPUs and on CPUs that multiply it, else float32.

    Decode reads every weight for every token, so half the bytes is faster: a step of
    SmolLM2-135M takes 28 ms of one core for its matrices in bfloat16, 42 in float32 (Xeon with
    AMX). Without the instructions bfloat16 is emulated, and slower.
    """
    if device.type != "cpu" or torch.cpu.get_capabilities().get("avx512_bf16"):
        return torch.bfloat16
    return torch.float32


def _token(seq: Running, index: int, at: int) -> Token:
    is_last = at == len(seq.output_ids) - 1
    reason = seq.finish_reason if is_last else None
    return Token(index, seq.output_ids[at], seq.pieces[at], reason)


def _result(seq: Running) -> Result:
    assert seq.finish_reason is not None
    return Result(seq.stream.text, seq.output_ids, list(seq.prompt_ids), seq.finish_reason)
