"""The CUDA kernels of ssd_scan on the CPU, in an emulator of the GPU: as GPUs without wgmma run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from emulated_kernels import check

from scan_registry.hardware.target import Target
from scan_registry.kernels.model import Variant
from scan_registry.kernels.ssd_scan import cases
from scan_registry.kernels.ssd_scan.spec import FAMILY

#: Few steps and several chunks; a head of two tiles; one, two and three blocks of states, of which the last is not full.
SHAPES = ((2, 70, 2, 16, 16), (1, 70, 2, 72, 72), (1, 65, 2, 8, 136), (1, 3, 4, 8, 256))


#: GPUs with little and with much shared memory.
TARGETS = tuple(map(Target.parse, ("compute_80", "sm_90")))


def chosen() -> Iterator[Variant]:
    """Every tile in bfloat16 and float32, and one of each kernel in float16; not those whose copies alone differ, as an emulator has
    none by the tensor memory accelerator."""
    seen = set()
    for variant in FAMILY.variants():
        kind = variant.kernel, variant.text("dtype")
        serves = FAMILY.kernel(variant.kernel, "cuda").rules.serves
        if not any(serves(variant.statics, target) for target in TARGETS):
            continue
        if variant.kernel in ("states", "adjoint") and variant.number("stages") == 3:
            continue
        if kind[1] != "float16" or kind not in seen:
            seen.add(kind)
            yield variant


@cache
def posed(dtype: str) -> tuple[cases.Trial, ...]:
    """Every shape with half of the settings, solved once; with a fourth in float32, which takes three products for one."""
    torch.manual_seed(0)
    every = 4 if dtype == "float32" else 2
    return tuple(
        cases.draw(shape, setting, dtype, "cpu")
        for number, shape in enumerate(SHAPES)
        for turn, setting in enumerate(cases.SETTINGS)
        if (number + turn) % every == 0
    )


@pytest.mark.slow
@pytest.mark.parametrize(("turn", "variant"), enumerate(chosen()), ids=str)
def test_matches_the_reference(turn: int, variant: Variant, emulated: Callable[..., Any]) -> None:
    """With every option, in whatever order the CTAs and their threads run."""
    library = emulated(FAMILY, variant, arch=800)
    dtype = variant.text("dtype")
    check(library, posed(dtype), cases.TOLERANCE[dtype], turn)


def in_bfloat16(kernel: str, **tile: int) -> Variant:
    """The one variant of such a tile."""
    (variant,) = (
        v
        for v in FAMILY.variants()
        if (v.kernel, v.text("dtype")) == (kernel, "bfloat16")
        and all(v.number(name) == value for name, value in tile.items())
    )
    return variant


@pytest.mark.parametrize("states", [64, pytest.param(256, marks=pytest.mark.thorough)])
def test_many_chunks_go_through_few_tiles(states: int, emulated: Callable[..., Any]) -> None:
    """Where outputs have warpgroups that take turns, and shared memory has tiles of three chunks or four and steps of eight."""
    library = emulated(FAMILY, in_bfloat16("forward", outputs=2, states=states), arch=800)
    torch.manual_seed(0)
    trial = cases.draw((1, 1000, 2, 8, 16), cases.SETTINGS[0], "bfloat16", "cpu")
    for seed, case in enumerate(trial.launches("forward")):
        library.run(case.problem, case.tensors, seed=seed)
        assert max(case.errors().values()) <= cases.TOLERANCE["bfloat16"]


@pytest.mark.parametrize("states", [64, pytest.param(128, marks=pytest.mark.thorough)])
def test_many_heads_go_through_few_tiles(
    states: int, emulated: Callable[..., Any], thorough: bool
) -> None:
    """Where warpgroups of the backward pass have work of their own: shared memory has tiles of three heads and terms of four."""
    library = emulated(FAMILY, in_bfloat16("backward", stages=3, states=states), arch=800)
    torch.manual_seed(0)
    trial = cases.draw((1, 40, 24, 8, states), cases.SETTINGS[0], "bfloat16", "cpu")
    case = trial.case("backward", aligned=True)
    for seed in range(8 if thorough else 3):
        library.run(case.problem, case.tensors, seed=seed)
        assert max(case.errors().values()) <= cases.TOLERANCE["bfloat16"], seed
