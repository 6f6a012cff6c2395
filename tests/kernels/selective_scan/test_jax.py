"""``scan_registry.jax.selective_scan`` on the CPU: values and derivatives against torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jaxing import as_torch, check, drawn, errors, jax

import scan_registry
from scan_registry.jax import selective_scan

jnp = jax.numpy
BOUNDS = (0, 4, 4, 9)


def operands_of(dim: int, groups: tuple[int, int], dtype: str, packed: bool) -> list[Any]:
    """u, delta, A, B, C, D, z, delta_bias and the initial state, of 2 batches, 6 channels, 3 states and 9 steps."""
    sequence = (2, 6, 9) if dim == -1 else (2, 9, 6)
    projections = [
        ((2, g, 3, 9) if dim == -1 else (2, 9, g, 3))
        if g
        else ((2, 3, 9) if dim == -1 else (2, 9, 3))
        for g in groups
    ]
    of_state = (2, 3, 6, 3) if packed else (2, 6, 3)
    shapes = sequence, sequence, (6, 3), *projections, (6,), sequence, (6,), of_state
    drawn_ones = [drawn(*s, seed=i, scale=0.7, dtype=dtype) for i, s in enumerate(shapes)]
    drawn_ones[2] = -jnp.exp(drawn_ones[2])
    return drawn_ones


def both(dim: int, packed: bool) -> tuple[Any, Any]:
    """The functions of JAX and of torch."""

    def ours(*operands: Any) -> Any:
        bounds = jnp.array(BOUNDS, "int32") if packed else None
        options = {"dim": dim, "cu_seqlens": bounds, "return_final_state": True}
        return selective_scan(*operands[:-1], True, operands[-1], **options)

    def of_torch(u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any, z: Any, *others: Any) -> Any:
        bounds = torch.tensor(BOUNDS) if packed else None
        bias, state = others
        if dim != -1:
            u, delta, z = u.mT, delta.mT, z.mT
            B, C = (x.movedim(1, -1) for x in (B, C))
        out, final = scan_registry.selective_scan(
            *(u, delta, A, B, C, D, z, bias, True, state),
            cu_seqlens=bounds,
            return_final_state=True,
        )
        return out if dim == -1 else out.mT, final

    return ours, of_torch


@pytest.mark.parametrize(
    ("dim", "groups", "packed", "dtype"),
    [
        (-1, (1, 1), False, "float32"),
        (1, (2, 2), False, "float32"),
        (1, (0, 3), True, "float32"),
        (-1, (2, 0), True, "float64"),  # composed
    ],
)
def test_values_and_gradients(dim: int, groups: tuple[int, int], packed: bool, dtype: str) -> None:
    ours, of_torch = both(dim, packed)
    tolerance = 2e-5 if dtype == "float32" else 1e-10
    check(ours, of_torch, operands_of(dim, groups, dtype, packed), tolerance)


def test_what_may_be_missing() -> None:
    operands = operands_of(1, (0, 0), "float32", False)[:5]

    def ours(*operands: Any) -> Any:
        return (selective_scan(*operands, dim=1),)

    def of_torch(u: Any, delta: Any, A: Any, B: Any, C: Any) -> Any:
        return (scan_registry.selective_scan(u.mT, delta.mT, A, B.mT, C.mT).mT,)

    operands[1] = abs(operands[1])
    check(ours, of_torch, operands, 2e-5)


def test_narrow_dtypes() -> None:
    ours, of_torch = both(1, False)
    operands = operands_of(1, (1, 1), "float32", False)
    narrow = [x.astype("bfloat16") if x.ndim > 2 else x for x in operands]
    out, final = ours(*narrow)
    assert (out.dtype, final.dtype) == ("bfloat16", "float32")
    wide = [as_torch(x.astype("float64")) for x in narrow]
    assert max(errors((out, final), of_torch(*wide))) < 2e-2


def test_a_dimension_of_vmap() -> None:
    ours, _ = both(1, True)
    operands = operands_of(1, (0, 0), "float32", True)
    several = [jnp.stack([operands[0], -operands[0]]), jnp.stack([operands[4], 2 * operands[4]])]

    def gradient(u: Any, C: Any) -> Any:
        def loss(u: Any, C: Any) -> Any:
            return (ours(u, *operands[1:4], C, *operands[5:])[0] ** 2).sum()

        return jax.grad(loss, (0, 1))(u, C)

    together = jax.jit(jax.vmap(gradient))(*several)
    one = jax.jit(gradient)
    apart = [one(u, C) for u, C in zip(*several, strict=True)]
    assert max(errors(together, jax.tree.map(lambda *each: jnp.stack(each), *apart))) < 1e-5


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"u": jnp.ones((2, 9))}, ValueError, "u has shape"),
        ({"A": jnp.ones((5, 3))}, ValueError, "A has shape"),
        ({"B": jnp.ones((2, 9, 4, 3))}, ValueError, "divide 6"),
        ({"delta": jnp.ones((2, 9, 5))}, ValueError, "delta has shape"),
        ({"A": jnp.ones((6, 3), "complex64")}, TypeError, "A has dtype complex64"),
        ({"delta_softplus": 1}, TypeError, "delta_softplus must be a bool"),
    ],
)
def test_what_is_refused(change: dict[str, Any], error: type[Exception], words: str) -> None:
    sequence, projection = jnp.ones((2, 9, 6)), jnp.ones((2, 9, 3))
    arguments: dict[str, Any] = {"u": sequence, "delta": sequence, "A": jnp.ones((6, 3))}
    with pytest.raises(error, match=words):
        selective_scan(**{**arguments, "B": projection, "C": projection, "dim": 1, **change})
