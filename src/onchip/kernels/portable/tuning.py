"""ONCHIP_AUTOTUNE=1: measures a few configs at the first call of a kind and keeps the fastest.

Off by default: the tables of the config modules were measured once, and a kind's first call
takes the compile and measuring time of every candidate. A kind is a Problem with its lengths
rounded up to powers of two. A call that is being captured in a CUDA graph can't be measured and
takes the table's config.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
import triton.testing

from onchip.problem import Problem

C = TypeVar("C")

_fastest: dict[Problem, object] = {}


def kind(problem: Problem) -> Problem:
    """What calls that share a tuned config have in common."""
    return replace(
        problem,
        batch=_rounded(problem.batch),
        seqlen_q=_rounded(problem.seqlen_q),
        seqlen_k=_rounded(problem.seqlen_k),
        tokens_q=_rounded(problem.tokens_q),
        num_pages=_rounded(problem.num_pages),
        scale=1.0,
    )


def _rounded(count: int) -> int:
    return 1 << (count - 1).bit_length() if count > 0 else 0


def tuned(problem: Problem, default: C, others: Sequence[C], run: Callable[[C], object]) -> C:
    """The fastest config for a kind of problem, measured at its first call.

    Args:
        problem: the call.
        default: the table's choice, also measured; stands where nothing can be.
        others: further candidates; one that does not compile or fit is passed over.
        run: launches the call with a config.
    """
    if torch.cuda.is_current_stream_capturing():
        return default
    known = kind(problem)
    if known not in _fastest:
        times_ms = {}
        for config in dict.fromkeys((default, *others)):
            time_ms = _time_ms(config, run)
            if time_ms is not None:
                times_ms[config] = time_ms
        _fastest[known] = min(times_ms, key=times_ms.__getitem__, default=default)
    return _fastest[known]  # type: ignore[return-value]


def _time_ms(config: C, run: Callable[[C], object]) -> float | None:
    """Median time of a launch; None when the config is not for this GPU."""
    try:
        run(config)
        return triton.testing.do_bench(lambda: run(config), warmup=5, rep=20, return_mode="median")  # type: ignore[return-value]
    except (triton.runtime.OutOfResources, triton.compiler.errors.CompilationError):
        return None
