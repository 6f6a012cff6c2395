"""Scans on copies of their tensors, where a problem's own layout has no fast kernel: see ``Family.routes``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from scan_registry.kernels.linear_scan.problem import LinearScanProblem, Strides
from scan_registry.kernels.model import Route
from scan_registry.ops.launching import Run

#: What ``STRIDED`` calls the tensors of these pointers together.
_GROUPS = {
    **dict.fromkeys(("gates_grad", "tokens_grad"), "grads"),
    **dict.fromkeys(
        ("initial_state", "final_state", "final_state_grad", "initial_state_grad"), "state"
    ),
}


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
    names = dict.fromkeys((*route.inputs, *route.outputs))
    parts = {name: _Part.of(problem, route.problem, name) for name in names}
    written = [(name, parts[name]) for name in route.outputs]
    # A kernel writes no state of a packed sequence without steps: what is there already stays.
    kept = {name for name, part in written if part.is_state and problem.sequences}

    def run_on_copies(tensors: Mapping[str, Tensor | None]) -> None:
        copies: dict[str, Tensor] | None = None
        try:
            copies = _new(parts, tensors)
        except torch.OutOfMemoryError:
            if without is None:
                raise
        if copies is None:  # not in the handler, whose traceback holds those that were made
            assert without is not None
            without()(tensors)
            return
        for name, copy in copies.items():
            if name in route.inputs or name in kept:
                part, tensor = parts[name], tensors[name]
                assert tensor is not None
                part.copied(copy).copy_(part.own(tensor))
        run({**tensors, **copies})
        for name, part in written:
            tensor = tensors.get(name)
            if tensor is not None:
                part.own(tensor).copy_(part.copied(copies[name]))

    return run_on_copies


def _new(parts: Mapping[str, _Part], tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Memory for the copies of those tensors that are given."""
    present = ((name, part, tensors.get(name)) for name, part in parts.items())
    return {name: part.new(tensor) for name, part, tensor in present if tensor is not None}


class _Part:
    """One tensor of a problem, and its copy: both seen with the sizes that they have in common."""

    def __init__(self, sizes: tuple[int, ...], own: tuple[int, ...], copied: tuple[int, ...]):
        # Where the copy has one element for all, one is copied.
        self._sizes = tuple(
            1 if step == 0 else size for size, step in zip(sizes, copied, strict=True)
        )
        self._own, self._copied = own, copied
        self.is_state = False
        self._room = 1

    @classmethod
    def of(cls, problem: LinearScanProblem, posed: LinearScanProblem, name: str) -> _Part:
        group = _GROUPS.get(name, name)
        is_state = group == "state"
        steps = (max(1, one.sequences) if is_state else one.time for one in (problem, posed))
        own_steps, steps_there = steps
        own, there = problem.strides_of(group), posed.strides_of(group)
        # Where outer and batch are one dimension of the copy, the outer one steps over whole batches.
        outer = there.outer if posed.outer == problem.outer else problem.batch * there.batch
        sizes = (problem.outer, problem.batch, problem.channels, own_steps)
        part = cls(sizes, _listed(own), (outer, there.batch, there.channel, there.time))
        part.is_state = is_state
        every = (posed.outer, posed.batch, posed.channels, steps_there)
        part._room = 1 + sum(
            (size - 1) * step for size, step in zip(every, _listed(there), strict=True)
        )
        return part

    def new(self, model: Tensor) -> Tensor:
        """Memory for the copy, with what the kernel reads or writes beyond the tensor's own elements."""
        return torch.empty(self._room, dtype=model.dtype, device=model.device)

    def own(self, tensor: Tensor) -> Tensor:
        """The tensor, whatever its shape."""
        return tensor.as_strided(self._sizes, self._own)

    def copied(self, copy: Tensor) -> Tensor:
        """The copy of it."""
        return copy.as_strided(self._sizes, self._copied)


def _listed(strides: Strides) -> tuple[int, ...]:
    return tuple(vars(strides).values())
