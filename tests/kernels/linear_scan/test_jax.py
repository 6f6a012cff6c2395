"""``scan_registry.jax.linear_scan`` on the CPU: values and derivatives against torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jaxing import as_torch, check, drawn, errors, jax

import scan_registry
from scan_registry.jax import linear_scan
from scan_registry.kernels.linear_scan import reference

jnp = jax.numpy
SHAPE = (2, 5, 7)
GATES = {"whole": SHAPE, "channel": (5, 1), "step": (7,), "one": (1,)}
BOUNDS = {-1: (0, 3, 3, 7), 1: (0, 2, 2, 5)}


def state_shape(dim: int, packed: bool) -> tuple[int, ...]:
    dim %= len(SHAPE)
    return (*SHAPE[:dim], *((3,) if packed else ()), *SHAPE[dim + 1 :])


def arrays(gates: str, dim: int, packed: bool, dtype: str, initial: bool = True) -> list[Any]:
    of_gates = GATES[gates]
    if dim == 1 and gates in ("channel", "step"):
        of_gates = (1, 7) if gates == "channel" else (5, 1)
    shapes = [of_gates, SHAPE, *([state_shape(dim, packed)] if initial else [])]
    return [drawn(*shape, seed=i, scale=0.7, dtype=dtype) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize(
    ("gates", "dim", "reverse", "packed", "dtype", "backend"),
    [
        ("whole", -1, False, False, "float64", "auto"),
        ("whole", 1, True, True, "float64", "auto"),
        ("whole", -1, True, True, "complex128", "auto"),
        ("channel", -1, True, False, "float64", "auto"),
        ("channel", 1, False, True, "float64", "auto"),
        ("step", -1, False, True, "complex128", "auto"),
        ("step", 1, True, False, "float64", "auto"),
        ("one", 1, False, False, "float64", "auto"),
        ("whole", -1, True, False, "complex128", "reference"),
        ("step", 1, False, True, "float64", "reference"),
    ],
)
def test_values_and_gradients(
    gates: str, dim: int, reverse: bool, packed: bool, dtype: str, backend: Any
) -> None:
    bounds = BOUNDS[dim] if packed else None
    here = None if bounds is None else jnp.array(bounds, dtype="int32")

    def ours(*operands: Any) -> Any:
        return linear_scan(
            *operands,
            dim=dim,
            reverse=reverse,
            cu_seqlens=here,
            return_final_state=True,
            backend=backend,
        )

    def of_torch(*operands: torch.Tensor) -> Any:
        there = None if bounds is None else torch.tensor(bounds)
        return scan_registry.linear_scan(
            *operands, dim=dim, reverse=reverse, cu_seqlens=there, return_final_state=True
        )

    check(ours, of_torch, arrays(gates, dim, packed, dtype))


def test_one_result_without_a_state() -> None:
    def ours(gates: Any, tokens: Any) -> Any:
        return (linear_scan(gates, tokens),)

    check(
        ours,
        lambda gates, tokens: (scan_registry.linear_scan(gates, tokens),),
        arrays("whole", -1, False, "float64", initial=False),
    )


@pytest.mark.parametrize(
    ("gates_dtype", "tokens_dtype", "tolerance"),
    [
        ("float32", "float32", 1e-6),
        ("bfloat16", "bfloat16", 1e-2),
        ("float32", "bfloat16", 1e-2),
        ("float16", "float16", 1e-3),
        ("bfloat16", "float32", 1e-6),
        ("complex64", "float32", 1e-6),
    ],
)
def test_dtypes(gates_dtype: str, tokens_dtype: str, tolerance: float) -> None:
    gates = drawn(*SHAPE, scale=0.5, dtype=gates_dtype)
    tokens = drawn(*SHAPE, seed=1, dtype=tokens_dtype)
    states, final = linear_scan(gates, tokens, return_final_state=True)
    expected = reference.forward(
        as_torch(gates.astype("complex128")), as_torch(tokens.astype("complex128"))
    )
    assert max(errors((states, final), expected)) < tolerance
    narrow = tokens_dtype in ("bfloat16", "float16")
    assert states.dtype == jnp.dtype("complex64" if "complex" in gates_dtype else tokens_dtype)
    assert final.dtype == ("float32" if narrow else states.dtype)


def test_tangents_and_second_derivatives() -> None:
    """The composed scan is differentiated by JAX."""
    bounds = jnp.array([0, 2, 2, 5], dtype="int32")

    def loss(backend: Any) -> Any:
        def of(gates: Any, tokens: Any, initial: Any) -> Any:
            results = linear_scan(
                *(gates, tokens, initial),
                dim=1,
                cu_seqlens=bounds,
                return_final_state=True,
                backend=backend,
            )
            return sum((result**3).sum() for result in results)

        return of

    inputs = [operand[:1, ..., :1] for operand in arrays("whole", 1, True, "float64")]
    places = (0, 1, 2)

    def derivatives(backend: Any) -> Any:
        gradient = jax.grad(loss(backend), places)
        forward = jax.jacfwd(gradient, places)
        return jax.jit(lambda *o: (jax.jvp(loss(backend), o, o), forward(*o)))(*inputs)

    ours = derivatives("auto")
    assert max(errors(ours, derivatives("reference"))) < 1e-12
    again = jax.jit(jax.jacrev(jax.grad(loss("auto"), places), places))(*inputs)
    assert max(errors(again, ours[1])) < 1e-12


def test_a_dimension_of_vmap() -> None:
    """Gates and bounds that all share have a gradient for each call; bounds of each call are its own."""
    gates, tokens = drawn(5, 1, scale=0.7), drawn(3, 5, 7)
    bounds = jnp.array([[0, 3, 7], [0, 7, 7], [0, 1, 7]])

    def gradient(gates: Any, tokens: Any, bounds: Any) -> Any:
        return jax.grad(lambda *o: (linear_scan(*o, cu_seqlens=bounds) ** 2).sum(), (0, 1))(
            gates, tokens
        )

    for axes in ((None, 0, None), (None, 0, 0)):
        of = bounds if axes[2] == 0 else bounds[0]
        together = jax.vmap(gradient, axes)(gates, tokens, of)
        apart = [
            gradient(gates, t, bounds[i] if axes[2] == 0 else of) for i, t in enumerate(tokens)
        ]
        assert max(errors(together, jax.tree.map(lambda *each: jnp.stack(each), *apart))) < 1e-12


@pytest.mark.parametrize("checked", [True, False])
def test_batches_on_several_devices(checked: bool) -> None:
    """Gates that every device has are given the sum of all devices' gradients."""
    mesh = jax.sharding.Mesh(jax.devices(), ("b",))
    spec = jax.sharding.PartitionSpec
    cut = jax.shard_map(
        linear_scan,
        mesh=mesh,
        in_specs=(spec(), spec("b")),
        out_specs=spec("b"),
        check_vma=checked,
    )
    inputs = drawn(1, 5, 7, scale=0.7), drawn(4, 5, 7)
    ours, whole = (
        jax.jit(jax.value_and_grad(lambda *o, f=f: (f(*o) ** 2).sum(), (0, 1)))(*inputs)
        for f in (cut, linear_scan)
    )
    assert max(errors(ours, whole)) < 1e-12


