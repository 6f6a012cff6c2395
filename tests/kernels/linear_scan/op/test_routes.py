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
from scan_registry.kernels.linear_scan.op import plans
from scan_registry.kernels.linear_scan.op.bench import Case
from scan_registry.kernels.linear_scan.op.copies import on_copies
from scan_registry.kernels.linear_scan.op.operator import OPERATOR
from scan_registry.kernels.linear_scan.op.problems import StateLayout, make_kernel_call
from scan_registry.kernels.linear_scan.problem import LinearScanProblem
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import Route, Variant
from scan_registry.ops import call as engine

CPU, SM90 = torch.device("cpu"), Target.parse("sm90")


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
        for variant in kernel.held(dtype, SM90)
    )


@pytest.fixture
def there(a_device: Describe, a_binary: Make) -> System:
    """A GPU with as many SMs as an H200, and the wheel for it; a compiler, so that the spec's own tables count."""
    archive = in_memory("sm90", [a_binary(variant, "sm90")[0] for variant in held()])
    return System(a_device(sm_count=132), (archive,), toolchains={})


#: Cases of which long sequences of few channels are copied into rows, and others that are solved as they lie.
COPIED = (
    "channel_last:1,57,36645:float32:sequences=3",
    "channel_last:1,2,169552:bfloat16:sequences=375",
    "channel_last:3,11,20001:float16:sequences=30:gates=channel",
    "channel_last:1,172,510033:float16:sequences=3",
)
AS_THEY_LIE = (
    "channel_last:1,9,857512:bfloat16:sequences=862",
    "channel_last:1,6,33472:float16:sequences=1009",
    "channel_last:1,257,16384:float32:sequences=16",
    "channel_last:1,1001,8192:bfloat16:sequences=8",
    "channel_last:1,11,65508:float32",
    "channel_last:1,302,12334:bfloat16",
    "channel_last:2,7,120965:float32:gates=channel",
    "time_last:8,1536,8192:bfloat16",
    "channel_last:8,1001,4099:float32",
    "channel_last:130,40,4167:bfloat16:gates=channel",
    "time_last:147,120,6433:float32:gates=channel",
    "channel_last:1,1024,1048576:bfloat16:sequences=64",
    "channel_last:1,64,65536:bfloat16:sequences=4",
)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("case", [*COPIED, *ROUTED])
def test_few_channels_of_long_sequences_are_copied(
    there: System, case: str, direction: str
) -> None:
    problem = posed(case, direction)
    own, found = select(there, FAMILY, problem), select_route(there, FAMILY, problem)
    assert found.route is not None
    assert found.problem == found.route.problem
    assert own.route is None
    assert variant_of(found).text("access") == "varlen"
    assert found.route.bytes <= routes.MOST_BYTES


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("case", AS_THEY_LIE)
def test_others_are_not_copied(there: System, case: str, direction: str) -> None:
    problem = posed(case, direction)
    found = select_route(there, FAMILY, problem)
    assert found.route is None
    assert found.problem == problem
    assert variant_of(found) == variant_of(select(there, FAMILY, problem))


def test_gates_that_channels_share_are_copied_with_few_long_columns(there: System) -> None:
    """Kernels that cut columns read a gate for each channel. Aligned or not, generic ones take their steps in turn."""
    for shape, gates, is_copied in (
        *(((1, 70000, 12), (70000, 1), True), ((2, 70000, 16), (2, 70000, 1), True)),
        *(((1, 4000, 12), (4000, 1), False), ((8, 70000, 64), (70000, 1), False)),
    ):
        tokens = meta(*shape, dtype=torch.float32)
        call = make_kernel_call(
            *("forward", meta(*gates, dtype=torch.float32), {"tokens": tokens}, None, 1, False)
        )
        found = select_route(there, FAMILY, call.problem)
        assert (found.route is not None) == is_copied
        assert (variant_of(found).text("access") == "generic") != is_copied


@pytest.mark.parametrize(
    ("case", "language"),
    [
        ("channel_last:1,1001,65536:bfloat16:sequences=32", "triton"),
        ("channel_last:1,6,33472:float16:sequences=1009", "triton"),
        ("channel_last:1,2814,10064:float32:sequences=4", "cuda"),
        ("channel_last:1,1024,65536:bfloat16:sequences=32", "cuda"),
        ("channel_last:1,1001,65536:bfloat16", "cuda"),
        ("time_last:1,32,9710:bfloat16:sequences=401", "triton"),
        ("time_last:1,473,501:bfloat16:sequences=15", "cuda"),
        ("time_last:1,5394,986:bfloat16:sequences=2", "triton"),
        ("time_last:1,1144,1562:float32:sequences=10", "cuda"),
        ("time_last:1,1024,65536:bfloat16:sequences=32", "cuda"),
    ],
)
def test_the_language_that_comes_first(there: System, case: str, language: str) -> None:
    for direction in ("forward", "backward"):
        assert variant_of(select(there, FAMILY, posed(case, direction))).language == language


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
    assert took(replace(there, device=a_device((10, 0)))).route is None
    found = took(there, backend="cuda", lowest=Tier.EXACT)
    assert found.route is not None
    assert (found.backend, found.lowest) == ("cuda", Tier.EXACT)


