"""``gated_scan`` composed of torch's operators, which compute gates and tokens, and of ``linear_scan``.

This runs what no kernel takes: tensors on the CPU, float64, derivatives of derivatives, forward mode and ``torch.func``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.linear_scan.reference import compute_dtype
from scan_registry.ops import arguments, derivatives, resets
from scan_registry.ops.gated_scan_arguments import Arguments, Options


def forward(given: Arguments, options: Options) -> tuple[Tensor, Tensor | None]:
    """States and, if asked for, the final state, of ``normalised`` arguments."""
    gates, tokens = gates_and_tokens(given, options)
    backend = "reference" if options.backend == "reference" else "auto"
    how = arguments.Options(options.dim, options.reverse, options.final, backend)
    states_before = given.initial_state, given.cu_seqlens
    if given.reset is None:
        states, last = derivatives.scan(gates, tokens, *states_before, how)
    else:
        states, last = resets.scan(gates, tokens, given.reset, *states_before, how)
    return states.to(given.inputs[0].dtype), last


def gates_and_tokens(given: Arguments, options: Options) -> tuple[Tensor, Tensor]:
    """Of the linear scan, in the dtype of the computation. Where states start anew, the gate is anything."""
    compute = compute_dtype(given.inputs[0].dtype)
    inputs = [x.to(compute) for x in given.inputs]
    of_channels = [p if options.dim == -2 else p.unsqueeze(-1) for p in given.parameters]
    reset = given.reset
    if reset is not None:
        reset = reset.unsqueeze(-1 if options.dim == -2 else -2)
    gates, tokens = KINDS[options.kind].gates(*inputs, *of_channels, reset=reset)
    return gates, tokens.expand(given.inputs[0].shape)


def backward(
    given: Arguments,
    options: Options,
    states_grad: Tensor | None,
    last_grad: Tensor | None,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The gradients that are wanted, of what is differentiable. They are differentiable themselves where derivatives are
    recorded. Gates and tokens are computed once more, so that no pass keeps them for another."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves: list[Any] = [
            t if t is None or (again and t.requires_grad) else t.detach().requires_grad_(want)
            for t, want in zip(given.differentiable, wanted, strict=True)
        ]
        count = len(given.inputs)
        inputs = given._replace(
            inputs=tuple(leaves[:count]),
            parameters=tuple(leaves[count:-1]),
            initial_state=leaves[-1],
        )
        asked_for = [t for t, want in zip(leaves, wanted, strict=True) if want and t is not None]
        made = forward(inputs, options._replace(final=last_grad is not None))
        pairs = [
            (x, g.to(x.dtype))
            for x, g in zip(made, (states_grad, last_grad), strict=True)
            if x is not None and g is not None and x.requires_grad
        ]
        found = iter(
            torch.autograd.grad(
                [x for x, _ in pairs],
                asked_for,
                [g for _, g in pairs],
                create_graph=again,
                materialize_grads=True,
            )
            if pairs and asked_for
            else [torch.zeros_like(t) for t in asked_for]
        )
    return tuple(
        next(found) if want and t is not None else None
        for t, want in zip(leaves, wanted, strict=True)
    )
