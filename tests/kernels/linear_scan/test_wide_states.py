"""Initial states that are wider than the elements of a scan, and what backward multiplies them by: on the CPU,
in the emulator of a GPU and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise, product
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from emulated_kernels import check

from scan_registry import linear_scan
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.linear_scan import cases, reference
from scan_registry.kernels.linear_scan.space import CONSTANT_GATE, MULTI_CTA
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
    posed = product(enumerate(SHAPES), enumerate(settings))
    return tuple(
        trial(shape, setting, *EXTREMES[number // 2])
        for (number, shape), (turn, setting) in posed
        if number == 1 or (number + turn) % 2 == 0
    )


def backwards() -> Iterator[Variant]:
    """Of each kernel and way to take a problem, the variant that the wheel has first."""
    seen = set()
    for layout in ("time_last", "channel_last"):
        for variant in FAMILY.kernel(f"{layout}_backward", "cuda").variants:
            statics = dict(variant.statics)
            ways = statics.keys() & {
                "stages",
                "lanes_across",
                "prefix_lead",
                "single_wave",
                "ctas_per_column",
                "reverse",
            }
            kind = (layout, statics["gates"], statics["access"], *sorted(ways))
            # Misaligned columns that several CTAs share have a test of their own, as they are of many channels; and no setting
            # here has one gate for all steps.
            if statics["access"] in (MULTI_CTA, CONSTANT_GATE):
                continue
            if statics["dtype"] == "float16" and kind not in seen:
                seen.add(kind)
                yield variant


@pytest.mark.slow
@pytest.mark.parametrize(("turn", "variant"), enumerate(backwards()), ids=str)
def test_a_kernel_multiplies_by_the_initial_state_as_it_is(
    turn: int, variant: Variant, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    kernel = FAMILY.kernel(variant.kernel, "cuda")
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    check(library, trials(), cases.TOLERANCE["float16"], turn)


# --- The operator -----------------------------------------------------------------------------

#: Batch, channels and time: ragged, aligned, and few and many columns of several tiles.
SIZES = ((3, 5, 37), (2, 16, 1024), (2, 5, 4096), (2, 256, 64))
BOUNDS = (0, 0, 1, 9, 37)


def error(
    sizes: cases.Shape, layout: str, options: dict[str, bool], dtype: str, device: str, backend: Any
) -> float:
    """Of the gradients of gates of 0: of the first ones states times gradients, and else 0. Options are
    ``reverse``, ``packed``, and whether rows are ``misaligned``."""
    dim = -1 if layout == "time_last" else 1
    batch, channels, time = sizes
    shape = [batch, channels, time] if layout == "time_last" else [batch, time, channels]
    of_state = [*shape]
    bounds = [*BOUNDS[:-1], time] if options["packed"] else [0, time]
    if options["packed"]:
        of_state[dim] = len(bounds) - 1
    else:
        del of_state[dim]
    narrow, worst = getattr(torch, dtype), 0.0
    wide = [*shape[:-1], shape[-1] + 1] if options["misaligned"] else shape
    for size, grad in EXTREMES:
        room = torch.zeros(wide, dtype=narrow, device=device)
        gates = (room[..., 1:] if options["misaligned"] else room).requires_grad_()
        state = size * (1 + torch.rand(of_state, device=device) / 100)
        states = linear_scan(
            gates,
            torch.zeros_like(gates),
            state,
            dim=dim,
            reverse=options["reverse"],
            cu_seqlens=torch.tensor(bounds, device=device) if options["packed"] else None,
            backend=backend,
        )
        (found,) = torch.autograd.grad(states, gates, torch.full_like(states, grad))
        expected = torch.zeros(shape, dtype=torch.float64, device=device)
        exact = float(torch.tensor(grad, dtype=narrow)) * state.double()
        for number, (begin, end) in enumerate(pairwise(bounds)):
            first = end - 1 if options["reverse"] else begin
            if begin < end:
                of_sequence = exact.select(dim, number) if options["packed"] else exact
                expected.select(dim, first).copy_(of_sequence)
        worst = max(worst, relative_error(found, expected))
    return worst


OPTIONS = [
    dict(zip(("reverse", "packed", "misaligned"), each, strict=True))
    for each in product((False, True), repeat=3)
]
NAMES = ["-".join(name for name, wanted in each.items() if wanted) for each in OPTIONS]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["time_last", "channel_last"])
@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
@pytest.mark.parametrize("sizes", SIZES[:2], ids=str)
def test_first_gates_get_states_times_gradients(
    sizes: cases.Shape, options: dict[str, bool], layout: str, dtype: str
) -> None:
    assert error(sizes, layout, options, dtype, "cpu", "auto") <= cases.TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["time_last", "channel_last"])
@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_first_gates_get_them_on_a_gpu(
    sizes: cases.Shape, options: dict[str, bool], layout: str, dtype: str, backend: str
) -> None:
    assert error(sizes, layout, options, dtype, "cuda", backend) <= cases.TOLERANCE[dtype]
