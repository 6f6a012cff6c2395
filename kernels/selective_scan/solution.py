"""What the kernels are to compute of a problem, in float64: outputs, gradients, and what they hand on to each other.

Derivatives are written out, so that all steps are computed at once but for the recurrence itself, which is one operation
of torch a step. ``reference.py``, which torch differentiates, takes a hundred times as long; a test compares the two.
Tensors are as in ``problem.py``, states with a dimension of sequences. In this module steps come first, (L, B, D) and
(L, B, D, N), so that what is read of a step lies together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from scan_registry.kernels.selective_scan.problem import INTERVAL
from scan_registry.kernels.selective_scan.reference import step_sizes

Span = tuple[int, int]


@dataclass(frozen=True)
class Solution:
    """results      ``out``, ``final_state`` and gradients, by name
    adjoints     what each part of a sequence but its first hands on, (B, S, parts, D, N)
    sizes        the sums of δ over them, (B, S, parts, D)
    part_states  what each part but the last hands on, in the forward pass; and part_sizes
    checkpoints  the states before every INTERVAL steps, as the forward kernel leaves them, in float32
    terms        of gradients that are sums over batch and time, the roots of the sums of their terms' squares
    """

    results: dict[str, Tensor]
    adjoints: Tensor
    sizes: Tensor
    part_states: Tensor
    part_sizes: Tensor
    checkpoints: Tensor
    terms: dict[str, Tensor]


@torch.no_grad()
def solve(inputs: Mapping[str, Tensor | None], softplus: bool, parts: int) -> Solution:
    """The solution of a problem with real ``A``, whose sequences are cut into ``parts``. Tensors that may be null may
    be None; without ``cu_seqlens``, states have one sequence."""
    u, delta, B, C, out_grad = (
        _steps_first(inputs, name) for name in ("u", "delta", "B", "C", "out_grad")
    )
    A, bias = _double(inputs, "A"), inputs["delta_bias"]
    z = None if inputs["z"] is None else _steps_first(inputs, "z")
    skip = None if inputs["D"] is None else _double(inputs, "D")
    cu_seqlens = inputs["cu_seqlens"]
    time, batch, channels = u.shape
    spans = [*pairwise([0, time] if cu_seqlens is None else cu_seqlens.tolist())]
    inward, outward = _of_channels(B, channels), _of_channels(C, channels)

    sizes = step_sizes(delta.transpose(1, 2), bias, softplus).transpose(1, 2)
    gates = torch.exp(sizes.unsqueeze(-1) * A)
    tokens = (sizes * u).unsqueeze(-1) * inward
    of_states = len(spans), batch, *A.shape
    initial = _state(inputs, "initial_state", of_states)
    states, finals = _scan(gates, tokens, initial, spans)

    y = (states * outward).sum(-1)
    if skip is not None:
        y = y + skip * u
    opened = None if z is None else functional.silu(z)
    y_grad = out_grad if opened is None else out_grad * opened

    sources = y_grad.unsqueeze(-1) * outward
    arriving = _state(inputs, "final_grad", of_states)
    reaching, initial_grad = _scan_back(gates, sources, arriving, spans)
    # Of each state, its gradient times the gate and the state before it: d(δ·A).
    exponent_grad = states - tokens
    exponent_grad *= reaching
    token_grad = (reaching * inward).sum(-1)
    delta_grad = (exponent_grad * A).sum(-1) + u * token_grad
    if softplus:  # the sigmoid of what δ is the softplus of
        delta_grad = delta_grad * -torch.expm1(-sizes)

    u_grad = sizes * token_grad
    results = {
        "out": y if opened is None else y * opened,
        "u_grad": u_grad if skip is None else u_grad + skip * y_grad,
        "delta_grad": delta_grad,
    }
    if z is not None:
        open_ = torch.sigmoid(z)
        results["z_grad"] = out_grad * y * open_ * (1 + z * (1 - open_))
    outputs = {name: x.permute(1, 2, 0).contiguous() for name, x in results.items()}
    summands = {"A_grad": exponent_grad * sizes.unsqueeze(-1)}
    if skip is not None:
        summands["D_grad"] = y_grad * u
    if bias is not None:
        summands["bias_grad"] = delta_grad
    sums, terms = _summed(summands)
    outputs |= sums
    outputs |= {
        "final_state": finals.transpose(0, 1).contiguous(),
        "B_grad": _of_groups(reaching, sizes * u, B.shape[2]),
        "C_grad": _of_groups(states, y_grad, C.shape[2]),
        "initial_grad": initial_grad.transpose(0, 1).contiguous(),
    }
    handed_on = (
        *_handed_on(gates, sources, sizes, spans, parts, forwards=False),
        *_handed_on(gates, tokens, sizes, spans, parts, forwards=True),
    )
    return Solution(outputs, *handed_on, _checkpoints(states, initial, spans), terms)


# --- Tensors, steps first ---------------------------------------------------------------------


def _double(inputs: Mapping[str, Tensor | None], name: str) -> Tensor:
    tensor = inputs[name]
    assert tensor is not None, name
    return tensor.double()


def _steps_first(inputs: Mapping[str, Tensor | None], name: str) -> Tensor:
    return _double(inputs, name).movedim(-1, 0).contiguous()


def _state(inputs: Mapping[str, Tensor | None], name: str, shape: Sequence[int]) -> Tensor:
    """One for each sequence, (S, B, D, N); zeros if there is none."""
    if inputs[name] is None:
        return torch.zeros(*shape, dtype=torch.float64)
    return _double(inputs, name).transpose(0, 1)


def _summed(summands: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Their sums over steps and batches, and the root sum squares."""
    sums = {name: x.sum((0, 1)) for name, x in summands.items()}
    return sums, {name: x.square().sum((0, 1)).sqrt() for name, x in summands.items()}