@pytest.mark.parametrize("bounds", [None, [0, 0, 0]], ids=["", "packed"])
def test_no_steps(bounds: list[int] | None) -> None:
    """The final state is the initial one, and gradients go to it."""
    packed = None if bounds is None else jnp.array(bounds, "int32")
    gates, tokens = jnp.ones((2, 0)), jnp.ones((2, 0))
    initial = jnp.full((2,) if bounds is None else (2, 2), 3.0)

    def final(gates: Any, tokens: Any, initial: Any) -> Any:
        options = {"cu_seqlens": packed, "return_final_state": True}
        return linear_scan(gates, tokens, initial, **options)[1].sum()

    value, grads = jax.value_and_grad(final, (0, 1, 2))(gates, tokens, initial)
    assert float(value) == float(initial.sum())
    assert [grad.shape for grad in grads] == [(2, 0), (2, 0), initial.shape]
    assert (grads[2] == 1).all()


def test_nothing_to_scan() -> None:
    """No steps leave the initial state; its gradient passes."""
    initial = drawn(2, 5)
    states, final = linear_scan(
        jnp.zeros((2, 5, 0)), jnp.zeros((2, 5, 0)), initial, return_final_state=True
    )
    assert states.shape == (2, 5, 0)
    assert bool((final == initial).all())


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"gates": [1.0]}, TypeError, "gates must be an array, not list"),
        ({"gates": jnp.ones(3)}, ValueError, "must broadcast to one shape"),
        ({"tokens": jnp.ones(SHAPE, "int32")}, TypeError, "tokens has dtype int32"),
        ({"gates": jnp.ones(SHAPE, "float32")}, TypeError, "does not mix"),
        ({"dim": 3}, ValueError, "dim is 3"),
        ({"dim": 1.0}, TypeError, "dim must be an int"),
        ({"reverse": 1}, TypeError, "reverse must be a bool"),
        ({"backend": "gpu"}, ValueError, "backend is 'gpu'"),
        ({"initial_state": jnp.ones(3)}, ValueError, "initial_state has shape"),
        ({"cu_seqlens": jnp.ones(3)}, TypeError, "cu_seqlens has dtype float64"),
        ({"cu_seqlens": jnp.array([7])}, ValueError, "at least 2 elements"),
    ],
)
def test_what_is_refused(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        linear_scan(**{"gates": jnp.ones(SHAPE), "tokens": jnp.ones(SHAPE), **change})


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_packed_sequence_knows_nothing_infinite_of_another(backend: Any, reverse: bool) -> None:
    tokens = jnp.array([1.0, 1.0, jnp.inf, jnp.inf, 1.0, 1.0])
    bounds = jnp.array([0, 2, 4, 6])

    def scan(tokens: Any) -> Any:
        gates = jnp.full(6, 0.5)
        return linear_scan(gates, tokens, cu_seqlens=bounds, reverse=reverse, backend=backend)

    states, pull = jax.vjp(scan, tokens)
    own = [1.5, 1.0] if reverse else [1.0, 1.5]
    assert states.tolist() == [*own, jnp.inf, jnp.inf, *own]
    (gradient,) = pull(tokens)
    other = [1.0, 1.5] if reverse else [1.5, 1.0]
    assert gradient.tolist() == [*other, jnp.inf, jnp.inf, *other]
