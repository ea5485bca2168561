"""What GPUs can do at most, as their vendors state it, and what the present one achieves.

Rates are dense (no sparsity) and accumulate in float32. float32 and float64 count the ordinary
units, since onchip multiplies full precision without the tensor cores' TF32.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
_T = 10**12


class Rates(NamedTuple):
    """FLOP/s of matrix products by dtype; 0 where the hardware has none."""

    bits16: float  # float16 and bfloat16
    float32: float
    float64: float
    float8: float = 0.0


@dataclass(frozen=True)
class Hardware:
    """One GPU.

    Args:
        name: what `Hardware.named` calls it.
        arch: architecture as `Problem.arch`.
        rates: FLOP/s of matrix products.
        memory_bytes: slow memory.
        bandwidth: bytes/s of slow memory.
        l2_bytes: L2 cache.
        num_sms: streaming multiprocessors (compute units of AMD).
        shared_sm_bytes: shared memory of an SM.
        shared_block_bytes: most of it that one block may use.
        shared_reserved_bytes: what the system takes of it for each block.
        registers_sm: 32-bit registers of an SM.
        threads_sm: most threads resident on an SM.
        blocks_sm: most blocks resident on an SM.
        clock_hz: the clock at which `rates` holds.
        exps_clock_sm: exponentials of an SM in a clock.
        source: where the numbers are from.
        device_pattern: regular expression that finds the device's own name.
        warp: threads of a warp.
    """

    name: str
    arch: str
    rates: Rates
    memory_bytes: int
    bandwidth: float
    l2_bytes: int
    num_sms: int
    shared_sm_bytes: int
    shared_block_bytes: int
    shared_reserved_bytes: int
    registers_sm: int
    threads_sm: int
    blocks_sm: int
    clock_hz: float
    exps_clock_sm: int
    source: str
    device_pattern: str
    warp: int = 32

    @classmethod
    def named(cls, name: str) -> Hardware:
        """The GPU of that name; case, spaces, hyphens and "NVIDIA" do not matter.

        Raises:
            ValueError: if no record has that name, or several might be meant.
        """
        if not isinstance(name, str):
            allowed = ", ".join(h.name for h in HARDWARE)
            raise TypeError(f"gpu: got {type(name).__name__}; allowed: a name, one of {allowed}")
        wanted = _key(name)
        exact = [h for h in HARDWARE if _key(h.name) == wanted]
        found = exact or [h for h in HARDWARE if wanted and _key(h.name).startswith(wanted)]
        if len(found) == 1:
            return found[0]
        allowed = ", ".join(h.name for h in (found or HARDWARE))
        problem = "is more than one" if found else "is not known"
        raise ValueError(f"gpu: got {name!r}, which {problem}; allowed: {allowed}")

    @classmethod
    def detect(cls, device: int = 0) -> Hardware:
        """The GPU in this machine, with the SMs, memory and L2 cache that it reports.

        Raises:
            RuntimeError: if there is no GPU.
            ValueError: if no record fits it; `measure()` says what it achieves.
        """
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("gpu: none in this machine; name one, e.g. H200")
        properties = torch.cuda.get_device_properties(device)
        record = cls.of_device(properties.name)
        l2_bytes = getattr(properties, "L2_cache_size", 0) or record.l2_bytes
        return replace(
            record,
            num_sms=properties.multi_processor_count,
            memory_bytes=properties.total_memory,
            l2_bytes=l2_bytes,
        )

    @classmethod
    def of_device(cls, name: str) -> Hardware:
        """The record for a device's own name, such as "NVIDIA A100-SXM4-80GB"."""
        for record in HARDWARE:
            if re.search(record.device_pattern, name):
                return record
        allowed = ", ".join(h.name for h in HARDWARE)
        raise ValueError(
            f"gpu: got {name!r}, which has no record; allowed: {allowed}. "
            "onchip.analysis.hardware.measure() says what it achieves."
        )

    def flops(self, dtype: object) -> float:
        """FLOP/s of matrix products of a torch dtype, or of its name.

        Raises:
            ValueError: if the GPU has no such unit.
        """
        name = str(dtype).removeprefix("torch.")
        rate = {
            "float16": self.rates.bits16,
            "bfloat16": self.rates.bits16,
            "float32": self.rates.float32,
            "float64": self.rates.float64,
            "float8_e4m3fn": self.rates.float8,
        }.get(name, 0.0)
        if not rate:
            raise ValueError(
                f"dtype: got {name}; {self.name} multiplies float16, bfloat16, float32, float64"
                + (" and float8_e4m3fn" if self.rates.float8 else "")
            )
        return rate

    def achieving(self, achieved: Achieved) -> Hardware:
        """The same GPU at rates that it was seen to achieve, every dtype's in proportion."""
        factor = achieved.flops / self.flops(achieved.dtype)
        rates = Rates(*(rate * factor for rate in self.rates))
        return replace(self, rates=rates, bandwidth=achieved.bandwidth)

    @property
    def exps(self) -> float:
        """Exponentials a second, of the special-function units."""
        return self.exps_clock_sm * self.num_sms * self.clock_hz

    def ridge(self, dtype: object) -> float:
        """FLOP/byte above which matrix products, not memory, limit."""
        return self.flops(dtype) / self.bandwidth


