"""Tools as modules: they are scripts, in no package."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import by_path
import pytest


@pytest.fixture(scope="session")
def load_tool() -> Callable[[str], ModuleType]:
    """A function from a tool's name, such as ``attest``, to its module, made anew."""
    return by_path.load_tool
