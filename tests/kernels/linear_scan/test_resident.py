"""CUDA kernels of linear_scan with one gate for all time steps, of scans that shared memory has room for, in an emulator of the GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
import torch
from contiguous_channels import DIRECTIONS, is_taken, posed, solved, surrounded
from selecting import like

from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan import cases, resident
from scan_registry.kernels.linear_scan.problem import LinearScanProblem
from scan_registry.kernels.linear_scan.space import RESIDENT
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import Kernel, Variant

LAYOUTS = ("channel_last", "time_last")
#: (batch, channels, time), by layout: a run of one chunk, several runs of a CTA, CTAs that share a batch, channels that leave lanes
#: idle, and, with few SMs, runs of more chunks than a warp keeps.
SHAPES = {
    "channel_last": ((3, 4, 300), (2, 17, 700), (1, 8, 7000), (1, 21, 2500), (9, 32, 400)),
    "time_last": ((2, 3, 300), (1, 2, 5000), (1, 1, 41_003), (40, 1, 1060)),
}
#: SMs of the GPU that launches.
SM_COUNTS = (5, 2)
SETTINGS = (
    cases.Setting(states=True, broadcast=("time",)),
    cases.Setting(reverse=True, broadcast=("batch", "channel", "time")),
    cases.Setting(states=True, reverse=True, lasting=True, broadcast=("batch", "time")),
)


def the_kernel(layout: str, direction: str) -> tuple[Kernel, Variant]:
    kernel = FAMILY.kernel(f"{layout}_{direction}", "cuda")
    return kernel, like(kernel, {"dtype": "float32", "access": RESIDENT})


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_states_and_sums(
    direction: str, layout: str, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """Wherever rows begin, beside NaN, and in workspace that holds anything. Nothing beside the results changes."""
    kernel, variant = the_kernel(layout, direction)
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    for seed, (shape, setting) in enumerate(product(SHAPES[layout], SETTINGS)):
        trial = solved(shape, setting, "float32")
        case = trial.case(kernel.name, aligned=True, sums=direction == "backward")
        assert resident._exceeds(case.problem) is None
        tensors, memories = dict(case.tensors), []
        for name, tensor in case.tensors.items():
            if tensor is not None and tensor.dim() == 4:
                is_result = name in case.expected
                memory, tensors[name] = surrounded(tensor, 0, torch.nan)
                memories += [(memory, name)] if is_result else []
        library.run(case.problem, tensors, seed, SM_COUNTS[seed % 2])
        results = replace(case, tensors=tensors)
        for name, expected in case.expected.items():
            error = results.error_of(name, tensors[name], expected)
            if name == "gates_grad":  # a sum of terms that cancel is no more exact than they are
                terms = trial.expected["tokens_grad"] * cases.wide(trial.inputs["states"])
                error *= float(expected.norm() / terms.abs().sum(-1).norm())
            assert error <= cases.TOLERANCE["float32"], (shape, setting, name)
        for memory, name in memories:
            tensors[name].fill_(torch.nan)
            assert memory.isnan().all(), (shape, setting, name)


def of_rows(case: str, direction: str = "forward") -> LinearScanProblem:
    """The problem of rows of contiguous time, each with one gate: "batch,channels,time"."""
    batch, channels, time = map(int, case.split(","))
    setting = cases.Setting(broadcast=("time",))
    trial = cases.draw((batch, channels, 2), setting, "float32", "cpu")
    problem = trial.case(
        f"time_last_{direction}", aligned=True, sums=direction == "backward"
    ).problem
    longer = [
        replace(s, batch=s.batch // 2 * time, channel=s.channel // 2 * time)
        for s in problem.strides[1:-1]
    ]
    return replace(problem, time=time, strides=(problem.strides[0], *longer, problem.strides[-1]))


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (posed("1,1048576,8:float32", gate_stride=0), True),
        (posed("1000,3000,2:float32", gate_stride=0), True),
        (posed("1,100000,3:float32", gate_stride=0), True),
        (posed("16,16000,8:float32", gate_stride=0), False),
        (posed("64,2048,17:float32", gate_stride=0), False),
        (posed("512,2048,8:float32", gate_stride=0), False),
        (posed("1,100,3:float32", gate_stride=0), False),
        (posed("1,100000,3:float32"), False),
        (posed("1,100000,3:float32", gate_stride=0, alignment=4), False),
        (posed("1,100000,3:float32", "backward", gate_stride=0), False),
        (posed("1,8388608,8:float32", gate_stride=0), False),
        (of_rows("256,4,2048"), True),
        (of_rows("256,4,2048", "backward"), True),
        (of_rows("300,1,1056"), True),
        (of_rows("2,1,4194304"), False),
        (of_rows("1024,4,2048"), False),
        (of_rows("1024,1,640"), False),
    ],
    ids=repr,
)
def test_what_it_takes(problem: LinearScanProblem, expected: bool) -> None:
    kernel, variant = the_kernel(problem.layout, problem.direction)
    assert is_taken(kernel, variant, problem) == expected


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("arch", "is_served"), [("sm89", False), ("sm90", True), ("sm120", False), ("ptx80", False)]
)
def test_it_is_compiled_where_there_are_bulk_copies_and_room(
    arch: str, is_served: bool, direction: str
) -> None:
    """Also at run time, where no wheel was built for a GPU."""
    for layout in LAYOUTS:
        kernel, variant = the_kernel(layout, direction)
        assert kernel.rules.serves(variant.statics, Target.parse(arch)) == is_served
