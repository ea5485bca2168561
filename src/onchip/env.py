"""Every ONCHIP_* environment variable: name, default, parser and meaning."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any


@dataclass(frozen=True)
class Variable:
    """One environment variable, read each time it is asked for.

    Args:
        name: the variable's name.
        default: the text it has when unset.
        parse: text -> value; raises ValueError for text it does not know.
        doc: what it does.
    """

    name: str
    default: str
    parse: Callable[[str], Any]
    doc: str

    def get(self) -> Any:
        """The value now.

        Raises:
            ValueError: if the text set is not one that the variable knows.
        """
        return self.parse(os.environ.get(self.name, self.default))

    def is_set(self) -> bool:
        """Whether the variable is set to anything now; much quicker than `get`."""
        return _encoded(self.name) in _SET


#: What os.environ keeps, under encoded names: to ask it itself costs a launch 1 us.
_SET = getattr(os.environ, "_data", os.environ)


@lru_cache(maxsize=None)
def _encoded(name: str):
    return os.environ.encodekey(name) if _SET is not os.environ else name


def _flag(name: str) -> Callable[[str], bool]:
    def parse(text: str) -> bool:
        if text not in ("0", "1"):
            raise ValueError(f"{name}: got {text!r}; allowed: 0 or 1. Unset it or set one of them.")
        return text == "1"

    return parse


CHECK = Variable(
    "ONCHIP_CHECK",
    "0",
    _flag("ONCHIP_CHECK"),
    "1 checks values that live on the device (lengths, page tables, slots) before every call, "
    "which synchronises. On a CPU they are always checked.",
)

AUTOTUNE = Variable(
    "ONCHIP_AUTOTUNE",
    "0",
    _flag("ONCHIP_AUTOTUNE"),
    "1 measures a few tilings at the first call of a kind on a GPU and keeps the fastest, instead "
    "of taking the measured table's; that call takes seconds. Read once for each kind of call.",
)

VARIABLES: tuple[Variable, ...] = (CHECK, AUTOTUNE)