def _of_channels(projection: Tensor, channels: int) -> Tensor:
    """(L, B, G, N) as (L, B, D, N)."""
    return projection.repeat_interleave(channels // projection.shape[2], 2)


def _of_groups(states: Tensor, factors: Tensor, groups: int) -> Tensor:
    """Sums over a group's channels, (B, G, N, L)."""
    products = states * factors.unsqueeze(-1)
    sums: Tensor = products.unflatten(2, (groups, -1)).sum(3)
    return sums.permute(1, 2, 3, 0).contiguous()


# --- The recurrence ---------------------------------------------------------------------------


def _scan(
    gates: Tensor, tokens: Tensor, initial: Tensor, spans: Sequence[Span]
) -> tuple[Tensor, Tensor]:
    """x[t] = gates[t]·x[t-1] + tokens[t] of each sequence, and the last ones."""
    states, finals = torch.empty_like(tokens), initial.clone()
    steps = [*zip(tokens.unbind(), gates.unbind(), states.unbind(), strict=True)]
    for number, (begin, end) in enumerate(spans):
        state = initial[number]
        for token, gate, out in steps[begin:end]:
            state = torch.addcmul(token, gate, state, out=out)
        finals[number] = state
    return states, finals


def _scan_back(
    gates: Tensor, sources: Tensor, arriving: Tensor, spans: Sequence[Span]
) -> tuple[Tensor, Tensor]:
    """x[t] = sources[t] + gates[t+1]·x[t+1] of each sequence, where what arrives is added to the last step; and what
    leaves before the first one."""
    reaching, leaving = torch.empty_like(sources), arriving.clone()
    steps = [*zip(sources.unbind(), gates.unbind(), reaching.unbind(), strict=True)]
    for number, (begin, end) in enumerate(spans):
        state, later = arriving[number], torch.ones_like(arriving[number])
        for source, gate, out in reversed(steps[begin:end]):
            state, later = torch.addcmul(source, later, state, out=out), gate
        leaving[number] = later * state
    return reaching, leaving


# --- What kernels hand on to each other -------------------------------------------------------


def _handed_on(
    gates: Tensor,
    sources: Tensor,
    sizes: Tensor,
    spans: Sequence[Span],
    parts: int,
    *,
    forwards: bool,
) -> tuple[Tensor, Tensor]:
    """With nothing arriving at their ends: what leaves before the first step of each part of a sequence but its first, or
    ``forwards`` after the last step of each but its last; and the sums of δ."""
    _, batch, channels, states = gates.shape
    leaving = gates.new_zeros(batch, len(spans), parts, channels, states)
    sums = gates.new_zeros(batch, len(spans), parts, channels)
    nothing = gates.new_zeros(1, batch, channels, states)
    for number, (begin, end) in enumerate(spans):
        steps = -(-(end - begin) // (INTERVAL * parts)) * INTERVAL
        for part in range(parts - 1) if forwards else range(1, parts):
            first, last = (min(end, begin + place * steps) for place in (part, part + 1))
            own = slice(first, last)
            scan = _scan if forwards else _scan_back
            _, left = scan(gates[own], sources[own], nothing, [(0, last - first)])
            leaving[:, number, part] = left[0]
            sums[:, number, part] = sizes[own].sum(0)
    return leaving, sums


def _checkpoints(states: Tensor, initial: Tensor, spans: Sequence[Span]) -> Tensor:
    time, batch, channels, count = states.shape
    slots = time // INTERVAL + len(spans)
    kept = torch.zeros(batch, slots, channels, count, dtype=torch.float32)
    for number, (begin, end) in enumerate(spans):
        for place, step in enumerate(range(begin, end, INTERVAL)):
            before = initial[number] if step == begin else states[step - 1]
            kept[:, begin // INTERVAL + number + place] = before
    return kept
