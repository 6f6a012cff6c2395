"""What the kernels are to compute of a problem, in float64: outputs, gradients, and what they hand on to each other.

Derivatives are written out, step by step. The states of one chunk are kept at a time: others are computed again from the state before
their chunk. ``reference.py``, which torch differentiates, keeps all; a test compares the two. Tensors are as in ``problem.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from scan_registry.kernels.ssd_scan.problem import CHUNK
from scan_registry.kernels.ssd_scan.reference import step_sizes

#: Names of the results that have the shape of what they are gradients of, and of that.
_LIKE = {"x_grad": "x", "dt_grad": "dt", "B_grad": "B", "C_grad": "C"}


@dataclass(frozen=True)
class Solution:
    """results  what kernels write, by name; ``head_grads``, ``B_grad`` and ``C_grad`` summed up
    occupied   of each slot, whether it holds a step
    terms      of gradients that are sums over batch and time, the roots of the sums of their terms' squares: of steps, and of
               A of chunks
    """

    results: dict[str, Tensor]
    occupied: Tensor
    terms: dict[str, Tensor]


@torch.no_grad()
def solve(
    inputs: Mapping[str, Tensor | None], softplus: bool, limit: tuple[float, float]
) -> Solution:
    """The solution of a problem. Tensors that may be null may be None; states have a dimension of sequences. ``out_grad`` is
    the gradient of what z gates."""
    return _Problem(inputs, softplus, limit).solution()


class _Problem:
    def __init__(
        self, inputs: Mapping[str, Tensor | None], softplus: bool, limit: tuple[float, float]
    ) -> None:
        self.x, raw, self.A, B, C = (_double(inputs, name) for name in ("x", "dt", "A", "B", "C"))
        self.out_grad, bias, self.D = _double(inputs, "out_grad"), inputs["dt_bias"], inputs["D"]
        self.z = inputs["z"]
        batch, time, heads, size = self.x.shape
        self.of_group = heads // B.shape[2]
        self.B, self.C = (t.repeat_interleave(self.of_group, 2) for t in (B, C))
        self.deltas = step_sizes(raw, bias, softplus, limit, torch.float64)
        self.gates = torch.exp(self.deltas * self.A)
        # Of δ by dt: the sigmoid of what softplus is of, and nothing beyond the limits.
        shifted = raw if bias is None else raw + bias.double()
        free = step_sizes(raw, bias, softplus, (-torch.inf, torch.inf), torch.float64)
        slopes = torch.where(shifted > 20, 1.0, torch.sigmoid(shifted)) if softplus else 1.0
        self.slopes = slopes * ((free >= limit[0]) & (free <= limit[1]))
        cu_seqlens, seq_idx = inputs["cu_seqlens"], inputs["seq_idx"]
        bounds = [0, time] if cu_seqlens is None else cu_seqlens.tolist()
        self.spans = [*pairwise(bounds)]
        self.stays = torch.ones(batch, time, dtype=torch.float64)
        if seq_idx is not None:
            self.stays[:, 1:] = (seq_idx[:, 1:] == seq_idx[:, :-1]).double()
            self.stays[:, [begin for begin, end in self.spans if begin < end]] = 1.0
        of_state = batch, len(self.spans), heads, size, B.shape[3]
        slots = time // CHUNK + len(self.spans)
        self.occupied = torch.zeros(slots, dtype=torch.bool)
        self.results = {
            name: torch.zeros_like(_double(inputs, of)) for name, of in _LIKE.items()
        } | {
            "out": torch.zeros_like(self.x),
            "states": torch.zeros(batch, slots, *of_state[2:], dtype=torch.float64),
            "adjoints": torch.zeros(batch, slots, *of_state[2:], dtype=torch.float64),
            "sequence_decays": torch.ones(of_state[:3], dtype=torch.float64),
            "final_state": _state(inputs, "initial_state", of_state),
            "initial_grad": _state(inputs, "final_grad", of_state),
        }
        # Of chunks, as kernels sum them up: what is computed of a chunk's state enters all of its steps.
        self.A_terms = torch.zeros(batch, slots, heads, dtype=torch.float64)

    def solution(self) -> Solution:
        for number, (begin, end) in enumerate(self.spans):
            chunks = [
                (begin // CHUNK + number + k, first, min(end, first + CHUNK))
                for k, first in enumerate(range(begin, end, CHUNK))
            ]
            decays = (self.gates * self.stays.unsqueeze(-1))[:, begin:end].prod(1)
            self.results["sequence_decays"][:, number] = decays
            state = self.results["final_state"][:, number]
            for slot, first, last in chunks:
                self.occupied[slot] = True
                self.results["states"][:, slot] = state
                state = self._states(state, first, last)[-1]
            self.results["final_state"][:, number] = state
            adjoint = self.results["initial_grad"][:, number]
            for slot, first, last in reversed(chunks):
                self.results["adjoints"][:, slot] = adjoint
                states = self._states(self.results["states"][:, slot], first, last)
                adjoint = self._back(states, adjoint, slot, first, last)
            self.results["initial_grad"][:, number] = adjoint
        results = self.results
        results["dt_grad"] *= self.slopes
        if self.D is not None:
            wide = self.D.dim() == 2
            D = self.D.double() if wide else self.D.double().unsqueeze(-1)
            results["out"] += D * self.x
            results["x_grad"] += D * self.out_grad
        if self.z is not None:
            results["ungated"] = results["out"]
            results["out"] = results["out"] * functional.silu(self.z.double())
        # That of D (H, P) is computed of x and out_grad by whoever asks for it.
        summands = self.A_terms, (self.out_grad * self.x).sum(-1), results["dt_grad"]
        results["head_grads"] = torch.stack([t.sum((0, 1)) for t in summands])
        terms = torch.stack([t.square().sum((0, 1)).sqrt() for t in summands])
        return Solution(results, self.occupied, {"head_grads": terms})

    def _gate(self, t: int) -> Tensor:
        """What the state before step t is multiplied by, (batch, H, 1, 1)."""
        return (self.gates[:, t] * self.stays[:, t, None])[..., None, None]

    def _states(self, state: Tensor, first: int, last: int) -> list[Tensor]:
        """The state before these steps, and that after each of them. The output is written."""
        states = [state]
        for t in range(first, last):
            token = (self.deltas[:, t, :, None] * self.x[:, t]).unsqueeze(-1)
            state = self._gate(t) * state + token * self.B[:, t].unsqueeze(-2)
            self.results["out"][:, t] = (state @ self.C[:, t].unsqueeze(-1)).squeeze(-1)
            states.append(state)
        return states

    def _back(
        self, states: list[Tensor], adjoint: Tensor, slot: int, first: int, last: int
    ) -> Tensor:
        """The gradient of the state before these steps, from that of the state after them. Gradients are written."""
        results = self.results
        for t in reversed(range(first, last)):
            x, B, delta = self.x[:, t], self.B[:, t], self.deltas[:, t, :, None]
            grad, before, after = self.out_grad[:, t], states[t - first], states[t - first + 1]
            adjoint = adjoint + grad.unsqueeze(-1) * self.C[:, t].unsqueeze(-2)
            token_grad = (adjoint @ B.unsqueeze(-1)).squeeze(-1)  # of δ·x
            results["x_grad"][:, t] = delta * token_grad
            results["B_grad"][:, t] = self._of_groups(((delta * x).unsqueeze(-2) @ adjoint).squeeze(-2))  # fmt: skip
            results["C_grad"][:, t] = self._of_groups((grad.unsqueeze(-2) @ after).squeeze(-2))
            exponent_grad = (adjoint * before * self._gate(t)).sum((-1, -2))  # of δ·A
            results["dt_grad"][:, t] = (token_grad * x).sum(-1) + exponent_grad * self.A
            self.A_terms[:, slot] += exponent_grad * self.deltas[:, t]
            adjoint = self._gate(t) * adjoint
        return adjoint

    def _of_groups(self, grads: Tensor) -> Tensor:
        """Summed over the heads of each group."""
        sums: Tensor = grads.unflatten(1, (-1, self.of_group)).sum(2)
        return sums


def _double(inputs: Mapping[str, Tensor | None], name: str) -> Tensor:
    tensor = inputs[name]
    assert tensor is not None, name
    return tensor.double()


def _state(inputs: Mapping[str, Tensor | None], name: str, shape: tuple[int, ...]) -> Tensor:
    """A copy of a state, zeros if there is none."""
    return torch.zeros(shape, dtype=torch.float64) if inputs[name] is None else _double(inputs, name).clone()  # fmt: skip
