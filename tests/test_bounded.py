"""The memo with a bound."""

from __future__ import annotations

from onchip.bounded import Bounded


def test_a_new_key_empties_a_full_memo_and_a_known_one_does_not():
    memo: Bounded[str, int] = Bounded(2)
    memo["a"], memo["b"] = 1, 2
    memo["a"] = 3
    assert memo == {"a": 3, "b": 2}
    memo["c"] = 4
    assert memo == {"c": 4} and memo.get("a") is None
