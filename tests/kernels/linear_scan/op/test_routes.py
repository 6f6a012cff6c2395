"""Scans on copies of their tensors: which problems have a route, whether it is taken, and that results are the same."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from explaining import Describe, Make, facts, meta
from gpu_scans import ROUTED
from selecting import in_memory

from scan_registry.diagnostics.explanation import explain_for
from scan_registry.dispatch.fit import Tier
from scan_registry.dispatch.routes import select_route
from scan_registry.dispatch.select import Decision, System, select
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan import routes
from scan_registry.kernels.linear_scan.op import copies, plans
from scan_registry.kernels.linear_scan.op.bench import Case
from scan_registry.kernels.linear_scan.op.copies import on_copies
from scan_registry.kernels.linear_scan.op.operator import OPERATOR
from scan_registry.kernels.linear_scan.op.problems import StateLayout, make_kernel_call
from scan_registry.kernels.linear_scan.problem import LinearScanProblem
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import Variant
from scan_registry.kernels.tuning import Row, Tuning
from scan_registry.ops import call as engine

CPU = torch.device("cpu")


def posed(case: str, direction: str = "forward") -> LinearScanProblem:
    """The problem of a case as ``bench`` names it."""
    return OPERATOR.posed(Case.parse(case), direction)[-1]


# --- Selection --------------------------------------------------------------------------------


@cache
def held() -> tuple[Variant, ...]:
    """What the sm_90 wheel has for scans of 2 and of 4 bytes."""
    return tuple(
        variant
        for kernel in FAMILY.kernels
        for dtype in ("float32", "bfloat16", "float16")
        for variant in kernel.held(dtype, Target.parse("sm90"))
    )


@pytest.fixture
def there(a_device: Describe, a_binary: Make) -> System:
    """A GPU with as many SMs as an H200, and the wheel for it; a compiler, so that the spec's own tables count."""
    archive = in_memory("sm90", [a_binary(variant, "sm90")[0] for variant in held()])
    return System(a_device(sm_count=132), (archive,), toolchains={})


#: With how many times as long the problem's own kernel took on an H200 as the bandwidth roofline says, if it was timed; in 16
#: bits, of either dtype.
SLOW = {
    "channel_last:1,9,857512:bfloat16:sequences=862": ("rows", 700),
    "channel_last:1,17,85711:bfloat16:sequences=199": ("rows", 230),
    "channel_last:1,17,600001:bfloat16:sequences=1000": ("padded", None),
    "channel_last:1,57,36645:float32:sequences=3": ("rows", 56),
}
FAST = (
    "channel_last:1,11,65508:float32",
    "channel_last:1,302,12334:bfloat16",
    "channel_last:1,2,841815:bfloat16",
    "channel_last:2,7,120965:float32:gates=channel",
    "channel_last:1,10,274430:float32:gates=channel",
    "time_last:8,1536,8192:bfloat16",
    "channel_last:8,1001,4099:float32",
    "channel_last:130,40,4167:bfloat16:gates=channel",
    "time_last:147,120,6433:float32:gates=channel",
    "channel_last:1,1024,1048576:bfloat16:sequences=64",
    "channel_last:310,120,11:bfloat16",
)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("case", SLOW)
def test_a_much_faster_route_is_taken(there: System, case: str, direction: str) -> None:
    problem = posed(case, direction)
    own, found = select(there, FAMILY, problem), select_route(there, FAMILY, problem)
    assert found.route is not None
    if direction == "forward":
        assert found.route.name == SLOW[case][0]
    assert found.problem == found.route.problem
    assert own.route is None
    assert found.launches
    assert variant_of(found) != variant_of(own)
    assert found.route.bytes <= routes.MOST_BYTES


