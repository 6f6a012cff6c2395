"""A kernel like another, of which a test changes a few fields."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from scan_registry.kernels.model import Kernel


def changed(kernel: Kernel, **changes: Any) -> Kernel:
    """The kernel with other fields, its own or of one of its groups: ``changed(kernel, tunings=tuple)``."""
    for name in ("code", "rules", "tunable"):
        group = getattr(kernel, name)
        there = {field.name for field in fields(group)} & changes.keys()
        if there:
            changes[name] = replace(group, **{each: changes.pop(each) for each in there})
    return replace(kernel, **changes)
