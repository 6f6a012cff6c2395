"""What is tuned for: problems of kernels, with the tensors to time them on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from scan_registry.hardware.target import Target
from scan_registry.kernels import family
from scan_registry.kernels.model import Family, Kernel, Problem, Variant
from scan_registry.kernels.tuning import Shape
from scan_registry.ops.benchmark import Case
from scan_registry.ops.operator import PASSES, Operator, operator_of, operators


def cases(shapes: Iterable[str] = (), dtypes: Iterable[str] = ()) -> list[Case]:
    """Every shape in every dtype, or where none are given those of each operator; ``ValueError`` names a text that
    is none.

    A shape is a case without its dtype, such as ``time_last:8,1536,4096``.
    """
    shapes, dtypes = list(shapes), list(dtypes)
    tuned = [operator for operator in operators().values() if operator.tuned_shapes]
    if not shapes:
        return [
            operator.benchmark.parse(_with_dtype(text, dtype))
            for operator in tuned
            for text, dtype in product(operator.tuned_shapes, dtypes or operator.tuned_dtypes)
        ]
    return [case for text in shapes for case in _cases(tuned, text, dtypes)]


def usual_cases() -> list[Case]:
    """What is tuned unless something else is asked for, the most important first."""
    others = [op.benchmark.parse(text) for op in operators().values() for text in op.tuned_cases]
    return [*cases(), *others]


def _cases(tuned: Sequence[Operator], text: str, dtypes: Sequence[str]) -> list[Case]:
    """Of the operator that knows the shape."""
    mistakes = []
    for operator in tuned:
        texts = [_with_dtype(text, dtype) for dtype in dtypes or operator.tuned_dtypes]
        try:
            return [operator.benchmark.parse(text) for text in texts]
        except ValueError as error:
            mistakes.append(str(error))
    raise ValueError("; or ".join(mistakes))


def _with_dtype(shape: str, dtype: str) -> str:
    words = shape.split(":")
    return ":".join([*words[:2], dtype, *words[2:]])


@dataclass(frozen=True)
class Posed:
    """One pass of a case, as a problem of one kernel in one language."""

    case: Case
    direction: str
    family: Family
    kernel: Kernel
    problem: Any
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
        served = (v for v in kernel.every if kernel.rules.serves(v.statics, target))
        taken = [v for v in served if kernel.rules.accepts(v, self.problem) is None]
        worthy = [v for v in taken if self.kernel.tunable.worth(v, self.problem)]
        return tuple(worthy or taken)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what the kernel writes, of what ``tensors`` gives."""
        return operator_of(self.case).outputs(self.case, self.problem)

    @property
    def partial_sums(self) -> Mapping[str, int]:
        """Terms of outputs that count as their sum over the first dimension, by name."""
        return operator_of(self.case).partial_sums(self.problem)

    def tensors(self, device: torch.device | str) -> dict[str, Tensor | None]:
        """New ones, by the names of the kernel's pointers; those that are not there are null."""
        return operator_of(self.case).tensors(self.case, self.problem, device)


def posed(
    cases: Iterable[Case],
    languages: Sequence[str] = ("cuda", "triton"),
    passes: Sequence[str] = PASSES,
) -> Iterator[Posed]:
    """The problems of the cases, in every language; of problems of the same place the first."""
    seen = set()
    for case, direction in product(cases, passes):
        problems, group = operator_of(case).posed(case, direction), family(case.family)
        for kernel in group.kernels:
            requested = [problem for problem in problems if problem.kernel == kernel.name]
            if not requested or kernel.tunable.shape is None or kernel.language not in languages:
                continue
            problem = _first_solved(kernel, requested)
            shape = kernel.tunable.shape(problem)
            key = kernel.head, shape.kind, tuple(shape.sizes.items())
            if key not in seen:
                seen.add(key)
                yield Posed(case, direction, group, kernel, problem, shape)


def _first_solved(kernel: Kernel, problems: Sequence[Problem]) -> Problem:
    """The first that a variant accepts, else the last."""
    *preferred, last = problems
    solved = (p for p in preferred if any(kernel.rules.accepts(v, p) is None for v in kernel.every))
    return next(solved, last)
