"""Initial states that are wider than the elements of a scan, and what backward multiplies them by: on the CPU
and in the emulator of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch

from scan_registry import linear_scan
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.linear_scan import cases, reference
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import Variant

if TYPE_CHECKING:
    from pathlib import Path

#: Initial states that float16 takes for infinite, or has no more than a bit of, and gradients that bring them back to
#: what it holds.
EXTREMES = ((2e5, 1e-2), (3e-8, 3e4))
#: (batch, channels, time): one step, few and many rows, rows that fill no tile, several tiles.
SHAPES = ((2, 16, 1), (3, 5, 37), (1, 24, 1024), (2, 40, 600))
SETTINGS = [cases.Setting(True, *each) for each in product((False, True), repeat=2)]
MIXED = cases.Setting(True, mixed=True)


def trial(shape: cases.Shape, setting: cases.Setting, state: float, grad: float) -> cases.Trial:
    """Gates and tokens of 0: nothing but the first gates' gradients is left, each the product of an initial
    state and a gradient."""
    drawn = cases.draw(shape, setting, "float16", "cpu")
    initial = drawn.inputs["initial_state"]
    assert initial is not None
    initial.copy_(state * (1 + torch.rand(initial.shape) / 100))
    inputs = drawn.inputs | {
        name: torch.zeros_like(drawn.inputs[name])  # type: ignore[arg-type]
        for name in ("gates", "tokens", "states", "final_state_grad")
    }
    states_grad = inputs["states_grad"] = torch.full_like(drawn.inputs["states_grad"], grad)  # type: ignore[arg-type]
    grads = reference.backward(
        *(cases.wide(t) for t in (inputs["gates"], inputs["states"], states_grad, initial)),  # type: ignore[arg-type]
        reverse=setting.reverse,
        cu_seqlens=inputs["offsets"],
    )
    names = ("gates_grad", "tokens_grad", "initial_state_grad")
    expected = drawn.expected | dict(zip(names, grads, strict=True))
    return cases.Trial(shape, setting, "float16", inputs, expected)


@cache
def trials() -> tuple[cases.Trial, ...]:
    torch.manual_seed(0)
    settings = (*SETTINGS, MIXED)
    posed = product(SHAPES, settings, EXTREMES)
    return tuple(trial(shape, setting, *extreme) for shape, setting, extreme in posed)


def backwards() -> Iterator[Variant]:
    """Of each kernel and way to take a problem, the variant that the wheel has first."""
    seen = set()
    for layout in ("time_last", "channel_last"):
        for variant in FAMILY.kernel(f"{layout}_backward", "cuda").variants:
            statics = dict(variant.statics)
            ways = statics.keys() & {"stages", "across", "ahead", "once", "parts", "reverse"}
            kind = (layout, statics["gates"], statics["access"], *sorted(ways))
            if statics["dtype"] == "float16" and kind not in seen:
                seen.add(kind)
                yield variant


@pytest.mark.parametrize("variant", [*backwards()], ids=str)
def test_a_kernel_multiplies_by_the_initial_state_as_it_is(
    variant: Variant, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    kernel = FAMILY.kernel(variant.kernel, "cuda")
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    checked = 0
    for each in trials():
        for case in each.launches(kernel.name):
            if kernel.accepts(variant, case.problem) is None:
                library.run(case.problem, case.tensors, seed=checked)
                assert case.error() <= cases.TOLERANCE["float16"], str(each)
                checked += 1
    assert checked
