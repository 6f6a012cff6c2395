"""Ahead-of-time compiled GPU kernels for scans and recurrences.

Importing this package is cheap: it opens no CUDA context, writes nothing, and imports neither torch
nor any compiler. The public names load what they need when they are first used.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING


def _give_way() -> None:
    """If the package is installed elsewhere, import that one instead.

    In a clone, ``kernels`` and ``aot`` are beside this folder and not in it. Python finds this folder first if it starts in
    the root of the clone. In an editable install of this clone, this folder is the package.
    """
    root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    # Source trees that gave way to this one, or two of them would give way to each other.
    left: set[str] = globals().get("_left", set()) | {root}
    others = [p for p in sys.path if isinstance(p, str) and os.path.realpath(p) not in left]
    for finder in sys.meta_path:
        spec = finder.find_spec(__name__, others)
        if spec is None or spec.origin is None or spec.loader is None:
            continue
        if not os.path.samefile(spec.origin, __file__):
            from importlib.util import module_from_spec

            module = sys.modules[__name__] = module_from_spec(spec)
            vars(module)["_left"] = left
            spec.loader.exec_module(module)
        return
    lacking = {"kernels", "aot", "ops", "nn", "compat", "distributed", "cli"}
    words = (
        f"{root} is the source tree of scan-registry, which is not installed; run `pip install -e {root}`, or use "
        "an environment where it is installed"
    )

    class Missing:
        """Says so where a part is imported that needs what this folder lacks. Scripts in ``ci`` import other parts."""

        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            if name.removeprefix(f"{__name__}.") in lacking:
                raise ImportError(words)

    sys.meta_path.insert(0, Missing)


if not any(os.path.isdir(os.path.join(path, "kernels")) for path in __path__):
    _give_way()

from scan_registry.base import lazy  # noqa: E402  # of the package that is used

if TYPE_CHECKING:
    from scan_registry import compat, distributed, jax, nn
    from scan_registry.catalog.inventory import catalogue
    from scan_registry.diagnostics.explanation import explain
    from scan_registry.dispatch.policy import FallbackWarning, require
    from scan_registry.dispatch.select import NoKernelError
    from scan_registry.kernels.causal_conv1d.op.function import causal_conv1d, causal_conv1d_update
    from scan_registry.kernels.gated_scan.op.function import gated_scan
    from scan_registry.kernels.gated_scan.op.kinds import hgrn, min_gru, min_lstm, rg_lru
    from scan_registry.kernels.linear_scan.op.function import linear_scan
    from scan_registry.kernels.linear_scan.op.step import linear_scan_step
    from scan_registry.kernels.linear_scan.op.summary import linear_scan_summary
    from scan_registry.kernels.rnn.op.buffers import rnn_buffers
    from scan_registry.kernels.rnn.op.function import rnn
    from scan_registry.kernels.selective_scan.op.function import selective_scan
    from scan_registry.kernels.selective_state_update.op.function import selective_state_update
    from scan_registry.kernels.ssd_scan.op.function import ssd_scan
    from scan_registry.ops.pools import StateRows

    __version__: str

__all__ = [
    "FallbackWarning",
    "NoKernelError",
    "StateRows",
    "__version__",
    "catalogue",
    "causal_conv1d",
    "causal_conv1d_update",
    "compat",
    "distributed",
    "explain",
    "gated_scan",
    "hgrn",
    "jax",
    "linear_scan",
    "linear_scan_step",
    "linear_scan_summary",
    "min_gru",
    "min_lstm",
    "nn",
    "require",
    "rg_lru",
    "rnn",
    "rnn_buffers",
    "selective_scan",
    "selective_state_update",
    "ssd_scan",
]

_HOMES = {
    "FallbackWarning": ".dispatch.policy",
    "NoKernelError": ".dispatch.select",
    "StateRows": ".ops.pools",
    "__version__": ".version",
    "catalogue": ".catalog.inventory",
    "compat": None,
    "distributed": None,
    "explain": ".diagnostics.explanation",
    "jax": None,
    "nn": None,
    "require": ".dispatch.policy",
}


def _of_families() -> dict[str, str]:
    from scan_registry.kernels import public

    return public()


__getattr__, __dir__ = lazy.names(globals(), _HOMES, _of_families)
