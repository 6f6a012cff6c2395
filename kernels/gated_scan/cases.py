"""Random problems for the gated_scan kernels; ``selftest`` and ``tools/attest.py`` run them.

What to expect is computed in float64: gate and token by the kind's line of ``kinds.py``, and the scan over them by the reference
of ``linear_scan``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from scan_registry.base.alignment import common_alignment
from scan_registry.kernels import cases
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.gated_scan import problem as problems
from scan_registry.kernels.gated_scan.kinds import KINDS, Kind
from scan_registry.kernels.linear_scan import reference

#: Largest ‖out − ref‖ / ‖ref‖ of a binary that counts as GPU-tested.
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}

#: (batch, channels, time).
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Setting(cases.Options):
    """The options of a problem.

    states   whether there are states before the scan, and gradients of those after it
    packed   whether sequences are packed along time, empty ones among them
    resets   whether the state starts anew at some steps
    extreme  whether inputs are so large that most gates are 0 or 1
    """

    states: bool = False
    reverse: bool = False
    packed: bool = False
    resets: bool = False
    extreme: bool = False


SETTINGS = (
    Setting(),
    Setting(states=True),
    Setting(reverse=True),
    Setting(states=True, resets=True),
    Setting(states=True, reverse=True, resets=True),
    Setting(packed=True),
    Setting(states=True, packed=True, resets=True),
    Setting(states=True, packed=True, reverse=True),
    Setting(states=True, extreme=True),
)
#: Of a quick check and of an attestation.
QUICK: tuple[Shape, ...] = ((2, 5, 200), (3, 33, 257), (2, 64, 512), (1, 8, 2100), (2, 48, 1))
SMALL = QUICK
THOROUGH: tuple[Shape, ...] = (
    *((1, 1, 1), (1, 7, 2), (6, 13, 3), (300, 100, 1), (50, 500, 16), (16, 64, 31)),
    *((4, 257, 127), (2, 1536, 128), (8, 129, 129), (4, 16, 509), (2, 96, 512), (2, 520, 1023)),
    *((8, 64, 1024), (4, 65, 1025), (2, 128, 2048), (2, 31, 4099), (1, 256, 8192), (1, 16, 32752)),
)

_KERNELS: dict[str, tuple[problems.Layout, problems.Direction]] = {
    f"{layout}_{direction}": (layout, direction)
    for layout in problems.LAYOUTS
    for direction in problems.DIRECTIONS
}
_INPUTS = tuple(f"input{n}" for n in range(problems.MOST_INPUTS))
_INPUT_GRADS = tuple(f"{name}_grad" for name in _INPUTS)
_SEQUENCES = (*_INPUTS, *_INPUT_GRADS, "states", "states_grad")
#: What each direction writes.
OUTPUTS: dict[problems.Direction, tuple[str, ...]] = {
    "forward": ("states", "final_state"),
    "backward": (*_INPUT_GRADS, "parameters_grad", "initial_state_grad"),
}
#: Of states, the sequence that they are steps of, and the state that sequences without steps leave as it is.
_SEQUENCE_OF = {"final_state": "states", "initial_state_grad": "input0_grad"}
_ENTERING = {"final_state": "initial_state", "initial_state_grad": "final_state_grad"}


@dataclass(frozen=True)
class Case(cases.Case):
    """With the terms of its trial."""

    problem: problems.GatedScanProblem
    terms: dict[str, Tensor]

    def error_of(self, name: str, out: Tensor, expected: Tensor) -> float:
        """States are steps of a sequence, and may be few of them."""
        whole = out.double().sum(0) if name == "parameters_grad" else out
        among = self.expected.get(_SEQUENCE_OF.get(name, ""))
        return relative_error(whole, expected, among, self.terms.get(name))


@dataclass(frozen=True)
class Trial:
    """Inputs of one problem in one dtype, and the results in float64. Sequences are (batch, channels, time), states
    (batch, channels), or (batch, channels, sequences) where sequences are packed. A gradient sums a part through the gate and
    one through the token; a parameter's gradient also sums over steps. ``terms`` has the root sum square of these terms."""

    shape: Shape
    kind: str
    setting: Setting
    dtype: str
    inputs: dict[str, Tensor | None]
    expected: dict[str, Tensor]
    terms: dict[str, Tensor]

    def __str__(self) -> str:
        return f"{self.kind} {self.shape} {self.setting}".strip()

    def launches(self, kernel: str) -> Iterator[Case]:
        """All that ``kernel`` can compute this by; at last with the first output alone wanted."""
        yield from (self.case(kernel, aligned=aligned) for aligned in (True, False))
        yield self.case(kernel, aligned=True, alone=True)

    def case(self, kernel: str, *, aligned: bool, alone: bool = False) -> Case:
        """The launch of ``kernel`` that computes this; unless ``aligned``, in memory with gaps."""
        layout, direction = _KERNELS[kernel]
        kind, (batch, channels, time) = KINDS[self.kind], self.shape
        outputs = OUTPUTS[direction][: 1 if alone else None]
        expected = {name: self.expected[name] for name in outputs if name in self.expected}
        read = {*problems.POINTERS[direction]} - {*OUTPUTS[direction]}
        tensors: dict[str, Tensor | None] = {
            name: _placed(name, tensor, layout, aligned)
            for name, tensor in self.inputs.items()
            if tensor is not None and name in read
        }
        strides = {
            "inputs": _strides(tensors["input0"]),
            "state": _strides(self.expected["final_state"]),
        }
        problem = problems.GatedScanProblem(
            direction=direction,
            layout=layout,
            dtype=self.dtype,
            gates_dtype=self.dtype,
            outer=1,
            batch=batch,
            channels=channels,
            time=time,
            strides=(),
            alignment=16,
            sequences=self._sequences,
            reverse=self.setting.reverse,
            kind=kind.source,
            option=kind.option,
            resets=self.setting.resets,
        )
        for name, value in expected.items():
            tensors[name] = self._poisoned(name, value, problem, aligned)
        placed = {n: t for n, t in tensors.items() if n in _SEQUENCES and t is not None}
        for name in ("states", "states_grad"):
            strides[name] = _strides(placed.get(name))
        strides["grads"] = _strides(placed.get("input0_grad"))
        reset = tensors.get("reset")
        whole = replace(
            problem,
            strides=tuple(strides[name] for name in problems.STRIDED[direction]),
            alignment=common_alignment(t.data_ptr() for t in placed.values()),
            reset_batch=0 if reset is None else reset.stride(0),
        )
        return Case(whole, tensors, expected, self.terms)

    @property
    def _sequences(self) -> int:
        offsets = self.inputs["offsets"]
        return 0 if offsets is None else len(offsets) - 1

    def _poisoned(
        self, name: str, like: Tensor, problem: problems.GatedScanProblem, aligned: bool
    ) -> Tensor:
        """Room for an output, full of NaN. Parts of a sum are zeros, as a launch may make fewer; final states of empty
        sequences are the initial ones, and so with their gradients, which the kernels leave alone."""
        if name in _SEQUENCES:
            full = torch.full_like(like, torch.nan, dtype=getattr(torch, self.dtype))
            return _placed(name, full, problem.layout, aligned)
        if name == "parameters_grad":
            return torch.zeros(problem.most_parts, *like.shape, device=like.device)
        out = torch.full_like(like, torch.nan, dtype=torch.float32)
        offsets = self.inputs["offsets"]
        if offsets is not None:
            entering, empty = self.inputs[_ENTERING[name]], offsets.diff() == 0
            out[..., empty] = 0 if entering is None else entering[..., empty]
        return out


