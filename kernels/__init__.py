"""Kernel families: what exists, in which languages, with which static parameters.

One folder per family. A folder is a family when it holds a ``spec.py`` that defines ``FAMILY``. Its folder ``op`` has what torch
calls: the public functions, and ``operator.py`` for commands. Nothing else in this package may import torch, triton or a CUDA
package at import time, except a family's ``reference.py`` (torch) and its Triton sources, which a spec names but never imports.
"""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scan_registry.kernels.model import Family

ROOT = Path(__file__).parent


class FamilyNameError(ValueError):
    """A spec's family is not called what its folder is."""


@cache
def families() -> dict[str, Family]:
    """All kernel families by name, in alphabetical order."""
    return {spec.parent.name: family(spec.parent.name) for spec in sorted(ROOT.glob("*/spec.py"))}


@cache
def family(name: str) -> Family:
    """The family called ``name``, and no other imported; ``KeyError`` names the families that exist."""
    spec = ROOT / name / "spec.py"
    if not (name.isidentifier() and spec.is_file()):
        raise KeyError(f"no kernel family {name!r}; there are: {', '.join(families())}")
    spec_family: Family = importlib.import_module(f"{__name__}.{name}.spec").FAMILY
    if spec_family.name != name:
        raise FamilyNameError(
            f"{spec} defines family {spec_family.name!r}; its folder is {name!r}, and both must be called the same"
        )
    return spec_family


@cache
def operators(module: str = "operator") -> tuple[str, ...]:
    """Names of the families that have a public function, or this module of ``op``, in alphabetical order."""
    return tuple(path.parents[1].name for path in sorted(ROOT.glob(f"*/op/{module}.py")))


@cache
def public(table: str = "PUBLIC") -> dict[str, str]:
    """The public names of all families' functions, and the modules that define them. Imports nothing but the names.

    ``table`` is the table in the families' folders that has the names. A family may lack the table ``DISTRIBUTED``, of the
    names in ``scan_registry.distributed``.
    """
    homes = dict[str, str]()
    for name in operators():
        folder = importlib.import_module(f"{__name__}.{name}")
        names: dict[str, str] = getattr(folder, table, {})
        homes.update({public: f"{folder.__name__}.{home}" for public, home in names.items()})
    return homes
