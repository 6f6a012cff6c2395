"""``scan_registry.jax.ssd_scan`` on the CPU, composed of JAX's operators: values and derivatives against torch in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from jaxing import as_torch, check, drawn, errors, jax

import scan_registry
from scan_registry.jax import ssd_scan

jnp = jax.numpy


@pytest.fixture(autouse=True, scope="module")
def _optimised() -> Iterator[None]:
    """Products of matrices take longer to run than to compile."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def operands_of(time: int, groups: int, wide_D: bool, dtype: str) -> list[Any]:
    """x, dt, A, B, C, D, z, dt_bias and the initial state, of 2 batches, 4 heads of 3 numbers and 5 states."""
    projection = (2, time, groups, 5)
    shapes = (2, time, 4, 3), (2, time, 4), (4,), projection, projection
    others = (4, 3) if wide_D else (4,), (2, time, 4, 3), (4,), (2, 4, 3, 5)
    every = [drawn(*s, seed=i, scale=0.7, dtype=dtype) for i, s in enumerate((*shapes, *others))]
    every[2] = -jnp.exp(every[2])
    return every


def both(softplus: bool) -> tuple[Any, Any]:
    """The functions of JAX and of torch."""

    def of(function: Any) -> Any:
        def call(*operands: Any) -> Any:
            *others, initial = operands
            limits = (0.01, 1.5)
            return function(*others, softplus, limits, initial, return_final_state=True)

        return call

    return of(ssd_scan), of(scan_registry.ssd_scan)


@pytest.mark.parametrize(
    ("time", "groups", "wide_D", "softplus"), [(70, 2, False, True), (64, 1, True, False)]
)
def test_values_and_gradients(time: int, groups: int, wide_D: bool, softplus: bool) -> None:
    """Of sequences that end within a chunk and with one."""
    check(*both(softplus), operands_of(time, groups, wide_D, "float64"), 1e-9)


def test_narrow_dtypes() -> None:
    ours, of_torch = both(True)
    operands = operands_of(70, 1, False, "float32")
    narrow = [x.astype("bfloat16") if x.ndim > 2 else x for x in operands]
    out, final = ours(*narrow)
    assert (out.dtype, final.dtype) == ("bfloat16", "float32")
    wide = [as_torch(x.astype("float64")) for x in narrow]
    assert max(errors((out, final), of_torch(*wide))) < 2e-2


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": jnp.ones((2, 9, 4))}, ValueError, "x has shape"),
        ({"B": jnp.ones((2, 9, 3, 5))}, ValueError, "groups must divide heads"),
        ({"dt": jnp.ones((2, 9, 3))}, ValueError, "dt has shape"),
        ({"dt_limit": (1, 0)}, ValueError, "dt_limit"),
        ({"z": jnp.ones((2, 9, 4, 3), "int32")}, TypeError, "z has dtype int32"),
    ],
)
def test_what_is_refused(change: dict[str, Any], error: type[Exception], words: str) -> None:
    projection = jnp.ones((2, 9, 2, 5))
    arguments = {"x": jnp.ones((2, 9, 4, 3)), "dt": jnp.ones((2, 9, 4)), "A": -jnp.ones(4)}
    with pytest.raises(error, match=words):
        ssd_scan(**{**arguments, "B": projection, "C": projection, **change})
