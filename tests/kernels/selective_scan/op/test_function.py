"""The operator ``selective_scan`` on the CPU: what it accepts, and its derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import scan_registry
from scan_registry.kernels.selective_scan import reference


def arguments(dtype: torch.dtype = torch.float64, **changes: Any) -> dict[str, Any]:
    """Of every kind, two groups among them."""
    torch.manual_seed(0)

    def new(*size: int) -> Tensor:
        return torch.randn(size, dtype=dtype)

    given = {
        "u": new(2, 4, 5),
        "delta": new(2, 4, 5),
        "A": -torch.rand(4, 3, dtype=dtype),
        "B": new(2, 2, 3, 5),
        "C": new(2, 3, 5),
        "D": new(4),
        "z": new(2, 4, 5),
        "delta_bias": new(4),
        "initial_state": new(2, 4, 3),
    }
    return {**given, **changes}


def call(**given: Any) -> Any:
    options = {"delta_softplus": True, "return_final_state": True}
    return scan_registry.selective_scan(**(options | given))


def test_it_is_the_reference() -> None:
    given = arguments()
    out, last = call(**given)
    expected, final = reference.forward(**given, delta_softplus=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(last, final)
    assert isinstance(scan_registry.selective_scan(*list(given.values())[:5]), Tensor)


def test_narrow_arguments_mix() -> None:
    given = {name: t.float() for name, t in arguments().items()}
    expected, _ = call(**given)
    out, last = call(**{**given, "u": given["u"].bfloat16()})
    assert (out.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.1)


def test_gradients_of_everything_twice() -> None:
    given = {name: t.requires_grad_() for name, t in arguments().items()}

    def function(*tensors: Tensor) -> Any:
        return call(**dict(zip(given, tensors, strict=True)))

    assert torch.autograd.gradcheck(function, tuple(given.values()))
    assert torch.autograd.gradgradcheck(function, tuple(given.values()))


def test_gradients_where_sequences_are_packed() -> None:
    given = arguments(initial_state=torch.randn(2, 3, 4, 3, dtype=torch.float64))
    given = {name: t.requires_grad_() for name, t in given.items()}
    bounds = torch.tensor([0, 2, 2, 5], dtype=torch.int32)

    def function(*tensors: Tensor) -> Any:
        return call(**dict(zip(given, tensors, strict=True)), cu_seqlens=bounds)

    assert torch.autograd.gradcheck(function, tuple(given.values()))


@pytest.mark.parametrize("size", ["batch", "time"])
def test_nothing(size: str) -> None:
    given = arguments(torch.float32)
    place = {"batch": 0, "time": -1}[size]
    for name in ("u", "delta", "z", "B", "C", *(["initial_state"] if size == "batch" else [])):
        given[name] = given[name].narrow(place, 0, 0).requires_grad_()
    out, last = call(**given)
    assert out.shape == given["u"].shape
    if size == "time":
        torch.testing.assert_close(last, given["initial_state"])
    (out.sum() + last.sum()).backward()
    assert given["u"].grad.shape == out.shape


def test_the_operator_is_as_torch_wants_it() -> None:
    given = {name: t.requires_grad_() for name, t in arguments().items()}
    given["B"] = given["B"].detach().requires_grad_()
    inputs = (*given.values(), None, True, "auto", True)
    inputs = (*inputs[:4], given["C"].detach().unsqueeze(1), *inputs[5:])
    torch.library.opcheck(
        torch.ops.scan_registry.selective_scan.default,
        inputs,
        test_utils=("test_schema", "test_faketensor"),
    )


def test_func_and_forward_mode() -> None:
    given = arguments()
    rest = {name: t for name, t in given.items() if name != "u"}

    def of_u(u: Tensor) -> Tensor:
        out = scan_registry.selective_scan(u, **rest)
        assert isinstance(out, Tensor)
        return out.sum()

    found = torch.func.grad(of_u)(given["u"])
    u = given["u"].clone().requires_grad_()
    of_u(u).backward()
    torch.testing.assert_close(found, u.grad)
    _, tangent = torch.func.jvp(of_u, (given["u"],), (torch.ones_like(given["u"]),))
    torch.testing.assert_close(tangent, found.sum())


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"u": [1.0]}, TypeError, "u must be a torch.Tensor, not list"),
        ({"u": torch.zeros(2, 4)}, ValueError, r"u has shape \(2, 4\)"),
        ({"u": torch.zeros(2, 4, 5, dtype=torch.int32)}, TypeError, "u has dtype torch.int32"),
        ({"A": torch.zeros(5, 3)}, ValueError, r"A has shape \(5, 3\).*\(4, states\)"),
        ({"A": torch.zeros(4, 257)}, ValueError, "A has 257 states; accepted are 1 to 256"),
        ({"A": torch.zeros(4, 0)}, ValueError, "A has 0 states"),
        ({"B": torch.zeros(2, 3, 3, 5)}, ValueError, r"B has shape \(2, 3, 3, 5\).*divide 4"),
        ({"C": torch.zeros(2, 3, 6)}, ValueError, r"C has shape \(2, 3, 6\)"),
        ({"z": torch.zeros(2, 4, 6)}, ValueError, r"z has shape \(2, 4, 6\)"),
        ({"D": torch.zeros(3)}, ValueError, r"D has shape \(3,\)"),
        ({"D": torch.zeros(4, dtype=torch.float64)}, TypeError, "D has dtype torch.float64"),
        ({"initial_state": torch.zeros(2, 4, 2)}, ValueError, r"initial_state .* be \(2, 4, 3\)"),
        (
            {"delta": torch.zeros(2, 5, 4)},
            ValueError,
            r"delta has shape \(2, 5, 4\).* be \(2, 4, 5\)",
        ),
        ({"delta_bias": torch.zeros(4, 1)}, ValueError, r"delta_bias has shape \(4, 1\).* \(4,\)"),
        ({"A": torch.zeros(4)}, ValueError, r"A has shape \(4,\).*\(4, states\)"),
        ({"A": -torch.rand(4, 3) * 1j}, ValueError, r"B has shape .*\(2, 3, 10\)"),
        ({"A": torch.zeros(4, 3, dtype=torch.complex128)}, TypeError, "complex128 do not mix"),
        ({"A": torch.zeros(4, 3, dtype=torch.int64)}, TypeError, "A has .* float64 and complex64"),
        ({"B": torch.zeros(4, 3) * 1j}, TypeError, "B has dtype torch.complex64"),
        ({"initial_state": torch.zeros(2, 4, 3) * 1j}, TypeError, "initial_state has dtype"),
        ({"u": torch.zeros(2, 4, 5).to_sparse()}, TypeError, r"u is sparse.*pass u.to_dense\(\)"),
        ({"z": 1.0}, TypeError, "z must be a torch.Tensor, not float"),
        ({"cu_seqlens": torch.tensor([[0, 5]])}, ValueError, r"cu_seqlens has shape \(1, 2\)"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, TypeError, "cu_seqlens has dtype torch.float32"),
        ({"backend": "triton"}, ValueError, "needs a CUDA device; u is on cpu"),
        ({"z": torch.zeros(2, 4, 5, device="meta")}, ValueError, "z is on meta, u on cpu"),
        ({"return_final_state": "no"}, TypeError, "return_final_state is 'no'; it must be a bool"),
        ({"delta_softplus": 1}, TypeError, "delta_softplus is 1; it must be a bool"),
        ({"backend": "fast"}, ValueError, "backend is 'fast'"),
        ({"backend": "cuda"}, ValueError, "needs a CUDA device; u is on cpu"),
        ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, "cu_seqlens"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        call(**arguments(torch.float32, **changes))
