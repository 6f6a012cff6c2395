"""The emulator of a GPU, for tests of CUDA kernels on machines without one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def cuda_emulator() -> ModuleType:
    """The module of that name."""
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
    return module
