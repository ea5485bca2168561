"""What a float8 KV cache costs in accuracy: errors against float64, on a CPU.

Tokens are stored with `onchip.store_kvcache` in pages of 16 and read by
`onchip.attention_with_kvcache`; scales are the largest entry over 448, of each head of K and V,
of the whole tensor, or 1. Inputs: FlashAttention-3's heavy-tailed ones (section 4.3; D = 128,
8 heads) and, with --text, the queries, keys and values of every layer of SmolLM2-135M. The last
16 queries of each count, causal.

Usage: python benchmarks/fp8_cache_error.py [--text FILE] [--tokens 2048] [--model FILE.gguf]
                                          [--json OUT.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from fp8_error import inputs
from fp8_model import next_tokens, plain
from torch import Tensor

import onchip
from onchip import reference
from onchip.engine import LLM
from onchip.engine.demo import find_model

PAGE, QUERIES = 16, 16
SCALES = ("head", "tensor", "one")
FLOAT8 = torch.float8_e4m3fn


def scale_of(x: Tensor, kind: str) -> Tensor:
    """(H_kv,) for x of (S_k, H_kv, D)."""
    top = x.float().abs().amax((0, 2))
    if kind == "tensor":
        top = top.amax().expand_as(top)
    return torch.ones_like(top) if kind == "one" else (top / 448).contiguous()


def through_pages(q: Tensor, k: Tensor, v: Tensor, kind: str | None) -> Tensor:
    """bfloat16 attention of q (1, S_q, H, D) over k, v (S_k, H_kv, D) kept in pages."""
    length = len(k)
    columns = -(-length // PAGE)
    dtype = k.dtype if kind is None else FLOAT8
    k_cache, v_cache = (torch.zeros(columns, PAGE, *x.shape[1:]).to(dtype) for x in (k, v))
    scales = (None, None) if kind is None else (scale_of(k, kind), scale_of(v, kind))
    slots = torch.randperm(columns)[:, None] * PAGE + torch.arange(PAGE)
    onchip.store_kvcache(k, v, k_cache, v_cache, slots.flatten()[:length], *scales)
    out = onchip.attention_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=torch.tensor([length], dtype=torch.int32),
        block_table=(slots[:, 0] // PAGE).int()[None],
        causal=True,
        k_scale=scales[0],
        v_scale=scales[1],
    )
    assert isinstance(out, Tensor)
    return out


def errors(q: Tensor, k: Tensor, v: Tensor) -> dict[str, float]:
    """Relative Frobenius error of each way to keep one sequence's (1, S, H, D)."""
    q = q[:, -QUERIES:]
    want = reference.attention(q, k, v, causal=True)[0]
    q, k, v = q.bfloat16(), k[0].bfloat16(), v[0].bfloat16()
    found = {}
    for kind in (None, *SCALES):
        off = through_pages(q, k, v, kind).double() - want
        found[kind or "bfloat16"] = float(off.norm() / want.norm())
    return found


def heavy_tailed(seqlen: int) -> dict[str, float]:
    """One sequence of FlashAttention-3's distribution."""
    g = torch.Generator().manual_seed(seqlen)
    return errors(*(inputs(seqlen, 8, g) for _ in range(3)))


def real(text: Path, num_tokens: int, model: Path | None) -> list[dict[str, float]]:
    """Each layer of the demo's model on a text."""
    llm = LLM(model or find_model())
    ids = llm.tokenizer.encode(text.read_text(encoding="utf-8"))[:num_tokens]
    _, seen = next_tokens(llm.runner.model, torch.tensor(ids), plain)
    return [errors(*layer) for layer in seen]


def main() -> None:
    """Prints errors and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    found: dict = {"heavy": {n: heavy_tailed(n) for n in (1024, 8192, 65536)}}
    for seqlen, row in found["heavy"].items():
        print(f"N = {seqlen}:", {name: round(x, 4) for name, x in row.items()}, flush=True)
    if options.text is not None:
        found["layers"] = layers = real(options.text, options.tokens, options.model)
        for name in layers[0]:
            of_layers = [row[name] for row in layers]
            middle, worst = statistics.median(of_layers), max(of_layers)
            print(f"{name}: median layer {middle:.4f}, worst {worst:.4f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
