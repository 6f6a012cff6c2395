"""What kernels make of the problems that an operator's calls and benchmarks pose."""

from __future__ import annotations

from typing import Any

from scan_registry.kernels.model import Family, Kernel, Variant


def taken(kernel: Kernel, problem: Any) -> list[Variant]:
    """Variants that accept the problem."""
    return [v for v in kernel.variants if kernel.rules.accepts(v, problem) is None]


def best(kernel: Kernel, problem: Any) -> Variant:
    """The one of these of the lowest cost."""
    return min(taken(kernel, problem), key=lambda variant: kernel.cost(variant, problem))


def check_tensors_to_time(operator: Any, benchmark: Any, family: Family, text: str) -> list[Any]:
    """That a case of a benchmark has tensors for each problem that it poses, which are returned with the tensors."""
    case, pairs = benchmark.parse(text), []
    for direction in benchmark.passes:
        problems = operator.posed(case, direction)
        assert problems
        for problem in problems:
            pointers = family.kernel(problem.kernel, "cuda").pointers
            tensors, outputs = operator.tensors(case, problem, "cpu"), operator.outputs(case, problem)  # fmt: skip
            assert outputs
            assert all(tensors[name] is not None for name in outputs)
            assert {*outputs} <= {*pointers}
            pairs.append((direction, problem, tensors))
    return pairs
