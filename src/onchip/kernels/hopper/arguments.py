"""What the Hopper forward's launch hands to its kernel: code and numbers, and who keeps them.

Legend: B batch, S_q / S_k lengths, H query heads, D head dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from onchip.bounded import Bounded
from onchip.kernels.compiled import Compiled
from onchip.kernels.gluon_pieces import POLLS
from onchip.kernels.hopper.config import (
    WARPGROUP_ROWS,
    Config,
    choose_forward,
    most_pieces,
    padded,
)
from onchip.kernels.hopper.descriptors import descriptors
from onchip.kernels.hopper.workspace import NUM_COUNTERS
from onchip.kernels.launcher import Address, Described, Launch
from onchip.kernels.rows import NUM_SMS, shares_of
from onchip.problem import Layout, Problem, Tensors

LOG2E = math.log2(math.e)
_UNBOUNDED = 1 << 30  # larger than any length, small enough that int32 sums do not overflow
_NUM_TILES = 7  # place in `tiles.Sizes`
_NUM_BEFORE_SIZES = 3  # a launch's numbers before them
SORTED = 128  # sequences whose order a warp finds
_MAX_CALLS = 128  # sets of addresses that a launch knows


@dataclass(frozen=True)
class Code(Compiled):
    """What the compiled code depends on; everything else is a run-time value.

    Args:
        config: its fields are read through this object.
        dim, dim_v: D and D_v.
        width, width_v: D and D_v in shared memory, padded to powers of two; TMA writes zeros.
        has_left, has_right: which edges the mask has.
        cuts_two: whether the right edge may cut two K/V tiles of a warpgroup rather than one.
        skips: whether a CTA's last K/V tile may lie beyond the keys of its first warpgroups.
        has_tail: whether keys may end inside of a tile where no right edge hides them.
        packed_q, packed_k: whether sequences follow one another in memory.
        has_used: whether a tensor cuts the key lengths short.
        page_size: N, 0 when not paged.
        has_softcap: whether logits are capped.
        alibi_dim: dimensions of the slopes, 0 for none.
        has_sinks: whether exp(sink) joins each denominator.
        is_causal: whether the right edge ends with the keys.
        is_short: whether no CTA has more than two tiles, so that how it ends counts.
        heads: of a group that lie side by side in a tile; 1 where a tile is one head's.
        waits: how often a piece's program looks for the others.
        shares: of the rows that pieces' programs merge, no fewer than pieces; 0 without pieces.
        sorts: as many sequences at most are taken in the order of their keys; 0 for none.
    """

    config: Config
    dim: int
    dim_v: int
    width: int
    width_v: int
    has_left: bool
    has_right: bool
    cuts_two: bool
    skips: bool
    has_tail: bool
    packed_q: bool
    packed_k: bool
    has_used: bool
    page_size: int
    has_softcap: bool
    alibi_dim: int
    has_sinks: bool
    is_causal: bool
    is_short: bool = False
    heads: int = 1
    waits: int = 0
    shares: int = 0
    sorts: int = 0

    def __getattr__(self, name: str):
        return getattr(object.__getattribute__(self, "config"), name)

    @property
    def box(self) -> tuple[int, int]:
        """Rows and columns (0 for all) of K and V that one TMA instruction copies."""
        if 0 < self.page_size < self.block_n and self.block_n % self.page_size == 0:
            return self.page_size, 64
        return self.block_n, 0

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """First columns and widths, powers of two, of what Q K^T multiplies: D, not its padding."""
        found, start, rest = [], 0, -(-self.dim // 16) * 16  # 16: what an instruction takes
        while rest > 0:
            size = 1 << (rest.bit_length() - 1)
            found.append((start, size))
            start, rest = start + size, rest - size
        return tuple(found)

    @property
    def is_ragged(self) -> bool:
        """Whether lengths are read on the device."""
        return self.packed_q or self.packed_k or self.has_used

    @property
    def in_pieces(self) -> bool:
        """Whether keys are cut into pieces, each a tile, which meet in `gluon_pieces`."""
        return self.shares > 0

    @property
    def is_alone(self) -> bool:
        """Whether a tile is its CTA's only one, with pieces."""
        return self.waits > 0 and not self.packed_q

    @property
    def is_uneven(self) -> bool:
        """Whether a counter hands out tiles, since they differ in length."""
        return ((self.is_cut and not self.is_folded) or self.in_pieces) and not self.is_alone

    @property
    def is_cut(self) -> bool:
        """Whether rows see fewer keys than there are in memory."""
        return self.has_left or self.has_right or self.is_ragged

    @property
    def has_words(self) -> bool:
        """Whether P is handed from step to step as words of two neighbours."""
        return self.cuts_two or self.has_left or not (self.maxima or self.lags)

    @property
    def is_halved(self) -> bool:
        """Whether a tile's first warpgroup sees no more than half of its last K/V tile.

        So it is where a causal edge ends rows and keys of tiles of 128 alike; another one may lie
        beyond the last key.
        """
        is_aligned = self.is_causal and not self.cuts_two and not self.skips
        return is_aligned and self.block_n == 128 and not self.q_in_registers

    @property
    def last_keys(self) -> tuple[int, ...]:
        """Keys of its last K/V tile that each warpgroup multiplies."""
        return (self.block_n >> self.is_halved, *[self.block_n] * (self.warpgroups - 1))

    @property
    def is_folded(self) -> bool:
        """Whether a tile's two blocks of rows lie apart, see `Config.folded`."""
        return self.folded

    @property
    def num_known(self) -> int:
        """Tiles of a CTA of which nobody needs to tell its consumers."""
        return int(self.is_uneven and not self.is_ragged and not self.in_pieces)

    @property
    def foresees(self) -> bool:
        """Whether a CTA finds its first tile while earlier launches still run.

        Only where that is known to be faster: folded tiles gain nothing (H200, 1k), with one
        buffer of Q the assembler spills in the loops, and lengths may be what those launches make.
        """
        return self.is_halved and self.q_buffers > 1

    @property
    def may_be_empty(self) -> bool:
        """Whether a row may see no key of its last tile."""
        return self.is_cut

    @property
    def may_leak(self) -> bool:
        """Whether rows may be left to the repair.

        Values that a row does not see are multiplied by its P = 0, and sums may overflow.
        """
        return self.is_cut or not self.maxima


