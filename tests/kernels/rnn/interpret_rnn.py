"""Runs the Triton kernels of recurrent networks in the interpreter, and prints what is wrong with them.

TRITON_INTERPRET=1 python tests/kernels/interpret_rnn.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from rnn_trials import STEADY, STEADY_TOLERANCE, TOLERANCE, Tensors, trials
from torch import Tensor
from triton_interpreter import allow, mend

from scan_registry.kernels.rnn import triton_kernels
from scan_registry.kernels.rnn.problem import SIZES
from scan_registry.kernels.rnn.spec import FAMILY


@dataclass(frozen=True)
class Whole:
    """A tensor of which every element may be read or written."""

    tensor: Tensor

    def addresses(self) -> np.ndarray[Any, Any]:
        places = torch.tensor(0)
        for size, stride in zip(self.tensor.shape, self.tensor.stride(), strict=True):
            places = places[..., None] + stride * torch.arange(size)
        places = places.flatten() * self.tensor.element_size() + self.tensor.data_ptr()
        return places.numpy().astype(np.uint64)


def launch(name: str, tensors: Tensors) -> None:
    """One kernel; those that it writes may not be read, nor the other way round."""
    kernel = FAMILY.kernel(name, "triton")
    problem = tensors.problem("sequence", name.split("_")[1])  # type: ignore[arg-type]
    variant = next(v for v in kernel.variants if kernel.rules.accepts(v, problem) is None)
    shape = kernel.launch(variant, problem, 4)
    written = ("gates_grad", "initial_grad") if "backward" in name else ("states", "cache")
    values: list[Any] = []
    for parameter in kernel.parameters:
        tensor = tensors.given.get(parameter.name)
        if parameter.kind == "i64":
            values.append(shape.scalars[parameter.name])
        else:
            values.append(torch.empty(0, dtype=tensors.dtype) if tensor is None else tensor)
    there = {n: Whole(t) for n, t in tensors.given.items() if t is not None}
    allow(
        reads=[there[n] for n in kernel.pointers if n in there and n not in written],
        writes=[there[n] for n in written],
    )
    getattr(triton_kernels, name)[shape.grid](*values, **kernel.code.constants(variant))


if __name__ == "__main__":
    mend()
    # The interpreter cuts bfloat16 off where a GPU rounds.
    kinds = [*product(SIZES, (torch.float32,)), ("lstm", torch.float16)]
    for function, dtype in kinds:
        for trial in trials(function):
            if trial.resets or trial.dim > (32 if dtype == torch.float32 else 64):
                continue
            tensors = Tensors(replace(trial, time=min(trial.time, 4)), dtype)
            launch("sequence_forward", tensors)
            launch("sequence_backward", tensors)
            error = tensors.error("states", "gates_grad", "initial_grad")
            if error > TOLERANCE[str(dtype).removeprefix("torch.")]:
                print(f"{trial} in {dtype}: an error of {error:.1e}")
    steady = Tensors(STEADY, torch.float16)
    launch("sequence_forward", steady)
    launch("sequence_backward", steady)
    if max(steady.gate_errors()) > STEADY_TOLERANCE["float16"]:
        print(f"{STEADY}: errors of {steady.gate_errors()}")
