"""``linear_scan(reset=…)``: of any rank, layout and dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gated_kernels
import pytest
import torch
from torch import Tensor

from scan_registry import explain, linear_scan
from scan_registry.kernels.gated_scan.problem import GatedScanProblem
from scan_registry.kernels.linear_scan.op import function as module
from scan_registry.ops.operator import operators

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


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("gates_shape", [(2, 3, 7), (3, 1)], ids=str)
def test_on_meta(gates_shape: tuple[int, ...], resets: bool, packed: bool) -> None:
    """Nothing reads the values of resets or bounds, nor those of their derivatives."""
    gates = torch.rand(gates_shape, device="meta", requires_grad=True)
    tokens = torch.rand(2, 3, 7, device="meta", requires_grad=True)
    states, last = linear_scan(
        gates,
        tokens,
        reset=torch.zeros(2, 7, dtype=torch.bool, device="meta") if resets else None,
        cu_seqlens=torch.tensor([0, 2, 7], device="meta") if packed else None,
        return_final_state=True,
    )
    assert states.is_meta
    assert states.shape == tokens.shape
    assert last.shape == ((2, 3, 2) if packed else (2, 3))
    first = torch.autograd.grad(states.sum() + last.sum(), (gates, tokens), create_graph=True)
    assert [g.shape for g in first] == [gates.shape, tokens.shape]
    (second,) = torch.autograd.grad(first[0].sum(), tokens)
    assert second.shape == tokens.shape
