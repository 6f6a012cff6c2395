"""The emulator of a GPU, for tests of CUDA kernels on machines without one; one thread."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from by_path import load

if TYPE_CHECKING:
    from scan_registry.kernels.model import Family, Variant


@pytest.fixture(scope="session")
def cuda_emulator(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The module of that name, which keeps libraries where all workers of this run have them."""
    module: ModuleType = load(Path(__file__).with_name("cuda_emulator.py"))
    if module.compiler() is None:
        pytest.skip("g++ is not installed")
    base = tmp_path_factory.getbasetemp()
    several = "PYTEST_XDIST_WORKER" in os.environ  # each of which has a folder inside of the run's
    module.shared = (base.parent if several else base) / "emulated"
    module.shared.mkdir(exist_ok=True)
    return module


@pytest.fixture
def emulated(cuda_emulator: ModuleType, tmp_path: Path) -> Callable[..., Any]:
    """A variant of a family's CUDA kernel in the emulator: a function of both, and of the architecture if not the usual."""

    def library(family: Family, variant: Variant, **options: int) -> Any:
        kernel = family.kernel(variant.kernel, "cuda")
        return cuda_emulator.emulated(kernel, variant, tmp_path, **options)

    return library


@pytest.fixture
def seeded() -> None:
    """Random numbers that do not depend on the test's name."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> None:
    """Tensors are small here. Tests of threads set their number themselves."""
    if request.node.get_closest_marker("gpu") is None:
        request.getfixturevalue("one_thread")
