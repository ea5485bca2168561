"""What `onchip info` reports: versions, devices, kernels and settings. Standard library and torch.

Nothing here raises: what can't be found out is reported as the reason why. A support request
starts with this report, so it has to come from broken installations too.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable
from typing import Any


def collect() -> dict[str, Any]:
    """The report as plain values, ready for JSON. Never raises."""
    return {
        "onchip": _attempt(_onchip_version),
        "python": platform.python_version(),
        "platform": _attempt(platform.platform),
        "torch": _attempt(_torch),
        "triton": _attempt(lambda: _version("triton")),
        "extras": _attempt(_extras),
        "devices": _attempt(_devices),
        "kernels": _attempt(_kernels),
        "settings": _attempt(_settings),
    }


def render(report: dict[str, Any]) -> str:
    """The report for people. Never raises."""
    return _attempt(lambda: _render(report), lambda why: json.dumps(report, default=str) + why)


def main(arguments: list[str]) -> int:
    """`onchip info [--json]` without any package beside torch.

    Args:
        arguments: what follows `info` on the command line.

    Returns:
        The exit status: 2 for an argument it does not know.
    """
    unknown = [a for a in arguments if a != "--json"]
    if unknown:
        print(f"onchip info: got {unknown[0]!r}; allowed: --json", file=sys.stderr)
        return 2
    report = collect()
    print(json.dumps(report, indent=2, default=str) if arguments else render(report))
    return 0


def _attempt(ask: Callable[[], Any], failed: Callable[[str], Any] | None = None) -> Any:
    try:
        return ask()
    except Exception as error:  # whatever is broken, the rest of the report is wanted
        why = f"{type(error).__name__}: {error}"
        return failed(why) if failed else {"error": why}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _onchip_version() -> str:
    import onchip

    return onchip.__version__


def _torch() -> dict[str, Any]:
    import torch

    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "threads": torch.get_num_threads(),
    }


def _extras() -> dict[str, dict[str, str | None]]:
    """Version of each optional package, None where it is not installed."""
    packages = {
        "engine": ("gguf", "safetensors", "tokenizers"),
        "cli": ("typer",),
        "plot": ("matplotlib",),
    }
    return {extra: {p: _version(p) for p in names} for extra, names in packages.items()}


def _devices() -> list[dict[str, Any]]:
    import torch

    from onchip.problem import device_arch

    found: list[dict[str, Any]] = [{"type": "cpu", "name": _cpu_name(), "arch": ""}]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        arch = device_arch(torch.device("cuda", index))
        entry = {"type": "cuda", "name": properties.name, "arch": arch}
        found.append(entry | {"memory_bytes": properties.total_memory})
    return found


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = (x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
            name = next(names, "")
    except OSError:
        name = ""
    return f"{name or platform.processor() or platform.machine()}, {os.cpu_count()} CPUs"


def _kernels() -> list[dict[str, Any]]:
    """Each kernel, and why it can't run on this machine, if it can't."""
    from onchip.kernels import KERNELS

    devices = _devices()
    return [
        {
            "name": record.name,
            "op": record.op.value,
            "summary": record.summary,
            "reasons": _attempt(lambda r=record: _reasons(r, devices), lambda why: [why]),
        }
        for record in KERNELS
    ]


def _reasons(record, devices: list[dict[str, Any]]) -> list[str]:
    """Why no device here runs a kernel: empty when one does."""
    mine = [d for d in devices if d["type"] in record.devices]
    if not mine:
        here = ", ".join(dict.fromkeys(d["type"] for d in devices))
        return [f"runs on {', '.join(sorted(record.devices))}; this machine has {here}"]
    rejected = [record.rejections(_easy_problem(record, d)) for d in mine]
    if all(rejected):
        return rejected[0]
    try:
        record.load()
    except Exception as error:
        return [f"does not load: {type(error).__name__}: {error}"]
    return []


def _easy_problem(record, device: dict[str, Any]):
    """A problem within a kernel's declared limits: what it rejects here is the machine."""
    from onchip.problem import Layout, Mask, Problem

    layout_q, layout_k = min(record.layouts)
    head_dim = min(
        record.max_head_dim, -(-64 // record.head_dim_multiple) * record.head_dim_multiple
    )
    paged = layout_k is Layout.PAGED
    return Problem(
        op=record.op,
        device=device["type"],
        arch=device["arch"],
        dtype=record.dtypes[0],
        kv_dtype=record.dtypes[0],
        layout_q=layout_q,
        layout_k=layout_k,
        batch=1,
        seqlen_q=128,
        seqlen_k=128,
        tokens_q=128,
        num_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        head_dim_v=head_dim,
        mask=Mask(),
        scale=head_dim**-0.5,
        page_size=16 if paged else 0,
        num_pages=8 if paged else 0,
    )


def _settings() -> dict[str, dict[str, str]]:
    from onchip.env import VARIABLES

    return {v.name: _setting(v) for v in VARIABLES}


def _setting(variable) -> dict[str, str]:
    """Value and meaning, and for a value that is not valid what is."""
    shown = {"value": os.environ.get(variable.name, variable.default), "doc": variable.doc}
    try:
        variable.get()
    except ValueError as error:
        shown["error"] = str(error)
    return shown


def _render(report: dict[str, Any]) -> str:
    lines = [f"onchip    {_text(report['onchip'])}", f"python    {report['python']}"]
    lines.append(f"platform  {_text(report['platform'])}")
    lines.append(f"torch     {_torch_text(report['torch'])}")
    lines.append(f"triton    {_text(report['triton'])}")
    lines += _section("extras", report["extras"], _extra_lines)
    lines += _section("devices", report["devices"], _device_lines)
    lines += _section("kernels", report["kernels"], _kernel_lines)
    lines += _section("settings", report["settings"], _setting_lines)
    return "\n".join(lines)


def _text(value: Any) -> str:
    if isinstance(value, dict) and "error" in value:
        return str(value["error"])
    return "not installed" if value is None else str(value)


def _torch_text(torch: dict[str, Any]) -> str:
    if "error" in torch:
        return torch["error"]
    builds = [f"{name} {torch[name.lower()]}" for name in ("CUDA", "HIP") if torch[name.lower()]]
    build = ", ".join(builds) or "no GPU support"
    return f"{torch['version']} ({build}, {torch['threads']} threads)"


def _section(title: str, value: Any, lines: Callable[[Any], list[str]]) -> list[str]:
    failed = isinstance(value, dict) and "error" in value
    return [title, *(f"  {line}" for line in ([value["error"]] if failed else lines(value)))]


def _extra_lines(extras: dict[str, dict[str, str | None]]) -> list[str]:
    lines = []
    for extra, packages in extras.items():
        words = ", ".join(f"{p} {v or 'missing'}" for p, v in packages.items())
        advice = "" if all(packages.values()) else f"; pip install '.[{extra}]' in onchip's folder"
        lines.append(f"{extra:<8}{words}{advice}")
    return lines


def _device_lines(devices: list[dict[str, Any]]) -> list[str]:
    return [" ".join(filter(None, (f"{d['type']:<7}", d["name"], d["arch"]))) for d in devices]


def _kernel_lines(kernels: list[dict[str, Any]]) -> list[str]:
    return [
        f"{k['op']:<9}{k['name']:<13}{'; '.join(k['reasons']) or 'available: ' + k['summary']}"
        for k in kernels
    ]


def _setting_lines(settings: dict[str, dict[str, str]]) -> list[str]:
    return [
        f"{name}={s['value']}  {'not valid. ' + s['error'] if 'error' in s else s['doc']}"
        for name, s in settings.items()
    ]
