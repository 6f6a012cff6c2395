"""The CUDA kernel of selective_state_update on the CPU, in an emulator of the GPU, against the float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from emulated_kernels import check
from torch import Tensor

from scan_registry.aot.compile import compile_variant
from scan_registry.hardware.target import Target
from scan_registry.kernels.model import Kernel, Variant
from scan_registry.kernels.selective_state_update import cases, spec
from scan_registry.kernels.selective_state_update.spec import FAMILY
from scan_registry.runtime import jit

STEP, TOKENS, DENSE_STEP, DENSE_TOKENS = FAMILY.kernels
#: One state of few channels, lanes of a warp that have no row, batches that are cut into slices, rows of several rounds, and
#: channels that fill no unit of rows; dense rows, in warps of which some have none.
SHAPES = (
    *((1, 1, 5, 1), (3, 1, 20, 16), (2, 4, 8, 64), (9, 2, 8, 8), (3, 2, 6, 256), (5, 3, 5, 33)),
    *((3, 1, 64, 16), (41, 1, 128, 16)),
)
NEEDS_NVRTC = pytest.mark.skipif(
    isinstance(jit.toolchains()["cuda"], str), reason="NVRTC is not installed"
)


@cache
def posed(dtype: str) -> tuple[cases.Trial, ...]:
    """Every shape with every setting, solved once."""
    torch.manual_seed(0)
    return tuple(cases.draw(*each, dtype, "cpu") for each in product(SHAPES, cases.SETTINGS))


@pytest.mark.parametrize(("turn", "variant"), enumerate(FAMILY.variants()), ids=str)
def test_matches_the_reference(turn: int, variant: Variant, emulated: Callable[..., Any]) -> None:
    """With every option, for threads of one batch and of several, whose last one may be alone."""
    library, dtype = emulated(FAMILY, variant), variant.text("dtype")
    problems = check(library, posed(dtype), cases.TOLERANCE[dtype], turn, sm_counts=(3, 1))
    launches = [library.kernel.launch(variant, p, sms) for p in problems for sms in (3, 1)]
    steps = {launch.scalars.get("steps") for launch in launches}
    assert len(steps) > 1 or library.kernel is TOKENS


@pytest.mark.parametrize("kernel", [DENSE_STEP, DENSE_TOKENS], ids=lambda kernel: kernel.name)
def test_a_warp_may_have_more_batches_than_lanes(
    kernel: Kernel, cuda_emulator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec, "_MOST_STEPS", 100)
    variant = kernel.variants[0]
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    several = kernel is DENSE_TOKENS
    setting = cases.Setting(inputs="bfloat16", indexed="int64", tokens=several)
    trial = cases.draw((65, 1, 512, 16), setting, "float32", "cpu")
    case = trial.case(kernel.name, aligned=True)
    assert kernel.launch(variant, case.problem, 1).scalars["steps"] == 65
    library.run(case.problem, case.tensors, 0, 1)
    assert case.error() <= cases.TOLERANCE["float32"]


def test_step_sizes_of_any_size(cuda_emulator: ModuleType, tmp_path: Path) -> None:
    """Softplus of small, large and infinite numbers is that of torch."""
    variant = STEP.variants[0]
    library = cuda_emulator.emulated(STEP, variant, tmp_path)
    trial = cases.draw((1, 1, 6, 4), cases.Setting(gated=False), "float32", "cpu")
    dt = trial.inputs["dt"]
    assert dt is not None
    dt[0, 0] = torch.tensor([-100.0, -15, 0, 19, 21, 300])
    case = cases.Trial(
        trial.shape,
        trial.setting,
        "float32",
        trial.inputs,
        cases.solved(trial.inputs, trial.setting),
    ).case("step", aligned=True)
    library.run(case.problem, case.tensors, 0)
    assert case.error() <= cases.TOLERANCE["float32"]


@pytest.mark.parametrize("kernel", [STEP, DENSE_STEP], ids=lambda kernel: kernel.name)
def test_rows_that_are_not_there_are_skipped(
    kernel: Kernel, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """Below zero, or above the last; what is infinite there goes nowhere."""
    variant = kernel.variants[0]
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    setting = cases.Setting(inputs=variant.text("inputs"), indexed="int64")
    trial = cases.draw((4, 1, 64, 16), setting, "float32", "cpu")
    case = trial.case(kernel.name, aligned=True)
    assert kernel.rules.accepts(variant, case.problem) is None
    indices, out, x = (case.tensors[name] for name in ("indices", "out", "x"))
    assert indices is not None
    assert out is not None
    assert x is not None
    state = case.tensors["state"]
    assert state is not None
    before = state.clone()
    indices.copy_(torch.tensor([-(2**40), 6, 2**40, -1]))
    x.fill_(torch.inf)
    library.run(case.problem, case.tensors, 0)
    assert (out == 0).all()
    assert torch.equal(state, before)


@NEEDS_NVRTC
@pytest.mark.thorough  # the job that compiles for every architecture fails where one spills
def test_nothing_spills() -> None:
    for variant in FAMILY.variants():
        binary, _ = compile_variant(variant, Target.parse("sm90"))
        assert not binary.spill_bytes, variant


def test_there_are_few_binaries() -> None:
    assert len(FAMILY.variants()) == 19


def guarded(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A copy with numbers around it that nobody may read or write: the copy, and all memory."""
    memory = torch.full((3, *tensor.shape), 12345.0, dtype=tensor.dtype)
    return memory[1].copy_(tensor), memory


