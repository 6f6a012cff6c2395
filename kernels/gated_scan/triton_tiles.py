"""The Triton kernels of gated scan: variants, what each accepts, and how it launches.

Sources: ``triton_kernels.py`` for contiguous time and ``triton_columns.py`` for contiguous channels, on
``triton_kinds.py`` and ``triton_scans.py``. A variant's constants are the kind and what ``kinds.py`` says of its inputs,
beside those of linear_scan's Triton kernels. Access ``aligned`` takes rows that are whole multiples of 16 elements, and
``generic`` everything. Without tuning there are the generic ones: rows that are whole are for the CUDA kernels. Tiles of
those are chosen so that no registers are spilled; no GPU has timed them yet. Wheels have none: Triton is installed wherever
torch is for GPUs, and compiles what is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from scan_registry.hardware.target import Target
from scan_registry.kernels.gated_scan.problem import (
    DIRECTIONS,
    HEADERS,
    LAYOUTS,
    POINTERS,
    STRIDED,
    Direction,
    GatedScanProblem,
    Layout,
    ceil_div,
)
from scan_registry.kernels.gated_scan.variants import (
    FAMILY_NAME,
    mismatch,
    parameters,
    space,
)
from scan_registry.kernels.linear_scan import columns
from scan_registry.kernels.linear_scan.problem import MOST_ALONG_Y
from scan_registry.kernels.linear_scan.space import Tile
from scan_registry.kernels.model import (
    ITEM_SIZE,
    Code,
    Kernel,
    Launch,
    Pins,
    Rules,
    Static,
    Tunable,
    Variant,
)

#: Kinds that ``triton_kinds.py`` has.
KINDS = ("linear", "min_gru", "min_lstm", "rg_lru", "hgrn")


# --- Tiles ------------------------------------------------------------------------------------


def _time_last(direction: Direction, kind: str, dtype: str, access: str) -> Tile:
    """Aligned ones run upwards: which way 16 bytes are read is for the compiler to know."""
    if access == "aligned":
        return {"rows": 1, "times": 512, "warps": 2, "reverse": 0}
    held = direction == "backward" and HEADERS[kind].parameters  # their sums, as well
    return {"rows": 1, "times": 128 if held else 256, "warps": 2}


def _channel_last(direction: Direction, kind: str, dtype: str, access: str) -> Tile:
    """Of a tile, 4 to 8 rows of 4 or 8 bytes in a thread. All tensors' stages take at most 80 KB of shared memory."""
    few = direction == "forward" and len(HEADERS[kind].inputs) < 3
    if access == "generic":
        return {"warps": 4, "channels": 32, "vector": 1, "steps": 8 if few else 4, "stages": 2}
    vector = 8 // ITEM_SIZE[dtype] if few else 2
    return {"warps": 4, "channels": 64, "vector": vector, "steps": 4, "stages": 4 if few else 3}


def _tiles(
    wanted: str, layout: Layout, direction: Direction, dtype: str, kind: str, access: str
) -> tuple[Tile, ...]:
    if kind not in KINDS or access != wanted:
        return ()
    if layout == "time_last":
        return (_time_last(direction, kind, dtype, access),)
    return (_channel_last(direction, kind, dtype, access),)


def _serves(statics: Pins, target: Target) -> bool:
    """PTX, which is for GPUs that are not known, has variants that take everything."""
    return not target.is_ptx or ("access", "aligned") not in statics


def _ships(statics: Pins, target: Target) -> bool:
    """Never: where torch runs on a GPU there is Triton, too, and compiles what is asked for."""
    return False


# --- What is compiled -------------------------------------------------------------------------


#: Tiles of rows that a program has in hand. Backward loads directly, since asynchronous copies cannot move single
#: 16-bit elements, which is what states come as.
_STAGES = {"time_last_forward": 3, "time_last_backward": 1}


