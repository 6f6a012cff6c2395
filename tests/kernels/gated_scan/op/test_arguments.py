"""What ``gated_scan`` and its kinds refuse, and what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from scan_registry import gated_scan, hgrn, linear_scan, min_gru, min_lstm, rg_lru

X = torch.ones(2, 3, 5)
A = torch.ones(3)
RESET = torch.zeros(2, 5, dtype=torch.bool)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gru", "kind is 'gru'; accepted are linear, min_gru, min_gru_identity, min_lstm, "),
        ("", "kind is ''; accepted are .*hgrn"),
    ],
)
def test_unknown_kinds(kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gated_scan(kind, X, X)
    with pytest.raises(TypeError, match=r"kind must be one of linear, .*, not NoneType"):
        gated_scan(None, X, X)  # type: ignore[call-overload]
    # Who forgets the kind does not get a tensor's numbers for an answer.
    with pytest.raises(TypeError, match=r"kind must be one of .* rg_lru, hgrn, not Tensor$"):
        gated_scan(X, X)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("kind", "count", "message"),
    [
        ("min_gru", 1, "min_gru takes 2 tensors, gate, hidden; 1 were given"),
        ("min_lstm", 2, "min_lstm takes 3 tensors, forget, input, hidden; 2 were given"),
        ("rg_lru", 3, "rg_lru takes 4 tensors, x, recurrence_gate, input_gate, a_param; 3"),
        ("hgrn", 0, "hgrn takes 3 tensors, x, forget, lower_bound; 0 were given"),
        ("linear", 3, "linear takes 2 tensors, gates, tokens; 3 were given"),
    ],
)
def test_numbers_of_inputs(kind: str, count: int, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        gated_scan(kind, *[X] * count)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((X, 0.5), TypeError, "hidden must be a torch.Tensor, not float"),
        ((X.tolist(), X), TypeError, "gate must be a torch.Tensor, not list"),
        ((X, X.to_sparse()), TypeError, r"hidden is sparse; .* hidden.to_dense\(\)"),
        ((X.int(), X.int()), TypeError, "gate has dtype torch.int32; accepted are float32, bfl"),
        ((X.cfloat(), X.cfloat()), TypeError, "gate has dtype torch.complex64; accepted are "),
        ((X, X.bfloat16()), TypeError, "hidden has dtype torch.bfloat16, gate torch.float32; all"),
        ((X.double(), X), TypeError, "hidden has dtype torch.float32, gate torch.float64; all"),
        ((X, X[:1]), ValueError, r"hidden has shape \(1, 3, 5\), gate \(2, 3, 5\); all sequences"),
        ((X[0], X[0]), ValueError, r"gate has shape \(3, 5\); it must be \(batch, channels, time"),
        ((X, X.to("meta")), ValueError, "hidden is on meta, gate on cpu; they must be on one"),
    ],
)
def test_sequences(given: Any, error: type[Exception], message: str) -> None:
    for function in (min_gru, lambda *tensors: gated_scan("min_gru", *tensors)):
        with pytest.raises(error, match=message):
            function(*given)


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"dim": 0}, ValueError, "dim is 0; accepted are -1 or 2, and 1 or -2"),
        ({"dim": 3}, ValueError, "dim is 3; accepted are"),
        ({"dim": 1.0}, TypeError, "dim is 1.0; it must be an int"),
        ({"reverse": 1}, TypeError, "reverse is 1; it must be a bool"),
        ({"return_final_state": "yes"}, TypeError, "return_final_state is 'yes'; it must be a"),
        ({"backend": "cudnn"}, ValueError, "backend is 'cudnn'; accepted are auto, cuda, triton,"),
        (
            {"backend": "cuda"},
            ValueError,
            "backend is 'cuda', which needs a CUDA device; gate is on",
        ),
        (
            {"activation": "relu"},
            ValueError,
            "activation is 'relu'; accepted are positive, identity",
        ),
        ({"reset": True}, TypeError, "reset must be a torch.Tensor, not bool"),
        ({"reset": RESET.float()}, TypeError, "reset has dtype torch.float32; accepted is bool"),
        ({"reset": RESET.byte()}, TypeError, "reset has dtype torch.uint8; accepted is bool"),
        (
            {"reset": RESET[0]},
            ValueError,
            r"reset has shape \(5,\); it must be \(2, 5\), batch and",
        ),
        ({"reset": RESET.T}, ValueError, r"reset has shape \(5, 2\); it must be \(2, 5\)"),
        ({"reset": RESET, "dim": 1}, ValueError, r"reset has shape \(2, 5\); it must be \(2, 3\)"),
        ({"reset": RESET.to("meta")}, ValueError, "reset is on meta, gate on cpu"),
        (
            {"initial_state": torch.ones(3, 2)},
            ValueError,
            r"initial_state has shape \(3, 2\); it m",
        ),
        ({"initial_state": A.int()}, TypeError, "initial_state has dtype torch.int32, which does"),
        ({"initial_state": A.cfloat()}, TypeError, "initial_state has dtype torch.complex64"),
        ({"cu_seqlens": [0, 5]}, TypeError, "cu_seqlens must be a torch.Tensor, not list"),
        ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, "cu_seqlens runs from 0 to 4"),
        ({"cu_seqlens": torch.tensor([0.0, 5])}, TypeError, "cu_seqlens has dtype torch.float32"),
        ({"cu_seqlens": torch.tensor([0])}, ValueError, r"cu_seqlens has shape \(1,\)"),
    ],
    ids=str,
)
def test_options(option: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        min_gru(X, X, **option)
    with pytest.raises(error, match=message.replace("gate", "forget")):
        min_lstm(X, X, X, **option)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (2.0, TypeError, "a_param must be a torch.Tensor, not float"),
        (A.int(), TypeError, "a_param has dtype torch.int32; accepted are float32"),
        (
            A.double(),
            TypeError,
            "a_param has dtype torch.float64, x torch.float32; float64 does not",
        ),
        (
            torch.ones(5),
            ValueError,
            r"a_param has shape \(5,\); for x of shape \(2, 3, 5\) with dim",
        ),
        (
            torch.ones(3, 1),
            ValueError,
            r"a_param has shape \(3, 1\); .* it must be \(3,\), one val",
        ),
        (torch.ones(()), ValueError, r"a_param has shape \(\)"),
    ],
    ids=str,
)
def test_values_of_channels(values: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rg_lru(X, X, X, values)


def test_values_of_channels_go_with_the_layout() -> None:
    assert rg_lru(X, X, X, torch.ones(5), dim=1).shape == X.shape
    with pytest.raises(ValueError, match=r"it must be \(5,\)"):
        rg_lru(X, X, X, A, dim=1)


@pytest.mark.parametrize(
    ("bound", "error", "message"),
    [
        (1.5, ValueError, "lower_bound is 1.5; accepted are numbers from 0 to 1"),
        (-0.1, ValueError, "lower_bound is -0.1"),
        (float("nan"), ValueError, "lower_bound is nan"),
        ("half", TypeError, "lower_bound must be a number, a torch.Tensor or None, not str"),
        (True, TypeError, "lower_bound must be a number, .* not bool"),
        (torch.ones(5), ValueError, r"lower_bound has shape \(5,\)"),
    ],
    ids=str,
)
def test_lower_bounds(bound: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hgrn(X, X, bound)
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor, not NoneType"):
        hgrn(None, X)  # type: ignore[call-overload]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("bound", [None, 0.5])
def test_a_bound_that_is_a_number_does_not_hide_what_is_wrong_with_x(bound: float | None) -> None:
    with pytest.raises(
        ValueError, match=r"x has shape \(3, 5\); it must be \(batch, channels, time"
    ):
        hgrn(X[0], X[0], bound)
    with pytest.raises(TypeError, match=r"x is sparse; .* x.to_dense\(\)"):
        hgrn(X.to_sparse(), X, bound)
    with pytest.raises(TypeError, match="x is nested; "):
        hgrn(torch.nested.nested_tensor([X[0], X[1]]), X, bound)


def test_a_bound_of_numpys() -> None:
    numpy = pytest.importorskip("numpy")
    for number in (numpy.float32(0.5), numpy.float64(0.5), numpy.int64(1)):
        found: Any = hgrn(X, X, number)
        torch.testing.assert_close(found, hgrn(X, X, float(number)), rtol=0, atol=0)


@pytest.mark.parametrize("activation", [["positive"], None, {}])
def test_activations(activation: Any) -> None:
    with pytest.raises(ValueError, match=r"activation is .*; accepted are positive, identity"):
        min_gru(X, X, activation=activation)


def test_narrow_values_of_channels_are_widened() -> None:
    values = torch.rand(3, dtype=torch.bfloat16, requires_grad=True)
    found = rg_lru(X, X, X, values)
    torch.testing.assert_close(found, rg_lru(X, X, X, values.float()), rtol=0, atol=0)
    (grad,) = torch.autograd.grad(found.sum(), values)
    assert grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("tokens", "dim", "reset", "message"),
    [
        (X, -1, RESET.float(), "reset has dtype torch.float32; accepted is bool"),
        (X, -1, RESET.T, r"reset has shape \(5, 2\); it must be \(2, 5\), batch and time"),
        (X, 0, RESET, r"reset has shape \(2, 5\); it must be \(3, 2\)"),
        (X[0, 0], 0, RESET, r"reset has shape \(2, 5\); it must be \(5,\)"),
        (X, -1, 1, "reset must be a torch.Tensor, not int"),
    ],
)
def test_resets_of_linear_scans(tokens: Any, dim: int, reset: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        linear_scan(tokens, tokens, dim=dim, reset=reset)
