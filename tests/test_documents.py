"""The site's parts: figures that are well formed, pages that exist, links to either."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools import figures

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


@pytest.mark.parametrize("name", figures.FIGURES)
def test_figures_are_well_formed(name):
    if name in ("bytes", "roofline", "roofline_backward", "published"):
        pytest.importorskip("matplotlib")
    assert ElementTree.fromstring(figures.FIGURES[name]()).tag.endswith("svg")


def test_figures_show_what_the_pages_say():
    assert "28 us" in figures.FIGURES["serial"]() and "22 us" in figures.FIGURES["overlapped"]()
    assert "2 tasks by head on 6 SMs" in figures.by_heads()
    in_order, longest_first = figures.causal_in_order(), figures.causal_longest_first()
    assert "SMs: 16 tiles" in in_order and "SMs: 13 tiles" in longest_first
    assert "sequence C, 9 tokens: block table [2, 6, 7]" in figures.pages()


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    missing = [page for page in PAGES if str(page.relative_to(DOCS)) not in nav]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!http|#)([^)#]+)", text):
        target = (page.parent / link).resolve()
        if target.parent == DOCS / "figures":
            assert target.stem in figures.FIGURES or target.exists(), link
        elif target != DOCS / "lab.html":
            assert target.exists(), link


def test_every_figure_is_used():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in figures.FIGURES if f"figures/{name}.svg" not in text] == []
