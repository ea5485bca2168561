"""The Hopper backward: FlashAttention-3's way in Gluon, for sm_90a.

Method: S and P are computed again tile by tile, and with D = rowsum(dO * O) - dLSE

    P = exp(S - LSE); dV = P^T dO; dP = dO V^T; dS = P * (dP - D);
    dQ = scale dS K; dK = scale dS^T Q

(Dao et al. 2022, FlashAttention, algorithm 4; Shah et al. 2024, FlashAttention-3). A CTA owns
BN = 128 keys of one head of K and walks over the queries of every head that reads it, 64 at a
time, so dK and dV are summed in registers by one CTA in one order, whatever the group. What its
warpgroups do depends on the registers that dK and dV take.

D and D_v up to 128 (`backward_pair`, `backward_sums`, `backward_round`): warpgroups exchange dS
only, and need not wait for each other.

    load      Q, dO, LSE and D by TMA, ahead of the others
    keep      K and V; dK and dV at the end
    compute   two warpgroups of 64 keys: S^T = K Q^T, P^T = exp(S^T - LSE), dV += P^T dO,
              dP^T = V dO^T, dS^T = P^T * (dP^T - D), dK += dS^T Q; P^T, dS^T from registers
    make_dq   dQ = dS K
    add_dq    a warp that adds dQ to a float32 sum in memory by TMA
    round_dq  a warp that clears that sum for later heads and rounds it to dQ for earlier ones

The first steps of a causal walk cross the diagonal; a warpgroup whose keys they do not see only
hands on a dS of 0 (D = 64, 1k causal: 321 TFLOP/s, 312 without). CTAs of the last heads start in
the order of their lengths, the longest first, so that all CTAs end together: 2 to 4 % at 1k and
4k causal.

At 64, S and dP are issued together, and K and V wait in registers, so that these products read
half as much from shared memory (K alone: 551 / 551 TFLOP/s at 16k, 515 / 540 without; H200);
over 64 there are no registers for that: P is made and kept in 16 bits while dP is under way, and
dS while P's product is. That reads 368 KiB from shared memory for each 64 x 128 of S at D = 128,
which takes longer than its products would.

Over 128 (`backward_keys`): BN = 64, a chain of two warpgroups, each with one sum, and a kernel of
its own that computes S and dP again and makes dQ of 128 queries (`backward_queries`): 7 products,
not 5, but no float32 sum.

    load      everything, and dK and dV at the end
    score     S, P and dV; P goes to the next one through shared memory
    gradient  dP, dS and dK

Kernels before and behind (`backward_stats`) make LSE in base 2 and D, clear the sum of the first
heads and round that of the last ones.

Tiles that an edge of the mask crosses come first; tiles that it hides are not visited.

Deterministic: CTAs add to a tile of dQ in turn, by a counter for each tile; the order is one in
which nobody waits for a CTA that starts later (`backward_walk.turn_of`). A causal head's short
walks come first; the last heads' walks go from the last queries down, the long ones first. Heads
over 128 are always deterministic.

Memory: q, dout (B, S_q, H, D) or (T_q, H, D); k, v (B, S_k, H_kv, D) or (T_k, H_kv, D); rows at
multiples of 16 bytes, or they are copied. Head dimensions are padded to 64, 128 or 256 by TMA, in
shared memory only. Extra memory in bytes: 8 B H S_q for LSE and D, and up to D = 128 another 4 B
H S_q D for the float32 dQ, with S_q rounded up to 128 and D to 64 or 128; with sinks 4 B H
ceil(S_q / 64); deterministic 4 B H ceil(S_q / 64); 4 B H_kv for counters.

It does not do: pages, ALiBi, dropout, functions of the user, key lengths in a tensor. With D over
64, P is rounded to 16 bits before dS is made of it. A value of K or V that is not finite reaches
the dQ of hidden rows in the tiles that the mask's edge crosses.

Legend: B batch, S_q / S_k lengths, T packed tokens, H query heads, H_kv key and value heads,
D / D_v head dimensions, BM / BN rows of a tile of queries and of keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.bounded import Bounded
from onchip.kernels.hopper.backward_arguments import (
    LOG2E,
    STATS_BLOCK,
    UNIT,
    describe,
    describe_line,
    describe_sum,
    num_key_tiles,
    numbers_of,
    readable,
    row_strides,
    spec_of,
    starts_at_lse,
    stats_shape,
    units_of,
)
from onchip.kernels.hopper.backward_config import BackwardConfig, choose_backward, padded
from onchip.kernels.hopper.backward_kernels import (
    attn_bwd_keys_hopper,
    attn_bwd_queries_hopper,
)
from onchip.kernels.hopper.backward_stats import (
    ROWS,
    attn_bwd_post_hopper,
    attn_bwd_pre_hopper,
)
from onchip.kernels.launcher import Described, Launch
from onchip.problem import Layout, Problem, Saved, Tensors

_ROWS = ROWS.value  # of a program before and behind


class Work(NamedTuple):
    """Tensors that the launches of one backward share."""

    stats: Tensor  # (lines, rows): -LSE in base 2
    delta: Tensor  # -D
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dq_sum: Tensor | None  # (lines, rows, D) float32
    counters: Tensor | None  # see `attn_bwd_keys_hopper`


class Steps:
    """What calls alike share: the launches, found once, and the numbers that stay.

    Args:
        config: how the work is cut.
        problem: what the calls ask for; kept alive, since its identity is part of the key.
    """

    __slots__ = (
        "_shapes",
        "config",
        "lag",
        "launches",
        "lse_unit",
        "numbers",
        "problem",
        "specs",
        "stats_shape",
        "units",
    )

    def __init__(self, config: BackwardConfig, problem: Problem):
        self.config = config
        self.problem = problem
        self.stats_shape = stats_shape(problem)
        self.numbers = numbers_of(config, problem)
        self.units, self.lag = units_of(config, problem)
        self.lse_unit = 1 / problem.scale if starts_at_lse(config, problem) else LOG2E
        self.launches: dict[str, Launch] = {}
        self.specs = {part: spec_of(config, problem, part) for part in ("keys", "queries")}
        self._shapes: dict[str, list] = {}

    @property
    def is_resolved(self) -> bool:
        """Whether every launch has run once and takes the short way from now on."""
        return all(launch.is_resolved for launch in self.launches.values())

    def launch_of(self, part: str, kernel, programs: int, device: int) -> Launch:
        """The part's launch, made at its first call."""
        found = self.launches.get(part)
        if found is None:
            found = self.launches[part] = Launch(kernel, (programs,), device, num_warps=4)
        return found

    def described(self, part: str, tensors: list[Tensor], describers) -> list:
        """Descriptors of tensors: Triton's own for a part's first launch, then short ones."""
        if not self.launches[part].is_resolved:
            made = [f(x) for f, x in zip(describers, tensors, strict=True)]
            self._shapes[part] = [(x.shape, x.strides) for x in made]
            return made
        shapes = self._shapes[part]
        return [Described(x, *shape) for x, shape in zip(tensors, shapes, strict=True)]


