"""The fast path: which calls take it, what a plan depends on, and what is launched for one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from placing import memory
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scan_registry import linear_scan
from scan_registry.hardware._launcher import FastPath
from scan_registry.ops import fast_path
from scan_registry.ops.launching import MOST_PLANS

pytestmark = pytest.mark.skipif(
    not hasattr(Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no table of DLPack's"
)


class Anything:
    pass


class Planner:
    """Calls on the fast path that return the numbers of their plans."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.recorded: list[Any] = []
        self.choice: object = None
        self.calls = FastPath(**self.parts())

    def parts(self) -> dict[str, Any]:
        return {
            "types": fast_path.PLAIN_TYPES,
            "tensor": torch._C.TensorBase,
            "exchange": getattr(Tensor, "__dlpack_c_exchange_api__", None),
            "observers": fast_path.OBSERVERS,
            "backends": ("auto", "cuda"),
            "choice": lambda: self.choice,
            "plan": self.plan,
            "tracking": torch.is_grad_enabled,
            "record": self.record,
        }

    def plan(self, *request: Any) -> Any:
        number = len(self.requests)
        self.requests.append(request)
        return lambda *tensors: number

    def record(self, *told: Any) -> Any:
        self.recorded.append(told)
        return "recorded"

    def __call__(
        self,
        gates: Any,
        tokens: Any,
        dim: Any = -1,
        backend: Any = "auto",
        *,
        state: Any = None,
        bounds: Any = None,
        reverse: Any = False,
        final: Any = False,
    ) -> Any:
        return self.calls.run(gates, tokens, state, bounds, dim, reverse, final, backend)


def plain_call(calls: FastPath, gates: Any, tokens: Any) -> Any:
    return calls.run(gates, tokens, None, None, -1, False, False, "auto")


def test_a_call_is_planned_once() -> None:
    planner, gates, tokens = Planner(), memory(2, 3), memory(2, 3)
    planner.choice = object()
    assert [planner(gates, tokens, 1, "cuda") for _ in range(3)] == [0, 0, 0]
    state, bounds = memory(2), memory(2, dtype=torch.int64)
    given = {"state": state, "bounds": bounds, "reverse": True, "final": True}
    assert [planner(gates, tokens, 0, "auto", **given) for _ in range(3)] == [1, 1, 1]
    plain, other = planner.requests
    for request, wanted in (
        (plain, (gates, tokens, None, None, 1, False, False, "cuda")),
        (other, (gates, tokens, state, bounds, 0, True, True, "auto")),
    ):
        assert all(one is two for one, two in zip(request, wanted, strict=True))
    assert not planner.recorded


def test_a_call_whose_plan_is_none_is_left_to_others() -> None:
    requests: list[Any] = []
    calls = FastPath(**Planner().parts() | {"plan": lambda *call: requests.append(call)})
    tracked = torch.nn.Parameter(memory(2, 3))
    assert [plain_call(calls, PLAIN, each) for each in (PLAIN, PLAIN, tracked)] == [None] * 3
    assert len(requests) == 1


def test_results_are_those_of_the_plan() -> None:
    given: list[Any] = []

    def compute(*tensors: Any) -> Any:
        given.append(tensors)
        return "states", "last"

    calls = FastPath(**Planner().parts() | {"plan": lambda *call: compute})
    state, bounds = memory(2), memory(2, dtype=torch.int32)
    found = calls.run(PLAIN, PLAIN, state, bounds, -1, False, True, "auto")
    assert found == ("states", "last")
    ((gates, tokens, *others),) = given
    assert gates is tokens is PLAIN
    assert others[0] is state
    assert others[1] is bounds


def test_plans_that_are_too_many_are_forgotten() -> None:
    planner, most = Planner(), MOST_PLANS
    tensors = [(torch.zeros(size + 1), torch.zeros(size + 1)) for size in range(most)]
    for _ in range(2):
        assert [planner(*each) for each in tensors] == list(range(most))
    assert planner(PLAIN, PLAIN) == most
    assert planner(*tensors[0]) == most + 1
    assert planner(PLAIN, PLAIN) == most


def test_what_plans_keep_goes_with_them() -> None:
    choices = [Anything()]
    kept = weakref.ref(choices[0])
    parts = {"choice": lambda: choices[-1], "plan": lambda *call: lambda *tensors: 0}
    calls = FastPath(**Planner().parts() | parts)
    plain_call(calls, PLAIN, PLAIN)
    choices[:] = [Anything()]
    assert kept() is not None  # as what takes its place in memory would have its plans
    del calls
    assert kept() is None


