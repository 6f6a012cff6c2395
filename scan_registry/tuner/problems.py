"""What is tuned for: problems of kernels, with the tensors to time them on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from scan_registry.bench.cases import PASSES, Case
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.cases import OUTPUTS
from scan_registry.kernels.linear_scan.problem import Direction, LinearScanProblem
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import Family, Kernel, Variant
from scan_registry.kernels.tuning import Shape
from scan_registry.ops.layout import KernelCall
from scan_registry.ops.problems import StateLayout, make_kernel_call

#: (batch, channels, time) and options: rows of every length, channels many and few, and what has
#: kernels of its own: odd sizes, packed sequences, gates for each channel.
SHAPES = (
    *(f"time_last:8,1536,{time}" for time in (2048, 8192, 512, 65536, 128)),
    *(f"channel_last:8,1024,{time}" for time in (8192, 1024, 32768)),
    "channel_last:8,1536,8192",
    "channel_last:16,512,4096",
    "channel_last:4,2048,4096",
    "channel_last:1,2048,8192",
    "channel_last:2,1024,4096",
    "time_last:1,1,16777216",
    "time_last:1,64,1048576",
    "channel_last:1,16,1048576",
    "channel_last:1,64,131072",
    "time_last:4096,512,64",
    "time_last:65536,64,16",
    "time_last:3,1537,4099",
    "time_last:1,1,16777213",
    "channel_last:8,1001,4099",
    "channel_last:1,1024,1048576:sequences=64",
    "channel_last:8,1024,8192:gates=channel",
)
DTYPES = ("bfloat16", "float32", "float16")
#: Of the wide dtypes, one problem of each layout.
WIDE = (
    "time_last:8,512,8192:float64",
    "time_last:8,512,8192:complex64",
    "channel_last:8,512,8192:float64",
    "channel_last:8,512,8192:complex64",
)


def cases(shapes: Iterable[str], dtypes: Iterable[str]) -> list[Case]:
    """Every shape in every dtype; ``ValueError`` names a text that is none.

    A shape is ``layout:batch,channels,time``, with options as ``Case.parse`` takes them.
    """
    found = []
    for text, dtype in product(shapes, dtypes):
        words = text.split(":")
        found.append(Case.parse(":".join([*words[:2], dtype, *words[2:]])))
    return found


def usual_cases() -> list[Case]:
    """What is tuned unless something else is asked for, the most important first."""
    return [*cases(SHAPES, DTYPES), *map(Case.parse, WIDE)]


@dataclass(frozen=True)
class Posed:
    """One pass of a case, as a problem of one kernel in one language."""

    case: Case
    direction: Direction
    family: Family
    kernel: Kernel
    problem: LinearScanProblem
    shape: Shape

    def __str__(self) -> str:
        return f"{self.case} {self.direction}"

    @property
    def place(self) -> tuple[str, str]:
        """The kernel and the kind: problems of one have the same variants to choose from."""
        return self.kernel.head, self.shape.kind

    def variants(self, target: Target) -> tuple[Variant, ...]:
        """Those of a target that are worth a try, or where none is, all that accept the problem."""
        kernel = self.kernel
        made = (v for v in kernel.every if kernel.rules.serves(v.statics, target))
        taken = [v for v in made if kernel.rules.accepts(v, self.problem) is None]
        worthy = [v for v in taken if self.kernel.tunable.worth(v, self.problem)]
        return tuple(worthy or taken)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what the kernel writes, of what ``tensors`` gives."""
        written = {"gates_grad", "tokens_grad", "states"}
        if self.case.gates != "full" and not self.problem.sums:
            written.remove("gates_grad")  # it is summed up by another kernel
        return tuple(name for name in OUTPUTS[self.direction] if name in written)

    def tensors(self, device: torch.device | str) -> dict[str, Tensor | None]:
        """New ones, by the names of the kernel's pointers; those that are not there are null. Results
        are not to be believed: the backward pass gets states that no scan has made."""
        case = self.case
        first, second, bounds = case.sequence(device), case.sequence(device), case.bounds(device)
        inputs = ("tokens",) if self.direction == "forward" else ("states", "states_grad")
        outputs = {name: torch.empty_like(first) for name in self.outputs}
        if self.problem.sums:
            outputs["gates_grad"] = StateLayout.of(first, case.dim, bounds).leaving(None)
        return {
            "gates": case.random_gates(device),
            "offsets": bounds,
            **dict(zip(inputs, (first, second), strict=False)),
            **outputs,
        }


def posed(
    cases: Iterable[Case],
    languages: Sequence[str] = ("cuda", "triton"),
    passes: Sequence[str] = PASSES,
) -> Iterator[Posed]:
    """The problems of the cases, in every language; of problems of the same place the first."""
    seen = set()
    for case, direction in product(cases, passes):
        call = _kernel_call(case, direction)
        for kernel in FAMILY.kernels:
            if kernel.name != call.problem.kernel or kernel.tunable.shape is None:
                continue
            problem = _posed_to(kernel, call)
            shape = kernel.tunable.shape(problem)
            key = kernel.head, shape.kind, tuple(shape.sizes.items())
            if kernel.language in languages and key not in seen:
                seen.add(key)
                yield Posed(case, problem.direction, FAMILY, kernel, problem, shape)


def _posed_to(kernel: Kernel, call: KernelCall) -> LinearScanProblem:
    """A kernel that can sum up the gradient of broadcast gates is asked to."""
    fused = call.fused()
    if fused is not None and any(kernel.rules.accepts(v, fused) is None for v in kernel.every):
        return fused
    return call.problem


def _kernel_call(case: Case, direction: str) -> KernelCall:
    """Without tensors: on ``meta``, all of them are aligned, as new ones are."""
    gates = torch.empty(_gates_shape(case), dtype=getattr(torch, case.dtype), device="meta")
    full = torch.empty(case.shape, dtype=gates.dtype, device="meta")
    bounds = None
    if case.sequences:
        bounds = torch.empty(case.sequences + 1, dtype=torch.int64, device="meta")
    names = ("tokens",) if direction == "forward" else ("states", "states_grad")
    return make_kernel_call(
        "forward" if direction == "forward" else "backward",
        gates,
        dict.fromkeys(names, full),
        bounds,
        case.dim,
        False,
    )


def _gates_shape(case: Case) -> tuple[int, ...]:
    if case.gates == "full":
        return case.shape
    return (case.channels, 1) if case.dim == -1 else (case.channels,)
