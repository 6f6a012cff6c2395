"""The CUDA kernels of causal_conv1d on the CPU, in an emulator of the GPU, against the float64 reference."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from compiling import on_sm90
from covering import each_value

from scan_registry.kernels.causal_conv1d import cases, problem
from scan_registry.kernels.causal_conv1d.spec import FAMILY
from scan_registry.kernels.model import Variant
from scan_registry.runtime import jit

#: (batch, channels, time): one step, less than a filter, whole chunks, rows cut into pieces, and primes.
SHAPES = ((1, 8, 1), (2, 16, 8), (3, 5, 3), (1, 264, 96), (2, 7, 613), (1, 8, 1040))
NEEDS_NVRTC = pytest.mark.skipif(
    isinstance(jit.toolchains()["cuda"], str), reason="NVRTC is not installed"
)


def chosen() -> Iterator[Variant]:
    """All but those of float16, of which two."""
    for variant in FAMILY.variants():
        wide = variant.text("dtype") != "float16"
        if wide or "access=generic" in str(variant) or variant.kernel == "update":
            yield variant


@cache
def posed(dtype: str, half: int) -> tuple[tuple[int, cases.Trial], ...]:
    """Every shape, by its number, with half of the settings, and every setting with half of the shapes, solved once."""
    torch.manual_seed(0)
    return tuple(
        (number, cases.draw(shape, setting, dtype, "cpu"))
        for number, shape in enumerate(SHAPES)
        for turn, setting in enumerate(cases.SETTINGS)
        if (number // 2 + turn) % 2 == half
    )


@pytest.mark.slow
@pytest.mark.parametrize(("turn", "variant"), enumerate(chosen()), ids=str)
def test_matches_the_reference(
    turn: int,
    variant: Variant,
    cuda_emulator: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With every option, in whatever order the CTAs run, for launches of one chunk a thread and of more."""
    kernel, dtype = FAMILY.kernel(variant.kernel, "cuda"), variant.text("dtype")
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    taken = [
        (number, trial, place, case)
        for number, trial in posed(dtype, turn // 2 % 2)
        for place, case in enumerate(trial.launches(kernel.name))
        if kernel.rules.accepts(variant, case.problem) is None
    ]
    values = [(number, trial.setting, place) for number, trial, place, _ in taken]
    for place in each_value(values, 7 * turn):
        number, trial, _, case = taken[place]
        enough = (100_000, 40)[number % 2]
        monkeypatch.setattr(problem, "_ENOUGH", dict.fromkeys(problem._ENOUGH, enough))
        library.run(case.problem, case.tensors, number)
        assert case.error() <= cases.TOLERANCE[dtype], f"{trial} {case.problem}"
    assert len(taken) >= 5


@pytest.mark.parametrize("kernel", ["time_last_backward", "channel_last_backward", "update"])
def test_matches_the_reference_in_bfloat16(
    kernel: str, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """One variant that solves every problem."""
    found = FAMILY.kernel(kernel, "cuda")
    variant = next(v for v in reversed(found.variants) if v.text("dtype") == "bfloat16")
    library = cuda_emulator.emulated(found, variant, tmp_path)
    for setting in cases.SETTINGS[3:8]:
        trial = cases.draw((2, 12, 45), setting, "bfloat16", "cpu")
        case = trial.case(kernel, aligned=False)
        library.run(case.problem, case.tensors, 0)
        assert case.error() <= cases.TOLERANCE["bfloat16"], trial


@pytest.mark.parametrize("kernel", ["time_last_forward", "channel_last_forward"])
def test_taps_beyond_the_width_are_not_read(
    kernel: str, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """An input that is infinite has an end."""
    found = FAMILY.kernel(kernel, "cuda")
    for access, size in (("aligned", 16), ("generic", 15)):
        variant = next(v for v in found.variants if v.text("access") == access)
        trial = cases.draw((1, size, size), cases.Setting(width=3, silu=False), "float32", "cpu")
        case = trial.case(kernel, aligned=True)
        x, y = case.tensors["x"], case.tensors["y"]
        assert x is not None
        assert y is not None
        x[..., 2] = torch.inf
        cuda_emulator.emulated(found, variant, tmp_path).run(case.problem, case.tensors, 0)
        finite = y.isfinite().all(1)[0]
        assert finite.tolist() == [t not in (2, 3, 4) for t in range(size)]


def test_sums_have_one_order(
    cuda_emulator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order in which CTAs run, bit for bit."""
    monkeypatch.setattr(problem, "_ENOUGH", dict.fromkeys(problem._ENOUGH, 40))
    for kernel in ("time_last_backward", "channel_last_backward"):
        found = FAMILY.kernel(kernel, "cuda")
        library = cuda_emulator.emulated(found, found.variants[0], tmp_path)
        trial = cases.draw((2, 16, 512), cases.Setting(), "float32", "cpu")
        sums = []
        for seed in range(3):
            case = trial.case(kernel, aligned=True)
            library.run(case.problem, case.tensors, seed)
            sums.append(case.tensors["partials"])
        assert torch.equal(sums[0], sums[1])
        assert torch.equal(sums[0], sums[2])
        assert len(sums[0]) > 1


@pytest.mark.slow
@pytest.mark.thorough  # as the job that compiles every variant for every architecture fails where one spills
@NEEDS_NVRTC
def test_nothing_spills() -> None:
    """Registers hold the last inputs, filters and sums of a thread: of float16 as many as of bfloat16."""
    for binary in on_sm90(v for v in FAMILY.variants() if v.text("dtype") != "float16"):
        assert binary.spill_bytes == 0, binary.variant


def test_there_are_few_binaries() -> None:
    assert len(FAMILY.variants()) <= 28


def test_rows_that_lie_alike_are_read_at_once() -> None:
    """Wherever they begin, as long as they begin so in every tensor."""
    found = FAMILY.kernel("time_last_forward", "cuda")
    aligned = next(v for v in found.variants if "bfloat16,access=aligned" in str(v))
    rows, padded = problem.Strides(3 * 37, 37, 1), problem.Strides(3 * 45, 45, 1)
    other = problem.Strides(3 * 40, 40, 1)

    def refusal(*strides: problem.Strides, alignment: int = 16) -> str | None:
        posed = problem.ConvProblem(
            "forward", "time_last", "bfloat16", 2, 3, 37, 4, strides, alignment
        )
        return found.rules.accepts(aligned, posed)

    assert refusal(rows, rows) is None
    assert refusal(rows, padded) is None  # 45 is 37 and a chunk of 8
    assert "do not lie alike" in str(refusal(rows, other))
    assert "do not lie alike" in str(refusal(rows, rows, alignment=8))


def test_an_update_takes_four_channels_that_lie_together() -> None:
    """In rows of three and four inputs, and where neighbouring channels lie together, in every option; else one."""
    ways = set()
    for shape in SHAPES:
        for setting in cases.SETTINGS:
            for case in cases.draw(shape, setting, "bfloat16", "cpu").launches("update"):
                update = case.problem
                assert isinstance(update, problem.UpdateProblem)
                together = update.strides[1].channel == 1 and update.channels > 1
                way = "together" if together else f"rows of {update.length}"
                if update.vector == 4:
                    ways.add((way, update.in_order, bool(update.sequences)))
                    assert update.channels % 4 == 0
                    assert update.width == 4
    assert ways == {
        *((f"rows of {length}", True, False) for length in (3, 4)),
        *(("together", *options) for options in ((True, False), (False, False), (False, True))),
    }


@pytest.mark.parametrize(
    "change",
    [
        {"channels": 18},
        {"width": 3},
        {"alignment": 8},
        {"length": 5},
        {"in_order": False},
        {"time": 2},
        {"slot": 66},
        {"stride": 2},
        {"row": 18},
    ],
    ids=str,
)
def test_an_update_takes_other_channels_one_by_one(change: dict[str, Any]) -> None:
    def posed(slot: int = 64, stride: int = 1, row: int = 32, **changed: Any) -> int:
        of_x, of_y = problem.Strides(row, stride, row), problem.Strides(32, 1, 32)
        strides = of_x, problem.Strides(slot, 4, 1), of_y
        sizes = {"batch": 2, "channels": 16, "time": 1, "width": 4, "slots": 2, "length": 4}
        options = {"strides": strides, "wide_weights": True, "alignment": 16}
        return problem.UpdateProblem("bfloat16", **{**sizes, **options, **changed}).vector

    assert posed() == 4
    assert posed(**change) == 1