def test_autograd_is_told_where_a_tensor_requires_gradients() -> None:
    planner, tracked = Planner(), torch.nn.Parameter(memory(2, 3))
    planner.choice = object()
    bounds = memory(3, dtype=torch.int64)
    for tensors in ((tracked, PLAIN, None), (PLAIN, tracked, PLAIN), (PLAIN, PLAIN, tracked)):
        gates, tokens, state = tensors
        how = {"state": state, "bounds": bounds, "reverse": True}
        with torch.no_grad():
            number = planner(gates, tokens, 1, "cuda", **how)
        assert not planner.recorded
        assert planner(gates, tokens, 1, "cuda", **how) == "recorded"
        ((*told, (result, request)),) = planner.recorded
        assert all(one is other for one, other in zip(told, (*tensors, bounds), strict=True))
        assert result == number
        assert request == (1, True, False, "cuda", planner.choice)
        planner.recorded.clear()
    assert not planner.recorded


def test_what_recording_and_planning_raise_is_raised() -> None:
    def fail(*args: Any) -> Any:
        raise LookupError(len(args))

    tracked = torch.nn.Parameter(memory(2, 3))
    for name, count in (("record", 5), ("plan", 8), ("choice", 0), ("tracking", 0)):
        calls = FastPath(**Planner().parts() | {name: fail})
        with pytest.raises(LookupError, match=str(count)):
            plain_call(calls, tracked, PLAIN)


def test_what_torch_asks_a_derivative_for_is_as_torch_has_it() -> None:
    """``FastScan`` repeats it only for it to be found sooner."""
    function = torch.autograd.Function
    assert fast_path.FastScan.setup_context is function.setup_context
    for name in ("clear_saved_tensors_on_access", "boxed_grads_call"):
        assert getattr(fast_path.FastScan, name) == getattr(function, name, False)


def test_options_go_by_their_values() -> None:
    planner, tensors = Planner(), (memory(*[1] * 9), memory(*[1] * 9))
    for _ in range(2):
        assert planner(*tensors, int("-7"), "".join(["cu", "da"])) == 0
    assert planner(*tensors, -8, "cuda") == 1
    assert planner(*tensors, -7, "auto") == 2
    assert planner(*tensors, -7, "other") is None
    assert planner(*tensors, -7, ["cuda"]) is None
    assert planner(*tensors, 2**64, "cuda") is None
    assert planner(*tensors, True, "cuda") is None
    assert planner(*tensors, "-7", "cuda") is None
    for flag in (0, 1, None, "True", np.bool_(True)):
        assert planner(*tensors, -7, "cuda", reverse=flag) is None
        assert planner(*tensors, -7, "cuda", final=flag) is None


def test_what_planning_raises_is_raised() -> None:
    with pytest.raises(ValueError, match="dim is 5"):
        fast_path.fast_scan(memory(2, 3), memory(2, 3), None, None, 5, False, False, "auto")


def test_equal_calls_have_equal_plans_and_others_have_not() -> None:
    pairs = {
        "plain": (memory(4, 8), memory(4, 8)),
        "another dtype": (memory(4, 8).half(), memory(4, 8).half()),
        "of the same size": (memory(4, 8).bfloat16(), memory(4, 8).bfloat16()),
        "wide": (memory(4, 8, dtype=torch.float64), memory(4, 8, dtype=torch.float64)),
        "another shape": (memory(8, 4), memory(8, 4)),
        "another rank": (memory(32), memory(32)),
        "gates' strides": (memory(8, 4).T, memory(4, 8)),
        "tokens' strides": (memory(4, 8), memory(8, 4).T),
        "gates' alignment": (memory(4, 8, off=1), memory(4, 8)),
        "tokens' alignment": (memory(4, 8), memory(4, 8, off=2)),
        "gates of another dtype": (memory(4, 8), memory(4, 8).half()),
        "gates that broadcast": (memory(1, 8), memory(4, 8)),
        "gates of another rank": (memory(8), memory(4, 8)),
        "tokens that broadcast": (memory(4, 8), memory(1, 8)),
    }
    planner = Planner()
    found = {name: planner(*pair) for name, pair in pairs.items()}
    found["another dim"] = planner(*pairs["plain"], 0)
    offsets = {kind: memory(4, dtype=getattr(torch, kind)) for kind in ("int32", "int64")}
    ways: dict[str, dict[str, Any]] = {
        "reverse": {"reverse": True},
        "final": {"final": True},
        "reverse and final": {"reverse": True, "final": True},
        "a state": {"state": memory(4)},
        "another state": {"state": memory(1)},
        "a state of another dtype": {"state": memory(4).half()},
        "a state of another rank": {"state": memory(4, 1)},
        "a state of other strides": {"state": memory(8)[::2]},
        "bounds": {"bounds": offsets["int64"]},
        "other bounds": {"bounds": offsets["int64"][:3]},
        "bounds of another dtype": {"bounds": offsets["int32"]},
        "bounds with gaps": {"bounds": memory(8, dtype=torch.int64)[::2]},
        "state and bounds": {"state": memory(4), "bounds": offsets["int64"]},
    }
    found |= {name: planner(*pairs["plain"], **way) for name, way in ways.items()}
    found["another backend"] = planner(*pairs["plain"], -1, "cuda")
    planner.choice = object()
    found["another choice"] = planner(*pairs["plain"])
    planner.choice = None
    for one, other in combinations(found, 2):
        assert found[one] != found[other], (one, other)
    again = planner(torch.nn.Parameter(memory(4, 8), requires_grad=False), memory(4, 8))
    assert again == found["plain"]
    # No plan depends on how a state or bounds are aligned.
    assert planner(*pairs["plain"], state=memory(4, off=1)) == found["a state"]


