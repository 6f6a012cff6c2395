"""Runs the Triton kernels of linear_scan in the interpreter, and prints what is wrong with them.

TRITON_INTERPRET=1 python tests/kernels/linear_scan/interpret_linear_scan.py few forward backward reduction
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations, cycle
from typing import Any

import torch
from covering import each_value
from torch import Tensor
from triton_interpreter import allow, mend

from scan_registry.kernels.cases import there
from scan_registry.kernels.linear_scan import cases, triton_columns, triton_kernels
from scan_registry.kernels.linear_scan import problem as problems
from scan_registry.kernels.linear_scan.problem import STRIDED, Strides
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import Kernel, Variant

#: Constants of tiles far smaller than those that are built, so that small problems have several: the interpreter takes 0.1 s
#: for a tile of any size.
SMALL = {
    "time_last generic": {"ROWS": 2, "TIMES": 16},
    "time_last aligned": {"ROWS": 1, "TIMES": 64},
    "channel_last generic": {"CHANNELS": 4, "GROUPS": 2, "STEPS": 4, "VECTOR": 1},
    "channel_last aligned": {"CHANNELS": 4, "GROUPS": 2, "STEPS": 4, "VECTOR": 4},
    "reduction": {"UNIT": 4, "OTHER": 16},
}
#: (batch, channels, time): one step, a tile that is not full and one that is, several tiles.
SHAPES = ((2, 1, 1), (2, 3, 15), (2, 1, 33))
ALIGNED = {
    "time_last": ((1, 1, 80), (1, 2, 48), (1, 1, 128)),
    "channel_last": ((1, 8, 9), (1, 16, 7)),
}
#: With the tile that is built, and a bit.
BUILT = {"time_last": (2, 1, 270), "channel_last": (2, 40, 70)}
#: Sums over one dimension, and over several.
BROADCAST = [
    names for n in range(1, 5) for names in combinations(("outer", "batch", "channel", "time"), n)
]
#: Starts and ends of sequences that are none, in turn.
MALFORMED = ((0, 30, 4, 20), (-7, 9, 99), (2**62, -(2**63), 2**63 - 1, -1, 3), (5, 5, 5), (0, 0, 0))
#: Memory orders of (outer, batch, channels, time), slowest first, of which tensors take turns.
ORDERS = {
    "time_last": ((0, 1, 2, 3), (1, 2, 0, 3), (2, 3, 0, 1)),
    "channel_last": ((0, 1, 3, 2), (3, 1, 0, 2), (2, 3, 0, 1)),
}
#: The tensors that have strides of another name.
OF = {
    "grads": ("gates_grad", "tokens_grad"),
    "state": ("initial_state", "final_state", "final_state_grad", "initial_state_grad"),
}
#: Of an output, by its dtype. The interpreter cuts bfloat16 off where a GPU rounds.
TOLERANCE = cases.TOLERANCE | {"complex64": 1e-6}
#: What a backward kernel may leave out.
LEFT_OUT = (("gates_grad", "states"), ("tokens_grad", "initial_state_grad"))


def laid(tensor: Tensor, order: tuple[int, ...], gap: int) -> Tensor:
    """A copy whose dimensions lie in memory in this order, with gaps between its lines."""
    turned = tensor.permute(order)
    memory = tensor.new_empty(*turned.shape[:-1], turned.shape[-1] + gap)
    copy = memory[..., : turned.shape[-1]].copy_(turned)
    return copy.permute([order.index(d) for d in range(tensor.dim())])


def scattered(case: cases.Case) -> cases.Case:
    """The same in memory where each tensor lies otherwise."""
    problem, tensors, strides = case.problem, dict(case.tensors), []
    names = STRIDED[problem.direction]
    for number, (strided, usual) in enumerate(zip(names, problem.strides, strict=True)):
        own = usual
        for name in OF.get(strided, (strided,)):
            tensor = tensors.get(name)
            if tensor is None or (name == "gates_grad" and problem.direction == "reduction"):
                continue
            if strided == "state":
                order = tuple(d for d in (2, 3, 1, 0) if d < tensor.dim())
                tensors[name] = state = laid(tensor, order, 0)
                own = Strides(*(*state.stride(), 0)[:4])
            else:
                tensors[name] = laid(tensor, ORDERS[problem.layout][number % 3], 2 + number)
                own = Strides(*tensors[name].expand(problem.sizes).stride())
        strides.append(own)
    return replace(
        case, problem=replace(problem, strides=tuple(strides), alignment=1), tensors=tensors
    )


class Run:
    """Launches of one variant, with the small tile or its own."""

    def __init__(self, kernel: Kernel, variant: Variant, small: bool) -> None:
        layout, _, direction = kernel.name.rpartition("_")
        reduces = direction == "reduction"
        self.kernel, self.aligned = kernel, not reduces and variant.text("access") == "aligned"
        of_columns = layout == "channel_last" and not reduces
        self.function = getattr(triton_columns if of_columns else triton_kernels, kernel.name)
        self.constants: dict[str, Any] = dict(kernel.code.constants(variant))
        if small:
            access = "aligned" if self.aligned else "generic"
            self.constants |= SMALL[direction if reduces else f"{layout} {access}"]
        of_grid = {n.lower(): self.constants.get(n) for n in ("ROWS", "CHANNELS", "TIMES")}
        statics = {name: of_grid.get(name) or value for name, value in variant.statics}
        self.variant = replace(variant, statics=tuple(statics.items()))
        if reduces:
            problems.REDUCTION_TILE = self.constants["UNIT"], self.constants["OTHER"]

    def draw(self, shape: cases.Shape, setting: cases.Setting) -> cases.Case | None:
        """A launch that the variant takes, if it takes one of them."""
        trial = cases.draw(shape, setting, self.variant.text("dtype"), "cpu")
        case = trial.case(self.kernel.name, aligned=True)
        case = case if self.aligned else scattered(case)
        return None if self.kernel.rules.accepts(self.variant, case.problem) else case

    def launch(self, case: cases.Case) -> None:
        """Sequences lie along y, which has a limit, and then z. All that is written is to be written, and so with reading."""
        launch = self.kernel.launch(self.variant, case.problem, 4)
        values: list[Any] = []
        for parameter in self.kernel.parameters:
            tensor = case.tensors.get(parameter.name)
            if tensor is not None:
                values.append(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
            elif parameter.kind == "i64":
                values.append(launch.scalars[parameter.name])
            else:
                dtype = torch.int64 if parameter.name in ("offsets", "workspace") else torch.float32
                values.append(torch.empty(0, dtype=dtype))
        places = {name: tensor for name, tensor in case.tensors.items() if tensor is not None}
        allow(
            reads=[tensor for name, tensor in places.items() if name not in case.expected],
            writes=[places[name] for name in case.expected],
        )
        lines, y, z = launch.grid
        self.function[lines, min(y * z, 3), -(-y * z // 3)](*values, **self.constants)

    def faults(
        self, case: cases.Case, steps: Any = slice(None), state: Any = slice(None)
    ) -> Iterator[str]:
        """What is wrong with these steps of the outputs, and with these states of packed sequences."""
        self.launch(case)
        for name, expected in case.expected.items():
            out = there(case.tensors[name])
            tolerance = TOLERANCE[str(out.dtype).removeprefix("torch.")]
            if case.problem.direction == "reduction":
                tolerance *= 10  # what is summed may all but cancel
            elif name == "gates_grad":  # a product with states as they were rounded
                tolerance = TOLERANCE[case.problem.dtype]
            where = state if name in OF["state"] else steps
            part = (..., where) if case.problem.sequences else ...
            error = case.error_of(name, out[part], expected[part])
            if error > tolerance:
                yield f"{name} is off by {error:.2g}"


def spoilt_faults(run: Run, setting: cases.Setting) -> Iterator[str]:
    """All sequences but the longest hold infinities and NaNs, which do not reach it."""
    case = run.draw((1, 2, 40), setting)
    assert case is not None
    offsets = there(case.tensors["offsets"])
    number = int(offsets.diff().argmax())
    begin, end = offsets[number : number + 2].tolist()
    for name in ("gates", "tokens", "states", "states_grad", "tokens_grad"):
        tensor = case.tensors.get(name)
        if tensor is not None and name not in case.expected and tensor.shape[-1] > 1:
            tensor[..., :begin], tensor[..., end:] = torch.inf, torch.nan
    others = [n for n in range(len(offsets) - 1) if n != number]
    for name in ("initial_state", "final_state_grad"):
        if (tensor := case.tensors.get(name)) is not None:
            tensor[..., others] = torch.inf
    yield from run.faults(case, slice(begin, end), slice(number, number + 1))


def without(case: cases.Case, names: tuple[str, ...]) -> cases.Case:
    """The launch that is not given these tensors."""
    tensors = case.tensors | dict.fromkeys(names)
    return replace(
        case, tensors=tensors, expected={n: x for n, x in case.expected.items() if n not in names}
    )


def each_option(settings: list[cases.Setting]) -> list[cases.Setting]:
    """Some of the settings, in which every value of their options occurs."""
    rows = []
    for setting in settings:
        summed = (name in setting.broadcast for name in ("outer", "batch", "channel", "time"))
        rows.append((*(vars(setting) | {"broadcast": None}).values(), *summed))
    return [settings[number] for number in each_value(rows)]


def faults(kernel: Kernel, few: bool) -> Iterator[str]:
    """What is wrong with the kernel. In float32 it is given all there is, or a few, and in other dtypes some settings in turn."""
    torch.manual_seed(0)
    layout, _, direction = kernel.name.rpartition("_")
    reduces = direction == "reduction"
    every = [cases.Setting(states=True, broadcast=names, outer=2) for names in BROADCAST]
    every = every if reduces else [*cases.PLAIN, *cases.OPTIONS, *every[:4]]
    packed = [s for s in cases.OPTIONS if s.packed and bool(s.broadcast) == reduces and not s.mixed]
    if few:
        every, packed = each_option(every), each_option(packed)
    turn, shapes, wide_shapes = cycle(every), cycle(SHAPES), cycle(ALIGNED[layout])
    for variant in kernel.variants:
        whole, run, taken = variant.text("dtype") == "float32", Run(kernel, variant, small=True), 0
        statics = dict(variant.statics)
        mixed = statics.get("gates", statics["dtype"]) != statics["dtype"]
        settings = every if whole else [next(turn) for _ in range(2)]
        enough = 1 + run.aligned if few and (run.aligned or not whole) else len(every)
        for setting in cases.PLAIN if run.aligned else settings:
            if taken == enough:
                break
            shape = next(wide_shapes if run.aligned else shapes)
            case = run.draw(shape, replace(setting, mixed=mixed))
            taken += case is not None
            for fault in () if case is None else run.faults(case):
                yield f"{variant}, {setting}: {fault}"
        if not taken:
            yield f"{variant} takes nothing"
        if whole and not run.aligned:
            bounds = MALFORMED[::2] if few else MALFORMED
            for fault in odd_faults(run, packed, bounds, left_out=direction == "backward"):
                yield f"{variant}{fault}"
            run = Run(kernel, variant, small=False)
            setting = every[-1] if reduces else cases.Setting()
            for fault in run.faults(there(run.draw(BUILT[layout], setting))):
                yield f"{variant}: {fault}"


def odd_faults(
    run: Run,
    packed: list[cases.Setting],
    malformed: Iterable[tuple[int, ...]],
    left_out: bool,
) -> Iterator[str]:
    """Of packed sequences that are spoilt or have malformed bounds, which must not crash, and of launches that leave out what
    need not be asked for."""
    for setting in packed:
        for fault in spoilt_faults(run, setting):
            yield f", spoilt, {setting}: {fault}"
    for bounds in malformed:
        case = there(run.draw((1, 2, 20), packed[-1]))
        offsets = there(case.tensors["offsets"])
        offsets.copy_(torch.tensor((bounds * 10)[: len(offsets)]))
        run.launch(case)
    for names in LEFT_OUT if left_out else ():
        case = without(there(run.draw((2, 3, 33), cases.Setting(states=True))), names)
        for fault in run.faults(case):
            yield f" without {names}: {fault}"


if __name__ == "__main__":
    mend()
    for kernel in FAMILY.kernels:
        if kernel.language == "triton" and kernel.name.rpartition("_")[2] in sys.argv[1:]:
            for fault in faults(kernel, few="few" in sys.argv[1:]):
                print(f"{kernel.name}: {fault}")
