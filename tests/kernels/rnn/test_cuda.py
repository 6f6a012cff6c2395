"""The CUDA kernels of recurrent networks on the CPU, against the reference; and that wheels hold no spill."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from compiling import on_sm90

from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.model import Variant
from scan_registry.kernels.rnn import cases
from scan_registry.kernels.rnn.problem import SIZES, Clips
from scan_registry.kernels.rnn.spec import FAMILY
from scan_registry.runtime import jit

#: Of the emulated GPU: as many blocks as run at once, so that some groups have to wait for others; a cluster
#: needs more.
SM_COUNT, OF_CLUSTER = 5, 8
STATES = cases.Setting(starts=True, ends=True)
#: (batch, time, heads, units) and options: one block and several, sizes that fill no tile, one step and more than a ring has
#: slots, and several groups one after the other.
TRIALS: tuple[tuple[cases.Shape, cases.Setting], ...] = (
    ((2, 3, 1, 16), STATES),
    ((1, 1, 3, 48), cases.Setting(ends=True)),
    ((9, 40, 1, 32), replace(STATES, graded=True)),
    ((2, 20, 2, 80), cases.Setting()),
    ((2, 3, 1, 32), replace(STATES, clips=Clips(forward=0.2, recurrent=0.05))),
    ((2, 3, 1, 32), cases.Setting(starts=True, clips=Clips(recurrent_cut=True))),
    ((9, 20, 2, 32), replace(STATES, graded=True, resets=True)),
    ((2, 5, 1, 80), cases.Setting(ends=True, resets=True, clips=Clips(recurrent=0.05))),
)
#: A steady sLSTM's c/n hardly changes, and the gradients of i and f are made of its changes: were these taken from
#: rounded states, f's would be wrong by a tenth in bfloat16.
STEADY, STEADY_TOLERANCE = cases.Setting(steady=True), {"float16": 5e-3, "bfloat16": 4e-2}


def tiled(function: str, dtype: str, **tiling: int) -> Variant:
    """A variant of the fused forward kernel."""
    kind = (("dtype", dtype), ("function", function))
    statics = (*kind, *{**tiling, "cluster": tiling.get("cluster", 0)}.items())
    return Variant(FAMILY.name, "sequence_forward", "cuda", statics)


#: By rows, batches and blocks of a cluster, the functions that take such a tiling, in the dtype that has most use for it: each
#: function in both dtypes, as tilings know nothing of what a function computes.
TAKEN = {
    (4, 1, 0): ("bfloat16", "gru", "elman", "slstm"),
    (2, 1, 8): ("bfloat16", "lstm", "elman"),
    (1, 1, 0): ("float32", "elman", "slstm"),
    (4, 1, 1): ("float32", "lstm", "gru"),
    (4, 0, 1): ("float32", "gru", "elman"),
    (8, 0, 1): ("float32", "lstm", "slstm"),
}


def chosen() -> Iterator[Variant]:
    """What is taken of each tiling, and of those of one block or many, but not of a few, one in the third dtype."""
    for variant in FAMILY.kernel("sequence_forward", "cuda").variants:
        tiling = tuple(variant.number(name) for name in ("rows", "batches", "cluster"))
        dtype, function = variant.text("dtype"), variant.text("function")
        usual, *functions = TAKEN[tiling]
        if (dtype == usual and function in functions) or (
            (dtype, function) == ("float16", "lstm") and variant.number("cluster") < OF_CLUSTER
        ):
            yield variant


#: What no default has, with sizes at which a row of R fills the registers and more.
OTHERS = (
    (tiled("lstm", "bfloat16", rows=4, split=2, batches=1, chunks=1, layers=2), 192),
    (tiled("gru", "float32", rows=2, split=4, batches=2, chunks=1, layers=1), 128),
    (tiled("elman", "float16", rows=4, split=1, batches=2, chunks=2, layers=1), 64),
    (tiled("slstm", "float32", rows=2, split=1, batches=1, chunks=3, layers=1), 64),
    (tiled("gru", "float32", rows=2, split=2, batches=1, chunks=2, layers=0, cluster=1), 32),
    (tiled("gru", "float32", rows=8, split=1, batches=0, chunks=2, layers=6, cluster=1), 128),
    (tiled("lstm", "float32", rows=4, split=4, batches=0, chunks=3, layers=1, cluster=1), 64),
)


def opposite(forward: Variant) -> Variant:
    """The backward kernel's default that has as many units, else its variant of the same tiling."""
    kernel = FAMILY.kernel("sequence_backward", "cuda")
    alike = Variant(FAMILY.name, kernel.name, "cuda", forward.statics)
    if forward not in FAMILY.kernel("sequence_forward", "cuda").variants:
        return alike
    if not forward.number("batches"):
        return alike
    narrow = forward.text("dtype") != "float32"
    cluster = int(forward.number("cluster") == 1 and narrow)
    rows = 4 if forward.number("cluster") else forward.number("rows")
    return next(
        v
        for v in kernel.variants
        if v.statics[:2] == forward.statics[:2]
        and (v.number("rows"), v.number("cluster")) == (rows, cluster)
    )


