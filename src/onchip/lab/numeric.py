"""The numeric lab: dense and tiled attention of one head against each other, in float64.

What it holds, on random inputs of any size: the one-pass forward equals the dense formula row by
row; P rebuilt from the LSE is the dense P; the gradients computed tile by tile, the LSE's included,
are what central differences of the dense formula say. It can plant a classic mistake in the tiled
computation, to show which check notices.

Legend: S_q = S_k = length, D head dimension, R rows of a block, C keys of a tile.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from onchip import reference
from onchip.ladder import Head, Result, State, rebuilt_probabilities, tiled_backward, tiled_one_pass
from onchip.problem import Mask

FORWARD_BOUND = 1e-12
GRADIENT_BOUND = 2e-8
# The four-point stencil errs by about h^4 f'''''/30 + 1e-16 |f|/h: near 1e-12 on both sides.
STEP = 1e-3
# Scores of the perturbed copies that go through the dense formula at once: half a MiB of
# float64, which stays in a core's cache.
MAX_SCORES_AT_ONCE = 2**16


@dataclass(frozen=True)
class Check:
    """One comparison.

    Args:
        name: what was compared.
        error: largest absolute difference.
        bound: the error must be smaller.
        row: the row where the error is largest.
    """

    name: str
    error: float
    bound: float
    row: int

    @property
    def passed(self) -> bool:
        """Whether the error is below the bound; NaN is not."""
        return self.error < self.bound

    def to_dict(self) -> dict:
        """Plain values for JSON, which has no Inf and NaN: they become None."""
        error = self.error if math.isfinite(self.error) else None
        return {**asdict(self), "error": error, "passed": self.passed}


@dataclass(frozen=True)
class LabReport:
    """What `run_lab` found.

    Args:
        length, block, head_dim, causal, seed, mistake: its options.
        checks: its comparisons, in the order of the computation.
    """

    length: int
    block: int
    head_dim: int
    causal: bool
    seed: int
    mistake: str | None
    checks: list[Check]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        options = {name: value for name, value in vars(self).items() if name != "checks"}
        checks = [check.to_dict() for check in self.checks]
        return {**options, "checks": checks, "passed": self.passed}

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        lines = [
            f"length {self.length}, block {self.block}, head_dim {self.head_dim}, {mask}, "
            f"seed {self.seed}, float64"
            + (f", planted mistake: {MISTAKES[self.mistake].title}" if self.mistake else ""),
            f"{'check':<36} {'error':>9} {'bound':>9} {'row':>4}",
        ]
        for c in self.checks:
            verdict = "ok" if c.passed else "FAIL"
            lines.append(f"{c.name:<36} {c.error:>9.2e} {c.bound:>9.0e} {c.row:>4}  {verdict}")
        return "\n".join([*lines, "PASS" if self.passed else "FAIL"])


class _ForgetsToRescaleTheOutput(Head):
    title = "rescale only the denominator, not the output"

    def absorb(self, state: State, keys: slice, s: Tensor, v: Tensor) -> State:
        right = super().absorb(state, keys, s, v)
        # What the right step adds to a zero output, on top of the output as it was.
        fresh = super().absorb(state._replace(o=torch.zeros_like(state.o)), keys, s, v)
        return right._replace(o=state.o + fresh.o)


class _ForgetsTheScale(Head):
    title = "forget 1/sqrt(d) in the gradients"

    @property
    def gradient_factor(self) -> float:
        return 1.0


class _HidesTheDiagonal(Head):
    title = "j < i instead of j <= i in the causal mask"

    def visible(self, rows: slice, keys: slice) -> Tensor:
        i = torch.arange(rows.start, rows.stop)[:, None]
        return super().visible(rows, keys) & (torch.arange(keys.start, keys.stop) < i)


MISTAKES: dict[str, type] = {
    "alpha": _ForgetsToRescaleTheOutput,
    "scale": _ForgetsTheScale,
    "causal": _HidesTheDiagonal,
}


def run_lab(
    length: int = 7,
    block: int = 3,
    head_dim: int = 4,
    causal: bool = False,
    seed: int = 0,
    mistake: str | None = None,
) -> LabReport:
    """Checks tiled attention and its gradients against the dense formula.

    Args:
        length: queries and keys, at least 1.
        block: keys of a tile and query rows of a block, at least 1, any relation to length.
        head_dim: D, at least 1.
        causal: no query sees a later key.
        seed: of the random inputs.
        mistake: None, or the one to plant: "alpha", "scale" or "causal".

    Returns:
        The report; with a mistake planted, one that did not pass.

    Raises:
        ValueError, TypeError: for an option out of range, or where the options leave the mistake
            without any effect.
    """
    _check_options(length, block, head_dim, causal, seed, mistake)
    q, k, v, dout, dlse = _random_inputs(length, head_dim, seed)
    inputs = (q, k, v, None, Mask(right=0 if causal else -1))
    head = Head(*inputs) if mistake is None else MISTAKES[mistake](*inputs)

    tiled = tiled_one_pass(head, block, block)
    checks = _forward_checks(head, tiled, causal, block)
    checks += _gradient_checks(head, tiled, dout, dlse, causal, block)
    report = LabReport(length, block, head_dim, causal, seed, mistake, checks)
    assert mistake is None or not report.passed, "the planted mistake went unnoticed"
    return report


def _random_inputs(length: int, head_dim: int, seed: int) -> list[Tensor]:
    """q, k, v, dO (length, head_dim) and dLSE (length,), normally distributed."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(length, head_dim)] * 4 + [(length,)]
    q, k, v, dout, dlse = (torch.randn(s, generator=g, dtype=torch.float64) for s in shapes)
    # In the order of the last query's scores, every tile raises that row's maximum, so that the
    # rescaling has work to do whatever the seed.
    return [q, k[(k @ q[-1]).argsort()], v, dout, dlse]


