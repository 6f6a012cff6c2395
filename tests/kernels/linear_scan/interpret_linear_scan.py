"""Runs the Triton kernels of linear_scan in the interpreter, and prints what is wrong with them.

TRITON_INTERPRET=1 python tests/kernels/linear_scan/interpret_linear_scan.py forward backward reduction
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

import torch
from linear_scan_settings import BEFORE, STATES, Setting, reductions, scans
from torch import Tensor
from triton_interpreter import Placed, allow, mend

from scan_registry.kernels.linear_scan import problem as problems
from scan_registry.kernels.linear_scan import reference, triton_columns, triton_kernels
from scan_registry.kernels.linear_scan.problem import (
    DIMENSIONS,
    STRIDED,
    Direction,
    Layout,
    LinearScanProblem,
    Reduction,
    Strides,
    ceil_div,
)

KERNELS: dict[str, tuple[Layout, Direction]] = {
    "time_last_forward": ("time_last", "forward"),
    "time_last_backward": ("time_last", "backward"),
    "time_last_reduction": ("time_last", "reduction"),
    "channel_last_forward": ("channel_last", "forward"),
    "channel_last_backward": ("channel_last", "backward"),
    "channel_last_reduction": ("channel_last", "reduction"),
}
# fmt: off
POINTERS: dict[Direction, tuple[str, ...]] = {
    "forward": (
        "gates", "tokens", "initial_state", "states", "final_state", "offsets", "workspace",
    ),
    "backward": (
        "gates", "states", "states_grad", "initial_state", "final_state_grad",
        "gates_grad", "tokens_grad", "initial_state_grad", "offsets", "workspace",
    ),
    "reduction": ("tokens_grad", "states", "initial_state", "gates_grad", "offsets"),
}
# fmt: on
INPUTS: dict[Direction, tuple[str, ...]] = {
    "forward": ("gates", "tokens", "initial_state"),
    "backward": ("gates", "states", "states_grad", *BEFORE),
    "reduction": ("tokens_grad", "states", "initial_state"),
}
OUTPUTS: dict[Direction, tuple[str, ...]] = {
    "forward": ("states", "final_state"),
    "backward": ("gates_grad", "tokens_grad", "initial_state_grad"),
    "reduction": ("gates_grad",),
}
#: Largest ‖out − ref‖ / ‖ref‖, by the dtype of the output. The interpreter cuts bfloat16 off where a
#: GPU rounds.
TOLERANCE = {
    torch.float32: 1e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
    torch.float64: 1e-14,
    torch.complex64: 1e-6,
}
#: Memory orders of (outer, batch, channels, time), slowest first, and what runs downwards there.
PLACEMENTS: dict[Layout, tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]] = {
    "time_last": (((0, 1, 2, 3), ()), ((1, 2, 0, 3), (3,)), ((2, 3, 0, 1), (0, 2))),
    "channel_last": (((0, 1, 3, 2), ()), ((3, 1, 0, 2), (2,)), ((2, 3, 0, 1), (3, 1))),
}
#: Told where there is no stride: of what is null.
NO_STRIDE = 1 << 40


def random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype if dtype.is_complex else torch.float64).to(dtype)


def draw(setting: Setting, direction: Direction) -> dict[str, Tensor]:
    """The inputs, gates of size 1 where they are broadcast; states as the forward pass leaves them."""
    once = [1 if d in setting.broadcast else size for d, size in enumerate(setting.sizes)]
    gates = (1 - torch.rand(once) ** 3).to(setting.dtype_of("gates", direction))
    inputs = {"gates": gates * torch.exp(1j * torch.randn(once)) if gates.is_complex() else gates}
    for name in ("tokens", "states", "states_grad", "tokens_grad", *BEFORE):
        if name not in setting.omitted:
            sizes = setting.state_sizes if name in BEFORE else setting.sizes
            inputs[name] = random(sizes, setting.dtype_of(name, direction))
    if setting.far:
        inputs["gates"].zero_()
        inputs["initial_state"] *= 2e5
        inputs["states_grad"] /= 100
        inputs["final_state_grad"].zero_()
    if setting.poisoned:
        _, begin, end, *_ = setting.offsets
        for name in ("gates", "tokens", "states_grad", "tokens_grad"):
            inputs[name][..., :begin] = torch.inf
            inputs[name][..., end:] = torch.nan
        for name in BEFORE:
            inputs[name][..., [0, *range(2, setting.sequences)]] = torch.inf
    if not setting.is_malformed() and "states" in inputs:
        inputs["states"] = solve("forward", setting, inputs)["states"].to(inputs["states"].dtype)
    return inputs


def solve(direction: Direction, setting: Setting, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outputs by the reference, in float64 or complex128."""
    wide = torch.complex128 if inputs["gates"].is_complex() else torch.float64
    given = {name: tensor.to(wide) for name, tensor in inputs.items()}
    gates, initial = given["gates"], given.get("initial_state")
    bounds = torch.tensor(setting.offsets) if setting.offsets else None
    if direction == "forward":
        states, final = reference.forward(
            gates, given["tokens"], initial, reverse=setting.reverse, cu_seqlens=bounds
        )
        return {"states": states, "final_state": final}
    states_grad, final_grad = given["states_grad"], given.get("final_state_grad")
    if direction == "backward":
        gates = gates.expand(setting.sizes)
    else:
        # With gates of 0, the gradients of tokens are those of the states.
        gates, states_grad, final_grad = torch.zeros_like(gates), given["tokens_grad"], None
    states = given.get("states", torch.zeros_like(states_grad))
    grads = reference.backward(
        gates, states, states_grad, initial, final_grad, reverse=setting.reverse, cu_seqlens=bounds
    )
    return dict(zip(OUTPUTS["backward"], grads, strict=True))


