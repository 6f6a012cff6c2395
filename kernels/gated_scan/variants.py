"""What all kernels of gated scan have in common: signature, variants, compile-time constants and which variants wheels
ship. The static parameters of a variant begin with dtype, kind and access. The kind is its header's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import product

from scan_registry.hardware.target import Target
from scan_registry.kernels.gated_scan import problem as problems
from scan_registry.kernels.linear_scan.space import Tile
from scan_registry.kernels.model import Parameter, Pins, Space, Static, Variant

FAMILY_NAME = "gated_scan"
ACCESSES = ("aligned", "generic")
#: Dtypes for which wheels have aligned tiles. Other dtypes get generic access, unless tuning selects tiles for them.
ALIGNED_IN_WHEELS = ("float32", "bfloat16")
#: Bytes of a CTA's shared memory that the driver reserves.
DRIVER_SHARED = 1024
#: Capabilities of the GPUs with high-bandwidth memory.
WITH_HBM = ((8, 0), (9, 0), (10, 0))


@cache
def parameters(direction: problems.Direction) -> tuple[Parameter, ...]:
    """The signature shared by all kernels of one direction."""
    pointers = (Parameter(name, "pointer") for name in problems.POINTERS[direction])
    return (*pointers, *(Parameter(name, "i64") for name in problems.integers(direction)))


def space(tiles: Callable[[str, str, str], Iterable[Tile]]) -> Space:
    """The variants: for every dtype, kind and access one with each tile that ``tiles`` lists for them."""
    kinds = tuple(
        (("dtype", dtype), ("kind", kind), ("access", access))
        for dtype, kind, access in product(problems.DTYPES, problems.HEADERS, ACCESSES)
    )

    def of(kind: Pins) -> Iterator[Pins]:
        (_, dtype), (_, name), (_, access) = kind
        return (tuple(tile.items()) for tile in tiles(str(dtype), str(name), str(access)))

    return Space(kinds, of)


def ships(statics: Pins, target: Target) -> bool:
    """Whether wheels ship a variant. Generic access is shipped for every GPU, aligned access for GPUs with HBM, since other GPUs
    have less bandwidth for each SM. float16 is not shipped, but compiled at its first call."""
    pins = dict(statics)
    fast = not target.is_ptx and target.capability in WITH_HBM
    return pins["dtype"] != "float16" and (fast or pins["access"] == "generic")


def headers() -> tuple[str, ...]:
    """The header files of all kinds."""
    return tuple(f"kinds/{kind}.cuh" for kind in problems.HEADERS)


def constants(variant: Variant) -> dict[str, Static]:
    """The constants that every kernel of the family is compiled with."""
    tile = {name.upper(): value for name, value in variant.statics if isinstance(value, int)}
    return {
        "KIND_HEADER": f'"kinds/{variant.text("kind")}.cuh"',
        "ELEMENT": variant.text("dtype"),
        "GATE_ELEMENT": variant.text("dtype"),
        "ALIGNED": int(variant.text("access") == "aligned"),
        "VARLEN": 0,
        "MAY_RESET": 1,
        "MISALIGNED": 0,
        "STAGES": 0,
        "PREFIX_LEAD": 0,
        **tile,
    }


def mismatch(variant: Variant, problem: problems.GatedScanProblem) -> str | None:
    """Why a variant does not fit a problem's dtype, kind or memory layout; None if it does."""
    if variant.text("dtype") != problem.dtype:
        return f"dtype {variant.text('dtype')}, not {problem.dtype}"
    if variant.text("kind") != problem.kind:
        return f"gates of {variant.text('kind')}, not {problem.kind}"
    if variant.text("access") == "aligned":
        if problem.sequences > 0:
            return "sequences are packed"
        if not problem.plain():
            row = "time steps" if problem.layout == "time_last" else "channels"
            return f"{row} do not follow one another in memory"
    return None
