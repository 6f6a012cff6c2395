"""Random problems for the selective_scan kernels; ``selftest`` and ``tools/attest.py`` run them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from scan_registry.kernels import cases
from scan_registry.kernels.cases import Options, on_device, relative_error
from scan_registry.kernels.selective_scan import problem as problems
from scan_registry.kernels.selective_scan.solution import solve

#: Largest ‖out − ref‖ / ‖ref‖ of a binary that counts as GPU-tested.
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}

#: (batch, channels, time, states).
Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class Setting(Options):
    """The options of a problem.

    gated     whether there are z, D and delta_bias
    softplus  of the step sizes
    starts    whether there is a state before the scan, and a gradient of the last one
    groups    of channels that have B and C of their own, if the channels can be cut so
    packed    whether sequences are packed along time, one of them empty
    layout    along which dimension the sequences lie without gaps
    """

    gated: bool = True
    softplus: bool = True
    starts: bool = False
    groups: int = 1
    packed: bool = False
    layout: problems.Layout = "time_last"


SETTINGS = (
    Setting(),
    Setting(gated=False, starts=True),
    Setting(layout="channel_last", starts=True),
    Setting(softplus=False, groups=2, starts=True),
    Setting(packed=True, starts=True),
    Setting(gated=False, layout="channel_last", groups=2, packed=True),
)

#: Parts that sequences are cut into, where they are.
PARTS = 3
#: Of a quick check and of an attestation.
QUICK: tuple[Shape, ...] = ((2, 32, 64, 16), (2, 102, 101, 4), (2, 80, 40, 17), (1, 64, 200, 16))
#: One block of states, several and many, each with every setting.
SMALL: tuple[Shape, ...] = (
    *((2, 24, 40, 16),) * 3, *((1, 24, 40, 50),) * 3, *((1, 8, 24, 200),) * 3, *((1, 24, 41, 8),) * 2
)  # fmt: skip
THOROUGH: tuple[Shape, ...] = (
    *((7, 1, 1, 1), (2, 3, 5, 2), (3, 48, 127, 16), (2, 96, 512, 16), (4, 200, 96, 64)),
    *((1, 64, 2053, 16), (1, 10, 333, 256), (8, 1024, 64, 16), (1, 16, 4096, 8), (1, 130, 77, 40)),
    (2, 40, 136, 8),
)

_SEQUENCES = ("u", "delta", "z", "out", "out_grad", "u_grad", "delta_grad", "z_grad")
#: Names of strides whose tensor has another name.
_TENSOR_OF = {"grad": "out_grad"}
#: What each direction writes.
OUTPUTS: dict[problems.Direction, tuple[str, ...]] = {
    "adjoint": ("adjoints", "sizes"),
    "forward": ("out", "final_state"),
    "backward": (
        *("u_grad", "delta_grad", "A_grad", "B_grad", "C_grad"),
        *("D_grad", "z_grad", "bias_grad", "initial_grad"),
    ),
}


def partial_shape(name: str, problem: problems.SelectiveScanProblem) -> tuple[int, ...]:
    """Of a gradient that comes as partial sums, of which those of its dimensions before the last ones are summed."""
    state = problem.batch, max(1, problem.sequences), problem.parts, problem.channels
    if name in ("B_grad", "C_grad"):
        of_projection = problem.batch, problem.groups, problem.states, problem.time
        return (problem.ctas_of_group, *of_projection)
    return (*state, problem.states) if name == "A_grad" else state


#: Gradients that come as partial sums.
_SUMS = ("A_grad", "B_grad", "C_grad", "D_grad", "bias_grad")


def summed(name: str, partial: Tensor) -> Tensor:
    """The gradient that partial sums are of."""
    if name in ("B_grad", "C_grad"):
        return partial.sum(0)
    return partial.sum((0, 1, 2)) if name in ("A_grad", "D_grad", "bias_grad") else partial


@dataclass(frozen=True)
class Case(cases.Case):
    """With the terms of its trial."""

    problem: problems.SelectiveScanProblem
    terms: dict[str, Tensor]

    def error_of(self, name: str, out: Tensor, expected: Tensor) -> float:
        whole = summed(name, out.double()) if name in _SUMS else out
        return relative_error(whole, expected, terms=self.terms.get(name))


@dataclass(frozen=True)
class Trial(cases.RandomTrial[Setting]):
    """Inputs of one problem in one dtype, and the results in float64."""

    terms: dict[str, Tensor]

    def launches(self, kernel: str) -> Iterator[Case]:
        """All that ``kernel`` can compute this by."""
        for aligned in (True, False):
            if kernel != "adjoint":
                yield self.case(kernel, aligned=aligned)
            else:
                yield self.case(kernel, aligned=aligned, parts=PARTS, forwards=True)
            yield self.case(kernel, aligned=aligned, parts=PARTS)

    def case(self, kernel: str, *, aligned: bool, parts: int = 1, forwards: bool = False) -> Case:
        """The launch of ``kernel`` that computes this; unless ``aligned``, in memory with gaps. There are results
        of 1 and of ``PARTS`` parts."""
        direction = cast("problems.Direction", kernel)
        batch, channels, time, states = self.shape
        narrow = getattr(torch, self.dtype)
        tensors = {n: self._copied(n, value, aligned) for n, value in self.inputs.items()}
        expected = {n: self.expected[n] for n in OUTPUTS[direction] if n in self.expected}
        if forwards:
            tensors |= {"out_grad": tensors["u"], "C": tensors["B"], "z": None}
            handed_on = self.expected["part_states"], self.expected["part_sizes"]
            expected = dict(zip(OUTPUTS[direction], handed_on, strict=True))
        cu_seqlens = self.inputs["cu_seqlens"]
        for name, value in expected.items():
            if name in _SEQUENCES:
                tensors[name] = self._placed(
                    torch.full_like(value, torch.nan, dtype=narrow), aligned
                )
        of_tensor = {"u_grad": tensors.get("u_grad")}
        strides: list[int] = []
        for name, dimensions in problems.STRIDED[direction].items():
            tensor = of_tensor.get(name, tensors.get(_TENSOR_OF.get(name, name)))
            strides += [0] * len(dimensions) if tensor is None else tensor.stride()
        unit = 16 // narrow.itemsize
        channels_of_group = channels // self._groups
        along = time if self.setting.layout == "time_last" else channels_of_group
        problem = problems.SelectiveScanProblem(
            *(direction, self.dtype, self.setting.layout),
            *(batch, channels, time, states, self._groups),
            strides=tuple(strides),
            softplus=self.setting.softplus,
            sequences=0 if cu_seqlens is None else len(cu_seqlens) - 1,
            aligned=aligned and along % unit == 0,
            parts=parts,
            forwards=forwards,
            whole=(aligned and time % unit == 0 and cu_seqlens is None,) * 2,
        )
        return Case(problem, tensors | self._in_float32(problem, expected), expected, self.terms)

    def _in_float32(
        self, problem: problems.SelectiveScanProblem, expected: dict[str, Tensor]
    ) -> dict[str, Tensor | None]:
        """What a kernel takes or writes beside sequences and parameters; outputs are full of NaN."""
        device = self.expected["out"].device

        def poisoned(name: str) -> Tensor:
            return torch.full_like(expected[name], torch.nan, dtype=torch.float32)

        if problem.direction == "forward":
            slots = problem.time // problems.INTERVAL + max(1, problem.sequences)
            of_checkpoints = problem.batch, slots, problem.channels, problem.states
            written: dict[str, Tensor | None] = {
                "checkpoints": torch.zeros(of_checkpoints, device=device),
                "final_state": poisoned("final_state"),
            }
            handed_on = ("part_states", "part_sizes") if problem.parts > 1 else ()
            return written | {name: self.expected[name].float() for name in handed_on}
        tensors: dict[str, Tensor | None] = {}
        if problem.direction == "adjoint":
            for name in expected:
                out = tensors[name] = poisoned(name)
                # Of a first part nothing is asked, and nothing is written; or of a last one.
                out[:, :, -1 if problem.forwards else 0] = 0
            return tensors
        tensors["initial_grad"] = poisoned("initial_grad")
        for name in ("adjoints", "sizes") if problem.parts > 1 else ():
            tensors[name] = self.expected[name].float()
        for name in _SUMS:
            if name in expected:
                tensors[name] = torch.full(partial_shape(name, problem), torch.nan, device=device)
        tensors["carries"] = torch.full((problem.carried,), torch.nan, device=device)
        return tensors

    @property
    def _groups(self) -> int:
        return self.setting.groups if self.shape[1] % self.setting.groups == 0 else 1

    def _copied(self, name: str, tensor: Tensor | None, aligned: bool) -> Tensor | None:
        return tensor if tensor is None or name not in _SEQUENCES else self._placed(tensor, aligned)

    def _placed(self, tensor: Tensor, aligned: bool) -> Tensor:
        """A copy that lies along the layout's dimension, with gaps after its rows unless ``aligned``."""
        turned = self.setting.layout == "channel_last"
        return cases.placed(tensor, turned, 0 if aligned else 3, off=0)


