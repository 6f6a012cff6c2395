"""The fast path: which calls take it, what a plan depends on, and what is launched for one."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scan_registry import linear_scan
from scan_registry.hardware._launcher import FastPath
from scan_registry.ops import fast_path
from scan_registry.ops.launching import MOST_PLANS

pytestmark = pytest.mark.skipif(
    not hasattr(Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no table of DLPack's"
)


def memory(*shape: int, dtype: torch.dtype = torch.float32, off: int = 0) -> Tensor:
    """On the 16-byte grid, or ``off`` elements from it."""
    room = torch.zeros(torch.Size(shape).numel() + 16, dtype=dtype)
    first = -room.data_ptr() // room.element_size() % 16 + off
    return room[first:][: torch.Size(shape).numel()].view(shape)


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
        return lambda gates, tokens: number

    def record(self, *told: Any) -> Any:
        self.recorded.append(told)
        return "recorded"

    def __call__(self, gates: Any, tokens: Any, dim: Any = -1, backend: Any = "auto") -> Any:
        return self.calls.run(gates, tokens, dim, backend)


def test_a_call_is_planned_once() -> None:
    planner, gates, tokens = Planner(), memory(2, 3), memory(2, 3)
    planner.choice = object()
    assert [planner(gates, tokens, 1, "cuda") for _ in range(3)] == [0, 0, 0]
    ((*tensors, dim, backend),) = planner.requests
    assert all(one is other for one, other in zip(tensors, (gates, tokens), strict=True))
    assert (dim, backend) == (1, "cuda")
    assert not planner.recorded


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
    parts = {"choice": lambda: choices[-1], "plan": lambda *call: lambda gates, tokens: 0}
    calls = FastPath(**Planner().parts() | parts)
    calls.run(PLAIN, PLAIN, -1, "auto")
    choices[:] = [Anything()]
    assert kept() is not None  # as what takes its place in memory would have its plans
    del calls
    assert kept() is None


def test_autograd_is_told_where_a_tensor_requires_gradients() -> None:
    planner, tracked = Planner(), torch.nn.Parameter(memory(2, 3))
    planner.choice = object()
    for gates, tokens in ((tracked, PLAIN), (PLAIN, tracked), (tracked, tracked)):
        assert planner(gates, tokens, 1, "cuda") == "recorded"
        (told,) = planner.recorded
        assert told[0] is gates
        assert told[1] is tokens
        assert told[2] == (0, (1, "cuda", planner.choice))
        planner.recorded.clear()
        with torch.no_grad():
            assert planner(gates, tokens, 1, "cuda") == 0
    assert not planner.recorded


def test_what_recording_and_planning_raise_is_raised() -> None:
    def fail(*args: Any) -> Any:
        raise LookupError(len(args))

    tracked = torch.nn.Parameter(memory(2, 3))
    for name, count in (("record", 3), ("plan", 4), ("choice", 0), ("tracking", 0)):
        calls = FastPath(**Planner().parts() | {name: fail})
        with pytest.raises(LookupError, match=str(count)):
            calls.run(tracked, PLAIN, -1, "auto")


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


def test_what_planning_raises_is_raised() -> None:
    with pytest.raises(ValueError, match="dim is 5"):
        fast_path.fast_scan(memory(2, 3), memory(2, 3), 5, "auto")


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
    }
    planner = Planner()
    found = {name: planner(*pair) for name, pair in pairs.items()}
    found["another dim"] = planner(*pairs["plain"], 0)
    found["another backend"] = planner(*pairs["plain"], -1, "cuda")
    planner.choice = object()
    found["another choice"] = planner(*pairs["plain"])
    planner.choice = None
    for one, other in combinations(found, 2):
        assert found[one] != found[other], (one, other)
    again = planner(torch.nn.Parameter(memory(4, 8), requires_grad=False), memory(4, 8))
    assert again == found["plain"]


class Subclass(Tensor):
    pass


PLAIN = memory(2, 3)
OTHERS: dict[str, tuple[Any, Any]] = {
    "shapes that broadcast": (memory(1, 3), PLAIN),
    "shapes of one size": (memory(3, 2), PLAIN),
    "dtypes that mix": (PLAIN, PLAIN.half()),
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
    assert FastPath(**Planner().parts() | missing).run(PLAIN, PLAIN, -1, "auto") is None


@pytest.mark.parametrize("observing", range(3))
def test_every_observer_is_asked(observing: int) -> None:
    told = [False] * 3
    planner = Planner()
    observers = tuple(lambda i=i: told[i] for i in range(3))
    calls = FastPath(**planner.parts() | {"observers": observers})
    assert calls.run(PLAIN, PLAIN, -1, "auto") == 0
    told[observing] = True
    assert calls.run(PLAIN, PLAIN, -1, "auto") is None


def test_what_observers_raise_is_raised() -> None:
    def fail() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        FastPath(**Planner().parts() | {"observers": (fail,)}).run(PLAIN, PLAIN, -1, "auto")


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


# --- Launches ---------------------------------------------------------------------------------

#: A driver of callbacks, whose launches are on the CPU's memory: what they are given, and the results.
LAUNCHES = """
import ctypes, json
from ctypes import CFUNCTYPE, POINTER, c_int, c_ubyte, c_size_t, c_uint, c_uint64, c_void_p
import torch
from scan_registry.hardware import _launcher
from scan_registry.ops import fast_path

