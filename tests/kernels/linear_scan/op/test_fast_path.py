"""The fast path: which calls take it, and what a plan depends on."""

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
from scan_registry.kernels.linear_scan.op.autograd import fast_scan
from scan_registry.ops import call as engine
from scan_registry.ops.autograd import Recorded
from scan_registry.ops.call import OBSERVERS, PLAIN_TYPES
from scan_registry.ops.launching import MOST_PLANS

pytestmark = pytest.mark.skipif(
    not hasattr(Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no table of DLPack's"
)


class Anything:
    pass


class Planner:
    """Calls on the fast path that return the numbers of their plans, with the tensors."""

    def __init__(self, **parts: Any) -> None:
        self.requests: list[Any] = []
        self.choice: object = None
        self.calls = FastPath(**self.parts() | parts)

    def parts(self) -> dict[str, Any]:
        return {
            "types": PLAIN_TYPES,
            "tensor": torch._C.TensorBase,
            "exchange": getattr(Tensor, "__dlpack_c_exchange_api__", None),
            "observers": OBSERVERS,
            "choice": lambda: self.choice,
            "plan": self.plan,
            "tracking": torch.is_grad_enabled,
        }

    def plan(self, *request: Any) -> Any:
        number = len(self.requests)
        self.requests.append(request)
        return lambda *tensors: (number, tensors)

    def __call__(self, *tensors: Any, options: tuple[Any, ...] = ()) -> Any:
        result = self.calls.run(tensors, options)
        return result if result is None else result[0]


class InPython(Planner):
    """The same in Python, for versions of torch that have no table of DLPack's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = engine._PathInPython(self.plan)  # type: ignore[assignment]


PLAIN = memory(2, 3)
INDICES = memory(3, dtype=torch.int32)
PLANNERS = pytest.mark.parametrize("make", [Planner, InPython], ids=["C", "Python"])


@PLANNERS
def test_a_call_is_planned_once(make: Callable[[], Planner]) -> None:
    planner, tensors, options = make(), (PLAIN, None, INDICES), (1, "cuda", True, None, 0.5)
    assert [planner(*tensors, options=options) for _ in range(3)] == [0, 0, 0]
    assert planner.requests == [(False, tensors, options)]
    number, given = planner.calls.run(tensors, options)
    assert number == 0
    assert all(one is other for one, other in zip(given, tensors, strict=True))


@PLANNERS
def test_a_call_whose_plan_is_none_is_left_to_others(
    make: Callable[[], Planner], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[Any] = []
    monkeypatch.setattr(Planner, "plan", lambda self, *request: requests.append(request))
    planner = make()
    assert [planner(PLAIN, PLAIN) for _ in range(3)] == [None] * 3
    assert len(requests) == 1


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
    planner = Planner(choice=lambda: choices[-1])
    planner(PLAIN, PLAIN)
    choices[:] = [Anything()]
    assert kept() is not None  # as what takes its place in memory would have its plans
    planner.calls = Planner().calls
    assert kept() is None


@PLANNERS
def test_calls_that_autograd_records_have_plans_of_their_own(make: Callable[[], Planner]) -> None:
    tracked = torch.nn.Parameter(memory(2, 3))
    for tensors in ((tracked, PLAIN, None), (PLAIN, tracked, PLAIN), (PLAIN, PLAIN, tracked)):
        planner = make()
        planner(*tensors)
        with torch.no_grad():
            planner(*tensors)
        planner(*[None if t is None else PLAIN for t in tensors])
        assert [recorded for recorded, *_ in planner.requests] == [True, False]


def test_what_planning_raises_is_raised() -> None:
    def fail(*args: Any) -> Any:
        raise LookupError(len(args))

    tracked = torch.nn.Parameter(memory(2, 3))
    for name, count in (("plan", 3), ("choice", 0), ("tracking", 0), ("observers", 0)):
        planner = Planner(**{name: (fail,) if name == "observers" else fail})
        with pytest.raises(LookupError, match=str(count)):
            planner(tracked, PLAIN)


def test_what_torch_asks_a_derivative_for_is_as_torch_has_it() -> None:
    """``Recorded`` repeats it only for it to be found sooner."""
    function = torch.autograd.Function
    assert Recorded.setup_context is function.setup_context
    for name in ("clear_saved_tensors_on_access", "boxed_grads_call"):
        assert getattr(Recorded, name) == getattr(function, name, False)


@PLANNERS
def test_options_go_by_their_values_and_types(make: Callable[[], Planner]) -> None:
    planner = make()
    options: list[tuple[Any, ...]] = [
        (), (None,), (None, None), (1,), (-1,), (2**62,), (True,), (False,), (0,), (1.0,), (0.5,),
        ("",), ("a",), ("b",), ("ab",), ("a\0",), ("eight ch",), ("eight chx",), ("a", ""),
        ("", "a"), (1, 2), (2, 1), ("é",), ("x" * 100,), ("x" * 101,),
    ]  # fmt: skip
    for _ in range(2):
        found = [planner(PLAIN, options=each) for each in options]
        assert found == [*range(len(options))]
    assert planner(PLAIN, options=(int("-1"),)) == 4
    assert planner(PLAIN, options=("".join(["a", "b"]),)) == 14
    for other in (["cuda"], np.bool_(True), (1,), object()):
        assert planner(PLAIN, options=(other,)) is None


def test_options_that_a_key_has_no_room_for() -> None:
    planner = Planner()
    for option in (2**64, "x" * 10_000, "\ud800"):
        assert planner(PLAIN, options=(option,)) is None
    assert planner(PLAIN, options=(1,) * 200) is None
    assert planner(*[memory(*[1] * 16)] * 16) is None
    assert not planner.requests


def test_what_planning_a_scan_raises_is_raised() -> None:
    with pytest.raises(ValueError, match="dim is 5"):
        fast_scan((memory(2, 3), memory(2, 3), None, None), (5, False, False, "auto"))


@PLANNERS
def test_equal_calls_have_equal_plans_and_others_have_not(make: Callable[[], Planner]) -> None:
    first = memory(4, 8)
    calls: dict[str, tuple[Any, ...]] = {
        "plain": (first, memory(4, 8)),
        "another dtype": (memory(4, 8).half(), memory(4, 8).half()),
        "of the same size": (memory(4, 8).bfloat16(), memory(4, 8).bfloat16()),
        "wide": (memory(4, 8, dtype=torch.float64), memory(4, 8, dtype=torch.float64)),
        "another shape": (memory(8, 4), memory(8, 4)),
        "another rank": (memory(32), memory(32)),
        "the first one's strides": (memory(8, 4).T, memory(4, 8)),
        "the second one's strides": (memory(4, 8), memory(8, 4).T),
        "the first one's alignment": (memory(4, 8, off=1), memory(4, 8)),
        "the second one's alignment": (memory(4, 8), memory(4, 8, off=1)),
        "another alignment": (memory(4, 8), memory(4, 8, off=2)),
        "the first one's dtype": (memory(4, 8), memory(4, 8).half()),
        "a missing tensor": (first, None),
        "another missing tensor": (None, first),
        "a third tensor": (first, first, first),
        "a third that is missing": (first, first, None),
        "int32": (first, memory(4, dtype=torch.int32)),
        "int64": (first, memory(4, dtype=torch.int64)),
        "bool": (first, memory(4, 8).bool()),
        "uint8": (first, memory(4, 8).to(torch.uint8)),
    }
    planner = make()
    found = {name: planner(*tensors) for name, tensors in calls.items()}
    planner.choice = object()
    if make is Planner:
        found["another choice"] = planner(*calls["plain"])
    planner.choice = None
    for one, other in combinations(found, 2):
        assert found[one] != found[other], (one, other)
    again = planner(torch.nn.Parameter(memory(4, 8), requires_grad=False), memory(4, 8))
    assert again == found["plain"]


class Subclass(Tensor):
    pass


OTHERS: dict[str, Any] = {
    "complex": PLAIN.to(torch.complex64),
    "a lazy negation": torch._neg_view(PLAIN),
    "zeros without memory": torch._efficientzerotensor((2, 3)),
    "nothing": PLAIN[:0],
    "no memory": PLAIN.to("meta"),
    "sparse": PLAIN.to_sparse(),
    "a subclass": PLAIN.as_subclass(Subclass),
    "no tensor": 3.0,
}


@PLANNERS
@pytest.mark.parametrize("name", OTHERS)
def test_what_does_not_take_the_fast_path(name: str, make: Callable[[], Planner]) -> None:
    planner = make()
    for place in range(3):
        tensors = [PLAIN] * 3
        tensors[place] = OTHERS[name]
        assert planner(*tensors) is None
    assert planner(None, None) is None
    assert planner() is None
    assert not planner.requests


def test_tensors_of_many_dimensions_do_not_take_the_fast_path() -> None:
    planner = Planner()
    assert planner(memory(*[1] * 17)) is None
    assert planner(*[PLAIN] * 17) is None
    assert planner(memory(*[1] * 16)) == 0


class Mode(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


@PLANNERS
def test_dispatch_has_to_be_trivial(make: Callable[[], Planner]) -> None:
    planner = make()
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
    assert Planner(**missing)(PLAIN, PLAIN) is None


@pytest.mark.parametrize("observing", range(3))
def test_every_observer_is_asked(observing: int) -> None:
    told = [False] * 3
    planner = Planner(observers=tuple(lambda i=i: told[i] for i in range(3)))
    assert planner(PLAIN, PLAIN) == 0
    told[observing] = True
    assert planner(PLAIN, PLAIN) is None


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: Planner().calls.run((PLAIN,)), TypeError),  # type: ignore[call-arg]
        (lambda: Planner().calls.run([PLAIN], ()), TypeError),  # type: ignore[arg-type]
        (lambda: Planner(types=[]), TypeError),
        (lambda: Planner(types=(int,)), TypeError),
        (lambda: Planner(exchange=1), ValueError),
        (lambda: Planner(observers=[len]), TypeError),
    ],
)
def test_wrong_arguments(call: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error):
        call()
