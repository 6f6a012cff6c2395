"""The CUDA kernels of recurrent networks on the CPU, against the reference; and that wheels hold no spill."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
import torch
from by_path import load
from compiling import on_sm90

from scan_registry.kernels.model import Variant
from scan_registry.kernels.rnn.problem import SIZES
from scan_registry.kernels.rnn.spec import FAMILY
from scan_registry.runtime import jit

#: Of the emulated GPU: as many blocks as run at once, so that some groups have to wait for others; a cluster
#: needs more.
SM_COUNT, OF_CLUSTER = 5, 8


@pytest.fixture(scope="module")
def rnn_trials() -> ModuleType:
    """The module of that name."""
    module: ModuleType = load(Path(__file__).with_name("rnn_trials.py"))
    return module


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
    forward: Variant, tried: list[object], emulator: ModuleType, module: ModuleType, folder: Path
) -> None:
    """Forward, and backward on what that made."""
    libraries = [
        emulator.emulated(FAMILY.kernel(variant.kernel, "cuda"), variant, folder)
        for variant in (forward, opposite(forward))
    ]
    dtype = forward.text("dtype")
    sm_count = max(SM_COUNT, OF_CLUSTER * (forward.number("cluster") > 1))
    for number, trial in enumerate(tried):
        tensors = module.Tensors(trial, getattr(torch, dtype), seed=number)
        for library, direction in zip(libraries, ("forward", "backward"), strict=True):
            problem = tensors.problem("sequence", direction)
            assert library.kernel.rules.accepts(library.variant, problem) is None
            assert (
                library.kernel.rules.exceeds_residency(library.variant, problem, sm_count) is None
            )
            library.run(problem, tensors.given, number, sm_count)
        assert tensors.error("states", "gates_grad", "initial_grad") <= module.TOLERANCE[dtype], (
            trial
        )


@pytest.mark.slow
@pytest.mark.parametrize("variant", [*chosen()], ids=str)
def test_matches_the_reference(
    variant: Variant, cuda_emulator: ModuleType, rnn_trials: ModuleType, tmp_path: Path
) -> None:
    """With every option, in whatever order the blocks and their threads run."""
    tried = rnn_trials.trials(variant.text("function"))
    if blocks := variant.number("cluster"):
        most = blocks * 16 * variant.number("rows")
        tried = [replace(trial, dim=min(trial.dim, most)) for trial in tried]
        tried.append(replace(tried[0], dim=most, batch=17))
    try_both(variant, tried, cuda_emulator, rnn_trials, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "dim"), OTHERS, ids=str)
def test_other_tilings(
    variant: Variant, dim: int, cuda_emulator: ModuleType, rnn_trials: ModuleType, tmp_path: Path
) -> None:
    """R in shared memory, too; two batches of each lane; rows that one warp has whole."""
    function = variant.text("function")
    tried = [rnn_trials.Trial(function, batch, 9, 1, d) for batch, d in ((3, dim), (17, 32))]
    try_both(variant, tried, cuda_emulator, rnn_trials, tmp_path)


def test_inference_writes_no_cache(
    cuda_emulator: ModuleType, rnn_trials: ModuleType, tmp_path: Path
) -> None:
    kernel = FAMILY.kernel("sequence_forward", "cuda")
    variant = kernel.variants[0]
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    tensors = rnn_trials.Tensors(rnn_trials.trials("lstm")[0], torch.bfloat16)
    given = {**tensors.given, "cache": None}
    library.run(tensors.problem("sequence", "forward", training=False), given, 0)
    assert tensors.error("states") <= rnn_trials.TOLERANCE["bfloat16"]
    assert tensors.given["cache"].isnan().all()


@pytest.mark.parametrize(
    ("function", "dtype"), [*product(SIZES, ("float32",)), ("gru", "bfloat16")]
)
def test_steps_match_the_reference(
    function: str, dtype: str, cuda_emulator: ModuleType, rnn_trials: ModuleType, tmp_path: Path
) -> None:
    """One launch per step, and the product with R in torch."""
    libraries = {}
    for direction in ("forward", "backward"):
        kernel = FAMILY.kernel(f"step_{direction}", "cuda")
        variant = next(
            v for v in kernel.variants if (v.text("function"), v.text("dtype")) == (function, dtype)
        )
        libraries[direction] = cuda_emulator.emulated(kernel, variant, tmp_path)
    for trial in rnn_trials.trials(function):
        if trial.resets:  # of which these kernels know nothing
            continue
        tensors = rnn_trials.Tensors(trial, getattr(torch, dtype))
        rnn_trials.step_by_step(tensors, libraries)
        error = tensors.error("states", "gates_grad", "initial_grad")
        assert error <= rnn_trials.TOLERANCE[dtype], trial


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scope", ["sequence", "step"])
def test_gates_of_a_steady_slstm_are_as_exact_as_what_is_stored(
    scope: str, dtype: str, cuda_emulator: ModuleType, rnn_trials: ModuleType, tmp_path: Path
) -> None:
    """Each by itself: those of z and o are so much larger that they hide what is wrong with the others."""
    libraries = {}
    for direction in ("forward", "backward"):
        kernel = FAMILY.kernel(f"{scope}_{direction}", "cuda")
        kind = {"function": "slstm", "dtype": dtype}.items()
        variant = next(v for v in kernel.variants if kind <= dict(v.statics).items())
        libraries[direction] = cuda_emulator.emulated(kernel, variant, tmp_path)
    tensors = rnn_trials.Tensors(rnn_trials.STEADY, getattr(torch, dtype))
    if scope == "step":
        rnn_trials.step_by_step(tensors, libraries)
    else:
        for direction, library in libraries.items():
            problem = tensors.problem("sequence", direction)
            library.run(problem, tensors.given, 0, SM_COUNT)
    assert max(tensors.gate_errors()) <= rnn_trials.STEADY_TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.skipif(isinstance(jit.toolchains()["cuda"], str), reason="NVRTC is not installed")
@pytest.mark.parametrize("kernel", ["sequence_forward", "sequence_backward"])
def test_r_stays_in_registers(kernel: str) -> None:
    """The largest kernels of the narrow dtypes: a spilled register would be reloaded at every step."""
    narrow = (v for v in FAMILY.kernel(kernel, "cuda").variants if v.text("dtype") == "bfloat16")
    for binary in on_sm90(v for v in narrow if v.text("function") in ("lstm", "slstm")):
        assert binary.spill_bytes == 0
        assert (binary.registers or 0) * binary.threads <= 65_536
