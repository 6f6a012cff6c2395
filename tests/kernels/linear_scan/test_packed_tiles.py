"""Packed sequences in the tiles of CUDA kernels that cut rows into segments, in an emulator of the GPU."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from selecting import like
from torch import Tensor

from scan_registry.kernels.linear_scan import cases, streams
from scan_registry.kernels.linear_scan.op.bench import Case
from scan_registry.kernels.linear_scan.op.operator import OPERATOR
from scan_registry.kernels.linear_scan.spec import FAMILY

#: Channels and time steps of rows that are aligned and misaligned; of several to a column, cut and whole; and of two batches.
ROWS = {
    "aligned": (1, 3, 2400),
    "misaligned": (1, 3, 2399),
    "cut": (1, 3, 6001),
    "whole": (1, 70, 500),
    "batches": (2, 35, 301),
}
DTYPES = {"forward": "bfloat16", "backward": "float32"}


def emulated(direction: str, emulator: ModuleType, folder: Path, dtype: str = "") -> Any:
    kernel = FAMILY.kernel(f"time_last_{direction}", "cuda")
    pins = {"dtype": dtype or DTYPES[direction], "access": "varlen", "prefix_lead": 2}
    return emulator.emulated(kernel, like(kernel, pins), folder)


def many_short_sequences(time: int) -> Tensor:
    """Bounds of more sequences than a warp looks at together, of which some are empty."""
    cuts = torch.randint(0, time + 1, (time // 12,)).sort().values
    return torch.cat([torch.tensor([0, 0]), cuts, cuts[-1:], torch.tensor([time])])


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("states", [False, True], ids=["", "states"])
@pytest.mark.parametrize("reverse", [False, True], ids=["", "reverse"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_many_short_sequences_match_the_reference(
    dtype: str,
    direction: str,
    rows: str,
    states: bool,
    reverse: bool,
    cuda_emulator: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = emulated(direction, cuda_emulator, tmp_path, dtype)
    monkeypatch.setattr(cases, "random_cu_seqlens", many_short_sequences)
    setting = cases.Setting(states=states, reverse=reverse, packed=True)
    case = cases.draw(ROWS[rows], setting, dtype, "cpu").case(library.kernel.name, aligned=True)
    assert library.kernel.rules.accepts(library.variant, case.problem) is None
    library.run(case.problem, case.tensors, seed=0)
    assert case.error() <= cases.TOLERANCE[dtype]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("value", [float("inf"), float("nan")], ids=str)
def test_what_is_not_finite_stays_in_its_sequence(
    direction: str, rows: str, value: float, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """The sequences before and after it have the results that they have without it, to the bit."""
    library = emulated(direction, cuda_emulator, tmp_path)
    trial = cases.draw(ROWS[rows], cases.Setting(packed=True), DTYPES[direction], "cpu")
    case = trial.case(library.kernel.name, aligned=True)
    # With these a lane scans its steps once more in any case.
    case.tensors.update(dict.fromkeys(("final_state", "initial_state_grad")))
    bounds = case.tensors["offsets"]
    assert bounds is not None
    number = int((bounds[1:] - bounds[:-1]).argmax())
    begin, end = bounds[number : number + 2].tolist()
    results = []
    for poisoned in (False, True):
        name = "tokens" if direction == "forward" else "states_grad"
        tensor = case.tensors[name]
        assert tensor is not None
        if poisoned:
            tensor[..., (begin + end) // 2] = value
        library.run(case.problem, case.tensors, seed=0)
        outputs = (case.tensors[name] for name in case.expected)
        results.append([out.clone() for out in outputs if out is not None])
    for plain, other in zip(*results, strict=True):
        assert not other[..., begin:end].isfinite().all()
        for part in (slice(0, begin), slice(end, None)):
            torch.testing.assert_close(other[..., part], plain[..., part], rtol=0, atol=0)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("rows", ["cut", "whole"])
def test_what_is_not_finite_stays_in_its_row(
    direction: str, rows: str, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """Also at the end of the scan, which the next row of a column follows."""
    library = emulated(direction, cuda_emulator, tmp_path)
    trial = cases.draw(ROWS[rows], cases.Setting(packed=True), DTYPES[direction], "cpu")
    case = trial.case(library.kernel.name, aligned=True)
    case.tensors.update(dict.fromkeys(("final_state", "initial_state_grad")))
    tensor = case.tensors["tokens" if direction == "forward" else "states_grad"]
    assert tensor is not None
    results = []
    for poisoned in (False, True):
        if poisoned:
            tensor[0, 0, 0, -1 if direction == "forward" else 0] = float("inf")
        library.run(case.problem, case.tensors, seed=0)
        outputs = (case.tensors[name] for name in case.expected)
        results.append([out.flatten(0, 2).clone() for out in outputs if out is not None])
    for plain, other in zip(*results, strict=True):
        assert not other[0].isfinite().all()
        torch.testing.assert_close(other[1:], plain[1:], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("shape", "direction", "ctas", "warps", "together"),
    [
        ((1, 896, 1229), "forward", 128, 7, 1),
        ((1, 5394, 986), "forward", 123, 11, 4),
        ((1, 1024, 65536), "backward", 132, 0, 1),
        ((1, 1024, 4000), "backward", 128, 8, 1),
        ((1, 160, 6016), "forward", 81, 0, 2),
        ((1, 2, 74993), "forward", 14, 0, 2),
    ],
)
def test_how_rows_are_shared(
    shape: tuple[int, int, int], direction: str, ctas: int, warps: int, together: int
) -> None:
    """Many rows, or short ones, go to a warp each, and others are cut."""
    kernel = FAMILY.kernel(f"time_last_{direction}", "cuda")
    pins = {"dtype": "bfloat16", "access": "varlen", "prefix_lead": 2}
    batch, channels, time = shape
    case = Case.parse(f"time_last:{batch},{channels},{time}:bfloat16:sequences=2")
    launch = kernel.launch(like(kernel, pins), OPERATOR.posed(case, direction)[-1], 132)
    flags = int(launch.scalars["flags"])
    assert (launch.grid[0], flags >> 2 & 0xFF, flags >> 10) == (ctas, warps, together)
    assert (launch.workspace > 0) == (warps == 0)


@pytest.mark.parametrize(
    ("case", "forward", "backward"),
    [
        ("1024,2048:bfloat16:sequences=64", True, True),
        ("1024,2048:bfloat16:sequences=64:state=1", False, False),
        ("896,1229:bfloat16:sequences=12:state=1", True, False),
        ("1024,65536:bfloat16:sequences=32:state=1", True, True),
        ("473,501:bfloat16:sequences=15", True, True),
        ("473,501:bfloat16:sequences=15:state=1", False, False),
        ("50,500:bfloat16:sequences=5", False, False),
    ],
)
def test_which_rows_are_cut(case: str, forward: bool, backward: bool) -> None:
    """Not rows that are short and few; with states no short sequences, and backward no short rows."""
    for direction, is_cut in (("forward", forward), ("backward", backward)):
        problem = OPERATOR.posed(Case.parse(f"time_last:1,{case}"), direction)[-1]
        assert streams.cuts_packed(problem) == is_cut
