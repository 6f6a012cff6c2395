"""The state_rows family: rows of a pool of states, copied to states of their own and back.

It is behind no operator: scans that start from ``StateRows`` copy by it, before and after.
"""

from __future__ import annotations

from pathlib import Path

from scan_registry.base.frozen import dataclass
from scan_registry.kernels import model

FAMILY_NAME = "state_rows"
KERNEL_NAME = "copy"
#: Bytes that a thread may move at once.
UNITS = (16, 4, 2)
_WARPS, _UNROLL = 4, 4
_SIZES = ("units", "unit", "run", "stride", "run_stride", "slots", "slot_stride", "pad_slot")
_MOST_ACROSS = 65_535  # CTAs of a grid in its second dimension


@dataclass(frozen=True)
class RowsProblem:
    """Rows of ``units`` units each, of ``unit`` bytes.

    scatter      whether states are copied to the pool, and not the pool's rows to states
    run          units of a row of the pool that are ``stride`` units apart; it is ``run_stride`` units from one such run to the next
    slots        rows of the pool, ``slot_stride`` units apart
    pad_slot     an index that stands for no row, as those below zero do
    wide_indices whether indices are int64
    """

    kernel = KERNEL_NAME
    #: Of what is counted; the bytes may be anything's.
    dtype = "float32"

    rows: int
    units: int
    unit: int
    run: int
    stride: int
    run_stride: int
    slots: int
    slot_stride: int
    scatter: bool = False
    pad_slot: int = -1
    wide_indices: bool = False


def _accepts(variant: model.Variant, problem: RowsProblem) -> str | None:
    across = -(-problem.units // _units_of_cta(variant))
    if across > _MOST_ACROSS or max(problem.rows, problem.units) >= 2**31:
        return f"{problem.rows} rows of {problem.units} units; a grid has no room for as many"
    return None


def _units_of_cta(variant: model.Variant) -> int:
    return 32 * variant.number("warps") * _UNROLL


def _launch(variant: model.Variant, problem: RowsProblem, sm_count: int) -> model.Launch:
    scalars = {name: int(getattr(problem, name)) for name in _SIZES}
    scalars["flags"] = problem.scatter + 2 * problem.wide_indices
    return model.Launch((problem.rows, -(-problem.units // _units_of_cta(variant)), 1), scalars)


_KERNEL = model.Kernel(
    family=FAMILY_NAME,
    name=KERNEL_NAME,
    language="cuda",
    parameters=(
        *(model.Parameter(name, "pointer") for name in ("pool", "states", "indices")),
        *(model.Parameter(name, "i64") for name in (*_SIZES, "flags")),
    ),
    defaults=model.Space(((("dtype", "float32"),),), lambda kind: ((("warps", _WARPS),),)),
    code=model.Code(
        source="copy.cu",
        entry=FAMILY_NAME,
        constants=lambda variant: {"WARPS": variant.number("warps")},
    ),
    rules=model.Rules(_accepts),
    cost=lambda variant, problem: 0.0,
    launch=_launch,
)

FAMILY = model.Family(
    name=FAMILY_NAME,
    summary="states[row] = pool[indices[row]], and back",
    folder=Path(__file__).parent,
    kernels=(_KERNEL,),
)
