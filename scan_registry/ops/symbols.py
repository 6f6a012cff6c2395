"""Conditions on sizes that torch.compile may know by symbols alone, as those of ``nonzero``.

``if`` would ask for a symbol's value, which nobody has before the compiled function runs.
"""

from __future__ import annotations

from typing import Any

import torch

_tracing = torch.compiler.is_dynamo_compiling


def surely(condition: Any) -> bool:
    """Whether it holds; False where that depends on values not known yet."""
    if _tracing() or isinstance(condition, torch.SymBool):
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        return guard_or_false(condition)
    return bool(condition)


def perhaps(condition: Any) -> bool:
    """Whether it holds; True where that depends on values not known yet."""
    if _tracing() or isinstance(condition, torch.SymBool):
        from torch.fx.experimental.symbolic_shapes import guard_or_true

        return guard_or_true(condition)
    return bool(condition)


def same_shape(one: Any, other: Any) -> bool:
    """Whether two shapes are surely the same."""
    return len(one) == len(other) and all(surely(a == b) for a, b in zip(one, other, strict=True))
