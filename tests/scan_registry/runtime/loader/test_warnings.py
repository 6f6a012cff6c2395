"""Who is warned that plain torch runs: each family of kernels, once a process and kernel."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scan_registry.runtime import loader


def decision(family: str) -> Any:
    gpu = SimpleNamespace(name="a GPU", arch="sm_90")
    return SimpleNamespace(
        family=SimpleNamespace(name=family, stand_in="plain torch"),
        problem=SimpleNamespace(kernel="forward"),
        system=SimpleNamespace(device=gpu),
        backend="auto",
    )


def test_two_families_whose_kernels_have_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_warned", set())
    monkeypatch.setattr(loader, "advice", lambda decision: "Nothing fits")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [loader.run_reference(decision(name), lambda: 7) for name in ("a", "b", "a")]
    assert results == [7, 7, 7]
    assert [str(warning.message).split()[0] for warning in caught] == ["a.forward", "b.forward"]
