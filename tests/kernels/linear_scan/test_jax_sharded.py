"""``scan_registry.jax.linear_scan`` of a sequence whose time is cut between four devices, against one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from jaxing import drawn, errors, jax

from scan_registry.jax import linear_scan

jnp = jax.numpy


@pytest.mark.parametrize(
    ("dim", "reverse", "gates", "initial", "checked"),
    [
        (1, False, (2, 12, 3), True, True),
        (-1, True, (3, 1), True, False),
        (1, True, (1, 12, 1), False, True),
    ],
)
def test_one_sequence_over_devices(
    dim: int, reverse: bool, gates: tuple[int, ...], initial: bool, checked: bool
) -> None:
    """States, the final state, which all devices have, and the derivatives of both."""
    shape = (2, 12, 3) if dim == 1 else (2, 3, 12)
    mesh, spec = jax.sharding.Mesh(jax.devices(), ("t",)), jax.sharding.PartitionSpec
    along = spec(None, "t") if dim == 1 else spec(None, None, "t")
    of_gates = along if 12 in gates else spec()
    cut = jax.shard_map(
        partial(linear_scan, dim=dim, reverse=reverse, return_final_state=True, axis_name="t"),
        mesh=mesh,
        in_specs=(of_gates, along, spec()),
        out_specs=(along, spec()),
        check_vma=checked,
    )
    whole = partial(linear_scan, dim=dim, reverse=reverse, return_final_state=True)
    state = drawn(2, 3, seed=2) if initial else jnp.zeros((2, 3))
    operands = drawn(*gates, scale=0.7), drawn(*shape, seed=1), state

    def derivatives(scan: Any) -> Any:
        def loss(*operands: Any) -> Any:
            states, final = scan(*operands)
            return (states**3).sum() + (final**2).sum()

        gradient = jax.grad(loss, (0, 1, 2))
        return jax.jit(lambda *o: (jax.jvp(scan, o, o), gradient(*o)))(*operands)

    assert max(errors(derivatives(cut), derivatives(whole))) < 1e-12


def test_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="cu_seqlens does not go with axis_name"):
        linear_scan(jnp.ones(4), jnp.ones(4), cu_seqlens=jnp.array([0, 4]), axis_name="t")