class Run:
    """One launch of a kernel: what it is given, where that is in memory, and what is expected."""

    def __init__(self, kernel: str, setting: Setting) -> None:
        self.kernel, self.setting = kernel, setting
        self.layout, self.direction = KERNELS[kernel]
        inputs = draw(setting, self.direction)
        self.outputs = [o for o in OUTPUTS[self.direction] if o not in setting.omitted]
        self.expected = {} if setting.is_malformed() else solve(self.direction, setting, inputs)
        self.placed = {i: self.place(i, inputs[i]) for i in INPUTS[self.direction] if i in inputs}
        for name in self.outputs:
            sizes = setting.state_sizes if name in STATES else setting.sizes
            values = torch.full(sizes, torch.nan, dtype=setting.dtype_of(name, self.direction))
            self.placed[name] = self.place(name, values)
        if setting.offsets:
            self.placed["offsets"] = Placed.of(torch.tensor(setting.offsets), (0,), fill=0)

    def strided(self, name: str) -> str:
        """The tensor whose strides ``name`` has."""
        if name in STATES:
            return "state"
        return name if name in STRIDED[self.direction] else "grads"

    def place(self, name: str, values: Tensor) -> Placed:
        setting, strided = self.setting, self.strided(name)
        number = STRIDED[self.direction].index(strided)
        order, downwards = PLACEMENTS[self.layout][0 if setting.aligned else number % 3]
        fill = 7.0 if name in self.outputs else torch.nan
        if strided == "state":
            order = tuple(d for d in (2, 3, 1, 0) if d < values.dim())
            return Placed.of(values, order, (1,), fill=fill)
        if name == "gates_grad" and self.direction == "reduction":
            # Pieces of gates, and those contiguous; in strides, of size 1 where they are summed.
            kept = [1 if setting.sums(d) else size for d, size in enumerate(setting.sizes)]
            values = torch.full((self.reduction().pieces, *kept), torch.nan, dtype=values.dtype)
            return Placed.of(values, (0, *(d + 1 for d in order)), fill=fill)
        if name == "gates":
            values, single = values.expand(setting.sizes), setting.broadcast
            return Placed.of(values, order, downwards, gap=16, single=single, fill=fill)
        gap = 16 if setting.aligned else 2 + number
        return Placed.of(values, order, downwards, gap=gap, fill=fill)

    def problem(self) -> LinearScanProblem:
        """With the strides that the kernel is told."""
        told = dict.fromkeys(STRIDED[self.direction], (NO_STRIDE,) * 4)
        for tensor, placed in self.placed.items():
            if tensor != "offsets":
                told[self.strided(tensor)] = (*placed.strides[-4:], NO_STRIDE)[:4]
        if self.direction == "reduction":
            told["gates_grad"] = self.pieces_strides(told["gates_grad"])
        return self.described(told.values())

    def described(self, strides: Iterable[tuple[int, ...]]) -> LinearScanProblem:
        setting = self.setting
        return LinearScanProblem(
            self.direction, self.layout, setting.dtype, setting.gates or setting.dtype,
            *setting.sizes, tuple(Strides(*each) for each in strides), alignment=1,
            sequences=setting.sequences, reverse=setting.reverse,
        )  # fmt: skip

    def pieces_strides(self, strides: tuple[int, ...]) -> tuple[int, ...]:
        """Of gates_grad, 0 along what is summed."""
        return tuple(0 if self.setting.sums(d) else strides[d] for d in range(4))

    def reduction(self) -> Reduction:
        """As the problem says, but for the number of groups that the setting wants."""
        ones = (1, 1, 1, 1)
        plan = self.described((ones, ones, self.pieces_strides(ones), ones)).reduction()
        groups = self.setting.groups or plan.groups
        return replace(plan, groups=groups, pieces=plan.pieces // plan.groups * groups)

    def grid(self) -> tuple[int, int, int]:
        """Lines along x, and sequences along y, which has a limit, and then z."""
        setting = self.setting
        outer, batch, channels, _ = setting.sizes
        if self.direction == "reduction":
            plan = self.reduction()
            return plan.kept * plan.groups * plan.tiles[0] * plan.tiles[1], 1, 1
        if self.layout == "time_last":
            lines = ceil_div(outer * batch * channels, setting.tile[0])
        else:
            lines = outer * batch * ceil_div(channels, setting.tile[0])
        return lines, min(max(setting.sequences, 1), 3), ceil_div(max(setting.sequences, 1), 3)

    def constants(self) -> dict[str, int]:
        setting = self.setting
        found = {"COMPLEX": int(setting.dtype == "complex64")}
        if self.direction == "reduction":
            return found | dict(zip(("UNIT", "OTHER"), setting.tile, strict=True))
        found |= {"ALIGNED": int(setting.aligned), "STAGES": 2}
        if self.layout == "time_last":
            found["REVERSE"] = int(setting.aligned and setting.reverse)
            return found | dict(zip(("ROWS", "TIMES"), setting.tile, strict=True))
        found |= dict(zip(("CHANNELS", "GROUPS", "STEPS"), setting.tile, strict=True))
        return found | {"VECTOR": 4 if setting.aligned else 1}

    def launch(self) -> None:
        problem = self.problem()
        assert problem.plain() or not self.setting.aligned
        values: list[Tensor | int] = []
        for name in POINTERS[self.direction]:
            dtype = self.setting.dtype_of(name, self.direction)
            null = torch.empty(0, dtype=torch.float32 if dtype.is_complex else dtype)
            assert null.data_ptr() == 0
            values.append(self.placed[name].pointer() if name in self.placed else null)
        strides = product(STRIDED[self.direction], DIMENSIONS)
        names = ["outer", "batch", "channels", "time", "sequences", *map("_".join, strides)]
        names += ["groups"] if self.direction == "reduction" else []
        scalars = problem.scalars()
        if self.direction == "reduction":
            scalars["groups"] = self.reduction().groups
        assert {*names, "flags"} == {*scalars}
        values += [scalars[name] for name in (*names, "flags")]

        allow(
            reads=[p for n, p in self.placed.items() if n not in self.outputs],
            writes=[p for n, p in self.placed.items() if n in self.outputs],
        )
        walks = self.layout == "channel_last" and self.direction != "reduction"
        module = triton_columns if walks else triton_kernels
        getattr(module, self.kernel)[self.grid()](*values, **self.constants())

    def faults(self) -> Iterator[str]:
        """What is wrong with the outputs."""
        for name in self.outputs:
            placed = self.placed[name]
            if not placed.is_intact():
                yield f"something beside {name} was written"
            if self.setting.is_malformed():
                continue
            out, expected = placed.tensor(), self.expected[name]
            if self.direction == "reduction":
                out = out.sum(0)
            if name in STATES and self.setting.offsets:
                empty = torch.tensor(self.setting.offsets).diff() == 0
                if not out[..., empty].isnan().all():
                    yield f"{name} was written for an empty sequence"
                out, expected = out[..., ~empty], expected[..., ~empty]
            if self.setting.poisoned:
                _, begin, end, *_ = self.setting.offsets
                clean = slice(1, 2) if name in STATES else slice(begin, end)
                out, expected = out[..., clean], expected[..., clean]
                assert expected.isfinite().all()
            error = (out.to(expected.dtype) - expected).norm()
            # What is summed may all but cancel.
            tolerance = TOLERANCE[out.dtype] * (10 if self.direction == "reduction" else 1)
            if not error <= tolerance * expected.norm():
                yield f"{name} is off by {error:.2g}, of {expected.norm():.2g}"


def faults(kernel: str) -> Iterator[str]:
    """What is wrong with ``kernel``."""
    torch.manual_seed(0)
    layout, direction = KERNELS[kernel]
    for setting in reductions(layout) if direction == "reduction" else scans(layout, direction):
        problems.REDUCTION_TILE = setting.tile
        run = Run(kernel, setting)
        run.launch()
        for fault in run.faults():
            yield f"{setting}: {fault}"


if __name__ == "__main__":
    mend()
    for kernel, (_, direction) in KERNELS.items():
        if direction in sys.argv[1:]:
            for fault in faults(kernel):
                print(f"{kernel}: {fault}")
