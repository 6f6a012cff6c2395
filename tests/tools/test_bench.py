"""tools/bench.py: what torch's associative_scan is timed on."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from scan_registry import linear_scan
from scan_registry.ops.linear_scan_baselines import installed
from scan_registry.ops.linear_scan_bench import Case

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def baselines(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("bench")


@pytest.mark.slow
def test_torchs_associative_scan_computes_the_recurrence(baselines: ModuleType) -> None:
    associative = baselines.ASSOCIATIVE
    gates, tokens = torch.rand(2, 3, 20), torch.randn(2, 3, 20)
    call = associative.kernel(
        importlib.import_module(associative.module), "forward", gates, tokens, tokens
    )
    torch.testing.assert_close(call(), linear_scan(gates, tokens))


def test_only_its_forward_pass_is_timed_with_contiguous_time(
    baselines: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(baselines, "_compiled", lambda *key: lambda *given: made.append(key))
    associative, case = baselines.ASSOCIATIVE, Case("time_last", 2, 3, 20, "float32")
    assert associative.version is not None
    assert associative.kernel_call(case, "backward", CPU) is None
    call = associative.kernel_call(case, "forward", CPU)()
    assert [key[1:] for key in made] == [("generic", (2, 3, 20), torch.float32)]
    call()
    assert len(made) == 2
    assert associative.refuses(Case("channel_last", 2, 3, 20, "float32"))
    assert associative not in installed()
