"""``ssd_scan`` of a sequence whose time is cut between the ranks of a group.

A part's summary takes no scan: the last state from zeros is a sum over the part's steps, and so is the gradient that a part's
outputs hand on to the state before it. Each sum is a product of matrices.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from scan_registry.dispatch.select import Backend
from scan_registry.distributed import group as groups
from scan_registry.distributed import opening, parts, reduce
from scan_registry.distributed.group import Members, untraced
from scan_registry.distributed.headers import Terms
from scan_registry.distributed.reduce import Call, Tensors
from scan_registry.kernels.ssd_scan import reference
from scan_registry.kernels.ssd_scan.op import composed, gating, plans
from scan_registry.kernels.ssd_scan.op.arguments import (
    DIFFERENTIABLE,
    Arguments,
    Options,
    normalised,
)
from scan_registry.kernels.ssd_scan.op.autograd import OPERATOR
from scan_registry.kernels.ssd_scan.op.function import ssd_scan as scan_of_one
from scan_registry.ops.autograd import Pass

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    from scan_registry.distributed.group import Group

    class DistributedOptions(TypedDict, total=False):
        """What ``ssd_scan`` takes by name alone, beside ``return_final_state`` and ``group``."""

        cu_seqlens: Tensor | None
        chunk_size: int | None
        backend: Backend


__all__ = ["ssd_scan"]

_NO_LIMIT = (0.0, float("inf"))
#: The tensors of a call in their order here.
_NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state")
#: Steps that a summary adds up at a time, so that products in float32 or float64 need little memory.
_STEPS = 4096


# fmt: off
@overload
def ssd_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    dt_bias: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = _NO_LIMIT,
    initial_state: Tensor | None = None, *,
    return_final_state: Literal[False] = False,
    group: Group = None, **options: Unpack[DistributedOptions],
) -> Tensor: ...
@overload
def ssd_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    dt_bias: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = _NO_LIMIT,
    initial_state: Tensor | None = None, *,
    return_final_state: Literal[True],
    group: Group = None, **options: Unpack[DistributedOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def ssd_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    dt_bias: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = _NO_LIMIT,
    initial_state: Tensor | None = None, *,
    return_final_state: bool,
    group: Group = None, **options: Unpack[DistributedOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on


def ssd_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMIT, initial_state: Tensor | None = None, *,
    group: Group = None, cu_seqlens: Tensor | None = None, return_final_state: bool = False,
    chunk_size: int | None = None, backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Mamba-2's state space dual scan along a time dimension that is cut between the ranks of a group.

    The formula is that of ``scan_registry.ssd_scan``. Each rank holds a contiguous part of time, in rank order. A part may have
    any length, including 0. The rules for ranks, gradients and errors are those of ``scan_registry.distributed.linear_scan``.

    Args:
        x, dt, B, C: this rank's part, as for ``scan_registry.ssd_scan``.
        A, D, dt_bias: the same on every rank. The sum of the ranks' gradients is the gradient of such a tensor.
        z: this rank's part, like ``x``, or None for no gate.
        dt_softplus, dt_limit, chunk_size, backend: as for ``scan_registry.ssd_scan``.
        initial_state: the state before the whole sequence, (batch, heads, P, N), or before each packed one, (batch, sequences,
            heads, P, N). Every rank passes the same values, or every rank None; the values are not compared. The gradient is
            nonzero only on the rank at which a sequence's scan starts.
        group, cu_seqlens: as for ``scan_registry.distributed.linear_scan``.
        return_final_state: also return the state after the last step, or that of each packed sequence.

    Returns:
        This rank's output, in the dtype of ``x``, and if asked for the final state, which is the same on every rank.
        Differentiable once, in all floating-point tensors.

    Raises:
        TypeError, ValueError, NoKernelError: as for ``scan_registry.ssd_scan``.
        TypeError, ValueError, RuntimeError: for the group and for other ranks, as for ``scan_registry.distributed.linear_scan``.
        RuntimeError: a second derivative is asked for.
    """
    tensors = x, dt, A, B, C, D, z, dt_bias, initial_state, None, cu_seqlens
    how = dt_softplus, dt_limit, chunk_size, return_final_state, backend
    return call(tensors, how, group)  # type: ignore[no-any-return]


