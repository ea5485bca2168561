"""The project itself: import, version, wheel, README, size report."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import onchip
from tools import readme_tables, size_report

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def run_python(*arguments: str, **options) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=120, **options
    )


IMPORT_PROBE = """
import sys, time
import torch
known = set(sys.modules)
start = time.perf_counter()
import onchip
print(time.perf_counter() - start)
print(" ".join(sorted(set(sys.modules) - known)))
print(torch.cuda.is_initialized())
"""


@pytest.fixture(scope="module")
def import_probe() -> list[str]:
    result = run_python("-c", IMPORT_PROBE)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_import_is_quick_and_touches_no_gpu(import_probe):
    seconds, _, initialised = import_probe
    assert float(seconds) < 2  # beside torch; measured 0.3 s on two busy cores
    assert initialised == "False"


def test_import_brings_no_kernel_and_no_kernel_language(import_probe):
    modules = import_probe[1].split()
    languages = ("triton", "cutlass", "tilelang", "cuda")
    assert [m for m in modules if m.split(".")[0] in languages] == []
    kernels = [m for m in modules if m.startswith("onchip.kernels.")]
    # Arithmetic, no launch: rotary embedding, how float8 tensors lie in memory, choices.
    allowed = {f"onchip.kernels.{name}" for name in ("common", "fp8_layout", "rows")}
    assert set(kernels) <= allowed


def test_version_matches_pyproject():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'^version = "(.+)"$', text, re.M).group(1) == onchip.__version__


def test_public_names_exist():
    assert onchip.__all__ == sorted(onchip.__all__)
    assert [name for name in onchip.__all__ if not hasattr(onchip, name)] == []


def test_wheel_holds_the_package(tmp_path):
    result = run_python("-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path), cwd=ROOT)
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(n).decode() for n in names if n.endswith("/METADATA"))
    kinds = ("*.py", "*.js", "*.css", "*.html")
    files = (path for kind in kinds for path in (ROOT / "src").rglob(kind))
    sources = {str(path.relative_to(ROOT / "src")) for path in files}
    assert sources | {"onchip/py.typed"} <= names
    assert any(n.endswith("licenses/LICENSE") for n in names)
    assert not any(n.startswith(("tests", "tools")) for n in names)
    assert "License-Expression: Apache-2.0" in metadata
    for extra in ("engine", "cli", "plot", "docs", "dev"):
        assert f"Provides-Extra: {extra}" in metadata


def test_readme_usage_runs():
    (block,) = re.findall(r"<!-- usage.*?-->\n```python\n(.*?)```", README, re.S)
    result = run_python("-W", "error", "-c", block)
    assert result.returncode == 0, result.stderr
    assert "kernel " in result.stdout


@pytest.mark.parametrize("page", readme_tables.PAGES)
def test_tables_are_current(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert readme_tables.renewed(page) == text, "run: python tools/readme_tables.py"


def test_readme_links_exist():
    links = re.findall(r"\]\(((?!http)[^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_readme_table_of_results(tmp_path):
    path = tmp_path / "attention.json"
    assert readme_tables.cpu(path) == "No results recorded yet."
    case = {"name": "causal 1024", "dtype": "float32", "part": "forward"}
    report = {"device": "a CPU", "threads": 2, "torch": "2.13.0", "date": "2026-01-02"}
    report["cases"] = [case | {"onchip_us": 1234.5, "ratio": 0.985}]
    path.write_text(json.dumps(report), encoding="utf-8")
    lines = readme_tables.cpu(path).splitlines()
    assert lines[0] == "a CPU, 2 threads, torch 2.13.0, 2026-01-02:"
    assert lines[-1] == "| causal 1024 | float32 | forward | 1.23 | 0.98x |"


def test_readme_table_goes_between_its_marks():
    text = "a\n<!-- begin cpu -->\nold\n<!-- end cpu -->\nz"
    renewed = "a\n<!-- begin cpu -->\nnew\n<!-- end cpu -->\nz"
    assert readme_tables.replaced(text, "page", "cpu", "new") == renewed
    with pytest.raises(ValueError, match="begin other"):
        readme_tables.replaced(text, "page", "other", "new")


def test_size_report_knows_the_limits(tmp_path):
    def function(lines: int, decorator: str = "") -> str:
        return f"{decorator}\ndef f():\n" + "    pass\n" * (lines - 1)

    path = tmp_path / "sizes.py"
    text = "".join(
        [function(60), function(61), function(120, "@triton.jit"), function(121, "@gluon.jit")]
    )
    path.write_text(text + "#\n" * 200, encoding="utf-8")
    found = [(lines, limit) for _, lines, limit in size_report.oversized(path)]
    assert found == [(len(path.read_text().splitlines()), 500), (61, 60), (121, 120)]
