"""Modules by their paths: tools are scripts and tests are files, in no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TOOLS, EXAMPLES = ROOT / "tools", ROOT / "examples"


def load(path: Path) -> Any:
    """The module of a file, made anew; while it is made, it can import the files beside it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        spec.loader.exec_module(module)
    return module


def load_tool(name: str) -> ModuleType:
    """A tool by its name, such as ``attest``."""
    module: ModuleType = load(TOOLS / f"{name}.py")
    return module
