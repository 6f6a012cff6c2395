"""The emulator of a GPU, for tests of CUDA kernels on machines without one."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def cuda_emulator(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The module of that name, which keeps libraries where all workers of this run have them."""
    spec = importlib.util.spec_from_file_location(
        "cuda_emulator", Path(__file__).with_name("cuda_emulator.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its module up there.
    sys.modules["cuda_emulator"] = module
    spec.loader.exec_module(module)
    if module.compiler() is None:
        pytest.skip("g++ is not installed")
    base = tmp_path_factory.getbasetemp()
    several = "PYTEST_XDIST_WORKER" in os.environ  # each of which has a folder inside of the run's
    module.shared = (base.parent if several else base) / "emulated"
    module.shared.mkdir(exist_ok=True)
    return module
