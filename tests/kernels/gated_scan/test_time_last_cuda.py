"""The CUDA kernels of gated scan for contiguous time, on the CPU in an emulator of the GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import cycle, product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from scan_registry.kernels.cases import there
from scan_registry.kernels.gated_scan import cases
from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.gated_scan.problem import HEADERS
from scan_registry.kernels.gated_scan.spec import FAMILY
from scan_registry.kernels.model import Variant

KERNELS = {way: FAMILY.kernel(f"time_last_{way}", "cuda") for way in ("forward", "backward")}
BOTH_WAYS = pytest.mark.parametrize("direction", KERNELS)
TOLERANCE = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}
#: (batch, channels, time): one piece, a tile and a bit, several tiles, and more rows than run at once; several segments, more
#: than the CTAs that run at once have room for, and one that is not full; and rows that are no whole pieces.
SHAPES: dict[str, tuple[cases.Shape, ...]] = {
    "whole": ((2, 3, 8), (2, 5, 520), (3, 2, 1544), (5, 41, 24)),
    "cut": ((1, 2, 13_000), (3, 1, 264), (2, 1, 4616), (1, 3, 4104)),
    "generic": ((2, 3, 1), (1, 5, 130), (2, 3, 517), (2, 2, 1291)),
}
QUICK = (("min_gru", "bfloat16"), ("rg_lru", "float32"))
#: One dtype for each kind, in turn: each variant takes seconds to compile, and a kind's code is the same in both.
IN_TURN = zip(HEADERS, cycle(("bfloat16", "float32")), strict=False)
CHECKED: dict[tuple[str, str], Any] = dict.fromkeys(QUICK, ())
CHECKED |= dict.fromkeys((kind for kind in IN_TURN if kind not in QUICK), pytest.mark.slow)
CHECKED |= dict.fromkeys((("rg_lru", "bfloat16"), ("min_lstm", "float16")), pytest.mark.thorough)


def chosen(direction: str, dtype: str, header: str, tile: str) -> Variant:
    """The first variant with that tile."""
    for variant in KERNELS[direction].every:
        statics = dict(variant.statics)
        whole = "cut" if "prefix_lead" in statics else "whole"
        if (statics["dtype"], statics["kind"]) == (dtype, header) and tile == (
            "generic" if statics["access"] == "generic" else whole
        ):
            return variant
    raise LookupError(f"no {tile} tile of {header} in {dtype}")


@cache
def trials(header: str, dtype: str, tile: str) -> tuple[cases.Trial, ...]:
    """Every setting that the tile takes, with the shapes and the kinds of the header in rotation."""
    torch.manual_seed(0)
    kinds = cycle(name for name, kind in KINDS.items() if kind.source == header)
    settings = [s for s in cases.SETTINGS if tile == "generic" or not s.packed]
    return tuple(
        cases.draw(shape, next(kinds), setting, dtype, "cpu")
        for setting, shape in zip(settings, cycle(SHAPES[tile]))
    )


def check(library: Any, trial: cases.Trial, seed: int = 0) -> None:
    """All launches that the variant takes."""
    kernel = library.kernel
    accepted = [
        case
        for case in trial.launches(kernel.name)
        if kernel.rules.accepts(library.variant, case.problem) is None
    ]
    assert accepted, trial
    for case in accepted:
        library.run(case.problem, case.tensors, seed=seed)
        errors = case.errors()
        assert max(errors.values()) <= TOLERANCE[trial.dtype], (str(trial), errors)


def changed(trial: cases.Trial, **tensors: Any) -> cases.Trial:
    """The trial with some inputs changed, solved anew."""
    inputs = trial.inputs | tensors
    expected, terms = cases.solved(KINDS[trial.kind], inputs, trial.setting.reverse)
    inputs["states"] = expected["states"].to(getattr(torch, trial.dtype))
    return replace(trial, inputs=inputs, expected=expected, terms=terms)


@BOTH_WAYS
@pytest.mark.parametrize(
    ("header", "dtype", "tile"),
    [
        pytest.param(
            *kind, tile, marks=mark if kind in QUICK or tile == usual else pytest.mark.thorough
        )
        for (kind, mark), usual in zip(CHECKED.items(), cycle(("whole", "generic")), strict=False)
        for tile in ("whole", "generic", *(["cut"] if kind in QUICK else []))
    ],
)
def test_matches_the_formulas(
    header: str, dtype: str, tile: str, direction: str, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    variant = chosen(direction, dtype, header, tile)
    library = cuda_emulator.emulated(KERNELS[direction], variant, tmp_path)
    for seed, trial in enumerate(trials(header, dtype, tile)):
        check(library, trial, seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "direction", ["forward", pytest.param("backward", marks=pytest.mark.thorough)]
)
def test_a_row_of_many_segments(direction: str, cuda_emulator: ModuleType, tmp_path: Path) -> None:
    """More than a look-back reads one by one, and few enough resets that states come from afar. Of short segments, as the
    reference takes each step."""
    torch.manual_seed(0)
    variant = chosen(direction, "float32", "rg_lru", "cut")
    of_two_rows = replace(
        variant, statics=tuple((n, 2 if n == "rows" else v) for n, v in variant.statics)
    )
    setting, time = cases.Setting(states=True, resets=True), 130 * 2 * 128 + 8
    trial = cases.draw((1, 1, time), "rg_lru", setting, "float32", "cpu")
    reset = torch.zeros(1, time, dtype=torch.bool)
    reset[:, [17, time * 3 // 4]] = True
    trial = changed(trial, reset=reset, parameters=torch.full((1, 1), -12.0))
    problem = next(trial.launches(KERNELS[direction].name)).problem
    assert KERNELS[direction].launch(of_two_rows, problem, 10_000).grid[0] > 130
    check(cuda_emulator.emulated(KERNELS[direction], of_two_rows, tmp_path), trial)


@BOTH_WAYS
@pytest.mark.parametrize("tile", SHAPES)
def test_resets_of_the_first_the_last_and_all_steps(
    direction: str, tile: str, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    variant = chosen(direction, "float32", "rg_lru", tile)
    library = cuda_emulator.emulated(KERNELS[direction], variant, tmp_path)
    for steps, reverse in product((0, -1, slice(None)), (False, True)):
        setting = cases.Setting(states=True, resets=True, reverse=reverse)
        trial = cases.draw(SHAPES[tile][1], "rg_lru", setting, "float32", "cpu")
        reset = torch.zeros(trial.shape[0], trial.shape[2], dtype=torch.bool)
        reset[:, steps] = True
        check(library, changed(trial, reset=reset))


def test_resets_may_lie_anywhere(cuda_emulator: ModuleType, tmp_path: Path) -> None:
    """Bytes that are off a 4-byte boundary, at a stride of their own."""
    torch.manual_seed(0)
    kernel, variant = KERNELS["forward"], chosen("forward", "bfloat16", "min_gru", "whole")
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    for reverse, (offset, gap) in product((False, True), ((1, 4), (0, 3), (4, 8))):
        setting = cases.Setting(reverse=reverse, resets=True)
        trial = cases.draw((3, 2, 520), "min_gru", setting, "bfloat16", "cpu")
        case = trial.case(kernel.name, aligned=True)
        memory = torch.ones(offset + 3 * (520 + gap), dtype=torch.bool)
        reset = memory[offset:].view(3, 520 + gap)[:, :520]
        case.tensors["reset"] = reset.copy_(there(trial.inputs["reset"]))
        library.run(replace(case.problem, reset_batch=520 + gap), case.tensors, seed=0)
        assert case.error() <= TOLERANCE["bfloat16"]


@pytest.mark.slow
@BOTH_WAYS
def test_longer_tiles(direction: str, cuda_emulator: ModuleType, tmp_path: Path) -> None:
    kernel = KERNELS[direction]
    longer = [v for v in kernel.every if dict(v.statics).get("blocks") == 3]
    assert {variant.text("kind") for variant in longer} == {"linear", "min_gru", "hgrn"}
    variant = next(v for v in longer if v.text("kind") == "hgrn")
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    for seed, trial in enumerate(trials("hgrn", variant.text("dtype"), "whole")):
        check(library, trial, seed)
