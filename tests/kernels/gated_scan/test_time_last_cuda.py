"""The CUDA kernels of gated scan for contiguous time, on the CPU in an emulator of the GPU."""

from __future__ import annotations

from itertools import cycle, product
from pathlib import Path
from types import ModuleType

import pytest
import torch
from gated_scan_time_last import KERNELS, MANY, SETTINGS, Setting, Trial, check, chosen, trials

from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.gated_scan.problem import (
    HEADERS,
    Direction,
)

QUICK = (("min_gru", "bfloat16"), ("rg_lru", "float32"))
#: One dtype for each kind, in turn: each variant takes seconds to compile, and a kind's code is the same in both.
IN_TURN = zip(HEADERS, cycle(("bfloat16", "float32")), strict=False)
CHECKED = dict.fromkeys((*QUICK, *IN_TURN, ("rg_lru", "bfloat16"), ("min_lstm", "float16")))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("header", "dtype", "tile"),
    [
        pytest.param(*each, tile, marks=() if each in QUICK else pytest.mark.slow)
        for each in CHECKED
        for tile in ("whole", "generic", *(["cut"] if each in QUICK else []))
    ],
)
def test_matches_the_formulas(
    header: str,
    dtype: str,
    tile: str,
    direction: Direction,
    cuda_emulator: ModuleType,
    tmp_path: Path,
) -> None:
    kernel, variant = KERNELS[direction], chosen(direction, dtype, header, tile)
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    for seed, trial in enumerate(trials(header, dtype, tile)):
        found = trial.results(kernel, variant, library, seed)
        assert found is not None, trial.setting
        check(trial, found)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_row_of_many_segments(
    direction: Direction, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """Few enough resets that states come from afar."""
    torch.manual_seed(0)
    kernel, variant = KERNELS[direction], chosen(direction, "float32", "rg_lru", "cut")
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    trial = Trial(KINDS["rg_lru"], "float32", MANY, Setting(states=True, resets="none")).draw()
    trial.tensors["parameters"].fill_(-12.0)
    trial.tensors["reset"][:, [17, 150_000]] = True
    found = trial.solve().results(kernel, variant, library, 0)
    assert found is not None
    check(trial, found)


@pytest.mark.parametrize("tile", ["whole", "cut", "generic"])
@pytest.mark.parametrize("reverse", [False, True], ids=["", "reverse"])
def test_what_was_before_a_reset_never_matters(
    tile: str, reverse: bool, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """A NaN, or an infinite number, goes as far as the next reset: states with time, gradients against it."""
    torch.manual_seed(0)
    shape = (2, 2, 648)
    setting = Setting(states=True, reverse=reverse, resets="some")
    trial = Trial(KINDS["min_gru"], "float32", shape, setting).draw()
    first, middle = (shape[2] - 1, 300) if reverse else (0, 301)
    before = middle + 1 if reverse else middle - 1
    reset, hidden = trial.tensors["reset"], trial.tensors["input1"]
    assert reset is not None
    assert hidden is not None
    reset[:, [first, middle]] = True
    trial.tensors["initial_state"].fill_(torch.nan)
    hidden[:, 0, before], hidden[:, 1, before] = torch.nan, torch.inf
    trial.solve()
    assert trial.expected["states"][..., middle].isfinite().all()
    variant = chosen("forward", "float32", "min_gru", tile)
    library = cuda_emulator.emulated(KERNELS["forward"], variant, tmp_path)
    found = trial.results(KERNELS["forward"], variant, library, 0)
    assert found is not None
    expected = trial.expected["states"].float()
    torch.testing.assert_close(found["states"], expected, equal_nan=True, rtol=1e-4, atol=1e-5)
    assert int(expected.isnan().sum()) > 0
    # The gradient that comes to a reset goes no further, and the state before it has no part in any.
    trial = Trial(KINDS["min_gru"], "float32", shape, setting).draw()
    trial.tensors["reset"] = reset
    trial.tensors["initial_state"].fill_(torch.nan)
    trial.solve()
    states, grads = trial.tensors["states"], trial.tensors["states_grad"]
    states[:, 0, before], states[:, 1, before] = torch.nan, torch.inf
    grads[..., middle] = torch.nan
    expected_grads = trial.solve().expected["input1_grad"].float()
    assert expected_grads[..., middle].isnan().all()
    assert expected_grads[..., before].isfinite().all()
    variant = chosen("backward", "float32", "min_gru", tile)
    library = cuda_emulator.emulated(KERNELS["backward"], variant, tmp_path)
    found = trial.results(KERNELS["backward"], variant, library, 0)
    assert found is not None
    for name in ("input0_grad", "input1_grad", "initial_state_grad"):
        wanted = trial.expected[name].float()
        torch.testing.assert_close(found[name], wanted, equal_nan=True, rtol=1e-3, atol=1e-5)
    assert (found["initial_state_grad"] == 0).all()


def test_extreme_inputs_stay_finite(cuda_emulator: ModuleType, tmp_path: Path) -> None:
    """Gates of ±50: nothing overflows on the way."""
    torch.manual_seed(0)
    for direction, kernel in KERNELS.items():
        variant = chosen(direction, "float32", "min_gru", "whole")
        library = cuda_emulator.emulated(kernel, variant, tmp_path)
        trial = Trial(KINDS["min_gru"], "float32", (1, 2, 264), SETTINGS[2]).draw()
        trial.tensors["input0"].sign_().mul_(50)
        found = trial.solve().results(kernel, variant, library, 0)
        assert found is not None
        for (
            name,
            tensor,
        ) in found.items():  # of z * (1 - z) autograd's own formula has no digit right
            expected = trial.expected[name].float()
            torch.testing.assert_close(tensor.float(), expected, rtol=1e-5, atol=1e-5)


def test_resets_may_lie_anywhere(cuda_emulator: ModuleType, tmp_path: Path) -> None:
    """Bytes that are off a 4-byte boundary, at a stride of their own."""
    torch.manual_seed(0)
    variant = chosen("forward", "bfloat16", "min_gru", "whole")
    library = cuda_emulator.emulated(KERNELS["forward"], variant, tmp_path)
    for reverse, (offset, gap) in product((False, True), ((1, 4), (0, 3), (4, 8))):
        setting = Setting(reverse=reverse, resets="some")
        trial = Trial(KINDS["min_gru"], "bfloat16", (3, 2, 520), setting).draw().solve()
        room = torch.ones(offset + 3 * (520 + gap), dtype=torch.bool)
        reset = room[offset:].view(3, 520 + gap)[:, :520]
        trial.tensors["reset"] = reset.copy_(trial.tensors["reset"])
        found = trial.results(KERNELS["forward"], variant, library, 0)
        assert found is not None
        check(trial, found)


def test_gradients_that_nobody_wants_are_left_out(
    cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    kernel = KERNELS["backward"]
    for tile in ("whole", "generic"):
        variant = chosen("backward", "bfloat16", "min_gru", tile)
        library = cuda_emulator.emulated(kernel, variant, tmp_path)
        trial = Trial(KINDS["min_gru"], "bfloat16", (2, 3, 520), SETTINGS[2]).draw().solve()
        del trial.expected["input1_grad"]
        found = trial.results(kernel, variant, library, 0)
        assert found is not None
        assert "input1_grad" not in found
        check(trial, found)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_longer_tiles(direction: Direction, cuda_emulator: ModuleType, tmp_path: Path) -> None:
    kernel = KERNELS[direction]
    longer = [v for v in kernel.every if dict(v.statics).get("blocks") == 3]
    assert {variant.text("kind") for variant in longer} == {"linear", "min_gru", "hgrn"}
    variant = next(v for v in longer if v.text("kind") == "hgrn")
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    for seed, trial in enumerate(trials("hgrn", variant.text("dtype"), "whole")):
        found = trial.results(kernel, variant, library, seed)
        assert found is not None
        check(trial, found)
