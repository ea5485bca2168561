"""Programs on SMs: worked numbers, and the planner's balance."""

from __future__ import annotations

import pytest

from onchip.analysis import tiles
from onchip.analysis.placement import placement
from onchip.problem import Mask
from tests.test_tiles import problem_of


def test_eight_heads():
    """B = 1, H = 8, N = 4096: 8 tasks by B x H, 256 when query tiles of 128 join."""
    heads = placement(problem_of(), 128, 64, 132, by_heads=True)
    joined = placement(problem_of(), 128, 64, 132)
    assert (len(heads.spans), len(heads.lanes)) == (8, 8)
    assert (len(joined.spans), len(joined.lanes)) == (256, 132)
    assert heads.total_us == 32 * 64 and joined.total_us == 2 * 64
    assert str(heads).startswith("8 tasks by head on 132 SMs: 2048 tiles\nSM 0")


@pytest.mark.parametrize("causal", [False, True])
def test_balance_is_the_planners(causal):
    problem = problem_of(2000, 6, mask=Mask(right=0 if causal else -1))
    found = placement(problem, 128, 64, 20)
    busy = sum(found.busy_us(lane) for lane in found.lanes)
    part = tiles.Part("forward", problem, "sm_90")
    want = tiles.spread(part, 128, 64, 20, 1, ((2000, 2000),))
    assert found.total_us * 20 / busy == pytest.approx(want.imbalance)
    assert len(found.spans) == want.num_programs
    in_order = placement(problem, 128, 64, 20, longest_first=False)
    assert in_order.total_us >= found.total_us
    assert sum(in_order.busy_us(lane) for lane in in_order.lanes) == busy


def test_bad_input():
    with pytest.raises(ValueError, match="num_sms: got 0; allowed: 1 or more"):
        placement(problem_of(), 128, 64, 0)
    with pytest.raises(ValueError, match="seqlen_q: got 0"):
        placement(problem_of(0), 128, 64, 8)
