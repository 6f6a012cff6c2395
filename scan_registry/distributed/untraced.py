"""Calls that torch.compile does not trace: ranks compare their arguments when a call runs, not when it is compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo

__all__ = ["untraced"]

_is_compiling = torch.compiler.is_dynamo_compiling


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, at which torch.compile breaks the graph.

    The compiler may give up tracing a frame, and run it as it is, while it goes on to trace the functions that the frame
    calls. So the function is kept from the compiler wherever the compiler has been imported, and not only while it traces.
    Elsewhere the import, which takes seconds, is saved.
    """
    hidden = _disable_dynamo(function)

    def call(*args: Any) -> Any:
        if _is_compiling() or "torch._dynamo" in sys.modules:
            return hidden(*args)
        return function(*args)

    return call
