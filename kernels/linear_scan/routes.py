"""Other ways to pose a scan whose layout has no fast kernel: on copies, for which there is one.

- ``padded``: contiguous channels whose rows are no whole chunks of 16 bytes go to rows that are. The channels beyond are
  scanned, too, and nobody reads them. Gates that do not change with time stay as few.
- ``rows``: very few contiguous channels go to a row of contiguous time for each, where ``padded`` would have more
  channels beyond than there are. So do more of them where sequences are packed, since of rows a sequence is cut.

A scan and its copies take memory for what is copied, at most ``MOST_BYTES``. Which way is taken is for
``dispatch.routes`` to say, by what ``estimate`` says of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from scan_registry.kernels.linear_scan import packed
from scan_registry.kernels.linear_scan.problem import (
    STRIDED,
    LinearScanProblem,
    Strides,
    ceil_div,
    state_dtype,
)
from scan_registry.kernels.model import ITEM_SIZE, Kernel, Route
from scan_registry.kernels.tuning import Model, Shape

#: Of all copies of a call together.
MOST_BYTES = 1 << 30
#: Steps below which nothing is gained: kernels that pass over a row serially are then as fast as any.
LEAST_TIME = 64
#: What a copy takes: ms for its launch, the share of the bandwidth that it reaches, and ms for an element, whose place is
#: computed by itself. These are guesses; no GPU has timed the copies.
_COPY_MS, _COPY_BANDWIDTH, _COPY_ELEMENT = 3e-3, 0.7, 2e-9

#: Of ``rows``: bytes of all channels of a step, at most, and of a batch. Each channel's copy reads all of the batch, which
#: is to stay in the L2; so an input counts as if it had twice its elements.
_ROWS_STEP, _ROWS_BATCH, _TRANSPOSED = 32, 1 << 24, 2

_FULL = {"forward": ("tokens",), "backward": ("states", "states_grad")}
_RESULTS = {"forward": ("states",), "backward": ("gates_grad", "tokens_grad")}
_STATES_IN = {"forward": ("initial_state",), "backward": ("initial_state", "final_state_grad")}
_STATES_OUT = {"forward": ("final_state",), "backward": ("initial_state_grad",)}


def routes(problem: LinearScanProblem) -> tuple[Route, ...]:
    """The ways that may be worth their copies, beside the problem's own."""
    if (
        problem.direction not in _FULL
        or problem.sums
        or problem.gates_dtype != problem.dtype
        or problem.time < LEAST_TIME
    ):
        return ()
    return tuple(route for route in _routes(problem) if route.bytes <= MOST_BYTES)


def _routes(problem: LinearScanProblem) -> Iterator[Route]:
    if (
        problem.layout == "channel_last"
        and problem.channels > 1
        and not problem.whole_chunks(problem.chunk())
    ):
        yield _padded(problem)
        step = problem.channels * ITEM_SIZE[problem.dtype]
        few = step < _ROWS_STEP or problem.sequences
        if few and step * problem.time <= _ROWS_BATCH:
            yield _rows(problem)


def _padded(problem: LinearScanProblem) -> Route:
    """Rows of whole chunks, one batch after the other."""
    chunk, direction = problem.chunk(), problem.direction
    channels = ceil_div(problem.channels, chunk) * chunk
    batch = problem.outer * problem.batch

    def dense(steps: int) -> Strides:
        return Strides(0, steps * channels, 1, channels)

    gates = problem.strides_of("gates")
    shared = problem.has_one_gate() and (batch == 1 or gates.outer == gates.batch == 0)
    first = Strides(0, 0, 1, 0) if shared else dense(problem.time)
    count = len(STRIDED[direction]) - 2
    strides = (first, *(dense(problem.time),) * count, dense(max(1, problem.sequences)))
    posed = replace(
        problem,
        outer=1,
        batch=batch,
        channels=channels,
        strides=strides,
        alignment=16,
    )
    inputs = ("gates", *_FULL[direction], *_STATES_IN[direction])
    outputs = (*_RESULTS[direction], *_STATES_OUT[direction])
    return _route("padded", problem, posed, inputs, outputs)


