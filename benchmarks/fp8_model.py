"""SmolLM2-135M with float8 attention in every layer, on real text, against bfloat16.

Usage: python benchmarks/fp8_model.py TEXT [--tokens 2048] [--model FILE.gguf] [--json OUT.json]
Prints each layer's relative error on the queries, keys and values that it sees in bfloat16, and
for how many positions the most likely next token stays that of bfloat16.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import onchip
from onchip import reference
from onchip.engine import LLM
from onchip.engine.demo import find_model

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """bfloat16 attention of one sequence, all (1, S, H, D)."""
    return onchip.attention(*(x.bfloat16() for x in (q, k, v)), causal=True)


def in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """float32 attention: how often bfloat16 itself changes the most likely token."""
    return onchip.attention(*(x.float() for x in (q, k, v)), causal=True)


def in_float8(**how) -> Attend:
    """Attention of quantised inputs."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = onchip.quantize_qkv(*(x.bfloat16() for x in (q, k, v)), **how)
        return onchip.attention(x, causal=True)

    return attend


WAYS = {
    "float32": in_float32,
    "tensor scales": in_float8(scale="tensor", hadamard=False),
    "block scales, transform": in_float8(scale="block", hadamard=True),
}


class Replaced(torch.nn.Module):
    """In place of a layer's attention: no cache, one sequence."""

    def __init__(self, attend: Attend, seen: list):
        super().__init__()
        self._attend, self._seen = attend, seen

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx) -> Tensor:
        self._seen.append((q[None], k[None], v[None]))
        return self._attend(q[None], k[None], v[None])[0].to(q.dtype)


@torch.inference_mode()
def next_tokens(model, tokens: Tensor, attend: Attend) -> tuple[Tensor, list]:
    """The most likely token after each position, and what each layer's attention was given."""
    seen: list = []
    for layer in model.layers:
        layer.attention = Replaced(attend, seen)
    hidden = model(tokens, torch.arange(len(tokens)), None)
    return model.logits(hidden).argmax(-1), seen


def layer_errors(seen: list, attend: Attend) -> list[float]:
    """Relative Frobenius error of each layer against float64."""
    errors = []
    for q, k, v in seen:
        want = reference.attention(q, k, v, causal=True)[0]
        errors.append(float((attend(q, k, v).double() - want).norm() / want.norm()))
    return errors


def main() -> None:
    """Prints a summary and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json")
    options = parser.parse_args()
    llm = LLM(options.model or find_model())
    model = llm.runner.model
    ids = llm.tokenizer.encode(options.text.read_text(encoding="utf-8"))[: options.tokens]
    tokens = torch.tensor(ids)
    want, seen = next_tokens(model, tokens, plain)
    found = {"tokens": len(ids), "bfloat16": {"layers": layer_errors(seen, plain)}}
    for name, attend in WAYS.items():
        got, _ = next_tokens(model, tokens, attend)
        same = float((got == want).double().mean())
        found[name] = {"layers": layer_errors(seen, attend), "same": same}
        worst = max(found[name]["layers"])
        print(f"{name}: same next token {same:.4f}, worst layer's error {worst:.4f}", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
