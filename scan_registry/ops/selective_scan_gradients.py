"""Memory for what a selective scan's kernels write, and the gradients that are made of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scan_registry.kernels.selective_scan.problem import SelectiveScanProblem
from scan_registry.ops.selective_scan_arguments import Arguments

Gradients = tuple[Tensor | None, ...]

#: What torch's own compiler allocates with, past the dispatcher, on the current device; where this torch has it.
_EMPTY: dict[str, Any] = {
    kind: found
    for kind in ("cpu", "cuda")
    if (found := getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None)) is not None
}


def maker(
    device: torch.device,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    strides: Any = None,
) -> Callable[[], Any]:
    """Makes new tensors of one kind, without gaps unless strides are given, at the least cost."""
    sizes = tuple(shape)
    steps = torch.empty(sizes, device="meta").stride() if strides is None else tuple(strides)
    quickly = _EMPTY.get(device.type)

    def carefully() -> Tensor:
        return torch.empty_strided(sizes, steps, dtype=dtype, device=device)

    if quickly is None:
        return carefully
    if device.type != "cuda":
        return lambda: quickly(sizes, steps, dtype)
    current, here = torch._C._cuda_getDevice, device.index
    return lambda: quickly(sizes, steps, dtype) if current() == here else carefully()


class Address(int):
    """Where something is within a tensor, for those who ask for no more."""

    def data_ptr(self) -> int:
        return self


class GradientBuffers:
    """What a backward pass writes: gradients, and in one tensor all partial sums, those of B beside those of C, and those
    of D beside the bias', so that each pair is summed up at once."""

    def __init__(self, given: Arguments, problem: SelectiveScanProblem) -> None:
        u, device = given.u, given.u.device
        model = torch.empty_like(u, device="meta")
        sequence, initial = maker(device, u.shape, u.dtype, model.stride()), given.initial_state
        self._new = {
            "u_grad": sequence,
            "delta_grad": sequence,
            **({} if given.z is None else {"z_grad": sequence}),
            **({} if initial is None else {"initial_grad": maker(device, initial.shape)}),
        }
        of_part = problem.batch, max(1, problem.sequences), problem.parts, problem.channels
        of_projection = problem.ctas_of_group, *given.B.shape
        groups: list[dict[str, tuple[int, ...]]] = [
            {"A_grad": (*of_part, problem.states)},
            {"B_grad": of_projection, "C_grad": of_projection},
            {"D_grad": of_part} if given.D is not None else {},
            {"carries": (problem.carried,)} if problem.carried else {},
        ]
        if given.delta_bias is not None:
            groups[2]["bias_grad"] = of_part
        if problem.parts > 1:
            groups += [{"adjoints": (*of_part, problem.states)}, {"sizes": of_part}]
        #: Of each part of the tensor of partial sums, the first number and the shape.
        self.places: dict[str, tuple[int, tuple[int, ...]]] = {}
        end = 0
        for group in groups:
            end = -(-end // 64) * 64  # a kernel stores several numbers at once
            for name, shape in group.items():
                self.places[name] = end, shape
                end += math.prod(shape)
        self._sums = maker(device, (end,))
        self._starts = [(name, 4 * start) for name, (start, _) in self.places.items()]

    def put(self, tensors: dict[str, Any]) -> Tensor:
        """Add new tensors by the names of the kernels' pointers. Returns the one of partial sums."""
        for name, new in self._new.items():
            tensors[name] = new()
        sums: Tensor = self._sums()
        first = sums.data_ptr()
        for name, start in self._starts:
            tensors[name] = Address(first + start)
        return sums

    def views(self, sums: Tensor) -> dict[str, Tensor]:
        """Its parts, as tensors."""
        return {
            name: sums[start : start + math.prod(shape)].view(shape)
            for name, (start, shape) in self.places.items()
        }


def finisher(
    given: Arguments,
    problem: SelectiveScanProblem,
    wanted: tuple[bool, ...],
    shapes: Arguments,
    buffers: GradientBuffers,
) -> Callable[[dict[str, Any], Tensor], Gradients]:
    """Makes the gradients that are wanted of what the kernels wrote. Those that are sums get memory of their own, even of
    one term, as what they are summed up of is much larger together."""
    needed = tuple(w and t is not None for w, t in zip(wanted, given.differentiable, strict=True))
    for_A, for_B, for_C, for_D, for_bias = (needed[i] for i in (2, 3, 4, 5, 7))
    channels, states = given.A.shape
    rows = problem.batch * max(1, problem.sequences) * problem.parts
    vectors = (given.D is not None) + (given.delta_bias is not None)
    groups = given.B.shape[1], given.C.shape[1]
    of_B, of_C = shapes.B.shape, shapes.C.shape
    alike = of_B == of_C and groups == (problem.groups, problem.groups)
    dtype, narrow = given.u.dtype, given.u.dtype != torch.float32
    # The shape, strides and beginning of each sum's terms.
    ctas, size = problem.ctas_of_group, rows * channels
    whole = of_B if alike else (problem.batch, problem.groups, states, problem.time)
    each = math.prod(whole)
    inner = torch.empty(whole, device="meta").stride()
    of_A = (rows, channels, states), (channels * states, states, 1), buffers.places["A_grad"][0]
    of_both = (2, ctas, *whole), (ctas * each, each, *inner), buffers.places["B_grad"][0]
    new_both = maker(given.u.device, (2, *whole), dtype)
    first = "D_grad" if given.D is not None else "bias_grad"
    of_vectors = (vectors, rows, channels), (size, channels, 1), buffers.places.get(first, (0,))[0]

    def finish(tensors: dict[str, Any], sums: Tensor) -> Gradients:
        A_grad = B_grad = C_grad = D_grad = bias_grad = None
        if for_A:
            A_grad = sums.as_strided(*of_A).sum(0)
        if for_B or for_C:
            both = sums.as_strided(*of_both)
            both = both[:, 0] if ctas == 1 and narrow else both.sum(1)
            if alike:
                B_grad, C_grad = (new_both().copy_(both) if narrow else both).unbind()
            else:
                B_grad = _of_groups(both[0], groups[0]).to(dtype).view(of_B)
                C_grad = _of_groups(both[1], groups[1]).to(dtype).view(of_C)
        if for_D or for_bias:
            found = sums.as_strided(*of_vectors).sum(1).unbind()
            D_grad, bias_grad = found[0] if for_D else None, found[-1]
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
