"""Sequences whose time is cut between four devices, against one device: every function of ``scan_registry.jax``."""

from __future__ import annotations

from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from jaxing import drawn, errors, jax

import scan_registry.jax as ours
from scan_registry.kernels.gated_scan.kinds import KINDS

jnp = jax.numpy
P = jax.sharding.PartitionSpec
BATCH, TIME, CHANNELS = 2, 16, 4


def last(*shape: int, seed: int) -> Any:
    """A sequence with time last, and how it is cut."""
    return drawn(BATCH, *shape, TIME, seed=seed), P(*(None,) * (1 + len(shape)), "t")


def second(*shape: int, seed: int) -> Any:
    """A sequence whose second dimension is time, and how it is cut."""
    return drawn(BATCH, TIME, *shape, seed=seed), P(None, "t")


def shared(*shape: int, seed: int, scale: float = 1.0) -> Any:
    """What all devices have."""
    return drawn(*shape, seed=seed, scale=scale), P()


def gated(kind: str, dim: int, reverse: bool) -> Any:
    of, sequence = KINDS[kind], second if dim == 1 else last
    inputs = [sequence(CHANNELS, seed=i) for i in range(len(of.inputs))]
    parameters = [(jax.nn.sigmoid(drawn(CHANNELS, seed=8)), P()) for _ in of.parameters]
    reset = drawn(BATCH, TIME, seed=3) > 1

    def function(*arrays: Any, **options: Any) -> Any:
        *inputs, initial, resets = arrays
        options |= {"initial_state": initial, "reset": resets, "dim": dim, "reverse": reverse}
        return ours.gated_scan(kind, *inputs, **options)

    arrays = [*inputs, *parameters, shared(BATCH, CHANNELS, seed=9), (reset, P(None, "t"))]
    return function, arrays


def selective(dim: int, groups: int) -> Any:
    sequence = second if dim == 1 else last
    arrays = [
        *(sequence(CHANNELS, seed=0), sequence(CHANNELS, seed=1)),
        (-jnp.exp(drawn(CHANNELS, 3, seed=2, scale=0.5)), P()),
        *(sequence(*([groups] if groups else []), 3, seed=i) for i in (3, 4)),
        *(shared(CHANNELS, seed=5), sequence(CHANNELS, seed=6), shared(CHANNELS, seed=7)),
        shared(BATCH, CHANNELS, 3, seed=8),
    ]

    def function(*arrays: Any, **options: Any) -> Any:
        return ours.selective_scan(*arrays[:8], True, arrays[8], dim=dim, **options)

    return function, arrays


def ssd(gated: bool) -> Any:
    arrays = [
        *(second(4, 3, seed=0), second(4, seed=1)),
        (-jnp.exp(drawn(4, seed=2, scale=0.5)), P()),
        *(second(2, 5, seed=3), second(2, 5, seed=4)),
        shared(4, seed=5),
        *([second(4, 3, seed=6)] if gated else []),
        *(shared(4, seed=7), shared(BATCH, 4, 3, 5, seed=8)),
    ]

    def function(*arrays: Any, **options: Any) -> Any:
        *first, bias, initial = arrays
        z = first.pop() if gated else None
        return ours.ssd_scan(*first, z, bias, True, (0.1, 2.0), initial, **options)

    return function, arrays


def convolution(dim: int) -> Any:
    sequence = second if dim == 1 else last
    arrays = [
        *(sequence(CHANNELS, seed=0), shared(CHANNELS, 4, seed=1), shared(CHANNELS, seed=2)),
        shared(BATCH, CHANNELS, 3, seed=3),
    ]

    def function(*arrays: Any, **options: Any) -> Any:
        *first, state = arrays
        options |= {"initial_state": state, "dim": dim, "activation": "silu"}
        return ours.causal_conv1d(*first, **options)

    return function, arrays