@torch.no_grad()
def draw(shape: Shape, setting: Setting, dtype: str, device: torch.device | str) -> Trial:
    """Fresh random inputs, drawn and solved in float64 on the CPU: step sizes from a thousandth to some tenths, so that
    states last for few steps and for many."""
    batch, channels, time, states = shape
    narrow = getattr(torch, dtype)
    groups = setting.groups if channels % setting.groups == 0 else 1
    cu_seqlens = cases.few_cu_seqlens(time) if setting.packed else None
    sequences = 1 if cu_seqlens is None else len(cu_seqlens) - 1

    def new(*size: int) -> Tensor:
        return torch.randn(size).to(narrow)

    steps = torch.randn(batch, channels, time) - 3
    delta = steps if setting.softplus else steps.exp()
    of_state = batch, sequences, channels, states
    inputs: dict[str, Tensor | None] = {
        "u": new(batch, channels, time),
        "delta": delta.to(narrow),
        "A": -torch.rand(channels, states) * 8 - 0.02,
        "B": new(batch, groups, states, time),
        "C": new(batch, groups, states, time),
        "D": torch.randn(channels) if setting.gated else None,
        "z": new(batch, channels, time) if setting.gated else None,
        "delta_bias": torch.rand(channels) * 0.5 if setting.gated else None,
        "initial_state": torch.randn(of_state) if setting.starts else None,
        "cu_seqlens": cu_seqlens,
        "out_grad": new(batch, channels, time),
        "final_grad": torch.randn(of_state) if setting.starts else None,
    }
    solution = solve(inputs, setting.softplus, PARTS)
    inputs["checkpoints"] = solution.checkpoints
    handed_on = ("adjoints", "sizes", "part_states", "part_sizes")
    expected = solution.results | {name: getattr(solution, name) for name in handed_on}
    return Trial(
        shape,
        setting,
        dtype,
        on_device(inputs, device),
        on_device(expected, device),
        on_device(solution.terms, device),
    )


def trials(dtype: str, shapes: tuple[Shape, ...], device: torch.device | str) -> Iterator[Trial]:
    """Two settings for each shape, all in turn."""
    return cases.in_turn(draw, SETTINGS, 2, dtype, shapes, device)
