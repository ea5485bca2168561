"""Trains a small GPT twice, with onchip's attention and with float32 attention in torch.

Usage: python benchmarks/train_gpt.py [--steps 200] [--seeds 0,1,2] [--kernel NAME] [--json FILE]

4 layers of 4 query heads over 2 key heads of D = 128, on the bytes of the language's reference
that Python ships as `pydoc_data.topics`. Both runs of a seed begin with the same weights and see
the same text; only attention differs: bfloat16 in onchip's kernels, forward and backward, or
float32 with the scores in memory. The curves must lie as close together as chance allows:
closer than those of different seeds do.

Legend: B batch, N sequence length, H heads, D head dimension.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onchip

LAYERS, HEADS, KV_HEADS, DIM = 4, 4, 2, 128
WIDTH = HEADS * DIM
BATCH, LENGTH = 8, 512
WARMUP = 20

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (B, N, H, D) each, causal


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a residual."""

    def __init__(self, attend: Attend):
        super().__init__()
        self.attend = attend
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, DIM))
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=2)
        x = x + self.out(self.attend(q, k, v).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Bytes to the next byte's logits."""

    def __init__(self, attend: Attend):
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*[Block(attend) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.places.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def onchip_attention(kernel: str | None) -> Attend:
    """onchip in bfloat16; float32 in and out."""

    def attend(q, k, v):
        q, k, v = (x.bfloat16() for x in (q, k, v))
        out = onchip.attention(q, k, v, causal=True, kernel=kernel)
        assert isinstance(out, Tensor)
        return out.float()

    return attend


def eager_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formula in float32."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.mT * DIM**-0.5).masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


def train(attend: Attend, text: Tensor, steps: int, seed: int) -> list[float]:
    """Losses in nats a byte, before each step."""
    torch.manual_seed(seed)
    model = GPT(attend).to(text.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    draw = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / WARMUP)
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=draw)
        rows = torch.stack([text[s : s + LENGTH + 1] for s in starts.tolist()]).long()
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def distance(a: list[float], b: list[float]) -> float:
    """Mean difference of two curves over their second halves."""
    half = len(a) // 2
    return statistics.mean(abs(x - y) for x, y in zip(a[half:], b[half:], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small GPT with two kinds of attention.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--kernel", help="a kernel of onchip, else its choice")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    written = "".join(topics.topics.values()).encode()
    text = torch.tensor(list(written), dtype=torch.uint8, device=given.device)
    ways = {"onchip": onchip_attention(given.kernel), "eager float32": eager_attention}
    seeds = [int(x) for x in given.seeds.split(",")]
    curves = {n: [train(a, text, given.steps, s) for s in seeds] for n, a in ways.items()}
    ours, eager = curves.values()
    apart = [distance(a, b) for i, a in enumerate(eager) for b in eager[:i]]
    same = [distance(a, b) for a, b in zip(ours, eager, strict=True)]
    print("last losses", {n: [round(x[-1], 3) for x in each] for n, each in curves.items()})
    print("onchip and eager of one seed", [round(x, 4) for x in same])
    print("eager of two seeds", [round(x, 4) for x in apart])
    if given.json:
        name = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
        result = {"device": name, "kernel": given.kernel, "seeds": seeds, "losses": curves}
        given.json.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