class Resolved:
    """A launch with those of its arguments that stay.

    Args:
        problem: kept alive, since its identity is part of the key.
        launch: the compiled kernel on its grid.
        num_counters, num_floats: memory that a launch needs, see `workspace.py`.
        first: descriptors of the first launch.
        numbers: the run-time numbers.
        code: what is compiled.
    """

    __slots__ = (
        "_calls",
        "_first",
        "_seen",
        "_shapes",
        "code",
        "launch",
        "leaks",
        "num_counters",
        "num_floats",
        "numbers",
        "problem",
        "repair",
        "repair_numbers",
    )

    def __init__(self, problem: Problem, launch: Launch, first: list, numbers: tuple, code: Code):
        self.problem = problem
        self.launch = launch
        self.numbers = numbers
        self.code = code
        self.leaks = code.may_leak  # asked in every call
        self.num_counters, self.num_floats = NUM_COUNTERS, 0
        if code.in_pieces:
            rows = self.num_tiles * code.block_m
            self.num_counters += -(-self.num_tiles * code.warpgroups // 2) * 4
            self.num_floats = rows * (code.width_v + 2)
        self.repair: Launch | None = None  # see `repair.py`
        self.repair_numbers: tuple = ()
        self._first = first
        self._shapes = [(x.shape, x.strides) for x in first]
        self._calls: Bounded[tuple, list] = Bounded(_MAX_CALLS)  # by stream and addresses
        self._seen: set[tuple] = set()

    @property
    def num_tiles(self) -> int:
        """Tiles of queries."""
        return self.numbers[_NUM_BEFORE_SIZES + _NUM_TILES]

    def described(self, *tensors: Tensor) -> list:
        """q, k, v and out as the kernel takes them."""
        if self._first is not None:
            first, self._first = self._first, None
            return first  # Triton looks at these, and only at the first launch
        return [Described(x, *shape) for x, shape in zip(tensors, self._shapes, strict=True)]

    def replay(self, addresses: tuple) -> bool:
        """Makes the launches of an earlier call with tensors at the same addresses, if one was."""
        calls = self._calls.get((self.launch.stream, addresses))
        if calls is None or not self.launch.is_direct:
            return False
        for run, arguments in calls:
            run(*arguments)
        return True

    def remember(self, addresses: tuple, calls: list[tuple[Launch, tuple]]) -> None:
        """Keeps a call's launches for `replay` if its addresses come a second time.

        Args:
            addresses: of all its tensors.
            calls: launches, made once with these arguments.
        """
        key = (self.launch.stream, addresses)
        if self._is_second(key):
            self._keep(key, [launch.prepared(*arguments) for launch, arguments in calls])

    def _is_second(self, key: tuple) -> bool:
        """Whether it came before: addresses that never come again cost nothing more."""
        if key in self._seen:
            return True
        if len(self._seen) >= _MAX_CALLS:
            self._seen.clear()
        self._seen.add(key)
        return False

    def _keep(self, key: tuple, prepared: list) -> None:
        if None not in prepared:
            self._calls[key] = prepared

    def calls(self, described: list, given: tuple) -> list[tuple[Launch, tuple]]:
        """Launches and their arguments; `resolve_repair` comes before where rows may leak.

        Args:
            described: descriptors of q, k, v and out.
            given: q, k, v, out, lse, the counters, those of `lengths_of`, slopes, sinks and
                memory for pieces, as tensors or as addresses; None for what is absent, which
                kernels do not read.
        """
        q, k, v, out, lse, counters, *optional = given
        lengths = [counters if x is None else x for x in optional[:4]]
        terms = [lse if x is None else x for x in optional[4:6]]
        rest = (out, lse, counters, *lengths, *terms)
        calls = [(self.launch, (*described, *rest, *self.numbers, optional[6], self.code))]
        if self.leaks:
            assert self.repair is not None
            calls.append((self.repair, (q, k, v, *rest, *self.repair_numbers)))
        return calls

    def launch_at(self, addresses: tuple[int, ...]) -> bool:
        """Launches for tensors at these addresses; False where tensors are asked for instead.

        Only while `is_ready`.

        Args:
            addresses: as `calls` is given them; 0 for what is absent.
        """
        key = (self.launch.stream, addresses)
        calls = self._calls.get(key)
        if calls is None:
            calls = self._prepared_at(addresses)
            if None in calls:
                return False
            if self._is_second(key):
                self._keep(key, calls)
        for run, arguments in calls:
            run(*arguments)
        return True

    def _prepared_at(self, addresses: tuple[int, ...]) -> list:
        places = zip(addresses[:4], self._shapes, strict=True)
        described = [Described(Address(x), *shape) for x, shape in places]
        calls = self.calls(described, tuple([x or None for x in addresses]))
        return [launch.prepared(*arguments) for launch, arguments in calls]

    @property
    def is_ready(self) -> bool:
        """Whether `launch_at` may be called now."""
        if not self.launch.is_direct:
            return False
        # The repair is on the same device, and no profiler listens to it either.
        return not self.leaks or (self.repair is not None and self.repair.has_direct_way)


_kept: Bounded[tuple, Resolved] = Bounded(4096)


def resolved_of(
    kernel, config: Config | None, problem: Problem, tensors: Tensors, out: Tensor
) -> Resolved:
    """The launch for calls alike: same problem and strides."""
    q, k, v = tensors.q, tensors.k, tensors.v
    key = (id(problem), config, q.get_device(), q.stride(), k.stride(), v.stride(), k.shape)
    # A change of these means another signature of the kernel.
    key += (stride_of(tensors.block_table),)
    key += tuple(
        None if x is None else (x.dtype, x.data_ptr() & 15)
        for x in (tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.seqused_k,
                  tensors.alibi_slopes, tensors.sinks, tensors.block_table)
    )  # fmt: skip
    found = _kept.get(key)
    if found is None or not found.launch.is_resolved:
        found = _resolve(kernel, config or choose_forward(problem), problem, tensors, out)
        _kept[key] = found
    return found


def _resolve(kernel, config: Config, problem: Problem, tensors: Tensors, out: Tensor) -> Resolved:
    most = num_sms(tensors.q.device)
    code = code_for(config, problem, most)
    sizes = sizes_of(code, problem, most)
    grid = (min(most, sizes[_NUM_TILES]),)
    # A dependent launch: it is set up while what runs before it ends.
    launch = Launch(kernel, grid, tensors.q.get_device(), num_warps=4, launch_pdl=True)
    numbers = (*factors_of(problem), stride_of(tensors.block_table), *sizes)
    return Resolved(problem, launch, descriptors(code, tensors, out), numbers, code)


def code_for(config: Config, problem: Problem, num_ctas: int) -> Code:
    """The code for so many CTAs: not folded where one of them would get a second tile."""
    code = code_of(config, problem)
    pieces = most_pieces(config, problem, num_ctas)
    if pieces > 1:
        # Q in registers would spill beside what merges.
        config = replace(config, q_in_registers=False)
        # A piece's last K/V tile is not the rows' last one: nothing is known of its edge.
        changes = {"skips": False, "cuts_two": code.has_right}
        shares = shares_of(pieces)
        code = replace(code, config=config, shares=shares, **changes)
        runs_at_once = sizes_of(code, problem, num_ctas)[_NUM_TILES] <= num_ctas
        return replace(code, waits=POLLS if runs_at_once else 0)
    if code.is_folded and sizes_of(code, problem)[_NUM_TILES] <= num_ctas:
        return code
    if code.is_folded:
        code = code_of(replace(config, folded=False, turns=True), problem)
    num_tiles = sizes_of(code, problem)[_NUM_TILES]
    sorts = SORTED if _has_order(code, problem, num_tiles / num_ctas) else 0
    is_short = code.is_halved and num_tiles <= 2 * num_ctas
    return replace(code, is_short=is_short, sorts=sorts)


def _has_order(code: Code, problem: Problem, tiles: float) -> bool:
    """Whether sequences are taken in the order of their keys.

    H200, 2026-12-01, us, without and with it, 1k to 8k keys: 3.9 tiles a CTA 363 and 325, two of
    them a head 279 and 263; 7.8 tiles 658 and 640, two a head 512 and 519, four 501 and 514.
    Behind a window long sequences take no longer than others.

    Args:
        code, problem: without an order; whose sequences they are.
        tiles: of a CTA, on the mean.
    """
    is_one = problem.seqlen_q * code.heads <= code.block_m
    fits = problem.seqused_k and not code.packed_q and problem.mask.left < 0
    return fits and 1 < problem.batch <= SORTED and 1 < tiles <= (8 if is_one else 4)


def code_of(config: Config, problem: Problem) -> Code:
    packed_q = problem.layout_q is Layout.PACKED
    packed_k = problem.layout_k is Layout.PACKED or problem.layout_k is Layout.PAGED
    if problem.seqused_k:
        packed_k = packed_k and problem.layout_k is Layout.PACKED
    ragged = packed_q or packed_k or problem.seqused_k
    has_right = problem.mask.right >= 0
    assert not (config.folded and (ragged or problem.mask.left >= 0)), "a tile's keys lie together"
    reach = problem.seqlen_k - problem.seqlen_q + problem.mask.right
    apart = ragged or config.folded or config.grouped
    return Code(
        config=config,
        dim=problem.head_dim,
        dim_v=problem.head_dim_v,
        width=padded(problem.head_dim),
        width_v=padded(problem.head_dim_v),
        has_left=problem.mask.left >= 0,
        has_right=has_right,
        cuts_two=has_right and (ragged or config.grouped or reach % WARPGROUP_ROWS > 0),
        skips=has_right
        and (apart or config.block_n != config.block_m or reach % config.block_n > 0),
        # A causal edge ends at the last key by itself.
        has_tail=not problem.mask.causal and (ragged or problem.seqlen_k % config.block_n > 0),
        packed_q=packed_q,
        packed_k=packed_k,
        has_used=problem.seqused_k,
        page_size=problem.page_size,
        has_softcap=problem.softcap > 0,
        alibi_dim=problem.alibi,
        has_sinks=problem.sinks,
        is_causal=problem.mask.causal,
        heads=problem.group if config.grouped else 1,
    )


def lengths_of(tensors: Tensors) -> tuple[Tensor | None, ...]:
    """Tensors that say where sequences lie, in the order of `tiles.Lengths`."""
    return tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.seqused_k, tensors.block_table


def stride_of(block_table: Tensor | None) -> int:
    return 0 if block_table is None else block_table.stride(0)


def factors_of(problem: Problem) -> tuple[float, float]:
    """Scale and softcap as `softmax.Terms` wants them."""
    scale, softcap = problem.scale, problem.softcap
    return scale / softcap if softcap > 0 else scale * LOG2E, softcap * LOG2E


def sizes_of(code: Code, problem: Problem, num_ctas: int = NUM_SMS) -> tuple[int, ...]:
    """The kernel's run-time integers, in the order of `tiles.Sizes`."""
    pieces = most_pieces(code.config, problem, num_ctas) if code.in_pieces else 1
    mask = problem.mask
    num_blocks = -(-problem.seqlen_q * code.heads // code.block_m)
    num_pairs = problem.batch * problem.num_heads // code.heads
    return (
        problem.seqlen_q,
        problem.seqlen_k,
        problem.tokens_q,
        problem.num_heads,
        problem.group,
        problem.batch,
        num_blocks,
        num_blocks * num_pairs * pieces,
        max(1, heads_per_group(code.config, problem) // code.heads),
        min(max(mask.left, 0), _UNBOUNDED),
        min(max(mask.right, 0), _UNBOUNDED),
    )


def heads_per_group(config: Config, problem: Problem) -> int:
    """Query heads whose tiles are handed out together: even groups that fit in the L2 cache.

    Heads that share keys stay together, but for packed sequences: there, on an H200, groups a
    quarter as large were 1 % faster (32/8 heads), elsewhere as large ones up to 2 %.
    """
    shared = 1 if problem.layout_q is Layout.PACKED else problem.group
    pairs = problem.batch * problem.num_heads // shared
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.kv_dtype.itemsize
    total = pairs * problem.seqlen_k * row_bytes
    num_groups = max(1, min(pairs, round(total / config.l2_bytes)))
    return -(-pairs // num_groups) * shared


@lru_cache(maxsize=None)
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; an H200's where there is none."""
    if device.type != "cuda":
        return NUM_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count
