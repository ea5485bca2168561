"""What every test shares: seeds, threads for each worker, and GPU tests skipped without a GPU."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Before anything imports Triton: without a GPU its kernels run in the interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("onchip", deadline=None, derandomize=True, database=None)
settings.load_profile("onchip")


def pytest_configure(config: pytest.Config) -> None:
    """Shares the CPUs among xdist's workers, so that they don't fight over them."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked gpu where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
