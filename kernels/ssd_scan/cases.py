"""Random problems for the ssd_scan kernels; ``selftest`` and ``tools/attest.py`` run them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from scan_registry.kernels import cases
from scan_registry.kernels.cases import Options, on_device, relative_error, there
from scan_registry.kernels.ssd_scan.problem import (
    BLOCK,
    SMALL_BLOCK,
    STRIDED,
    Direction,
    SSDScanProblem,
)
from scan_registry.kernels.ssd_scan.solution import solve

#: Largest ‖out − ref‖ / ‖ref‖ of a binary that counts as GPU-tested. float32 is what plain torch computes on the CPU.
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}

#: (batch, time, heads, size of a head, states).
Shape = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Setting(Options):
    """The options of a problem.

    skips     whether there are D and dt_bias
    softplus  of the step sizes
    limited   whether step sizes have limits that some exceed
    starts    whether there is an initial state, and a gradient of the final one
    groups    of heads that have B and C of their own, if the heads can be cut so
    packed    whether sequences are packed along time, one of them empty
    indexed   whether steps are marked by the number of their sequence
    narrow_dt whether dt is in the problem's dtype
    wide_D    whether D, if there is one, has a number for each channel
    gated     whether there is a z
    """

    skips: bool = True
    softplus: bool = True
    limited: bool = False
    starts: bool = False
    groups: int = 1
    packed: bool = False
    indexed: bool = False
    narrow_dt: bool = False
    wide_D: bool = False
    gated: bool = False


SETTINGS = (
    Setting(),
    Setting(skips=False, starts=True, narrow_dt=True),
    Setting(softplus=False, groups=2, starts=True, limited=True, indexed=True),
    Setting(packed=True, starts=True),
    Setting(starts=True, groups=2, wide_D=True, gated=True, narrow_dt=True),
    Setting(skips=False, packed=True, indexed=True, limited=True, gated=True),
)

#: Of a quick check and of an attestation.
QUICK: tuple[Shape, ...] = ((2, 130, 2, 32, 16), (2, 101, 2, 8, 40), (1, 64, 4, 64, 128))
#: Each tile of the kernels, with every setting.
SMALL: tuple[Shape, ...] = (
    *((1, 70, 2, 16, 16),) * 3, *((1, 70, 2, 72, 72),) * 3, *((1, 70, 2, 8, 136),) * 3
)  # fmt: skip
THOROUGH: tuple[Shape, ...] = (
    *(
        (3, 1, 1, 8, 8),
        (2, 63, 3, 64, 64),
        (2, 65, 4, 128, 128),
        (1, 300, 2, 64, 256),
        (1, 200, 2, 128, 96),
    ),
    *((1, 1031, 2, 64, 128), (2, 257, 6, 80, 16), (1, 128, 8, 96, 200), (1, 192, 2, 128, 256)),
)

#: What each direction writes.
OUTPUTS: dict[Direction, tuple[str, ...]] = {
    "forward": ("out", "ungated", "final_state"),
    "states": ("states", "final_state", "sequence_decays"),
    "adjoint": ("adjoints", "initial_grad"),
    "backward": ("x_grad", "dt_grad", "head_grads", "B_grad", "C_grad"),
}
#: Those that come in terms, and the dimensions to sum over; and those that are in the problem's dtype.
_SUMS = {"head_grads": (1, 2), "B_grad": (0,), "C_grad": (0,)}
_NARROW = ("states", "out", "ungated", "adjoints", "x_grad")
#: Those that a forward pass may do without.
_OPTIONAL = ("ungated", "states")
_PLACED = ("x", "B", "C", "z", "out_grad")
_TENSOR_OF = {"grad": "out_grad"}


@dataclass(frozen=True)
class Case(cases.Case):
    """``occupied``: of each slot, whether it holds a step; ``terms``: those of the trial."""

    problem: SSDScanProblem
    occupied: Tensor
    terms: dict[str, Tensor]

    def error_of(self, name: str, out: Tensor, expected: Tensor) -> float:
        if name in ("states", "adjoints"):  # of other slots nothing is asked
            out, expected = out[:, self.occupied], expected[:, self.occupied]
        if name in _SUMS:
            out = out.double().sum(_SUMS[name])
        if name == "head_grads":
            pairs = zip(out, expected, self.terms[name], strict=True)
            return max(relative_error(own, right, terms=terms) for own, right, terms in pairs)
        return relative_error(out, expected, terms=self.terms.get(name))


@dataclass(frozen=True)
class Trial(cases.RandomTrial[Setting]):
    """Inputs of one problem in one dtype, and the results in float64."""

    occupied: Tensor
    terms: dict[str, Tensor]

    def case(self, kernel: str, *, aligned: bool) -> Case:
        """The launch of ``kernel`` that computes this; unless ``aligned``, in memory with gaps of 16 bytes, in two splits and
        small blocks of states, and without what need not be asked for."""
        direction, tensors = cast("Direction", kernel), self._inputs(aligned)
        problem = self._problem(direction, tensors, aligned)
        names = [name for name in OUTPUTS[direction] if aligned or name not in _OPTIONAL]
        expected = {n: self.expected[n] for n in names if n in self.expected}
        tensors |= {name: None for name in _OPTIONAL if name in OUTPUTS[direction]}
        for name, value in expected.items():
            tensors[name] = self._poisoned(name, value, problem)
        return Case(problem, tensors, expected, self.occupied, self.terms)

    def _problem(
        self, direction: Direction, tensors: Mapping[str, Tensor | None], aligned: bool
    ) -> SSDScanProblem:
        batch, time, heads, size, states = self.shape
        groups = there(self.inputs["B"]).shape[2]
        low, high = _limits(self.setting)
        large = states > SMALL_BLOCK and self.dtype != "float32" and aligned
        in_splits = direction == "backward" and not aligned
        cu_seqlens = self.inputs["cu_seqlens"]
        return SSDScanProblem(
            *(direction, self.dtype),
            *(batch, time, heads, groups, size, states),
            strides=tuple(
                stride
                for name in STRIDED[direction]
                for stride in _strides(tensors[_TENSOR_OF.get(name, name)])
            ),
            has_z=direction == "forward" and self.inputs["z"] is not None,
            softplus=self.setting.softplus,
            wide_dt=not self.setting.narrow_dt or self.dtype == "float32",
            wide_D=self.setting.skips and self.setting.wide_D,
            low=low,
            high=high,
            sequences=0 if cu_seqlens is None else len(cu_seqlens) - 1,
            splits=min(2, heads // groups) if in_splits else 1,
            block=BLOCK if large else SMALL_BLOCK,
        )

    def _inputs(self, aligned: bool) -> dict[str, Tensor | None]:
        tensors = dict(self.inputs)
        if not aligned:
            placed = {name: tensors[name] for name in _PLACED if tensors[name] is not None}
            tensors |= {n: cases.with_gaps(there(t), 8, off=0) for n, t in placed.items()}
        # Handed on in the problem's dtype by the kernels before.
        for name in ("states", "adjoints"):
            tensors[name] = self.expected[name].to(there(tensors["x"]).dtype)
        return tensors

    def _poisoned(self, name: str, like: Tensor, problem: SSDScanProblem) -> Tensor:
        """Memory for an output, full of NaN."""
        shape: tuple[int, ...] = tuple(like.shape)
        narrow = name in _NARROW
        if name == "head_grads":
            shape = 3, problem.batch, problem.slots, problem.heads
        elif name in _SUMS:
            shape, narrow = (problem.splits, *shape), problem.splits == 1
        dtype = getattr(torch, self.dtype) if narrow else torch.float32
        return torch.full(shape, torch.nan, dtype=dtype, device=like.device)


def _limits(setting: Setting) -> tuple[float, float]:
    return (0.02, 0.2) if setting.limited else (0.0, math.inf)


def _strides(tensor: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if tensor is None else tensor.stride()[:3]


@torch.no_grad()
def draw(shape: Shape, setting: Setting, dtype: str, device: torch.device | str) -> Trial:
    """Fresh random inputs, drawn and solved in float64 on the CPU: step sizes from a thousandth to some tenths, so that
    states last for few steps and for many."""
    batch, time, heads, size, states = shape
    narrow = getattr(torch, dtype)
    groups = setting.groups if heads % setting.groups == 0 else 1
    cu_seqlens, seq_idx = cases.few_cu_seqlens(time).int() if setting.packed else None, None
    if setting.indexed:
        seq_idx = torch.randint(0, 8, (batch, time), dtype=torch.int32).sort(1).values.contiguous()
    sequences = 1 if cu_seqlens is None else len(cu_seqlens) - 1

    def new(*sizes: int) -> Tensor:
        return torch.randn(sizes).to(narrow)

    steps = torch.randn(batch, time, heads) - 3
    dt = steps if setting.softplus else steps.exp()
    of_state = batch, sequences, heads, size, states
    inputs: dict[str, Tensor | None] = {
        "x": new(batch, time, heads, size),
        "dt": dt.to(narrow) if setting.narrow_dt else dt,
        "A": -torch.rand(heads) * 8 - 0.02,
        "B": new(batch, time, groups, states),
        "C": new(batch, time, groups, states),
        "D": torch.randn((heads, size) if setting.wide_D else (heads,)) if setting.skips else None,
        "z": new(batch, time, heads, size) if setting.gated else None,
        "dt_bias": torch.rand(heads) * 0.5 if setting.skips else None,
        "initial_state": torch.randn(of_state) if setting.starts else None,
        "seq_idx": seq_idx,
        "cu_seqlens": cu_seqlens,
        "out_grad": new(batch, time, heads, size),
        "final_grad": torch.randn(of_state) if setting.starts else None,
    }
    solution = solve(inputs, setting.softplus, _limits(setting))
    placed = on_device(inputs, device), on_device(solution.results, device)
    terms = on_device(solution.terms, device)
    return Trial(shape, setting, dtype, *placed, solution.occupied.to(device), terms)


def trials(dtype: str, shapes: tuple[Shape, ...], device: torch.device | str) -> Iterator[Trial]:
    """Two settings for each shape, all in turn."""
    return cases.in_turn(draw, SETTINGS, 2, dtype, shapes, device)
