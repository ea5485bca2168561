"""Renews the tables of the documents from the capability records and benchmarks/results.

Usage: python tools/readme_tables.py

A table lies between `<!-- begin NAME -->` and `<!-- end NAME -->`; tests check that it is current.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import ModuleType

from onchip.analysis.words import human, human_us
from onchip.compat import flash_attn, flash_attn_3
from onchip.kernels import KERNELS, Kernel
from onchip.problem import Op

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def kernels() -> str:
    """What each capability record declares."""
    head = ["kernel", "part", "devices", "dtypes", "queries, keys", "D up to", "features"]
    return table(head, [_kernel_row(record) for record in KERNELS])


def _kernel_row(record: Kernel) -> list[str]:
    layouts = sorted(f"{q.value}, {k.value}" for q, k in record.layouts)
    return [
        f"`{record.name}`" + (" (only by name)" if record.by_name else ""),
        record.op.value,
        ", ".join(sorted(record.devices)),
        ", ".join(str(d).removeprefix("torch.") for d in record.dtypes),
        "; ".join(layouts),
        str(record.max_head_dim),
        ", ".join(sorted(record.features)) if record.op.value != "store" else "",
    ]


def features() -> str:
    """Which kernel takes which optional feature."""
    records = [record for record in KERNELS if record.op is not Op.STORE]
    names = sorted(set().union(*(record.features for record in records)))
    head = ["feature", *(f"`{record.name}` {record.op.value}" for record in records)]
    rows = [[f"`{n}`", *("yes" if n in r.features else "" for r in records)] for n in names]
    return table(head, rows)


def cpu(path: Path = RESULTS / "cpu" / "attention.json") -> str:
    """Speed of the CPU kernels, from what `python -m onchip.bench.cpu` wrote.

    Args:
        path: JSON with `device`, `threads`, `torch`, `date` and `cases`; each case has `name`,
            `dtype`, `part`, `onchip_us`, and `ratio`: torch's time over onchip's for the same
            FLOPs, above 1 where onchip is quicker.
    """
    if not path.exists():
        return "No results recorded yet."
    report = json.loads(path.read_text(encoding="utf-8"))
    where = "{device}, {threads} threads, torch {torch}, {date}".format(**report)
    head = ["call", "dtype", "part", "onchip, ms", "speed against torch's"]
    rows = [_case_row(case) for case in report["cases"]]
    return f"{where}:\n\n{table(head, rows)}"


def _case_row(case: dict) -> list[str]:
    time_ms = f"{case['onchip_us'] / 1000:.2f}"
    return [case["name"], case["dtype"], case["part"], time_ms, f"{case['ratio']:.2f}x"]


def gpu(path: Path = RESULTS / "h200" / "portable.json") -> str:
    """Speed of the GPU kernels, from what `python -m onchip.bench.attention` wrote.

    Args:
        path: JSON with `device`, `torch`, `triton`, `date` and `cells`; each cell has `part`,
            `dim`, `length`, `causal` and `tflops` by name.
    """
    report = json.loads(path.read_text(encoding="utf-8"))
    where = "{device}, torch {torch}, triton {triton}, {date}, bfloat16, TFLOP/s".format(**report)
    names = ["onchip", "flash", "flex", "cudnn"]
    heads = ["onchip", "torch FlashAttention-2", "compiled FlexAttention", "cuDNN"]
    rows = []
    for cell in report["cells"]:
        mask = "causal" if cell["causal"] else "full"
        speeds = [f"{cell['tflops'][n]:.0f}" if n in cell["tflops"] else "" for n in names]
        rows.append([cell["part"], str(cell["dim"]), str(cell["length"]), mask, *speeds])
    return f"{where}:\n\n{table(['part', 'D', 'N', 'mask', *heads], rows)}"


_PEER_HEADS = {"fa3": "FlashAttention-3", "fa4": "FlashAttention-4", "cudnn": "cuDNN"}


def hopper(path: Path = RESULTS / "h200" / "hopper.json") -> str:
    """Public calls of the Hopper kernels beside every peer, in one process in turns.

    Args:
        path: what `python -m onchip.bench attention --kernel hopper --peers cudnn,fa3,fa4` wrote.
    """
    report = json.loads(path.read_text(encoding="utf-8"))
    where = "{device}, torch {torch}, triton {triton}, {date}, bfloat16, TFLOP/s".format(**report)
    head = ["part", "D", "N", "mask", "onchip", *_PEER_HEADS.values(), "of the best"]
    cells = sorted(report["cells"], key=lambda c: (c["part"] != "forward", *_of_cell(c)))
    rows = [[c["part"], *_call_words(c), *_speed_words(c["tflops"])] for c in cells]
    return f"{where}:\n\n{table(head, rows)}"


def _of_cell(cell: dict) -> tuple:
    return cell["dim"], cell["length"], cell["causal"]


def _call_words(cell: dict) -> list[str]:
    return [str(cell["dim"]), str(cell["length"]), "causal" if cell["causal"] else "full"]


def _speed_words(speeds: dict[str, float]) -> list[str]:
    """onchip's, each peer's, and onchip's over the quickest peer's."""
    peers = [f"{speeds[name]:.0f}" if name in speeds else "" for name in _PEER_HEADS]
    best = max(speeds[name] for name in _PEER_HEADS if name in speeds)
    return [f"{speeds['onchip']:.0f}", *peers, f"{speeds['onchip'] / best:.2f}x"]


def layer(path: Path = RESULTS / "h200" / "hopper.json") -> str:
    """Forward and backward of one causal layer of 64k tokens, from the same run as `hopper`."""
    report = json.loads(path.read_text(encoding="utf-8"))
    names = {"onchip": "onchip", **_PEER_HEADS}
    rows = [
        [names[row["name"]], f"{row['ms']:.1f}", str(row["peak_mib"])]
        for row in report["varied"]
        if row["case"] == "layer"
    ]
    return table(["forward and backward", "ms", "peak memory over the inputs, MiB"], rows)


def deterministic(path: Path = RESULTS / "h200" / "hopper.json") -> str:
    """The backward with sums in a fixed order beside the default, in turns."""
    report = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    for row in report["varied"]:
        if row["case"] == "deterministic":
            fixed, usual = row["tflops"]["deterministic"], row["tflops"]["default"]
            rows.append(
                [*_call_words(row), f"{usual:.0f}", f"{fixed:.0f}", f"{fixed / usual:.2f}x"]
            )
    return table(["D", "N", "mask", "default", "deterministic", ""], rows)


def hopper_others(path: Path = RESULTS / "h200" / "hopper_forward.json") -> str:
    """The Hopper forward's kernels alone beside FlashAttention-3, in all kinds of calls.

    Args:
        path: what `benchmarks/hopper_forward.py` wrote.
    """
    report = json.loads(path.read_text(encoding="utf-8"))
    if not report.get("others"):
        return "No results recorded yet."
    where = "{device}, torch {torch}, triton {triton}, {date}, TFLOP/s".format(**report)
    head = ["call", "D", "N", "mask", "onchip", "FlashAttention-3", ""]
    dense = [{"case": "16k tokens, kernels alone"} | cell for cell in report["cells"]]
    rows = [_other_row(row) for row in (*dense, *report["others"])]
    return f"{where}:\n\n{table(head, rows)}"


def _other_row(row: dict) -> list[str]:
    dims = dict.fromkeys((row["dim"], row.get("dim_v", row["dim"])))
    return [
        row["case"],
        ", ".join(map(str, dims)),
        str(row.get("length", "")),
        "causal" if row["causal"] else "full",
        f"{row['tflops']['onchip']:.0f}",
        f"{row['tflops']['fa3']:.0f}",
        f"{row['of_fa3']:.2f}x",
    ]


def kernels_alone(path: Path = RESULTS / "h200" / "portable_kernels.json") -> str:
    """The portable kernels without a call's host time, beside torch's FlashAttention-2."""
    report = json.loads(path.read_text(encoding="utf-8"))
    where = "{device}, torch {torch}, triton {triton}, {date}, bfloat16".format(**report)
    head = ["part", "D", "N", "mask", "onchip, TFLOP/s", "FlashAttention-2", "ratio"]
    return f"{where}:\n\n{table(head, [_alone_row(cell) for cell in report['cells']])}"


def _alone_row(cell: dict) -> list[str]:
    mask = "causal" if cell["causal"] else "full"
    speeds = [f"{cell['onchip_tflops']:.0f}", f"{cell['flash_tflops']:.0f}"]
    ratio = f"{cell['flash_ms'] / cell['onchip_ms']:.2f}x"
    return [cell["part"], str(cell["dim"]), str(cell["length"]), mask, *speeds, ratio]


def varied(path: Path = RESULTS / "h200" / "portable.json") -> str:
    """Windows, packed sequences and memory, from the same run as `gpu`."""
    report = json.loads(path.read_text(encoding="utf-8"))
    head = ["case", "part", "D", "mask", "measured", "against"]
    shown = ("memory", "window", "groups", "varlen")
    rows = [_varied_row(row) for row in report.get("varied", []) if row["case"] in shown]
    return table(head, rows) if rows else "No results recorded yet."


def hopper_varied() -> str:
    """The same of the Hopper kernels, from the same run as `layer` and `deterministic`."""
    return varied(RESULTS / "h200" / "hopper.json")


def _varied_row(row: dict) -> list[str]:
    if row["case"] == "memory":
        what = f"forward and backward at N = {row['length']}, peak"
        size = f"{row['of_tensors']:.2f}x"
        return [what, "both", "128", "causal", size, "bytes of inputs, outputs and gradients"]
    part, dim = row["part"], str(row["dim"])
    if row["case"] == "window":
        share = f"{row['of_causal']:.3f}x"
        return ["window of 1024 at N = 16k", part, dim, "causal", share, "time of full causal"]
    mask = "causal" if row["causal"] else "full"
    if row["case"] == "groups":
        share = f"{row['of_equal']:.2f}x"
        what = f"32/8 heads at N = {row['length']}"
        return [what, part, dim, mask, share, "speed of 32/32 heads"]
    share = f"{row['of_dense']:.2f}x"
    return ["64 packed sequences", part, dim, mask, share, "FLOP/s of dense at their mean length"]


def decode(path: Path = RESULTS / "h200" / "decode.json") -> str:
    """Paged decode beside FlashAttention-3, from what `benchmarks/decode.py` wrote."""
    report = json.loads(path.read_text(encoding="utf-8"))
    where = "{device}, torch {torch}, triton {triton}, {date}, {dtype}".format(**report)
    head = ["heads", "D", "batch, context", "page", "S_q", "cache", "onchip, us", "TB/s"]
    head += ["of a plain read", "FA3, us", "FA3 / onchip"]
    return f"{where}:\n\n{table(head, [_decode_row(row) for row in report['rows']])}"


def _decode_row(row: dict) -> list[str]:
    batch, context = row["lengths"]
    theirs = row.get("fa3_us")
    return [
        f"{row['heads']}/{row['kv_heads']}",
        str(row["dim"]),
        f"{batch}, {context}" + (f" ({row['name']})" if row["name"] else ""),
        str(row["page"]),
        str(row["seqlen_q"]),
        "float8" if row["float8"] else "16 bit",
        f"{row['onchip_us']:.1f}",
        f"{row['onchip_tbps']:.2f}",
        f"{row['read_us'] / row['onchip_us']:.2f}" if row.get("read_us") else "",
        f"{theirs:.1f}" if theirs else "",
        f"{theirs / row['onchip_us']:.2f}" if theirs else "",
    ]


def published(path: Path = RESULTS / "h200" / "published.json") -> str:
    """Three steps against tiles, from what `onchip bench --published --json` wrote."""
    if not path.exists():
        return "No results recorded yet."
    report = json.loads(path.read_text(encoding="utf-8"))
    where = "{device}, torch {torch}, triton {triton}, {date}, float16".format(**report)
    lengths = list(dict.fromkeys(cell["case"]["length"] for cell in report["cells"]))
    parts = {"forward": "forward", "both": "forward and backward"}
    rows = []
    for part in dict.fromkeys(cell["part"] for cell in report["cells"]):
        found = {c["case"]["length"]: c for c in report["cells"] if c["part"] == part}
        for index, row in enumerate(found[lengths[0]]["rows"]):
            own = [found[n]["rows"][index] if n in found else _NOT_RUN for n in lengths]
            rows.append([parts[part], row["method"], *_times_text(own), *_of_longest(own)])
    head = ["part", "method", *(f"N = {n}" for n in lengths), "of the roof", "memory", "predicted"]
    return f"{where}:\n\n{table(head, rows)}"


_NOT_RUN = {"time": None, "why_not": "not measured"}


def _times_text(rows: list[dict]) -> list[str]:
    """A time for each N, or a reason that holds for all of them said once."""
    if not any(row["time"] for row in rows):
        return [rows[0]["why_not"], *[""] * (len(rows) - 1)]
    return [_time_text(row) for row in rows]


def _time_text(row: dict) -> str:
    if not row["time"]:
        return row["why_not"]
    time = row["time"]
    spread = f"{time['low_us'] / 1e3:.3g} - {time['high_us'] / 1e3:.3g}"
    return f"{time['median_us'] / 1e3:.3g} ms ({spread})"


def _of_longest(rows: list[dict]) -> list[str]:
    """Fraction of the roof, memory and predicted time of the longest N that has a time."""
    timed = [row for row in rows if row["time"]]
    if not timed:
        return ["", "", ""]
    last = timed[-1]
    predicted = last["predicted_us"] or ()
    words = " - ".join(human_us(us) for us in predicted)
    return [f"{last['roofline_fraction']:.0%}", human(last["peak_bytes"]), words]


def counters(path: Path = RESULTS / "h200" / "counters.json") -> str:
    """Slow-memory bytes by the GPU's counters, and by the model, from `onchip bench --counters`."""
    if not path.exists():
        return "No results recorded yet."
    report = json.loads(path.read_text(encoding="utf-8"))
    where = "{device}, driver {driver}, {date}".format(
        driver=report["nvidia_smi"].get("driver_version", "?"), **report
    )
    head = ["call", "read", "predicted", "written", "predicted", "in all, measured / predicted"]
    head += ["bytes a pair and head", "kernels: time, DRAM, tensor cores, bank conflicts, waits"]
    return f"{where}:\n\n{table(head, [_count_row(call) for call in report['calls']])}"