@pytest.mark.parametrize("case", ROUTED)
def test_what_is_run_on_a_gpu_takes_a_route(there: System, case: str) -> None:
    assert select_route(there, FAMILY, posed(case)).route is not None


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("case", FAST)
def test_what_is_fast_is_not_copied(there: System, case: str, direction: str) -> None:
    problem = posed(case, direction)
    found = select_route(there, FAMILY, problem)
    assert found.route is None
    assert found.problem == problem
    assert variant_of(found) == variant_of(select(there, FAMILY, problem))


def variant_of(decision: Decision) -> Variant:
    variant = decision.taken().variant
    assert variant is not None
    return variant


def test_who_wants_no_other_way_gets_none(there: System, a_device: Describe) -> None:
    problem = posed("channel_last:1,11,65508:float32:sequences=8")
    took = partial(select_route, family=FAMILY, problem=problem)
    assert took(there).route is not None
    assert took(there, backend="reference").route is None
    assert took(System(None)).route is None
    pinned = variant_of(select(there, FAMILY, problem))
    assert took(replace(there, pinned=pinned)).route is None
    # Nothing is known of how long kernels take on another architecture.
    assert took(replace(there, device=a_device((10, 0)))).route is None
    assert took(replace(there, toolchains=None)).route is None
    found = took(there, backend="cuda", lowest=Tier.EXACT)
    assert found.route is not None
    assert (found.backend, found.lowest) == ("cuda", Tier.EXACT)


def test_problems_without_a_route() -> None:
    slow = posed("channel_last:1,11,65508:float32")
    assert [each.name for each in FAMILY.routes(slow)] == ["padded"]
    for other in (
        replace(slow, direction="summary", strides=(*slow.strides[:2], slow.strides[-1])),
        replace(slow, gates_dtype="bfloat16"),
        replace(slow, time=routes.LEAST_TIME - 1),
        posed("channel_last:1,12,65508:float32"),
        posed("time_last:1,11,65508:float32"),
        replace(posed("channel_last:1,12,65508:float32:gates=channel", "backward"), sums=True),
        posed("channel_last:9,1023,1048576:float32"),  # its copies would take too much memory
    ):
        assert FAMILY.routes(other) == ()


@pytest.mark.parametrize(("ms", "is_copied"), [(1e-3, False), (1e3, True)])
def test_what_was_tuned_is_compared_by_its_measured_time(
    there: System, ms: float, is_copied: bool
) -> None:
    problem = posed("channel_last:1,11,65508:float32:sequences=8")
    kernel, own = FAMILY.kernel(problem.kernel, "cuda"), variant_of(select(there, FAMILY, problem))
    assert kernel.tunable.shape is not None
    shape = kernel.tunable.shape(problem)
    rows = {shape.kind: [Row(shape.sizes, {kernel.label(own): ms})]}
    tuned = in_memory("sm90", ())
    tuned.__dict__["tuned"] = {kernel.head: (Tuning.of("sm_90", "Imaginary", "2026-01-31", rows),)}
    found = select_route(replace(there, tuned=tuned), FAMILY, problem)
    assert (found.route is not None) == is_copied


def test_a_route_is_explained(there: System) -> None:
    tensor = meta(1, 65508, 301, dtype=torch.float32)
    bounds = torch.empty(9, dtype=torch.int64, device="meta")
    found = explain_for(there, "linear_scan", tensor, tensor, dim=1, cu_seqlens=bounds)
    told = facts(str(found), "forward")
    assert "gates, tokens" in told["copies"]
    assert "states, final_state back" in told["copies"]
    assert "channels 304" in told["problem"]
    assert "padded" in found.brief()
    record = found.to_json()
    route = record["steps"][0]["route"]
    assert route["name"] == "padded"
    assert route["copied"][:2] == ["gates", "tokens"]
    assert route["bytes"] == (3 * 65508 + 2 * 8) * 304 * 4
    aligned = meta(8, 4096, 1024, dtype=torch.float32)
    plain = explain_for(there, "linear_scan", aligned, aligned, dim=1)
    assert all(step["route"] is None for step in plain.to_json()["steps"])


# --- What runs --------------------------------------------------------------------------------


