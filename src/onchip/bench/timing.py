"""Times of several callables measured side by side.

Rounds are interleaved (A B C, C B A, ...): a slow moment of the machine falls on neighbours
alike, and none always comes first (measured: the first of a round loses 2 to 3 %). Medians stand
for a callable's time, and medians of each round's quotient for a ratio.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    for name in _in_turns(calls, rounds):
        times_us[name].append(_once_us(calls[name], repeats[name], wait))
    return times_us


#: Ticks of a GPU's clock in a microsecond, at most, and the longest that a GPU waits for the host.
_TICKS_US, _MOST_HOST_US = 2000, 20_000.0
#: Clock ticks that a GPU spins before a measurement, about 1 ms: time for the host to get ahead,
#: so that the first call's way to the GPU is not counted as the GPU's work.
_HEAD_START_TICKS = 1000 * _TICKS_US


def device_ms(call: Callable[[], object], repeats: int) -> float:
    """Milliseconds of GPU time of one call, by events around `repeats` of them."""
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
    for name in _in_turns(calls, rounds):
        times_ms[name].append(device_ms(calls[name], repeats[name]))
    return times_ms


def graph_of(call: Callable[[], object], num_calls: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of so many calls, captured and replayed once."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_calls):
            call()
    graph.replay()
    return graph


def median_ratio(above_us: list[float], below_us: list[float]) -> float:
    """Median over rounds of above / below: both of a round met the same machine."""
    return statistics.median(a / b for a, b in zip(above_us, below_us, strict=True))


def _in_turns(names: Iterable[str], rounds: int) -> Iterator[str]:
    """Each name once a round, in alternating order."""
    order = list(names)
    for _ in range(rounds):
        yield from order
        order.reverse()


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

    On a GPU, events around each call, which the GPU reaches only when the host has issued all of
    it: launches do not count.

    Args:
        device: "cuda" or "cpu".
        cache_bytes: written before each call.
    """

    def __init__(self, device: str, cache_bytes: int):
        self.device = device
        self._cache = torch.empty(cache_bytes, dtype=torch.uint8, device=device)

    def times_us(
        self, call: Callable[[], object], num_samples: int, host_us: float = 0.0
    ) -> list[float]:
        """Times of `num_samples` calls, one after the other.

        Args:
            call: what to time.
            num_samples: how often.
            host_us: what the host takes to issue one call.
        """
        if self.device == "cpu":
            return [self._on_cpu_us(call) for _ in range(num_samples)]
        pairs = []
        for _ in range(num_samples):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(round(1.5 * host_us * _TICKS_US) + 1)
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

    def host_us(self, call: Callable[[], object]) -> float:
        """What the host takes to issue one call; 0 on a CPU, which has nothing to issue."""
        if self.device == "cpu":
            return 0.0
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        taken_us = (time.perf_counter() - start) * 1e6
        torch.cuda.synchronize()
        return min(taken_us, _MOST_HOST_US)

    def interleaved(
        self,
        calls: Mapping[str, Callable[[], object]],
        rounds: int,
        budget_us: float = 20_000.0,
        large: frozenset[str] = frozenset(),
    ) -> dict[str, Spread]:
        """Each call's times over rounds in which all take turns, in alternating order.

        Args:
            calls: name -> what to time; each has run before.
            rounds: times that each has its turn.
            budget_us: what one turn may take; at least one sample, 20 at most.
            large: calls that need most of the GPU's memory, so that what others left in torch's
                cache is freed before and after their turns.
        """
        plan = {}
        for name, call in calls.items():
            with _room(name in large, call):
                host_us = self.host_us(call)
                once = self.times_us(call, 2, host_us)[-1]
            plan[name] = (max(1, min(20, round(budget_us / max(once, 1.0)))), host_us)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for name in _in_turns(calls, rounds):
            with _room(name in large, calls[name]):
                times[name] += self.times_us(calls[name], *plan[name])
        return {name: Spread.of(each) for name, each in times.items()}


@contextlib.contextmanager
def _room(is_large: bool, call: Callable[[], object]) -> Iterator[None]:
    """Memory for a large call, which has it in torch's cache when the block begins."""
    if is_large:
        torch.cuda.empty_cache()
        call()
    yield
    if is_large:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
