"""Exact attention whose intermediates never leave the chip."""

from onchip.api import (
    attention,
    attention_varlen,
    attention_with_kvcache,
    explain,
    merge_states,
    store_kvcache,
)
from onchip.dispatch import Explanation, NoKernelError

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "NoKernelError",
    "attention",
    "attention_varlen",
    "attention_with_kvcache",
    "explain",
    "merge_states",
    "store_kvcache",
]
