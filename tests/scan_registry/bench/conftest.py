"""What tests of ``bench`` are given."""

from __future__ import annotations

import pytest

from scan_registry.bench import measure, timing


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small cache to be out of, and short turns."""
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 1 << 14)
    monkeypatch.setattr(timing, "LEAST_STREAMED", 1 << 16)
    monkeypatch.setattr(timing, "ENOUGH_MS", 0.2)
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals come before anything is timed."""
    monkeypatch.setattr(measure, "streaming_bandwidth", lambda device: pytest.fail("timed"))
