"""How the next token is chosen.

Legend: B sequences, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def _is_int(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


@dataclass(frozen=True)
class SamplingParams:
    """What a caller asks of one generation.

    Args:
        max_tokens: new tokens at most.
        temperature: 0 takes the likeliest token; otherwise logits are divided by it.
        top_p: only the likeliest tokens that together reach this probability are drawn from.
        seed: of this sequence's draws; None draws anew each time.
        stop: strings that end the text and are cut off.
        stop_token_ids: tokens that end the text, beside the model's own.
        ignore_eos: go on after the model's own end tokens.

    Raises:
        ValueError: for a value out of its range, naming it.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        checks = {
            "max_tokens": (_is_int(self.max_tokens) and self.max_tokens >= 1, "an int, 1 or more"),
            "temperature": (
                self.temperature == 0 or 1e-6 <= self.temperature < math.inf,
                "0 (greedy), or 1e-6 or more, finite",
            ),
            "top_p": (0 < self.top_p <= 1, "over 0, at most 1"),
            "seed": (self.seed is None or 0 <= self.seed < 2**63, "None or 0 to 2^63 - 1"),
            "stop": (all(stop), "strings that are not empty"),
        }
        for name, (fine, allowed) in checks.items():
            if not fine:
                raise ValueError(
                    f"{name}: got {getattr(self, name)!r}; allowed: {allowed}. Change {name}."
                )

    def generator(self) -> torch.Generator:
        """The source of this sequence's draws; nobody else draws from it."""
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


def sample(
    logits: Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator]
) -> list[int]:
    """Chooses one token for each sequence.

    A row's choice depends on its own logits and generator alone.

    Args:
        logits: (B, V) float32.
        params: one a row.
        generators: one a row.

    Returns:
        B token ids.

    Mutates: the generators of rows with a temperature.
    """
    token_ids = logits.argmax(dim=1).tolist()
    for row, (wish, generator) in enumerate(zip(params, generators, strict=True)):
        if wish.temperature > 0:
            probabilities = nucleus((logits[row] / wish.temperature).softmax(dim=0), wish.top_p)
            token_ids[row] = int(torch.multinomial(probabilities.cpu(), 1, generator=generator))
    return token_ids


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Keeps the likeliest tokens until they reach top_p (Holtzman et al. 2020, section 3.1).

    Args:
        probabilities: (V,).
        top_p: 1 keeps all.

    Returns:
        (V,) with zeros for the others; not normalised.
    """
    if top_p >= 1:
        return probabilities
    ordered, order = probabilities.sort(descending=True)
    before = ordered.cumsum(dim=0) - ordered  # probability of the likelier ones
    kept = ordered.masked_fill(before >= top_p, 0.0)
    return torch.zeros_like(probabilities).scatter_(0, order, kept)
