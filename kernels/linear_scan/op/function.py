"""``linear_scan``: x[t] = gates[t] * x[t-1] + tokens[t], differentiable, on any device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from scan_registry.base.environment import flag
from scan_registry.dispatch.select import BACKENDS, Backend
from scan_registry.kernels.linear_scan.op.arguments import Options, normalised
from scan_registry.kernels.linear_scan.op.autograd import fast_scan, scan
from scan_registry.kernels.linear_scan.op.layout import TotalCall
from scan_registry.kernels.linear_scan.op.problems import (
    StateLayout,
    make_kernel_call,
    make_reduction_call,
)
from scan_registry.kernels.linear_scan.op.totals import total_problem
from scan_registry.ops import operator
from scan_registry.ops.operator import describes
from scan_registry.ops.sharded import call_sharded

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class LinearScanOptions(TypedDict, total=False):
        """What ``linear_scan`` takes by name, beside ``return_final_state``."""

        dim: int
        reverse: bool
        cu_seqlens: Tensor | None
        reset: Tensor | None
        backend: Backend


__all__ = ["BACKENDS", "describe", "linear_scan"]

# What torch compiles is not to see the rest of the fast path; what it traces otherwise is told there.
_is_compiling = torch.compiler.is_dynamo_compiling


# fmt: off
@overload
def linear_scan(
    gates: Tensor, tokens: Tensor, initial_state: Tensor | None = None, *,
    return_final_state: Literal[False] = False, **options: Unpack[LinearScanOptions],
) -> Tensor: ...
@overload
def linear_scan(
    gates: Tensor, tokens: Tensor, initial_state: Tensor | None = None, *,
    return_final_state: Literal[True], **options: Unpack[LinearScanOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_scan(
    gates: Tensor, tokens: Tensor, initial_state: Tensor | None = None, *,
    return_final_state: bool, **options: Unpack[LinearScanOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on


def linear_scan(
    gates: Tensor,
    tokens: Tensor,
    initial_state: Tensor | None = None,
    *,
    dim: int = -1,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_final_state: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """States of the linear recurrence x[t] = gates[t] * x[t-1] + tokens[t] along ``dim``.

    A state has the shape of the states without ``dim``; with ``cu_seqlens``, that shape with ``dim``
    counting sequences.

    Args:
        gates: broadcasts with ``tokens`` to one shape. A gate that is broadcast (a decay per channel,
            say) is read once, and its gradient summed up without one for every element.
        tokens: float32, bfloat16, float16, float64 or complex64, on the CPU complex128 too. Gates may
            differ in dtype: float32 gates with narrower tokens are read as they are; other mixes are
            converted first, without loss. float64 goes with float64 only.
        initial_state: x[-1], or with ``reverse`` x[T]: broadcasts to the state's shape; zero if None.
        dim: the time dimension. It decides which kernel runs only through its stride: where time has
            stride 1, or another dimension has (as for a (B, T, D) tensor with ``dim=1``), the same one
            in both tensors, nothing is copied, but for few long columns that no fast kernel takes as
            they lie. Otherwise one of them is copied first. ``explain`` tells of copies.
        reverse: compute x[t] = gates[t] * x[t+1] + tokens[t] instead.
        cu_seqlens: (sequences + 1,), int32 or int64, on the device of ``tokens``: where sequences that
            are packed along ``dim`` begin, and where the last one ends: 0, …, T. Each starts from its
            own initial state. Empty ones are allowed. Reading them would wait for the GPU: values that
            do not rise from 0 to T are refused on the CPU, and under ``SCAN_REGISTRY_DEBUG=1`` on a
            GPU; else the states are of no use, but nothing outside the tensors is touched.
        reset: bool, (batch, time), batch being the first dimension that is not time; (time,) if there is no other. The
            state starts anew at such a step: what is before it, with ``reverse`` after it in time, counts as zero,
            even if it is infinite or NaN.
        return_final_state: return the state after the last step, too.
        backend: ``"auto"`` takes the best binary installed for this GPU; ``"cuda"`` and ``"triton"``
            pin a language; ``"reference"`` is plain torch on any device.

    Returns:
        The states, in the dtype of ``tokens`` (complex if gates are), and if asked for the final
        state. The recurrence is computed in float32 for the narrow dtypes, else in the dtype itself,
        and so are final states. Differentiable in gates, tokens and initial_state, any number of
        times, in both modes; the first derivative is one kernel, two where gates are broadcast. As in
        every parallel scan, products of neighbouring gates are formed: where one, or a state, exceeds
        the dtype's range, states after it may be infinite or NaN even if the recurrence is not. Gates
        with ``|gate| <= 1`` are always safe.

    Raises:
        TypeError: an argument is not a tensor, or a dtype is not supported or does not mix.
        ValueError: shapes do not broadcast, devices differ, or ``dim``, ``cu_seqlens`` or ``backend``
            is out of range.
        NoKernelError: ``require``, ``SCAN_REGISTRY_REQUIRE`` or ``backend`` allows nothing that runs
            on this GPU; the message lists what there is.
        ProviderError: an installed package of archives does not go with this version.
        DriverError: the driver failed; the message names the kernel, its variant and the launch.

    Warns:
        FallbackWarning: once per kernel, where it is compiled here or plain torch stands in for it.
    """
    if (
        reset is None
        and not _is_compiling()
        and not profiler._is_profiler_enabled
        and forward_ad._current_level < 0
        and (cu_seqlens is None or not flag("SCAN_REGISTRY_DEBUG"))
        and (
            outputs := fast_scan(
                (gates, tokens, initial_state, cu_seqlens),
                (dim, reverse, return_final_state, backend),
            )
        )
        is not None
    ):
        return outputs  # type: ignore[no-any-return]
    how = dim, reverse, return_final_state, backend
    tensors = gates, tokens, initial_state, cu_seqlens, reset
    if (sharded := call_sharded("linear_scan", tensors, how)) is not None:
        return sharded  # type: ignore[no-any-return]
    options = Options(dim, reverse, return_final_state, backend)
    arguments = normalised(gates, tokens, initial_state, cu_seqlens, options)
    if reset is None:
        states, final_state = scan(*arguments)
    else:
        from scan_registry.kernels.linear_scan.op import resets as linear_scan_resets

        gates, tokens, *others = arguments
        states, final_state = linear_scan_resets.scan(gates, tokens, reset, *others)  # type: ignore[arg-type]
    return states if final_state is None else (states, final_state)


@describes(linear_scan)
def describe(call: Any) -> Mapping[str, operator.KernelCall]:
    """The problems that a call of ``linear_scan`` with these arguments poses, by direction; those of
    derivatives only if they are asked for. With ``reset`` they are those of ``gated_scan``, if it has kernels for such
    numbers. Nothing is computed."""
    options = Options(call.dim, call.reverse, call.return_final_state, call.backend)
    differentiable, reset = (call.gates, call.tokens, call.initial_state), call.reset
    tensors = normalised(*differentiable, call.cu_seqlens, options)
    gates, tokens, initial_state, cu_seqlens, options = tensors
    wanted = [tensor is not None and tensor.requires_grad for tensor in differentiable]
    if reset is not None:
        from scan_registry.kernels.linear_scan.op import resets as linear_scan_resets

        linear_scan_resets.check(reset, tokens, options)
    if tokens.numel() == 0:
        return {}
    if reset is not None:
        if not tokens.is_cpu and linear_scan_resets.has_kernels(gates, tokens):
            fused = reset, initial_state, cu_seqlens, options, any(wanted)
            return linear_scan_resets.describe(gates, tokens, *fused)
        from scan_registry.kernels.linear_scan.op import stretches as resets

        gates, tokens, cu_seqlens, options = resets.stretches(tokens, options)
        initial_state = None  # it becomes part of tokens
    how = cu_seqlens, options.dim, options.reverse
    has_states = initial_state is not None or options.final
    forward = make_kernel_call("forward", gates, {"tokens": tokens}, *how, has_states)
    calls: dict[str, operator.KernelCall] = {"forward": forward}
    if any(wanted):
        states = torch.empty_like(tokens, device="meta")
        both = {"states": states, "states_grad": states}
        backward = calls["backward"] = make_kernel_call("backward", gates, both, *how, has_states)
        if wanted[0] and gates.shape != tokens.shape:
            reduction = make_reduction_call(gates, states, *how)
            if reduction is not None:
                calls["reduction"] = reduction
            layout = StateLayout.of(states, options.dim, cu_seqlens)
            pieces = backward.problem.sum_pieces()
            problem = total_problem(gates, layout, pieces, options.dim)
            if problem is not None:
                calls["gates_sum"] = TotalCall(problem)
    return calls