said, status, context = [], 0, 1000

def launch(function, *rest):
    *shape, stream, parameters, extra = rest
    values = [ctypes.cast(parameters[i], POINTER(c_uint64))[0] for i in range(8)]
    said.append(["launch", function, shape, stream, values, extra])
    return status

def zero(pointer, value, size, stream):
    said.append(["zero", pointer, value, size, stream])
    return 0

def current(into):
    into[0] = context
    return 0

driver = [
    CFUNCTYPE(c_int, c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p), c_void_p)(launch),
    CFUNCTYPE(c_int, c_uint64, c_ubyte, c_size_t, c_void_p)(zero),
    CFUNCTYPE(c_int, POINTER(c_void_p))(current),
    CFUNCTYPE(c_int, c_void_p)(lambda context: 999),
    CFUNCTYPE(c_int, POINTER(c_void_p))(lambda context: 999),
]
_launcher.bind(*[ctypes.cast(each, c_void_p).value for each in driver])

def plan(workspace=None, **others):
    zeroed = {"workspace": 4 if workspace else -1, "workspace_bytes": 64 if workspace else 0}
    launch = _launcher.Launch(context=1000, function=7, grid=(2, 3, 4), block=(32, 1, 1), shared=5,
                              pointers=5, scalars=(11, -1), hidden=1, **zeroed)
    made = []
    def empty(*arguments):
        made.append(torch.empty_strided(*arguments[:2], dtype=arguments[2]))
        return made[-1]
    parts = {
        "launch": launch, "places": (0, 2, 3), "empty": empty,
        "states": ((2, 3), (1, 2), torch.float64), "workspace": workspace,
        "refuse": lambda status: None, "elsewhere": lambda gates, tokens: "elsewhere"}
    return made, _launcher.FastLaunch(**{**parts, **others})

other = _launcher.Launch(1000, 7, (1, 1, 1), (1, 1, 1), 0, 5, (), 0, 4, 64)
gates, tokens = torch.zeros(2, 3), torch.zeros(2, 3)
found = {}

def scan(made, launch):
    calls = _launcher.FastPath(
        types=fast_path.PLAIN_TYPES, tensor=torch._C.TensorBase,
        exchange=torch.Tensor.__dlpack_c_exchange_api__, observers=fast_path.OBSERVERS,
        backends=("auto",), choice=lambda: None, plan=lambda *call: launch,
        tracking=lambda: False, record=None)
    said.clear()
    try:
        states = calls.run(gates, tokens, -1, "auto")
    except Exception as error:
        return [type(error).__name__, str(error)]
    places = {each.data_ptr(): name for name, each in
              {"gates": gates, "tokens": tokens, **{f"made {n}": m for n, m in enumerate(made)}}.items()}
    for each in said:
        if each[0] == "launch":
            each[4] = [places.get(value, value) for value in each[4]]
        else:
            each[1] = places[each[1]]
    if states == "elsewhere":
        return [states, *said]
    return [states is made[0], states.stride(), *said]

def refuse(status):
    raise OSError(f"status {status}")

found["plain"] = scan(*plan())
found["zeroed"] = scan(*plan(((64,), (1,), torch.uint8)))
status = 701
found["refused"] = scan(*plan(refuse=refuse))
found["refused in silence"] = scan(*plan())
status, context = 0, 2000
found["elsewhere"] = scan(*plan())
for name, wrong in {"places": {"places": (0, 2, 5)}, "workspace": {"launch": other}}.items():
    try:
        plan(**wrong)
    except ValueError as error:
        found[f"wrong {name}"] = str(error)
print(json.dumps(found))
"""


def test_launches(tmp_path: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHES],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    found = json.loads(done.stdout)
    values = ["gates", 0, "tokens", "made 0", 0, 11, 2**64 - 1, 0]
    launched = ["launch", 7, [2, 3, 4, 32, 1, 1, 5], None, values, None]
    assert found["plain"] == [True, [1, 2], launched]
    zeroed = ["launch", 7, launched[2], None, [*values[:4], "made 1", *values[5:]], None]
    assert found["zeroed"] == [True, [1, 2], ["zero", "made 1", 0, 64, None], zeroed]
    assert found["refused"] == ["OSError", "status 701"]
    assert found["refused in silence"] == ["RuntimeError", "the launch failed with status 701"]
    assert found["elsewhere"] == ["elsewhere"]
    assert found["wrong places"] == "place 5 of 5 pointers"
    assert "workspace" in found["wrong workspace"]
