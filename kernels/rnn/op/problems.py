"""The problems that a call of a recurrent network poses, which selection looks for kernels of."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from scan_registry.base.alignment import common_alignment
from scan_registry.dispatch.select import Backend
from scan_registry.kernels.model import Problem
from scan_registry.kernels.rnn.op import steps as rnn_steps
from scan_registry.kernels.rnn.op.arguments import WAYS, Options
from scan_registry.kernels.rnn.problem import STRIDED, Direction, RnnProblem


def sequence_problem(
    direction: Direction,
    options: Options,
    tensors: Mapping[str, Tensor],
    training: bool,
    resets: bool = False,
) -> RnnProblem:
    """What all steps in one launch pose; ``tensors`` are those that ``STRIDED`` names, and others."""
    strides = []
    for name, dimensions in STRIDED["sequence", direction].items():
        along = tensors[name].stride()
        of_time = len(along) - (4 if "states" not in name else 3)
        places = {"state": 0, "batch": of_time - 1, "time": of_time}
        strides += [along[places[dimension]] for dimension in dimensions]
    states = tensors["states"]
    count, batch, time, heads, dim = states.shape
    size = states.element_size()
    return RnnProblem(
        *("sequence", direction, options.function, str(states.dtype).removeprefix("torch.")),
        *(batch, time, heads, dim),
        strides=tuple(strides),
        graded=count if direction == "backward" else 0,
        training=training,
        alignment=common_alignment(
            [
                *(0 if t.is_meta else t.data_ptr() for t in tensors.values()),
                *(stride * size for stride in strides),
            ]
        ),
        clips=options.clips,
        resets=resets,
    )


def alternatives(
    direction: Direction, options: Options, tensors: Mapping[str, Tensor], training: bool,
    resets: bool = False,
) -> tuple[tuple[Problem, Backend], ...]:  # fmt: skip
    """The problems that would do, in the order in which the backend tries them, and what may solve each. ``tensors`` are the
    kernel's, padded, as far as they are there."""
    whole = sequence_problem(direction, options, tensors, training, resets)
    size = whole.batch, whole.time, whole.heads, whole.dim
    step = rnn_steps.step_problem(
        direction, options.function, whole.dtype, size, training, options.clips
    )
    return tuple(
        (whole if scope == "sequence" else step, backend)
        for scope, backend in WAYS[options.backend]
    )
