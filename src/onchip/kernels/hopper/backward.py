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
    keep      K and V; dK and dV at the end of a tile of keys
    compute   two warpgroups of 64 keys: S^T = K Q^T, P^T = exp(S^T - LSE), dV += P^T dO,
              dP^T = V dO^T, dS^T = P^T * (dP^T - D), dK += dS^T Q; P^T, dS^T from registers
    make_dq   dQ = dS K
    add_dq    a warp that adds dQ to a float32 sum in memory by TMA
    round_dq  a warp that clears that sum for later heads and rounds it to dQ for earlier ones

In dense calls at D = 64 with up to 4096 queries of a head of K, or in a fixed order, there are as
many CTAs as SMs, each with a list of tiles (`backward_table`): a CTA of its own spends 4 to 8
thousand clocks of the 20 to 40 thousand of a tile at 1k on its start, its first loads and its last
stores. Elsewhere each tile has a CTA; where no mask is and walks are long at D = 128, the tiles of
a last wave of CTAs that would leave SMs idle are cut by queries (`backward_pieces`; 16k 641
TFLOP/s, 619 without). Figures here are an H200's, 2026-11-30.

The first steps of a causal walk cross the diagonal; a warpgroup whose keys they do not see only
hands on a dS of 0 (D = 64, 1k causal: 347 TFLOP/s, 335 without). Tiles of the last heads begin in
the order of their lengths, the longest first, so that all CTAs end together: 2 to 4 % at 1k and
4k causal.

At 64, S and dP are issued together, and K and V wait in registers, so that these products read
half as much from shared memory (K alone: 551 / 551 TFLOP/s at 16k, 515 / 540 without; H200);
over 64 there are no registers for that: P is made and kept in 16 bits while dP is under way, and
dS while P's product is. That reads 368 KiB from shared memory for each 64 x 128 of S at D = 128,
which takes longer than its products would. So dQ is stored by `stmatrix` for TMA, which leaves the
even ones of every 8 columns of its sum first (`store_halves`), to be put in order where it is
rounded; and where no mask is, LSE and D lie so that a thread loads four at a time (`of_queries`).

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
which nobody waits for a tile that begins later (`backward_walk.turn_of`). A CTA follows the one
before it some steps behind, so where that pays (`Spec.abreast`) tiles of several heads begin side
by side, those of one head some steps apart: 0.87 to 0.96 of the default's speed in one run; where
no mask is, 0.57 to 0.85 with one head after the other. A causal head's short walks come first; the
last heads' walks go from the last queries down, the long ones first. Heads over
128 are always deterministic.

Memory: q, dout (B, S_q, H, D) or (T_q, H, D); k, v (B, S_k, H_kv, D) or (T_k, H_kv, D); rows at
multiples of 16 bytes, or they are copied. Head dimensions are padded to 64, 128 or 256 by TMA, in
shared memory only. Extra memory in bytes: 8 B H S_q for LSE and D, and up to D = 128 another 4 B
H S_q D for the float32 dQ, with S_q rounded up to 128 and D to 64 or 128; with sinks 4 B H
ceil(S_q / 64); deterministic 4 B H ceil(S_q / 64); 4 B H_kv for counters; 512 (D + D_v) for each
piece of a tile of keys that is cut, of which there are up to 8 for each SM. A list of tiles is
kept with a shape of calls, and as long as the process where a graph reads it: some 4 B H_kv
ceil(S_k / 128).

CTAs that have lists wait for each other, so they are launched together (a cooperative launch) and
need every SM: a kernel of another stream that holds some delays them until it ends. Where
torch.distributed has other ranks, whose collectives may hold SMs until this one has got on, each
tile has a CTA of its own instead.

It does not do: pages, ALiBi, dropout, functions of the user, key lengths in a tensor. With D over
64, P is rounded to 16 bits before dS is made of it. A value of K or V that is not finite reaches
the dQ of hidden rows in the tiles that the mask's edge crosses.

