"""Memory for what a selective scan's kernels write, and the gradients that are made of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scan_registry.kernels.selective_scan.op.arguments import Arguments
from scan_registry.kernels.selective_scan.problem import SelectiveScanProblem
from scan_registry.ops.launching import allocator

Gradients = tuple[Tensor | None, ...]


class Address(int):
    """Where something is within a tensor, for those who ask for no more."""

    def data_ptr(self) -> int:
        return self


class Sums(NamedTuple):
    """What kernels write that is summed up: tensors of the terms of A's gradient; of B's and C's; and of D's and the bias',
    of those that there are. ``scratch`` is what kernels hand on to each other."""

    A: Tensor
    projections: Tensor
    vectors: Tensor | None
    scratch: Tensor | None


class GradientBuffers:
    """What a backward pass writes: gradients, and their terms where they are sums. Terms of one shape share a tensor, so that
    they are summed up at once; of a single term, that is the gradient."""

    def __init__(
        self,
        arguments: Arguments,
        problem: SelectiveScanProblem,
        of_projection: Sequence[int] | None,
    ) -> None:
        """``of_projection``: the shape of B's gradient and of C's, if it is not that which the kernel writes."""
        u, device = arguments.u, arguments.u.device
        model = torch.empty_like(u, device="meta")
        sequence = allocator(device, u.shape, u.dtype, model.stride())
        initial = arguments.initial_state
        self._new = {
            "u_grad": sequence,
            "delta_grad": sequence,
            **({} if arguments.z is None else {"z_grad": sequence}),
            **({} if initial is None else {"initial_grad": allocator(device, initial.shape)}),
        }
        rows = problem.batch * max(1, problem.sequences) * problem.parts
        channels, states = arguments.A.shape
        #: Before the dimensions of a gradient, that of its terms, if there are several.
        self.rows = () if rows == 1 else (rows,)
        self.ctas = () if problem.ctas_of_group == 1 else (problem.ctas_of_group,)
        projection = *self.ctas, *(of_projection or arguments.B.shape)
        self._A = allocator(device, (*self.rows, channels, states))
        self._projections = allocator(device, (2, *projection))
        self._second = 4 * math.prod(projection)  # bytes from B's gradient to C's
        optional = {"D_grad": arguments.D, "bias_grad": arguments.delta_bias}
        self._vectors = [name for name, tensor in optional.items() if tensor is not None]
        self._new_vectors = allocator(device, (len(self._vectors), *self.rows, channels))
        of_scratch = {"carries": problem.carried}
        if problem.parts > 1:
            of_scratch |= {"adjoints": rows * channels * states, "sizes": rows * channels}
        #: Of each part of the scratch memory, where it starts, and how many numbers it has.
        self._scratch: dict[str, tuple[int, int]] = {}
        end = 0
        for name, count in of_scratch.items():
            if count:
                self._scratch[name] = end, count
                end += -(-count // 64) * 64  # a kernel stores several numbers at once
        self._new_scratch = allocator(device, (end,))

    def put(self, tensors: dict[str, Any]) -> Sums:
        """Add new tensors by the names of the kernels' pointers. Returns those that are summed up."""
        for name, new in self._new.items():
            tensors[name] = new()
        tensors["A_grad"] = A = self._A()
        tensors["B_grad"] = projections = self._projections()
        tensors["C_grad"] = Address(projections.data_ptr() + self._second)
        vectors = scratch = None
        if self._vectors:
            vectors = self._new_vectors()
            first, size = vectors.data_ptr(), 4 * vectors.stride(0)
            for number, name in enumerate(self._vectors):
                tensors[name] = Address(first + number * size)
        if self._scratch:
            scratch = self._new_scratch()
            first = scratch.data_ptr()
            for name, (start, _) in self._scratch.items():
                tensors[name] = Address(first + 4 * start)
        return Sums(A, projections, vectors, scratch)

    def views(self, sums: Sums) -> dict[str, Tensor]:
        """All parts, as tensors by the names of the kernels' pointers."""
        tensors = {"A_grad": sums.A, "B_grad": sums.projections[0], "C_grad": sums.projections[1]}
        if sums.vectors is not None:
            tensors |= dict(zip(self._vectors, sums.vectors.unbind(), strict=True))
        for name, (start, count) in self._scratch.items():
            assert sums.scratch is not None
            tensors[name] = sums.scratch[start : start + count]
        return tensors


def shared_shape(
    arguments: Arguments, problem: SelectiveScanProblem, shapes: Arguments
) -> Sequence[int] | None:
    """That of B's gradient and of C's, if the kernel writes as many numbers of each."""
    of_B, groups = shapes.B.shape, {problem.groups, arguments.B.shape[1], arguments.C.shape[1]}
    return of_B if of_B == shapes.C.shape and len(groups) == 1 else None


def finisher(
    arguments: Arguments,
    problem: SelectiveScanProblem,
    wanted: tuple[bool, ...],
    shapes: Arguments,
    buffers: GradientBuffers,
) -> Callable[[dict[str, Any], Sums], Gradients]:
    """Makes the gradients that are wanted of what the kernels wrote."""
    pairs = zip(wanted, arguments.differentiable, strict=True)
    needed = tuple(want and tensor is not None for want, tensor in pairs)
    for_A, for_B, for_C, for_D, for_bias = (needed[i] for i in (2, 3, 4, 5, 7))
    groups = arguments.B.shape[1], arguments.C.shape[1]
    of_B, of_C = shapes.B.shape, shapes.C.shape
    alike = shared_shape(arguments, problem, shapes) is not None
    dtype, narrow = arguments.u.dtype, arguments.u.dtype != torch.float32
    new_both = allocator(arguments.u.device, (2, *of_B), dtype)
    several_rows, several_ctas = bool(buffers.rows), bool(buffers.ctas)

    def of_projections(both: Tensor) -> tuple[Tensor, ...]:
        if several_ctas:
            both = both.sum(1)
        if alike:
            return (new_both().copy_(both) if narrow else both).unbind()
        B_grad = _of_groups(both[0], groups[0]).to(dtype).view(of_B)
        return B_grad, _of_groups(both[1], groups[1]).to(dtype).view(of_C)

    def of_vectors(vectors: Tensor) -> tuple[Tensor | None, Tensor]:
        grads = (vectors.sum(1) if several_rows else vectors).unbind()
        return grads[0] if for_D else None, grads[-1]

    def finish(tensors: dict[str, Any], sums: Sums) -> Gradients:
        A_grad = B_grad = C_grad = D_grad = bias_grad = None
        if for_A:
            A_grad = sums.A.sum(0) if several_rows else sums.A
        if for_B or for_C:
            B_grad, C_grad = of_projections(sums.projections)
        if for_D or for_bias:
            assert sums.vectors is not None
            D_grad, bias_grad = of_vectors(sums.vectors)
        return (
            tensors["u_grad"] if needed[0] else None,
            tensors["delta_grad"] if needed[1] else None,
            A_grad,
            B_grad if for_B else None,
            C_grad if for_C else None,
            D_grad,
            tensors["z_grad"] if needed[6] else None,
            bias_grad if for_bias else None,
            tensors["initial_grad"] if needed[8] else None,
        )

    return finish


def _of_groups(gradient: Tensor, groups: int) -> Tensor:
    """Summed over those that share one of fewer groups."""
    if gradient.shape[1] == groups:
        return gradient
    total: Tensor = gradient.unflatten(1, (groups, -1)).sum(2)
    return total
