"""One lock for launches that share memory of a stream.

Launches of one stream run one after another, so they may share scratch memory, if a second
thread's launches do not come between those of a first: Triton's launcher lets other threads run.
"""

from __future__ import annotations

import threading

#: Held from the first launch that writes to shared scratch memory to the last that reads it.
TOGETHER = threading.RLock()
