"""The modules on scans, each made with the fewest arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scan_registry import nn

FEATURES, LENGTH, BATCH = 8, 9, 3

MAKERS: dict[str, Callable[..., Any]] = {
    "MinGRU": lambda **how: nn.MinGRU(FEATURES, 1.5, **how),
    "MinGRU-identity": lambda **how: nn.MinGRU(FEATURES, activation="identity", **how),
    "MinLSTM": lambda **how: nn.MinLSTM(FEATURES, **how),
    "MinLSTM-identity": lambda **how: nn.MinLSTM(FEATURES, 2, activation="identity", **how),
    "RGLRU": lambda **how: nn.RGLRU(FEATURES, 2, **how),
    "HGRN": lambda **how: nn.HGRN(FEATURES, 2, **how),
    "LRU": lambda **how: nn.LRU(6, FEATURES, **how),
    "S5": lambda **how: nn.S5(FEATURES, 6, block_count=2, **how),
    "S5-bidir": lambda **how: nn.S5(FEATURES, 6, bidir=True, **how),
}

EVERY = pytest.mark.parametrize("name", MAKERS)
STEPPING = pytest.mark.parametrize("name", [name for name in MAKERS if name != "S5-bidir"])
