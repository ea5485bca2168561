"""Schedules of loads and computation, against worked numbers and formulas."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from onchip.analysis.pipeline import Schedule, ping_pong, pipelined, serial


def test_worked_example():
    """4 tiles, load 2 us, compute 5 us: 28 us one after the other, 22 us overlapped, 1.27x."""
    one, two = serial(2, 5, 4), pipelined(2, 5, 4)
    assert (one.total_us, two.total_us) == (28, 22)
    assert one.total_us / two.total_us == pytest.approx(1.27, abs=0.005)
    assert two.fill_us("compute") == 2 and two.drain_us("load") == 8
    assert two.drain_us("compute") == 0 and two.busy_us("compute") == 20


def _check(schedule: Schedule) -> None:
    for name in schedule.lanes:
        spans = schedule.lane(name)
        assert spans[0].start_us >= 0
        for before, after in zip(spans, spans[1:], strict=False):
            assert before.end_us <= after.start_us  # a unit does one thing at a time


@pytest.mark.parametrize(("load", "compute"), [(2, 5), (5, 2), (3, 3), (0.5, 4)])
@pytest.mark.parametrize("num_tiles", [1, 2, 7])
def test_steady_state_is_the_slower_side(load, compute, num_tiles):
    assert serial(load, compute, num_tiles).total_us == num_tiles * (load + compute)
    for stages in (2, 3, 5):
        schedule = pipelined(load, compute, num_tiles, stages)
        _check(schedule)
        slower = max(load, compute)
        assert schedule.total_us == pytest.approx(load + compute + (num_tiles - 1) * slower)
        loads, computed = schedule.lane("load"), schedule.lane("compute")
        for tile in range(num_tiles):
            assert loads[tile].end_us <= computed[tile].start_us
            if tile >= stages:
                assert computed[tile - stages].end_us <= loads[tile].start_us


def test_more_stages_absorb_nothing_when_times_are_even_but_run_further_ahead():
    two, four = pipelined(1, 4, 8, 2), pipelined(1, 4, 8, 4)
    assert two.total_us == four.total_us
    assert four.lane("load")[3].end_us < two.lane("load")[3].end_us


def test_ping_pong_hides_the_softmax_of_one_under_the_products_of_the_other():
    alone, together = ping_pong(2, 3, 2, 8, 1), ping_pong(2, 3, 2, 4, 2)
    _check(together)
    assert alone.total_us == 8 * 7
    assert together.busy_us("tensor cores") == 8 * 4 == alone.busy_us("tensor cores")
    # The tensor cores are the slower unit: beyond fill and drain they never rest.
    assert together.total_us == 34
    slow_softmax = ping_pong(1, 6, 1, 4, 2)
    _check(slow_softmax)
    assert slow_softmax.fill_us("exponentials") == 1
    assert slow_softmax.total_us == 1 + 8 * 6 + 1


def test_gantt():
    text = serial(2, 5, 2).gantt(28).splitlines()
    assert text == [
        "serial: 14 us",
        "load    0000..........1111..........",
        "compute ....0000000000....1111111111",
    ]
    assert str(pipelined(2, 5, 4)).splitlines()[0] == "overlapped, 2 stages: 22 us"


def test_svg_is_well_formed_and_to_scale():
    schedule = pipelined(2, 5, 4)
    root = ElementTree.fromstring(schedule.svg(720))
    boxes = root.findall("{*}rect")
    assert len(boxes) == 8
    ends = [float(box.get("x", 0)) + float(box.get("width", 0)) for box in boxes]
    assert 700 < max(ends) < 720
    tips = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "compute: 3, 17 to 22 us" in tips


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pipelined(2, 5, 0), "num_tiles: got 0"),
        (lambda: pipelined(2, 5, 4, 0), "num_stages: got 0"),
        (lambda: serial(0, 5, 4), "load_us: got 0"),
        (lambda: serial(2, float("nan"), 4), "compute_us: got nan"),
        (lambda: ping_pong(1, -1, 1, 4), "softmax_us: got -1"),
        (lambda: ping_pong(1, 1, 1, 4, 0), "num_groups: got 0"),
        (lambda: serial(2, 5, 4).gantt(3), "width: got 3"),
        (lambda: serial(2, 5, 4).svg(3), "width: got 3"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
