"""The CUDA kernels of linear scans, in the emulator, on gates of which all time steps share one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from contiguous_channels import DIRECTIONS, posed, solved
from in_turn import in_turn
from planned import jobs_of
from selecting import like

from scan_registry.hardware.target import RELEASED, Target
from scan_registry.kernels.linear_scan import cases, streams
from scan_registry.kernels.linear_scan.op.bench import Case
from scan_registry.kernels.linear_scan.op.operator import OPERATOR
from scan_registry.kernels.linear_scan.spec import FAMILY

ONE_GATE_A_ROW = (
    cases.Setting(states=True, broadcast=("time",)),
    cases.Setting(reverse=True, broadcast=("batch", "channel", "time")),
    cases.Setting(states=True, broadcast=("batch", "time")),
)
ONE_GATE = (
    cases.Setting(states=True, broadcast=("time",)),
    cases.Setting(reverse=True, broadcast=("batch", "time")),
    cases.Setting(states=True, packed=True, broadcast=("time",)),
)


def checks_of(library: Any, pairs: Iterable[tuple[cases.Shape, cases.Setting]]) -> tuple[int, int]:
    """Launches an emulated variant on what it takes of these shapes and settings. Returns how many results are right, without sums of the gates'
    gradient and with them."""
    kernel, dtype, checked = library.kernel, library.variant.text("dtype"), [0, 0]
    for shape, setting in pairs:
        trial = solved(shape, setting, dtype, (shape[2] // 3, 0) if setting.packed else ())
        for sums in (False, True) if kernel.name.endswith("backward") else (False,):
            case = trial.case(kernel.name, aligned=True, sums=sums)
            if kernel.rules.accepts(library.variant, case.problem) is None:
                library.run(case.problem, case.tensors, seed=sum(checked))
                assert case.error() <= cases.TOLERANCE[dtype], str(trial)
                checked[sums] += 1
    return checked[0], checked[1]


@pytest.mark.parametrize(
    ("dtype", "access", "tile"),
    in_turn(
        ["bfloat16", "float32"],
        ["aligned", "misaligned"],
        [{"lanes": 4}, {"lanes": 16, "pieces": 2}, {"prefix_lead": 2}],
    ),
    ids=str,
)
def test_rows_with_one_gate_are_scanned_and_its_gradient_summed(
    dtype: str, access: str, tile: dict[str, int], cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """A row's only gate is read by itself, forward and backward; the kernel reads nothing else of the gates."""
    checked = 0
    for name in ("time_last_forward", "time_last_backward"):
        kernel = FAMILY.kernel(name, "cuda")
        variant = like(kernel, {"dtype": dtype, "access": access, **tile})
        library = cuda_emulator.emulated(kernel, variant, tmp_path)
        shapes = (2, 5, 720), (1, 3, 2500), (1, 40, 33)
        checked += sum(checks_of(library, zip(shapes, ONE_GATE_A_ROW, strict=True)))
    assert checked


