"""CUDA kernels of linear_scan over contiguous channels that are read element by element, in an emulator of the GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, product, repeat
from pathlib import Path
from types import ModuleType

import pytest
import torch
from contiguous_channels import (
    DIRECTIONS,
    UNTOUCHED,
    only_kernel,
    posed,
    solved,
    surrounded,
    with_and_without_states,
)

from scan_registry.kernels.linear_scan import cases
from scan_registry.kernels.linear_scan.problem import LinearScanProblem
from scan_registry.kernels.linear_scan.scalar import packs
from scan_registry.kernels.linear_scan.space import SCALAR
from scan_registry.kernels.model import Kernel, Variant

#: (batch, channels, time): a tile that is not full, channels that are parts of two or of three columns, one channel, several
#: tiles of narrow rows, and one time step; batches that share tiles, of a few channels and of many.
SHAPES = (
    *((2, 17, 50), (1, 33, 300), (2, 65, 130), (2, 1, 5000), (3, 5, 2100), (4, 21, 1)),
    *((400, 3, 7), (60, 2, 201), (70, 70, 5)),
)
WITH_ONE_GATE = ((2, 17, 50), (1, 33, 300), (2, 65, 130), (2, 5, 720))
#: Lengths of packed sequences, without the last: of one row, none, one tile and several.
PACKED = (
    ((2, 17, 50), (7, 0, 1, 30)),
    ((1, 33, 300), (0, 0, 100, 50, 1, 1)),
    ((1, 65, 2100), (1000, 3, 1000)),
    ((1, 1, 20_000), (9_000, 0, *range(100), 17)),
    ((1, 3, 5_000), (1,) * 2_000),
)
#: Rows of a thread as few as there may be, so that few time steps have groups of groups of tiles.
MANY_TILES = (1, 31, 9_000)


def the_kernel(direction: str, dtype: str = "float32", warps: int = 8) -> tuple[Kernel, Variant]:
    return only_kernel(direction, SCALAR, dtype, warps=warps)


def scattered(case: cases.Case, offset: int | None = None) -> tuple[LinearScanProblem, dict[str, torch.Tensor | None], list[torch.Tensor]]:  # fmt: skip
    """The problem and the tensors with each sequence at one offset or, if none is given, each at another, and the memory of the
    results."""
    tensors, memories = dict(case.tensors), []
    offsets = count(1) if offset is None else repeat(offset)
    for name, tensor in case.tensors.items():
        if tensor is None or tensor.dim() != 4:
            continue
        is_result = name in case.expected
        memory, tensors[name] = surrounded(
            tensor, next(offsets) % 4, UNTOUCHED if is_result else torch.nan
        )
        if is_result:
            memories.append(memory)
    return replace(case.problem, alignment=2), tensors, memories


def shared(case: str, direction: str = "forward") -> LinearScanProblem:
    """The problem of a case whose channels share a gate for each step."""
    problem = posed(case, direction, gate_stride=1)
    gates, *others = problem.strides
    return replace(problem, strides=(replace(gates, channel=0), *others))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("turn", "direction", "dtype", "warps"),
    [
        (number + (direction == "backward"), direction, *of)
        for number, of in enumerate(
            (("float32", 8), ("float32", 4), ("bfloat16", 4), ("float16", 8))
        )
        for direction in DIRECTIONS
    ],
)
def test_rows_at_any_address(
    turn: int,
    direction: str,
    dtype: str,
    warps: int,
    cuda_emulator: ModuleType,
    tmp_path: Path,
    thorough: bool,
) -> None:
    """The results are right, whatever lies around the tensors, and nothing beside them changes."""
    kernel, variant = the_kernel(direction, dtype, warps)
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    for seed, shape, states in with_and_without_states(SHAPES, turn, thorough):
        setting = cases.Setting(states=states, reverse=bool(seed % 4 // 2) ^ states)
        case = solved(shape, setting, dtype).case(kernel.name, aligned=True)
        # Where all lie alike, they move in pieces of 16 bytes.
        problem, tensors, memories = scattered(case, (None, 0, 3)[seed % 3])
        library.run(problem, tensors, seed)
        assert replace(case, tensors=tensors).error() <= cases.TOLERANCE[dtype], (shape, setting)
        for name in case.expected:
            tensors[name].fill_(UNTOUCHED)
        assert all(bool((memory == UNTOUCHED).all()) for memory in memories), (shape, setting)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("direction", "dtype"),
    [
        pytest.param("forward", "float32", marks=pytest.mark.thorough),
        ("backward", "bfloat16"),  # which scans the other way
    ],
)
def test_groups_of_groups_of_tiles(
    direction: str, dtype: str, cuda_emulator: ModuleType, tmp_path: Path, thorough: bool
) -> None:
    """A column of more than 32 × 32 tiles, with gates close to one, in whatever order tiles are scanned. States are float32 in both dtypes."""
    torch.manual_seed(0)
    kernel, variant = the_kernel(direction, dtype)
    few_rows = replace(
        variant, statics=tuple((n, 2 if n == "steps" else v) for n, v in variant.statics)
    )
    library = cuda_emulator.emulated(kernel, few_rows, tmp_path)
    for seed, reverse in enumerate((False, True) if thorough else (True,)):
        setting = cases.Setting(states=True, lasting=True, reverse=reverse)
        case = cases.draw(MANY_TILES, setting, dtype, "cpu").case(kernel.name, aligned=True)
        assert kernel.launch(few_rows, case.problem, 10_000).grid[0] > 1024
        library.run(case.problem, case.tensors, seed)
        assert case.error() <= cases.TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "direction"), product(("float32", "bfloat16"), DIRECTIONS))
def test_packed_sequences(
    dtype: str, direction: str, cuda_emulator: ModuleType, tmp_path: Path, thorough: bool
) -> None:
    """Of any lengths and none, at any address, in one tile and in many."""
    kernel, variant = the_kernel(direction, dtype)
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    turn = (dtype == "bfloat16") ^ (direction == "backward")
    for seed, (shape, lengths), states in with_and_without_states(PACKED, turn, thorough):
        one_gate = ("time",) if seed % 3 == 2 else ()
        setting = cases.Setting(states, bool(seed % 4 // 2), packed=True, broadcast=one_gate)
        case = solved(shape, setting, dtype, lengths).case(kernel.name, aligned=True)
        problem, tensors, _ = scattered(case, (None, 0, 3)[seed % 3])
        assert kernel.rules.kind_mismatch(variant, problem) is None
        library.run(problem, tensors, seed)
        assert replace(case, tensors=tensors).error() <= cases.TOLERANCE[dtype], (shape, setting)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_gate_a_channel(dtype: str, cuda_emulator: ModuleType, tmp_path: Path) -> None:
    """Its gradient is summed over time, or left as one for each step."""
    settings = (
        cases.Setting(states=True, broadcast=("time",)),
        cases.Setting(reverse=True, broadcast=("batch", "time")),
    )
    for direction in DIRECTIONS:
        kernel, variant = the_kernel(direction, dtype)
        library = cuda_emulator.emulated(kernel, variant, tmp_path)
        for seed, (shape, setting) in enumerate(product(WITH_ONE_GATE, settings)):
            trial = solved(shape, setting, dtype)
            for sums in (False, True) if direction == "backward" else (False,):
                case = trial.case(kernel.name, aligned=True, sums=sums)
                library.run(case.problem, case.tensors, seed)
                assert case.error() <= cases.TOLERANCE[dtype], (shape, setting, sums)


@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gates_that_channels_share(
    direction: str, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """A gate for each step, or one for all; of each batch, or of all batches."""
    kernel, variant = the_kernel(direction, "bfloat16", 4)
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    shared = (("channel",), ("batch", "channel"), ("channel", "time"))
    shapes = ((2, 17, 50), (1, 33, 300), (2, 64, 2100), (60, 8, 20), (3, 1, 90))
    for seed, (shape, broadcast) in enumerate(product(shapes, shared)):
        outer = 2 if seed % 5 == 1 and shape[0] % 2 == 0 else 1
        packed = seed % 4 == 3
        setting = cases.Setting(True, bool(seed % 2), packed, outer=outer, broadcast=broadcast)
        lengths = (shape[2] // 3, 0) if packed else ()
        trial = solved(shape, setting, "bfloat16", lengths)
        has_sums = direction == "backward" and "time" in broadcast and not setting.packed
        for sums in (False, True)[: 1 + has_sums]:
            case = trial.case(kernel.name, aligned=True, sums=sums)
            assert kernel.rules.kind_mismatch(variant, case.problem) is None
            library.run(case.problem, case.tensors, seed)
            assert case.error() <= cases.TOLERANCE["bfloat16"], (shape, setting, sums)


@pytest.mark.parametrize(
    ("problem", "is_taken"),
    [
        (posed("1,262144,21:float32"), True),
        (posed("6,4099,70:bfloat16", "backward"), True),
        (posed("17843,702,4:float16"), True),
        (posed("92,31419,5:bfloat16"), True),
        (posed("1024,168,21:bfloat16", "backward"), True),
        (posed("107,10130,14:float32"), True),
        (posed("17185,58,2:float32"), True),
        (posed("8186,70,8:float16"), True),
        (posed("2899,6,32:float32"), True),
        (posed("10795,825,4:float32", "backward", gate_stride=0), True),
        (posed("64,2048,17:float32"), True),
        (posed("256,512,7:float32"), True),
        (posed("256,2000,7:float32", "backward"), True),
        (posed("256,2000,7:float32"), False),
        (posed("64,2048,17:float32", "backward", gate_stride=0), True),
        (posed("8,4096,1024:bfloat16", alignment=2), True),
        (posed("62,820010,4:float32"), True),
        (posed("6000,32,16:bfloat16"), True),
        (posed("6000,60,16:bfloat16"), False),
        (posed("6000,32,48:bfloat16"), False),
        (posed("2000,11,41:float16"), True),
        (posed("2000,10,30:float32", "backward"), True),
        (shared("8,4096,1024:bfloat16"), True),
        (shared("1,70000,12:float32", "backward"), True),
        (posed("8,4099,1001:bfloat16"), False),
        (posed("256,512,21:float32"), False),
        (posed("8,4096,1024:bfloat16"), False),
        (posed("1,100,51:float32"), False),
        (posed("66,2044,8:bfloat16"), False),
        (posed("300,9,29:float16"), False),
        (posed("986,13,24:bfloat16"), False),
        (posed("200,100,4:float32"), False),
        (posed("4000,200,8:bfloat16"), False),
    ],
    ids=repr,
)
def test_what_takes_few_columns(problem: LinearScanProblem, is_taken: bool) -> None:
    """Where other kernels would leave most SMs or threads idle, or take no such rows. Then this one is preferred to all others."""
    kernel, variant = the_kernel(problem.direction, problem.dtype)
    assert (kernel.rules.accepts(variant, problem) is None) == is_taken
    taking = [v for v in kernel.variants if kernel.rules.accepts(v, problem) is None]
    best = min(taking, key=lambda v: kernel.cost(v, problem))
    assert (best.text("access") == SCALAR) == is_taken
    assert kernel.tunable.shape is not None
    assert ("access=scalar" in kernel.tunable.shape(problem).kind) == is_taken


@pytest.mark.parametrize(
    ("problem", "is_taken"),
    [
        (posed("1,116556,81:float16", sequences=18), True),
        (posed("1,510033,172:float16", "backward", sequences=3), True),
        (posed("1,16384,257:float32", sequences=16), True),
        (posed("1,1048576,8:bfloat16", sequences=5000), True),
        (posed("1,65536,64:bfloat16", "backward", sequences=32), True),
        (posed("1,65536,256:bfloat16", sequences=32), False),
        (posed("1,65536,1001:bfloat16", sequences=32), False),
        (posed("1,86913,193:bfloat16", sequences=526), False),
        (posed("1,33472,6:float16", sequences=1009), False),
        (posed("1,10064,2814:float32", sequences=4), False),
    ],
    ids=repr,
)
def test_what_takes_packed_sequences(problem: LinearScanProblem, is_taken: bool) -> None:
    """Where the longest sequence would take others longer than all elements take these tiles. Sums over a sequence they do not
    have."""
    kernel, variant = the_kernel(problem.direction, problem.dtype)
    assert (kernel.rules.accepts(variant, problem) is None) == packs(problem) == is_taken
    assert kernel.rules.accepts(variant, replace(problem, sums=True)) is not None


@pytest.mark.parametrize(
    ("problem", "warps"),
    [
        (posed("1024,168,21:bfloat16"), 4),
        (posed("1000,100,3:float32"), 4),
        (posed("37,3913,5:bfloat16"), 4),
        (posed("13496,1010,6:float16"), 8),
        (posed("256,512,7:float32"), 8),
        (posed("1,262144,21:float32"), 8),
        (posed("2,7077,7:float32"), 4),
        (posed("56,3496,2:bfloat16"), 8),
        (posed("1,8192,21:float32"), 8),
    ],
    ids=repr,
)
def test_short_batches_take_few_warps(problem: LinearScanProblem, warps: int) -> None:
    """Many warps where few would need another tile for a batch, or channels are many."""
    kernel, _ = the_kernel(problem.direction, problem.dtype)
    taking = [v for v in kernel.variants if kernel.rules.accepts(v, problem) is None]
    assert min(taking, key=lambda v: kernel.cost(v, problem)).number("warps") == warps


@pytest.mark.parametrize(
    ("problem", "tiles", "zeroed"),
    [
        (posed("1,71174,3:bfloat16"), 56, False),
        (posed("2,5775,41:bfloat16"), 62, False),
        (posed("1,619993,2:bfloat16"), 157, False),
        (posed("1,262144,21:float32"), 950, True),
        (posed("56,3496,2:bfloat16"), 56, True),
    ],
    ids=repr,
)
def test_small_scans_keep_a_gpu_busy_and_zero_their_maps(
    problem: LinearScanProblem, tiles: int, zeroed: bool
) -> None:
    """A CTA more zeroes the maps of tiles, if there are any, and they are few."""
    kernel, variant = the_kernel(problem.direction, problem.dtype)
    launch = kernel.launch(variant, problem, 132)
    assert (launch.grid, launch.zeroed) == ((tiles + (not zeroed), 1, 1), zeroed)
    assert launch.workspace == 16 * (launch.scalars["flags"] >> 23)
    assert (launch.scalars["flags"] >> 22 & 1) == (not zeroed)


def test_every_gpu_has_room_for_a_tile() -> None:
    for direction, dtype in product(DIRECTIONS, ("float32", "bfloat16", "float16")):
        kernel, variant = the_kernel(direction, dtype)
        assert kernel.code.shared(variant) <= 80_000
