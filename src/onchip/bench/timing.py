"""Times of several callables measured side by side.

Rounds are interleaved (A B C, C B A, ...): a slow moment of the machine falls on neighbours
alike, and none always comes first (measured: the first of a round loses 2 to 3 %). Medians stand
for a callable's time, and medians of each round's quotient for a ratio.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


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


@dataclass(frozen=True)
class Spread:
    """Times of one call, microseconds.

    Args:
        median_us: half took less.
        low_us: a tenth took less.
        high_us: a tenth took more.
        samples: how many there were.
    """

    median_us: float
    low_us: float
    high_us: float
    samples: int

    @classmethod
    def of(cls, times_us: list[float]) -> Spread:
        """Of at least one time."""
        ordered = sorted(times_us)
        last = len(ordered) - 1
        low, high = (ordered[round(last * share)] for share in (0.1, 0.9))
        return cls(statistics.median(ordered), low, high, len(ordered))


class ColdTimer:
    """Times single calls whose inputs come from slow memory: the L2 cache is overwritten before.

    On a GPU, events around each call; the overwriting gives the host time to run ahead, so that
    launches don't count unless they take longer than the call and the overwriting together.

    Args:
        device: "cuda" or "cpu".
        cache_bytes: written before each call.
    """

    def __init__(self, device: str, cache_bytes: int):
        self.device = device
        self._cache = torch.empty(cache_bytes, dtype=torch.uint8, device=device)

    def times_us(self, call: Callable[[], object], num_samples: int) -> list[float]:
        """Times of `num_samples` calls, one after the other."""
        if self.device == "cpu":
            return [self._on_cpu_us(call) for _ in range(num_samples)]
        pairs = []
        for _ in range(num_samples):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._cache.zero_()
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in pairs]

    def _on_cpu_us(self, call: Callable[[], object]) -> float:
        self._cache.zero_()
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6

    def interleaved(
        self, calls: Mapping[str, Callable[[], object]], rounds: int, budget_us: float = 20_000.0
    ) -> dict[str, Spread]:
        """Each call's times over rounds in which all take turns, in alternating order.

        Args:
            calls: name -> what to time; each has run before.
            rounds: times that each has its turn.
            budget_us: what one turn may take; at least one sample, 20 at most.
        """
        num_samples = {}
        for name, call in calls.items():
            once = self.times_us(call, 2)[-1]
            num_samples[name] = max(1, min(20, round(budget_us / max(once, 1.0))))
        times: dict[str, list[float]] = {name: [] for name in calls}
        order = list(calls)
        for _ in range(rounds):
            for name in order:
                times[name] += self.times_us(calls[name], num_samples[name])
            order.reverse()
        return {name: Spread.of(each) for name, each in times.items()}
