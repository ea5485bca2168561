"""What compiled code depends on, as Triton's cache of binaries on disk should see it."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path


class Compiled:
    """Base of the objects that kernels take as constants and ask for their properties.

    Triton (3.6 to 3.9) files a binary under the kernel's source and its constants' text. Neither
    holds the code of the properties: after an update that changed only that, it would find the
    binary of before. So the text of the package's kernels goes into the key.
    """

    @property
    def cache_key(self) -> str:
        """What Triton takes instead of the object's text."""
        return f"{self!r}-{_digest()}"


@lru_cache(1)
def _digest() -> str:
    """Of the sources of all kernels."""
    found = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()
