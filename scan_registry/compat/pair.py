"""The scan of two tensors of three dimensions, which several packages have under other names."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from scan_registry.compat.arguments import backend_for, check_pair
from scan_registry.dispatch.select import Backend
from scan_registry.kernels.linear_scan.op.function import linear_scan


def scan(
    layout: str, language: Backend, *, dim: int = -1, reverse: bool = False, **tensors: Any
) -> Tensor:
    """The states for gates and tokens, which ``tensors`` has in this order by the names of the stand-in's arguments.

    ``layout`` names the dimensions. On a GPU the scan runs the kernels of ``language``.
    """
    check_pair(layout, **tensors)
    gates, tokens = tensors.values()
    backend = backend_for(tokens, language)
    return linear_scan(gates, tokens, dim=dim, reverse=reverse, backend=backend)
