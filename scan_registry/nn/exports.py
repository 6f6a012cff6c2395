"""What torch's older exporters ask of modules."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from scan_registry.ops.registration import not_in_onnx


class Exports(torch.nn.Module):
    """A module that torch.jit.script refuses with this package's message, and that torch.onnx can trace."""

    #: Names of the functions of ``scan_registry`` that a call runs, which ``explain`` takes.
    operators: tuple[str, ...] = ()

    def __prepare_scriptable__(self) -> Any:
        """torch.jit.script asks for this first; what it would say by itself names our insides."""
        raise RuntimeError(
            f"torch.jit.script cannot compile scan_registry.nn.{type(self).__name__}; use torch.compile "
            "or torch.export"
        )

    def _slow_forward(self, *args: Any, **kwargs: Any) -> Any:
        """torch's tracer calls this in place of ``forward``. torch.onnx passes all parameters of a module by position, also
        those that are accepted by keyword only, and bools as tensors."""
        if torch.onnx.is_in_onnx_export():
            if getattr(
                self, "is_complex", False
            ):  # torch would fail at a complex number before our operator
                raise not_in_onnx(f"scan_registry.nn.{type(self).__name__}")
            parameters = inspect.signature(self.forward).parameters.values()
            for parameter, value in zip(parameters, args, strict=False):
                flag = isinstance(parameter.default, bool)
                kwargs[parameter.name] = bool(value) if flag else value
            args = ()
        return super()._slow_forward(*args, **kwargs)  # type: ignore[no-untyped-call]
