"""What a tile shape uses of an SM, and how its programs fill a GPU.

Shared memory follows the rule that compiled kernels were seen to follow (Triton 3.6, portable
forward and backward, sm_80 and sm_90; tests compile and compare):

* the side that a program owns lies in shared memory once;
* the side that it walks over lies there `num_stages` times where warpgroups multiply from
  shared memory (wgmma), once less where warps load operands into registers first (mma);
* P passes through shared memory where warps are more than blocks of 16 rows;
* barriers and alignment add up to 2 KiB, `ALLOWANCE_BYTES`.

Seen beyond that: a backward of one stage on sm_80, 4 KiB less to 12 KiB more; a causal forward
of 8 warps and two stages there, one K and V tile more. Dropout's bits and a user function's
loads take more, which is not counted. sm_100 and gfx942 were not looked at.

Registers are those of the tiles that live across a step; what addresses and masks add is a
guess, `OTHER_REGISTERS`.

Legend: B batch, S_q / S_k lengths, H query heads, H_kv key and value heads, D / D_v head dims.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from onchip.analysis import cost
from onchip.analysis.hardware import Hardware
from onchip.analysis.reads import query_tiles, rounded, rows_seeing
from onchip.problem import Layout, Problem

ALLOWANCE_BYTES = 2048
OTHER_REGISTERS = 40
MAX_REGISTERS = 255
PARTS = ("forward", "dkdv", "dk", "dv", "dq")
#: Programs beyond which their spread over SMs is reckoned instead of simulated.
_MOST_SIMULATED = 5_000


@dataclass(frozen=True)
class TileShape:
    """How a kernel cuts its work, in the words that all configs share.

    Args:
        block_m: query rows of a tile.
        block_n: keys of a tile.
        num_warps: warps of a program.
        num_stages: tiles of the walked side in flight, the current one included.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, config: Any) -> TileShape:
        """The shape of any config that has these four attributes."""
        return cls(config.block_m, config.block_n, config.num_warps, config.num_stages)

    def __str__(self) -> str:
        warps, stages = self.num_warps, self.num_stages
        return f"{self.block_m}x{self.block_n}, {warps} warps, {stages} stages"


@dataclass(frozen=True)
class Part:
    """One of the kernels that walk over tiles, for a problem: which side it owns.

    Args:
        name: "forward"; "dkdv", or "dk" or "dv" alone (own keys); "dq" (owns queries).
        problem: the call.
        arch: architecture that it is compiled for.

    Raises:
        ValueError: if the name is none of those.
    """

    name: str
    problem: Problem
    arch: str

    def __post_init__(self):
        if self.name not in PARTS:
            raise ValueError(f"part: got {self.name!r}; allowed: {', '.join(PARTS)}")

    @property
    def owns_keys(self) -> bool:
        """Whether a program owns keys and walks over queries."""
        return self.name in ("dkdv", "dk", "dv")

    @property
    def itemsize(self) -> int:
        """Bytes of an element of a tile."""
        return self.problem.dtype.itemsize

    @property
    def widths(self) -> tuple[int, int]:
        """D and D_v, padded to powers of two."""
        return padded(self.problem.head_dim), padded(self.problem.head_dim_v)

    def rows(self, shape: TileShape) -> int:
        """Rows of the products' results, which warps divide among them."""
        return shape.block_n if self.owns_keys else shape.block_m

    def uses_warpgroups(self, shape: TileShape) -> bool:
        """Whether products read both operands from shared memory (wgmma)."""
        fits = self.rows(shape) >= 64 and shape.num_warps % 4 == 0
        return self.arch == "sm_90" and self.itemsize <= 2 and fits


def padded(head_dim: int) -> int:
    """The power of two >= 16 that holds a head dimension."""
    return max(16, 1 << (head_dim - 1).bit_length())