def try_both(
    forward: Variant,
    tried: Iterable[tuple[cases.Shape, cases.Setting]],
    emulator: ModuleType,
    folder: Path,
) -> None:
    """Both directions. Where a first step has a reset, the initial state is NaN."""
    dtype, function = forward.text("dtype"), forward.text("function")
    sm_count = max(SM_COUNT, OF_CLUSTER * (forward.number("cluster") > 1))
    libraries = [
        emulator.emulated(FAMILY.kernel(variant.kernel, "cuda"), variant, folder)
        for variant in (forward, opposite(forward))
    ]
    for number, (shape, setting) in enumerate(tried):
        torch.manual_seed(number)
        trial = cases.draw(function, shape, setting, dtype, "cpu")  # type: ignore[arg-type]
        for library in libraries:
            rules = library.kernel.rules
            case = trial.case(library.kernel.name, aligned=bool(number % 2))
            reset, initial = case.tensors["reset"], case.tensors["initial"]
            if reset is not None and initial is not None:
                initial[:, reset[:, 0]] = torch.nan
            assert rules.accepts(library.variant, case.problem) is None
            assert rules.exceeds_residency(library.variant, case.problem, sm_count) is None
            library.run(case.problem, case.tensors, number, sm_count)
            assert case.error() <= cases.TOLERANCE[dtype], str(trial)


@pytest.mark.slow
@pytest.mark.parametrize(("turn", "variant"), enumerate(chosen()), ids=str)
def test_matches_the_reference(
    turn: int,
    variant: Variant,
    cuda_emulator: ModuleType,
    tmp_path: Path,
    pytestconfig: pytest.Config,
) -> None:
    """With every option, in whatever order the blocks and their threads run. Options take turns, unless all is to be run."""
    tried = TRIALS if pytestconfig.getoption("--thorough") else TRIALS[turn % 2 :: 2]
    if blocks := variant.number("cluster"):
        most = blocks * 16 * variant.number("rows")
        narrow = (((*shape[:3], min(shape[3], most)), setting) for shape, setting in tried)
        tried = (*narrow, ((17, 3, 1, most), STATES))
    try_both(variant, tried, cuda_emulator, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "dim"),
    [
        pytest.param(*case, marks=[] if number % 2 else [pytest.mark.thorough])
        for number, case in enumerate(OTHERS)
    ],
    ids=str,
)
def test_other_tilings(
    variant: Variant, dim: int, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """R in shared memory, too; two batches of each lane; rows that one warp has whole."""
    tried = [((3, 9, 1, dim), STATES), ((17, 9, 1, 32), STATES)]
    try_both(variant, tried, cuda_emulator, tmp_path)


def test_inference_writes_no_cache(cuda_emulator: ModuleType, tmp_path: Path) -> None:
    kernel = FAMILY.kernel("sequence_forward", "cuda")
    library = cuda_emulator.emulated(kernel, kernel.variants[0], tmp_path)
    trial = cases.draw("lstm", (2, 3, 1, 16), STATES, "bfloat16", "cpu")
    case = trial.case(kernel.name, aligned=True)
    tensors = {**case.tensors, "cache": None}
    library.run(replace(case.problem, training=False), tensors, 0)
    errors = case.errors()
    assert errors["states"] <= cases.TOLERANCE["bfloat16"]
    assert errors["cache"] == torch.inf  # as it was


@pytest.mark.parametrize(
    ("function", "dtype"), [*product(SIZES, ("float32",)), ("gru", "bfloat16")]
)
def test_steps_match_the_reference(
    function: Any, dtype: str, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """Of kernels that know nothing of resets."""
    for direction in ("forward", "backward"):
        library = first(cuda_emulator, f"step_{direction}", function, dtype, tmp_path)
        for number, (shape, setting) in enumerate(TRIALS[:6]):
            torch.manual_seed(number)
            trial = cases.draw(function, shape, setting, dtype, "cpu")
            for aligned in (False, True):
                case = trial.case(f"step_{direction}", aligned=aligned)
                library.run(case.problem, case.tensors, number)
                assert case.error() <= cases.TOLERANCE[dtype], str(trial)


def first(emulator: ModuleType, name: str, function: str, dtype: str, folder: Path) -> Any:
    """The kernel's first variant of them, emulated."""
    kernel, kind = FAMILY.kernel(name, "cuda"), {"function": function, "dtype": dtype}.items()
    variant = next(v for v in kernel.variants if kind <= dict(v.statics).items())
    return emulator.emulated(kernel, variant, folder)


@pytest.mark.parametrize("dtype", STEADY_TOLERANCE)
def test_gates_of_a_steady_slstm_are_as_exact_as_what_is_stored(
    dtype: str, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """Each by itself: those of z and o are so much larger that they hide what is wrong with the others. What the forward pass
    has stored, the backward pass takes."""
    torch.manual_seed(0)
    trial, stored = cases.draw("slstm", (3, 11, 1, 32), STEADY, dtype, "cpu"), {}
    for name in ("sequence_forward", "sequence_backward"):
        case = trial.case(name, aligned=True)
        tensors = case.tensors | stored
        first(cuda_emulator, name, "slstm", dtype, tmp_path).run(case.problem, tensors, 0, SM_COUNT)
        stored = {"states": tensors["states"], "cache": tensors["cache"]}
    pairs = zip(tensors["gates_grad"].unbind(2), case.expected["gates_grad"].unbind(2), strict=True)
    errors = [relative_error(out, expected) for out, expected in pairs]
    assert max(errors) <= STEADY_TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.thorough  # as the job that compiles every variant for every architecture fails where one spills
@pytest.mark.skipif(isinstance(jit.toolchains()["cuda"], str), reason="NVRTC is not installed")
@pytest.mark.parametrize("kernel", ["sequence_forward", "sequence_backward"])
def test_r_stays_in_registers(kernel: str) -> None:
    """The largest kernels of the narrow dtypes: a spilled register would be reloaded at every step."""
    narrow = (v for v in FAMILY.kernel(kernel, "cuda").variants if v.text("dtype") == "bfloat16")
    for binary in on_sm90(v for v in narrow if v.text("function") in ("lstm", "slstm")):
        assert binary.spill_bytes == 0
        assert (binary.registers or 0) * binary.threads <= 65_536
