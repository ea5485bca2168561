"""A small engine around the attention layer: model files in, text out."""

from onchip.engine.llm import LLM, Result, Token
from onchip.engine.sampling import SamplingParams

__all__ = ["LLM", "Result", "SamplingParams", "Token"]
