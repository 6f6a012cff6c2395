"""CUDA kernels of linear_scan on copies, in an emulator of the GPU: what lies beside the copied elements does not matter."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.linear_scan import cases
from scan_registry.kernels.linear_scan.op import copies, plans
from scan_registry.kernels.linear_scan.op.problems import StateLayout, make_kernel_call
from scan_registry.kernels.linear_scan.routes import as_rows
from scan_registry.kernels.linear_scan.spec import FAMILY

CPU = torch.device("cpu")
#: Shapes, and static parameters of a variant for their copies, whose rows are longer than time.
TAKEN = (
    ((2, 301, 3), {"access": "misaligned", "prefix_lead": 2}),
    ((1, 301, 3), {"access": "varlen", "prefix_lead": 2}),
)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("shape", "pins"), TAKEN, ids=str)
def test_a_kernel_on_copies(
    shape: tuple[int, int, int],
    pins: dict[str, Any],
    direction: str,
    cuda_emulator: ModuleType,
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    tokens, grad = torch.randn(shape), torch.randn(shape)
    gates = torch.rand(shape)
    bounds = torch.tensor([0, 100, 100, 250, 301]) if pins["access"] == "varlen" else None
    room = StateLayout.of(tokens, -2, bounds)
    first, last = room.empty().normal_(), room.empty().normal_()
    others = (
        {"tokens": tokens} if direction == "forward" else {"states": tokens, "states_grad": grad}
    )
    problem = make_kernel_call(direction, gates, others, bounds, -2, False).problem  # type: ignore[arg-type]
    route = as_rows(problem)
    assert route is not None
    kernel = FAMILY.kernel(route.problem.kernel, "cuda")
    variant = next(
        variant
        for variant in kernel.every
        if {"dtype": "float32", "gates": "float32", **pins}.items() <= dict(variant.statics).items()
        and kernel.rules.accepts(variant, route.problem) is None
    )
    library = cuda_emulator.emulated(kernel, variant, tmp_path)

    def results(run: Any) -> dict[str, torch.Tensor]:
        if direction == "forward":
            outputs = {"states": torch.empty(shape), "final_state": room.leaving(first)}
        else:
            outputs = {name: torch.empty(shape) for name in ("gates_grad", "tokens_grad")}
            outputs["initial_state_grad"] = room.leaving(last)
        states = {"initial_state": first, "final_state_grad": last}
        run({"gates": gates, "offsets": bounds, **others, **states, **outputs})
        return outputs

    run = copies.on_copies(problem, route, lambda given: library.run(route.problem, given, seed=1))
    torch.use_deterministic_algorithms(True)  # new tensors are full of NaN
    try:
        assert torch.empty(1).isnan()
        found = results(run)
    finally:
        torch.use_deterministic_algorithms(False)
    expected = results(plans.runner(problem, CPU, "auto"))
    for each, tensor in found.items():
        assert relative_error(tensor, expected[each].double()) <= cases.TOLERANCE["float32"], each
