"""Gated scans as their papers write them: float64 loops in torch's plainest operators, which share no code with the
package, and what to try them on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from scan_registry.kernels.gated_scan.kinds import KINDS


def sigmoid(x: Tensor) -> Tensor:
    return torch.where(x > 0, 1 / (1 + torch.exp(-x.abs())), 1 - 1 / (1 + torch.exp(-x.abs())))


def _g(x: Tensor) -> Tensor:
    return torch.where(x >= 0, x + 0.5, 1 / (1 + torch.exp(-x.clamp(max=0))))


def _min_gru(gate: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    z = torch.sigmoid(gate)
    return 1 - z, z * hidden


def _min_lstm(forget: Tensor, input: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    f, i = torch.sigmoid(forget), torch.sigmoid(input)
    return f / (f + i), i / (f + i) * hidden


def _rg_lru(x: Tensor, r: Tensor, i: Tensor, a_param: Tensor) -> tuple[Tensor, Tensor]:
    a = torch.exp(-8 * torch.sigmoid(r) * torch.log(1 + torch.exp(a_param)))
    return a, (1 - a**2) ** 0.5 * torch.sigmoid(i) * x


def _hgrn(x: Tensor, forget: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    g = torch.log(bound + (1 - bound) * torch.sigmoid(forget))
    return torch.exp(g), (1 - torch.exp(g)) * x * torch.sigmoid(x)


Formula = tuple[int, int, Callable[..., tuple[Tensor, Tensor]]]
#: By kind: how many sequences there are, how many values of channels, and what is made of one step's.
WRITTEN: dict[str, Formula] = {
    "linear": (2, 0, lambda gates, tokens: (gates, tokens)),
    "min_gru": (2, 0, lambda gate, hidden: _min_gru(gate, _g(hidden))),
    "min_gru_identity": (2, 0, _min_gru),
    "min_lstm": (3, 0, lambda f, i, hidden: _min_lstm(f, i, _g(hidden))),
    "min_lstm_identity": (3, 0, _min_lstm),
    "rg_lru": (3, 1, _rg_lru),
    "hgrn": (2, 1, _hgrn),
}
#: A kind whose formula nobody wrote down here is tested with its entry in ``KINDS``.
FORMULAS: dict[str, Formula] = {
    name: WRITTEN.get(name, (len(kind.inputs), len(kind.parameters), kind.gates))
    for name, kind in KINDS.items()
}


def value_input(kind: str) -> int:
    """The number of the first sequence whose infinite values make tokens that are not finite."""
    count, parameters, formula = FORMULAS[kind]
    for number in range(count):
        inputs = [torch.tensor(0.5, dtype=torch.float64) for _ in range(count + parameters)]
        inputs[number].fill_(torch.inf)
        _, token = formula(*inputs)
        if not token.isfinite():
            return number
    raise AssertionError(f"no sequence of {kind} makes its tokens infinite")


def first_states(
    initial: Tensor | None, size: tuple[int, int, int], dim: int, cu_seqlens: Tensor | None
) -> Tensor:
    """Of ``size``: batch, sequences and channels."""
    batch, sequences, channels = size
    state = torch.zeros((), dtype=torch.float64) if initial is None else initial.double()
    if cu_seqlens is None:
        return state.expand(batch, channels).unsqueeze(1)
    if dim % 3 == 1:
        return state.expand(size)
    return state.expand(batch, channels, sequences).transpose(1, 2)


def loop(
    kind: str, *tensors: Tensor, initial_state: Tensor | None = None, reset: Tensor | None = None,
    dim: int = -1, reverse: bool = False, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """States and final states in float64."""
    count, _, formula = FORMULAS[kind]
    wide = [t.double() for t in tensors]
    sequences = [x if dim % 3 == 1 else x.transpose(1, 2) for x in wide[:count]]
    batch, time, channels = sequences[0].shape
    bounds = [0, time] if cu_seqlens is None else cu_seqlens.tolist()
    before = first_states(initial_state, (batch, len(bounds) - 1, channels), dim, cu_seqlens)
    states: dict[int, Tensor] = {}
    ends = []
    for number, (begin, end) in enumerate(pairwise(bounds)):
        h = before[:, number]
        for t in reversed(range(begin, end)) if reverse else range(begin, end):
            gate, token = formula(*(x[:, t] for x in sequences), *wide[count:])
            if reset is None:
                h = gate * h + token
            else:
                anew = reset[:, t, None]
                if kind == "rg_lru":  # without the root
                    x, _, i = (x[:, t] for x in sequences)
                    token = torch.where(anew, torch.sigmoid(i) * x, token)
                h = torch.where(anew, 0, gate * torch.where(anew, 0, h)) + token
            states[t] = h
        ends.append(h)
    every = torch.stack([states[t] for t in range(time)], 1) if time else sequences[0]
    last = ends[0] if cu_seqlens is None else torch.stack(ends, 1)
    if dim % 3 == 1:
        return every, last
    return every.transpose(1, 2), last if cu_seqlens is None else last.transpose(1, 2)


@dataclass(frozen=True)
class Call:
    """Arguments of a gated scan."""

    kind: str
    tensors: tuple[Tensor, ...]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def leaves(self) -> list[Tensor]:
        """What wants a gradient."""
        initial = self.options.get("initial_state")
        return [t for t in (*self.tensors, initial) if t is not None and t.requires_grad]


def drawn(
    kind: str,
    shape: tuple[int, int, int] = (2, 5, 9),
    dtype: torch.dtype = torch.float64,
    *,
    dim: int = -1,
    initial: bool = False,
    resets: bool = False,
    packed: bool = False,
    reverse: bool = False,
) -> Call:
    """Random ones, of batch, channels and time as in ``shape``, that want gradients."""
    batch, channels, time = shape
    count, parameters, _ = FORMULAS[kind]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    lying = (batch, time, channels) if dim % 3 == 1 else shape
    tensors = [torch.randn(lying, dtype=dtype) for _ in range(count)]
    if kind == "linear":
        tensors[0] = tensors[0].sigmoid()
    tensors += [torch.rand(channels, dtype=wide) for _ in range(parameters)]
    bounds = torch.tensor([0, time // 3, time // 3, time]) if packed else None
    between = (3,) if packed else ()
    of_state = (batch, *between, channels) if dim % 3 == 1 else (batch, channels, *between)
    options: dict[str, Any] = {
        "initial_state": torch.randn(of_state, dtype=wide).requires_grad_() if initial else None,
        "reset": torch.rand(batch, time) < 0.3 if resets else None,
        "dim": dim,
        "reverse": reverse,
        "cu_seqlens": bounds,
    }
    return Call(kind, tuple(t.requires_grad_() for t in tensors), options)