def on_chip_bytes(
    block_m: int, block_n: int, head_dim: int, head_dim_v: int, itemsize: int = 2
) -> int:
    """Q, K, V tiles, and S and O in float32: all that a tile keeps on the chip, wherever."""
    inputs = itemsize * (block_m * head_dim + block_n * (head_dim + head_dim_v))
    return inputs + 4 * block_m * block_n + 4 * block_m * head_dim_v


def shared_buffers(part: Part, shape: TileShape) -> dict[str, int]:
    """Shared memory by buffer, in bytes."""
    d, d_v = (width * part.itemsize for width in part.widths)
    queries = {"q": shape.block_m * d}
    if part.name != "forward":
        queries["dout"] = shape.block_m * d_v
    keys = {"k": shape.block_n * d, "v": shape.block_n * d_v}
    if part.name == "dv":
        del keys["v"]  # P^T dO does without
    owned, walked = (keys, queries) if part.owns_keys else (queries, keys)
    buffers = owned | _walked_buffers(part, shape, walked)
    # With one stage dQ's dS goes where V was.
    dead = part.name == "dq" and shape.num_stages == 1
    if not dead and not part.uses_warpgroups(shape) and part.rows(shape) < 16 * shape.num_warps:
        buffers["p"] = shape.block_m * shape.block_n * part.itemsize
    return buffers


def _walked_buffers(part: Part, shape: TileShape, walked: dict[str, int]) -> dict[str, int]:
    stages = shape.num_stages
    if stages == 1 and part.name == "forward":
        return {"k, then v": max(walked.values())}  # K is done with when V arrives
    ahead = stages - 1
    if part.problem.layout_k is Layout.PAGED:
        ahead -= 1  # one stage fetches the page numbers
    copies = max(2, ahead + 1) if part.uses_warpgroups(shape) and stages > 1 else max(1, ahead)
    buffers = {name: size * copies for name, size in walked.items()}
    if part.owns_keys and stages > 1:
        vectors = 1 if part.name == "dv" else 2
        buffers["lse, delta"] = vectors * 4 * shape.block_m * (stages - 1)
    return buffers


