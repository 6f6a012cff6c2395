"""What the rnn family is made of: kernels, variants, what each accepts and how it launches.

``sequence_*`` compute all steps in one persistent launch, with R in registers and shared memory (``fused.py``);
``step_*`` what comes after, or before, the product with R in one step. Sources have the same names;
those of Triton, for small heads, are in ``triton_kernels.py``.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

from scan_registry.base.strides import stride_names
from scan_registry.kernels import model
from scan_registry.kernels.rnn import fused, launches
from scan_registry.kernels.rnn import problem as problems
from scan_registry.kernels.rnn.problem import SIZES

FOLDER = Path(__file__).parent
_STEP_WARPS = 4

# --- All steps, in Triton ---------------------------------------------------------------------


def _triton_tiles(kind: model.Pins) -> tuple[model.Pins, ...]:
    """Units of a head, at most, and batches of a program: as many as R leaves registers for."""
    units = 64 if model.ITEM_SIZE[str(dict(kind)["dtype"])] == 2 else 32
    return ((("units", units), ("batches", 16), ("warps", 4)),)


def _triton_constants(variant: model.Variant) -> dict[str, model.Static]:
    sizes = SIZES[variant.text("function")]  # type: ignore[index]
    return {
        "FUNCTION": variant.text("function"),
        "GATES": sizes.recurrent,
        "INPUTS": sizes.inputs,
        "BIAS": sizes.bias,
        "STATES": len(sizes.states),
        "KEPT": len(sizes.cache),
        "UNITS": variant.number("units"),
        "BATCHES": variant.number("batches"),
    }


def _triton_accepts(variant: model.Variant, problem: problems.RnnProblem) -> str | None:
    if reason := launches.rejects_kind(variant, problem):
        return reason
    if problem.resets:
        return "states start anew, and only the kernels in CUDA know where"
    if problem.dim % 16 or any(stride % 16 for stride in problem.strides):
        return "hidden units and strides are not multiples of 16"
    most = variant.number("units")
    return f"hidden units of a head: {problem.dim} > {most}" if problem.dim > most else None


def _triton_kernel(direction: problems.Direction) -> model.Kernel:
    def launch(variant: model.Variant, problem: problems.RnnProblem, sm_count: int) -> model.Launch:
        tiles = -(-problem.batch // variant.number("batches"))
        return launches.launch_of("sequence", direction, problem, max(1, problem.heads * tiles))

    def elements(variant: model.Variant) -> dict[str, str]:
        of = {"bias": "float32", "workspace": "int64"}
        return {n: of.get(n, variant.text("dtype")) for n in names}

    names = launches.pointers("sequence", direction, "triton")

    return model.Kernel(
        family=launches.FAMILY_NAME,
        name=f"sequence_{direction}",
        language="triton",
        parameters=launches.parameters("sequence", direction, "triton"),
        defaults=model.Space(launches.KINDS, _triton_tiles),
        code=model.Code(
            source="triton_kernels.py",
            entry=f"sequence_{direction}",
            constants=_triton_constants,
            divisible=lambda variant: frozenset(
                {*names, "dim", *stride_names(problems.STRIDED["sequence", direction])}
                - {"bias", "workspace"}
            ),
            elements=elements,
            # Before 9.0 the compiler stops at 128 registers, and 8 bytes of LSTM's gradients are left over.
            may_spill={
                model.Variant(
                    launches.FAMILY_NAME,
                    "sequence_backward",
                    "triton",
                    (*kind, *_triton_tiles(kind)[0]),
                ): 8
                for kind in launches.KINDS
                if kind[0][1] != "float32" and kind[1][1] == "lstm" and direction == "backward"
            },
        ),
        rules=model.Rules(_triton_accepts),
        launch=launch,
    )


# --- One step ---------------------------------------------------------------------------------


def _step_accepts(variant: model.Variant, problem: problems.RnnProblem) -> str | None:
    if reason := launches.rejects_kind(variant, problem):
        return reason
    return "an odd number of hidden units" if problem.dim % 2 else None


def _step_kernel(direction: problems.Direction) -> model.Kernel:
    def launch(variant: model.Variant, problem: problems.RnnProblem, sm_count: int) -> model.Launch:
        pairs = problem.batch * problem.heads * problem.dim // 2
        return launches.launch_of(
            "step", direction, problem, max(1, -(-pairs // (32 * variant.number("warps"))))
        )

    return model.Kernel(
        family=launches.FAMILY_NAME,
        name=f"step_{direction}",
        language="cuda",
        parameters=launches.parameters("step", direction),
        defaults=model.Space(launches.KINDS, lambda kind: ((("warps", _STEP_WARPS),),)),
        code=model.Code(
            source=f"step_{direction}.cu",
            entry=f"rnn_step_{direction}",
            constants=fused.constants,
        ),
        rules=model.Rules(_step_accepts),
        launch=launch,
        not_on_cpu="on the CPU no call is made of single steps",
    )


# --- The family -------------------------------------------------------------------------------


def _sample(
    scope: problems.Scope, direction: problems.Direction, function: str, dtype: str
) -> model.Sample:
    batch, time, heads, dim = 16, 1024, 12, 32  # which runs on the smallest GPU, in both languages
    strides = dict.fromkeys(problems.STRIDED[scope, direction], 0)
    sizes = SIZES[function]  # type: ignore[index]
    row = heads * dim
    per_time = {
        "inputs": sizes.inputs * row,
        "cache": len(sizes.cache) * row,
        "gates_grad": sizes.bias * row,
    }
    numbers: list[int] = []
    for tensor in strides:
        step = per_time.get(tensor, row)
        of = {"state": batch * time * row, "batch": time * step, "time": step}
        numbers += [of[dimension] for dimension in problems.STRIDED[scope, direction][tensor]]
    problem = problems.RnnProblem(
        *(scope, direction, function, dtype),  # type: ignore[arg-type]
        *(batch, time, heads, dim),
        strides=tuple(numbers),
        graded=1,
        training=True,
    )
    return model.Sample(problem, dtype, "aligned")


_SCOPES: tuple[problems.Scope, ...] = ("sequence", "step")
_DIRECTIONS: tuple[problems.Direction, ...] = ("forward", "backward")

FAMILY = model.Family(
    name=launches.FAMILY_NAME,
    summary="LSTM, GRU, Elman and sLSTM networks with a recurrent matrix per head",
    folder=FOLDER,
    on_cpu=True,
    by_torch=("float64",),
    kernels=(
        *map(fused.kernel, _DIRECTIONS),
        *map(_step_kernel, _DIRECTIONS),
        *map(_triton_kernel, _DIRECTIONS),
    ),
    samples=tuple(
        _sample(scope, direction, function, dtype)
        for scope, direction, function, dtype in product(
            _SCOPES, _DIRECTIONS, SIZES, problems.DTYPES
        )
    ),
)
