"""``tools/check_rnn.py``: what it covers, and that it finds what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import scan_registry
from scan_registry import NoKernelError, rnn

SMALL = ["--device", "cpu", "--dim", "16", "--time", "3", "--time", "2"]


@pytest.fixture(scope="module")
def tool(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("check_rnn")


def test_every_two_sizes_meet(tool: Any) -> None:
    sizes = (tool.BATCHES, tool.TIMES, tool.DIMS, tool.HEADS)
    networks = [(g.batch, g.time, g.dim, n) for g in tool.groups() for n in g.heads]
    for a, b in combinations(range(len(sizes)), 2):
        met = {(network[a], network[b]) for network in networks}
        assert met == set(product(sizes[a], sizes[b]))
    left_out = len(tool.groups()) * len(tool.HEADS) - len(networks)
    assert f"{left_out} networks are left out" in (tool.__doc__ or "")


@pytest.mark.parametrize("function", ["gru", "slstm"])
def test_narrow_numbers_are_exact_in_both_dtypes(tool: Any, function: str) -> None:
    group = tool.Group(2, 3, 512, (1, 3))
    for given in tool.drawn(function, group, torch.device("cpu"), narrow=True):
        for tensor in given.values():
            assert torch.equal(tensor.bfloat16().float(), tensor)
            assert torch.equal(tensor.half().float(), tensor)


def test_a_part_is_the_network_of_its_heads(tool: Any) -> None:
    group = tool.Group(2, 5, 16, (1, 3))
    for dtype, problem in tool.problems("lstm", group, ["float32"], torch.device("cpu")):
        alone = tool.solved("lstm", problem.arguments, problem.grads)
        assert dtype == "float32"
        for name, expected in problem.expected.items():
            torch.testing.assert_close(expected, alone.expected[name])


def test_what_is_right_passes(tool: Any, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    assert tool.main([*SMALL, "--json", str(path)]) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [result["taken"] for result in found["results"]] == [6] * 12
    assert set(found["results"][0]["errors"]) == {"2", "3"}


def of_states(made: Any) -> Any:
    return made[0] * 1.0001, made[1]


def of_gradients(made: Any) -> Any:
    return tuple(each.detach() + 1.0001 * (each - each.detach()) for each in made)


def of_nothing(made: Any) -> Any:
    return made[0], made[1] * torch.nan


@pytest.mark.parametrize("wrong", [of_states, of_gradients, of_nothing])
def test_what_is_wrong_is_found(
    tool: Any, wrong: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scan_registry, "rnn", lambda *args, **options: wrong(rnn(*args, **options)))
    assert tool.main([*SMALL, "--function", "lstm", "--dtype", "float32"]) == 1
    assert "error: lstm reference float32: error" in capsys.readouterr().err


def test_what_has_to_be_taken(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(*args: Any, **options: Any) -> Any:
        raise NoKernelError("none")

    monkeypatch.setattr(scan_registry, "rnn", refuses)
    assert tool.main([*SMALL, "--function", "lstm", "--dtype", "float32"]) == 1
    assert "did not take 6 networks" in capsys.readouterr().err


def test_a_budget_that_is_too_short_is_told(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([*SMALL, "--budget", "1e-9"]) == 1
    assert "the budget was too short" in capsys.readouterr().err