def register_buffers(part: Part, shape: TileShape) -> dict[str, int]:
    """Registers of a thread by the tile that they hold."""
    threads = 32 * shape.num_warps
    d, d_v = part.widths
    scores = shape.block_m * shape.block_n
    halves = -(-scores * part.itemsize // 4 // threads)
    if part.name == "forward":
        tiles = {"o": shape.block_m * d_v // threads}
    elif part.owns_keys:
        tiles = {"dk": shape.block_n * d // threads, "dv": shape.block_n * d_v // threads}
        tiles = {name: n for name, n in tiles.items() if name in part.name}
    else:
        tiles = {"dq": shape.block_m * d // threads}
    tiles |= {"s": -(-scores // threads), "p": halves}
    if part.name not in ("forward", "dv"):
        tiles["dp"] = tiles["s"]
    if not part.uses_warpgroups(shape):
        # Operands wait in registers: a thread's share of the owned side, and of the walked one
        # what each row of warps reads whole.
        rows = max(1, min(shape.num_warps, part.rows(shape) // 16))
        walked = shape.block_m if part.owns_keys else shape.block_n
        words = d * part.itemsize // 4  # of a row
        tiles["operands"] = part.rows(shape) * words // (32 * rows)
        tiles["operands"] += walked * words // (32 * shape.num_warps // rows)
    return tiles


def reasons(
    part: Part,
    shape: TileShape,
    hardware: Hardware,
    shared_bytes: int | None = None,
) -> list[str]:
    """Why a shape can't run on a GPU; empty when it can.

    Args:
        part: the kernel and its problem.
        shape: the tile shape.
        hardware: the GPU.
        shared_bytes: as compiled; predicted unless given.
    """
    why = []
    for name in ("block_m", "block_n"):
        size = getattr(shape, name)
        if size < 16 or size & (size - 1):
            why.append(f"{name} {size}: allowed are powers of two from 16 on")
    if shape.num_stages < 1 or shape.num_warps < 1:
        why.append(f"{shape}: needs at least one warp and one stage")
    if why:
        return why
    needed = shared_bytes or sum(shared_buffers(part, shape).values())
    allowed = hardware.shared_block_bytes
    if needed > allowed:
        why.append(f"needs {kib(needed)} of shared memory; {hardware.name} gives {kib(allowed)}")
    held = sum(n for name, n in register_buffers(part, shape).items() if name != "operands")
    if held > MAX_REGISTERS:
        why.append(f"holds {held} registers of tiles a thread; {MAX_REGISTERS} are allowed")
    threads = hardware.warp * shape.num_warps
    if threads > 1024:
        why.append(f"has {threads} threads; 1024 are allowed")
    return why


def kib(num_bytes: int) -> str:
    """Bytes in words."""
    return f"{num_bytes / 1024:.4g} KiB"


@dataclass(frozen=True)
class Tiling:
    """What a tile shape uses of an SM, and how its programs fill a GPU.

    Args:
        shape: the tile shape.
        shared: bytes of shared memory by buffer.
        registers: registers of a thread by tile.
        blocks_per_sm: programs resident on an SM.
        blocks_limiter: what allows no more of them.
        num_heads_tasks: B x H, the programs if query tiles did not join in.
        num_programs: programs of the launch.
        waves: rounds of resident programs.
        idle_sms: SMs without a program in the first wave.
        imbalance: time of the busiest slot over the mean: 1 is even.
        waste: pairs computed over pairs seen: tiles that the mask or the end cuts.
        re_reads: times that a tile of the walked side is read, by one head's programs.
    """

    shape: TileShape
    shared: dict[str, int]
    registers: dict[str, int]
    blocks_per_sm: int
    blocks_limiter: str
    num_heads_tasks: int
    num_programs: int
    waves: int
    idle_sms: int
    imbalance: float
    waste: float
    re_reads: float

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program."""
        return sum(self.shared.values())

    @property
    def registers_per_thread(self) -> int:
        """Registers of a thread, what addresses add included."""
        return min(MAX_REGISTERS, sum(self.registers.values()) + OTHER_REGISTERS)


def tiling(
    problem: Problem,
    config: Any,
    hardware: Hardware,
    part: str = "forward",
    lengths: Iterable[tuple[int, int]] | None = None,
    compiled: tuple[int, int] | None = None,
) -> Tiling:
    """What a config uses and how it fills a GPU.

    Args:
        problem: the call.
        config: anything with block_m, block_n, num_warps and num_stages.
        hardware: the GPU.
        part: one of `PARTS`.
        lengths: (S_q, S_k) of each sequence.
        compiled: (shared bytes, registers of a thread) as compiled; predicted unless given.

    Raises:
        ValueError: if the problem has no work, or the config does not fit the GPU.
    """
    lengths = cost.sequence_lengths(problem) if lengths is None else list(lengths)
    require_work(problem, lengths)
    shape = TileShape.of(config)
    walker = Part(part, problem, hardware.arch)
    why = reasons(walker, shape, hardware, compiled and compiled[0])
    if why:
        raise ValueError(f"config: got {shape}, which {'; '.join(why)}")
    shared, registers = shared_buffers(walker, shape), register_buffers(walker, shape)
    used = compiled or (
        sum(shared.values()),
        min(MAX_REGISTERS, sum(registers.values()) + OTHER_REGISTERS),
    )
    blocks, limiter = resident_blocks(hardware, shape.num_warps, *used)
    return Tiling(
        shape,
        shared,
        registers,
        blocks,
        limiter,
        problem.batch * _heads(walker),
        *spread(walker, shape.block_m, shape.block_n, hardware.num_sms, blocks, tuple(lengths)),
    )


def require_work(problem: Problem, lengths: Iterable[tuple[int, int]] | None = None) -> None:
    """Requires at least one pair of query and key.

    Raises:
        ValueError: if a length, the batch or the number of heads is 0, or the mask hides all.
    """
    for name in ("batch", "seqlen_q", "seqlen_k", "num_heads"):
        if getattr(problem, name) < 1:
            raise ValueError(f"{name}: got {getattr(problem, name)}; allowed: 1 or more")
    if not cost.num_pairs(problem, lengths):
        raise ValueError("mask: hides every key from every query; allowed: one that shows some")


def resident_blocks(
    hardware: Hardware, num_warps: int, shared_bytes: int, registers: int
) -> tuple[int, str]:
    """Blocks that fit an SM at one time, and what allows no more.

    Registers are given out to warps in units of 8 a thread; shared memory grows by what the
    system takes for each block.
    """
    threads = num_warps * hardware.warp
    per_block = shared_bytes + hardware.shared_reserved_bytes
    limits = {
        "shared memory": hardware.shared_sm_bytes // max(1, per_block),
        "registers": hardware.registers_sm // (-(-max(1, registers) // 8) * 8 * threads),
        "threads": hardware.threads_sm // threads,
        "blocks": hardware.blocks_sm,
    }
    limiter = min(limits, key=lambda name: limits[name])
    return limits[limiter], limiter


def _heads(part: Part) -> int:
    """Heads that own programs."""
    return part.problem.num_kv_heads if part.owns_keys else part.problem.num_heads


def _walk_lengths(part: Part, block_m: int, block_n: int, s_q: int, s_k: int) -> list[int]:
    """Tiles that each program of one head walks over."""
    problem = part.problem
    if part.owns_keys:
        spans = (
            rounded(rows_seeing(problem, range(*tile), s_q, s_k), block_m, s_q)
            for tile in query_tiles(s_k, block_n)
        )
        return [-(-len(span) // block_m) * problem.group for span in spans]
    spans = (
        rounded(problem.mask.key_range(*tile, s_q, s_k), block_n, s_k)
        for tile in query_tiles(s_q, block_m)
    )
    return [-(-len(span) // block_n) for span in spans]


class Spread(NamedTuple):
    """How the programs of a launch fill a GPU (fields of `Tiling`)."""

    num_programs: int
    waves: int
    idle_sms: int
    imbalance: float
    waste: float
    re_reads: float


@lru_cache(maxsize=1024)
def spread(
    part: Part, block_m: int, block_n: int, num_sms: int, blocks: int, lengths: tuple
) -> Spread:
    """How the programs of a launch with tiles of such sizes fill a GPU."""
    heads = _heads(part)
    walks: Counter[int] = Counter()
    for (s_q, s_k), n in Counter(lengths).items():
        for walk in _walk_lengths(part, block_m, block_n, s_q, s_k):
            walks[walk] += n * heads
    num_programs, slots = walks.total(), num_sms * max(1, blocks)
    tiles = sum(walk * n for walk, n in walks.items())  # of all heads
    pairs = cost.num_pairs(part.problem, lengths) * part.problem.num_heads
    block, side = (block_m, 0) if part.owns_keys else (block_n, 1)
    walked = sum(-(-pair[side] // block) for pair in lengths) * part.problem.num_heads
    return Spread(
        num_programs,
        waves=-(-num_programs // slots),
        idle_sms=max(0, num_sms - num_programs),
        imbalance=_imbalance(walks, slots),
        waste=tiles * block_m * block_n / pairs,
        re_reads=tiles / walked,
    )


def _imbalance(walks: Counter[int], slots: int) -> float:
    """Busiest slot over the mean, programs taken longest first by whichever slot is free."""
    num_programs = walks.total()
    if num_programs > _MOST_SIMULATED:
        return -(-num_programs // slots) * slots / num_programs  # as if all were equal
    ends = [0] * slots
    for walk in sorted(walks, reverse=True):
        for _ in range(walks[walk]):
            heapq.heapreplace(ends, ends[0] + walk)
    return max(ends) * slots / sum(ends)
