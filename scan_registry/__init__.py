"""Ahead-of-time compiled GPU kernels for scans and recurrences.

Importing this package is cheap: it opens no CUDA context, writes nothing, and imports neither torch
nor any compiler. The public names load what they need when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scan_registry.explanation import explain
    from scan_registry.inventory import catalogue
    from scan_registry.ops.linear_scan import linear_scan
    from scan_registry.ops.rnn import rnn
    from scan_registry.ops.step_buffers import rnn_buffers
    from scan_registry.policy import FallbackWarning, require
    from scan_registry.select import NoKernelError

    __version__: str

__all__ = [
    "FallbackWarning",
    "NoKernelError",
    "__version__",
    "catalogue",
    "explain",
    "linear_scan",
    "require",
    "rnn",
    "rnn_buffers",
]

_HOMES = {
    "FallbackWarning": "scan_registry.policy",
    "NoKernelError": "scan_registry.select",
    "catalogue": "scan_registry.inventory",
    "explain": "scan_registry.explanation",
    "linear_scan": "scan_registry.ops.linear_scan",
    "require": "scan_registry.policy",
    "rnn": "scan_registry.ops.rnn",
    "rnn_buffers": "scan_registry.ops.step_buffers",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("scan-registry")
    elif name in _HOMES:
        from importlib import import_module

        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