@untraced
def call(every: tuple[Any, ...], options: tuple[Any, ...], group: Any) -> Any:
    """As ``ssd_scan``, with tensors and options as ``call_sharded`` takes them; ``seq_idx`` is None."""
    *tensors, _, cu_seqlens = every
    softplus, limit, chunk_size, final, backend = options
    members = groups.resolve(group)
    opening.check_local(
        members, "ssd_scan", **dict(zip(_NAMES, tensors, strict=True)), cu_seqlens=cu_seqlens
    )
    if members.size == 1:
        one: Any = scan_of_one
        how = {"return_final_state": final, "chunk_size": chunk_size, "backend": backend}
        *first, initial = tensors
        return one(*first, softplus, limit, initial, cu_seqlens=cu_seqlens, **how)
    with opening.refusals(members, tensors):
        arguments, checked, bounds = _normalised(tensors, cu_seqlens, options)
    prepare = partial(_prepared, members, arguments, checked, bounds)
    out, final_state = reduce.scan(
        members, "ssd_scan", arguments[:DIFFERENTIABLE], cu_seqlens, tuple(checked), prepare
    )
    return out if final_state is None else (out, final_state)


# --- Arguments --------------------------------------------------------------------------------


def _normalised(
    tensors: Any, cu_seqlens: Any, options: tuple[Any, ...]
) -> tuple[Arguments, Options, tuple[int, ...] | None]:
    """The checked arguments of this rank's part, and the bounds of packed sequences along the time of all ranks."""
    bounds = parts.host_bounds(cu_seqlens)
    local = parts.local_bounds(bounds, tensors[0], 1)
    every = *tensors, None, local, *options
    arguments, checked = normalised(*every)
    return arguments._replace(cu_seqlens=None), checked, bounds


def _prepared(
    members: Members,
    arguments: Arguments,
    options: Options,
    bounds: tuple[int, ...] | None,
) -> Call:
    """The arguments, with the terms that ranks compare."""
    x, tensors = arguments.x, arguments[:DIFFERENTIABLE]
    terms, state = _terms(arguments, options, bounds), plans.state_shape(arguments)

    def run(part: parts.Part, cut: Tensor | None, required: Any) -> Run:
        return Run(
            *(members, terms, options, tuple(x.shape), x.dtype, x.device),
            *(state, -4, reference.compute_dtype(x.dtype), options.final, False),
            *(bounds, part, None if cut is None else cut.to(torch.int32), required),
        )

    return Call(tensors, bounds, terms, False, run, True)


def _terms(arguments: Arguments, options: Options, bounds: tuple[int, ...] | None) -> Terms:
    """What ranks compare."""
    x, tensors = arguments.x, arguments[:DIFFERENTIABLE]
    batch, time, heads, size = x.shape
    groups_of_heads, states = arguments.B.shape[2:]
    present = {
        "D": arguments.D is not None and arguments.D.dim() == 1,
        "D of (heads, P)": arguments.D is not None and arguments.D.dim() == 2,
        "z": arguments.z is not None,
        "dt_bias": arguments.dt_bias is not None,
    }
    own = (
        ("x", f"({batch}, T, {heads}, {size})"),
        ("B", f"({batch}, T, {groups_of_heads}, {states})"),
        ("dtype", str(x.dtype).removeprefix("torch.")),
        ("on", x.device.type),
        ("with", " ".join(name for name, there in present.items() if there) or None),
        ("dt_softplus", options.softplus),
        ("dt_limit", (options.low, options.high)),
    )
    return parts.terms_of("ssd_scan", own, time, tensors, bounds, options.final)


# --- Passes -----------------------------------------------------------------------------------


