"""Scans on copies of their tensors, where a problem's own layout has no fast kernel: see ``Family.route``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from scan_registry.kernels.linear_scan.problem import LinearScanProblem
from scan_registry.kernels.model import Route
from scan_registry.ops.launching import Run

#: What ``STRIDED`` calls the tensors of these pointers together.
_GROUPS = {"gates_grad": "grads", "tokens_grad": "grads"}


def on_copies(
    problem: LinearScanProblem,
    route: Route,
    run: Run,
    without: Callable[[], Run] | None = None,
) -> Run:
    """A function that solves ``problem`` by ``run``, which solves ``route.problem``.

    The copies are made of new tensors, on the current stream, and are freed when it returns. ``without`` gives a function
    that solves ``problem`` without copies, for when there is no memory for them.
    """
    names = (*route.inputs, *route.outputs)
    strides = {name: problem.strides_of(_GROUPS.get(name, name)) for name in names}
    rows = *problem.sizes[:3], route.problem.strides[0].channel

    def own(name: str, tensor: Tensor) -> Tensor:
        """A tensor, whatever its shape, by the problem's dimensions."""
        return tensor.as_strided(problem.sizes, tuple(vars(strides[name]).values()))

    def run_on_copies(tensors: Mapping[str, Tensor | None]) -> None:
        present = {name: tensor for name in names if (tensor := tensors.get(name)) is not None}
        copies: dict[str, Tensor] | None = None
        try:
            copies = {name: tensor.new_empty(rows) for name, tensor in present.items()}
        except torch.OutOfMemoryError:
            if without is None:
                raise
        if copies is None:  # not in the handler, whose traceback holds those that were made
            assert without is not None
            without()(tensors)
            return
        for name in route.inputs:
            if name in present:
                copies[name][..., : problem.time].copy_(own(name, present[name]))
        run({**tensors, **copies})
        for name in route.outputs:
            if name in present:
                own(name, present[name]).copy_(copies[name][..., : problem.time])

    return run_on_copies
