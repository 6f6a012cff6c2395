"""Runs the Triton kernels of linear_scan in the interpreter, and prints what is wrong with them.

TRITON_INTERPRET=1 python tests/kernels/interpret_linear_scan.py forward|backward|reduction
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, cycle, product
from math import prod

import torch
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
BEFORE = ("initial_state", "final_state_grad")
STATES = (*BEFORE, "final_state", "initial_state_grad")
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


@dataclass(frozen=True)
class Setting:
    """A problem to solve, and how.

    sizes      outer, batch, channels, time
    gates      dtype of gates; that of the rest if empty
    broadcast  dimensions along which gates are broadcast
    offsets    bounds of the packed sequences
    omitted    parameters that are null
    poisoned   whether all sequences but the second hold infinities and NaNs
    far        whether initial states are beyond float16, and gates of 0 keep them from all other states
    tile       of the variant: rows and times; or channels, groups and steps; or along the unit and other
               dimension
    aligned    whether it is an aligned variant
    groups     of a reduction, if not as many as the problem says
    """

    sizes: tuple[int, int, int, int]
    dtype: str = "float32"
    gates: str = ""
    broadcast: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    reverse: bool = False
    omitted: tuple[str, ...] = ()
    poisoned: bool = False
    far: bool = False
    tile: tuple[int, ...] = (2, 16)
    aligned: bool = False
    groups: int = 0

    @property
    def sequences(self) -> int:
        return max(len(self.offsets) - 1, 0)

    @property
    def state_sizes(self) -> tuple[int, ...]:
        return (*self.sizes[:3], self.sequences) if self.offsets else self.sizes[:3]

    def sums(self, dimension: int) -> bool:
        return dimension in self.broadcast and self.sizes[dimension] > 1

    def is_malformed(self) -> bool:
        ends = list(self.offsets) or [0, self.sizes[3]]
        return ends != sorted(ends) or (ends[0], ends[-1]) != (0, self.sizes[3])

    def dtype_of(self, tensor: str, direction: Direction) -> torch.dtype:
        if tensor in ("offsets", "workspace"):
            return torch.int64
        if tensor in STATES or (tensor, direction) == ("gates_grad", "reduction"):
            return reference.compute_dtype(getattr(torch, self.dtype))
        name = self.gates if tensor in ("gates", "gates_grad") and self.gates else self.dtype
        dtype: torch.dtype = getattr(torch, name)
        return dtype


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


#: Pairs of dtypes of tokens and of gates.
DTYPES = (
    ("float32", ""),
    ("bfloat16", ""),
    ("float16", ""),
    ("float64", ""),
    ("complex64", ""),
    ("bfloat16", "float32"),
    ("float16", "float32"),
)
MALFORMED = (
    (0, 30, 4, 20),
    (-7, 9, 99),
    (2**62, -(2**63), 2**63 - 1, -1, 3),
    (5, 5, 5),
    (0, 0, 0),
)
BUILT_TILE = problems.REDUCTION_TILE
#: What may be null in each direction, together.
OMITTED: dict[Direction, tuple[tuple[str, ...], ...]] = {
    "forward": ((), ("initial_state",), ("final_state",), ("initial_state", "final_state")),
    "backward": (
        (),
        ("gates_grad", "states"),
        BEFORE,
        ("tokens_grad", "initial_state_grad"),
        ("initial_state",),
        ("gates_grad", "states", "tokens_grad"),
    ),
    "reduction": ((), ("initial_state",)),
}


def scans(layout: Layout, direction: Direction) -> Iterator[Setting]:
    """Problems for generic and aligned variants, of few tiles: the interpreter takes 0.1 s for one
    of any size. All begin with one row or channel, or more than the tile has."""
    time_last = layout == "time_last"
    tile: tuple[int, ...] = (2, 16) if time_last else (4, 2, 4)
    times, rows = prod(tile[1:]), cycle((80, 48, 128))
    omitted, reverse = cycle(OMITTED[direction]), flags()
    for sizes in ((1, 1, 1, 1), (1, 2, 1, times), (2, 1, 3, times - 1), (1, 3, 1, 2 * times + 1)):
        for turned in (False, True):
            yield Setting(sizes, tile=tile, reverse=turned, omitted=next(omitted))
    for dtype, gates in DTYPES:
        sizes = (1, 2, 2, times + 3)
        yield Setting(sizes, dtype, gates, tile=tile, reverse=next(reverse))
    for (dtype, _), turned in product(DTYPES[:5], (False, True)):
        sizes, tiles = ((1, 1, 1, next(rows)), (1, 64)) if time_last else ((1, 1, 5, 9), tile)
        yield Setting(sizes, dtype, reverse=turned, tile=tiles, aligned=True)
        if dtype == "float16":
            far = Setting(sizes, dtype, reverse=turned, tile=tiles, far=True)
            yield from (far, replace(far, aligned=True), replace(far, offsets=(0, 4, sizes[3])))
    for broadcast in ((0,), (1,), (2,), (3,), (0, 1, 2, 3)):
        wider = (8, 16) if time_last else (8, 4, 4)
        yield Setting((2, 2, 2, 9), broadcast=broadcast, tile=wider, reverse=next(reverse))

    # Sequences that are empty, of one step, of a tile and a step, and of one tile.
    ends = (0, 0, 3, 3, times + 4, times + 5, 2 * times + 5, 2 * times + 5)
    for turned in (False, True, False, True):
        sizes = (1, 2, 1, ends[-1])
        yield Setting(sizes, offsets=ends, omitted=next(omitted), reverse=turned, tile=tile)
    for dtype, turned in product(("float32", "complex64"), (False, True)):
        yield Setting(
            (1, 1, 2, 14), dtype, offsets=(0, 5, 9, 9, 14), reverse=turned, poisoned=True, tile=tile
        )
    for offsets in MALFORMED:
        yield Setting((1, 1, 2, 20), offsets=offsets, reverse=next(reverse), tile=tile)

    built: tuple[tuple[int, ...], ...] = ((1, 256), (1, 1024)) if time_last else ((64, 8, 8),)
    for tile, aligned in product(built, (False, True)):
        sizes = (1, 1, 1, tile[1] + 16) if time_last else (1, 1, 80, 65)
        yield Setting(sizes, tile=tile, aligned=aligned)


def reductions(layout: Layout) -> Iterator[Setting]:
    """Problems of one or several tiles of 4 along the unit dimension and 16 along the other."""
    small, reverse, omitted = (4, 16), flags(), cycle(OMITTED["reduction"])
    several, one = ((17, 6), (3, 4)) if layout == "time_last" else ((5, 18), (4, 5))
    for number in range(1, 5):
        for broadcast in combinations(range(4), number):
            sizes = (2, 2, *(several if 3 in broadcast else one))
            yield Setting(
                sizes, broadcast=broadcast, reverse=next(reverse), omitted=next(omitted), tile=small
            )
    for dtype, gates in DTYPES:
        yield Setting((1, 2, *one), dtype, gates, (1, 2), reverse=next(reverse), tile=small)
    for broadcast in ((0, 1), (0, 1, 2), (0, 1, 2, 3)):
        yield Setting((3, 2, *one), broadcast=broadcast, groups=4, tile=small)
    for broadcast, turned in product(((2,), (1, 3)), (False, True)):
        ends = (0, 0, 3, 3, 4, 11, 19, 19)
        yield Setting((1, 2, 3, 19), broadcast=broadcast, offsets=ends, reverse=turned, tile=small)
    for broadcast, turned in product(((1,), (1, 2)), (False, True)):
        ends = (0, 5, 9, 9, 14)
        yield Setting(
            (1, 2, 2, 14), broadcast=broadcast, offsets=ends, reverse=turned, poisoned=True,
            tile=small,
        )  # fmt: skip
    for offsets in MALFORMED:
        sizes = (1, 1, 2, 20)
        yield Setting(sizes, broadcast=(2,), offsets=offsets, reverse=next(reverse), tile=small)
    for broadcast in ((1, 2), (1, 3)):
        yield Setting((1, 2, 65, 33), broadcast=broadcast, tile=BUILT_TILE)


def flags() -> Iterator[bool]:
    return cycle((False, True))


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
        if direction == sys.argv[1]:
            for fault in faults(kernel):
                print(f"{kernel}: {fault}")