def _strides(tensor: Tensor | None) -> problems.Strides:
    if tensor is None:
        return problems.Strides(0, 0, 0, 0)
    batch, channel, *between = tensor.stride()
    return problems.Strides(0, batch, channel, *(between or [0]))


def _placed(name: str, tensor: Tensor, layout: problems.Layout, aligned: bool) -> Tensor:
    """Of a sequence, a copy with the layout's dimension contiguous; unless ``aligned``, off the 16-byte grid and with gaps
    between its rows, other ones than those of sequences of other strides. The same of a reset, along time."""
    if name == "reset":
        return cases.with_gaps(tensor, 0 if aligned else 5)
    if name not in _SEQUENCES:
        return tensor
    gaps = {"states": 5, "states_grad": 9} | dict.fromkeys(_INPUT_GRADS, 7)
    return cases.placed(tensor, layout == "channel_last", 0 if aligned else gaps.get(name, 3))


# --- Drawing ----------------------------------------------------------------------------------


def draw(
    shape: Shape, kind_name: str, setting: Setting, dtype: str, device: torch.device | str
) -> Trial:
    """Fresh random inputs, drawn and solved in float64 on the CPU: only the kernels under test run on ``device``."""
    kind, (batch, channels, time) = KINDS[kind_name], shape
    narrow = getattr(torch, dtype)
    size = 12 if setting.extreme else 1.5
    sequences = {name: (size * torch.randn(shape)).to(narrow) for name in kind.inputs}
    if "gates" in sequences:  # given, and not to grow
        sequences["gates"] = (1 - torch.rand(shape) ** 3).to(narrow)
    offsets = cases.random_cu_seqlens(time) if setting.packed else None
    of_state = (batch, channels) if offsets is None else (batch, channels, len(offsets) - 1)
    initial, final_grad = torch.randn(2, *of_state).unbind() if setting.states else (None, None)
    # The parameter of RG-LRU makes gates from 0.3 on at the slowest; a lower bound is from 0 to 1.
    parameters = [
        torch.rand(channels) * (0.9 if n == "lower_bound" else 2) for n in kind.parameters
    ]
    inputs: dict[str, Tensor | None] = {
        **dict(zip(_INPUTS, sequences.values(), strict=False)),
        "parameters": torch.stack(parameters) if parameters else None,
        "reset": torch.rand(batch, time) < 0.1 if setting.resets else None,
        "initial_state": initial,
        "states_grad": torch.randn(shape).to(narrow),
        "final_state_grad": final_grad,
        "offsets": offsets,
    }
    expected, terms = solved(kind, inputs, setting.reverse)
    if not setting.states:
        expected.pop("initial_state_grad")
    # The backward pass gets the states as they were rounded.
    inputs["states"] = expected["states"].to(narrow)
    return Trial(
        shape,
        kind_name,
        setting,
        dtype,
        cases.on_device(inputs, device),
        cases.on_device(expected, device),
        cases.on_device(terms, device),
    )


