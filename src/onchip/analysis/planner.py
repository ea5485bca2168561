"""Which tile shapes a GPU can run for a problem, the likely best first.

The order is a model's, `model_us`. It ranks; it does not replace measuring, and the shipped
configs were measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

from onchip.analysis import cost, roles
from onchip.analysis.hardware import Hardware
from onchip.analysis.tiles import (
    MAX_REGISTERS,
    OTHER_REGISTERS,
    Part,
    TileShape,
    Tiling,
    reasons,
    require_work,
    tiling,
)
from onchip.problem import Problem

BLOCKS = (16, 32, 64, 128, 256)
WARPS = (4, 8)
STAGES = (1, 2, 3, 4)
#: Of kernels whose warpgroups have roles: consumers, keys of a tile, tiles of Q.
WARPGROUPS, ROLE_BLOCKS, Q_BUFFERS = (2, 3), (64, 128, 256), (1, 3)
#: What the older instruction (mma) reaches of an sm_90's tensor cores: about 0.63
#: (Luo et al. 2024, "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture").
_MMA_ON_SM90 = 0.63
#: Times this close, in parts of the fastest, rank alike.
_SAME = 0.03
#: Of the model, reckoned and not measured: lanes of an SM for ordinary operations, operations
#: for a score (scale, maximum, sum, conversion), bytes that an SM gets from the L2 cache in a
#: clock, clocks that a step waits for its barriers.
_LANES, _SCORE_OPS, _L2_BYTES_CLOCK, _STEP_CLOCKS = 128, 5, 64, 200


@dataclass(frozen=True)
class RoleShape:
    """How a forward with roles cuts its work, in the words of its config.

    Args:
        warpgroups: consumers, 64 query rows each.
        block_n: keys of a tile.
        stages: K/V tiles in flight.
        q_buffers: tiles of Q in shared memory.
    """

    warpgroups: int
    block_n: int
    stages: int
    q_buffers: int

    @classmethod
    def of(cls, config: Any) -> RoleShape:
        """The shape of any config that has these four attributes."""
        return cls(config.warpgroups, config.block_n, config.stages, config.q_buffers)

    @property
    def registers(self) -> int:
        """Of a consumer thread: what one warpgroup that loads leaves of an SM's."""
        return roles.consumer_registers(self.warpgroups)

    def __str__(self) -> str:
        rows = roles.ROWS * self.warpgroups
        return f"{rows}x{self.block_n}, {self.stages} stages, {self.q_buffers} tiles of Q"


@dataclass(frozen=True)
class Candidate:
    """A tile shape that fits.

    Args:
        shape: the tile shape.
        tiling: what it uses and how it fills the GPU.
        model_us: the model's time, good for ranking.
    """

    shape: TileShape | RoleShape
    tiling: Tiling
    model_us: float


@dataclass(frozen=True)
class Plan:
    """Tile shapes for a problem on a GPU. Prints well.

    Args:
        feasible: those that fit, the likely best first.
        failing: the others, each with its reasons.
    """

    feasible: tuple[Candidate, ...]
    failing: tuple[tuple[TileShape | RoleShape, tuple[str, ...]], ...]

    def __str__(self) -> str:
        lines = [
            f"{c.shape}: {c.model_us:.1f} us, {c.tiling.shared_bytes / 1024:.4g} KiB, "
            f"{c.tiling.blocks_per_sm} a SM ({c.tiling.blocks_limiter})"
            for c in self.feasible
        ]
        lines += [f"{shape}: {'; '.join(why)}" for shape, why in self.failing]
        return "\n".join(lines)


def candidates() -> Iterable[TileShape]:
    """Every shape that a plan looks at."""
    for block_m in BLOCKS:
        for block_n in BLOCKS:
            for warps in WARPS:
                for stages in STAGES:
                    yield TileShape(block_m, block_n, warps, stages)


