"""The CUDA kernels of gated_scan on the CPU, those for contiguous channels against the kinds' lines in float64."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from emulated_kernels import check, surround
from forked import captured

from scan_registry.kernels import ROOT
from scan_registry.kernels.gated_scan import cases
from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.gated_scan.problem import HEADERS
from scan_registry.kernels.gated_scan.spec import FAMILY
from scan_registry.kernels.model import Kernel, Variant

#: (batch, channels, time): columns that are not full, rows of whole pieces and not, one step, and several tiles.
SHAPES: tuple[cases.Shape, ...] = ((2, 72, 72), (1, 24, 152), (2, 5, 65), (3, 33, 37), (2, 8, 1))
#: For variants whose tiles depend on others that run at the same time.
LONG: cases.Shape = (1, 72, 1400)


def _variants() -> Iterator[Variant]:
    """Of every kind in float32 or bfloat16, and one in float16: one tile for each access, and of two kinds another for few
    columns. What tuning may choose besides of one kind, another in each direction."""
    seen = set()
    for kernel in FAMILY.kernels:
        if kernel.language == "cuda" and kernel.name.startswith("channel_last"):
            for variant in kernel.variants:
                kind, dtype = variant.text("kind"), variant.text("dtype")
                # One dtype for each kind, in turn: each variant takes seconds to compile, and a kind's code is the
                # same in both dtypes.
                turn = ("bfloat16", "float32")[[*HEADERS].index(kind) % 2]
                wide = dict(variant.statics).get("lanes_across") != 16
                if (
                    dtype in (turn, "float16")
                    and (dtype != "float16" or kind == "rg_lru")
                    and (wide or kind in ("linear", "min_gru"))
                ):
                    seen.add((kernel.name, kind, variant.statics[2:]))
                    yield variant
            for statics in kernel.tunable.space:
                pins = dict(statics)
                tried = (kernel.name, pins["kind"], statics[2:]) in seen
                forward = kernel.name.endswith("forward")
                if not tried and (pins["dtype"], pins["kind"]) == (
                    ("bfloat16", "rg_lru") if forward else ("float16", "hgrn")
                ):
                    yield Variant(FAMILY.name, kernel.name, "cuda", statics)


@cache
def trials(source: str, dtype: str) -> tuple[cases.Trial, ...]:
    """Every kind of a header with every setting; shapes take turns."""
    torch.manual_seed(0)
    names = [name for name, kind in KINDS.items() if kind.source == source]
    count = len(SHAPES)
    return tuple(
        cases.draw(SHAPES[(number + turn) % count], name, setting, dtype, "cpu")
        for name in names
        for number, setting in enumerate(cases.SETTINGS)
        for turn in (0, 2)
    )


@cache
def long(source: str, dtype: str) -> tuple[cases.Trial, ...]:
    torch.manual_seed(1)
    settings = (cases.Setting(states=True), cases.Setting(True, reverse=True, resets=True))
    return tuple(cases.draw(LONG, source, setting, dtype, "cpu") for setting in settings)


@pytest.mark.slow
@pytest.mark.parametrize(("turn", "variant"), enumerate(_variants()), ids=str)
def test_matches_the_reference(turn: int, variant: Variant, emulated: Callable[..., Any]) -> None:
    """With every option, in whatever order the CTAs and their threads run."""
    library = emulated(FAMILY, variant)
    source, dtype = variant.text("kind"), variant.text("dtype")
    cut = {"ctas_per_column", "prefix_lead"} & {*dict(variant.statics)}
    posed = (*trials(source, dtype), *(long(source, dtype) if cut else ()))
    check(library, posed, cases.TOLERANCE[dtype], turn)


def like(kernel: Kernel, **pins: int | str) -> Variant:
    """The first of the kernel's variants that has these static parameters."""
    return next(v for v in kernel.every if pins.items() <= dict(v.statics).items())


