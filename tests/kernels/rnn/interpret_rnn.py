"""Runs the Triton kernels of recurrent networks in the interpreter, and prints what is wrong with them.

TRITON_INTERPRET=1 python tests/kernels/interpret_rnn.py [few]
"""

from __future__ import annotations

import sys
from itertools import cycle, product

import torch
from triton_interpreter import allow, mend

from scan_registry.kernels.cases import relative_error, there
from scan_registry.kernels.rnn import cases, triton_kernels
from scan_registry.kernels.rnn.problem import SIZES
from scan_registry.kernels.rnn.spec import FAMILY


def launch(trial: cases.Trial, name: str) -> cases.Case:
    """One kernel; what it writes may not be read, nor the other way round."""
    kernel, case = FAMILY.kernel(name, "triton"), trial.case(name, aligned=False)
    problem, tensors = case.problem, case.tensors
    variant = next(v for v in kernel.variants if kernel.rules.accepts(v, problem) is None)
    shape = kernel.launch(variant, problem, 4)
    null, values = torch.empty(0, dtype=getattr(torch, trial.dtype)), []
    for parameter in kernel.parameters:
        tensor = tensors.get(parameter.name)
        number = shape.scalars.get(parameter.name)
        values.append(number if parameter.kind == "i64" else null if tensor is None else tensor)
    places = {n: t for n, t in tensors.items() if t is not None}
    allow(
        reads=[places[n] for n in kernel.pointers if n in places and n not in case.expected],
        writes=[places[n] for n in case.expected],
    )
    getattr(triton_kernels, name)[shape.grid](*values, **kernel.code.constants(variant))
    return case


if __name__ == "__main__":
    mend()
    torch.manual_seed(0)
    # The interpreter cuts bfloat16 off where a GPU rounds.
    posed = [setting for setting in cases.SETTINGS if not setting.resets]
    # Of few, functions take turns.
    step = 4 if "few" in sys.argv[1:] else 1
    for number, (function, dtype) in enumerate(
        [*product(SIZES, ("float32",)), ("lstm", "float16")]
    ):
        wide = 32 if dtype == "float32" else 64
        shapes = cycle(((2, 3, 1, 16), (1, 1, 3, 32), (9, 4, 1, wide)))
        for setting in posed[number % step :: step]:
            trial = cases.draw(function, next(shapes), setting, dtype, "cpu")
            for name in ("sequence_forward", "sequence_backward"):
                error = launch(trial, name).error()
                if error > cases.TOLERANCE[dtype]:
                    print(f"{name} of {trial} in {dtype}: an error of {error:.1e}")
    # The gradients of i and f, which those of z and o would hide, are as exact as what is stored.
    torch.manual_seed(0)
    steady = cases.draw("slstm", (3, 11, 1, 32), cases.Setting(steady=True), "float16", "cpu")
    case = launch(steady, "sequence_backward")
    grads, exact = there(case.tensors["gates_grad"]), case.expected["gates_grad"]
    errors = [*map(relative_error, grads.unbind(2), exact.unbind(2))]
    if max(errors) > 5e-3:
        print(f"{steady}: errors of {errors}")
