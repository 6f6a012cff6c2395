"""What a user allows: how far down the tiers a call may go, and the warning when it does."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Literal

from scan_registry.base.suggestion import accepted_words
from scan_registry.dispatch.fit import Tier

if TYPE_CHECKING:
    from contextlib import _GeneratorContextManager  # a decorator, too

Level = Literal["exact", "aot", "same-major", "ptx", "jit", "reference"]

VARIABLE = "SCAN_REGISTRY_REQUIRE"
#: The lowest tier that each level allows. Every tier is a level too. ``aot`` is all machine code that was
#: compiled ahead of time.
LEVELS: Mapping[Level, Tier] = {
    "exact": Tier.EXACT,
    "aot": Tier.SAME_MAJOR,
    "same-major": Tier.SAME_MAJOR,
    "ptx": Tier.PTX,
    "jit": Tier.JIT,
    "reference": Tier.REFERENCE,
}

#: The lowest tier that ``require`` allows here; None outside of it.
required: ContextVar[Tier | None] = ContextVar("scan_registry.require", default=None)


class FallbackWarning(UserWarning):
    """A kernel that had to be compiled here, or that plain torch stands in for."""


def lowest() -> Tier:
    """The lowest tier that is allowed here: the strictest of ``SCAN_REGISTRY_REQUIRE``, which is read
    once, and every ``require`` around."""
    inner, outer = required.get(), _default()
    return outer if inner is None else min(inner, outer)


def require(level: Level) -> _GeneratorContextManager[None]:
    """Within the block, in this thread or task, raise ``NoKernelError`` rather than go below a level.

    Args:
        level: ``"exact"`` allows only machine code for this very compute capability, ``"aot"`` (or
            ``"same-major"``) all machine code that was compiled ahead of time, ``"ptx"`` also what
            the driver compiles, ``"jit"`` also what is compiled here, and ``"reference"`` anything.
            Where blocks are nested, or ``SCAN_REGISTRY_REQUIRE`` is set, the strictest level holds.
            The backward pass of what is computed in the block keeps to its level.

    Raises:
        ValueError: there is no such level.
    """
    return _at_least(_tier(level, "level"))


@contextmanager
def _at_least(wanted: Tier) -> Iterator[None]:
    before = required.get()
    with as_required(wanted if before is None else min(before, wanted)):
        yield


@contextmanager
def as_required(tier: Tier | None) -> Iterator[None]:
    """What ``required`` was elsewhere: autograd runs backward passes in threads of its own."""
    token = required.set(tier)
    try:
        yield
    finally:
        required.reset(token)


@cache
def _default() -> Tier:
    return _tier(os.environ.get(VARIABLE) or "reference", VARIABLE)


def _tier(level: str, name: str) -> Tier:
    for known, tier in LEVELS.items():
        if level == known:
            return tier
    plain = level.strip().lower() if isinstance(level, str) else ""
    raise ValueError(f"{name} is {level!r}; {accepted_words(plain, [*LEVELS])}")