@pytest.mark.parametrize("name", ["time_last_forward", "time_last_backward"])
def test_tiles_of_long_rows_may_have_no_gates(
    name: str, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """Rows that end in a tile, and batches that share gates, in either order of time."""
    kernel = FAMILY.kernel(name, "cuda")
    variant = like(kernel, {"dtype": "float32", "access": "one_gate"})
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    for shape, setting in product(((2, 2, 4112), (1, 1, 25_604)), ONE_GATE_A_ROW):
        case = solved(shape, setting, "float32").case(
            name, aligned=True, sums=name == "time_last_backward"
        )
        assert kernel.rules.accepts(variant, case.problem) is None
        library.run(case.problem, case.tensors, seed=shape[0])
        assert case.error() <= cases.TOLERANCE["float32"], (shape, setting)


@pytest.mark.parametrize(
    ("case", "is_faster"),
    [
        ("time_last:64,1,480000:float32:gates=channel", True),
        ("time_last:2,1,4194304:float32:gates=channel", True),
        ("time_last:1024,4,2048:float32:gates=channel", False),
        ("time_last:64,1,480000:float32", None),
    ],
)
def test_the_timing_model_says_where_tiles_without_gates_are_faster(
    case: str, is_faster: bool | None
) -> None:
    kernel = FAMILY.kernel("time_last_forward", "cuda")
    (problem, *_) = OPERATOR.posed(Case.parse(case), "forward")
    shape = kernel.tunable.shape(problem)
    tuning = next(t for t in kernel.tunable.tunings() if t.capability == (9, 0) and t.model)

    def best(access: str) -> float | None:
        pins = f"gates=float32,access={access},"
        texts = (str(v) for v in kernel.every if pins in str(v))
        times = [kernel.tunable.predicted(tuning.model, text, shape, 132) for text in texts]
        return min((ms for ms in times if ms is not None), default=None)

    without, others = best("one_gate"), best("aligned")
    assert others is not None
    assert (without and without < others) == is_faster


@pytest.mark.parametrize(
    ("name", "pins"),
    [
        ("time_last_backward", {"lanes": 16, "pieces": 2}),
        ("time_last_backward", {"prefix_lead": 2}),
        ("channel_last_backward", {"lanes_across": 16}),
    ],
    ids=str,
)
def test_one_gate_may_have_a_gradient_for_each_step(
    name: str, pins: dict[str, int], cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """As where it was expanded along time before the call."""
    torch.manual_seed(0)
    kernel = FAMILY.kernel(name, "cuda")
    variant = like(kernel, {"dtype": "float32", "access": "aligned", **pins})
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    trial = cases.draw(
        (2, 16, 720), cases.Setting(states=True, broadcast=("time",)), "float32", "cpu"
    )
    case = trial.case(name, aligned=True)
    states, initial = (cases.wide(trial.inputs[of]) for of in ("states", "initial_state"))
    before = torch.cat([initial[..., None], states[..., :-1]], -1)
    expected = trial.expected["tokens_grad"] * before
    case.tensors["gates_grad"] = torch.full_like(case.tensors["tokens_grad"], torch.nan)
    assert kernel.rules.accepts(variant, case.problem) is None
    library.run(case.problem, case.tensors, seed=0)
    assert case.error() <= cases.TOLERANCE["float32"]
    assert cases.relative_error(case.tensors["gates_grad"], expected) <= cases.TOLERANCE["float32"]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("channels", [2048, 2049])
def test_some_columns_have_a_gate_for_each_step(direction: str, channels: int) -> None:
    """Binaries with code for one gate, too, are twice as large, and these are seldom the fastest."""
    kernel = FAMILY.kernel(f"channel_last_{direction}", "cuda")
    variants = [
        v
        for v in kernel.every
        if not streams.takes_one_gate(v)
        and v.text("dtype") == "bfloat16"
        and v.text("access") == ("misaligned" if channels % 8 else "aligned")
    ]
    assert len({v.number("vector") for v in variants}) > 1
    case = f"8,4096,{channels}:bfloat16"
    problem = posed(case, direction, gate_stride=0)
    for variant in variants:
        assert kernel.rules.accepts(variant, posed(case, direction)) is None
        assert kernel.rules.accepts(variant, problem) is not None
        if direction == "backward":
            assert kernel.rules.accepts(variant, replace(problem, sums=True)) is not None
    assert any(kernel.rules.accepts(v, problem) is None for v in kernel.variants)
    # Of misaligned columns, scans of fewer steps than a tile has are left to narrower ones.
    short = posed(f"15,5,{channels}:bfloat16", direction)
    assert (kernel.rules.accepts(variant, short) is None) == (channels % 8 == 0)


def test_every_archive_has_columns_for_one_gate() -> None:
    for arch in map(Target.parse, RELEASED):
        columns = [job.variant for job in jobs_of(arch) if "lanes_across=" in str(job.variant)]
        taking = {
            (v.kernel, v.text("dtype"))
            for v in columns
            if v.text("access") == "aligned" and streams.takes_one_gate(v)
        }
        every = {(v.kernel, v.text("dtype")) for v in columns if v.text("access") == "aligned"}
        assert taking == every, arch.label


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_few_channels_with_one_gate_each_are_scanned_and_its_gradient_summed(
    dtype: str, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """Columns that are cut into segments: one tile, tiles that are not full, and several segments."""
    checked = 0
    for name in ("channel_last_forward", "channel_last_backward"):
        kernel = FAMILY.kernel(name, "cuda")
        variant = like(kernel, {"dtype": dtype, "access": "aligned", "prefix_lead": 1})
        library = cuda_emulator.emulated(kernel, variant, tmp_path)
        shapes = (2, 48, 40), (1, 16, 3000), (3, 8, 300)
        without, summed = checks_of(library, product(shapes, ONE_GATE[:2]))
        checked += summed or without
    assert checked == 12


@pytest.mark.parametrize("access", ["aligned", "varlen"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_walk_sums_the_gradient_of_one_gate(
    dtype: str, access: str, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    kernel = FAMILY.kernel("channel_last_backward", "cuda")
    across = 16 if dtype == "bfloat16" else 32
    variant = like(kernel, {"dtype": dtype, "access": access, "lanes_across": across})
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    checked = 0
    for shape, setting in product(((2, 48, 40), (1, 16, 600)), ONE_GATE):
        trial = solved(shape, setting, dtype, (shape[2] // 3, 0) if setting.packed else ())
        case = trial.case(kernel.name, aligned=True, sums=True)
        if kernel.rules.accepts(variant, case.problem) is None:
            library.run(case.problem, case.tensors, seed=checked)
            assert "gates_grad" in case.expected
            assert case.error() <= cases.TOLERANCE[dtype], str(trial)
            checked += 1
    assert checked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pins", "shape"),
    [
        ("channel_last_backward", {"access": "scalar", "warps": 4}, (2, 17, 600)),
        ("channel_last_backward", {"access": "constant_gate"}, (2, 17, 600)),
        ("channel_last_backward", {"access": "aligned", "lanes_across": 32}, (2, 16, 600)),
        ("channel_last_backward", {"access": "aligned", "prefix_lead": 1}, (1, 16, 3000)),
        ("time_last_backward", {"access": "short", "steps": 20}, (2, 17, 61)),
        ("time_last_backward", {"access": "aligned", "lanes": 16, "pieces": 2}, (2, 16, 720)),
    ],
    ids=str,
)
def test_gradients_that_nobody_wants_are_left_out(
    name: str,
    pins: dict[str, str | int],
    shape: cases.Shape,
    cuda_emulator: ModuleType,
    tmp_path: Path,
) -> None:
    """Also where the gradient of gates would be summed, as that is planned before it is known who wants it. The others are the same
    to the bit."""
    kernel = FAMILY.kernel(name, "cuda")
    variant = like(kernel, {"dtype": "float32", **pins})
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    trial = solved(shape, ONE_GATE[0], "float32")
    case = trial.case(name, aligned=True, sums=True)
    assert kernel.rules.kind_mismatch(variant, case.problem) is None
    library.run(case.problem, case.tensors, seed=0)
    assert case.error() <= cases.TOLERANCE["float32"]
    for missing in case.expected:
        tensors = {**case.tensors, missing: None}
        others = {
            of: torch.full_like(case.tensors[of], torch.nan)
            for of in case.expected
            if of != missing
        }
        library.run(case.problem, {**tensors, **others}, seed=1)
        for of, out in others.items():
            torch.testing.assert_close(out, case.tensors[of], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("time", "is_cut"), [(720, False), (8192, True)])
def test_only_long_rows_with_one_gate_are_cut_where_its_gradient_is_summed(
    time: int, is_cut: bool
) -> None:
    """Variants that scan rows whole are those for misaligned rows."""
    torch.manual_seed(0)
    kernel = FAMILY.kernel("time_last_backward", "cuda")
    setting = cases.Setting(broadcast=("batch", "channel", "time"))
    trial = cases.draw((1, 4, time), setting, "float32", "cpu")
    problem = trial.case(kernel.name, aligned=True, sums=True).problem
    assert problem.whole_chunks(problem.chunk())
    taking = [str(v) for v in kernel.variants if kernel.rules.accepts(v, problem) is None]
    assert any("prefix_lead" in text for text in taking) == is_cut
    assert any("access=misaligned" in text for text in taking)
    without = trial.case(kernel.name, aligned=True).problem
    taking = [str(v) for v in kernel.variants if kernel.rules.accepts(v, without) is None]
    assert taking
    assert not any("access=misaligned" in text for text in taking)
