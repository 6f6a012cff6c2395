"""``scan_registry.jax.causal_conv1d`` on the CPU: values and derivatives against torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jaxing import as_torch, check, drawn, errors, jax

import scan_registry
from scan_registry.jax import causal_conv1d

jnp = jax.numpy
BOUNDS = (0, 2, 2, 12)  # shorter than the filter, without steps, and longer


def operands_of(dim: int, width: int, dtype: str, packed: bool) -> list[Any]:
    """x, weight, bias and the initial state."""
    batch = 1 if packed else 2
    shape = (batch, 5, 12) if dim == -1 else (batch, 12, 5)
    shapes = shape, (5, width), (5,), (3 if packed else batch, 5, width - 1)
    return [drawn(*s, seed=i, dtype=dtype) for i, s in enumerate(shapes)]


def both(dim: int, packed: bool, activation: str | None) -> tuple[Any, Any]:
    """The functions of JAX and of torch."""
    how: dict[str, Any] = {"activation": activation, "return_final_state": True}

    def ours(x: Any, weight: Any, bias: Any, state: Any) -> Any:
        bounds = jnp.array(BOUNDS, "int32") if packed else None
        options = {"initial_state": state, "cu_seqlens": bounds, "dim": dim, **how}
        return causal_conv1d(x, weight, bias, **options)

    def of_torch(x: Any, weight: Any, bias: Any, state: Any) -> Any:
        bounds = torch.tensor(BOUNDS) if packed else None
        options = {"initial_state": state, "cu_seqlens": bounds, **how}
        rows = x if dim == -1 else x.mT
        y, final = scan_registry.causal_conv1d(rows, weight, bias, **options)
        return y if dim == -1 else y.mT, final

    return ours, of_torch


@pytest.mark.parametrize(
    ("dim", "width", "packed", "activation", "dtype"),
    [
        (-1, 4, False, "silu", "float32"),
        (1, 3, True, None, "float32"),
        (-1, 2, True, "silu", "float32"),
        (1, 4, True, "swish", "float64"),  # composed
    ],
)
def test_values_and_gradients(
    dim: int, width: int, packed: bool, activation: str | None, dtype: str
) -> None:
    ours, of_torch = both(dim, packed, activation)
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    check(ours, of_torch, operands_of(dim, width, dtype, packed), tolerance)


def test_narrow_x_with_wide_weights() -> None:
    ours, of_torch = both(1, False, "silu")
    x, weight, bias, state = operands_of(1, 4, "float32", False)
    y, final = ours(x.astype("bfloat16"), weight, bias, state)
    assert (y.dtype, final.dtype) == ("bfloat16", "bfloat16")
    assert max(errors((y, final), of_torch(*map(as_torch, (x, weight, bias, state))))) < 3e-2


@pytest.mark.parametrize("packed", [False, True])
def test_a_dimension_of_vmap(packed: bool) -> None:
    """Packed sequences are convolved one call after the other."""
    ours, _ = both(1, packed, "silu")
    x, weight, bias, state = operands_of(1, 4, "float32", packed)
    several = jnp.stack([x, 2 * x, -x])

    def gradient(x: Any) -> Any:
        return jax.grad(lambda *o: (ours(*o, state)[0] ** 2).sum(), (0, 1))(x, weight, bias)

    together = jax.jit(jax.vmap(gradient))(several)
    apart = [jax.jit(gradient)(one) for one in several]
    assert max(errors(together, jax.tree.map(lambda *each: jnp.stack(each), *apart))) < 1e-5


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": jnp.ones((2, 5))}, ValueError, "x has shape"),
        ({"weight": jnp.ones((5, 9))}, ValueError, "2 to 8"),
        ({"weight": jnp.ones((5, 4), "float32")}, TypeError, "do not mix"),
        ({"bias": jnp.ones(4)}, ValueError, "bias has shape"),
        ({"activation": "gelu"}, ValueError, "activation is 'gelu'"),
        ({"cu_seqlens": jnp.array([0, 12])}, ValueError, "the batch must be 1"),
        ({"initial_state": jnp.ones((2, 5, 4))}, ValueError, "initial_state has shape"),
    ],
)
def test_what_is_refused(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        causal_conv1d(**{"x": jnp.ones((2, 5, 12)), "weight": jnp.ones((5, 4)), **change})
