"""What a tile uses of an SM where warpgroups have roles: the kernels for sm_90 in Gluon.

One program is on an SM at a time and takes all of its registers: warps of the loading role need
few, so that a consumer's threads get more (`setmaxnreg`). Configs are taken by their fields.

Shared memory is what the kernels allocate, to the byte but for barriers and alignment
(`tiles.ALLOWANCE_BYTES`; measured 0.3 to 0.7 KiB, triton 3.6; a test compiles every config).

Legend: D / D_v head dimensions, padded to 64, 128 or 256; BM / BN queries and keys of a tile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from onchip.analysis import cost, tiles
from onchip.analysis.hardware import Hardware
from onchip.analysis.tiles import Part, TileShape, Tiling
from onchip.problem import Layout, Op, Problem

ARCH = "sm_90"
#: Query rows, or keys, that one warpgroup multiplies at a time.
ROWS = 64
_WARPGROUP, _THREADS = 4, 128  # warps and threads of a warpgroup
_REGISTERS, _LOADER_REGISTERS = 65536, 24  # of an SM; of a thread that loads, the fewest allowed


class Use(NamedTuple):
    """What one launch uses of an SM.

    Args:
        shape: of its tiles; the warps of all roles.
        shared: bytes of shared memory by buffer.
        registers: of a consumer thread, by tile, in the role that needs most.
        allowed: registers of a consumer thread.
    """

    shape: TileShape
    shared: dict[str, int]
    registers: dict[str, int]
    allowed: int


def has_roles(config: Any) -> bool:
    """Whether a config is one of a kernel whose warpgroups have roles."""
    return hasattr(config, "warpgroups") or hasattr(config, "apart")


def padded(head_dim: int) -> int:
    """The power of two >= 64 that holds a head dimension."""
    return max(64, 1 << (head_dim - 1).bit_length())


def use(problem: Problem, config: Any, part: str = "forward") -> Use:
    """What a launch uses of an SM.

    Args:
        problem: the call.
        config: of a kernel with roles.
        part: "forward", "dkdv" or "dq".
    """
    if part == "forward":
        return _forward(problem, config)
    return _keys(problem, config) if part == "dkdv" else _queries(problem, config)


def _forward(problem: Problem, config: Any) -> Use:
    """Consumers of 64 queries each, K and V in `stages` tiles, one warp that loads."""
    size, out_size = problem.dtype.itemsize, cost.out_itemsize(problem)
    d, d_v, block_n = padded(problem.head_dim), padded(problem.head_dim_v), config.block_n
    block_m = config.warpgroups * ROWS
    shared = {
        "q": config.q_buffers * block_m * d * size,
        "k": config.stages * block_n * d * size,
        "v": config.stages * block_n * d_v * size,
    }
    parts = getattr(config, "parts", 1)
    if size < out_size:  # the output is wider than Q, whose buffer it can't leave through
        shared["o"] = block_m * d_v // parts * out_size
    elif config.q_buffers == 1:
        shared["o"] = block_m * d_v // 2 * out_size
    registers = {"o": d_v // 2, "s": block_n // 2, "p": block_n * size // 8}
    if getattr(config, "q_in_registers", False):
        registers["q"] = d * size // 8
    if getattr(config, "two_level", False):
        # In a serial step S is done with when P V of the tile is made.
        free = block_n // 2 if getattr(config, "serial", False) else 0
        registers["o of a tile"] = max(0, d_v // 2 // parts - free)
    warps = _WARPGROUP * (config.warpgroups + 1)
    shape = TileShape(block_m, block_n, warps, config.stages)
    return Use(shape, shared, registers, config.registers)


def _keys(problem: Problem, config: Any) -> Use:
    """Two warpgroups that own BN keys and a third one for dQ; with `apart` a chain of P and dV, dP
    and dK."""
    size = problem.dtype.itemsize
    d, d_v = padded(problem.head_dim), padded(problem.head_dim_v)
    block_m, block_n, stages = config.block_m, config.block_n, config.stages
    piece = ROWS * block_m * size
    shared = {
        "k": block_n * d * size,
        "v": block_n * d_v * size,
        "q": stages * block_m * d * size,
        "dout": stages * block_m * d_v * size,
        "lse, delta": 2 * 4 * stages * block_m,
    }
    if config.apart:
        shared |= {"p": 2 * piece}
        # S or dP of two pieces at once; P or dS of one.
        held = {"dk or dv": max(d, d_v) // 2, "s or dp": block_m, "p or ds": block_m // 4}
        return Use(TileShape(block_m, block_n, 3 * _WARPGROUP, stages), shared, held, 240)
    shared |= {"ds": config.ds_buffers * 2 * piece, "dq": 2 * 4 * block_m * 64}
    shared["dq of another head"] = 2 * 4 * block_m * 64
    if config.persistent and problem.layout_q is not Layout.PACKED:
        shared["next k, v"] = shared["k"] + shared["v"]
    held = {"dk": d // 2, "dv": d_v // 2, "p": block_m // 4}
    half = block_m // 2
    held |= {"s or dp": half, "ds": block_m // 4} if config.late else {"s": half, "dp": half}
    return Use(TileShape(block_m, block_n, 4 * _WARPGROUP, stages), shared, held, 208)


def _queries(problem: Problem, config: Any) -> Use:
    """Two consumers of 64 queries each that make dQ alone; K in two tiles, V in one."""
    size = problem.dtype.itemsize
    d, d_v, block_n = padded(problem.head_dim), padded(problem.head_dim_v), config.block_n
    block_m = 2 * config.block_m
    shared = {
        "q": block_m * d * size,
        "dout": block_m * d_v * size,
        "k": 2 * block_n * d * size,
        "v": block_n * d_v * size,
    }
    registers = {"dq": d // 2, "s": block_n // 2, "dp": block_n // 2, "ds": block_n * size // 8}
    return Use(TileShape(block_m, block_n, 3 * _WARPGROUP, 2), shared, registers, 240)


def parts(config: Any, problem: Problem) -> tuple[str, ...]:
    """Launches of a config that walk over tiles."""
    if problem.op is not Op.BACKWARD:
        return ("forward",)
    return ("dkdv", "dq") if config.apart else ("dkdv",)


def share_outside(problem: Problem, config: Any) -> float:
    """Share of dQ's float32 sum that launches before and behind clear and round."""
    heads = problem.batch * problem.num_kv_heads
    lag = -(-config.lag // -(-problem.seqlen_k // config.block_n))
    return min(1.0, lag / heads)


def reasons(used: Use, hardware: Hardware) -> list[str]:
    """Why a launch can't run on a GPU; empty when it can."""
    if hardware.arch != ARCH:
        return [f"has roles, which need {ARCH}; {hardware.name} is {hardware.arch}"]
    why = []
    needed, allowed = sum(used.shared.values()), hardware.shared_block_bytes
    if needed > allowed:
        sizes = f"{needed / 1024:.4g} KiB", f"{allowed / 1024:.4g} KiB"
        why.append(f"needs {sizes[0]} of shared memory; {hardware.name} gives {sizes[1]}")
    held = sum(used.registers.values())
    if held > used.allowed:
        why.append(f"holds {held} registers of tiles a consumer thread; {used.allowed} are allowed")
    return why


def consumer_registers(warpgroups: int) -> int:
    """Registers of a consumer thread where one warpgroup loads and gives its own away."""
    return (_REGISTERS // _THREADS - _LOADER_REGISTERS) // warpgroups // 8 * 8


def launch_registers(num_warps: int, hardware: Hardware) -> int:
    """Registers of a thread that a launch asks for: all of an SM's, in units of 8."""
    return hardware.registers_sm // (hardware.warp * num_warps) // 8 * 8


def tiling(
    problem: Problem,
    config: Any,
    hardware: Hardware,
    part: str = "forward",
    lengths: Iterable[tuple[int, int]] | None = None,
) -> Tiling:
    """What a config uses and how its tiles fill a GPU, as `tiles.tiling`.

    A forward's programs take tile after tile; the Tiling's programs are those tiles.

    Raises:
        ValueError: if the problem has no work, or the config does not fit the GPU.
    """
    lengths = cost.sequence_lengths(problem) if lengths is None else list(lengths)
    tiles.require_work(problem, lengths)
    used = use(problem, config, part)
    why = reasons(used, hardware)
    if why:
        raise ValueError(f"config: got {used.shape}, which {'; '.join(why)}")
    shape = used.shape
    registers = launch_registers(shape.num_warps, hardware)
    blocks, limiter = tiles.resident_blocks(
        hardware, shape.num_warps, sum(used.shared.values()), registers
    )
    return Tiling(
        shape,
        used.shared,
        used.registers,
        blocks,
        limiter,
        problem.batch * (problem.num_kv_heads if part == "dkdv" else problem.num_heads),
        *tiles.spread(
            Part(part, problem, hardware.arch),
            shape.block_m,
            shape.block_n,
            hardware.num_sms,
            blocks,
            tuple(lengths),
        ),
    )