def _rows(problem: LinearScanProblem) -> Route:
    """A row of whole chunks for each channel. States stay where they are."""
    chunk, direction = problem.chunk(), problem.direction
    pitch = ceil_div(problem.time, chunk) * chunk
    batch = problem.channels * pitch
    dense = Strides(problem.batch * batch if problem.outer > 1 else 0, batch, pitch, 1)
    strides = (*(dense,) * (len(STRIDED[direction]) - 1), problem.strides_of("state"))
    posed = replace(problem, layout="time_last", strides=strides, alignment=16)
    inputs = ("gates", *_FULL[direction])
    route = _route("rows", problem, posed, inputs, _RESULTS[direction])
    transposed = len(inputs) * route.elements // (len(inputs) + len(_RESULTS[direction]))
    elements = route.elements + (_TRANSPOSED - 1) * transposed
    return replace(route, elements=elements, bytes=route.bytes // problem.time * pitch)


def _route(
    name: str,
    problem: LinearScanProblem,
    posed: LinearScanProblem,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
) -> Route:
    """With what the copies cost if all tensors are given."""
    batch, direction = posed.outer * posed.batch, problem.direction
    of_states = (*_STATES_IN[direction], *_STATES_OUT[direction])
    rows = dict.fromkeys(
        ("gates", *_FULL[direction], *_RESULTS[direction]), batch * posed.time
    ) | dict.fromkeys(of_states, batch * max(1, posed.sequences))
    if not posed.strides_of("gates").time:
        rows["gates"] = 1
    copied = *inputs, *outputs
    items = dict.fromkeys(of_states, ITEM_SIZE[state_dtype(problem.dtype)])
    item = ITEM_SIZE[problem.dtype]
    return Route(
        name=name,
        problem=posed,
        inputs=inputs,
        outputs=outputs,
        launches=len(inputs) + len(outputs),
        elements=sum(rows[name] for name in copied) * problem.channels,
        bytes=sum(rows[name] * items.get(name, item) for name in copied) * posed.channels,
    )


# --- Time -------------------------------------------------------------------------------------


def estimate(
    model: Model,
    kernel: Kernel,
    text: str,
    problem: LinearScanProblem,
    route: Route | None,
    sm_count: int,
) -> float | None:
    """Milliseconds of the variant that prints as ``text`` on a problem, which may be that of a route, whose copies count;
    None if there is no estimate. It is the timing model's, and for packed sequences that of ``packed``.
    """
    alone = _alone(model, kernel, text, problem, sm_count)
    if alone is None or route is None:
        return alone
    try:
        moved = 2 * route.bytes / (_COPY_BANDWIDTH * model["gpu"]["bandwidth"])
    except (ArithmeticError, LookupError, TypeError):
        return None  # another version's, of which ``predicted`` says nothing, either
    return alone + route.launches * _COPY_MS + max(moved, route.elements * _COPY_ELEMENT)


def _alone(
    model: Model, kernel: Kernel, text: str, problem: LinearScanProblem, sm_count: int
) -> float | None:
    if problem.sequences and ITEM_SIZE[problem.dtype] < 8:
        varlen = ",access=varlen" in text
        if problem.layout == "time_last":
            in_cuda = packed.cut_rows_ms if varlen else packed.cuda_rows_ms
            return (in_cuda if kernel.language == "cuda" else packed.triton_rows_ms)(problem)
        if varlen:
            return packed.columns_ms(problem, sm_count)
    # Tiles of ``generic`` follow one another along all of time, whatever is packed there.
    assert kernel.tunable.shape is not None
    shape = kernel.tunable.shape(replace(problem, sequences=0))
    return kernel.tunable.predicted(model, text, Shape(shape.kind, shape.sizes), sm_count)
