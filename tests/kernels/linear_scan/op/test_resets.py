"""``linear_scan(reset=…)``: the kernels that it has, and what is told of them."""

from __future__ import annotations

from typing import Any

import gated_kernels
import pytest
import torch
from torch import Tensor

from scan_registry import explain, linear_scan
from scan_registry.kernels.gated_scan.problem import GatedScanProblem
from scan_registry.kernels.linear_scan.op import function as module
from scan_registry.ops.operator import operators


def test_no_resets_are_a_scan_without() -> None:
    gates, tokens = torch.rand(2, 3, 7), torch.randn(2, 3, 7)
    none = torch.zeros(2, 7, dtype=torch.bool)
    for options in ({}, {"dim": 0}, {"reverse": True}):
        shape = (3, 2) if "dim" in options else (2, 7)
        found = linear_scan(gates, tokens, reset=none.new_zeros(shape), **options)  # type: ignore[call-overload]
        torch.testing.assert_close(found, linear_scan(gates, tokens, **options))  # type: ignore[call-overload]


@pytest.mark.parametrize("reverse", [False, True])
def test_the_final_state_shares_no_memory_with_the_states(reverse: bool) -> None:
    for shape in ((2, 3, 7), (2, 7), (7,)):
        gates = torch.rand(()).expand(1)
        reset = torch.zeros(shape if len(shape) < 3 else (2, 7), dtype=torch.bool)
        states, last = linear_scan(
            gates, torch.rand(shape), reset=reset, reverse=reverse, return_final_state=True
        )
        assert last.untyped_storage().nbytes() == 4 * last.numel()
        before = last.clone()
        states.zero_()
        torch.testing.assert_close(last, before)


def test_the_fast_path_does_not_see_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call without is as short as before; one with resets never goes there."""
    taken: list[Any] = []
    path = module.fast_scan

    def noted(*given: Any) -> Any:
        taken.append(given)
        return path(*given)

    monkeypatch.setattr(module, "fast_scan", noted)
    x = torch.rand(2, 3, 7)
    linear_scan(x, x)
    assert len(taken) == 1
    linear_scan(x, x, reset=torch.zeros(2, 7, dtype=torch.bool))
    assert len(taken) == 1


@pytest.mark.parametrize(("shape", "dim"), [((2, 3, 7), -1), ((7, 2, 3), 0), ((7,), 0)], ids=str)
def test_what_runs_is_described(shape: tuple[int, ...], dim: int) -> None:
    """One scan over the steps of all batches, of packed sequences."""
    x = torch.rand(shape, requires_grad=True)
    batch = 2 if len(shape) > 1 else 1
    reset = torch.zeros((batch, 7) if len(shape) > 1 else (7,), dtype=torch.bool)
    calls = module.describe(x, x, reset=reset, dim=dim, reverse=True)
    assert [*calls] == ["forward", "backward"]
    for call in calls.values():
        problem = call.problem
        assert (problem.time, problem.sequences, problem.reverse) == (7 * batch, 7 * batch, True)
        assert problem.channels == (3 if len(shape) > 1 else 1)
    assert "linear_scan" in str(explain(linear_scan, x, x, reset=reset, dim=dim))
    with pytest.raises(TypeError, match="reset must be"):
        module.describe(x, x, reset=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("shape", "dim", "gates_shape", "gates_dtype", "dtype", "layout"),
    [
        ((2, 3, 7), -1, (2, 3, 7), torch.float32, torch.float32, "time_last"),
        ((2, 3, 7), -1, (3, 1), torch.float32, torch.float32, "time_last"),
        ((2, 3, 7, 4), 2, (4,), torch.float32, torch.bfloat16, "channel_last"),
        ((2, 3, 4, 7), -1, (2, 3, 4, 7), torch.float16, torch.float16, "time_last"),
        ((7, 2, 3), 0, (7, 2, 3), torch.float32, torch.float32, "channel_last"),
        ((2, 7), 1, (2, 7), torch.bfloat16, torch.bfloat16, "time_last"),
        ((7, 2), 0, (), torch.float32, torch.float32, "channel_last"),
        ((7,), 0, (7,), torch.float32, torch.float32, "time_last"),
    ],
    ids=str,
)
def test_a_kernel_of_gated_scan_where_there_is_one(
    shape: tuple[int, ...],
    dim: int,
    gates_shape: tuple[int, ...],
    gates_dtype: torch.dtype,
    dtype: torch.dtype,
    layout: str,
    packed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of any rank, one launch forwards and one backwards, of a stand-in for the kernels; all else as on the CPU."""
    rank, dim = len(shape), dim % len(shape)
    reset = torch.rand(*shape[1 if dim == 0 else 0 :][: rank > 1], 7) < 0.4
    state = [n for d, n in enumerate(shape) if d != dim]
    if packed:
        state.insert(dim, 3)
    bounds = torch.tensor([0, 3, 3, 7]) if packed else None
    leaves = (
        torch.rand(gates_shape).to(gates_dtype),
        torch.randn(shape).to(dtype),
        torch.randn(state),
    )
    weight = torch.randn(shape).to(dtype)

    def results() -> list[Tensor]:
        given = [t.clone().requires_grad_() for t in leaves]
        found, last = linear_scan(
            *given, reset=reset, dim=dim, cu_seqlens=bounds, return_final_state=True
        )
        assert found.shape == shape
        assert last.shape == tuple(state)
        loss = (found * weight).float().sum() + last.sum()
        return [found, last, *torch.autograd.grad(loss, given)]

    expected = results()
    used = gated_kernels.played(monkeypatch, quickly=False)
    found = results()
    assert [problem.direction for problem in used] == ["forward", "backward"]
    assert {(p.kind, p.layout, p.resets) for p in used} == {("linear", layout, True)}
    tolerance = gated_kernels.TOLERANCE[dtype]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=10 * tolerance, atol=10 * tolerance)


def test_what_runs_on_a_gpu_is_described() -> None:
    """By problems of ``gated_scan``, among whose kernels is chosen."""
    gates = torch.rand(4, 1, device="meta", requires_grad=True)
    tokens = torch.rand(2, 3, 4, 7, device="meta")
    reset = torch.zeros(2, 7, dtype=torch.bool, device="meta")
    calls = module.describe(gates, tokens, reset=reset, reverse=True)
    assert [*calls] == ["forward", "backward"]
    for call in calls.values():
        assert operators()["linear_scan"].family_of(call) == "gated_scan"
        assert call.copied == ()
        (problem, _), *_ = call.alternatives("auto")
        assert isinstance(problem, GatedScanProblem)
        assert (problem.batch, problem.channels, problem.time) == (2, 12, 7)
        assert (problem.kind, problem.resets, problem.reverse) == ("linear", True, True)
    wide = module.describe(gates.double(), tokens.double(), reset=reset)
    assert operators()["linear_scan"].family_of(wide["forward"]) == "linear_scan"