def trials(dtype: str, shapes: tuple[Shape, ...], device: torch.device | str) -> Iterator[Trial]:
    """A setting for each shape and kind, all in turn: as many shapes as there are settings have every kind with each."""
    settings = cycle(SETTINGS)
    for shape in shapes:
        for kind in KINDS:
            yield draw(shape, kind, next(settings), dtype, device)


# --- Solving ----------------------------------------------------------------------------------


def solved(
    kind: Kind, inputs: dict[str, Tensor | None], reverse: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Every output of both directions in float64, by the kernels' pointer names; and for each gradient of an input or a
    parameter the root sum square of the terms that it sums. The initial state's gradient is returned even without an
    initial state."""
    sequences = [t.double() for n in _INPUTS if (t := inputs.get(n)) is not None]
    parameters, reset = inputs["parameters"], inputs["reset"]
    # A parameter's copy for each step has the terms of the parameter's gradient.
    of_channels = [] if parameters is None else [*parameters.double().unbind()]
    of_steps = [p[:, None].expand_as(sequences[0]).clone() for p in of_channels]
    leaves = [leaf.requires_grad_() for leaf in (*sequences, *of_steps)]
    with torch.enable_grad():
        gate, token = kind.gates(*leaves, reset=None if reset is None else reset[:, None])
        gate, token = torch.broadcast_tensors(gate, token)
    gates = gate.detach() if reset is None else gate.detach().masked_fill(reset[:, None], 0)
    how: dict[str, Any] = {"reverse": reverse, "cu_seqlens": inputs["offsets"]}
    states, final_state = reference.forward(gates, token.detach(), inputs["initial_state"], **how)
    states_grad = cases.there(inputs["states_grad"]).double()
    of_states = inputs["initial_state"], inputs["final_state_grad"]
    grads_of_scan = reference.backward(gates, states, states_grad, *of_states, **how)
    gate_grad, token_grad, initial_grad = grads_of_scan
    if reset is not None:
        gate_grad = gate_grad.masked_fill(reset[:, None], 0)
    # What reaches each leaf through the gate, and through the token: the two may cancel.
    parts = [
        torch.autograd.grad(
            by, leaves, grad, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        for by, grad in ((gate, gate_grad), (token, token_grad))
    ]
    grads = [
        through_gate + through_token for through_gate, through_token in zip(*parts, strict=True)
    ]
    sizes = [
        through_gate.hypot(through_token)
        for through_gate, through_token in zip(*parts, strict=True)
    ]
    expected = {
        "states": states,
        "final_state": final_state,
        "initial_state_grad": initial_grad,
        **dict(zip(_INPUT_GRADS, grads[: len(sequences)], strict=False)),
    }
    terms = dict(zip(_INPUT_GRADS, sizes[: len(sequences)], strict=False))
    if of_channels:
        expected["parameters_grad"] = torch.stack(grads[len(sequences) :]).sum((1, 3))
        of_steps_terms = torch.stack(sizes[len(sequences) :])
        terms["parameters_grad"] = of_steps_terms.square().sum((1, 3)).sqrt()
    return expected, terms
