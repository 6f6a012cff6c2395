"""What tests of ``bench`` are given."""

from __future__ import annotations

import pytest
from benching import time_quickly

from scan_registry.bench import measure


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    time_quickly(monkeypatch)
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals come before anything is timed."""
    monkeypatch.setattr(measure, "streaming_bandwidth", lambda device: pytest.fail("timed"))