def tensors_of(case: Case) -> tuple[torch.Tensor, torch.Tensor, Any]:
    return case.random_gates(CPU), case.sequence(CPU), case.bounds(CPU)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("options", ["", ":reverse=1", ":sequences=5", ":sequences=5:reverse=1"])
@pytest.mark.parametrize("gates", ["", ":gates=channel"])
@pytest.mark.parametrize(
    "shape", ["channel_last:1,11,100", "channel_last:3,5,71", "time_last:3,5,71"]
)
def test_copies_give_the_same_results(shape: str, gates: str, options: str, dtype: str) -> None:
    """By the kernels of the CPU, which take a channel's steps one after the other whatever the layout."""
    torch.manual_seed(0)
    case = Case.parse(f"{shape}:{dtype}{gates}{options}")
    gate, tokens, bounds = tensors_of(case)
    room = StateLayout.of(tokens, case.dim, bounds)
    initial, last_grad, grad = (
        room.empty().normal_(),
        room.empty().normal_(),
        torch.randn_like(tokens),
    )
    states = torch.randn_like(tokens)
    how = bounds, case.dim, case.reverse
    both = {"states": states, "states_grad": grad}
    calls = {
        "forward": make_kernel_call("forward", gate, {"tokens": tokens}, *how),
        "backward": make_kernel_call("backward", gate, both, *how),
    }
    inputs = {
        "forward": {"tokens": tokens, "initial_state": initial},
        "backward": {**both, "initial_state": initial, "final_state_grad": last_grad},
    }
    taken = 0
    for direction, call in calls.items():

        def results(run: Any) -> dict[str, torch.Tensor]:
            outputs = {
                "forward": {
                    "states": torch.empty_like(tokens),
                    "final_state": room.leaving(initial),
                },
                "backward": {
                    "gates_grad": torch.empty_like(tokens),
                    "tokens_grad": torch.empty_like(tokens),
                    "initial_state_grad": room.leaving(last_grad),
                },
            }[direction]  # noqa: B023
            run({"gates": gate, "offsets": bounds, **inputs[direction], **outputs})  # noqa: B023
            return outputs

        own = results(plans.runner(call.problem, CPU, "auto"))
        for route in FAMILY.routes(call.problem):
            run = plans.runner(route.problem, CPU, "auto")
            assert callable(run)
            for name, found in results(on_copies(call.problem, route, run)).items():
                assert torch.equal(found, own[name]), (route.name, name)
            taken += 1
    assert taken or case.layout == "time_last"


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize(
    "gates", ["2,3,70,5", "2,1,70,5", "1,3,70,5", "2,3,1,5", "1,3,1,5", "2,1,1,1", "1,1,70,1", "5"]
)
def test_gates_of_any_shape(gates: str, dim: int) -> None:
    """Also those for which neither batches nor channels fold into one dimension."""
    torch.manual_seed(0)
    shape = [int(size) for size in gates.split(",")]
    tokens = torch.randn(2, 3, 70, 5)
    decay = torch.rand(shape)
    if dim == -1:
        tokens = tokens.mT.contiguous()
        decay = decay.mT.contiguous() if decay.dim() > 1 else decay[:, None]
    call = make_kernel_call("forward", decay, {"tokens": tokens}, None, dim, False)
    assert not call.copied
    found = FAMILY.routes(call.problem)
    own = torch.empty_like(tokens)
    own_run = plans.runner(call.problem, CPU, "auto")
    assert callable(own_run)
    own_run({"gates": decay, "tokens": tokens, "states": own})
    for route in found:
        run, states = plans.runner(route.problem, CPU, "auto"), torch.empty_like(tokens)
        assert callable(run)
        on_copies(call.problem, route, run)({"gates": decay, "tokens": tokens, "states": states})
        assert torch.equal(states, own), route.name
    assert found or dim == -1


