"""The decoder of the Llama family and Qwen3, in the plainest form that runs fast.

Matrices and what they multiply have the model's dtype; the sum that runs through the layers,
norms, rotations and logits are float32. With the sum in bfloat16 as well, SmolLM2-135M's logits
were off by 0.072 (standard deviation, against float32), otherwise by 0.056, and that was the
difference between a right and a wrong first word.

Legend: T tokens of this step, d hidden size, H query heads, H_kv key and value heads, D head
dimension, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onchip.engine.config import ModelConfig
from onchip.nn import Attention, StepContext
from onchip.paging.cache import PagedKVCache

_NUM_REFINED = 64


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in float32 (Zhang & Sennrich 2019, eq. 4)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # (..., size) -> float32
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Linear(nn.Linear):
    """x W^T without a bias.

    A single row in 16 bits, decode's usual case, is a matrix-vector product: the matrices of one
    step of SmolLM2-135M take 28 ms of one core of a Xeon with AMX so, 43 ms through F.linear.
    In float32 it is the other way round: 51 and 42 ms (torch 2.13, 2026-11-29).
    """

    def __init__(self, num_in: int, num_out: int):
        super().__init__(num_in, num_out, bias=False)

    def forward(self, input: Tensor) -> Tensor:  # (T, num_in)
        if input.shape[0] == 1 and input.dtype != torch.float32:
            return torch.mv(self.weight, input[0]).unsqueeze(0)
        return F.linear(input, self.weight)


class Rotation:
    """Rotary angles of this step's positions, made once and used by every layer.

    Args:
        positions: (T,) integers.
        inv_freq: (D / 2,) radians a step.
    """

    def __init__(self, positions: Tensor, inv_freq: Tensor):
        angles = (positions.float()[:, None] * inv_freq)[:, None]  # (T, 1, D / 2)
        self.cos, self.sin = angles.cos(), angles.sin()

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:  # (T, heads, D)
        a, b = x.float().chunk(2, dim=-1)
        turned = (a * self.cos - b * self.sin, b * self.cos + a * self.sin)
        return torch.cat(turned, dim=-1).to(dtype)


class Layer(nn.Module):
    """One decoder layer: attention, then MLP, each on a normalised copy and added back."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = (config.num_heads, config.num_kv_heads)
        self.head_dim, hidden = config.head_dim, config.hidden_size
        num_rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.attn_norm = RMSNorm(hidden, config.rms_eps)
        self.qkv = Linear(hidden, num_rows)
        self.q_norm = RMSNorm(config.head_dim, config.rms_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_eps) if config.qk_norm else None
        self.attention = Attention(
            config.num_heads, config.head_dim, num_kv_heads=config.num_kv_heads
        )
        self.out = Linear(config.num_heads * config.head_dim, hidden)
        self.mlp_norm = RMSNorm(hidden, config.rms_eps)
        self.gate_up = Linear(hidden, 2 * config.intermediate_size)
        self.down = Linear(config.intermediate_size, hidden)

    def forward(self, x: Tensor, rotate: Rotation, ctx: StepContext) -> Tensor:  # (T, d)
        dtype = self.qkv.weight.dtype
        x = x + self._attend(self.attn_norm(x).to(dtype), rotate, ctx)
        return x + self._mlp(self.mlp_norm(x).to(dtype))

    def _attend(self, x: Tensor, rotate: Rotation, ctx: StepContext) -> Tensor:
        H, H_kv = self.heads
        qkv = self.qkv(x).unflatten(1, (-1, self.head_dim))  # (T, H + 2 H_kv, D)
        qk, v = qkv.split((H + H_kv, H_kv), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, :H]), self.k_norm(qk[:, H:])), dim=1)
        q, k = rotate(qk, v.dtype).split((H, H_kv), dim=1)
        return self.out(self.attention(q, k, v, ctx).flatten(1))

    def _mlp(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """Token ids to hidden states, and hidden states to logits.

    Args:
        config: sizes and constants.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_eps)
        self.head = Linear(config.hidden_size, config.vocab_size)

    def bind(self, cache: PagedKVCache) -> None:
        """Gives every layer its pages.

        Mutates: each layer's attention.
        """
        for layer, k, v in zip(self.layers, cache.k, cache.v, strict=True):
            layer.attention.bind(k, v)  # type: ignore[union-attr]

    def forward(self, token_ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """Runs every layer.

        Args:
            token_ids: (T,) int64.
            positions: (T,) int64, place of each token in its sequence.
            ctx: where keys and values go and what each token sees.

        Returns:
            (T, d) float32.

        Mutates: the cache that is bound.
        """
        inv_freq = torch.tensor(self.config.inv_freq, device=positions.device)
        rotate = Rotation(positions, inv_freq)
        x = self.embed(token_ids).float()
        for layer in self.layers:
            x = layer(x, rotate, ctx)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token.

        A 16-bit product rounds logits to 2 or 3 digits, enough to swap the best two tokens. So
        the few that can win are computed again in float32, from the same weights.

        Args:
            hidden: (B, d) float32, the states after which a token is wanted.

        Returns:
            (B, V) float32.
        """
        weight = self.head.weight
        logits = self.head(hidden.to(weight.dtype)).float()
        if weight.dtype != torch.float32:
            best = logits.topk(min(_NUM_REFINED, logits.shape[1])).indices  # (B, n)
            rows = weight[best].float()  # (B, n, d)
            logits.scatter_(1, best, (rows @ hidden.unsqueeze(2)).squeeze(2))
        return logits