_kept: Bounded[tuple, Steps] = Bounded(4096)


def launch(
    problem: Problem, tensors: Tensors, saved: Saved
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Runs the backward with the config that `choose_backward` picks.

    Args:
        problem: what the call asks for.
        tensors: the forward's data; nothing here is written.
        saved: its output and LSE, of whatever kernel, and the gradients that arrived.

    Returns:
        dq, dk, dv as q, k, v, contiguous, and dsinks as sinks or None.
    """
    return launch_with(None, problem, tensors, saved)


def launch_with(
    config: BackwardConfig | None, problem: Problem, tensors: Tensors, saved: Saved
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`launch` with a given config, None for the chosen one: for benchmarks and tests."""
    key = _key(config, problem, tensors, saved)
    found = _kept.get(key)
    if found is None:
        tensors, saved = readable(tensors, saved)
        key = _key(config, problem, tensors, saved)
        found = _kept.get(key)
    steps = found or Steps(config or choose_backward(problem), problem)
    work = _new_work(steps, tensors)
    dsinks = _prepare(steps, tensors, saved, work)
    _make_keys(steps, tensors, saved.dout, work)
    if steps.config.apart:
        _make_dq(steps, tensors, saved.dout, work)
    else:
        _finish(steps, tensors, work)
    if found is None and steps.is_resolved:
        _kept[key] = steps
    return work.dq, work.dk, work.dv, dsinks


def _key(config, problem: Problem, tensors: Tensors, saved: Saved) -> tuple:
    """What must be equal for two calls to share `Steps`; that of a call that has run is of data
    that the kernels read as they are."""
    q, k, v, sinks = tensors.q, tensors.k, tensors.v, tensors.sinks
    pointers = (tensors.cu_seqlens_q, tensors.cu_seqlens_k, sinks)
    rows = (saved.dlse, saved.out, saved.lse)
    return (
        config,
        id(problem),
        q.get_device(),
        k.shape,
        *[(x.stride(), x.data_ptr() & 15) for x in (q, k, v, saved.dout)],
        *[None if x is None else (x.dtype, x.data_ptr() & 15) for x in pointers],
        *[None if x is None else (x.dtype, x.stride(), x.data_ptr() & 15) for x in rows],
    )


def _new_work(steps: Steps, tensors: Tensors) -> Work:
    problem, (lines, rows) = steps.problem, steps.stats_shape
    # Rows between or behind packed sequences are no CTA's; their gradient is 0.
    new = torch.zeros_like if problem.layout_q is Layout.PACKED else torch.empty_like
    dq, dk, dv = (
        new(x, memory_format=torch.contiguous_format) for x in (tensors.q, tensors.k, tensors.v)
    )
    device = dq.device
    stats = torch.empty((2, lines, rows), dtype=torch.float32, device=device)
    dq_sum = counters = None
    if not steps.config.apart:
        width = padded(problem.head_dim)
        dq_sum = torch.empty((lines, rows, width), dtype=torch.float32, device=device)
        tiles = lines * (rows // _ROWS) if steps.specs["keys"].ordered else 0
        counters = torch.empty(steps.units + tiles, dtype=torch.int32, device=device)
    return Work(stats[0], stats[1], dq, dk, dv, dq_sum, counters)


def _prepare(steps: Steps, tensors: Tensors, saved: Saved, work: Work) -> Tensor | None:
    """Statistics, dQ's sum cleared for the first heads, and the sinks' gradient."""
    problem, sinks = steps.problem, tensors.sinks
    blocks = -(-problem.seqlen_q // STATS_BLOCK) * (STATS_BLOCK // _ROWS)
    parts = None
    if sinks is not None:
        parts = work.stats.new_empty(blocks, problem.batch, problem.num_heads)
    programs = blocks * problem.batch * problem.num_heads
    launch = steps.launch_of("pre", attn_bwd_pre_hopper, programs, work.dq.get_device())
    launch(
        saved.out, saved.dout, saved.lse, saved.dlse, sinks, tensors.cu_seqlens_q, work.stats,
        work.delta, work.dq_sum, work.counters, parts, *row_strides(saved.dout), blocks,
        problem.batch, problem.num_heads, problem.seqlen_q, problem.tokens_q, steps.stats_shape[1],
        problem.group, steps.units, steps.lag, num_key_tiles(steps.config, problem),
        problem.head_dim, problem.head_dim_v, padded(problem.head_dim), padded(problem.head_dim_v),
        steps.lse_unit, UNIT, problem.layout_q is Layout.PACKED, steps.specs["keys"].ordered,
    )  # fmt: skip
    return None if parts is None else parts.sum((0, 1)).to(sinks.dtype)


def _finish(steps: Steps, tensors: Tensors, work: Work) -> None:
    """dQ of the last heads from its float32 sum."""
    problem = steps.problem
    blocks = -(-problem.seqlen_q // _ROWS)
    heads = steps.lag * problem.group
    first = problem.batch * problem.num_heads - heads
    programs = blocks * heads
    launch = steps.launch_of("post", attn_bwd_post_hopper, programs, work.dq.get_device())
    launch(
        work.dq_sum, work.dq, tensors.cu_seqlens_q, first, blocks, problem.num_heads,
        problem.seqlen_q, problem.tokens_q, steps.stats_shape[1], float(problem.scale),
        problem.head_dim, padded(problem.head_dim), problem.layout_q is Layout.PACKED,
    )  # fmt: skip


def _make_keys(steps: Steps, tensors: Tensors, dout: Tensor, work: Work) -> None:
    """dK and dV, and, where no other kernel makes it, dQ's float32 sum."""
    spec, problem = steps.specs["keys"], steps.problem
    programs = steps.units * num_key_tiles(steps.config, problem)
    launch = steps.launch_of("keys", attn_bwd_keys_hopper, programs, work.dq.get_device())

    def tile(x):
        return describe(x, 64)

    def line(x):
        return describe_line(x, spec.block_m)

    def sums(x):
        return describe_sum(x, spec.block_m)

    inputs = [tensors.q, tensors.k, tensors.v, dout, work.stats, work.delta, work.dk, work.dv]
    describers = [tile, tile, tile, tile, line, line, tile, tile]
    dq_sum = dq = None
    if work.dq_sum is None:
        *sources, dk, dv = steps.described("keys", inputs, describers)
    else:
        *sources, dk, dv, dq_sum = steps.described(
            "keys", [*inputs, work.dq_sum], [*describers, sums]
        )
        dq = work.dq
    launch(
        *sources, dq_sum, dq, dk, dv, work.counters, tensors.cu_seqlens_q, tensors.cu_seqlens_k,
        *steps.numbers, spec,
    )  # fmt: skip


def _make_dq(steps: Steps, tensors: Tensors, dout: Tensor, work: Work) -> None:
    """dQ by a kernel of its own."""
    spec, problem = steps.specs["queries"], steps.problem
    programs = -(-problem.seqlen_q // spec.block_m) * problem.batch * problem.num_heads
    launch = steps.launch_of("queries", attn_bwd_queries_hopper, programs, work.dq.get_device())

    def tile(x):
        return describe(x, 64)

    *sources, dq = steps.described(
        "queries", [tensors.q, tensors.k, tensors.v, dout, work.dq], [tile] * 5
    )
    launch(
        *sources, work.stats, work.delta, dq, tensors.cu_seqlens_q, tensors.cu_seqlens_k,
        *steps.numbers, spec,
    )  # fmt: skip
