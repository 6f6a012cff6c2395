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
    INPUTS,
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
    inputs    the dtype of x, dt, B, C and z; empty: that of the state
    tied      whether A, dt, D and dt_bias are one number for each head, in expanded tensors
    mixed     whether all tensors but the state and x have dtypes of their own; else A, D and dt_bias are float32
    indexed   the dtype of indices, which name rows of a larger state and skip one batch; empty: none
    tokens    whether sequences have several tokens, or none
    drafted   whether indices have columns, of which tokens that were accepted choose one; ``indexed``, too
    moved     whether states are written to another pool, to slots of their own, of which one batch has none
    seeded    whether states of 16 bits are rounded at random
    """

    gated: bool = True
    softplus: bool = True
    groups: int = 1
    inputs: str = ""
    tied: bool = False
    mixed: bool = False
    indexed: str = ""
    tokens: bool = False
    drafted: bool = False
    moved: bool = False
    seeded: bool = False

    @property
    def served(self) -> bool:
        """Whether the kernel of several tokens is for this."""
        return self.tokens or self.drafted or self.moved or self.seeded


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
    Setting(moved=True, seeded=True),
    Setting(inputs="bfloat16", tied=True, indexed="int64", moved=True),
    Setting(inputs="bfloat16", tokens=True, seeded=True),
    Setting(inputs="bfloat16", tied=True, tokens=True, indexed="int32", groups=2),
    Setting(inputs="bfloat16", drafted=True, indexed="int64"),
    Setting(inputs="bfloat16", tied=True, tokens=True, drafted=True, indexed="int64", seeded=True),
    Setting(inputs="float16", tokens=True, moved=True, gated=False),
    Setting(mixed=True, tokens=True, drafted=True, moved=True, indexed="int32"),
    Setting(inputs="float16", tied=True, tokens=True, indexed="int32", moved=True),
    Setting(inputs="bfloat16", indexed="int32"),
    Setting(inputs="bfloat16", gated=False, softplus=False),
)

#: Of a quick check and of an attestation.
QUICK: tuple[Shape, ...] = (
    *((2, 1, 40, 16), (3, 4, 8, 64), (5, 2, 6, 17), (2, 2, 16, 32), (1, 1, 24, 8)),
    *((3, 1, 40, 16), (4, 4, 8, 64), (3, 2, 6, 17), (2, 2, 16, 128)),
)
#: One with every setting, and one without alignment.
SMALL: tuple[Shape, ...] = (*((2, 1, 64, 16),) * 10, (5, 2, 6, 17))
#: In such an order that every variant has a problem: aligned rows where a setting's inputs have a kernel of their own, and dense rows
#: for most of what servers add.
THOROUGH: tuple[Shape, ...] = (
    *((1, 1, 5120, 16), (1, 1, 5, 1), (9, 1, 203, 16), (17, 5, 12, 256), (2, 3, 7, 255)),
    *((64, 1, 1536, 16), (3, 8, 64, 128), (300, 2, 4, 8), (4, 1, 96, 48), (33, 24, 64, 64)),
    *((9, 1, 192, 16),) * 10,
)

#: Integers, which the kernels read without gaps.
_DENSE = ("seed", "cu_seqlens", "num_accepted")
#: Columns of indices.
_COLUMNS = 3
#: Tensors that are tied, with the dimensions along which they are.
_TIED = {"dt": 2, "A": 1, "D": 1, "bias": 1}


def _strides(tensors: Mapping[str, Tensor | None]) -> Iterator[int]:
    """As problems have them. States are written where they are read, unless to others."""
    for name, dimensions in DIMENSIONS.items():
        tensor = tensors[name]
        if tensor is None and name == "dst_state":
            tensor = tensors["state"]
        strides = () if tensor is None else tensor.stride()
        yield from (*strides, *[0] * len(dimensions))[: len(dimensions)]


class RoundedCase(Case):
    """An output that is narrower than the states counts by the tolerance of its own dtype."""

    def error_of(self, name: str, out: Tensor, expected: Tensor) -> float:
        error = super().error_of(name, out, expected)
        return error * TOLERANCE[self.problem.dtype] / TOLERANCE[_name(out.dtype)]


class Trial(cases.RandomTrial[Setting]):
    """Inputs of one problem in one dtype, and the results in float64."""

    def launches(self, kernel: str) -> Iterator[Case]:
        """Of the one kernel that is for this."""
        for case in super().launches(kernel):
            if case.problem.kernel == kernel:
                yield case

    def case(self, kernel: str, *, aligned: bool) -> Case:
        """The launch that computes this, in memory of its own; unless ``aligned``, with gaps between elements."""
        tensors: dict[str, Tensor | None] = {}
        for name, value in self.inputs.items():
            tensors[name] = value
            if value is not None:
                tied = _TIED.get(name) if self.setting.tied else None
                tensors[name] = _placed(value, aligned or name in _DENSE, tied)
        x, state = there(tensors["x"]), there(tensors["state"])
        tensors["out"] = torch.full_like(x, torch.nan)
        batch, heads, channels, states = self.shape
        unit = 16 // state.element_size()
        formatted = (tensors[name] for name in FORMATTED)
        wide = [
            (tensor := tensors[name]) is not None and tensor.dtype == torch.int64
            for name in ("indices", "dst_indices", "cu_seqlens", "num_accepted")
        ]
        problem = StepProblem(
            dtype=self.dtype,
            batch=batch,
            heads=heads,
            channels=channels,
            states=states,
            groups=there(tensors["B"]).shape[1],
            slots=state.shape[0],
            dtypes=tuple(_name((x if t is None else t).dtype) for t in formatted),
            strides=tuple(_strides(tensors)),
            softplus=self.setting.softplus,
            aligned=aligned and states % unit == 0,
            in_pieces=aligned and channels % 8 == 0,
            wide_indices=wide[0],
            dst_slots=there(tensors["dst_state"]).shape[0] if self.setting.moved else None,
            served=self.setting.served,
            tokens=x.shape[0] if self.setting.tokens else None,
            columns=_COLUMNS if self.setting.drafted else 1,
            every_token=self.setting.drafted,
            wide_others=(wide[1], wide[2], wide[3]),
        )
        return RoundedCase(problem, tensors, self.expected)


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
    elif setting.inputs and name in INPUTS:
        dtype = setting.inputs
    elif name in ("A", "D", "bias"):
        dtype = "float32"
    return getattr(torch, dtype)  # type: ignore[no-any-return]


def draw(shape: Shape, setting: Setting, dtype: str, device: torch.device | str) -> Trial:
    """Fresh random inputs, drawn and solved in float64 on the CPU: step sizes from a thousandth to some tenths."""
    batch, heads, channels, states = shape
    rows = heads if heads > 1 else channels
    groups = 1 if rows % setting.groups else setting.groups
    columns = _COLUMNS if setting.drafted else 1
    slots = batch * columns + 2 if setting.indexed else batch
    lengths = torch.randint(0, 7, (batch,)) if setting.tokens else torch.ones(batch).long()
    lengths[0] = 6 if setting.tokens else 1
    tokens = int(lengths.sum())

    drawn = _draw_tensors((slots, heads, channels, states), tokens, groups, setting)
    inputs: dict[str, Tensor | None] = {}
    for number, (name, value) in enumerate(drawn.items()):
        tensor = None if value is None else value.to(_dtype_of(name, number, dtype, setting))
        if setting.tied and name in _TIED and tensor is not None:
            tensor = _first(tensor, _TIED[name]).expand(tensor.shape).clone()
        inputs[name] = tensor
    inputs |= _draw_slots(there(inputs["state"]), batch, setting)
    if setting.seeded and dtype != "float32":
        inputs["seed"] = torch.randint(-(2**62), 2**62, (1,))
    if setting.tokens:
        bounds = torch.cat([torch.zeros(1), lengths.cumsum(0)])
        inputs["cu_seqlens"] = bounds.to(getattr(torch, setting.indexed or "int32"))
    expected = solved(inputs, setting)
    return Trial(
        shape,
        setting,
        dtype,
        on_device(inputs, device),
        on_device(expected, device),
    )


def _draw_tensors(
    shape: Shape, tokens: int, groups: int, setting: Setting
) -> dict[str, Tensor | None]:
    """In float32; ``shape`` is that of the state."""
    _, heads, channels, states = shape
    sizes = torch.randn(tokens, heads, channels) - 3
    return {
        "state": torch.randn(shape),
        "x": torch.randn(tokens, heads, channels),
        "dt": sizes if setting.softplus else sizes.exp(),
        "A": -torch.rand(heads, channels, states) * 8 - 0.02,
        "B": torch.randn(tokens, groups, states),
        "C": torch.randn(tokens, groups, states),
        "D": torch.randn(heads, channels) if setting.gated else None,
        "z": torch.randn(tokens, heads, channels) if setting.gated else None,
        "bias": torch.rand(heads, channels) / 2 if setting.gated else None,
    }


def _draw_slots(state: Tensor, batch: int, setting: Setting) -> dict[str, Tensor | None]:
    """Where sequences start, and where their states are written."""
    columns = _COLUMNS if setting.drafted else 1
    names = ("indices", "dst_state", "dst_indices", "seed", "cu_seqlens", "num_accepted")
    inputs: dict[str, Tensor | None] = dict.fromkeys(names)
    numbers = getattr(torch, setting.indexed or "int32")

    def slots_of(pool: Tensor) -> Tensor:
        order = torch.randperm(pool.shape[0])[: batch * columns].view(batch, columns)
        order[batch // 2, columns // 2] = -1
        return (order if setting.drafted else order.squeeze(1)).to(numbers)

    if setting.indexed:
        inputs["indices"] = slots_of(state)
    if setting.moved:
        pool = torch.randn(batch * columns + 3, *state.shape[1:]).to(state.dtype)
        inputs["dst_state"], inputs["dst_indices"] = pool, slots_of(pool)
    if setting.drafted:
        inputs["num_accepted"] = torch.randint(0, columns + 1, (batch,)).to(numbers)
    return inputs


def without_heads(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The tensors of a kernel as the operator takes them: views, without a dimension of heads where there is one."""
    state = there(tensors["state"])
    views = dict(tensors)
    if state.shape[1] == 1:
        for name in ("state", "dst_state", "x", "dt", "z", "A", "D", "bias"):
            tensor = tensors[name]
            if tensor is not None:
                views[name] = tensor.squeeze(0 if name in ("A", "D", "bias") else 1)
    return views


def solved(inputs: Mapping[str, Tensor | None], setting: Setting) -> dict[str, Tensor]:
    """The output and the states after it in float64."""
    wide = in_float64(without_heads(inputs))
    state, dst_state = there(wide["state"]), wide["dst_state"]
    x, dt, A, B, C = (there(wide[name]) for name in ("x", "dt", "A", "B", "C"))
    rest = wide["D"], wide["z"], wide["bias"], setting.softplus, wide["indices"]
    moved = dst_state, wide["dst_indices"], wide["cu_seqlens"], wide["num_accepted"]
    out = reference.step(state, x, dt, A, B, C, *rest, *moved)
    results = {
        "out": out.view_as(there(inputs["x"])),
        "state": state.view_as(there(inputs["state"])),
    }
    if dst_state is not None:
        results["dst_state"] = dst_state.view_as(there(inputs["dst_state"]))
    return results


def trials(dtype: str, shapes: tuple[Shape, ...], device: torch.device | str) -> Iterator[Trial]:
    """Two settings for each shape, all in turn."""
    return cases.in_turn(draw, SETTINGS, 2, dtype, shapes, device)
