"""What a decode's tiles use of an SM, and how its pieces of the keys fill a GPU.

Configs are taken by their fields: rows, row_blocks, groups, block_n, num_warps, num_stages,
splits, direct, tall, and the method `programs`. Shared memory is what the compiler uses (triton
3.6; a test compiles and compares).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from onchip.analysis import cost
from onchip.analysis.hardware import Hardware
from onchip.analysis.tiles import (
    MAX_REGISTERS,
    OTHER_REGISTERS,
    TileShape,
    Tiling,
    kib,
    padded,
    require_work,
    resident_blocks,
)
from onchip.problem import Problem


def buffers(problem: Problem, config: Any, arch: str) -> dict[str, int]:
    """Shared memory of a decode by buffer, in bytes.

    Args:
        problem: the call.
        config: a decode's: rows, groups, block_n, num_warps, num_stages and direct.
        arch: architecture that it is compiled for.
    """
    d, d_v = padded(problem.head_dim), padded(problem.head_dim_v)
    itemsize = problem.dtype.itemsize
    if config.direct:  # each warp loads q as a product's operand
        token = config.num_stages * config.block_n * problem.kv_dtype.itemsize
        return {"k": d * token, "v": d_v * token}
    warpgroups = arch == "sm_90" and not config.groups and config.rows >= 64
    copies = config.num_stages if warpgroups else max(1, config.num_stages - 1)
    token = copies * config.block_n * problem.kv_dtype.itemsize
    buffers = {"k": d * token, "v": d_v * token}
    if not config.groups:
        buffers["q"] = config.rows * d * itemsize  # the narrow walk has q in registers
    spread = not warpgroups and config.rows < 16 * config.num_warps
    if (spread and not config.groups) or problem.kv_dtype.itemsize < itemsize:
        buffers["p"] = config.rows * config.block_n * itemsize
    if config.groups and problem.kv_dtype.itemsize < itemsize:
        # Float8 values become 16-bit before they change places.
        buffers["v, widened"] = d_v * config.block_n * itemsize
    return buffers


def registers(problem: Problem, config: Any, hardware: Hardware) -> dict[str, int]:
    """Registers of a thread by the tile that they hold; operands on their way are not counted."""
    threads = hardware.warp * _computing(config)
    scores = config.rows * config.block_n // threads
    # Groups of tokens each sum up an output of their own.
    outputs = max(1, config.groups) * config.rows * padded(problem.head_dim_v) // threads
    found = {"o": outputs, "s": scores, "p": -(-scores // 2)}
    if config.tall and padded(problem.head_dim) < 256:  # wider ones are read from shared memory
        found["q"] = config.rows * padded(problem.head_dim) // threads // 2
    return found


def _computing(config: Any) -> int:
    """Warps of a program that compute: all but the tall walk's producer and its idle neighbours."""
    return config.num_warps - 4 if config.tall else config.num_warps


def tiling(
    problem: Problem,
    config: Any,
    hardware: Hardware,
    lengths: Iterable[tuple[int, int]] | None = None,
) -> Tiling:
    """What a decode uses and how it fills a GPU, as `tiles.tiling`; pieces count as equal.

    Args:
        problem: the call.
        config: of a decode.
        hardware: the GPU.
        lengths: (S_q, S_k) of each sequence.

    Raises:
        ValueError: if the problem has no work, or the config does not fit the GPU.
    """
    lengths = cost.sequence_lengths(problem) if lengths is None else list(lengths)
    require_work(problem, lengths)
    shape = TileShape(config.rows, config.block_n, config.num_warps, config.num_stages)
    shared, held = buffers(problem, config, hardware.arch), registers(problem, config, hardware)
    needed, allowed = sum(shared.values()), hardware.shared_block_bytes
    if needed > allowed:
        why = f"needs {kib(needed)} of shared memory; {hardware.name} gives {kib(allowed)}"
        raise ValueError(f"config: got {shape}, which {why}")
    used = min(MAX_REGISTERS, sum(held.values()) + OTHER_REGISTERS)
    used = -(-used * _computing(config) // config.num_warps)  # of all warps alike
    blocks, limiter = resident_blocks(hardware, config.num_warps, needed, used)
    units = problem.num_kv_heads * config.row_blocks
    num_programs, num_sms = units * problem.batch * config.splits, hardware.num_sms
    tokens = sum(-(-s_k // config.block_n) for _, s_k in lengths) * config.block_n
    pairs = cost.num_pairs(problem, lengths) * problem.num_heads
    return Tiling(
        shape,
        shared,
        held,
        blocks,
        limiter,
        problem.batch * problem.num_kv_heads,
        num_programs,
        waves=-(-num_programs // (num_sms * max(1, blocks))),
        idle_sms=max(0, num_sms - num_programs),
        imbalance=-(-num_programs // num_sms) * num_sms / num_programs,
        waste=max(1.0, tokens * config.rows * units / pairs),
        re_reads=float(config.row_blocks),
    )