Legend: B batch, S_q / S_k lengths, T packed tokens, H query heads, H_kv key and value heads,
D / D_v head dimensions, BM / BN rows of a tile of queries and of keys.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.bounded import Bounded
from onchip.kernels.hopper import backward_table
from onchip.kernels.hopper.arguments import num_sms
from onchip.kernels.hopper.backward_arguments import (
    LOG2E,
    STATS_BLOCK,
    UNIT,
    describe,
    describe_line,
    describe_sum,
    num_key_tiles,
    num_programs,
    num_whole,
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
    attn_bwd_rest_hopper,
)
from onchip.kernels.launcher import Described, Launch
from onchip.problem import Layout, Problem, Saved, Tensors

_ROWS, _WARPS = ROWS.value, 2  # of a program before and behind


class Work(NamedTuple):
    """Tensors that the launches of one backward share."""

    stats: Tensor  # (lines, rows): -LSE in base 2
    delta: Tensor  # -D
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dq_sum: Tensor | None  # (lines, rows, D) float32
    counters: Tensor | None  # see `attn_bwd_keys_hopper`
    piece_sums: Tensor | None  # see `backward_pieces`
    piece_counters: Tensor | None


class Steps:
    """What calls alike share: the launches, found once, and the numbers that stay.

    Args:
        config: how the work is cut.
        problem: what the calls ask for; kept alive, since its identity is part of the key.
        sms: of the GPU.
        is_for_capture: whether calls outside of a capture would have another config.
    """

    __slots__ = (
        "_shapes",
        "config",
        "is_for_capture",
        "lag",
        "launches",
        "lse_unit",
        "numbers",
        "problem",
        "shared_tiles",
        "sms",
        "specs",
        "stats_shape",
        "table",
        "units",
    )

    def __init__(
        self, config: BackwardConfig, problem: Problem, sms: int, is_for_capture: bool = False
    ):
        self.config = config
        self.is_for_capture = is_for_capture
        self.problem = problem
        self.stats_shape = stats_shape(problem)
        self.sms = sms
        self.numbers = numbers_of(config, problem, sms=sms)
        self.units, self.lag = units_of(config, problem)
        tiles = self.units * num_key_tiles(config, problem)
        self.shared_tiles = tiles - num_whole(config, problem, sms)
        self.lse_unit = 1 / problem.scale if starts_at_lse(config, problem) else LOG2E
        self.launches: dict[str, Launch] = {}
        self.specs = {part: spec_of(config, problem, part, sms) for part in ("keys", "queries")}
        self._shapes: dict[str, list] = {}
        self.table: Tensor | None = None

    def programs(self, device: torch.device) -> int:
        """CTAs of the launch that owns keys; makes their table at the first call."""
        config, problem, spec = self.config, self.problem, self.specs["keys"]
        if not spec.persistent:
            return num_programs(config, problem, self.sms)
        if self.table is None:
            rows = backward_table.schedule(config, problem, spec, self.sms)
            self.table = _table_on(rows, device)
            self.numbers = numbers_of(config, problem, self.table, len(rows[0]), sms=self.sms)
        if _is_capturing(device):
            _in_graphs[self.table.data_ptr()] = self.table
        elif device.type == "cuda" and torch._C._cuda_getCurrentRawStream(device.index):
            self.table.record_stream(torch.cuda.current_stream(device))
        return self.table.shape[0]

    @property
    def is_resolved(self) -> bool:
        """Whether every launch has run once and takes the short way from now on."""
        return all(launch.is_resolved for launch in self.launches.values())

    def launch_of(
        self, part: str, kernel, programs: int | tuple[int, ...], device: int, **options
    ) -> Launch:
        """The part's launch, made at its first call."""
        found = self.launches.get(part)
        if found is None:
            options = {"num_warps": 4, **options}
            grid = programs if isinstance(programs, tuple) else (programs,)
            found = self.launches[part] = Launch(kernel, grid, device, **options)
        return found

    def described(self, part: str, tensors: list[Tensor], describers) -> list:
        """Descriptors of tensors: Triton's own for a part's first launch, then short ones."""
        if not self.launches[part].is_resolved:
            made = [f(x) for f, x in zip(describers, tensors, strict=True)]
            self._shapes[part] = [(x.shape, x.strides) for x in made]
            return made
        shapes = self._shapes[part]
        return [Described(x, *shape) for x, shape in zip(tensors, shapes, strict=True)]


