"""Exact attention whose intermediates never leave the chip."""

import importlib

from onchip.api import (
    attention,
    attention_varlen,
    attention_with_kvcache,
    explain,
    merge_states,
    store_kvcache,
)
from onchip.blocks import block_list
from onchip.dispatch import Explanation, NoKernelError
from onchip.fp8 import FP8QKV, quantize_qkv
from onchip.mods import BlockList, MaskMod, ScoreMod

__version__ = "0.1.0"

_MODULES = ("compat", "engine", "ladder", "nn", "paging", "reference")

__all__ = [  # noqa: RUF022 (plain order)
    "BlockList",
    "Explanation",
    "FP8QKV",
    "MaskMod",
    "NoKernelError",
    "ScoreMod",
    "attention",
    "attention_varlen",
    "attention_with_kvcache",
    "block_list",
    "explain",
    "merge_states",
    "quantize_qkv",
    "store_kvcache",
]


def __getattr__(name: str):
    """Modules that `import onchip` does not load are imported at first use."""
    if name in _MODULES:
        return importlib.import_module(f"onchip.{name}")
    raise AttributeError(f"module 'onchip' has no attribute {name!r}")
