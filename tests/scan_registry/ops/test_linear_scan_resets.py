"""``linear_scan(reset=…)``: of any rank, layout and dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from scan_registry import explain, linear_scan
from scan_registry.ops import linear_scan as module

Oracle = Callable[..., tuple[Tensor, Tensor]]
REAL = torch.float64


def along(reset: Tensor, rank: int, dim: int) -> Tensor:
    """Of a shape that broadcasts to the tensors'."""
    dim %= rank
    if rank == 1:
        return reset
    batch = 1 if dim == 0 else 0
    shape = [1] * rank
    shape[batch], shape[dim] = reset.shape
    return (reset.T if dim == 0 else reset).reshape(shape)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((7,), 0), ((2, 7), -1), ((7, 2), 0), ((2, 3, 7), -1), ((2, 7, 3), 1), ((7, 2, 3), 0), ((2, 3, 7, 4), -2), ((2, 3, 4, 7), 3), ((7, 2, 3, 4), -4)],
    ids=str,
)  # fmt: skip
def test_ranks(plainly: Oracle, shape: tuple[int, ...], dim: int, reverse: bool) -> None:
    """Against a loop of gates that are zero where states start anew."""
    gates, tokens = (
        torch.rand(shape, dtype=REAL, requires_grad=True),
        torch.randn(shape, dtype=REAL, requires_grad=True),
    )
    initial = torch.randn([n for d, n in enumerate(shape) if d != dim % len(shape)], dtype=REAL)
    initial.requires_grad_()
    batch = shape[1 if dim % len(shape) == 0 else 0] if len(shape) > 1 else None
    reset = torch.rand(*(() if batch is None else (batch,)), 7) < 0.4
    found = linear_scan(
        gates, tokens, initial, reset=reset, dim=dim, reverse=reverse, return_final_state=True
    )
    cut = torch.where(along(reset, len(shape), dim), 0, gates)
    expected = plainly(cut, tokens, initial, dim=dim, reverse=reverse)
    torch.testing.assert_close(found, expected)
    leaves = gates, tokens, initial
    weights = [torch.randn_like(x) for x in found]
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, weights), torch.autograd.grad(expected, leaves, weights)
    )


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dim", [-1, 1])
def test_packed_sequences(plainly: Oracle, dim: int, reverse: bool) -> None:
    shape = (2, 3, 8) if dim == -1 else (2, 8, 3)
    of_state = (2, 3, 4) if dim == -1 else (2, 4, 3)
    gates, tokens = torch.rand(shape, dtype=REAL), torch.randn(shape, dtype=REAL)
    initial = torch.randn(of_state, dtype=REAL)
    bounds = torch.tensor([0, 0, 3, 8, 8])
    reset = torch.rand(2, 8) < 0.3
    cut = torch.where(along(reset, 3, dim), 0, gates)
    options: Any = {"cu_seqlens": bounds, "dim": dim, "reverse": reverse}
    found = linear_scan(gates, tokens, initial, reset=reset, return_final_state=True, **options)
    torch.testing.assert_close(found, plainly(cut, tokens, initial, **options))


@pytest.mark.parametrize("gates_shape", [(2, 3, 7), (3, 1), (7,), ()], ids=str)
@pytest.mark.parametrize(
    ("gates_dtype", "dtype"),
    [
        (torch.complex64, torch.complex64),
        (torch.complex128, torch.float64),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float32),
    ],
    ids=str,
)
def test_gates_of_other_shapes_and_dtypes(
    plainly: Oracle, gates_dtype: torch.dtype, dtype: torch.dtype, gates_shape: tuple[int, ...]
) -> None:
    wide = torch.complex128 if gates_dtype.is_complex else REAL
    gates = (0.7 * torch.rand(gates_shape, dtype=wide)).to(gates_dtype).requires_grad_()
    tokens = torch.randn(2, 3, 7, dtype=dtype, requires_grad=True)
    reset = torch.rand(2, 7) < 0.4
    found = linear_scan(gates, tokens, reset=reset)
    cut = torch.where(reset.unsqueeze(1), 0, gates.to(wide).expand(2, 3, 7))
    expected, _ = plainly(cut, tokens)
    assert found.dtype == linear_scan(gates, tokens).dtype
    rtol = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.to(expected.dtype), expected, rtol=rtol, atol=rtol / 10)
    weight = torch.randn_like(found)
    ours = torch.autograd.grad(found, (gates, tokens), weight)
    theirs = torch.autograd.grad(expected, (gates, tokens), weight.to(expected.dtype))
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=3 * rtol, atol=3 * rtol)


def test_no_resets_are_a_scan_without() -> None:
    gates, tokens = torch.rand(2, 3, 7), torch.randn(2, 3, 7)
    none = torch.zeros(2, 7, dtype=torch.bool)
    for options in ({}, {"dim": 0}, {"reverse": True}):
        shape = (3, 2) if "dim" in options else (2, 7)
        found = linear_scan(gates, tokens, reset=none.new_zeros(shape), **options)  # type: ignore[call-overload]
        torch.testing.assert_close(found, linear_scan(gates, tokens, **options))  # type: ignore[call-overload]


@pytest.mark.parametrize("shape", [(0, 3, 7), (2, 0, 7), (2, 3, 0), (0,), (3, 0)], ids=str)
def test_nothing_to_scan(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, requires_grad=True)
    reset = torch.zeros(shape if len(shape) < 3 else (shape[0], shape[2]), dtype=torch.bool)
    found, last = linear_scan(x, x, reset=reset, return_final_state=True)
    assert found.shape == shape
    assert not last.any()
    (found.sum() + last.sum()).backward()
    assert x.grad is not None


def test_under_transforms_and_in_one_graph() -> None:
    torch._dynamo.reset()
    gates, tokens = torch.rand(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    reset = torch.rand(2, 7) < 0.4

    def of(gates: Tensor, tokens: Tensor) -> Tensor:
        return linear_scan(gates, tokens, reset=reset, dim=2)

    compiled = torch.compile(of, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(gates, tokens), of(gates, tokens))
    mapped = torch.func.vmap(of, in_dims=(None, 0))(gates, torch.stack([tokens, -tokens]))
    torch.testing.assert_close(mapped[1], of(gates, -tokens))


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