def test_the_operator_runs_on_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of a call makes the copies that its decision names, and C does not launch it by itself."""
    case = Case.parse("channel_last:2,11,100:float32")
    gates, tokens, _ = tensors_of(case)
    expected, _ = plans.forward(gates, tokens, None, None, plans.Options(-2))
    requests: list[Any] = []

    def prepared(ordinal: Any, family: Any, problem: Any, *_: Any, routed: bool = False) -> Any:
        (route,) = family.routes(problem)
        requests.append((problem, routed))
        run = runner(route.problem, CPU, "auto")
        return SimpleNamespace(launch=run, run=run, decision=SimpleNamespace(route=route))

    runner = plans.runner
    monkeypatch.setattr(plans, "prepare", prepared)
    problem = make_kernel_call("forward", gates, {"tokens": tokens}, None, -2, False).problem
    run = plans.runner(problem, torch.device("cuda", 0), "auto")
    assert callable(run)
    states = torch.empty_like(tokens)
    run({"gates": gates, "tokens": tokens, "states": states})
    assert torch.equal(states, expected)
    monkeypatch.setattr(plans, "on_gpu", lambda _: True)
    monkeypatch.setattr(engine, "_empty", torch.empty_strided)
    launched = plans.plan_launch((gates, tokens, None, None), plans.Options(-2), lambda *_: states)
    assert launched is None
    assert requests == [(problem, True)] * 2


def test_tensors_that_are_missing_stay_so() -> None:
    """Without states, and where the gradient of gates is not wanted."""
    case = Case.parse("channel_last:2,11,100:float32")
    gates, tokens, _ = tensors_of(case)
    call = make_kernel_call(
        "backward", gates, {"states": tokens, "states_grad": tokens}, None, -2, False
    )
    (route,) = FAMILY.routes(call.problem)
    seen: dict[str, Any] = {}
    run = on_copies(call.problem, route, seen.update)
    run(
        {
            "gates": gates,
            "states": None,
            "states_grad": tokens,
            "tokens_grad": torch.empty_like(tokens),
        }
    )
    assert {name for name, tensor in seen.items() if tensor is not None} == {
        "gates",
        "states_grad",
        "tokens_grad",
    }
    assert all(each is None or each.data_ptr() % 16 == 0 for each in seen.values())


def test_without_memory_for_copies_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse("channel_last:2,11,100:float32")
    gates, tokens, _ = tensors_of(case)
    expected, _ = plans.forward(gates, tokens, None, None, plans.Options(-2))
    problem = make_kernel_call("forward", gates, {"tokens": tokens}, None, -2, False).problem
    ran: list[Any] = []

    def prepared(ordinal: Any, family: Any, problem: Any, *_: Any, routed: bool = False) -> Any:
        route = family.routes(problem)[0] if routed else None
        kernel = runner(problem if route is None else route.problem, CPU, "auto")

        def run(tensors: Any) -> None:
            ran.append(problem if route is None else route.problem)
            kernel(tensors)

        return SimpleNamespace(launch=run, run=run, decision=SimpleNamespace(route=route))

    runner: Any = plans.runner
    monkeypatch.setattr(plans, "prepare", prepared)
    run = plans.runner(problem, torch.device("cuda", 0), "auto")
    assert callable(run)
    new, left = copies._Part.new, [1]

    def scarce(part: Any, model: torch.Tensor) -> torch.Tensor:
        if not left:
            raise torch.OutOfMemoryError
        left.pop()
        return new(part, model)

    monkeypatch.setattr(copies._Part, "new", scarce)
    states = torch.empty_like(tokens)
    run({"gates": gates, "tokens": tokens, "states": states})
    assert torch.equal(states, expected)
    left.extend(range(9))  # once there is memory again, so are copies
    states = torch.empty_like(tokens)
    run({"gates": gates, "tokens": tokens, "states": states})
    assert torch.equal(states, expected)
    assert [each.channels for each in ran] == [11, 12]
    left.clear()
    (route,) = FAMILY.routes(problem)
    with pytest.raises(torch.OutOfMemoryError):
        on_copies(problem, route, run)({"gates": gates, "tokens": tokens, "states": states})
