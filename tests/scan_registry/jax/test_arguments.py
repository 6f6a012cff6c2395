"""Arguments that are no good: every function of ``scan_registry.jax`` refuses them by name before it runs anything."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from jaxing import drawn, errors, jax

import scan_registry.jax as ours
from scan_registry.jax import primitives
from scan_registry.kernels.gated_scan.kinds import KINDS

jnp = jax.numpy
B, D, T, N = 2, 4, 6, 3


def numbers(*shape: int) -> Any:
    return drawn(*shape, scale=0.5, dtype="float32")


SEQUENCE = numbers(B, D, T)
BOUNDS, RESET = jnp.array([0, 2, 6]), jnp.zeros((B, T), bool)
OF_GATED = {"initial_state": numbers(B, D), "reset": RESET, "cu_seqlens": None}
#: A good call of each function: all of its arrays by their names, those that are optional too.
CALLS: dict[str, dict[str, Any]] = {
    "linear_scan": {
        "gates": SEQUENCE,
        "tokens": SEQUENCE,
        "initial_state": numbers(B, D),
        "cu_seqlens": None,
    },
    "min_gru": {"gate": SEQUENCE, "hidden": SEQUENCE, **OF_GATED},
    "min_lstm": {"forget": SEQUENCE, "input": SEQUENCE, "hidden": SEQUENCE, **OF_GATED},
    "rg_lru": {
        "x": SEQUENCE,
        "recurrence_gate": SEQUENCE,
        "input_gate": SEQUENCE,
        "a_param": numbers(D),
        **OF_GATED,
    },
    "hgrn": {"x": SEQUENCE, "forget": SEQUENCE, "lower_bound": jnp.full(D, 0.5), **OF_GATED},
    "selective_scan": {
        "u": SEQUENCE,
        "delta": SEQUENCE,
        "A": -jnp.ones((D, N), "float32"),
        "B": numbers(B, N, T),
        "C": numbers(B, N, T),
        "D": numbers(D),
        "z": SEQUENCE,
        "delta_bias": numbers(D),
        "initial_state": numbers(B, D, N),
        "cu_seqlens": None,
    },
    "ssd_scan": {
        "x": numbers(B, T, D, 2),
        "dt": numbers(B, T, D),
        "A": -jnp.ones(D, "float32"),
        "B": numbers(B, T, 2, N),
        "C": numbers(B, T, 2, N),
        "D": numbers(D),
        "z": numbers(B, T, D, 2),
        "dt_bias": numbers(D),
        "initial_state": numbers(B, D, 2, N),
    },
    "causal_conv1d": {
        "x": SEQUENCE,
        "weight": numbers(D, N),
        "bias": numbers(D),
        "initial_state": numbers(B, D, N - 1),
        "cu_seqlens": None,
    },
}
CALLS["hgrn"]["lower_bound"] = CALLS["hgrn"]["lower_bound"].astype("float32")
#: The arrays that may be None.
OPTIONAL = {
    *("initial_state", "reset", "cu_seqlens", "lower_bound", "bias"),
    *("D", "z", "delta_bias", "dt_bias"),
}
#: Values that other arguments refuse.
OTHERS: dict[str, tuple[Any, ...]] = {
    "dim": (None, 1.0, True, "time", 7, np.float32(1), [1], jnp.ones(2)),
    "reverse": (None, 1, "yes", jnp.array(True), [True]),
    "return_final_state": (None, 1, "yes", [True]),
    "delta_softplus": (None, 1, "yes", [True]),
    "dt_softplus": (None, 1, "yes", [True]),
    "backend": (None, 3, "gpu", ["auto"]),
    "axis_name": (3, "time", ["time"], b"time"),
    "activation": (3, "relu", ["silu"], jnp.ones(2)),
    "dt_limit": (None, 1.0, (0,), (1.0, 0.5), (0.0, None), "01", (0.0, float("nan")), (0, 1, 2)),
    "kind": (None, 3, "lstm", ["hgrn"]),
}


def bad_arrays(name: str, good: Any) -> Iterator[Any]:
    """What no array argument accepts; ``good`` is one that it does."""
    yield from ([1.0], "array", object(), 0.5 if name != "lower_bound" else 1.5)
    yield jax.ShapeDtypeStruct((B, D, T), "float32")
    yield np.array([None, None])
    yield torch.ones(*(SEQUENCE if good is None else good).shape)
    if name not in ("gates", "tokens"):  # which broadcast to one shape of any number of dimensions
        yield np.ones((1,) * 7, "float32" if good is None else good.dtype)
    if name != "initial_state":  # of linear_scan and gated_scan, which broadcasts
        yield jnp.ones(() if name not in ("gates", "tokens") else (2, 3, 7, 5), "float32")
    yield jnp.ones(BOUNDS.shape if good is None else good.shape, "uint8")
    if name not in OPTIONAL:
        yield None
    if good is not None and good.dtype == "float32" and name not in FIRST:
        yield good.astype("float64")  # is not narrowed


#: The arrays whose dtype is that of the results.
FIRST = ("tokens", "gate", "x", "u")


def every_bad_argument() -> Iterator[tuple[str, str, Any]]:
    for name, arrays in CALLS.items():
        for argument, good in arrays.items():
            yield from ((name, argument, bad) for bad in bad_arrays(argument, good))
        for argument in parameters(name) - arrays.keys():
            yield from ((name, argument, bad) for bad in OTHERS[argument])


def parameters(name: str) -> set[str]:
    """The names of a function's arguments, and of those that it hands on to ``gated_scan``."""
    own = inspect.signature(getattr(ours, name)).parameters
    names = {n for n, p in own.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    if any(p.kind == p.VAR_KEYWORD for p in own.values()):
        names |= parameters("gated_scan") - {"kind"}
    return names


@pytest.fixture
def runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("the operator runs")

    monkeypatch.setattr(primitives._Primitive, "__call__", refuse)


def refused(function: Callable[[], Any], argument: str) -> None:
    """By an error that names the argument, what it was and what is accepted."""
    with pytest.raises((TypeError, ValueError)) as caught:
        function()
    message = str(caught.value)
    assert argument in message.replace(";", " ").split() or f"of {argument} " in message, message
    accepts = ("accepted are", "must", "do not mix", "does not mix", "accept ")
    assert any(words in message for words in accepts), message


@pytest.mark.usefixtures("runs_nothing")
@pytest.mark.parametrize("name", CALLS)
def test_every_bad_argument_is_refused(name: str) -> None:
    function = getattr(ours, name)
    count = 0
    for _, argument, bad in filter(lambda case: case[0] == name, every_bad_argument()):
        arguments = CALLS[name] | {argument: bad}
        refused(lambda f=function, a=arguments: f(**a), argument)  # type: ignore[misc]
        count += 1
    assert count > 50


def test_every_function_has_a_call() -> None:
    assert CALLS.keys() | {"gated_scan"} == set(ours.__all__)
    for name, arrays in CALLS.items():
        assert arrays.keys() <= parameters(name)
    assert parameters("gated_scan") <= OTHERS.keys() | OF_GATED.keys()


@pytest.mark.usefixtures("runs_nothing")
@pytest.mark.parametrize("kind", KINDS)
def test_every_input_of_every_kind(kind: str) -> None:
    of = KINDS[kind]
    arrays = dict.fromkeys(of.inputs, SEQUENCE) | dict.fromkeys(of.parameters, numbers(D))
    for i, (argument, good) in enumerate(arrays.items()):
        for bad in (None, 0.5, [1.0], torch.ones(*good.shape), jnp.ones(()), good.astype("int32")):
            inputs = [bad if n == i else x for n, x in enumerate(arrays.values())]
            refused(lambda x=inputs: ours.gated_scan(kind, *x), argument)  # type: ignore[misc]
    for bad in OTHERS["kind"]:
        refused(lambda b=bad: ours.gated_scan(b, *arrays.values()), "kind")  # type: ignore[misc]


@pytest.mark.parametrize("name", CALLS)
def test_arrays_and_numbers_of_numpy(name: str) -> None:
    """Give what arrays of JAX and numbers of Python give; so does what has ``__jax_array__``."""

    class Variable:
        def __init__(self, value: Any) -> None:
            self.value = value

        def __jax_array__(self) -> Any:
            return self.value

    function, options = getattr(ours, name), {}
    if "dim" in parameters(name):
        options = {"dim": np.int64(-1)}
    if name == "hgrn":
        options |= {"lower_bound": np.float32(0.5)}
    arrays = CALLS[name]
    expected = function(**arrays, return_final_state=True)
    for of in (np.asarray, Variable):
        others = {n: None if x is None else of(x) for n, x in arrays.items()}
        results = function(**(others | options), return_final_state=np.bool_(True))
        assert max(errors(results, expected)) == 0
        assert [r.dtype for r in results] == [e.dtype for e in expected]


def test_a_lower_bound_that_is_an_array_of_one_number() -> None:
    """A number is accepted, so the error says so."""
    for bad in (np.array(0.3, "float32"), jnp.array(0.3, "float32")):
        with pytest.raises(
            ValueError, match=r"lower_bound has shape \(\); .* or a number of Python"
        ):
            ours.hgrn(SEQUENCE, SEQUENCE, bad)


# --- cu_seqlens -------------------------------------------------------------------------------

BAD_BOUNDS = ([0, 9, 6], [0, 4, 2, 6], [0, 3], [1, 6], [0, 3, 7], [-2, 3, 6], [9, 1, -5])
#: What these count as where their values are not known: never outside of time, and every step in one sequence.
CONFINED = ([0, 6, 6], [0, 4, 4, 6], [0, 6], [0, 6], [0, 3, 6], [0, 3, 6], [0, 1, 6])


def packed(name: str, bounds: Any, scale: Any = 1.0, **options: Any) -> Any:
    """A call with sequences packed along time, in a batch of 1, and all arrays times ``scale``."""
    sequences = bounds.shape[0] - 1
    of_state = {
        "selective_scan": (1, sequences, D, N),
        "causal_conv1d": (sequences, D, N - 1),
    }.get(name, (1, D, sequences))
    arrays = {n: x for n, x in CALLS[name].items() if n not in ("cu_seqlens", "reset")}
    arrays = {n: x[:1] if x.ndim == 3 else x for n, x in arrays.items()}
    arrays["initial_state"] = numbers(*of_state)
    arrays = {n: (x * scale).astype("float32") for n, x in arrays.items()}
    return getattr(ours, name)(**arrays, cu_seqlens=bounds, return_final_state=True, **options)


PACKED = [name for name in CALLS if "cu_seqlens" in CALLS[name]]


@pytest.mark.usefixtures("runs_nothing")
@pytest.mark.parametrize("name", PACKED)
def test_bounds_that_do_not_fit(name: str) -> None:
    for bounds in BAD_BOUNDS:
        for of in (jnp.array, np.array):
            with pytest.raises(ValueError, match=r"cu_seqlens is \[.*\]; it must begin with 0"):
                packed(name, of(bounds))


@pytest.mark.parametrize("name", PACKED)
def test_there_may_be_no_sequence_where_there_is_no_step(name: str) -> None:
    arrays = {
        n: x for n, x in CALLS[name].items() if n not in ("cu_seqlens", "reset", "initial_state")
    }
    arrays = {n: x[:1, ..., :0] if x.ndim >= 3 else x for n, x in arrays.items()}
    out, final = getattr(ours, name)(
        **arrays, cu_seqlens=jnp.zeros(1, "int32"), return_final_state=True
    )
    assert out.shape == next(iter(arrays.values())).shape
    assert 0 in final.shape
    with pytest.raises(ValueError, match="at least 2 elements"):
        packed(name, jnp.zeros(1, "int32"))


@pytest.mark.usefixtures("runs_nothing")
@pytest.mark.parametrize("name", PACKED)
def test_bounds_that_do_not_fit_in_what_jax_makes_of_them(name: str) -> None:
    """Without ``jax_enable_x64`` that is int32, in which the last bound is the number of steps."""
    with jax.enable_x64(False):
        for bounds in ([0, 2**32 + T], [0, 2, 2**32 + 3, T], [0, -(2**32) + 3, T]):
            with pytest.raises(
                ValueError, match=r"cu_seqlens is \[.*\]; accepted are numbers from"
            ):
                packed(name, np.array(bounds))


@pytest.mark.parametrize(
    "name",
    [
        *("linear_scan", "causal_conv1d"),
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("rg_lru", "selective_scan")),
    ],
)
def test_bounds_that_a_program_gets(name: str) -> None:
    """Their values are not known when it is compiled. JAX's operators take them as ``CONFINED`` says, in derivatives, too; the C
    code refuses them."""

    def derivatives(bounds: Any) -> Any:
        def scan(scale: Any) -> Any:
            return packed(name, bounds, scale, backend="reference")

        results, pull = jax.vjp(scan, 0.9)
        return jax.jvp(scan, (0.9,), (1.0,)), pull(jax.tree.map(jnp.ones_like, results))

    compiled = jax.jit(derivatives)
    for bounds, confined in zip(BAD_BOUNDS, CONFINED, strict=True):
        results = compiled(jnp.array(bounds))
        assert max(errors(results, compiled(jnp.array(confined)))) == 0
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="do not rise from 0"):
        jax.block_until_ready(jax.jit(lambda b: packed(name, b))(jnp.array([0, 9, 6])))