def _count_row(call: dict) -> list[str]:
    kernels = call["kernels"]
    read, written = (sum(k[f"{what}_bytes"] for k in kernels) for what in ("read", "written"))
    wanted = call["predicted"]
    kernel_words = "<br>".join(_kernel_words(kernel) for kernel in kernels)
    return [
        call["words"], human(read), human(wanted[0]), human(written), human(wanted[1]),
        f"{(read + written) / sum(wanted):.2f}", f"{(read + written) / call['pairs']:.2g}",
        kernel_words,
    ]  # fmt: skip


def _kernel_words(kernel: dict) -> str:
    waits = ", ".join(f"{name} {value:.1f}" for name, value in list(kernel["stalls"].items())[:2])
    tensor = kernel["tensor_percent"]
    parts = [human_us(kernel["time_us"]), f"{kernel['dram_percent']:.0f} %"]
    parts += [
        f"{tensor:.0f} %" if tensor is not None else "-",
        str(kernel["bank_conflicts"]),
        waits,
    ]
    return f"`{kernel['name'][:40]}`: {', '.join(parts)}"


def parameters(module: ModuleType) -> str:
    """Every parameter of a compat module's functions: its default, and whether it does something.

    Args:
        module: with __all__ and STATUS.
    """
    rows: dict[tuple, list[str]] = {}  # name, default, status and note: functions
    for function in module.__all__:
        for name, parameter in inspect.signature(getattr(module, function)).parameters.items():
            fallback = module.STATUS.get(name, ("supported", ""))
            status, note = module.STATUS.get(f"{function}.{name}", fallback)
            default = "" if parameter.default is parameter.empty else f"`{parameter.default}`"
            rows.setdefault((name, default, status, note), []).append(function)
    head = ["parameter", "default", "functions", "status", "notes"]
    return table(head, [_parameter_row(module, *row) for row in rows.items()])


