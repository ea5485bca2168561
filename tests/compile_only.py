"""Compiles Triton kernels for GPUs that are not there and reads what the assembler used.

`captured` takes a launch's arguments instead of running it, `compiled` compiles the kernel for
an architecture with exactly the specialisation that the launch would have had, `resources`
reads registers, spills and shared memory. Triton must not be in interpreter mode, so tests run
a script that uses this module in a process of its own: `run_script`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

TARGETS = ("sm_80", "sm_90", "gfx942")


class Call(NamedTuple):
    """Arguments of one kernel launch."""

    kernel: object
    args: tuple
    kwargs: dict


def run_script(script: Path, *arguments: str, before: str = "") -> list[dict]:
    """Runs a script without the interpreter; it prints one JSON value last.

    Args:
        script: its path.
        arguments: its command line.
        before: a directory whose packages come before the installed ones.
    """
    return json.loads(output_of(script, *arguments, before=before).splitlines()[-1])


def output_of(script: Path, *arguments: str, before: str = "", seconds: float = 600) -> str:
    """What a script prints without the interpreter; see `run_script`. It must end well in time."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [before, str(Path(__file__).parents[1]), *sys.path]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def captured(kernel, launch: Callable[[], object]) -> list[Call]:
    """Launches of `kernel` that `launch()` would have made; none of them runs."""
    return captured_of((kernel,), launch)


def captured_of(kernels: tuple, launch: Callable[[], object]) -> list[Call]:
    """`captured` for a launch that runs several kernels."""
    calls = []
    originals = [kernel.run for kernel in kernels]

    def taking(kernel):
        return lambda *args, grid, warmup, **kwargs: calls.append(Call(kernel, args, kwargs))

    for kernel in kernels:
        kernel.run = taking(kernel)
    try:
        launch()
    finally:
        for kernel, original in zip(kernels, originals, strict=True):
            kernel.run = original
    return calls


def _target(arch: str):
    from triton.backends.compiler import GPUTarget

    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 64)
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)


def specialisation(call: Call, arch: str):
    """(bound arguments, specialisation, options) as Triton's launcher would see them."""
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(_target(arch))
    bind = create_function_from_signature(call.kernel.signature, call.kernel.params, backend)
    return backend, *bind(*call.args, **call.kwargs)


def compiled(call: Call, arch: str):
    """The kernel of a captured launch, compiled for `arch`; seconds are added as `.seconds`."""
    import triton
    from triton._utils import find_paths_if, get_iterable_path
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    backend, bound, found, options = specialisation(call, arch)
    names = [parameter.name for parameter in call.kernel.params]
    types, hints = [list(column) for column in zip(*found, strict=True)]
    values = list(bound.values())
    constants = {
        path: get_iterable_path(values, path)
        for path in find_paths_if(types, lambda _, kind: kind == "constexpr")
    }
    attributes = {
        path: backend.parse_attr(get_iterable_path(hints, path))
        for path in find_paths_if(hints, lambda _, hint: isinstance(hint, str))
    }
    kind = GluonASTSource if call.kernel.is_gluon() else ASTSource
    source = kind(call.kernel, dict(zip(names, types, strict=True)), constants, attributes)
    start = time.perf_counter()
    binary = triton.compile(source, target=_target(arch), options=options)
    binary.seconds = time.perf_counter() - start
    return binary


def _tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _run_on(data: bytes | str, suffix: str, command: list[str], output: str = "") -> str:
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        done = subprocess.run([*command, file.name], capture_output=True, text=True)
    return done.stdout + done.stderr


def disassembly(binary) -> str:
    """SASS of an NVIDIA binary."""
    return _run_on(binary.asm["cubin"], ".cubin", [_tool("nvdisasm"), "-c"])


def _loops(sass: str) -> tuple[list[str], list[range]]:
    """Instructions, and where jumps back span some of them."""
    labels, instructions = {}, []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction[1])
    spans = []
    for end, text in enumerate(instructions):
        jump = re.search(r"\bBRA\b.*?`\((\.L\w+)\)", text)
        start = labels.get(jump[1], end) if jump else end
        if start < end:
            spans.append(range(start, end + 1))
    return instructions, spans


