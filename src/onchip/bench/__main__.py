"""python -m onchip.bench attention | cpu: the benchmarks by name; each has --help of its own."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = ("attention", "cpu")


def main(argv: list[str] | None = None) -> int:
    """Hands the rest of the line to one benchmark."""
    words = sys.argv[1:] if argv is None else argv
    if words in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    if not words or words[0] not in BENCHMARKS:
        got = repr(words[0]) if words else "nothing"
        print(f"benchmark: got {got}; allowed: {', '.join(BENCHMARKS)}.", file=sys.stderr)
        print("Run e.g. python -m onchip.bench attention --peers torch", file=sys.stderr)
        return 2
    return importlib.import_module(f"onchip.bench.{words[0]}").main(words[1:])


if __name__ == "__main__":
    sys.exit(main())