def plan(problem: Problem, hardware: Hardware, part: str = "forward") -> Plan:
    """Tile shapes that fit, in order, and why each other fails.

    Args:
        problem: the call.
        hardware: the GPU.
        part: one of `tiles.PARTS`.

    Raises:
        ValueError: if the problem has no work, or the GPU does not multiply its dtype.
    """
    walker = _walker(problem, hardware, part)
    feasible, failing = [], []
    for shape in candidates():
        why = reasons(walker, shape, hardware)
        if why:
            failing.append((shape, tuple(why)))
            continue
        found = tiling(problem, shape, hardware, part)
        feasible.append(Candidate(shape, found, model_us(walker, found, hardware)))
    return Plan(_ordered(feasible), tuple(failing))


def plan_roles(problem: Problem, hardware: Hardware) -> Plan:
    """`plan` for a forward whose warpgroups have roles (the kernels for sm_90 in Gluon)."""
    walker = _walker(problem, hardware, "forward")
    feasible, failing = [], []
    for shape in (RoleShape(*each) for each in product(WARPGROUPS, ROLE_BLOCKS, STAGES, Q_BUFFERS)):
        why = roles.reasons(roles.use(problem, shape), hardware)
        if roles.ROWS * (shape.warpgroups - 1) > shape.block_n:
            why.append("a warpgroup would skip more than one tile of keys")
        if why:
            failing.append((shape, tuple(why)))
            continue
        found = roles.tiling(problem, shape, hardware)
        feasible.append(Candidate(shape, found, model_us(walker, found, hardware)))
    return Plan(_ordered(feasible), tuple(failing))


def _walker(problem: Problem, hardware: Hardware, part: str) -> Part:
    """The kernel to plan for, once it is known that it has work and its dtype a unit."""
    require_work(problem)
    hardware.flops(problem.dtype)
    return Part(part, problem, hardware.arch)


def _ordered(feasible: list[Candidate]) -> tuple[Candidate, ...]:
    """The likely best first.

    Times within some 3 % count as one: then fewer reads of K and V, then less memory win.
    """
    fastest = min((c.model_us for c in feasible), default=1.0)

    def rank(c: Candidate) -> tuple:
        used = c.tiling.shared_bytes, c.tiling.registers_per_thread
        return round(c.model_us / fastest / _SAME), c.tiling.re_reads, *used

    return tuple(sorted(feasible, key=rank))


def model_us(part: Part, found: Tiling, hardware: Hardware) -> float:
    """The model's time of one launch: what an SM's units need, and what its steps wait.

    Units: tensor cores, and for each score one exponential, `_SCORE_OPS` other operations and a
    share of rescaling the output; loads from the L2 cache. Units overlap where several
    warpgroups are on an SM and loads where several tiles are in flight. Registers beyond those
    of a thread are spilled, which costs in proportion.
    """
    problem, shape = part.problem, found.shape
    pairs = cost.num_pairs(problem) * problem.num_heads * found.waste / hardware.num_sms
    products = {"forward": 2, "dkdv": 4, "dk": 3, "dv": 2, "dq": 3}[part.name]
    rate = hardware.flops(problem.dtype) / hardware.num_sms / hardware.clock_hz
    if hardware.arch == "sm_90" and not part.uses_warpgroups(shape):
        rate *= _MMA_ON_SM90
    d, d_v = part.widths
    multiply = products * pairs * (d + d_v) / rate
    rescale = d_v / shape.block_n if part.name == "forward" else 0
    softmax = pairs / hardware.exps_clock_sm + pairs * (_SCORE_OPS + rescale) / _LANES
    tile = shape.block_m if part.owns_keys else shape.block_n
    steps = pairs / shape.block_m / shape.block_n
    loads = steps * tile * (d + d_v) * part.itemsize / _L2_BYTES_CLOCK
    warpgroups = found.blocks_per_sm * shape.num_warps / 4
    busy = max(multiply, softmax) if warpgroups >= 2 else multiply + softmax
    busy = max(busy, loads) if shape.num_stages > 1 else busy + loads / found.blocks_per_sm
    waits = steps * _STEP_CLOCKS / max(1, found.blocks_per_sm)
    spilled = max(0, sum(found.registers.values()) + OTHER_REGISTERS - MAX_REGISTERS)
    clocks = (busy + waits) * found.imbalance * (1 + spilled / MAX_REGISTERS)
    return clocks / hardware.clock_hz * 1e6