class Subclass(Tensor):
    pass


PLAIN = memory(2, 3)
OTHERS: dict[str, tuple[Any, Any]] = {
    "complex": (PLAIN.to(torch.complex64), PLAIN.to(torch.complex64)),
    "integers": (PLAIN.int(), PLAIN.int()),
    "a lazy negation": (PLAIN, torch._neg_view(PLAIN)),
    "zeros without memory": (PLAIN, torch._efficientzerotensor((2, 3))),
    "nothing": (PLAIN[:0], PLAIN[:0]),
    "no memory": (PLAIN.to("meta"), PLAIN.to("meta")),
    "sparse": (PLAIN, PLAIN.to_sparse()),
    "a subclass": (PLAIN, PLAIN.as_subclass(Subclass)),
    "no tensor": (PLAIN, None),
    "many dimensions": (memory(*[1] * 17), memory(*[1] * 17)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_does_not_take_the_fast_path(name: str) -> None:
    planner = Planner()
    assert planner(*OTHERS[name]) is None
    gates, tokens = OTHERS[name]
    assert planner(tokens, gates) is None
    assert planner(PLAIN, PLAIN, state=3.0 if tokens is None else tokens) is None
    assert not planner.requests


@pytest.mark.parametrize(
    "bounds", [memory(3), PLAIN.bool(), [0, 3], torch.zeros(2, dtype=torch.int64, device="meta")]
)
def test_bounds_that_are_no_integers_in_memory_do_not_take_the_fast_path(bounds: Any) -> None:
    planner = Planner()
    assert planner(PLAIN, PLAIN, bounds=bounds) is None
    assert not planner.requests


class Mode(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


def test_dispatch_has_to_be_trivial() -> None:
    planner = Planner()
    with Mode():
        assert planner(PLAIN, PLAIN) is None
    seen: list[Any] = []

    def look(tensor: Tensor) -> Tensor:
        seen.append(planner(tensor, PLAIN))
        return tensor

    torch.func.vmap(look)(memory(4, 2, 3))
    torch.func.grad(lambda tensor: look(tensor).sum())(PLAIN)
    torch.jit.trace(look, (PLAIN,), check_trace=False)
    assert seen == [None, None, None]
    assert planner(PLAIN, PLAIN) == 0


@pytest.mark.parametrize("tracked", [False, True])
def test_scans_in_transforms_of_other_tensors(tracked: bool) -> None:
    gates = torch.rand(2, 3).requires_grad_(tracked)
    tokens, weights = torch.rand(2, 3), torch.rand(4, 2, 3)
    states = linear_scan(gates, tokens)

    def weighted(weight: Tensor) -> Tensor:
        return (linear_scan(gates, tokens) * weight).sum()

    found = torch.func.vmap(torch.func.grad(weighted))(weights)
    torch.testing.assert_close(found, states.expand(4, 2, 3))
    if tracked:
        (grad,) = torch.autograd.grad(torch.func.vmap(weighted)(weights).sum(), gates)
        (wanted,) = torch.autograd.grad((states * weights).sum(), gates)
        torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize("missing", [{"exchange": None}, {"types": (int,), "tensor": int}])
def test_without_what_torch_is_asked_by_no_call_takes_the_fast_path(
    missing: dict[str, Any],
) -> None:
    assert plain_call(FastPath(**Planner().parts() | missing), PLAIN, PLAIN) is None


@pytest.mark.parametrize("observing", range(3))
def test_every_observer_is_asked(observing: int) -> None:
    told = [False] * 3
    planner = Planner()
    observers = tuple(lambda i=i: told[i] for i in range(3))
    calls = FastPath(**planner.parts() | {"observers": observers})
    assert plain_call(calls, PLAIN, PLAIN) == 0
    told[observing] = True
    assert plain_call(calls, PLAIN, PLAIN) is None


def test_what_observers_raise_is_raised() -> None:
    def fail() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        plain_call(FastPath(**Planner().parts() | {"observers": (fail,)}), PLAIN, PLAIN)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: Planner().calls.run(PLAIN), TypeError),  # type: ignore[call-arg]
        (lambda: FastPath(**Planner().parts() | {"types": []}), TypeError),
        (lambda: FastPath(**Planner().parts() | {"types": (int,)}), TypeError),
        (lambda: FastPath(**Planner().parts() | {"exchange": 1}), ValueError),
        (lambda: FastPath(**Planner().parts() | {"observers": [len]}), TypeError),
        (lambda: FastPath(**Planner().parts() | {"backends": []}), TypeError),
    ],
)
def test_wrong_arguments(call: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error):
        call()