#: Neighbours are tested in different dtypes, so that each function is tested in both.
CASES = {
    "min_gru": lambda: gated("min_gru", 1, False),
    "min_lstm, reverse": lambda: gated("min_lstm_identity", -1, True),
    "rg_lru": lambda: gated("rg_lru", 1, False),
    "hgrn, reverse": lambda: gated("hgrn", 1, True),
    "linear with resets": lambda: gated("linear", -1, False),
    "selective_scan": lambda: selective(-1, 2),
    "selective_scan, channels last": lambda: selective(1, 0),
    "ssd_scan": lambda: ssd(True),
    "ssd_scan without z": lambda: ssd(False),
    "causal_conv1d": lambda: convolution(-1),
    "causal_conv1d, channels last": lambda: convolution(1),
}

#: What differs from another case in a formula that is the same on every device.
ALIKE = {"min_gru", "hgrn, reverse", "linear with resets", "selective_scan", "ssd_scan without z", "causal_conv1d"}  # fmt: skip
IN_DTYPES = [
    pytest.param(name, dtype, marks=[pytest.mark.thorough] if name in ALIKE else [])
    for name, dtype in zip(CASES, cycle(["float64", "float32"]), strict=False)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), IN_DTYPES)
def test_values_and_derivatives(name: str, dtype: str) -> None:
    """The output, the final state, which all devices have, and the derivatives of both. float32 runs the C code, if there is any."""
    function, pairs = CASES[name]()
    arrays = [x if x.dtype == bool else x.astype(dtype) for x, _ in pairs]
    cuts = [cut for _, cut in pairs]
    places = tuple(i for i, x in enumerate(arrays) if x.dtype != bool)
    along = cuts[0]
    cut = jax.shard_map(
        partial(function, return_final_state=True, axis_name="t"),
        mesh=jax.sharding.Mesh(jax.devices(), ("t",)),
        in_specs=tuple(cuts),
        out_specs=(along, P()),
        check_vma=dtype == "float32",
    )
    whole = partial(function, return_final_state=True)

    def derivatives(scan: Any) -> Any:
        def of_places(*values: Any) -> Any:
            every = list(arrays)
            for place, value in zip(places, values, strict=True):
                every[place] = value
            return scan(*every)

        def loss(*values: Any) -> Any:
            states, final = of_places(*values)
            return (states**3).sum() + (final**2).sum()

        own = [arrays[i] for i in places]
        gradient = jax.grad(loss, tuple(range(len(own))))
        return jax.jit(lambda *o: (jax.jvp(of_places, o, o), gradient(*o)))(*own)

    tolerance = 1e-11 if dtype == "float64" else 2e-4
    assert max(errors(derivatives(cut), derivatives(whole))) < tolerance


def test_two_axes_of_a_mesh() -> None:
    """The batch is cut along one of them, time along the other."""
    function, pairs = CASES["ssd_scan"]()
    arrays = [x.astype("float32") for x, _ in pairs]
    cuts = [P("b", *cut[1:]) if "t" in cut else cut for _, cut in pairs]
    cuts[-1] = P("b")  # the initial state's
    devices = np.array(jax.devices()).reshape(2, 2)
    cut = jax.shard_map(
        partial(function, return_final_state=True, axis_name="t"),
        mesh=jax.sharding.Mesh(devices, ("b", "t")),
        in_specs=tuple(cuts),
        out_specs=(P("b", "t"), P("b")),
    )

    def gradients(scan: Any) -> Any:
        def loss(*operands: Any) -> Any:
            return sum((result**2).sum() for result in scan(*operands))

        return jax.jit(jax.value_and_grad(loss, tuple(range(len(arrays)))))(*arrays)

    whole = partial(function, return_final_state=True)
    assert max(errors(gradients(cut), gradients(whole))) < 1e-5


def over_devices(function: Any, arrays: int) -> Any:
    """The function with time, the last dimension, cut between the devices."""
    cut = P(None, None, "t")
    return jax.shard_map(
        partial(function, axis_name="t"),
        mesh=jax.sharding.Mesh(jax.devices(), ("t",)),
        in_specs=(cut,) * arrays,
        out_specs=cut,
    )


