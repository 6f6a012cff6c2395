"""How one step of a selective scan runs. A call of shapes, strides and dtypes seen before finds all that in a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from scan_registry.kernels.selective_scan import reference
from scan_registry.ops.launching import plan_cache
from scan_registry.ops.selective_scan_step_arguments import Arguments, check


def step(tensors: tuple[Tensor | None, ...], softplus: bool, backend: str) -> Tensor:
    """The output; the state is changed in place. Arguments are checked by the first call of their kind."""
    out: Tensor = plan_cache.run(_plan, tensors, softplus, backend)
    return out


def _plan(*arguments: Any) -> Callable[..., Tensor]:
    *tensors, softplus, backend = arguments
    check(tuple(tensors), softplus, backend)

    def by_reference(*tensors: Any) -> Tensor:
        given = Arguments(*tensors)
        return reference.step(*given[:-1], dt_softplus=softplus, indices=given.indices)

    return by_reference
