"""Prints files, functions and kernel roles over their size limits. It informs, it never fails.

Usage: python tools/size_report.py FOLDER...
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_ROLE_LINES = 120  # functions that run on the device: decorated with something called *jit*


def is_role(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is compiled for the device."""
    return any("jit" in ast.unparse(d).split("(")[0] for d in function.decorator_list)


def oversized(path: Path) -> Iterator[tuple[str, int, int]]:
    """What is over its limit in a file: (place, lines, limit)."""
    text = path.read_text(encoding="utf-8")
    lines = len(text.splitlines())
    if lines > MAX_FILE_LINES:
        yield str(path), lines, MAX_FILE_LINES
    for node in ast.walk(ast.parse(text, str(path))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        limit = MAX_ROLE_LINES if is_role(node) else MAX_FUNCTION_LINES
        if lines > limit:
            yield f"{path}:{node.lineno} {node.name}", lines, limit


def main(folders: list[str]) -> None:
    """Prints the report."""
    files = [p for folder in folders for p in sorted(Path(folder).rglob("*.py"))]
    found = [item for path in files for item in oversized(path)]
    for place, lines, limit in found:
        print(f"{place}: {lines} lines, limit {limit}")
    print(f"size report: {len(files)} files, {len(found)} over a limit")


if __name__ == "__main__":
    main(sys.argv[1:])
