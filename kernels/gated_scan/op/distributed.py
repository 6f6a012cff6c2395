"""``gated_scan`` of a sequence whose time is cut between the ranks of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from scan_registry.dispatch.select import Backend
from scan_registry.distributed import group as groups
from scan_registry.distributed import opening
from scan_registry.distributed.group import untraced
from scan_registry.kernels.gated_scan.op.arguments import Options, normalised
from scan_registry.kernels.gated_scan.op.composed import gates_and_tokens
from scan_registry.kernels.gated_scan.op.function import run as scan_of_one
from scan_registry.kernels.linear_scan.op.arguments import Options as ScanOptions
from scan_registry.kernels.linear_scan.op.distributed import scan

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from scan_registry.distributed.group import Group
    from scan_registry.kernels.gated_scan.op.function import CommonOptions

    class DistributedOptions(CommonOptions, total=False):
        """What ``gated_scan`` takes by name, beside ``return_final_state`` and ``group``."""

        initial_state: Tensor | None


__all__ = ["gated_scan"]


# fmt: off
@overload
def gated_scan(
    kind: str, *inputs: Tensor,
    return_final_state: Literal[False] = False,
    group: Group = None, **options: Unpack[DistributedOptions],
) -> Tensor: ...
@overload
def gated_scan(
    kind: str, *inputs: Tensor,
    return_final_state: Literal[True],
    group: Group = None, **options: Unpack[DistributedOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def gated_scan(
    kind: str, *inputs: Tensor, return_final_state: bool,
    group: Group = None, **options: Unpack[DistributedOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on


def gated_scan(
    kind: str, *inputs: Tensor, initial_state: Tensor | None = None, reset: Tensor | None = None,
    group: Group = None, dim: int = -1, reverse: bool = False, cu_seqlens: Tensor | None = None,
    return_final_state: bool = False, backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """States of h[t] = gate[t]·h[t-1] + token[t] along a time dimension that is cut between the ranks of a group.

    ``kind`` says how gate and token follow from the inputs, as in ``scan_registry.gated_scan``. Ranks, parts, gradients and
    errors are as in ``scan_registry.distributed.linear_scan``. With several ranks, torch's operators compute gates and tokens
    in float32 or float64, and the backward pass keeps them: the fused kernels of ``scan_registry.gated_scan`` are not used.

    Args:
        kind: as for ``scan_registry.gated_scan``.
        inputs: this rank's part of the sequences, as for ``scan_registry.gated_scan``. Channel parameters are the same on
            every rank; the sum of the ranks' gradients is their gradient.
        reset: (batch, time) and bool, for this rank's steps, or None. True where a state starts anew. With several ranks
            the gate is set to zero at such a step, so the state before that step has to be finite.
        group, initial_state, cu_seqlens: as for ``scan_registry.distributed.linear_scan``.
        dim: the time dimension, -1 or 2, or 1 or -2.
        reverse: compute h[t] = gate[t]·h[t+1] + token[t] instead, from the last rank to the first.
        return_final_state: also return the state after the last step, or that of each packed sequence.
        backend: as for ``scan_registry.gated_scan``. With several ranks ``"reference"`` is passed on to the scan, and any
            other value means ``"auto"``.

    Returns:
        This rank's states, in the dtype of the sequences, and if asked for the final state, which is the same on every rank.
        Differentiable in all tensors but ``reset`` and ``cu_seqlens``, twice.

    Raises:
        TypeError, ValueError, NoKernelError: as for ``scan_registry.gated_scan``.
        TypeError, ValueError, RuntimeError: for the group and for other ranks, as for ``scan_registry.distributed.linear_scan``.
    """
    tensors = *inputs, initial_state, cu_seqlens, reset
    return call(tensors, (kind, dim, reverse, return_final_state, backend), group)  # type: ignore[no-any-return]


@untraced
def call(tensors: tuple[Any, ...], how: tuple[Any, ...], group: Any) -> Any:
    """As ``gated_scan``, with tensors and options as ``call_sharded`` takes them."""
    members, options = groups.resolve(group), Options(*how)
    inputs, (initial_state, cu_seqlens, reset) = tensors[:-3], tensors[-3:]
    named = {f"inputs[{number}]": x for number, x in enumerate(inputs)}
    others = {"initial_state": initial_state, "reset": reset, "cu_seqlens": cu_seqlens}
    opening.check_local(members, "gated_scan", **named, **others)
    if members.size == 1:
        return scan_of_one(options.kind, inputs, reset, initial_state, cu_seqlens, options)
    with opening.refusals(members, inputs):
        arguments, options = normalised(options.kind, inputs, reset, None, None, options)
        gates, tokens = gates_and_tokens(arguments, options)
        if reset is not None:
            along = reset.unsqueeze(-1 if options.dim == -2 else -2)
            gates = gates.masked_fill(along, 0)
    backend = "reference" if options.backend == "reference" else "auto"
    how = ScanOptions(options.dim, options.reverse, options.final, backend)
    dtype = arguments.inputs[0].dtype
    # Gates and tokens may be wider than the sequences, whose dtype has to be compared, too.
    operator = f"gated_scan {options.kind} of {str(dtype).removeprefix('torch.')}"
    tensors = gates, tokens, initial_state
    states, final_state = scan(members, tensors, cu_seqlens, how, operator)
    states = states.to(dtype)
    return states if final_state is None else (states, final_state)
