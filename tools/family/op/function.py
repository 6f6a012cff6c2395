"""``scale``: y = factor · x."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scan_registry.dispatch import policy
from scan_registry.dispatch.select import Backend
from scan_registry.kernels.scale import reference
from scan_registry.kernels.scale.spec import FAMILY, ScaleProblem
from scan_registry.ops.launching import plan_cache
from scan_registry.ops.operator import SingleCall
from scan_registry.runtime.loader import prepare, run_reference

__all__ = ["describe", "scale"]


def scale(x: Tensor, factor: int = 2, *, backend: Backend = "auto") -> Tensor:
    """A tensor times a whole number.

    Args:
        x: float32, of any shape.
        factor: what it is multiplied by.
        backend: ``"auto"`` takes the best binary installed for this GPU; ``"reference"`` is plain torch on any device.

    Returns:
        The product, in the shape of ``x``.

    Raises:
        RuntimeError: a derivative is asked for; there is none yet.
        TypeError: ``x`` is not a tensor of float32, or ``factor`` is no int.
        NoKernelError: ``require``, ``SCAN_REGISTRY_REQUIRE`` or ``backend`` allows nothing that runs on this GPU.
    """
    check(x, factor)
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError("scale has no derivative yet, and x requires one")
    out: Tensor = plan_cache.run(_plan, (x.contiguous(),), factor, backend)
    return out


def check(x: Any, factor: Any) -> None:
    """Refuse what is not described, before anything is launched."""
    if type(factor) is not int:
        raise TypeError(f"factor is {factor!r}; expected an int")
    if not isinstance(x, Tensor) or x.dtype != torch.float32:
        raise TypeError(f"x is {getattr(x, 'dtype', type(x).__name__)}; expected a float32 tensor")


class KernelCall(SingleCall[ScaleProblem]):
    """The kernel's part in a call: its problem. It copies nothing."""


def describe(x: Tensor, factor: int = 2, *, backend: Backend = "auto") -> dict[str, KernelCall]:
    """The problem that a call of ``scale`` with these arguments poses. Nothing is computed."""
    check(x, factor)
    return {"forward": KernelCall(ScaleProblem("float32", x.numel(), factor))}


def _plan(x: Tensor, factor: int, backend: Any) -> Callable[[Tensor], Tensor]:
    """How calls with such tensors run: made by the first, and kept."""

    def by_reference(x: Tensor) -> Tensor:
        return reference.forward(x, factor)

    if backend == "reference" or not x.is_cuda or x.numel() == 0:
        return by_reference
    ordinal = x.device.index
    problem = ScaleProblem("float32", x.numel(), factor)
    ready = prepare(ordinal, FAMILY, problem, backend, policy.lowest())
    if ready.launch is None:
        return lambda x: run_reference(ready.decision, lambda: by_reference(x))
    start, stream, refuse = ready.launch.run, torch._C._cuda_getCurrentRawStream, ready.refuse

    def launch(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        if status := start(stream(ordinal), x.data_ptr(), y.data_ptr()):
            refuse(status)
        return y

    return launch