@pytest.mark.parametrize("reverse", [False, True], ids=["", "reverse"])
@pytest.mark.parametrize(
    ("layout", "tile"),
    [
        *product(("channel_last", "time_last"), ({"access": "aligned"}, {"access": "generic"})),
        ("time_last", {"prefix_lead": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_nothing_passes_a_reset(
    direction: str,
    layout: str,
    tile: dict[str, int | str],
    reverse: bool,
    cuda_emulator: ModuleType,
    tmp_path: Path,
) -> None:
    """Whatever states and gradients are on its other side: infinite, or not a number."""
    torch.manual_seed(0)
    kernel = FAMILY.kernel(f"{layout}_{direction}", "cuda")
    variant = like(kernel, dtype="float32", kind="linear", **tile)
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    setting = cases.Setting(states=True, resets=True, reverse=reverse)
    trial = cases.draw((1, 16, 96), "linear", setting, "float32", "cpu")
    # The states before these resets are NaN, and what reaches them from later steps is infinite.
    resets = torch.tensor([20, 41]) if not reverse else torch.tensor([68, 49])
    reset = trial.inputs["reset"]
    assert reset is not None
    reset.fill_(False)[:, resets] = True
    one, other = sorted(resets.tolist())
    spoilt = slice(None, one) if not reverse else slice(other + 1, None)
    tokens, grads = trial.inputs["input1"], trial.inputs["states_grad"]
    assert tokens is not None
    assert grads is not None
    tokens[..., spoilt] = torch.nan
    late = slice(other, None) if not reverse else slice(None, one + 1)
    grads[..., late] = torch.inf
    case = trial.case(kernel.name, aligned=True)
    assert kernel.rules.accepts(variant, case.problem) is None
    states = case.tensors["states"]
    assert states is not None
    if direction == "backward":
        states[..., spoilt] = torch.nan
    library.run(case.problem, case.tensors, seed=0)
    if direction == "forward":
        assert states[..., spoilt].isnan().all()
        clean = slice(one, None) if not reverse else slice(None, other + 1)
        assert states[..., clean].isfinite().all()
        return
    clean = slice(one, other) if not reverse else slice(one + 1, other + 1)
    for name in ("input0_grad", "input1_grad"):
        found = case.tensors[name]
        assert found is not None
        assert found[..., clean].isfinite().all(), name
    gates_grad = case.tensors["input0_grad"]
    assert gates_grad is not None
    assert (gates_grad[..., resets] == 0).all()


#: Of each header, the input that tokens are proportional to, or nearly so.
VALUE = {"linear": 1, "min_gru": 1, "min_lstm": 2, "rg_lru": 0, "hgrn": 0}


@pytest.mark.slow
@pytest.mark.parametrize("bad", [torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize(
    ("kind", "layout", "access"),
    [
        pytest.param(kind, layout, access, marks=[pytest.mark.thorough] if turn % 2 else [])
        for n, kind in enumerate(VALUE)
        for turn, layout in enumerate(("channel_last", "time_last"), n)
        for access in [("aligned", "generic")[(n // 2 + turn) % 2]]
    ],
)
def test_of_every_kind_nothing_passes_a_reset(
    kind: str, layout: str, access: str, bad: float, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """From the reset on, states and gradients are those of a scan that begins there."""
    torch.manual_seed(0)
    middle, setting = 48, cases.Setting(states=True, resets=True)
    trial = cases.draw((1, 16, 96), kind, setting, "float32", "cpu")
    inputs, reset, initial = trial.inputs, trial.inputs["reset"], trial.inputs["initial_state"]
    assert reset is not None
    assert initial is not None
    reset[:, middle] = True
    count = len(KINDS[kind].inputs)
    spoilt = inputs[f"input{VALUE[kind]}"]
    assert spoilt is not None
    later = {
        name: t[..., middle:] if t is not None and t.shape[-1] == 96 else t
        for name, t in inputs.items()
    }
    expected, _ = cases.solved(KINDS[kind], later, False)
    spoilt[..., 5], initial[:] = bad, bad
    reset[:, :middle] = False
    for direction in ("forward", "backward"):
        kernel = FAMILY.kernel(f"{layout}_{direction}", "cuda")
        variant = like(kernel, dtype="float32", kind=kind, access=access)
        library = cuda_emulator.emulated(kernel, variant, tmp_path)
        case = trial.case(kernel.name, aligned=True)
        states = case.tensors["states"]
        assert states is not None
        if direction == "backward":
            states[..., middle:] = expected["states"][..., :]
            states[..., :middle] = bad
        library.run(case.problem, case.tensors, seed=0)
        names = ["states"] if direction == "forward" else [f"input{n}_grad" for n in range(count)]
        for name in names:
            found = case.tensors[name]
            assert found is not None
            error = cases.relative_error(found[..., middle:], expected[name])
            assert error <= cases.TOLERANCE["float32"], name
        # Until a product of gates underflows.
        assert direction == "backward" or not states[..., 5:8].isfinite().any()


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("layout", "tile", "dtype", "shape"),
    [
        ("channel_last", {"warps": 8, "lanes_across": 32, "vector": 1}, "bfloat16", (2, 72, 70)),
        ("channel_last", {"warps": 4, "vector": 2}, "bfloat16", (2, 72, 70)),
        ("channel_last", {"lanes_across": 16}, "float32", (1, 20, 150)),
        ("channel_last", {"ctas_per_column": 4}, "bfloat16", (1, 72, 1100)),
        ("channel_last", {"access": "generic"}, "float32", (2, 5, 65)),
        ("time_last", {"access": "aligned"}, "bfloat16", (5, 41, 24)),
        ("time_last", {"prefix_lead": 2}, "float32", (2, 1, 4616)),
        ("time_last", {"access": "generic"}, "float32", (2, 3, 517)),
    ],
    ids=str,
)
def test_nothing_beside_the_results_is_written(
    direction: str,
    layout: str,
    tile: dict[str, int | str],
    dtype: str,
    shape: cases.Shape,
    cuda_emulator: ModuleType,
    tmp_path: Path,
) -> None:
    """Neither past the last channel or step, nor past the parts that the launch says there are."""
    torch.manual_seed(0)
    kernel = FAMILY.kernel(f"{layout}_{direction}", "cuda")
    variant = like(kernel, dtype=dtype, kind="rg_lru", **tile)
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    setting = cases.Setting(states=True, resets=True)
    case = cases.draw(shape, "rg_lru", setting, dtype, "cpu").case(kernel.name, aligned=True)
    assert kernel.rules.accepts(variant, case.problem) is None
    scalars = kernel.launch(variant, case.problem, cuda_emulator.SM_COUNT).scalars
    parts = {"parameters_grad": scalars["parts"]} if "parameters_grad" in case.expected else {}
    untouched = surround(case.tensors, case.expected, parts)
    library.run(case.problem, case.tensors, seed=0)
    assert case.error() <= cases.TOLERANCE[dtype]
    assert untouched()


# --- Another kind -----------------------------------------------------------------------------

PAGE = Path(__file__).parents[3] / "docs" / "pages" / "developers" / "gates.md"


def block(language: str) -> str:
    """The page's first block in that language. The kind has no padding, and its parameter is a time constant: two things that the
    others do not have."""
    text, *_ = re.findall(
        rf"```{language}\n(.*?)```\n", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    return str(text)


#: Run where the copy is what is imported: compiles every access of both directions and compares.
ADDED = """
import sys
from pathlib import Path

import torch

sys.path.insert(0, sys.argv[1])
import cuda_emulator
import scan_registry.kernels

root, out = Path(sys.argv[2]), Path(sys.argv[3])
scan_registry.kernels.__path__.insert(0, str(root))
scan_registry.kernels.ROOT = root
from scan_registry.aot import nvrtc
from scan_registry.kernels.gated_scan import cases
from scan_registry.kernels.gated_scan.spec import FAMILY

nvrtc.ROOT = root
torch.manual_seed(0)
settings = [
    cases.Setting(states=True, resets=True),
    cases.Setting(states=True, reverse=True),
    cases.Setting(states=True, packed=True, resets=True),
]
trials = [
    cases.draw(shape, "decay", setting, "float32", "cpu")
    for shape in ((2, 8, 72), (1, 24, 33))
    for setting in settings
]
kernels = [kernel for kernel in FAMILY.kernels if kernel.language == "cuda"]
for kernel, access in zip(kernels, ("aligned", "generic", "generic", "aligned"), strict=True):
    pins = {"dtype": "float32", "kind": "decay", "access": access}
    variant = next(v for v in kernel.variants if pins.items() <= dict(v.statics).items())
    library = cuda_emulator.emulated(kernel, variant, out)
    checked = 0
    for case in (case for trial in trials for case in trial.launches(kernel.name)):
        if kernel.rules.accepts(variant, case.problem) is None:
            library.run(case.problem, case.tensors, seed=0)
            errors = case.errors()
            assert max(errors.values()) <= cases.TOLERANCE["float32"], (variant, errors)
            checked += 1
    assert checked, variant
    print(kernel.name, access, checked)
"""


@pytest.mark.slow
def test_a_kind_is_one_header_and_one_line(cuda_emulator: ModuleType, tmp_path: Path) -> None:
    """What the page says, in a copy of the family's folder, and no more: all kernels then have the kind."""
    root, out = tmp_path / "kernels", tmp_path / "emulated"
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns("__pycache__"))
    out.mkdir()
    (out / cuda_emulator.ready().name).symlink_to(cuda_emulator.ready())
    family = root / "gated_scan"
    (family / "kinds" / "decay.cuh").write_text(block("cuda"), encoding="utf-8")
    with (family / "kinds.py").open("a", encoding="utf-8") as kinds:
        kinds.write("\n\n" + block("python"))
    script = tmp_path / "added.py"
    script.write_text(ADDED, encoding="utf-8")
    command = [sys.executable, script, Path(cuda_emulator.__file__).parent, root, out]
    ran = captured([*map(str, command)])
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 4
