"""``scan_registry.jax.gated_scan`` on the CPU: values and derivatives against torch in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from jaxing import as_torch, check, drawn, errors, jax

import scan_registry
import scan_registry.jax
from scan_registry.kernels.gated_scan.jax_gates import GATES
from scan_registry.kernels.gated_scan.kinds import KINDS

jnp = jax.numpy
SHAPE = (2, 9, 5)  # batch, time, channels
BOUNDS = (0, 4, 4, 9)


def operands_of(kind: str, dim: int, dtype: str, packed: bool) -> list[Any]:
    """Inputs, parameters and the initial state."""
    of = KINDS[kind]
    shape = SHAPE if dim == 1 else (2, 5, 9)
    inputs = [drawn(*shape, seed=i, dtype=dtype) for i in range(len(of.inputs))]
    parameters = [jax.nn.sigmoid(drawn(5, seed=8)).astype("float32") for _ in of.parameters]
    sequences = (3,) if packed else ()
    of_state = (2, *sequences, 5) if dim == 1 else (2, 5, *sequences)
    return [*inputs, *parameters, drawn(*of_state, seed=9, dtype="float32")]


def both(kind: str, dim: int, reverse: bool, packed: bool, resets: bool) -> tuple[Any, Any]:
    """The functions of JAX and of torch."""
    reset = drawn(2, 9, seed=3) > 0.8
    how: dict[str, Any] = {"dim": dim, "reverse": reverse, "return_final_state": True}

    def ours(*operands: Any) -> Any:
        *inputs, initial = operands
        options = {"initial_state": initial, "reset": reset if resets else None, **how}
        bounds = jnp.array(BOUNDS, "int32") if packed else None
        return scan_registry.jax.gated_scan(kind, *inputs, cu_seqlens=bounds, **options)

    def of_torch(*operands: Any) -> Any:
        *inputs, initial = operands
        options = {"initial_state": initial, **how}
        options["reset"] = torch.from_numpy(np.array(reset)) if resets else None
        bounds = torch.tensor(BOUNDS) if packed else None
        return scan_registry.gated_scan(kind, *inputs, cu_seqlens=bounds, **options)

    return ours, of_torch


@pytest.mark.parametrize(
    ("kind", "dim", "reverse", "packed", "resets"),
    [
        ("linear", -1, False, False, True),
        ("linear", 1, True, True, False),
        ("min_gru", -1, False, False, False),
        ("min_gru_identity", 1, True, True, True),
        ("min_lstm", 1, False, True, False),
        ("min_lstm_identity", -1, True, False, True),
        ("rg_lru", 1, False, False, True),
        ("hgrn", -1, True, True, False),
    ],
)
def test_values_and_gradients(
    kind: str, dim: int, reverse: bool, packed: bool, resets: bool
) -> None:
    """By the C code."""
    ours, of_torch = both(kind, dim, reverse, packed, resets)
    check(ours, of_torch, operands_of(kind, dim, "float32", packed), 3e-5)


def test_composed_of_operators() -> None:
    """In float64, which has no kernels."""
    ours, of_torch = both("rg_lru", 1, True, True, True)
    operands = [x.astype("float64") for x in operands_of("rg_lru", 1, "float64", True)]
    check(ours, of_torch, operands, 1e-10)


def test_gates_are_those_of_torch() -> None:
    """Of every kind, and their derivatives; also where sigmoids and square roots are at their ends."""
    assert GATES.keys() == KINDS.keys()
    cases = {}
    for name, kind in KINDS.items():
        inputs = [10 * drawn(4, 5, seed=i) for i, _ in enumerate((*kind.inputs, *kind.parameters))]
        for i in range(len(kind.inputs), len(inputs)):
            inputs[i] = jax.nn.sigmoid(inputs[i])
        cases[name] = inputs, drawn(4, 5, seed=7) > 0.5

    @jax.jit
    def ours(cases: Any) -> Any:
        results = {}
        for name, (inputs, reset) in cases.items():
            pairs, pull = jax.vjp(lambda *x, n=name, r=reset: GATES[n](r, *x), *inputs)
            results[name] = [*pairs, *pull((jnp.ones((4, 5)), jnp.ones((4, 5))))]
        return results

    for name, results in ours(cases).items():
        inputs, reset = cases[name]
        tensors = [as_torch(x, gradient=True) for x in inputs]
        gates, tokens = KINDS[name].gates(*tensors, reset=torch.from_numpy(np.array(reset)))
        (gates.sum() + tokens.sum()).backward()
        of_torch = gates.detach(), tokens.detach(), *(t.grad for t in tensors)
        assert max(errors(results, of_torch)) < 1e-12, name


def test_a_kind_without_a_function_in_jax_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(GATES, "hgrn")
    operands = operands_of("hgrn", 1, "float32", False)
    with pytest.raises(ValueError, match=r"'hgrn'.*rg_lru\. Add one to GATES .*jax_gates\.py"):
        scan_registry.jax.gated_scan("hgrn", *operands[:-1], dim=1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes(dtype: str) -> None:
    ours, of_torch = both("rg_lru", 1, False, False, True)
    operands = operands_of("rg_lru", 1, dtype, False)
    states, final = ours(*operands)
    assert (states.dtype, final.dtype) == (dtype, "float32")
    wide = [as_torch(operand.astype("float64")) for operand in operands]
    assert max(errors((states, final), of_torch(*wide))) < 2e-2


def test_a_dimension_of_vmap() -> None:
    """It becomes part of the batch where all share the parameters; else each call is made for itself."""
    x, gate, other = (drawn(3, *SHAPE, seed=i, dtype="float32") for i in range(3))
    bounds = drawn(3, 5, dtype="float32")

    def gradient(x: Any, parameter: Any) -> Any:
        def loss(x: Any, parameter: Any) -> Any:
            return (scan_registry.jax.rg_lru(x, gate[0], other[0], parameter, dim=1) ** 2).sum()

        return jax.grad(loss, (0, 1))(x, parameter)

    for axes in ((0, None), (0, 0)):
        of = bounds if axes[1] == 0 else bounds[0]
        together = jax.jit(jax.vmap(gradient, axes))(x, of)
        one = jax.jit(gradient)
        apart = [one(x[i], bounds[i] if axes[1] == 0 else of) for i in range(3)]
        assert max(errors(together, jax.tree.map(lambda *each: jnp.stack(each), *apart))) < 1e-5


def test_a_reset_stops_what_is_infinite() -> None:
    tokens = jnp.ones((1, 1, 4)).at[0, 0, 1].set(jnp.inf)
    reset = jnp.array([[False, False, True, False]])
    for dtype in ("float32", "float64"):
        scan = scan_registry.jax.gated_scan
        states = scan("linear", jnp.ones((1, 1, 4), dtype), tokens.astype(dtype), reset=reset)
        assert states.tolist() == [[[1, float("inf"), 1, 2]]]


@pytest.mark.parametrize(
    ("kind", "change", "error", "words"),
    [
        ("lstm", {}, ValueError, "kind is 'lstm'"),
        ("min_gru", {"inputs": 3}, TypeError, "takes 2 arrays"),
        ("min_gru", {"dim": 0}, ValueError, "dim is 0"),
        ("min_gru", {"reset": jnp.ones((2, 9))}, TypeError, "reset has dtype float64"),
        ("min_gru", {"reset": jnp.ones((9, 2), bool)}, ValueError, "reset has shape"),
        ("rg_lru", {"inputs": 4}, ValueError, "a_param has shape"),
    ],
)
def test_what_is_refused(
    kind: str, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    inputs = [jnp.ones(SHAPE)] * change.pop("inputs", 2)
    with pytest.raises(error, match=words):
        scan_registry.jax.gated_scan(kind, *inputs, **{"dim": 1, **change})


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("kind", ["linear", "hgrn"])
def test_derivatives_of_gates_that_are_zero(kind: str, backend: Any, dtype: str) -> None:
    """By the C code and composed of JAX's operators: the state before the step is the derivative. HGRN's gate underflows."""
    values, tokens = jax.nn.sigmoid(drawn(1, 2, 6)), drawn(1, 2, 6, seed=1)
    values = values.at[:, :, jnp.array([2, 4])].set(0 if kind == "linear" else -1e4)
    bounds = [jnp.zeros(2)] if kind == "hgrn" else []
    inputs = [values, tokens] if kind == "linear" else [tokens, values]
    arrays = [x.astype(dtype) for x in (*inputs, *bounds)]
    numbers = range(len(arrays))

    def ours(*arrays: Any) -> Any:
        reset = jnp.zeros((1, 6), bool)
        scan = scan_registry.jax.gated_scan(kind, *arrays, reset=reset, backend=backend)
        return jnp.sin(scan).sum()

    def one_by_one(*arrays: Any) -> Any:
        along = [a if a.ndim == 3 else a[:, None] for a in arrays]
        gates, added = GATES[kind](None, *along)
        state, total = jnp.zeros((1, 2), dtype), jnp.zeros((), dtype)
        for t in range(6):
            state = gates[..., t] * state + added[..., t]
            total += jnp.sin(state).sum()
        return total

    results, expected = (jax.jit(jax.grad(f, tuple(numbers)))(*arrays) for f in (ours, one_by_one))
    assert float(abs(expected[0 if kind == "linear" else 2]).max()) > 0.1
    assert max(errors(results, expected)) < (1e-5 if dtype == "float32" else 1e-12)


def test_a_gate_of_zero_stops_what_is_infinite() -> None:
    """Its derivative is finite, too."""
    gates, tokens = jnp.array([1.0, 1.0, 0.0, 0.5]), jnp.array([1.0, jnp.inf, 3.0, 1.0])

    def scan(gates: Any) -> Any:
        args = gates[None, None], tokens[None, None]
        return scan_registry.jax.gated_scan(
            "linear", *args, reset=jnp.zeros((1, 4), bool), backend="reference"
        )

    states, gradient = jax.value_and_grad(lambda g: scan(g)[0, 0, 2:].sum())(gates)
    assert float(states) == 5.5
    assert gradient.tolist() == [0.0, 0.0, 0.0, 3.0]
