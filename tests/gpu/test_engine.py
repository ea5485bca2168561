"""The demo's model on a GPU: the same greedy tokens as on the CPU."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from onchip.engine import demo
from onchip.engine.llm import LLM
from onchip.engine.sampling import SamplingParams

pytestmark = pytest.mark.gpu
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a small dragon who",
    "def fibonacci(n):",
    "Water boils at",
)


@pytest.fixture(scope="module")
def model():
    """A file that ONCHIP_TEST_MODEL names, or the demo's."""
    if "ONCHIP_TEST_MODEL" in os.environ:
        return os.environ["ONCHIP_TEST_MODEL"]
    try:
        return demo.find_model()
    except ValueError as error:
        pytest.skip(str(error))


def greedy(model, device: str, page_size: int) -> list[list[int]]:
    """48 tokens of each prompt, all in one batch."""
    llm = LLM(model, device=device, dtype=torch.float32, page_size=page_size)
    params = SamplingParams(max_tokens=48, temperature=0.0)
    return [list(each.token_ids) for each in llm.generate(list(PROMPTS), params)]


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_greedy_tokens_are_those_of_the_cpu(model, page_size):
    assert greedy(model, "cuda", page_size) == greedy(model, "cpu", 16)