def _key(name: str) -> str:
    kept = "".join(c for c in name.lower() if c.isalnum())
    for word in ("nvidia", "geforce", "amd", "instinct"):
        kept = kept.replace(word, "")
    return kept


class _Sm(NamedTuple):
    """What the SMs of an architecture have, and exponentials of one in a clock."""

    shared_sm_bytes: int
    shared_block_bytes: int
    shared_reserved_bytes: int
    registers_sm: int
    threads_sm: int
    blocks_sm: int
    exps_clock_sm: int
    warp: int = 32


# CUDA C++ Programming Guide, "Compute Capabilities": technical specifications and, for the
# exponentials, throughput of native arithmetic instructions (rcp, rsqrt, ex2, lg2, sin).
# gfx942: AMD CDNA 3 white paper (64 KiB of LDS and 512 KiB of vector registers a unit); one
# transcendental in 4 clocks for each of 4 x 16 lanes (MI300 ISA guide, quarter rate).
_SMS = {
    "sm_80": _Sm(164 * _KIB, 163 * _KIB, _KIB, 65536, 2048, 32, 16),
    "sm_89": _Sm(100 * _KIB, 99 * _KIB, _KIB, 65536, 1536, 24, 16),
    "sm_90": _Sm(228 * _KIB, 227 * _KIB, _KIB, 65536, 2048, 32, 16),
    "sm_100": _Sm(228 * _KIB, 227 * _KIB, _KIB, 65536, 2048, 32, 16),
    "sm_120": _Sm(100 * _KIB, 99 * _KIB, _KIB, 65536, 1536, 24, 16),
    "gfx942": _Sm(64 * _KIB, 64 * _KIB, 0, 131072, 2048, 32, 16, warp=64),
}


def _gpu(name, arch, device, tflops, memory, l2_bytes, num_sms, mhz, source) -> Hardware:
    """A record. tflops: Rates in TFLOP/s; memory: (GB, GB/s) as vendors count them."""
    return Hardware(
        name=name,
        arch=arch,
        device_pattern=device,
        rates=Rates(*(rate * _T for rate in tflops)),
        memory_bytes=memory[0] * 10**9,
        bandwidth=memory[1] * 1e9,
        l2_bytes=l2_bytes,
        num_sms=num_sms,
        clock_hz=mhz * 1e6,
        source=source,
        **_SMS[arch]._asdict(),
    )


_A100 = "NVIDIA A100 datasheet and A100 architecture whitepaper, v1.0"
_HOPPER = "NVIDIA H100 architecture whitepaper, v1.04, and H100 datasheet (dense is half)"
_ADA = "NVIDIA Ada GPU architecture whitepaper, v2.1"
# Rates: float16 and bfloat16, float32, float64, float8.
_SXM = Rates(989.4, 66.9, 33.5, 1978.9)