def test_problems_without_a_route() -> None:
    slow = posed("channel_last:1,11,65508:float32:sequences=8")
    assert FAMILY.route(slow, SM90) is not None
    for other in (
        replace(slow, direction="summary", strides=(*slow.strides[:2], slow.strides[-1])),
        replace(slow, gates_dtype="bfloat16"),
        replace(slow, time=routes.LEAST_TIME - 1),
        replace(slow, sequences=slow.time // routes.LEAST_MEAN + 1),
        replace(posed("channel_last:1,11,65508:float32:gates=channel", "backward"), sums=True),
        posed(
            "channel_last:1,255,1048576:float32:sequences=8"
        ),  # its copies would take too much memory
        posed("channel_last:9,63,65536:float32:sequences=8"),
        posed("channel_last:1,7,65536:float64:sequences=4"),
        posed("channel_last:1,63,65536:float32:sequences=66"),
    ):
        assert FAMILY.route(other, SM90) is None
    assert FAMILY.route(slow, Target.parse("sm100")) is None  # nobody has timed copies there


def test_a_route_is_explained(there: System) -> None:
    tensor = meta(1, 65507, 30, dtype=torch.float32)
    bounds = torch.empty(9, dtype=torch.int64, device="meta")
    found = explain_for(there, "linear_scan", tensor, tensor, dim=1, cu_seqlens=bounds)
    told = facts(str(found), "forward")
    assert "gates, tokens" in told["copies"]
    assert "states back" in told["copies"]
    assert "layout time_last" in told["problem"]
    assert "rows" in found.brief()
    record = found.to_json()
    route = record["steps"][0]["route"]
    assert route["name"] == "rows"
    assert route["copied"] == ["gates", "tokens"]
    assert route["bytes"] == 3 * 65508 * 30 * 4
    aligned = meta(8, 4096, 1024, dtype=torch.float32)
    plain = explain_for(there, "linear_scan", aligned, aligned, dim=1)
    assert all(step["route"] is None for step in plain.to_json()["steps"])


# --- What runs --------------------------------------------------------------------------------


def in_rows(problem: LinearScanProblem) -> Route:
    """The way that is taken for longer sequences."""
    route = routes.as_rows(problem)
    assert route is not None
    return route


def tensors_of(case: Case) -> tuple[torch.Tensor, torch.Tensor, Any]:
    return case.random_gates(CPU), case.sequence(CPU), case.bounds(CPU)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("options", ["", ":reverse=1", ":sequences=5", ":sequences=5:reverse=1"])
@pytest.mark.parametrize("gates", ["", ":gates=channel"])
@pytest.mark.parametrize("shape", ["channel_last:1,11,100", "channel_last:3,5,71"])
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
        route = in_rows(call.problem)
        run = plans.runner(route.problem, CPU, "auto")
        assert callable(run)
        for name, found in results(on_copies(call.problem, route, run)).items():
            assert torch.equal(found, own[name]), name


@pytest.mark.parametrize(
    "gates", ["2,3,70,5", "2,1,70,5", "1,3,70,5", "2,3,1,5", "1,3,1,5", "2,1,1,1", "1,1,70,1", "5"]
)
def test_gates_of_any_shape(gates: str) -> None:
    """Also those for which neither batches nor channels fold into one dimension."""
    torch.manual_seed(0)
    shape = [int(size) for size in gates.split(",")]
    tokens, decay = torch.randn(2, 3, 70, 5), torch.rand(shape)
    call = make_kernel_call("forward", decay, {"tokens": tokens}, None, -2, False)
    assert not call.copied
    own = torch.empty_like(tokens)
    own_run = plans.runner(call.problem, CPU, "auto")
    assert callable(own_run)
    own_run({"gates": decay, "tokens": tokens, "states": own})
    route, states = in_rows(call.problem), torch.empty_like(tokens)
    run = plans.runner(route.problem, CPU, "auto")
    assert callable(run)
    on_copies(call.problem, route, run)({"gates": decay, "tokens": tokens, "states": states})
    assert torch.equal(states, own)


def test_the_operator_runs_on_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of a call makes the copies that its decision names, and C does not launch it by itself."""
    case = Case.parse("channel_last:2,11,100:float32")
    gates, tokens, _ = tensors_of(case)
    expected, _ = plans.forward(gates, tokens, None, None, plans.Options(-2))
    requests: list[Any] = []

    def prepared(ordinal: Any, family: Any, problem: Any, *_: Any, routed: bool = False) -> Any:
        route = in_rows(problem)
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
    route = in_rows(call.problem)
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
        route = in_rows(problem) if routed else None
        kernel = runner(problem if route is None else route.problem, CPU, "auto")

        def run(tensors: Any) -> None:
            ran.append(problem if route is None else route.problem)
            kernel(tensors)

        return SimpleNamespace(launch=run, run=run, decision=SimpleNamespace(route=route))

    runner: Any = plans.runner
    monkeypatch.setattr(plans, "prepare", prepared)
    run = plans.runner(problem, torch.device("cuda", 0), "auto")
    assert callable(run)
    new, left = torch.Tensor.new_empty, [1]

    def scarce(model: torch.Tensor, size: Any) -> torch.Tensor:
        if not left:
            raise torch.OutOfMemoryError
        left.pop()
        return new(model, size)

    monkeypatch.setattr(torch.Tensor, "new_empty", scarce)
    states = torch.empty_like(tokens)
    run({"gates": gates, "tokens": tokens, "states": states})
    assert torch.equal(states, expected)
    left.extend(range(9))  # once there is memory again, so are copies
    states = torch.empty_like(tokens)
    run({"gates": gates, "tokens": tokens, "states": states})
    assert torch.equal(states, expected)
    assert [each.layout for each in ran] == ["channel_last", "time_last"]
    left.clear()
    route = in_rows(problem)
    with pytest.raises(torch.OutOfMemoryError):
        on_copies(problem, route, run)({"gates": gates, "tokens": tokens, "states": states})
