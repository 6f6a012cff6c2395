"""Kernel families: what exists, in which languages, with which static parameters.

One folder per family. A folder is a family when it holds a ``spec.py`` that defines ``FAMILY``.
Nothing in this package may import torch, triton or a CUDA package at import time, except a
family's ``reference.py`` (torch) and its Triton sources, which a spec names but never imports.
"""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path

from scan_registry.kernels.model import Family

ROOT = Path(__file__).parent


@cache
def families() -> dict[str, Family]:
    """All kernel families by name, in alphabetical order."""
    found = {}
    for spec in sorted(ROOT.glob("*/spec.py")):
        module = importlib.import_module(f"{__name__}.{spec.parent.name}.spec")
        family: Family = module.FAMILY
        if family.name != spec.parent.name:
            raise ValueError(
                f"{spec} defines family {family.name!r}; its folder is {spec.parent.name!r}"
            )
        found[family.name] = family
    return found


def family(name: str) -> Family:
    """The family called ``name``; ``KeyError`` names the families that exist."""
    try:
        return families()[name]
    except KeyError:
        raise KeyError(f"no kernel family {name!r}; there are: {', '.join(families())}") from None