class Run(reduce.Run):
    """``tensors`` are the differentiable ``Arguments``. The backward pass needs all of them, with the state before this part in
    place of the initial state, and what ``z`` gates."""

    options: Options

    def summary(self, tensors: Any, row: Tensor) -> None:
        arguments = _steps(tensors, self.part.tail)
        sizes, exponents = self._exponents(arguments)
        to_end = exponents.sum(1, keepdim=True) - exponents.cumsum(1)
        weights = sizes * to_end.to(sizes.dtype).exp()
        _write(row, exponents, _summed(weights, arguments.x, arguments.B))

    def scan(
        self, tensors: Any, entered: Tensor | None, summary: None, wants: int
    ) -> tuple[Tensor, Tensor | None, Tensors]:
        kept = *tensors[:-1], entered
        options = self.options._replace(final=self.final and self.bounds is not None)
        arguments = Arguments._make((*kept, None, self.bounds))
        out, final_states, ungated = plans.forward(arguments, options, bool(wants))
        # No view: users could not change a view that a function returns in place.
        return out.detach(), final_states, (*kept, ungated)

    def backward_summary(self, saved: Any, out_grad: Tensor, row: Tensor) -> None:
        arguments = _steps(saved[:-1], self.part.head)
        sizes, exponents = self._exponents(arguments)
        weights = exponents.cumsum(1).to(sizes.dtype).exp()
        out_grad = _cut(out_grad, self.part.head)
        if arguments.z is not None:
            out_grad = gating.gradient_of_ungated(out_grad, _cut(arguments.z, self.part.head))
        _write(row, exponents, _summed(weights, out_grad, arguments.C))

    def gradients(
        self,
        saved: Any,
        out_grad: Tensor,
        behind: Tensor | None,
        summary: None,
        wanted: tuple[bool, ...],
    ) -> Tensors:
        *tensors, ungated = saved
        exists = tuple(w and t is not None for w, t in zip(wanted, tensors, strict=True))
        options = self.options._replace(final=behind is not None)
        every = *tensors, None, self.bounds, ungated
        back = Pass(every, (out_grad, behind), options, exists)
        return OPERATOR.first_derivative(back, self.required)

    def _exponents(self, arguments: Arguments) -> tuple[Tensor, Tensor]:
        """The step sizes, and in float64 the exponents of the decays, both (batch, time, heads)."""
        limit = self.options.low, self.options.high
        sizes = reference.step_sizes(
            arguments.dt, arguments.dt_bias, self.options.softplus, limit, self.compute
        )
        return sizes, (sizes * arguments.A).double()


def _steps(tensors: Any, steps: parts.Steps | None) -> Arguments:
    """The differentiable arguments of a range of steps; all steps for None."""
    x, dt, A, B, C, *others = tensors
    x, dt, B, C = (_cut(t, steps) for t in (x, dt, B, C))
    return Arguments._make((x, dt, A, B, C, *others, None, None))


def _cut(t: Tensor, steps: parts.Steps | None) -> Tensor:
    return t if steps is None else t[:, steps[0] : steps[1]]


def _summed(weights: Tensor, tokens: Tensor, projection: Tensor) -> Tensor:
    """The sum of weights[t]·tokens[t] ⊗ projection[t] over time, (batch, heads, P, N), from (batch, time, heads), (batch, time,
    heads, P) and (batch, time, groups, N)."""
    batch, time, heads, size = tokens.shape
    count, states = projection.shape[2:]
    total = weights.new_zeros(batch, count, heads // count * size, states)
    with composed.in_full(tokens):
        for begin in range(0, time, _STEPS):
            some = slice(begin, begin + _STEPS)
            scaled = weights[:, some, :, None] * tokens[:, some]
            of_groups = scaled.unflatten(2, (count, heads // count)).flatten(3)
            inward = projection[:, some].to(weights.dtype).transpose(1, 2)
            total += of_groups.permute(0, 2, 3, 1) @ inward
    return total.view(batch, heads, size, states)


def _write(row: Tensor, exponents: Tensor, total: Tensor) -> None:
    """Write the product of decays, for each element of a state, and what is added to it, into a vector."""
    products, totals = row.view(2, *total.shape)
    products.copy_(exponents.sum(1).to(row.dtype).exp()[..., None, None])
    totals.copy_(total)