def loop_spills(sass: str) -> int:
    """Instructions that move spilled registers inside of loops that hold matrix products.

    A value that waits in memory from the kernel's start to its end costs nothing there.
    """
    instructions, spans = _loops(sass)
    spans = [s for s in spans if any("MMA" in instructions[i] for i in s)]
    # Waits that stand out of line jump back too, over everything between: not loops.
    inner = [s for s in spans if not any(t != s and t[0] in s and t[-1] in s for t in spans)]
    touched = {i for span in inner for i in span}
    return sum(bool(re.search(r"\b(STL|LDL)\b", instructions[i])) for i in touched)


def loads_beside_tma(sass: str) -> int:
    """Loads of global memory in the shortest loops around instructions that ask TMA for tiles.

    -1 where none stands in a loop: then nothing was looked at.
    """
    instructions, spans = _loops(sass)
    loops = set()
    for i, text in enumerate(instructions):
        around = [span for span in spans if i in span]
        if "UTMALDG" in text and around:
            loops.add(min(around, key=len))
    if not loops:
        return -1
    return sum(bool(re.search(r"\bLDG\b", instructions[i])) for loop in loops for i in loop)


def resources(binary) -> dict:
    """registers, spill_bytes and shared_bytes of a binary; assembler warnings on NVIDIA."""
    report = {"shared_bytes": binary.metadata.shared, "seconds": round(binary.seconds, 2)}
    if "cubin" not in binary.asm:
        text = binary.asm["amdgcn"]
        spills = re.search(r"\.vgpr_spill_count:\s+(\d+)", text)
        registers = re.search(r"\.vgpr_count:\s+(\d+)", text)
        assert spills and registers
        return report | {"registers": int(registers[1]), "spill_bytes": 4 * int(spills[1])}
    usage = _run_on(binary.asm["cubin"], ".cubin", [_tool("cuobjdump"), "--dump-resource-usage"])
    registers = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert registers, usage
    sass = disassembly(binary)
    return report | {
        "registers": int(registers[1]),
        "spill_bytes": int(registers[2]),
        "loop_spills": loop_spills(sass),
        "loads_beside_tma": loads_beside_tma(sass),
        "wgmma": len(re.findall(r"\bHGMMA\b", sass)),
        "mma": len(re.findall(r"\b[HQI]MMA\b", sass)),
        "tma_loads": len(re.findall(r"\bUTMALDG\b", sass)),
        "warnings": assembler_warnings(binary),
        "scratch_on_barriers": scratch_on_barriers(binary.asm["ptx"]),
    }


def scratch_on_barriers(ptx: str) -> list[int]:
    """Offsets in shared memory of an mbarrier that was begun where plain accesses go as well.

    Triton (3.6) gives the memory of a barrier that nobody waits for to scratch, without ending the
    barrier first, as PTX asks for; what is stored there turns into the barrier's state again.
    """
    registers: dict[str, int] = {}
    begun, plain = set(), set()
    for line in ptx.splitlines():
        if sum_ := re.search(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", line):
            registers[sum_[1]] = int(sum_[2])
        elif base := re.search(r"mov\.b32\s+(%r\d+), global_smem;", line):
            registers[base[1]] = 0
        access = re.search(r"(\S+)\s.*\[\s*(%r\d+|global_smem)(?:\s*\+\s*(\d+))?\s*\]", line)
        if access and (access[2] == "global_smem" or access[2] in registers):
            at = registers.get(access[2], 0) + int(access[3] or 0)
            if "mbarrier.init" in line:
                begun.add(at)
            elif re.search(r"\b(ld|st)\.shared(::cta)?\.", line):
                plain.add(at)
    assert begun or "mbarrier.init" not in ptx, "PTX whose barriers are not found"
    return sorted(x for x in begun if plain & set(range(x, x + 8)))


def assembler_warnings(binary) -> list[str]:
    """Codes of ptxas' performance advisories, such as C7510 (serialised wgmma)."""
    arch = re.search(r"\.target (sm_\w+)", binary.asm["ptx"])
    assert arch
    command = [_tool("ptxas"), f"--gpu-name={arch[1]}", "-v", "-o", os.devnull]
    return sorted(set(re.findall(r"\((C\d{4})\)", _run_on(binary.asm["ptx"], ".ptx", command))))