def _table_on(rows: list[list[int]], device: torch.device) -> Tensor:
    """Lists of tiles on a GPU, whatever pool this thread allocates from: one of `torch.compile`'s
    graphs would use the memory again."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(torch.tensor, rows, dtype=torch.int32, device=device).result()


_kept: Bounded[tuple, Steps] = Bounded(1024)
_in_graphs: dict[int, Tensor] = {}  # tables that captured launches read, by address


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
    steps = found or _new_steps(config, problem, tensors.q.device)
    work = _new_work(steps, tensors)
    dsinks = _prepare(steps, tensors, saved, work)
    _make_keys(steps, tensors, saved.dout, work)
    if steps.config.apart:
        _make_dq(steps, tensors, saved.dout, work)
    else:
        _finish(steps, tensors, work)
    if found is None and steps.is_resolved and not steps.is_for_capture:
        _kept[key] = steps
    return work.dq, work.dk, work.dv, dsinks


def _new_steps(config: BackwardConfig | None, problem: Problem, device: torch.device) -> Steps:
    """What calls alike will share; a call whose first run is captured in a graph has a CTA for
    each tile of keys, since no table can be copied then, and shares nothing."""
    config = config or choose_backward(problem)
    if config.persistent and not _is_alone():
        config = replace(config, persistent=False)
    for_capture = config.persistent and _is_capturing(device)
    if for_capture:
        config = replace(config, persistent=False)
    return Steps(config, problem, num_sms(device), for_capture)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _is_alone() -> bool:
    """Whether no other rank's collective can hold SMs until this one has got on: a launch that
    needs all SMs at once might then never start."""
    distributed = torch.distributed
    return not (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def _key(config, problem: Problem, tensors: Tensors, saved: Saved) -> tuple:
    """What must be equal for two calls to share `Steps`; that of a call that has run is of data
    that the kernels read as they are."""
    q, k, v, sinks = tensors.q, tensors.k, tensors.v, tensors.sinks
    pointers = (tensors.cu_seqlens_q, tensors.cu_seqlens_k, sinks)
    rows = (saved.dlse, saved.out, saved.lse)
    return (
        config,
        _is_alone(),
        id(problem),
        q.get_device(),
        k.shape,
        *[(x.stride(), x.data_ptr() & 15) for x in (q, k, v, saved.dout)],
        *[None if x is None else (x.dtype, x.data_ptr() & 15) for x in pointers],
        *[None if x is None else (x.dtype, x.stride(), x.data_ptr() & 15) for x in rows],
    )


def _new_work(steps: Steps, tensors: Tensors) -> Work:
    problem, (lines, rows) = steps.problem, steps.stats_shape
    dq, dk, dv = (
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (tensors.q, tensors.k, tensors.v)
    )
    device = dq.device
    stats = torch.empty((2, lines, rows), dtype=torch.float32, device=device)
    dq_sum = counters = piece_sums = piece_counters = None
    if not steps.config.apart:
        width = padded(problem.head_dim)
        dq_sum = torch.empty((lines, rows, width), dtype=torch.float32, device=device)
        spec, shared = steps.specs["keys"], steps.shared_tiles
        tiles = lines * (rows // spec.block_m) if spec.ordered else 0
        number = steps.units + tiles + 2 * shared
        counters = torch.empty(number, dtype=torch.int32, device=device)
        if shared:
            size = (shared * 2, spec.pieces, 64, spec.dim + spec.dim_v)
            piece_sums = torch.empty(size, dtype=torch.float32, device=device)
            piece_counters = counters[steps.units :]
    return Work(stats[0], stats[1], dq, dk, dv, dq_sum, counters, piece_sums, piece_counters)


def _prepare(steps: Steps, tensors: Tensors, saved: Saved, work: Work) -> Tensor | None:
    """Statistics, dQ's sum cleared for the first heads, and the sinks' gradient."""
    problem, sinks = steps.problem, tensors.sinks
    if problem.layout_q is Layout.PACKED:
        _clear_rest(steps, tensors, work)
    blocks = -(-problem.seqlen_q // STATS_BLOCK) * (STATS_BLOCK // _ROWS)
    parts = None
    if sinks is not None:
        parts = work.stats.new_empty(blocks, problem.batch, problem.num_heads)
    programs = blocks * problem.batch * problem.num_heads
    launch = steps.launch_of(
        "pre", attn_bwd_pre_hopper, programs, work.dq.get_device(), num_warps=_WARPS
    )
    launch(
        saved.out, saved.dout, saved.lse, saved.dlse, sinks, tensors.cu_seqlens_q, work.stats,
        work.delta, work.dq_sum, work.counters, parts, *row_strides(saved.dout), blocks,
        problem.batch, problem.num_heads, problem.seqlen_q, problem.tokens_q, steps.stats_shape[1],
        problem.group, steps.units, steps.lag, num_key_tiles(steps.config, problem),
        2 * steps.shared_tiles,
        problem.head_dim, problem.head_dim_v, padded(problem.head_dim), padded(problem.head_dim_v),
        steps.lse_unit, UNIT, problem.layout_q is Layout.PACKED, steps.specs["keys"].ordered,
        steps.specs["keys"].fours,
    )  # fmt: skip
    return None if parts is None else parts.sum((0, 1)).to(sinks.dtype)


def _clear_rest(steps: Steps, tensors: Tensors, work: Work) -> None:
    """Gradients of packed rows that are no CTA's."""
    problem = steps.problem
    parts = -(-2 * steps.sms // (problem.batch + 1))
    grads = (work.dq, work.dk, work.dv)
    widths = [x.shape[1] * x.shape[2] for x in grads]
    grid = (problem.batch + 1, parts)
    steps.launch_of("rest", attn_bwd_rest_hopper, grid, work.dq.get_device())(
        *grads, tensors.cu_seqlens_q, tensors.cu_seqlens_k, problem.seqlen_q, problem.seqlen_k,
        work.dq.shape[0], work.dk.shape[0], *widths, parts,
    )  # fmt: skip


def _finish(steps: Steps, tensors: Tensors, work: Work) -> None:
    """dQ of the last heads from its float32 sum."""
    problem = steps.problem
    blocks = -(-problem.seqlen_q // _ROWS)
    heads = steps.lag * problem.group
    first = problem.batch * problem.num_heads - heads
    programs = blocks * heads
    launch = steps.launch_of(
        "post", attn_bwd_post_hopper, programs, work.dq.get_device(), num_warps=_WARPS
    )
    launch(
        work.dq_sum, work.dq, tensors.cu_seqlens_q, first, blocks, problem.num_heads,
        problem.seqlen_q, problem.tokens_q, steps.stats_shape[1], float(problem.scale),
        problem.head_dim, padded(problem.head_dim), problem.layout_q is Layout.PACKED,
    )  # fmt: skip


def _make_keys(steps: Steps, tensors: Tensors, dout: Tensor, work: Work) -> None:
    """dK and dV, and, where no other kernel makes it, dQ's float32 sum."""
    spec = steps.specs["keys"]
    programs, device = steps.programs(work.dq.device), work.dq.get_device()
    # CTAs that take several tiles wait for each other, so they must all be there at once.
    options = {"launch_cooperative_grid": True} if spec.persistent else {}
    launch = steps.launch_of("keys", attn_bwd_keys_hopper, programs, device, **options)

    def tile(x):
        return describe(x, 64)

    def line(x):
        return describe_line(x, spec.block_m)

    def sums(x):
        return describe_sum(x, spec.block_m)

    inputs = [tensors.q, tensors.k, tensors.v, dout, work.stats, work.delta, work.dk, work.dv]
    describers = [tile, tile, tile, tile, line, line, tile, tile]
    dq_sum = dq = None
    shared = steps.shared_tiles > 0
    if work.dq_sum is None:
        *sources, dk, dv = steps.described("keys", inputs, describers)
    else:
        *sources, dk, dv, dq_sum = steps.described(
            "keys", [*inputs, work.dq_sum], [*describers, sums]
        )
        dq = work.dq
    launch(
        *sources, dq_sum, dq, dk, dv, work.counters, work.piece_sums, work.piece_counters,
        work.dk if shared else None, work.dv if shared else None, tensors.cu_seqlens_q,
        tensors.cu_seqlens_k,
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
