"""What is tuned for: every kind of problem, with tensors that its kernels take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from planning import forget_plans

from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.op import plans
from scan_registry.kernels.linear_scan.op.bench import Case
from scan_registry.kernels.linear_scan.op.function import linear_scan
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.ops.launching import PlanCache
from scan_registry.ops.operator import PASSES
from scan_registry.tuner.problems import cases, posed, usual_cases

CPU = torch.device("cpu")
SM90 = Target((9, 0))
SMALL = [
    "time_last:2,3,64:float32",
    "channel_last:2,3,64:float32",
    "channel_last:1,16,64:bfloat16",
    "channel_last:1,8,64:float32:sequences=3",
    "channel_last:2,8,64:float32:gates=channel",
    "time_last:2,8,64:float32:gates=channel",
]


def test_the_usual_cases_are_of_every_kind() -> None:
    result = list(posed(usual_cases()))
    tuned = {kernel.head for kernel in FAMILY.kernels if kernel.tunable.shape is not None}
    assert {item.kernel.head for item in result} == tuned
    kinds = {item.shape.kind for item in result}
    for dtype in ("float32", "bfloat16", "float16"):
        for access in ("aligned", "generic"):
            assert f"dtype={dtype},gates={dtype},access={access}" in kinds
    for dtype in ("float64", "complex64"):
        assert f"dtype={dtype},gates={dtype},access=aligned" in kinds
    for item in {(item.kernel.head, item.shape.kind): item for item in result}.values():
        assert len(item.variants(SM90)) > 1


def test_problems_of_one_place_are_posed_once() -> None:
    requested = [Case.parse(SMALL[0])] * 2
    result = list(posed(requested, ["cuda"]))
    assert [(item.direction, item.kernel.language) for item in result] == [
        (direction, "cuda") for direction in PASSES
    ]
    assert len(list(posed(requested))) == 4
    assert [item.direction for item in posed(requested, passes=("backward",))] == ["backward"] * 2


def test_shapes_take_every_dtype_and_keep_their_options() -> None:
    result = cases(["channel_last:1,8,64:sequences=3"], ["float32", "bfloat16"])
    assert list(map(str, result)) == [
        "channel_last:1,8,64:float32:sequences=3",
        "channel_last:1,8,64:bfloat16:sequences=3",
    ]
    with pytest.raises(ValueError, match="the case is 'rows:1:float32'"):
        cases(["rows:1"], ["float32"])


@pytest.mark.parametrize("text", SMALL)
@pytest.mark.parametrize("direction", PASSES)
def test_the_problem_is_that_of_the_call(
    text: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator poses the same problem, and its kernel computes the same from the tensors."""
    case = Case.parse(text)
    # On the CPU no kernel sums up the gradient of gates itself.
    item = next(e for e in posed([case], passes=[direction]) if not e.problem.sums)
    requested: list[tuple[Any, Mapping[str, Any]]] = []
    runner = plans.runner

    def noted(problem: Any, device: Any, backend: Any) -> Any:
        run = runner(problem, device, backend)
        assert callable(run)

        def running(tensors: Mapping[str, Any]) -> None:
            requested.append((problem, tensors))
            run(tensors)

        return running

    monkeypatch.setattr(plans, "runner", noted)
    monkeypatch.setattr(plans, "plan_cache", PlanCache())
    forget_plans(monkeypatch, "linear_scan")
    tensors = item.tensors(CPU)
    gates, bounds = tensors["gates"], tensors["offsets"]
    assert gates is not None
    if direction == "forward":
        tokens = tensors["tokens"]
        assert tokens is not None
        linear_scan(gates, tokens, dim=case.dim, cu_seqlens=bounds)
    else:
        options = plans.Options(case.dim)
        inputs = gates, tensors["states"], tensors["states_grad"], None, None, bounds
        plans.backward(*inputs, options, (True, True, False))  # type: ignore[arg-type]
    (problem, theirs), *reductions = requested
    assert len(reductions) == (direction == "backward" and case.gates != "full")
    assert problem == item.problem
    run = runner(item.problem, CPU, "auto")
    assert callable(run)
    run(tensors)
    for name in item.outputs:
        ours, other = tensors[name], theirs[name]
        assert ours is not None
        torch.testing.assert_close(ours, other, equal_nan=False)
    written = {name for name, value in theirs.items() if value is not None} - set(tensors)
    assert written == set()


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("channel_last:2,8,64:float32:gates=channel", (2, 2 * 8)),
        ("channel_last:2,8,64:bfloat16:gates=channel", (2, 2 * 8)),
        ("channel_last:1,8,64:float32:sequences=3:gates=channel", (1, 3 * 8)),
        ("channel_last:2,7,63:float32:gates=channel", (1, 2 * 7)),
        ("channel_last:2,7,63:float16:gates=channel", (1, 2 * 7)),
        ("channel_last:2,7,63:float64:gates=channel", None),
        ("time_last:2,8,64:float32:gates=channel", (6, 2 * 8)),
        ("channel_last:2,8,64:float32", None),
    ],
)
def test_kernels_that_can_sum_up_the_gradient_of_gates_are_timed_doing_so(
    text: str, shape: tuple[int, ...] | None
) -> None:
    """As calls ask them to: without it they have a fraction of the work."""
    for item in posed([Case.parse(text)], passes=["backward"]):
        sums = shape is not None and item.kernel.language == "cuda"
        assert item.problem.sums == sums
        assert all(item.kernel.rules.accepts(v, item.problem) is None for v in item.variants(SM90))
        if sums:
            gates_grad = item.tensors(CPU)["gates_grad"]
            assert "gates_grad" in item.outputs
            assert gates_grad is not None
            assert (tuple(gates_grad.shape), gates_grad.dtype) == (shape, torch.float32)
