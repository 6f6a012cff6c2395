"""The kernels for JAX: functions of JAX's arrays, by XLA's foreign function interface, without torch.

Importing this imports no JAX: the functions load what they need when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scan_registry.base import lazy

if TYPE_CHECKING:
    from scan_registry.kernels.causal_conv1d.jax import causal_conv1d
    from scan_registry.kernels.gated_scan.jax import gated_scan, hgrn, min_gru, min_lstm, rg_lru
    from scan_registry.kernels.linear_scan.jax import linear_scan
    from scan_registry.kernels.selective_scan.jax import selective_scan
    from scan_registry.kernels.ssd_scan.jax import ssd_scan

__all__ = [
    "causal_conv1d",
    "gated_scan",
    "hgrn",
    "linear_scan",
    "min_gru",
    "min_lstm",
    "rg_lru",
    "selective_scan",
    "ssd_scan",
]


def _of_families() -> dict[str, str]:
    from scan_registry.kernels import public

    return public("JAX")


__getattr__, __dir__ = lazy.names(globals(), {}, _of_families)
