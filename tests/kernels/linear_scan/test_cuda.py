"""The CUDA kernels of linear_scan on the CPU, in an emulator of the GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from emulated_kernels import check, surround
from processes import captured
from selecting import like

from scan_registry.kernels.linear_scan import cases
from scan_registry.kernels.linear_scan.space import MULTI_CTA, NARROW, RESIDENT
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import Variant

#: (batch, channels, time): one step, lengths that fill no tile, many tiles, and few channels.
SHAPES = ((2, 16, 1), (2, 33, 130), (1, 24, 1024), (3, 16, 208), (2, 18, 600))
#: For scans that are cut, or shared by blocks: several segments, and of few channels more than blocks run at once, and
#: groups of them; and more tiles than blocks have room to tell one another of.
LONG = ((1, 8, 12000), (1, 1, 24000))
#: One scan has larger groups, and of wide numbers the smallest segments.
GROUPED = {"complex64": ((1, 1, 140_000),)}
LASTING = cases.Setting(states=True, lasting=True)
#: Rows so long that they are cut though the gradient of their only gates is summed.
SUMMED = (1, 2, 4112), cases.Setting(states=True, broadcast=("time",))


#: Parameters of which one value is emulated like the other: how many blocks an SM has room for, and how many of more than a
#: few stages or blocks there are.
MUCH_ALIKE = {"blocks", "stages", "ctas_per_column", "aggregate_lead"}


def ways(variant: Variant) -> set[object]:
    """What of a variant is to be tried: which parameters there are with its access, and its dtypes, in both directions; and
    each parameter's value, and its dtypes with those parameters, in one of the two, which have most of their code in common.
    What takes any tensor has code of its own in each direction."""
    statics = dict(variant.statics)
    sizes = {name: size for name, size in statics.items() if name not in MUCH_ALIKE}
    layout, _, _ = variant.kernel.rpartition("_")
    kind = statics.get("access"), *statics
    dtypes = statics["dtype"], statics.get("gates")
    return {
        (variant.kernel, *kind),
        (variant.kernel, *dtypes),
        (variant.kernel if kind[0] == "generic" else layout, *kind, *dtypes),
        (variant.kernel, "stages", min(int(statics.get("stages", 0)), 3)),
        *((layout, *size) for size in sizes.items()),
    }


def chosen() -> Iterator[Variant]:
    """As few as have between them all that there is to try: in three dtypes, complex64 where no other dtype has it. Narrow
    rows, misaligned columns that several CTAs share, and scans that shared memory has room for have tests of their own."""
    dtypes = ("float16", "float64")
    every = [*streamed()]
    every += [
        v
        for v in FAMILY.variants()
        if v.language == "cuda"
        and v.text("dtype") not in dtypes
        and dict(v.statics).get("access") not in (NARROW, MULTI_CTA, RESIDENT)
    ]
    tries = {variant: ways(variant) for variant in every}
    missing = set[object]().union(*tries.values())
    while missing:
        best = max(tries, key=lambda v: (len(tries[v] & missing), "complex" not in v.text("dtype")))
        missing -= tries.pop(best)
        yield best


def streamed() -> Iterator[Variant]:
    """A few of those whose tiles come through a ring, one for each way to share a row or a column; and of misaligned rows
    that are held in registers. Dtypes take turns, of which backward kernels have another than forward ones."""
    wanted: dict[str, list[dict[str, Any]]] = {
        "time_last": [
            {"lanes": 1},
            {"lanes": 8},
            {"lanes": 32},
            {"prefix_lead": 1},
            {"prefix_lead": 2, "stages": 4},
            {"rows": 18},
            {"lanes": 4, "access": "misaligned"},
            {"prefix_lead": 2, "access": "misaligned"},
            {"prefix_lead": 2, "access": "varlen"},
            {"warps": 1, "rows": 4, "steps": 2, "access": "misaligned"},
            {"warps": 4, "rows": 1, "steps": 2, "access": "misaligned"},
        ],
        "channel_last": [
            {"prefix_lead": 1},
            {"prefix_lead": 2, "stages": 4},
            {"prefix_lead": 2, "steps": 6},
            {"lanes_across": 16},
            {"lanes_across": 32},
            {"lanes_across": 32, "vector": 4},
            {"single_wave": 1},
            {"ctas_per_column": 3},
            {"ctas_per_column": 8},
            {"lanes_across": 16, "access": "varlen"},
            {"lanes_across": 16, "access": "misaligned"},
            {"vector": 2, "access": "misaligned"},
            {"vector": 4, "access": "misaligned"},
        ],
    }
    dtypes = ("float32", "bfloat16", "complex64")
    for kernel in FAMILY.kernels:
        if kernel.language != "cuda":
            continue
        every = map(dict, kernel.tunable.space)
        found = [p for p in every if "stages" in p or p.get("access") == "misaligned"]
        layout, _, direction = kernel.name.rpartition("_")
        for number, pins in enumerate(wanted[layout] if found else ()):
            first = (number + (direction == "backward")) % 3
            matches = [
                {"access": "aligned", "dtype": dtype, **pins}
                for dtype in (*dtypes[first:], *dtypes[:first])
            ]
            fits = (next((f for f in found if m.items() <= f.items()), None) for m in matches)
            fit = next(filter(None, fits), None)
            assert fit, f"{kernel.name} has nothing like {pins}"
            yield Variant(FAMILY.name, kernel.name, "cuda", tuple(fit.items()))


@cache
def short(dtype: str) -> tuple[cases.Trial, ...]:
    """What every variant is given, solved once: a launch has copies of the sequences."""
    torch.manual_seed(0)
    return tuple(cases.trials(dtype, SHAPES, "cpu"))


@cache
def long(dtype: str) -> tuple[cases.Trial, ...]:
    """What those that are cut, or shared by blocks, are given besides: it takes as long to solve as to compile one."""
    torch.manual_seed(1)
    ways = LASTING, replace(LASTING, reverse=True)  # one for each shape, in another dtype the other
    posed = [*zip(LONG, ways[:: 1 if dtype == "float32" else -1], strict=True)]
    posed += [(shape, LASTING) for shape in GROUPED.get(dtype, ())]
    posed += [SUMMED] if dtype == "float32" else []
    return tuple(cases.draw(*each, dtype, "cpu") for each in posed)


@pytest.mark.slow
@pytest.mark.parametrize(("turn", "variant"), enumerate(dict.fromkeys(chosen())), ids=str)
def test_matches_the_reference(
    turn: int, variant: Variant, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """With every option, in whatever order the blocks and their threads run."""
    kernel = FAMILY.kernel(variant.kernel, "cuda")
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    dtype = variant.text("dtype")
    cut = {"prefix_lead", "ctas_per_column", "single_wave"} & {*dict(variant.statics)}
    trials = (*short(dtype), *(long(dtype) if cut else ()))
    check(library, trials, cases.TOLERANCE[dtype], turn)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("direction", "dtype", "batch"),
    [
        ("forward", "bfloat16", 5),
        ("backward", "float32", 26),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                ("backward", "float32", 5),
                *product(("forward", "backward"), ("bfloat16",), (50,)),
                ("forward", "float32", 26),
            )
        ),
    ],
)
def test_blocks_keep_the_states_of_columns(
    direction: str, dtype: str, batch: int, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """Blocks go from column to column, and come back with groups of segments between. A block keeps the states of 24 columns
    of 16 channels in float32, and of 48 in bfloat16."""
    kernel = FAMILY.kernel(f"channel_last_{direction}", "cuda")
    variant = next(
        v for v in kernel.variants if "prefix_lead" in str(v) and v.text("dtype") == dtype
    )
    segment = 32 // variant.number("lanes") * variant.number("steps") * variant.number("warps")
    shape = batch, 8, (40 if batch == 5 else 18) * segment
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    torch.manual_seed(2)
    posed = cases.draw(shape, LASTING, dtype, "cpu").launches(kernel.name)
    accepted = [each for each in posed if kernel.rules.accepts(variant, each.problem) is None]
    assert accepted
    for case in accepted:
        library.run(case.problem, case.tensors, seed=batch)
        assert case.error() <= cases.TOLERANCE[dtype]


PACKED = cases.Setting(states=True, packed=True)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("reverse", [False, True], ids=["", "reverse"])
@pytest.mark.parametrize(
    ("layout", "tile"),
    [
        ("channel_last", {"lanes_across": 32}),
        ("time_last", {"prefix_lead": 2}),
    ],
    ids=str,
)
def test_a_walk_over_malformed_bounds_writes_nowhere_else(
    direction: str,
    reverse: bool,
    layout: str,
    tile: dict[str, int],
    cuda_emulator: ModuleType,
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    name = f"{layout}_{direction}"
    kernel = FAMILY.kernel(name, "cuda")
    variant = like(kernel, {"dtype": "float32", "access": "varlen", **tile})
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    setting = replace(PACKED, reverse=reverse)
    case = cases.draw((1, 16, 300), setting, "float32", "cpu").case(name, aligned=True)
    assert kernel.rules.accepts(variant, case.problem) is None
    tensors = dict(case.tensors)
    untouched = surround(tensors, case.expected)
    offsets = tensors["offsets"]
    time = case.problem.time
    drawn = [
        torch.randint(low, high, (4, len(offsets))) for low, high in ((0, time + 1), (-9, 9 + time))
    ]
    far = torch.tensor([-(2**63), 2**63 - 1, -(2**40), 2**40]).repeat(len(offsets))[: len(offsets)]
    for bounds in (*torch.cat(drawn), torch.zeros_like(offsets), far, far.flip(0)):
        tensors["offsets"] = bounds.contiguous()
        library.run(case.problem, tensors, seed=0)
        assert untouched(), bounds


#: A layout, parameters of a tile, a shape, and the dtypes forward and backward.
MISALIGNED = {
    "channel_last": ("channel_last", {"lanes_across": 32, "vector": 2}, (2, 69, 200), "float32", "bfloat16"),
    "channel_last, other dtypes": (
        "channel_last", {"lanes_across": 32, "vector": 2}, (2, 69, 200), "bfloat16", "float32",
    ),
    "time_last": (
        "time_last", {"lanes": 16, "pieces": 1, "stages": 3}, (2, 3, 1150), "float32", "bfloat16",
    ),
    "time_last, two pieces": (
        "time_last", {"lanes": 16, "pieces": 2, "stages": 3}, (1, 5, 765), "bfloat16", "float32",
    ),
    "time_last, held": (
        "time_last", {"warps": 1, "rows": 4, "steps": 1}, (1, 5, 765), "float32", "bfloat16",
    ),
    "time_last, held and short": (
        "time_last", {"warps": 1, "rows": 4, "steps": 2}, (3, 3, 5), "bfloat16", "float32",
    ),
    "time_last, held by two warps": (
        "time_last", {"warps": 2, "rows": 1, "steps": 2}, (2, 3, 1150), "float32", "bfloat16",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("tried", MISALIGNED)
@pytest.mark.parametrize("reverse", [False, True], ids=["", "reverse"])
def test_a_walk_over_misaligned_rows_writes_nowhere_else(
    direction: str, tried: str, reverse: bool, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """Over several tiles, of which those in the middle ask for pieces to their ends. Along time the last one would
    be its row's alone, but for a few elements."""
    torch.manual_seed(0)
    layout, tile, shape, *dtypes = MISALIGNED[tried]
    dtype = dtypes[direction == "backward"]
    name = f"{layout}_{direction}"
    kernel = FAMILY.kernel(name, "cuda")
    variant = like(kernel, {"dtype": dtype, "access": "misaligned", **tile})
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    setting = cases.Setting(states=True, reverse=reverse)
    case = cases.draw(shape, setting, dtype, "cpu").case(name, aligned=True)
    assert kernel.rules.accepts(variant, case.problem) is None
    untouched = surround(case.tensors, case.expected)
    library.run(case.problem, case.tensors, seed=0)
    assert case.error() <= cases.TOLERANCE[dtype]
    assert untouched()


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("channels", "time", "sm_count"),
    [(72, 1000, 6), (8, 5000, 20), (40, 9000, 3), (64, 3, 3)],
)
def test_what_is_read_at_once_writes_nowhere_else(
    direction: str,
    dtype: str,
    channels: int,
    time: int,
    sm_count: int,
    cuda_emulator: ModuleType,
    tmp_path: Path,
) -> None:
    """Columns that are not full, in several parts; more parts than threads look at side by side; runs of more tiles
    than a ring holds; and such as end early or are none. Each in both orders, in turn."""
    torch.manual_seed(0)
    reverse = (dtype == "float32") ^ (direction == "backward") ^ (channels in (8, 64))
    kernel = FAMILY.kernel(f"channel_last_{direction}", "cuda")
    variant = like(kernel, {"dtype": dtype, "single_wave": 1})
    library = cuda_emulator.emulated(kernel, variant, tmp_path)
    setting = cases.Setting(states=True, reverse=reverse)
    case = cases.draw((1, channels, time), setting, dtype, "cpu").case(kernel.name, aligned=True)
    assert kernel.rules.accepts(variant, case.problem) is None
    untouched = surround(case.tensors, case.expected)
    library.run(case.problem, case.tensors, 0, sm_count)
    assert case.error() <= cases.TOLERANCE[dtype]
    assert untouched()


