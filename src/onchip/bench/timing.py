"""Times of several callables measured side by side.

Rounds are interleaved (A B C, C B A, ...): a slow moment of the machine falls on neighbours
alike, and none always comes first (measured: the first of a round loses 2 to 3 %). Medians stand
for a callable's time, and medians of each round's quotient for a ratio.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def interleaved_us(
    calls: Mapping[str, Callable[[], object]],
    rounds: int = 7,
    min_time_us: float = 2000.0,
    sync: Callable[[], None] | None = None,
) -> dict[str, list[float]]:
    """Time of one call in each round.

    Args:
        calls: name -> what to time.
        rounds: times that each is measured.
        min_time_us: a measurement repeats a short call until it has lasted so long.
        sync: waits until a device is done; None where calls return when done.

    Returns:
        name -> `rounds` times of one call, microseconds.
    """
    wait = sync or (lambda: None)
    repeats = {name: _repeats(call, min_time_us, wait) for name, call in calls.items()}
    times_us: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(rounds):
        for name in order:
            times_us[name].append(_once_us(calls[name], repeats[name], wait))
        order.reverse()
    return times_us


#: Clock ticks that a GPU spins before a measurement, about 1 ms: time for the host to get ahead,
#: so that the first call's way to the GPU is not counted as the GPU's work.
_HEAD_START_TICKS = 2_000_000


def device_ms(call: Callable[[], object], repeats: int) -> float:
    """Milliseconds of GPU time of one call, by events around `repeats` of them."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_HEAD_START_TICKS)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def interleaved_device_ms(
    calls: Mapping[str, Callable[[], object]], rounds: int = 7, min_time_ms: float = 3.0
) -> dict[str, list[float]]:
    """GPU time of one call in each round, in turns.

    Args:
        calls: name -> what to time.
        rounds: times that each is measured.
        min_time_ms: a measurement repeats a short call until it has lasted so long.

    Returns:
        name -> `rounds` times of one call, milliseconds.
    """
    repeats = {}
    for name, call in calls.items():
        device_ms(call, 1)  # warms up
        repeats[name] = max(1, round(min_time_ms / max(device_ms(call, 1), 1e-3)))
    times_ms: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(rounds):
        for name in order:
            times_ms[name].append(device_ms(calls[name], repeats[name]))
        order.reverse()
    return times_ms


def median_ratio(above_us: list[float], below_us: list[float]) -> float:
    """Median over rounds of above / below: both of a round met the same machine."""
    return statistics.median(a / b for a, b in zip(above_us, below_us, strict=True))


def _once_us(call: Callable[[], object], repeats: int, wait: Callable[[], None]) -> float:
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    wait()
    return (time.perf_counter() - start) / repeats * 1e6


def _repeats(call: Callable[[], object], min_time_us: float, wait: Callable[[], None]) -> int:
    _once_us(call, 1, wait)  # warms up
    return max(1, round(min_time_us / max(1e-3, _once_us(call, 1, wait))))
