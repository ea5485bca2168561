"""Runs a script that models a kernel's roles, in a process without Triton's interpreter."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests import compile_only


def results_of(script: Path, entries: list[dict], folder: Path, seconds: float = 280) -> list:
    """What a model found for each entry.

    Args:
        script: takes a file of entries as JSON and the name of the file that it saves.
        entries: of one case each.
        folder: for both files.
        seconds: after which it has failed.
    """
    cases, found = folder / "cases.json", folder / "out.pt"
    cases.write_text(json.dumps(entries))
    compile_only.output_of(script, str(cases), str(found), seconds=seconds)
    return torch.load(found)
