"""Hardware records: consistency, names, detection."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from onchip.analysis import hardware
from onchip.analysis.hardware import HARDWARE, Achieved, Hardware


@pytest.mark.parametrize("gpu", HARDWARE, ids=lambda h: h.name)
def test_records_agree_with_themselves(gpu):
    """Stated rates are units x clock, so that no figure is a sparse one or from another part."""
    per_clock = gpu.flops(torch.float16) / gpu.num_sms / gpu.clock_hz
    expected = {"sm_80": 2048, "sm_89": 1024, "sm_90": 4096, "sm_100": 8192, "sm_120": 1024,
                "gfx942": 2048}[gpu.arch]  # fmt: skip
    if gpu.name in ("RTX 4090", "RTX 5090"):  # half rate with float32 accumulation
        expected = 512
    assert per_clock == pytest.approx(expected, rel=0.03)
    assert gpu.flops("bfloat16") == gpu.flops("float16") > gpu.flops("float32")
    assert gpu.shared_block_bytes <= gpu.shared_sm_bytes and gpu.source
    assert gpu.exps == pytest.approx(16 * gpu.num_sms * gpu.clock_hz)


def test_ridge_of_an_a100():
    """312 TFLOP/s over 2 TB/s: 156 FLOP/B."""
    gpu = Hardware.named("A100 80GB")
    assert replace(gpu, bandwidth=2e12).ridge(torch.float16) == 156
    assert gpu.ridge("bfloat16") == pytest.approx(153, abs=0.1)


def test_exponentials_of_an_h100():
    """3.9 T/s against 989 TFLOP/s (Shah et al. 2024, FlashAttention-3, section 3.1)."""
    assert Hardware.named("H100 SXM").exps / 1e12 == pytest.approx(3.9, abs=0.05)


def test_names():
    for written in ("H200", "h200", "NVIDIA H200", "nvidia-h200"):
        assert Hardware.named(written).name == "H200"
    assert Hardware.named("geforce rtx4090").name == "RTX 4090"
    assert Hardware.named("AMD Instinct MI300X").name == "MI300X"
    assert Hardware.named("L4").name == "L4"
    with pytest.raises(ValueError, match="'A100', which is more than one; allowed: A100 40GB, A1"):
        Hardware.named("A100")
    for unknown in ("H300", "", "-"):
        with pytest.raises(ValueError, match="not known; allowed: A100 40GB.*MI300X"):
            Hardware.named(unknown)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_devices_find_their_record(device, name):
    assert Hardware.of_device(device).name == name


@pytest.mark.parametrize("device", ["NVIDIA GeForce RTX 4090 D", "NVIDIA H100 NVL", "Tesla T4"])
def test_relatives_are_not_guessed(device):
    with pytest.raises(ValueError, match="has no record; allowed: .*measure"):
        Hardware.of_device(device)


def test_detect_takes_what_the_device_reports(monkeypatch):
    reported = SimpleNamespace(
        name="NVIDIA H200", multi_processor_count=66, total_memory=70 << 30, L2_cache_size=30 << 20
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: reported)
    found = Hardware.detect()
    assert (found.num_sms, found.memory_bytes, found.l2_bytes) == (66, 70 << 30, 30 << 20)
    assert found.name == "H200" and found.arch == "sm_90"


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a machine without a GPU")
def test_without_a_gpu():
    with pytest.raises(RuntimeError, match="none in this machine; name one"):
        Hardware.detect()
    with pytest.raises(RuntimeError, match="none in this machine"):
        hardware.measure()


@pytest.mark.gpu
def test_measured_rates_are_below_the_stated_ones():
    found, achieved = Hardware.detect(), hardware.measure(size=4096, copied_bytes=1 << 30)
    assert 0.2 * found.flops("bfloat16") < achieved.flops < found.flops("bfloat16")
    assert 0.5 * found.bandwidth < achieved.bandwidth < found.bandwidth


def test_achieved_rates_scale_every_dtype():
    achieved = Achieved("H200", 494.7e12, 4.3e12, "bfloat16")
    gpu = Hardware.named("H200").achieving(achieved)
    assert gpu.flops("float16") == 494.7e12 and gpu.bandwidth == 4.3e12
    assert gpu.flops("float32") == pytest.approx(66.9e12 / 2)
    assert str(achieved) == "H200: matrix product 495 TFLOP/s in bfloat16, copy 4.30 TB/s"


def test_dtypes_that_it_does_not_multiply():
    with pytest.raises(ValueError, match="dtype: got float8_e4m3fn; A100 80GB multiplies float16"):
        Hardware.named("A100 80GB").flops(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="dtype: got int8"):
        Hardware.named("H200").flops("int8")
