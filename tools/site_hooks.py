"""What mkdocs adds to the pages of docs/: figures that onchip draws, and the interactive page."""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.structure.files import File  # type: ignore[import-not-found]

sys.path.insert(0, str(Path(__file__).parent))

import figures


def on_files(files, config):
    """Adds the generated files."""
    from onchip.lab import page

    made = {f"figures/{name}.svg": draw() for name, draw in figures.FIGURES.items()}
    for uri, text in {**made, "lab.html": page.render()}.items():
        files.append(File.generated(config, uri, content=text))
    return files