def _parameter_row(module: ModuleType, key: tuple, functions: list[str]) -> list[str]:
    name, default, status, note = key
    short = [f.removeprefix("flash_attn_").removesuffix("_func") for f in functions]
    where = "all" if len(functions) == len(module.__all__) else ", ".join(short)
    return [f"`{name}`", default, where, status, note]


def compat_2() -> str:
    """Parameters of the imitated FlashAttention-2."""
    return parameters(flash_attn)


def compat_3() -> str:
    """Parameters of the imitated FlashAttention-3."""
    return parameters(flash_attn_3)


def replaced(text: str, page: str, name: str, body: str) -> str:
    """The text with what lies between a table's two marks replaced.

    Raises:
        ValueError: if a mark is missing.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if begin not in text or end not in text:
        raise ValueError(f"{page}: no {begin} ... {end}; add both where the table belongs")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{body}\n{end}{rest.partition(end)[2]}"


PAGES = {
    "README.md": ("kernels",),
    "docs/benchmarks.md": (
        "published",
        "counters",
        "cpu",
        "kernels_alone",
        "hopper",
        "deterministic",
        "layer",
        "hopper_varied",
        "hopper_others",
        "gpu",
        "varied",
        "decode",
    ),
    "docs/support.md": ("kernels", "features"),
    "docs/compat.md": ("compat_2", "compat_3"),
}
TABLES = {
    "kernels": kernels,
    "features": features,
    "published": published,
    "counters": counters,
    "cpu": cpu,
    "hopper": hopper,
    "deterministic": deterministic,
    "layer": layer,
    "hopper_varied": hopper_varied,
    "hopper_others": hopper_others,
    "gpu": gpu,
    "kernels_alone": kernels_alone,
    "varied": varied,
    "decode": decode,
    "compat_2": compat_2,
    "compat_3": compat_3,
}


def renewed(page: str) -> str:
    """A page's text with every table made anew.

    Args:
        page: one of `PAGES`.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in PAGES[page]:
        text = replaced(text, page, name, TABLES[name]())
    return text


if __name__ == "__main__":
    for page in PAGES:
        (ROOT / page).write_text(renewed(page), encoding="utf-8")
