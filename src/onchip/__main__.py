"""`python -m onchip` and the `onchip` command.

`info` and `bench` work with torch alone; the other commands need the cli extra.
"""

from __future__ import annotations

import importlib.util
import sys

_NEEDS_EXTRA = (
    "onchip: this command needs typer, which is not installed; "
    "without it only `onchip info` and `onchip bench` work. "
    "Run: pip install '.[cli]' in onchip's folder"
)


def main() -> int:
    """Runs one command.

    Returns:
        The exit status: 0 fine, 1 a check failed, 2 wrong arguments or a missing extra.
    """
    if importlib.util.find_spec("typer"):
        from onchip import cli

        return cli.main(sys.argv[1:])
    if sys.argv[1:2] == ["info"]:
        from onchip import info

        return info.main(sys.argv[2:])
    if sys.argv[1:2] == ["bench"]:
        from onchip.bench import compare

        return compare.main(sys.argv[2:])
    print(_NEEDS_EXTRA, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
