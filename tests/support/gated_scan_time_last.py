"""Problems for the CUDA kernels of gated scan for contiguous time, and what to expect of them in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scan_registry.base.alignment import common_alignment
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.gated_scan import time_last
from scan_registry.kernels.gated_scan.kinds import KINDS, Kind
from scan_registry.kernels.gated_scan.problem import (
    STRIDED,
    Direction,
    GatedScanProblem,
    Strides,
)
from scan_registry.kernels.model import Kernel, Variant

KERNELS = {kernel.name.rpartition("_")[2]: kernel for kernel in time_last.kernels()}
TOLERANCE = {"float32": 3e-6, "float16": 1e-3, "bfloat16": 8e-3}
#: (batch, channels, time): one piece, a tile and a bit, several tiles, and more rows than run at once; rows that are
#: whole pieces and such as are not.
ALIGNED = ((2, 3, 8), (2, 5, 520), (3, 2, 1544), (5, 41, 24))
ODD = ((2, 3, 1), (1, 5, 130), (2, 3, 517), (2, 2, 1291))
#: Elements before and after each sequence, and what they hold.
PAD, AROUND = 4096, 77.0
#: Several segments, more than the CTAs that run at once have room for; and one that is not full.
CUT = ((1, 2, 13_000), (3, 1, 264), (2, 1, 4616), (1, 3, 4104))
#: More segments of float32 than a look-back reads one by one.
MANY = (1, 1, 200_008)


@dataclass(frozen=True)
class Setting:
    """``resets``: which steps start anew, as ``_resets`` has it. ``packed``: sequences along time, some of them empty."""

    states: bool = False
    reverse: bool = False
    resets: str = ""
    packed: bool = False


SETTINGS = (
    Setting(),
    Setting(states=True, reverse=True),
    Setting(states=True, resets="some"),
    Setting(reverse=True, resets="some"),
    Setting(states=True, resets="first"),
    Setting(states=True, resets="last", reverse=True),
    Setting(states=True, resets="all"),
)
PACKED = (
    Setting(packed=True),
    Setting(states=True, packed=True, reverse=True),
    Setting(states=True, packed=True, resets="some"),
    Setting(states=True, packed=True, resets="all", reverse=True),
)


def _resets(which: str, batch: int, time: int) -> Tensor | None:
    if not which:
        return None
    found = torch.rand(batch, time) < {"some": 0.02, "all": 1.0}.get(which, 0.0)
    if which in ("first", "last"):
        found[:, 0 if which == "first" else -1] = True
    return found


@dataclass
class Trial:
    """One scan with its results in float64; what is drawn may be changed before ``solve``."""

    kind: Kind
    dtype: str
    shape: tuple[int, int, int]
    setting: Setting
    tensors: dict[str, Tensor | None] = field(default_factory=dict)
    expected: dict[str, Tensor] = field(default_factory=dict)

    def draw(self) -> Trial:
        narrow, (batch, channels, time) = getattr(torch, self.dtype), self.shape
        for n in range(len(self.kind.inputs)):
            self.tensors[f"input{n}"] = torch.randn(self.shape).to(narrow)
        if self.kind.name == "linear":
            self.tensors["input0"] = (1 - torch.rand(self.shape) ** 3).to(narrow)
        number = len(self.kind.parameters)
        self.tensors["parameters"] = torch.rand(number, channels) if number else None
        self.tensors["reset"] = _resets(self.setting.resets, batch, time)
        self.tensors["offsets"] = _offsets(time) if self.setting.packed else None
        self.tensors["states_grad"] = torch.randn(self.shape).to(narrow)
        states = (batch, channels, *([self.sequences] if self.sequences else []))
        for name in ("initial_state", "final_state_grad"):
            self.tensors[name] = torch.randn(states) if self.setting.states else None
        return self

    @property
    def sequences(self) -> int:
        offsets = self.tensors["offsets"]
        return 0 if offsets is None else len(offsets) - 1

    def spans(self) -> Iterator[tuple[slice, Any]]:
        """The steps of each sequence, and where its states are; of empty ones, too."""
        offsets = self.tensors["offsets"]
        if offsets is None:
            yield slice(0, self.shape[2]), ...
            return
        for number in range(self.sequences):
            yield slice(int(offsets[number]), int(offsets[number + 1])), (..., number)

    def solve(self) -> Trial:
        given = [self._wide(f"input{n}") for n in range(len(self.kind.inputs))]
        parameters = self._wide("parameters") if self.kind.parameters else torch.empty(0)
        leaves = [each.requires_grad_() for each in (*given, parameters)]
        reset = self.tensors["reset"]
        wide_reset = None if reset is None else reset[:, None, :]
        # An own parameter for each batch, as the kernels' sums have.
        own = parameters[None].expand(self.shape[0], *parameters.shape)
        rows = [own[:, p, :, None] for p in range(len(self.kind.parameters))]
        gate, token = self.kind.gates(*given, *rows, reset=wide_reset)
        blocked = torch.zeros(gate.shape, dtype=torch.bool) if reset is None else wide_reset
        blocked = blocked.expand(gate.shape)
        narrow = getattr(torch, self.dtype)
        of_state = self._state("initial_state")
        states, final = torch.empty_like(gate), of_state.clone()
        for span, place in self.spans():
            final[place] = _forward(gate.detach(), token.detach(), blocked, states, of_state[place],
                                    span, self.setting.reverse)  # fmt: skip
        self.tensors.setdefault("states", states.to(narrow))
        rounded, grads = self.tensors["states"].double(), self.tensors["states_grad"].double()
        gate_grad, token_grad = torch.zeros_like(gate), torch.zeros_like(gate)
        after = self._state("final_state_grad")
        before_grad = after.clone()
        for span, place in self.spans():
            before_grad[place] = _backward(gate.detach(), blocked, rounded, grads, of_state[place],
                                           after[place], gate_grad, token_grad, span,
                                           self.setting.reverse)  # fmt: skip
        found = torch.autograd.grad(
            [gate, token], leaves, [gate_grad, token_grad], allow_unused=True
        )
        self.expected = {"states": states, "final_state": final, "initial_state_grad": before_grad}
        self.expected |= {f"input{n}_grad": each for n, each in enumerate(found[:-1])}
        if self.kind.parameters:
            self.expected["parameters_grad"] = found[-1]
        return self

    def _wide(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        assert tensor is not None
        return tensor.double()

    def _state(self, name: str) -> Tensor:
        if self.tensors[name] is not None:
            return self._wide(name).clone()
        sequences = [self.sequences] if self.sequences else []
        return torch.zeros(*self.shape[:2], *sequences, dtype=torch.float64)

    def results(
        self, kernel: Kernel, variant: Variant, library: Any, seed: int
    ) -> dict[str, Tensor] | None:
        """What a launch makes of it, results being NaN before; None if the variant is for others."""
        direction: Direction = "forward" if kernel.name.endswith("forward") else "backward"
        aligned = variant.text("access") == "aligned"
        names = ["states", "final_state"]
        if direction == "backward":
            names = ["initial_state_grad", *(n for n in self.expected if n.startswith("input"))]
        tensors = {name: t for name, t in self.tensors.items() if name not in names}
        for name in names:
            state = name in ("final_state", "initial_state_grad")
            dtype = torch.float32 if state else getattr(torch, self.dtype)
            tensors[name] = torch.full_like(self.expected[name], torch.nan, dtype=dtype)
        offsets = self.tensors["offsets"]
        if offsets is not None:  # what plans make of empty sequences, which kernels leave alone
            empty = offsets.diff() == 0
            name = "final_state" if direction == "forward" else "initial_state_grad"
            tensors[name][..., empty] = self.expected[name][..., empty].float()
        for name, tensor in tensors.items():
            if tensor is not None and tensor.shape == self.shape:
                tensors[name] = _placed(tensor, aligned)
        problem = self._problem(direction, tensors)
        if "parameters_grad" in self.expected and direction == "backward":
            parts = kernel.launch(variant, problem, 3).scalars["parts"]
            shape = (parts, len(self.kind.parameters), self.shape[1])
            tensors["parameters_grad"] = torch.full(shape, torch.nan)
            names = [*names, "parameters_grad"]
        if kernel.rules.accepts(variant, problem) is not None:
            return None
        library.run(problem, tensors, seed=seed)
        found = {name: tensors[name].clone() for name in names}
        for name in names:
            if found[name].shape == self.shape:
                assert _untouched(tensors[name]), name
        if "parameters_grad" in found:
            found["parameters_grad"] = found["parameters_grad"].double().sum(0)
        return found

    def _problem(self, direction: Direction, tensors: dict[str, Any]) -> GatedScanProblem:
        strides = {"inputs": tensors["input0"].stride(), "states": tensors["states"].stride()}
        strides["states_grad"] = tensors["states_grad"].stride()
        if direction == "backward":
            strides["grads"] = tensors["input0_grad"].stride()
        state = torch.empty(*self.shape[:2], *([self.sequences] if self.sequences else [])).stride()
        strides["state"] = (*state, *([] if self.sequences else [0]))
        rows = [t for t in tensors.values() if t is not None and t.shape == self.shape]
        batch, channels, time = self.shape
        reset = tensors["reset"]
        return GatedScanProblem(
            direction=direction,
            layout="time_last",
            dtype=self.dtype,
            gates_dtype=self.dtype,
            outer=1,
            batch=batch,
            channels=channels,
            time=time,
            strides=tuple(Strides(0, *strides[name]) for name in STRIDED[direction]),
            alignment=common_alignment(t.data_ptr() for t in rows),
            sequences=self.sequences,
            reverse=self.setting.reverse,
            kind=self.kind.source,
            option=self.kind.option,
            resets=reset is not None,
            reset_batch=0 if reset is None else reset.stride(0),
        )


def _forward(
    gate: Tensor,
    token: Tensor,
    blocked: Tensor,
    states: Tensor,
    first: Tensor,
    span: slice,
    reverse: bool,
) -> Tensor:
    a, b, stops, out = (each.movedim(-1, 0).numpy() for each in (gate, token, blocked, states))
    x, steps = first.numpy(), range(span.start, span.stop)
    for t in reversed(steps) if reverse else steps:
        x = np.where(stops[t], b[t], a[t] * x + b[t])
        out[t] = x
    return torch.from_numpy(x)


def _backward(
    gate: Tensor,
    blocked: Tensor,
    states: Tensor,
    grads: Tensor,
    initial: Tensor,
    after: Tensor,
    gate_grad: Tensor,
    token_grad: Tensor,
    span: slice,
    reverse: bool,
) -> Tensor:
    several = (gate, blocked, states, grads, gate_grad, token_grad)
    a, stops, x, given, of_gate, of_token = (each.movedim(-1, 0).numpy() for each in several)
    h, steps = after.numpy(), range(span.start, span.stop)
    for t in steps if reverse else reversed(steps):
        source = t + 1 if reverse else t - 1
        before = x[source] if source in steps else initial.numpy()
        of_token[t] = total = given[t] + h
        of_gate[t] = np.where(stops[t], 0.0, total * before)
        h = np.where(stops[t], 0.0, total * a[t])
    return torch.from_numpy(h)


def _offsets(time: int) -> Tensor:
    """Bounds of random sequences, the first and the last of them empty."""
    cuts = torch.randint(0, time + 1, (min(5, time),)).sort().values
    return torch.cat([torch.tensor([0, 0]), cuts, torch.tensor([time, time])])


def _placed(tensor: Tensor, aligned: bool) -> Tensor:
    """A copy of unit stride along time, in the middle of memory that is full of a number; unless ``aligned``, off the
    16-byte grid and with gaps between rows."""
    batch, channels, time = tensor.shape
    gap = 0 if aligned else 3
    size = batch * channels * (time + gap)
    room = torch.full((size + 2 * PAD,), AROUND, dtype=tensor.dtype)
    rows = room[PAD + gap : PAD + gap + size]
    return rows.view(batch, channels, time + gap)[..., :time].copy_(tensor)


def _untouched(tensor: Tensor) -> bool:
    """Whether all that lies around such a copy is as it was; the copy itself is lost."""
    tensor.fill_(AROUND)
    room = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return bool((room == AROUND).all())


def chosen(direction: Direction, dtype: str, header: str, tile: str) -> Variant:
    """The first variant with that tile: whole, cut or generic."""
    for variant in KERNELS[direction].every:
        statics = dict(variant.statics)
        found = "generic" if statics["access"] == "generic" else "whole"
        if (statics["dtype"], statics["kind"]) == (dtype, header) and tile == (
            "cut" if "prefix_lead" in statics else found
        ):
            return variant
    raise LookupError(f"no {tile} tile of {header} in {dtype}")


@cache
def trials(header: str, dtype: str, tile: str) -> tuple[Trial, ...]:
    """Every setting, with the shapes and the kinds of the header in rotation; launches leave them as they are."""
    torch.manual_seed(0)
    kinds = cycle(kind for kind in KINDS.values() if kind.source == header)
    shapes = {"whole": ALIGNED, "cut": CUT, "generic": ODD}[tile]
    settings = (*SETTINGS, *PACKED) if tile == "generic" else SETTINGS
    return tuple(
        Trial(next(kinds), dtype, shape, setting).draw().solve()
        for setting, shape in zip(settings, cycle(shapes))
    )


def check(trial: Trial, found: dict[str, Tensor]) -> None:
    assert set(found) <= set(trial.expected)
    for name, tensor in found.items():
        expected = trial.expected[name]
        of_state = name in ("final_state", "initial_state_grad")
        among = trial.expected["states"] if name == "final_state" else None
        if name == "initial_state_grad":
            among = trial.tensors["states_grad"].double()
        error = relative_error(tensor, expected, among if of_state else None)
        assert error <= TOLERANCE[trial.dtype], (name, trial.kind.name, trial.shape, trial.setting)
