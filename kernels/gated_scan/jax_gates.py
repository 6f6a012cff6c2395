"""Gates and tokens of the kinds in JAX's operators, as ``kinds`` has them in torch's. See there for what they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from scan_registry.kernels.gated_scan.kinds import MOST_SLOPE, RG_LRU_SCALE


def _both_sigmoids(x: Any) -> tuple[Any, Any]:
    """The sigmoids of x and of -x. Neither is computed as 1 minus the other, which would lose digits."""
    return jax.nn.sigmoid(x), jax.nn.sigmoid(-x)


def _derivatives(primals: Any, tangents: Any) -> Any:
    one, other = _sigmoids(*primals)
    moved = tangents[0] * (one * other)
    return (one, other), (moved, -moved)


_sigmoids: Any = jax.custom_jvp(_both_sigmoids)
_sigmoids.defjvp(_derivatives)


def _positive(x: Any) -> Any:
    return jnp.where(x >= 0, x + 0.5, _sigmoids(x)[0])


def _root(x: Any) -> Any:
    """The square root, with a derivative that is at most ``MOST_SLOPE``, at 0 as well."""
    least = 0.25 / MOST_SLOPE**2
    steep = x < least
    value = jnp.sqrt(jnp.where(steep, least, x))
    line = MOST_SLOPE * x
    root = jnp.sqrt(lax.stop_gradient(jnp.maximum(x, 0)))
    return jnp.where(steep, line + (root - lax.stop_gradient(line)), value)


def _linear(reset: Any, gates: Any, tokens: Any) -> tuple[Any, Any]:
    return gates, tokens


def _min_gru(reset: Any, gate: Any, hidden: Any, activation: Any) -> tuple[Any, Any]:
    taken, kept = _sigmoids(gate)
    return kept, taken * activation(hidden)


def _min_lstm(reset: Any, forget: Any, input: Any, hidden: Any, activation: Any) -> tuple[Any, Any]:
    kept, taken = _sigmoids(jax.nn.log_sigmoid(forget) - jax.nn.log_sigmoid(input))
    return kept, taken * activation(hidden)


def _rg_lru(
    reset: Any, x: Any, recurrence_gate: Any, input_gate: Any, a_param: Any
) -> tuple[Any, Any]:
    if reset is not None:  # the gate has no effect at a reset, and its derivative is 0 there
        recurrence_gate = jnp.where(reset, 0, recurrence_gate)
    log_gate = -RG_LRU_SCALE * _sigmoids(recurrence_gate)[0] * jax.nn.softplus(a_param)
    # 1 - gate², from log(gate) since gate may be near 1: the value is that of expm1, the derivative that of exp.
    square = jnp.exp(2 * log_gate)
    exact = lax.stop_gradient(square) - lax.stop_gradient(jnp.expm1(2 * log_gate))
    scale = _root(exact - square)
    if reset is not None:
        scale = jnp.where(reset, 1.0, scale)
    return jnp.exp(log_gate), scale * (_sigmoids(input_gate)[0] * x)


def _hgrn(reset: Any, x: Any, forget: Any, lower_bound: Any) -> tuple[Any, Any]:
    opened, closed = _sigmoids(forget)
    above = 1 - lower_bound
    return lower_bound + above * opened, above * closed * (x * _sigmoids(x)[0])


_IDENTITY: Callable[[Any], Any] = lambda x: x  # noqa: E731
#: Gate and token of each kind, from ``reset`` (or None), inputs and parameters.
GATES: dict[str, Callable[..., tuple[Any, Any]]] = {
    "linear": _linear,
    "min_gru": partial(_min_gru, activation=_positive),
    "min_gru_identity": partial(_min_gru, activation=_IDENTITY),
    "min_lstm": partial(_min_lstm, activation=_positive),
    "min_lstm_identity": partial(_min_lstm, activation=_IDENTITY),
    "rg_lru": _rg_lru,
    "hgrn": _hgrn,
}


def check_kind(kind: str) -> None:
    """``ValueError`` for a kind of ``kinds`` that has no entry here."""
    if kind not in GATES:
        raise ValueError(
            f"kind is {kind!r}, which has no function in JAX's operators; accepted are {', '.join(GATES)}. "
            "Add one to GATES in kernels/gated_scan/jax_gates.py"
        )