HARDWARE: tuple[Hardware, ...] = (
    _gpu("A100 40GB", "sm_80", "A100.*40GB", (312, 19.5, 9.7), (40, 1555), 40 * _MIB, 108, 1410,
         _A100),
    _gpu("A100 80GB", "sm_80", "A100.*80GB", (312, 19.5, 9.7), (80, 2039), 40 * _MIB, 108, 1410,
         _A100 + "; memory of the SXM module, 1,935 GB/s on PCIe"),
    _gpu("H100 SXM", "sm_90", "H100 80GB HBM3", _SXM, (80, 3350), 50 * _MIB, 132, 1830, _HOPPER),
    _gpu("H100 PCIe", "sm_90", "H100 PCIe", (756, 51.2, 25.6, 1513), (80, 2039), 50 * _MIB, 114,
         1620, _HOPPER + "; the clock is the one of the tensor cores' rate"),
    _gpu("H200", "sm_90", "H200$", _SXM, (141, 4800), 60 * _MIB, 132, 1830,
         "NVIDIA H200 datasheet; SMs as the H100 whitepaper; L2 as the device reports it"),
    _gpu("B200", "sm_100", "B200$", (2250, 75, 37, 4500), (180, 7700), 126 * _MIB, 148, 1850,
         "NVIDIA HGX B200 datasheet, an eighth of the board; SMs and L2 as the device reports "
         "them; the clock that gives the tensor cores' rate"),
    _gpu("L4", "sm_89", "L4$", (121, 30.3, 0.47, 242), (24, 300), 48 * _MIB, 58, 2040,
         "NVIDIA L4 datasheet (dense is half); " + _ADA),
    _gpu("L40S", "sm_89", "L40S$", (362, 91.6, 1.43, 733), (48, 864), 96 * _MIB, 142, 2520,
         "NVIDIA L40S datasheet; " + _ADA),
    _gpu("RTX 4090", "sm_89", "RTX 4090$", (165.2, 82.6, 1.29, 330.3), (24, 1008), 72 * _MIB, 128,
         2520, _ADA + ", appendix A: with float32 accumulation"),
    _gpu("RTX 5090", "sm_120", "RTX 5090$", (209.5, 104.8, 1.64, 419), (32, 1792), 96 * _MIB, 170,
         2407, "NVIDIA RTX Blackwell GPU architecture whitepaper, v1.1: with float32 accumulation"),
    _gpu("MI300X", "gfx942", "MI300X", (1307.4, 163.4, 81.7, 2614.9), (192, 5300), 32 * _MIB, 304,
         2100, "AMD Instinct MI300X data sheet; CDNA 3 white paper: 4 MiB of L2 on each of 8 dies"),
)  # fmt: skip


@dataclass(frozen=True)
class Achieved:
    """Rates that the present GPU achieved.

    Args:
        name: of the device.
        flops: FLOP/s of a large square matrix product.
        bandwidth: bytes/s of a large copy, read and written counted.
        dtype: of the product.
    """

    name: str
    flops: float
    bandwidth: float
    dtype: str

    def __str__(self) -> str:
        product = f"{self.flops / _T:.0f} TFLOP/s in {self.dtype}"
        return f"{self.name}: matrix product {product}, copy {self.bandwidth / _T:.2f} TB/s"


def measure(dtype: str = "bfloat16", size: int = 8192, copied_bytes: int = 2 * _GIB) -> Achieved:
    """Achieved rates of this machine's GPU: medians of 10 runs, random data.

    Args:
        dtype: of the matrix product.
        size: rows and columns of both factors.
        copied_bytes: of the tensor that is copied, far more than the L2 cache holds.

    Raises:
        RuntimeError: if there is no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("gpu: none in this machine, so nothing to measure.")
    a, b = (torch.randn(size, size, device="cuda", dtype=getattr(torch, dtype)) for _ in range(2))
    product_s = _median_seconds(lambda: a @ b)
    source = torch.zeros(copied_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_s = _median_seconds(lambda: target.copy_(source))
    name = torch.cuda.get_device_name()
    return Achieved(name, 2 * size**3 / product_s, 2 * copied_bytes / copy_s, dtype)


def _median_seconds(action, num_runs: int = 10) -> float:
    import torch

    for _ in range(3):
        action()
    times = []
    for _ in range(num_runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        action()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[num_runs // 2]
