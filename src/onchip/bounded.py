"""A memo with a bound on memory, for servers whose shapes never repeat."""

from __future__ import annotations

from typing import TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")


class Bounded(dict[_K, _V]):
    """A dict that forgets everything when a new key comes and it is full.

    Args:
        most: entries that it holds, at least 1.
    """

    __slots__ = ("most",)

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def __setitem__(self, key: _K, value: _V) -> None:
        if len(self) >= self.most and key not in self:
            self.clear()
        super().__setitem__(key, value)
