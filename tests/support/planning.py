"""Paths of calls without plans, for tests that change what is planned."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from scan_registry.ops.call import fast_path


def forget_plans(
    monkeypatch: pytest.MonkeyPatch, name: str, quickly: bool = True
) -> tuple[list[Any], list[Any]]:
    """Has the operator plan its calls anew: by the fast path, or else by the other. Lists the plans that its fast path makes,
    forward and backward."""
    module = importlib.import_module(f"scan_registry.kernels.{name}.op.function")
    derivatives = importlib.import_module(f"scan_registry.kernels.{name}.op.autograd")
    made: tuple[list[Any], list[Any]] = [], []

    def fresh(plan: Any, kept: list[Any]) -> Any:
        def watched(*request: Any) -> Any:
            kept.append(plan(*request))
            return kept[-1]

        return fast_path(watched) if quickly else lambda *_: None

    operator = derivatives.OPERATOR
    for home, path, plan in (
        (module, "fast_scan", "_plan"),
        (derivatives, "_fast_call", "_plan"),
        (derivatives, "_fast_update", "_plan_update"),
    ):
        if hasattr(home, path):
            monkeypatch.setattr(home, path, fresh(getattr(derivatives, plan), made[0]))
    monkeypatch.setattr(operator, "backward_path", fresh(operator._plan_of_backward, made[1]))
    return made
