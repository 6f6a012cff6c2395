"""Scans that write into existing memory, such as some channels of a larger tensor.

A scan in pieces then moves no more bytes than a scan of all channels. Where no kernel can write into the memory (the reference,
or gates whose gradient is a sum), results are computed in new tensors and copied. Arguments are as ``normalised`` makes them.
Nothing here is recorded for derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scan_registry.dispatch import policy
from scan_registry.dispatch.fit import Tier
from scan_registry.kernels.linear_scan.problem import (
    Direction,
    LinearScanProblem,
    common_alignment,
)
from scan_registry.ops import plans
from scan_registry.ops.arguments import Options
from scan_registry.ops.derivatives import unobserved
from scan_registry.ops.launching import plan_cache
from scan_registry.ops.layout import arrange
from scan_registry.ops.linear_scan_summary import linear_scan_summary
from scan_registry.ops.problems import (
    StateLayout,
    as_new,
    make_summary_call,
    packed_sequences,
    state_strides,
)

Gradients = tuple["Tensor | None", "Tensor | None", "Tensor | None"]


def forward_into(
    states: Tensor,
    gates: Tensor,
    tokens: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    options: Options,
) -> Tensor | None:
    """Write the states, and return the final state if ``options`` asks for it."""
    tensors = gates, tokens, initial_state, cu_seqlens, states
    last: Tensor | None = plan_cache.run(_plan_forward, tensors, options)
    return last


def backward_into(
    gates_grad: Tensor | None,
    tokens_grad: Tensor | None,
    gates: Tensor,
    states: Tensor | None,
    states_grad: Tensor,
    initial_state: Tensor | None,
    final_state_grad: Tensor | None,
    cu_seqlens: Tensor | None,
    options: Options,
    required: Tier | None = None,
    *,
    add: bool = False,
) -> Tensor:
    """Write the gradients of gates and tokens into the given tensors, and return that of the initial state.

    ``gates_grad`` has the shape of ``gates``. With ``add`` the gradient is added to ``gates_grad``, which may then have any
    dtype: pieces that share broadcast gates add their parts of the sum. ``required`` is the tier that ``require`` allowed in
    the forward pass.
    """
    given = gates, states, states_grad, initial_state, final_state_grad, cu_seqlens
    tensors = *given, gates_grad, tokens_grad
    found: Tensor
    if policy.required.get() is required:
        found = plan_cache.run(_plan_backward, tensors, options, add)
    else:
        with policy.as_required(required):
            found = plan_cache.run(_plan_backward, tensors, options, add)
    return found


def summary_into(row: Tensor, gates: Tensor, tokens: Tensor, options: Options) -> None:
    """Write the summary into a vector: the products of gates, then the last states from zero, in the order of a state."""
    if unobserved(gates, tokens):
        plan_cache.run(_plan_summary, (gates, tokens, row), options)
        return
    dim, reverse, _, backend = options
    found = linear_scan_summary(gates, tokens, dim=dim, reverse=reverse, backend=backend)  # type: ignore[arg-type]
    for place, made in zip(row.chunk(2), found, strict=True):
        place.view(made.shape).copy_(made)


# --- Plans ------------------------------------------------------------------------------------


def _plan_summary(
    gates: Tensor, tokens: Tensor, row: Tensor, options: Options
) -> Callable[..., None]:
    room, count = StateLayout.of(tokens, options.dim, None), row.numel() // 2

    def copied(gates: Tensor, tokens: Tensor, row: Tensor) -> None:
        found = plans.summary(gates, tokens, options)
        for place, made in zip(row.view(2, *room.shape), found, strict=True):
            place.copy_(made)

    in_order = room.strides == torch.empty(room.shape, device="meta").stride()
    # Each half is a tensor of its own to a kernel, and starts where new tensors start.
    aligned = row.data_ptr() % 16 == 0 and count * row.element_size() % 16 == 0
    if tokens.numel() == 0 or tokens.is_cpu or options.backend == "reference":
        return copied
    call = make_summary_call(gates, tokens, options.dim, options.reverse)
    run = plans.runner(call.problem, tokens.device, options.backend)
    if not callable(run) or call.copied or not in_order or not aligned:
        return copied
    launch = run

    def plan(gates: Tensor, tokens: Tensor, row: Tensor) -> None:
        halves = {"final_gate": row[:count], "final_state": row[count:]}
        launch({"gates": gates, "tokens": tokens, **halves})

    return plan


def _plan_forward(
    gates: Tensor,
    tokens: Tensor,
    _: Any,
    cu_seqlens: Tensor | None,
    states: Tensor,
    options: Options,
) -> Callable[..., Tensor | None]:
    room = StateLayout.of(tokens, options.dim, cu_seqlens)
    problem = _problem("forward", gates, (tokens, states), (tokens, states), cu_seqlens, options)
    run = None if problem is None else plans.runner(problem, tokens.device, options.backend)
    if not callable(run):

        def copied(
            gates: Tensor, tokens: Tensor, initial: Any, bounds: Any, states: Tensor
        ) -> Tensor | None:
            made, last = plans.forward(gates, tokens, initial, bounds, options)
            states.copy_(made)
            return last

        return copied
    launch = run

    def plan(
        gates: Tensor, tokens: Tensor, initial: Any, bounds: Any, states: Tensor
    ) -> Tensor | None:
        entering = room.entering(initial)
        last = room.leaving(entering) if options.final else None
        launch(
            {
                "gates": gates,
                "tokens": tokens,
                "states": states,
                "initial_state": entering,
                "final_state": last,
                "offsets": bounds,
            }
        )
        return last

    return plan


def _plan_backward(
    gates: Tensor,
    states: Tensor | None,
    states_grad: Tensor,
    _: Any,
    __: Any,
    cu_seqlens: Tensor | None,
    gates_grad: Tensor | None,
    tokens_grad: Tensor | None,
    options: Options,
    add: bool,
) -> Callable[..., Tensor]:
    model = states_grad if states is None else states
    grads = [each for each in (gates_grad, tokens_grad) if each is not None]
    room = StateLayout.of(model, options.dim, cu_seqlens)
    run: Any = None
    alike = all(each.shape == model.shape for each in (gates, *grads))
    if grads and alike and not add and len({each.stride() for each in grads}) == 1:
        strided = (model, states_grad, grads[0])
        problem = _problem(
            "backward", gates, strided, (model, states_grad, *grads), cu_seqlens, options
        )
        if problem is not None:
            run = plans.runner(problem, model.device, options.backend)
    if not callable(run):

        def copied(
            gates: Tensor, states: Any, grad: Tensor, initial: Any, last_grad: Any, bounds: Any,
            gates_grad: Any, tokens_grad: Any,
        ) -> Tensor:  # fmt: skip
            wanted = (gates_grad is not None, tokens_grad is not None, True)
            found = plans.backward(gates, states, grad, initial, last_grad, bounds, options, wanted)
            if gates_grad is not None:
                (gates_grad.add_ if add else gates_grad.copy_)(found[0])
            if tokens_grad is not None:
                tokens_grad.copy_(found[1])
            assert found[2] is not None
            return found[2]

        return copied
    launch = run

    def plan(
        gates: Tensor, states: Any, grad: Tensor, initial: Any, last_grad: Any, bounds: Any,
        gates_grad: Any, tokens_grad: Any,
    ) -> Tensor:  # fmt: skip
        entering = room.entering(last_grad)
        leaving = room.leaving(entering)
        launch(
            {
                "gates": gates,
                "states": None if gates_grad is None else states,
                "states_grad": grad,
                "initial_state": room.entering(initial),
                "final_state_grad": entering,
                "gates_grad": gates_grad,
                "tokens_grad": tokens_grad,
                "initial_state_grad": leaving,
                "offsets": bounds,
            }
        )
        return leaving

    return plan


def _problem(
    direction: Direction,
    gates: Tensor,
    strided: Sequence[Tensor],
    aligned: Sequence[Tensor],
    cu_seqlens: Tensor | None,
    options: Options,
) -> LinearScanProblem | None:
    """The kernel problem of these tensors without copies; None if no kernel takes their strides, or if they are empty.

    strided  the tensors besides the gates whose strides a kernel takes, in the kernels' order
    aligned  the tensors besides the gates whose addresses decide the alignment
    """
    model = strided[0]
    if model.numel() == 0 or options.backend == "reference":
        return None
    dim = options.dim % model.dim()
    broadcast = gates if gates.shape == model.shape else gates.expand(model.shape)
    tensors = (broadcast, *strided)
    state = state_strides(as_new(model), dim, cu_seqlens)
    arranged = arrange(model.shape, dim, [each.stride() for each in tensors], [state])
    if arranged is None:
        return None
    return LinearScanProblem(
        direction=direction,
        dtype=str(model.dtype).removeprefix("torch."),
        gates_dtype=str(gates.dtype).removeprefix("torch."),
        alignment=common_alignment(each.data_ptr() for each in (gates, *aligned)),
        sequences=packed_sequences(cu_seqlens),
        reverse=options.reverse,
        **vars(arranged),
    )
