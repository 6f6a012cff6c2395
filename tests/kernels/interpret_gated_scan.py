"""Runs the Triton kernels of gated_scan in the interpreter, and prints what is wrong with them.

TRITON_INTERPRET=1 python tests/kernels/interpret_gated_scan.py forward|backward
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, pairwise, product

import torch
from torch import Tensor
from triton_interpreter import Placed, allow, mend

from scan_registry.kernels.gated_scan import triton_columns, triton_kernels
from scan_registry.kernels.gated_scan.kinds import KINDS, Kind
from scan_registry.kernels.gated_scan.problem import (
    LAYOUTS,
    POINTERS,
    STRIDED,
    Direction,
    GatedScanProblem,
    Layout,
    Strides,
    ceil_div,
)

MODULES = {"time_last": triton_kernels, "channel_last": triton_columns}
BEFORE = ("initial_state", "final_state_grad")
STATES = (*BEFORE, "final_state", "initial_state_grad")
#: Memory orders of (batch, channels, time), slowest first, and what runs downwards there. The first is aligned.
PLACEMENTS: dict[Layout, tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]] = {
    "time_last": (((0, 1, 2), ()), ((1, 0, 2), (2,)), ((2, 1, 0), (0,))),
    "channel_last": (((0, 2, 1), ()), ((2, 0, 1), (1,)), ((1, 2, 0), (2,))),
}
#: Largest ‖out − ref‖ / ‖ref‖, by the dtype of the output. The interpreter cuts bfloat16 off where a
#: GPU rounds.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
#: Told where there is no stride: of what is null.
NO_STRIDE = 1 << 40


@dataclass(frozen=True)
class Setting:
    """A problem to solve, and how.

    sizes     batch, channels, time
    offsets   bounds of the packed sequences
    resets    how states start anew: nowhere, here and there, or at every step
    omitted   parameters that are null
    poisoned  whether states before the first reset, and that alone, are infinite or NaN
    scale     of what inputs are drawn from
    slow      whether decays of RG-LRU are close to 1, some of which cap the slope of the root
    tile      rows and times; or channels, groups and steps
    aligned   whether it is an aligned variant
    """

    sizes: tuple[int, int, int]
    dtype: str = "float32"
    offsets: tuple[int, ...] = ()
    resets: str = ""
    reverse: bool = False
    omitted: tuple[str, ...] = ()
    poisoned: bool = False
    scale: float = 1.0
    slow: bool = False
    tile: tuple[int, ...] = (2, 16)
    aligned: bool = False

    @property
    def sequences(self) -> int:
        return max(len(self.offsets) - 1, 0)

    @property
    def state_sizes(self) -> tuple[int, ...]:
        return (*self.sizes[:2], self.sequences) if self.offsets else self.sizes[:2]

    def bounds(self) -> list[tuple[int, int]]:
        ends = self.offsets or (0, self.sizes[2])
        return list(pairwise(ends))


def draw(setting: Setting, kind: Kind) -> dict[str, Tensor]:
    """What a forward pass gets, and gradients."""
    dtype, inputs = getattr(torch, setting.dtype), {}
    for n, name in enumerate(kind.inputs):
        inputs[f"input{n}"] = (torch.randn(setting.sizes) * setting.scale).to(dtype)
        if name == "gates":
            inputs[f"input{n}"] = (1 - torch.rand(setting.sizes) ** 3).to(dtype)
    if kind.parameters:
        inputs["parameters"] = torch.randn(len(kind.parameters), setting.sizes[1])
        if kind.name == "hgrn":
            inputs["parameters"] = torch.rand(1, setting.sizes[1])
        elif setting.slow:
            inputs["parameters"] -= 16
    if setting.resets:
        batch, _, time = setting.sizes
        reset = torch.rand(batch, time) < (1.0 if setting.resets == "all" else 0.2)
        reset[:, :: max(1, time // 3)] = True
        if setting.poisoned:
            reset[:, :5] = reset[:, -5:] = False
        inputs["reset"] = reset.to(torch.uint8) * torch.randint(1, 256, reset.shape).to(torch.uint8)
    for name in BEFORE:
        inputs[name] = torch.randn(setting.state_sizes)
    inputs["states_grad"] = torch.randn(setting.sizes).to(dtype)
    if setting.poisoned:
        # Of the steps before the first reset and from the last one on; adjoints come from the other end.
        inputs["initial_state"][:] = torch.nan
        inputs["final_state_grad"][:] = torch.inf
    return {name: each for name, each in inputs.items() if name not in setting.omitted}


def solve(setting: Setting, kind: Kind, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """All outputs, in float64, by the definition. Gradients follow from states as a kernel is given them."""
    wide = {name: each.double() for name, each in inputs.items()}
    given = [wide[f"input{n}"].requires_grad_() for n in range(len(kind.inputs))]
    parameters = list(wide.get("parameters", torch.empty(0)).unbind()) if kind.parameters else []
    parameters = [each.requires_grad_() for each in parameters]
    anew = (wide["reset"] != 0)[:, None] if "reset" in wide else None
    gate, token = kind.gates(*given, *(each[:, None] for each in parameters), reset=anew)
    found = {"states": torch.empty(setting.sizes, dtype=torch.float64)}
    for name in ("final_state", "initial_state_grad"):
        found[name] = torch.full(setting.state_sizes, torch.nan, dtype=torch.float64)
    gate_grad, adjoint = torch.empty_like(found["states"]), torch.empty_like(found["states"])
    scale, rounded = gate.detach(), torch.empty_like(found["states"])
    starts = torch.zeros_like(scale, dtype=torch.bool) if anew is None else anew.expand_as(scale)
    sums = []
    for s, (begin, end) in enumerate(setting.bounds()):
        at = (..., s) if setting.offsets else ...
        zeros = torch.zeros(setting.sizes[:2], dtype=torch.float64)
        initial = wide["initial_state"][at] if "initial_state" in wide else zeros
        steps = list(range(begin, end))[:: -1 if setting.reverse else 1]
        x = initial
        for t in steps:
            x = torch.where(starts[..., t], 0, scale[..., t] * x) + token[..., t].detach()
            found["states"][..., t] = x
        if steps:
            found["final_state"][at] = x
        rounded[..., begin:end] = found["states"][..., begin:end].to(inputs["input0"].dtype)
        h = wide["final_state_grad"][at] if "final_state_grad" in wide else zeros
        for n, t in reversed(list(enumerate(steps))):
            before = rounded[..., steps[n - 1]] if n else initial
            adjoint[..., t] = wide["states_grad"][..., t] + h
            gate_grad[..., t] = torch.where(starts[..., t], 0, adjoint[..., t] * before)
            h = torch.where(starts[..., t], 0, scale[..., t] * adjoint[..., t])
        if steps:
            found["initial_state_grad"][at] = h
        if parameters:
            part = [torch.where(within(setting, s), each, 0) for each in (gate_grad, adjoint)]
            got = torch.autograd.grad((gate, token), parameters, part, retain_graph=True)
            sums.append(torch.stack(got))
    if parameters:
        found["parameters_grad"] = torch.stack(sums).sum(0)
    grads = torch.autograd.grad((gate, token), given, (gate_grad, adjoint), retain_graph=True)
    return found | {f"input{n}_grad": each for n, each in enumerate(grads)} | {"rounded": rounded}


def within(setting: Setting, s: int) -> Tensor:
    begin, end = setting.bounds()[s]
    t = torch.arange(setting.sizes[2])
    return (begin <= t) & (t < end)


class Run:
    """One launch of a kernel: what it is given, where that is in memory, and what is expected."""

    def __init__(self, layout: Layout, direction: Direction, kind: Kind, setting: Setting) -> None:
        self.layout, self.direction, self.kind, self.setting = layout, direction, kind, setting
        inputs = draw(setting, kind)
        self.expected = solve(setting, kind, inputs)
        if direction == "backward":
            inputs["states"] = self.expected["rounded"].to(inputs["input0"].dtype)
        pointers = POINTERS[direction]
        self.placed = {name: self.place(name, inputs[name]) for name in pointers if name in inputs}
        self.outputs = [
            name
            for name in pointers
            if name not in inputs and name in self.expected and name not in setting.omitted
        ]
        for name in self.outputs:
            wide = name in STATES or name == "parameters_grad"
            dtype = torch.float32 if wide else inputs["input0"].dtype
            sizes = self.expected[name].shape
            if name == "parameters_grad":
                sizes = (setting.sizes[0] * max(1, setting.sequences), *sizes)
            self.placed[name] = self.place(name, torch.full(sizes, torch.nan, dtype=dtype))
        if setting.offsets:
            self.placed["offsets"] = Placed.of(torch.tensor(setting.offsets), (0,), fill=0)

    def strided(self, name: str) -> str:
        """What has the strides of ``name``."""
        if name in STATES:
            return "state"
        if name.startswith("input"):
            return "grads" if name.endswith("_grad") else "inputs"
        return name

    def place(self, name: str, values: Tensor) -> Placed:
        strided, written = self.strided(name), name in self.outputs_or_none()
        fill = 7.0 if written else 1.0 if values.dtype == torch.uint8 else torch.nan
        if strided == "state":
            order = tuple(d for d in (1, 2, 0) if d < values.dim())
            return Placed.of(values, order, (1,), gap=1, fill=fill)
        if strided not in STRIDED[self.direction]:
            gap = 3 if name == "reset" else 0
            return Placed.of(values, tuple(range(values.dim())), gap=gap, fill=fill)
        number = STRIDED[self.direction].index(strided)
        order, downwards = PLACEMENTS[self.layout][0 if self.setting.aligned else number % 3]
        gap = 16 if self.setting.aligned else 2 + number
        return Placed.of(values, order, downwards, gap=gap, fill=fill)

    def outputs_or_none(self) -> list[str]:
        return getattr(self, "outputs", [])

    def problem(self) -> GatedScanProblem:
        told = dict.fromkeys(STRIDED[self.direction], (NO_STRIDE,) * 3)
        for name, placed in self.placed.items():
            if self.strided(name) in told:
                told[self.strided(name)] = (*placed.strides, NO_STRIDE)[:3]
        setting = self.setting
        reset = self.placed.get("reset")
        return GatedScanProblem(
            self.direction, self.layout, setting.dtype, setting.dtype, 1, *setting.sizes,
            tuple(Strides(NO_STRIDE, *each) for each in told.values()), alignment=16,
            sequences=setting.sequences, reverse=setting.reverse, kind=self.kind.source,
            option=self.kind.option, resets=reset is not None,
            reset_batch=reset.strides[0] if reset else NO_STRIDE,
        )  # fmt: skip

    def constants(self) -> dict[str, int | str]:
        kind, setting = self.kind, self.setting
        found: dict[str, int | str] = {
            "KIND": kind.source,
            "INPUTS": len(kind.inputs),
            "PARAMETERS": len(kind.parameters),
            "ALIGNED": int(setting.aligned),
            "STAGES": 2,
        }
        if self.layout == "time_last":
            found["REVERSE"] = int(setting.aligned and setting.reverse)
            return found | dict(zip(("ROWS", "TIMES"), setting.tile, strict=True))
        found |= dict(zip(("CHANNELS", "GROUPS", "STEPS"), setting.tile, strict=True))
        return found | {"VECTOR": 4 if setting.aligned else 1}

    def grid(self) -> tuple[int, int, int]:
        """Rows or columns along x, and sequences along y, which has a limit, and then z."""
        batch, channels, _ = self.setting.sizes
        if self.layout == "time_last":
            lines = ceil_div(batch * channels, self.setting.tile[0])
        else:
            lines = batch * ceil_div(channels, self.setting.tile[0])
        sequences = max(self.setting.sequences, 1)
        return lines, min(sequences, 3), ceil_div(sequences, 3)

    def launch(self) -> None:
        dtypes = {"offsets": torch.int64, "workspace": torch.int64, "reset": torch.uint8}
        wide = dict.fromkeys((*STATES, "parameters", "parameters_grad"), torch.float32)
        values: list[Tensor | int] = []
        for name in POINTERS[self.direction]:
            if name in self.placed:
                values.append(self.placed[name].pointer())
                continue
            dtype = (dtypes | wide).get(name, getattr(torch, self.setting.dtype))
            values.append(torch.empty(0, dtype=dtype))
        kernel = getattr(MODULES[self.layout], f"{self.layout}_{self.direction}")
        scalars = self.problem().scalars()
        names = kernel.arg_names[len(values) : len(values) + len(scalars)]
        assert {*names} == {*scalars}
        allow(
            reads=[p for n, p in self.placed.items() if n not in self.outputs],
            writes=[p for n, p in self.placed.items() if n in self.outputs],
        )
        kernel[self.grid()](*values, *(scalars[name] for name in names), **self.constants())

    def faults(self) -> Iterator[str]:
        """What is wrong with the outputs."""
        for name in self.outputs:
            if not self.placed[name].is_intact():
                yield f"something beside {name} was written"
            out, expected = self.placed[name].tensor().double(), self.expected[name]
            if name == "parameters_grad":
                out = out.sum(0)
            if name in STATES and self.setting.offsets:
                empty = torch.tensor([begin == end for begin, end in self.setting.bounds()])
                if not out[..., empty].isnan().all():
                    yield f"{name} was written for an empty sequence"
                out, expected = out[..., ~empty], expected[..., ~empty]
            sound = expected.isfinite()
            if self.setting.poisoned and name in ("states", "final_state", "initial_state_grad"):
                assert sound.any()
            if not self.setting.poisoned:
                assert sound.all()
            error = (out - expected)[sound].norm()
            tolerance = TOLERANCE[self.placed[name].memory.dtype] * (
                10 if name == "parameters_grad" else 1
            )
            if not error <= tolerance * expected[sound].norm():
                yield f"{name} is off by {error:.2g}, of {expected[sound].norm():.2g}"


OMITTED: dict[Direction, tuple[tuple[str, ...], ...]] = {
    "forward": ((), ("initial_state",), ("final_state",), ("initial_state", "final_state")),
    "backward": (
        (),
        ("input0_grad", "initial_state"),
        ("final_state_grad", "parameters_grad"),
        ("input1_grad", "initial_state_grad"),
        BEFORE,
    ),
}


#: A kind without parameters and one with them, of which each layout has one in all ways; what is not one of them, in a few.
WHOLE = {
    ("time_last", "forward"): "linear",
    ("channel_last", "forward"): "rg_lru",
    ("time_last", "backward"): "rg_lru",
    ("channel_last", "backward"): "linear",
}


def settings(layout: Layout, direction: Direction, kind: str) -> Iterator[Setting]:
    """Problems of few tiles for generic and aligned variants."""
    time_last = layout == "time_last"
    tile: tuple[int, ...] = (2, 16) if time_last else (4, 2, 4)
    times = 16 if time_last else 8
    for scale, reverse in ((1.0, False), (10.0, True), (1e30, False)):
        yield Setting((2, 3, times + 3), scale=scale, resets="some", reverse=reverse, tile=tile)
    for dtype in ("bfloat16", "float16"):
        yield Setting((2, 3, times + 3), dtype, tile=tile)
    if kind == "rg_lru":
        yield Setting((2, 5, 3 * times), slow=True, tile=tile)
    if kind == WHOLE[layout, direction]:
        yield from all_ways(layout, direction, tile, times)
    elif kind in WHOLE.values():
        yield from packed(direction, tile, times)


def all_ways(
    layout: Layout, direction: Direction, tile: tuple[int, ...], times: int
) -> Iterator[Setting]:
    time_last = layout == "time_last"
    omitted, reverse = cycle(OMITTED[direction]), cycle((False, True))
    for sizes in ((1, 1, 1), (2, 1, times), (1, 3, times - 1), (2, 5, 2 * times + 1)):
        for resets in ("", "some"):
            yield Setting(
                sizes, resets=resets, reverse=next(reverse), omitted=next(omitted), tile=tile
            )
        next(reverse)
    for dtype, resets, turned in product(
        ("float32", "bfloat16", "float16"), ("", "some"), (False, True)
    ):
        # Narrow dtypes with two of four ways each, of which float16 has the others.
        if dtype != "float32" and (resets == "some") ^ turned ^ (dtype == "float16"):
            continue
        aligned: tuple[int, ...] = (1, 64) if time_last else (8, 2, 4)
        sizes = (1, 2, 80) if time_last else (2, 12, 9)
        plain = Setting(sizes, dtype, resets=resets, reverse=turned, tile=aligned)
        yield replace(plain, aligned=True)
        if dtype != "float32":
            yield replace(plain, sizes=(2, 3, times + 3), tile=tile)
    yield Setting((1, 2, times + 1), resets="all", tile=tile)
    for dtype, turned in product(("float32", "bfloat16"), (False, True)):
        sizes = (1, 2, 3 * times)
        wrong = Setting(sizes, dtype, resets="some", reverse=turned, poisoned=True, tile=tile)
        if turned == (dtype == "float32"):
            yield wrong
        else:
            yield replace(wrong, offsets=(0, times + 4, 3 * times), sizes=(1, 1, 3 * times))
    yield from packed(direction, tile, times)


def packed(direction: Direction, tile: tuple[int, ...], times: int) -> Iterator[Setting]:
    omitted = cycle(OMITTED[direction])
    # Sequences that are empty, of one step, of a tile and a step, and of one tile.
    ends = (0, 0, 3, 3, times + 4, times + 5, 2 * times + 5, 2 * times + 5)
    for resets, turned in product(("", "some"), (False, True)):
        yield Setting(
            (2, 3, ends[-1]), resets=resets, offsets=ends, reverse=turned, tile=tile,
            omitted=next(omitted),
        )  # fmt: skip


def faults(direction: Direction, kinds: list[str]) -> Iterator[str]:
    """What is wrong with the kernels of a direction."""
    torch.manual_seed(0)
    for layout, kind in product(LAYOUTS, kinds):
        for setting in settings(layout, direction, kind):
            run = Run(layout, direction, KINDS[kind], setting)
            run.launch()
            for fault in run.faults():
                yield f"{layout} {kind} {setting}: {fault}"


if __name__ == "__main__":
    mend()
    for fault in faults(sys.argv[1], sys.argv[2:] or list(KINDS)):  # type: ignore[arg-type]
        print(fault)
