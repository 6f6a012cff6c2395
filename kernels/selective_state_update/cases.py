"""Random problems for the selective_state_update kernels; ``selftest`` and ``tools/attest.py`` run them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from scan_registry.kernels import cases
from scan_registry.kernels.cases import Case, Options, in_float64, on_device, there
from scan_registry.kernels.selective_state_update import reference
from scan_registry.kernels.selective_state_update.problem import (
    DIMENSIONS,
    DTYPES,
    FORMATTED,
    StepProblem,
)

#: Largest ‖out − ref‖ / ‖ref‖ of a binary that counts as GPU-tested.
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}

#: (batch, heads, channels, states).
Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class Setting(Options):
    """The options of a problem.

    gated     whether there are z, D and dt_bias
    softplus  of the step sizes
    groups    of heads, or of one head's channels, that have B and C of their own, if they can be cut so
    inputs    the dtype of B and C, and of dt; empty: that of the state
    tied      whether A, dt, D and dt_bias are one number for each head, in expanded tensors
    mixed     whether all tensors but the state and x have dtypes of their own; else A, D and dt_bias are float32
    indexed   the dtype of indices, which name rows of a larger state and skip one batch; empty: none
    """

    gated: bool = True
    softplus: bool = True
    groups: int = 1
    inputs: str = ""
    tied: bool = False
    mixed: bool = False
    indexed: str = ""


SETTINGS = (
    Setting(),
    Setting(tied=True, indexed="int32"),
    Setting(inputs="float32", groups=2),
    Setting(inputs="bfloat16", gated=False, softplus=False, groups=2),
    Setting(inputs="bfloat16", tied=True),
    Setting(inputs="float16", indexed="int64"),
    Setting(inputs="float16", gated=False, tied=True, groups=2),
    Setting(mixed=True, indexed="int64"),
    Setting(gated=False, tied=True, mixed=True, groups=2),
)

#: Of a quick check and of an attestation.
QUICK: tuple[Shape, ...] = (
    *((2, 1, 40, 16), (3, 4, 8, 64), (5, 2, 6, 17), (2, 2, 16, 32), (1, 1, 24, 8)),
)
#: One with every setting, and one without alignment.
SMALL: tuple[Shape, ...] = (*((2, 1, 40, 16),) * 5, (5, 2, 6, 17))
THOROUGH: tuple[Shape, ...] = (
    *((1, 1, 1, 1), (1, 1, 5120, 16), (9, 1, 203, 16), (64, 1, 1536, 16), (3, 8, 64, 128)),
    *((17, 5, 12, 256), (2, 3, 7, 255), (300, 2, 4, 8), (4, 1, 96, 33), (33, 24, 64, 64)),
)

#: Tensors that are tied, with the dimensions along which they are.
_TIED = {"dt": 2, "A": 1, "D": 1, "bias": 1}


class Trial(cases.RandomTrial[Setting]):
    """Inputs of one problem in one dtype, and the results in float64."""

    def case(self, kernel: str, *, aligned: bool) -> Case:
        """The launch that computes this, in memory of its own; unless ``aligned``, with gaps between elements."""
        tensors: dict[str, Tensor | None] = {}
        for name, value in self.inputs.items():
            tensors[name] = value
            if value is not None:
                tied = _TIED.get(name) if self.setting.tied else None
                tensors[name] = _placed(value, aligned, tied)
        x, state = there(tensors["x"]), there(tensors["state"])
        tensors["out"] = torch.full_like(x, torch.nan)
        batch, heads, channels, states = self.shape
        unit = 16 // state.element_size()
        strides: list[int] = []
        for name, dimensions in DIMENSIONS.items():
            tensor = tensors[name]
            strides += [0] * len(dimensions) if tensor is None else tensor.stride()
        formatted = (tensors[name] for name in FORMATTED)
        indices = tensors["indices"]
        problem = StepProblem(
            dtype=self.dtype,
            batch=batch,
            heads=heads,
            channels=channels,
            states=states,
            groups=there(tensors["B"]).shape[1],
            slots=state.shape[0],
            dtypes=tuple("float32" if t is None else _name(t.dtype) for t in formatted),
            strides=tuple(strides),
            softplus=self.setting.softplus,
            aligned=aligned and states % unit == 0,
            wide_indices=indices is not None and indices.dtype == torch.int64,
        )
        return Case(problem, tensors, self.expected)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first(tensor: Tensor, dimension: int) -> Tensor:
    """The first number along each dimension from that one on."""
    for along in range(dimension, tensor.dim()):
        tensor = tensor.narrow(along, 0, 1)
    return tensor


def _placed(tensor: Tensor, aligned: bool, tied: int | None) -> Tensor:
    """A copy; of what is tied from one dimension on, an expanded one."""
    if tied is not None:
        return _first(tensor, tied).clone().expand(tensor.shape)
    if aligned:
        return tensor.clone(memory_format=torch.contiguous_format)
    memory = tensor.new_full((*tensor.shape, 2), 1e4)
    return memory[..., 1].copy_(tensor)


def _dtype_of(name: str, number: int, dtype: str, setting: Setting) -> torch.dtype:
    """Of an input, the one of that number."""
    if setting.mixed and name not in ("state", "x"):
        dtype = DTYPES[number % len(DTYPES)]
    elif setting.inputs and name in ("B", "C", "dt"):
        dtype = setting.inputs
    elif name in ("A", "D", "bias"):
        dtype = "float32"
    return getattr(torch, dtype)  # type: ignore[no-any-return]


def draw(shape: Shape, setting: Setting, dtype: str, device: torch.device | str) -> Trial:
    """Fresh random inputs, drawn and solved in float64 on the CPU: step sizes from a thousandth to some tenths."""
    batch, heads, channels, states = shape
    groups = setting.groups if (heads if heads > 1 else channels) % setting.groups == 0 else 1
    slots = batch + 2 if setting.indexed else batch

    sizes = torch.randn(batch, heads, channels) - 3
    drawn: dict[str, Tensor | None] = {
        "state": torch.randn(slots, heads, channels, states),
        "x": torch.randn(batch, heads, channels),
        "dt": sizes if setting.softplus else sizes.exp(),
        "A": -torch.rand(heads, channels, states) * 8 - 0.02,
        "B": torch.randn(batch, groups, states),
        "C": torch.randn(batch, groups, states),
        "D": torch.randn(heads, channels) if setting.gated else None,
        "z": torch.randn(batch, heads, channels) if setting.gated else None,
        "bias": torch.rand(heads, channels) / 2 if setting.gated else None,
    }
    inputs: dict[str, Tensor | None] = {}
    for number, (name, value) in enumerate(drawn.items()):
        tensor = None if value is None else value.to(_dtype_of(name, number, dtype, setting))
        if setting.tied and name in _TIED and tensor is not None:
            tensor = _first(tensor, _TIED[name]).expand(tensor.shape).clone()
        inputs[name] = tensor
    inputs["indices"] = None
    if setting.indexed:
        order = torch.randperm(slots)[:batch]
        order[batch // 2] = -1
        inputs["indices"] = order.to(getattr(torch, setting.indexed))
    expected = solved(inputs, setting)
    return Trial(
        shape,
        setting,
        dtype,
        on_device(inputs, device),
        on_device(expected, device),
    )


def without_heads(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The tensors of a kernel as the operator takes them: views, without a dimension of heads where there is one."""
    state = there(tensors["state"])
    views = dict(tensors)
    if state.shape[1] == 1:
        for name in ("state", "x", "dt", "z", "A", "D", "bias"):
            tensor = tensors[name]
            if tensor is not None:
                views[name] = tensor.squeeze(1 if name in ("state", "x", "dt", "z") else 0)
    return views


def solved(inputs: Mapping[str, Tensor | None], setting: Setting) -> dict[str, Tensor]:
    """The output and the state after it in float64."""
    wide = in_float64(without_heads(inputs))
    state = there(wide["state"])
    x, dt, A, B, C = (there(wide[name]) for name in ("x", "dt", "A", "B", "C"))
    rest = wide["D"], wide["z"], wide["bias"], setting.softplus, wide["indices"]
    out = reference.step(state, x, dt, A, B, C, *rest)
    return {
        "out": out.view_as(there(inputs["x"])),
        "state": state.view_as(there(inputs["state"])),
    }


def trials(dtype: str, shapes: tuple[Shape, ...], device: torch.device | str) -> Iterator[Trial]:
    """Two settings for each shape, all in turn."""
    return cases.in_turn(draw, SETTINGS, 2, dtype, shapes, device)
