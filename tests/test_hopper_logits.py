"""Assembly of `hopper/logits.py`, run step by step: softcap, ALiBi and edges by their formulas.

The model of the roles imitates it as a whole; operands' numbers and columns are held here.
"""

from __future__ import annotations

import math
import re

import pytest

pytest.importorskip("triton")

from onchip.kernels.hopper import logits

SCALE, SOFTCAP, SLOPE = 0.37, 3.0, 0.25
LOWS = (None, (3, 8), (0, 63), (-5, 200), (17, -(1 << 30)))
HIGHS = (None, (7, 8), (100, 62), (-1, 15), (20, 1 << 30))
EDGES = [(low, high) for low in LOWS for high in HIGHS if low or high]
OPERATIONS = {
    "mov.f32": lambda x: x,
    "mul.f32": lambda x, y: x * y,
    "add.f32": lambda x, y: x + y,
    "sub.f32": lambda x, y: x - y,
    "abs.f32": abs,
    "fma.rn.f32": lambda x, y, z: x * y + z,
    "ex2.approx.ftz.f32": lambda x: 2.0**x,
    "rcp.approx.ftz.f32": lambda x: 1 / x,
    "setp.ge.s32": lambda x, y: x >= y,
    "setp.le.s32": lambda x, y: x <= y,
    "setp.le.and.s32": lambda x, y, p: x <= y and p,
    "selp.f32": lambda x, y, p: x if p else y,
}


def _run(text: str, constraints: str, inputs: list) -> list:
    """Results of straight-line assembly; the operands are its results, then `inputs`."""
    kinds = constraints.split(",")
    num_results = sum(kind.startswith("=&") for kind in kinds)
    assert len(kinds) == num_results + len(inputs)
    held = {f"${num_results + i}": x for i, x in enumerate(inputs)}

    def value(name: str):
        if name.startswith("0f"):
            return {"0fFF800000": -math.inf}[name]
        return held[name] if name in held else float(name)

    for step in text.strip("{} ").split(";"):
        name, *rest = re.findall(r"[\w.$-]+", step) or [".reg"]
        if name != ".reg":
            held[rest[0]] = OPERATIONS[name](*(value(x) for x in rest[1:]))
    return [held[f"${i}"] for i in range(num_results)]


def _place_of(i: int, thread: int) -> tuple[int, int]:
    """Row (0 or 1) and column of a thread's value number i, as wgmma leaves them."""
    return i // 2 % 2, i // 4 * 8 + 2 * thread + i % 2


@pytest.mark.parametrize("n", [32, 64])
@pytest.mark.parametrize("thread", range(4))
@pytest.mark.parametrize(("cap", "alibi"), [(True, False), (False, True), (True, True)])
def test_logits(n, thread, cap, alibi):
    s = [math.sin(i) * 8 for i in range(n)]
    rows = (40, -7)  # a row's own key, counted from the tile's first
    unit = 2 * SCALE * math.log2(math.e) if cap else SCALE
    inputs = [*s, *[unit] * n]
    if cap:
        inputs += [*[SOFTCAP] * n, *[-2 * SOFTCAP] * n]
    if alibi:
        inputs += [*(rows[i // 2 % 2] - 2 * thread for i in range(n)), *[-SLOPE] * n]
    num_floats = 2 + 2 * cap + 2 * alibi
    found = _run(logits._formula(n, cap, alibi), logits._constraints(n, num_floats, 0), inputs)
    for i, got in enumerate(found):
        row, column = _place_of(i, thread)
        want = SOFTCAP * math.tanh(s[i] * SCALE) if cap else s[i] * SCALE
        want -= SLOPE * abs(rows[row] - column) if alibi else 0
        assert got == pytest.approx(want, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("n", [32, 64])
@pytest.mark.parametrize("thread", range(4))
@pytest.mark.parametrize(("low", "high"), EDGES)
def test_edges(n, thread, low, high):
    s = [float(i + 1) for i in range(n)]
    limits = [x for x in (low, high) if x is not None]
    inputs = list(s)
    for limit in limits:
        inputs += [limit[i // 2 % 2] - 2 * thread for i in range(n)]
    text = logits._choice(n, low is not None, high is not None)
    found = _run(text, logits._constraints(n, 1, len(limits)), inputs)
    for i, got in enumerate(found):
        row, column = _place_of(i, thread)
        seen = (low is None or low[row] <= column) and (high is None or column <= high[row])
        assert got == (s[i] if seen else -math.inf)