def _constants(variant: Variant) -> Mapping[str, Static]:
    kind = HEADERS[variant.text("kind")]
    tile = {
        name.upper(): value
        for name, value in variant.statics
        if isinstance(value, int) and name != "warps"
    }
    if "rows" in dict(variant.statics):
        tile = {"REVERSE": 0, "STAGES": _STAGES[variant.kernel]} | tile
    else:
        tile["GROUPS"] = columns.groups(variant)
    return {
        "ALIGNED": int(variant.text("access") == "aligned"),
        "KIND": variant.text("kind"),
        "INPUTS": len(kind.inputs),
        "PARAMETERS": len(kind.parameters),
        **tile,
    }


def _elements(variant: Variant, direction: Direction) -> dict[str, str]:
    """What each pointer points to."""
    wide = ("initial_state", "final_state", "initial_state_grad", "final_state_grad")
    of = dict.fromkeys((*wide, "parameters", "parameters_grad"), "float32")
    of |= {"reset": "uint8", "offsets": "int64", "workspace": "int64"}
    return {name: of.get(name, variant.text("dtype")) for name in POINTERS[direction]}


def _divisible(variant: Variant, layout: Layout, direction: Direction) -> frozenset[str]:
    """In the aligned variants: the sequences, their rows' length and the strides between rows."""
    if variant.text("access") != "aligned":
        return frozenset()
    outside = ("batch", "channel") if layout == "time_last" else ("batch", "time")
    strides = {f"{tensor}_{dim}" for tensor in STRIDED[direction][:-1] for dim in outside}
    sequences = {
        name for name in POINTERS[direction] if name.startswith("input") or name == "states"
    }
    row = "time" if layout == "time_last" else "channels"
    return frozenset({*sequences, *strides, row} | ({"states_grad"} & {*STRIDED[direction]}))


# --- Which problems, and how they are launched --------------------------------------------------


def _accepts(variant: Variant, problem: GatedScanProblem) -> str | None:
    if reason := mismatch(variant, problem):
        return reason
    if dict(variant.statics).get("reverse", problem.reverse) != problem.reverse:
        return "it scans the other way"
    if variant.text("access") == "aligned" and not problem.whole_chunks(16):
        return "row length and strides are not multiples of 16 elements"
    return None


def _launch(variant: Variant, problem: GatedScanProblem, sm_count: int) -> Launch:
    if problem.layout == "time_last":
        programs = ceil_div(problem.batch * problem.channels, variant.number("rows"))
    else:
        programs = problem.batch * ceil_div(problem.channels, variant.number("channels"))
    sequences = max(1, problem.sequences)
    y = min(sequences, MOST_ALONG_Y)  # packed sequences lie along y, more of them along z
    return Launch((programs, y, ceil_div(sequences, y)), problem.scalars())


def _cost(variant: Variant, problem: GatedScanProblem) -> float:
    return float(variant.text("access") == "generic")


def _kernel(layout: Layout, direction: Direction) -> Kernel:
    name = f"{layout}_{direction}"
    return Kernel(
        family=FAMILY_NAME,
        name=name,
        language="triton",
        parameters=parameters(direction),
        defaults=space(partial(_tiles, "generic", layout, direction)),
        code=Code(
            source="triton_kernels.py" if layout == "time_last" else "triton_columns.py",
            entry=name,
            constants=_constants,
            divisible=lambda variant: _divisible(variant, layout, direction),
            elements=lambda variant: _elements(variant, direction),
            # Where error terms are kept: a sum's rounding error can be had only if its terms are rounded first.
            fuses=lambda variant: ITEM_SIZE[variant.text("dtype")] < 4,
        ),
        rules=Rules(_accepts, mismatch, serves=_serves, ships=_ships),
        cost=_cost,
        launch=_launch,
        tunable=Tunable(space=space(partial(_tiles, "aligned", layout, direction))),
    )


def kernels() -> tuple[Kernel, ...]:
    return tuple(_kernel(layout, direction) for layout in LAYOUTS for direction in DIRECTIONS)