# --- The emulator -----------------------------------------------------------------------------

#: Threads hand a number on to their neighbour; LEAVES, CROSSES and MEETS pin what goes wrong.
HANDED_ON = """
extern "C" __global__ void hand_on(const int* from, int* to) {
    __shared__ int places[64];
    const int own = threadIdx.x;
    if (LEAVES && own == 40) return;
    int value = from[own];
    if (CROSSES) value = __shfl_xor_sync(~0u, value, 1);
    places[own] = value;
    if (MEETS) __syncthreads();
    to[own] = places[(own + 1) % 64];
}
"""
RUN = """
import ctypes, sys
kernel = ctypes.CDLL(sys.argv[1]).emulate
numbers, out = (ctypes.c_int * 64)(*range(64)), (ctypes.c_int * 64)()
pointers = [ctypes.c_void_p(ctypes.addressof(each)) for each in (numbers, out)]
arguments = (ctypes.c_void_p * 2)(*map(ctypes.addressof, pointers))
size = 1 << 16
stacks = ctypes.create_string_buffer(64 * size)
kernel(arguments, (ctypes.c_uint * 3)(1, 1, 1), 64, 0, 1, 3, stacks, ctypes.c_ulong(size))
print(*out)
"""


def test_the_emulator_runs_threads_as_a_gpu_may(cuda_emulator: ModuleType, tmp_path: Path) -> None:
    """A missing barrier shows, and so does an exchange with a thread that has left."""

    def hand_on(leaves: int, crosses: int, meets: int) -> tuple[str, str]:
        """What the threads got, and what the emulator said."""
        texts = {"hand_on.cu": HANDED_ON}
        constants = {"LEAVES": leaves, "CROSSES": crosses, "MEETS": meets}
        library = cuda_emulator.library_of("hand_on.cu", "hand_on", texts, constants, tmp_path)
        command = [sys.executable, "-c", RUN, str(library)]
        ran = captured(command, cwd=tmp_path)
        return ran.stdout.strip(), ran.stderr

    in_order = " ".join(str((own + 1) % 64) for own in range(64))
    crossed = " ".join(str((own + 1) % 64 ^ 1) for own in range(64))
    assert hand_on(leaves=0, crosses=0, meets=1) == (in_order, "")
    assert hand_on(leaves=0, crosses=1, meets=1) == (crossed, "")
    assert hand_on(leaves=0, crosses=0, meets=0)[0] not in ("", in_order)
    nothing, words = hand_on(leaves=1, crosses=1, meets=1)
    assert nothing == ""
    assert "a lane that has left" in words
