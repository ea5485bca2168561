"""The interactive page: one HTML file that needs no network and works from a disk.

Its arithmetic is JavaScript, held to `onchip.ladder` and `onchip.analysis` by tests; GPU records
are written into it.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from onchip import validate
from onchip.analysis.hardware import HARDWARE, Hardware

_PARTS = resources.files("onchip.lab") / "parts"


def render() -> str:
    """The page's HTML."""
    text = _part("page.html")
    gpus = json.dumps([record(gpu) for gpu in HARDWARE]).replace("</", "<\\/")
    parts = {
        "/* style */": _part("page.css"),
        "/* data */": f"const GPUS = {gpus};",
        "/* arithmetic */": _part("arithmetic.js"),
        "/* drawing */": _part("drawing.js"),
        "/* view */": _part("view.js"),
    }
    for mark, body in parts.items():
        assert text.count(mark) == 1, f"page.html has {mark} once"
        text = text.replace(mark, body)
    return text


def write(path: str | Path) -> Path:
    """Writes the page.

    Args:
        path: where to, a name ending in .html.

    Raises:
        ValueError: if the name ends otherwise, or its folder does not exist.
        OSError: if it can't be written.
    """
    path = Path(path)
    if path.suffix.lower() not in (".html", ".htm"):
        allowed = "a name that ends in .html"
        validate.reject("--page", path.name, allowed, "Browsers go by the ending.")
    if not path.parent.is_dir():
        fix = f"Make the folder first: mkdir -p {path.parent}"
        validate.reject("--page", str(path), "a file in a folder that exists", fix)
    path.write_text(render(), encoding="utf-8")
    return path


def record(gpu: Hardware) -> dict:
    """What the page needs of a GPU: 16-bit products and everything else that limits."""
    return {
        "name": gpu.name,
        "flops": gpu.rates.bits16,
        "bandwidth": gpu.bandwidth,
        "exps": gpu.exps,
        "l2_bytes": gpu.l2_bytes,
        "num_sms": gpu.num_sms,
        "source": gpu.source,
    }


def _part(name: str) -> str:
    return (_PARTS / name).read_text(encoding="utf-8").rstrip("\n")