SECOND = {
    "min_gru": partial(ours.gated_scan, "min_gru"),
    "linear": partial(ours.gated_scan, "linear"),
    "linear_scan": ours.linear_scan,
}


@pytest.mark.parametrize(
    "name", [pytest.param("min_gru", marks=pytest.mark.thorough), "linear", "linear_scan"]
)
def test_second_derivatives(name: str) -> None:
    """Also of a scan whose gates JAX differentiates, and where a gate is 0, as is the product of a device's gates then."""
    first, tokens = jax.nn.sigmoid(drawn(1, 1, 8)), drawn(1, 1, 8, seed=1)
    first = first.at[0, 0, 3].set(0)
    function = SECOND[name]

    def hessian(scan: Any) -> Any:
        return jax.jit(jax.hessian(lambda *o: (scan(*o) ** 3).sum(), (0, 1)))(first, tokens)

    assert max(errors(hessian(over_devices(function, 2)), hessian(function))) < 1e-11


def test_a_shared_gate_has_second_derivatives() -> None:
    """By forward mode over reverse mode, whose batches have a further dimension in the tangent of a gate alone."""
    gates, tokens = jax.nn.sigmoid(drawn(2, 1)), drawn(1, 2, 4, seed=1)
    cut = jax.shard_map(
        partial(ours.linear_scan, axis_name="t"),
        mesh=jax.sharding.Mesh(jax.devices(), ("t",)),
        in_specs=(P(), P(None, None, "t")),
        out_specs=P(None, None, "t"),
    )

    def hessian(scan: Any) -> Any:
        return jax.jit(jax.hessian(lambda g: (scan(g, tokens) ** 3).sum()))(gates)

    assert max(errors(hessian(cut), hessian(ours.linear_scan))) < 1e-11


@pytest.mark.parametrize("function", [ours.linear_scan, partial(ours.gated_scan, "linear")])
def test_products_of_gates_that_overflow(function: Any) -> None:
    """They are products with states and gradients of 0, or with no state at all, and results are finite."""
    gates = jnp.array([1e200, 1e200, 1e200, 1e200, 0.5, 0.5, 0.5, 0.5], "float64")[None, None]
    tokens = jnp.zeros(8).at[4].set(1.0)[None, None]

    def results(scan: Any) -> Any:
        def loss(gates: Any, tokens: Any) -> Any:
            return (scan(gates, tokens)[..., 0] ** 2).sum()

        return jax.jit(lambda *o: (scan(*o), jax.grad(loss, (0, 1))(*o)))(gates, tokens)

    expected = results(function)
    assert all(bool(jnp.isfinite(array).all()) for array in jax.tree.leaves(expected))
    assert max(errors(results(over_devices(function, 2)), expected)) < 1e-12


def test_what_is_refused() -> None:
    x, weight = jnp.ones((1, 2, 8)), jnp.ones((2, 4))
    with pytest.raises(TypeError, match="axis_name must be a str, not int"):
        ours.causal_conv1d(x, weight, axis_name=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="axis_name is 't'; it must be an axis of the mesh"):
        ours.causal_conv1d(x, weight, axis_name="t")
    with pytest.raises(ValueError, match="cu_seqlens does not go with axis_name"):
        ours.min_gru(x, x, cu_seqlens=jnp.array([0, 8]), axis_name="t")
    cut = jax.shard_map(
        partial(ours.causal_conv1d, axis_name="t"),
        mesh=jax.sharding.Mesh(jax.devices(), ("t",)),
        in_specs=(P(None, None, "t"), P()),
        out_specs=P(None, None, "t"),
    )
    with pytest.raises(ValueError, match="x has 2 steps on each device"):
        cut(x, weight)
    with pytest.raises(ValueError, match="with axis_name each device must have some"):
        cut(x[:, :, :0], weight)
