"""Sequence: one prompt and what has become of it."""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass, field

import torch

from onchip.engine.sampling import SamplingParams
from onchip.engine.tokenizer import TextStream


@dataclass(eq=False)
class Sequence:
    """One prompt in the engine.

    Args:
        prompt_ids: its tokens, at least one.
        params: how to go on.
        stop_ids: tokens that end it.
        stream: its text.

    Attributes:
        output_ids: new tokens.
        pieces: the text that each new token made final.
        finish_reason: "stop" (a stop token or string), "length" (max_tokens, or no room for
            more) or None.
        cache_id: its id in the cache; None while it has no pages.
        num_cached: tokens whose keys and values are in the cache.
    """

    prompt_ids: Listing[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    stream: TextStream
    output_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    cache_id: int | None = None
    num_cached: int = 0
    generator: torch.Generator = field(init=False)

    def __post_init__(self):
        self.generator = self.params.generator()

    @property
    def token_ids(self) -> list[int]:
        """Prompt and new tokens."""
        return [*self.prompt_ids, *self.output_ids]

    @property
    def num_tokens(self) -> int:
        """Prompt and new tokens, counted."""
        return len(self.prompt_ids) + len(self.output_ids)

    def take(self, token_id: int, max_length: int) -> None:
        """Adds a token and decides whether it was the last.

        Args:
            token_id: the token.
            max_length: most tokens whose keys and values can be kept.

        Mutates: the outputs and finish_reason.
        """
        self.output_ids.append(token_id)
        piece = self.stream.push(token_id)
        if token_id in self.stop_ids or self.stream.stopped:
            self.finish_reason = "stop"
        elif len(self.output_ids) >= self.params.max_tokens or self.num_tokens > max_length:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            piece += self.stream.flush()
        self.pieces.append(piece)
