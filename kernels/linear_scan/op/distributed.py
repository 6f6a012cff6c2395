"""``linear_scan`` of a sequence whose time is cut between the ranks of a group."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from scan_registry.base.symbols import same_shape
from scan_registry.dispatch.select import Backend
from scan_registry.distributed import group as groups
from scan_registry.distributed import opening, parts, reduce
from scan_registry.distributed.group import Members, untraced
from scan_registry.distributed.headers import Terms
from scan_registry.distributed.reduce import Call, Tensors
from scan_registry.kernels.linear_scan.op import distributed_summary as summary
from scan_registry.kernels.linear_scan.op.arguments import Options, check_tensors, normalised
from scan_registry.kernels.linear_scan.op.autograd import first_derivative
from scan_registry.kernels.linear_scan.op.autograd import scan as local_scan
from scan_registry.kernels.linear_scan.op.distributed_derivatives import differentiable
from scan_registry.kernels.linear_scan.op.function import linear_scan as scan_of_one
from scan_registry.kernels.linear_scan.op.stretches import batch_dim, reset_shape
from scan_registry.kernels.linear_scan.reference import compute_dtype, state_shape
from scan_registry.ops.checks import check_initial_state, check_reset

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from scan_registry.distributed.group import Group
    from scan_registry.kernels.linear_scan.op.function import LinearScanOptions


__all__ = ["linear_scan", "scan"]

#: Bits of a local number: the rank wants gradients of gates, or of tokens or the initial state.
_GATES, _REST = 1, 2
#: The tensors of a call in their order here.
_TENSORS = ("gates", "tokens", "initial_state", "cu_seqlens", "reset")


# fmt: off
@overload
def linear_scan(
    gates: Tensor, tokens: Tensor, initial_state: Tensor | None = None, *,
    return_final_state: Literal[False] = False,
    group: Group = None, **options: Unpack[LinearScanOptions],
) -> Tensor: ...
@overload
def linear_scan(
    gates: Tensor, tokens: Tensor, initial_state: Tensor | None = None, *,
    return_final_state: Literal[True],
    group: Group = None, **options: Unpack[LinearScanOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_scan(
    gates: Tensor, tokens: Tensor, initial_state: Tensor | None = None, *,
    return_final_state: bool,
    group: Group = None, **options: Unpack[LinearScanOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on


def linear_scan(
    gates: Tensor,
    tokens: Tensor,
    initial_state: Tensor | None = None,
    *,
    group: Group = None,
    dim: int = -1,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_final_state: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """States of x[t] = gates[t] * x[t-1] + tokens[t] along a time dimension that is cut between the ranks of a group.

    Each rank holds a contiguous part of time, in rank order. A part may have any length, including 0. Every rank of the
    group has to make the call. If any rank's tensors require gradients, every rank has to run a backward pass through its
    own results; a rank without a loss of its own runs ``(states.sum() * 0).backward()``. States and gradients are those of
    ``scan_registry.linear_scan`` over the whole sequence, up to rounding, for the sum of all ranks' losses.

    Args:
        gates: this rank's part, as for ``scan_registry.linear_scan``.
        tokens: this rank's part, as for ``scan_registry.linear_scan``. All dimensions but ``dim`` have the same size on
            every rank. Dtypes and the kind of device are the same, too.
        initial_state: the state before the whole sequence (after it, with ``reverse``), or before each packed sequence.
            Every rank passes the same values, or every rank None; the values are not compared. The gradient is nonzero
            only on the rank at which a sequence's scan starts. The sum over ranks is the gradient, as of any replicated
            parameter.
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for the default group.
        dim: the time dimension.
        reverse: compute x[t] = gates[t] * x[t+1] + tokens[t] instead, from the last rank to the first.
        cu_seqlens: bounds of sequences that are packed along the time of all ranks: 0, …, the sum of the ranks' lengths.
            The same values on every rank. The CPU reads the values, and waits for the GPU if they are there.
        reset: as for ``scan_registry.linear_scan``, for this rank's steps; a rank without resets may pass None. With several
            ranks the gate is set to zero at such a step, so the state before that step has to be finite.
        return_final_state: also return the state after the last step, or that of each packed sequence.
        backend: as for ``scan_registry.linear_scan``.

    Returns:
        This rank's states, and if asked for the final state, which is the same on every rank. Every rank may use the final
        state in its loss: the ranks' gradients of it are summed. Differentiable in gates, tokens and initial_state, twice.
        For second derivatives, the same tensors have to require gradients on every rank.

    Raises:
        TypeError: a tensor or the group is not of a type or dtype that is accepted.
        ValueError: shapes or options are not accepted, or differ between ranks; the message has those of each rank.
        RuntimeError: there is no process group, or another rank refused its arguments: see ``scan_registry.distributed``.
        NoKernelError: as for ``scan_registry.linear_scan``.
    """
    tensors = gates, tokens, initial_state, cu_seqlens, reset
    return call(tensors, (dim, reverse, return_final_state, backend), group)  # type: ignore[no-any-return]


@untraced
def call(tensors: tuple[Any, ...], how: tuple[Any, ...], group: Any) -> Any:
    """As ``linear_scan``, with tensors and options as ``call_sharded`` takes them."""
    members, options = groups.resolve(group), Options(*how)
    named = dict(zip(_TENSORS, tensors, strict=True))
    opening.check_local(members, "linear_scan", **named)
    if members.size == 1:
        one: Any = scan_of_one
        dim, reverse, final, backend = options
        return one(**named, dim=dim, reverse=reverse, return_final_state=final, backend=backend)
    gates, tokens, initial_state, cu_seqlens, reset = tensors
    if reset is not None:
        with opening.refusals(members, (tokens,)):
            gates = _restarted(gates, tokens, reset, options)
    inputs = gates, tokens, initial_state
    states, final_state = scan(members, inputs, cu_seqlens, options, "linear_scan")
    return states if final_state is None else (states, final_state)


def scan(
    members: Members, tensors: Tensors, cu_seqlens: Any, options: Options, operator: str
) -> tuple[Tensor, Tensor | None]:
    """The states, and if wanted the final state. Every rank has to call this. ``tensors`` are gates, tokens and the initial
    state. ``operator`` names the function that the user calls."""
    prepare = partial(_prepared, members, tensors, cu_seqlens, options, operator)
    return reduce.scan(members, operator, tensors, cu_seqlens, options, prepare)


# --- Arguments --------------------------------------------------------------------------------


def _prepared(
    members: Members, every: Any, cu_seqlens: Any, options: Options, operator: str
) -> Call:
    """The checked arguments, with the terms that ranks compare."""
    gates, tokens, initial_state = every
    check_tensors(gates, tokens, initial_state, cu_seqlens)
    gates, tokens, _, _, options = normalised(gates, tokens, None, None, options)
    bounds = None if cu_seqlens is None else parts.host_bounds(cu_seqlens)
    place, compute = options.dim % tokens.dim(), compute_dtype(tokens.dtype)
    if initial_state is not None:
        shape = state_shape(tokens.shape, place, None if bounds is None else len(bounds) - 1)
        check_initial_state(initial_state, shape, tokens.dtype)
        initial_state = initial_state.to(compute)
        if not same_shape(initial_state.shape, shape):
            initial_state = initial_state.expand(shape)
    sizes: list[Any] = [*tokens.shape]
    sizes[place] = "T"
    recording = torch.is_grad_enabled()
    common = (
        ("shape", f"({', '.join(map(str, sizes))})"),
        ("tokens", str(tokens.dtype).removeprefix("torch.")),
        ("gates", str(gates.dtype).removeprefix("torch.")),
        ("on", tokens.device.type),
        ("reverse", options.reverse),
        ("initial_state", "given" if initial_state is not None else None),
        ("cu_seqlens", None if bounds is None else "given"),
        ("return_final_state", options.final),
        ("gradients", "recorded" if recording else "not recorded"),
    )
    others = tokens.requires_grad or (initial_state is not None and initial_state.requires_grad)
    wants = (_GATES * gates.requires_grad + _REST * others) if recording else 0
    digest, spelled = parts.compared(bounds)
    local = tokens.shape[options.dim], wants
    terms = Terms(operator, common, local, digest=digest, spelled=spelled)
    tensors = gates, tokens, initial_state
    one_state = state_shape(tokens.shape, place, None)

    def run(part: parts.Part, cut: Tensor | None, required: Any) -> Run:
        return Run(
            *(members, terms, options, tuple(tokens.shape), tokens.dtype, tokens.device),
            *(one_state, options.dim, compute, options.final, options.reverse),
            *(bounds, part, cut, required),
        )

    reusable = all(one is other for one, other in zip(tensors, every, strict=True))
    return Call(tensors, bounds, terms, options.reverse, run, reusable)


def _restarted(gates: Any, tokens: Any, reset: Any, options: Options) -> Tensor:
    """The gates, with zeros at the steps of ``reset``."""
    gates, tokens, _, _, options = normalised(gates, tokens, None, None, options)
    rank, dim = tokens.dim(), options.dim
    check_reset(reset, reset_shape(tokens.shape, dim), tokens.device)
    if rank > 1:
        reset = reset.view(*reset.shape, *(1 for _ in range(rank - 2)))
        reset = reset.movedim((0, 1), (batch_dim(rank, dim), dim))
    zeroed: Tensor = gates.masked_fill(reset, 0)
    return zeroed


# --- Passes -----------------------------------------------------------------------------------


class Run(reduce.Run):
    """``tensors`` are gates, tokens and the initial state. The backward pass needs gates, and for the gradient of gates also
    states, the initial state and the states that the part started from."""

    options: Options

    @property
    def _summary_options(self) -> Options:
        dim, reverse, _, backend = self.options
        # No Triton kernel computes summaries.
        return Options(dim, reverse, False, "reference" if backend == "reference" else "auto")

    def summary(self, tensors: Any, row: Tensor) -> None:
        gates, tokens, _ = tensors
        summary.forward_row(row, gates, tokens, self._summary_options, self.part.tail)

    def scan(
        self, tensors: Any, entered: Tensor | None, summary: None, wants: int
    ) -> tuple[Tensor, Tensor | None, Tensors]:
        gates, tokens, initial_state = tensors
        options = self.options._replace(final=self.final and self.sequences is not None)
        states, final_state = local_scan(gates, tokens, entered, self.bounds, options)
        others = (states, initial_state, entered) if wants & _GATES else (None, None, None)
        return states, final_state, (gates, *others)

    def zeros(self, saved: Any) -> Tensor:
        return saved[0].new_zeros((), dtype=self.dtype).expand(self.shape)  # type: ignore[no-any-return]

    def backward_summary(self, saved: Any, out_grad: Tensor, row: Tensor) -> None:
        summary.backward_row(row, saved[0], out_grad, self._summary_options, self.part.head)

    def gradients(
        self, saved: Any, out_grad: Tensor, behind: Tensor | None, summary: None, wanted: Any
    ) -> Tensors:
        gates, states, _, entered = saved
        tensors = gates, states, out_grad, entered, behind, self.bounds
        return first_derivative(tensors, self.options, wanted, self.required)

    def differentiable(
        self, saved: Any, out_grad: Tensor, last_grad: Tensor | None, wanted: Any, number: int
    ) -> Tensors:
        return differentiable(self, saved[:3], out_grad, last_grad, wanted, number)
