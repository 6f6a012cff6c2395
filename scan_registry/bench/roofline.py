"""The roofline of a case: the time in which as many tensors of as many bytes are read and written.

It is measured, by the kernels of the roofline family, in the same run and in the same way as the kernels
that it is the roofline of. The fastest of the variants counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from scan_registry.diagnostics import accuracy
from scan_registry.dispatch import policy
from scan_registry.kernels.roofline.spec import FAMILY, RooflineProblem
from scan_registry.ops.benchmark import Call
from scan_registry.runtime import loader

_FLOAT = 4  # bytes of an element; what a tensor has beyond whole ones is rounded up


@dataclass(frozen=True)
class _Moved:
    """One launch's tensors, by the kernel's names."""

    tensors: dict[str, Tensor]


def stream_calls(
    reads: int, writes: int, tensor_bytes: int, sets: int, device: torch.device
) -> Iterator[tuple[str, list[Call]]]:
    """For each variant that moves so many tensors, its name and a call for each of ``sets`` sets of
    tensors, which the variants share.

    ``NoKernelError`` if none runs on the device.
    """
    problem = RooflineProblem(reads, writes, -(-tensor_bytes // _FLOAT))
    names = (*problem.inputs, *problem.outputs)
    moved = [
        _Moved({name: torch.rand(problem.count, device=device) for name in names})
        for _ in range(sets)
    ]
    ordinal = device.index or 0
    (kernel,) = FAMILY.kernels
    for variant in kernel.variants:
        if kernel.rules.accepts(variant, problem) is not None:
            continue
        ready = loader.prepare(ordinal, FAMILY, problem, "cuda", policy.lowest(), variant)
        assert ready.launch is not None  # a language was asked for, so not the reference
        calls: list[Call] = [
            partial(accuracy.start, ordinal, ready.launch, kernel, tensors, ready.workspace)
            for tensors in moved
        ]
        yield str(variant), calls