def _check_options(length, block, head_dim, causal, seed, mistake) -> None:
    for name, value in (("length", length), ("block", block), ("head_dim", head_dim)):
        _check_integer(name, value, 1, "at least 1")
    _check_integer("seed", seed, 0, "at least 0")
    if seed >= 2**63:
        raise ValueError(f"seed: got {seed}, allowed is less than 2**63. Choose a smaller one.")
    if not isinstance(causal, bool):
        raise TypeError(f"causal: got {causal!r}, allowed are True and False. Pass one of them.")
    if mistake is None:
        return
    if mistake not in MISTAKES:
        raise ValueError(
            f"mistake: got {mistake!r}, allowed are None, {', '.join(map(repr, MISTAKES))}. "
            "Choose one of them."
        )
    if mistake == "alpha" and length == 1:
        raise ValueError("length: got 1, but mistake 'alpha' needs a second tile. Choose over 1.")
    if mistake == "alpha" and block >= length:
        raise ValueError(
            f"block: got {block}, but mistake 'alpha' needs a second tile. Choose a block "
            f"smaller than the length, {length}."
        )
    if mistake == "scale" and head_dim == 1:
        raise ValueError(
            "head_dim: got 1, where 1/sqrt(d) is 1 and mistake 'scale' changes nothing. "
            "Choose a head_dim over 1."
        )
    if mistake == "causal" and not causal:
        raise ValueError(
            "causal: got False, but mistake 'causal' is one in the causal mask. Set causal=True."
        )


def _check_integer(name: str, value: int, low: int, allowed: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, allowed is an int, {allowed}. Pass an int.")
    if value < low:
        raise ValueError(f"{name}: got {value}, allowed is {allowed}. Choose a greater one.")


def _dense(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """out (B, S_q, D_v) and LSE (B, S_q) of a batch of heads by the dense formula."""
    out, lse = reference.attention(q[:, :, None], k[:, :, None], v[:, :, None], causal=causal)
    return out[:, :, 0], lse[:, 0]


def _forward_checks(head: Head, tiled: Result, causal: bool, block: int) -> list[Check]:
    length = head.q.shape[0]
    out, lse = _dense(head.q[None], head.k[None], head.v[None], causal)
    # With the identity for V, the dense output is P itself.
    identity = torch.eye(length, dtype=torch.float64)
    p, _ = _dense(head.q[None], head.k[None], identity[None], causal)
    rebuilt = torch.zeros(length, length, dtype=torch.float64)
    for rows in head.row_blocks(block):
        for keys in head.key_tiles(rows, block):
            rebuilt[rows, keys] = rebuilt_probabilities(head, rows, keys, tiled.lse)
    return [
        _compare("out: tiled = dense", tiled.out, out[0], FORWARD_BOUND),
        _compare("LSE: tiled = dense", tiled.lse, lse[0], FORWARD_BOUND),
        _compare("P: rebuilt from the LSE = dense", rebuilt, p[0], FORWARD_BOUND),
    ]


def _gradient_checks(head, tiled, dout, dlse, causal, block) -> list[Check]:
    grads = tiled_backward(head, tiled, dout, dlse, block, block)
    inputs = [head.q, head.k, head.v]
    checks = []
    for n, name in enumerate(("dq", "dk", "dv")):
        slopes = _central_differences(inputs, n, dout, dlse, causal)
        label = f"{name}: tiled = central differences"
        checks.append(_compare(label, getattr(grads, name), slopes, GRADIENT_BOUND))
    return checks


def _central_differences(inputs, n, dout, dlse, causal) -> Tensor:
    """Slopes of sum(dO * O) + sum(dLSE * LSE) along each entry of inputs[n], dense formula.

    f' = (8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12h, exact up to h^4.
    """
    x = inputs[n]
    num_entries = x.numel()
    chunk = max(1, MAX_SCORES_AT_ONCE // x.shape[0] ** 2)
    slopes = torch.empty(num_entries, dtype=torch.float64)
    for start in range(0, num_entries, chunk):
        entries = torch.arange(start, min(start + chunk, num_entries))
        total = torch.zeros(len(entries), dtype=torch.float64)
        for steps, weight in ((1, 8), (-1, -8), (2, -1), (-2, 1)):
            moved = x.flatten().repeat(len(entries), 1)
            moved[torch.arange(len(entries)), entries] += steps * STEP
            batch = [y.expand(len(entries), *y.shape) for y in inputs]
            batch[n] = moved.view(-1, *x.shape)
            out, lse = _dense(batch[0], batch[1], batch[2], causal)
            total += weight * ((out * dout).sum((1, 2)) + (lse * dlse).sum(1))
        slopes[entries] = total / (12 * STEP)
    return slopes.view(x.shape)


def _compare(name: str, got: Tensor, want: Tensor, bound: float) -> Check:
    # A row hidden by mistake has an LSE of -inf: an infinite error, which is reported as such.
    errors = (got - want).abs().reshape(got.shape[0], -1).amax(1)
    row = int(errors.nan_to_num(torch.inf).argmax())
    return Check(name, float(errors[row]), bound, row)
