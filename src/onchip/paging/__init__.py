"""Keys and values in fixed-size pages: who owns which page, and where a token lies."""

from __future__ import annotations

from onchip.paging.cache import PagedKVCache
from onchip.paging.cascade import Cascade
from onchip.paging.pool import OutOfPages, PagePool

__all__ = ["Cascade", "OutOfPages", "PagePool", "PagedKVCache"]