@pytest.mark.parametrize(
    "variant",
    [v for v in (*TOKENS.variants, *DENSE_TOKENS.variants) if v.text("dtype") != "float16"],
    ids=str,
)
def test_nothing_outside_of_the_chosen_slots_is_written(
    variant: Variant, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """With slots, bounds and numbers of tokens that are out of range, too."""
    torch.manual_seed(0)
    kernel, access = FAMILY.kernel(variant.kernel, "cuda"), variant.text("access")
    library, dtype = cuda_emulator.emulated(kernel, variant, tmp_path), variant.text("dtype")
    setting = cases.Setting(
        inputs="bfloat16",
        tied=access == "tied",
        tokens=True,
        drafted=True,
        moved=True,
        indexed="int64",
    )
    shape = (4, 1, 64, 16) if access == "dense" else (4, 2, 8, 16)
    trial = cases.draw(shape, setting, dtype, "cpu")
    case = trial.case(kernel.name, aligned=access != "generic")
    assert kernel.rules.accepts(variant, case.problem) is None
    tensors = case.tensors
    for name, numbers in {
        "indices": [[-(2**40), 0, 1], [2, 2**40, 3], [4, 5, 6], [7, 8, 9]],
        "dst_indices": [[0, 1, 2], [3, 4, 5], [2**40, 6, -(2**40)], [10, 7, 2**31]],
        "num_accepted": [1, 2, 2**40, -(2**40)],
        "cu_seqlens": [-(2**40), 3, 5, 5 + 2, 2**40],
    }.items():
        tensor = tensors[name]
        assert tensor is not None
        tensor.copy_(torch.tensor(numbers).view(tensor.shape))
    memories = {}
    for name in ("state", "dst_state", "out"):
        tensor = tensors[name]
        assert tensor is not None
        tensors[name], memories[name] = (
            guarded(tensor) if tensor.is_contiguous() else (tensor, tensor)
        )
    before = {name: memory.clone() for name, memory in memories.items()}
    library.run(case.problem, tensors, 0)
    dst_state, out = tensors["dst_state"], tensors["out"]
    assert dst_state is not None
    assert out is not None
    assert torch.equal(memories["state"], before["state"])
    if dst_state.is_contiguous():
        memory, old = memories["dst_state"], before["dst_state"]
        assert torch.equal(memory[[0, 2]], old[[0, 2]])
        changed = (memory[1] != old[1]).flatten(1).any(1)
        # The first two sequences have no slot to start from, the third no slot for its first token, the last for its last.
        assert changed.nonzero().flatten().tolist() == [6, 7, 10]
        assert torch.equal(memories["out"][[0, 2]], before["out"][[0, 2]])
    assert (out[:5] == 0).all()
    assert (out[5:] != 0).any(2).any(1).all()
    assert not out.isnan().any()
