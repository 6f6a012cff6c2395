"""What the fast path launches: pointers, sizes and results, on a driver of callbacks in a process of its own."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from forked import captured
from torch import Tensor

pytestmark = pytest.mark.skipif(
    not hasattr(Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no table of DLPack's"
)

#: A driver of callbacks, whose launches are on the CPU's memory.
DRIVER = """
import ctypes, json
from ctypes import CFUNCTYPE, POINTER, c_int, c_ubyte, c_size_t, c_uint, c_uint64, c_void_p
import torch
from scan_registry.hardware import _launcher
from scan_registry.kernels.linear_scan.op import plans
from scan_registry.ops import call

said, status, context = [], 0, 1000

def launch(function, *rest):
    *shape, stream, parameters, extra = rest
    return launched(function, shape, stream, parameters, extra)

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
"""


def run(script: str, tmp_path: Any) -> Any:
    done = captured([sys.executable, "-c", DRIVER + script], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


#: What launches are given, and the results.
LAUNCHES = """
def launched(function, shape, stream, parameters, extra):
    values = [ctypes.cast(parameters[i], POINTER(c_uint64))[0] for i in range(10)]
    said.append(["launch", function, shape, stream, values, extra])
    return status

LAST = ((3,), (1,), torch.float32)

def plan(workspace=None, last=None, **others):
    zeroed = {"workspace": 6 if workspace else -1, "workspace_bytes": 64 if workspace else 0}
    launch = _launcher.Launch(context=1000, function=7, grid=(2, 3, 4), block=(32, 1, 1), shared=5,
                              pointers=7, scalars=(11, -1), hidden=1, **zeroed)
    made = []
    def empty(*arguments):
        made.append(torch.empty_strided(*arguments[:2], dtype=arguments[2]))
        return made[-1]
    parts = {
        "launch": launch, "places": (0, 2, 1, 5, 3, 4) if last else (0, 2, 1, 5, 3), "empty": empty,
        "results": (((2, 3), (1, 2), torch.float64), *([last] if last else [])), "workspace": workspace,
        "refuse": lambda status: None, "elsewhere": lambda *tensors: "elsewhere"}
    return made, _launcher.FastLaunch(**{**parts, **others})

other = _launcher.Launch(1000, 7, (1, 1, 1), (1, 1, 1), 0, 7, (), 0, 6, 64)
gates, tokens, state = torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2)
bounds = torch.zeros(3, dtype=torch.int64)
found = {}

def scan(made, launch, *others):
    calls = _launcher.FastPath(
        types=call.PLAIN_TYPES, tensor=torch._C.TensorBase,
        exchange=torch.Tensor.__dlpack_c_exchange_api__, observers=call.OBSERVERS,
        choice=lambda: None, plan=lambda *request: launch, tracking=lambda: False)
    said.clear()
    try:
        result = calls.run((gates, tokens, *(others or (None, None))), ())
    except Exception as error:
        return [type(error).__name__, str(error)]
    places = {each.data_ptr(): name for name, each in
              {"gates": gates, "tokens": tokens, "state": state, "bounds": bounds,
               **{f"made {n}": m for n, m in enumerate(made)}}.items()}
    for each in said:
        if each[0] == "launch":
            each[4] = [places.get(value, value) for value in each[4]]
        else:
            each[1] = places[each[1]]
    if result == "elsewhere":
        return [result, *said]
    if isinstance(result, tuple):
        return [[one is other for one, other in zip(result, made)],
                result[1].shape == LAST[0] and result[1].dtype == LAST[2], *said]
    return [result is made[0], result.stride(), *said]

def refuse(status):
    raise OSError(f"status {status}")

def wrong(**parts):
    try:
        plan(**parts)
    except (ValueError, TypeError) as error:
        return str(error)

ROOM = ((64,), (1,), torch.uint8)
found["plain"] = scan(*plan())
found["zeroed"] = scan(*plan(ROOM))
found["given all"] = scan(*plan(), state, bounds)
found["two results"] = scan(*plan(last=LAST), state, None)
found["zeroed two"] = scan(*plan(ROOM, last=LAST), None, bounds)
status = 701
found["refused"] = scan(*plan(refuse=refuse))
found["refused in silence"] = scan(*plan(last=LAST))
status, context = 0, 2000
found["elsewhere"] = scan(*plan())
found["of fewer tensors"] = scan(*plan(places=(0, 2, 3)))
found["wrong places"] = wrong(places=(0, 2, 1, 5, 7))
found["wrong workspace"] = wrong(launch=other)
found["wrong last"] = wrong(last=3)
told = []
context = 1000
found["recorded"] = scan(*plan(record=lambda *all: told.append(all) or all[0][1][0], recording="kept"))
found["told"] = [each is other for each, other in zip(told[0][1:], (gates, tokens, None, None), strict=True)]
context = 3000
scan(*plan(record=lambda *all: told.append(all) or all[0][1][0], recording="kept"))
found["told elsewhere"] = told[1][0]
found["no places"] = wrong(places=(0,), last=LAST)
print(json.dumps(found))
"""


def test_launches(tmp_path: Any) -> None:
    found = run(LAUNCHES, tmp_path)

    def launched(**places: Any) -> list[Any]:
        names = ("gates", "state", "tokens", "states", "last", "bounds", "room")
        values = [places.get(name, 0) for name in names]
        shape = [2, 3, 4, 32, 1, 1, 5]
        return ["launch", 7, shape, None, [*values, 11, 2**64 - 1, 0], None]

    both = {"gates": "gates", "tokens": "tokens", "states": "made 0"}
    assert found["plain"] == [True, [1, 2], launched(**both)]
    zeroed = ["zero", "made 1", 0, 64, None]
    assert found["zeroed"] == [True, [1, 2], zeroed, launched(**both, room="made 1")]
    every = {**both, "state": "state", "bounds": "bounds"}
    assert found["given all"] == [True, [1, 2], launched(**every)]
    two = {**both, "state": "state", "last": "made 1"}
    assert found["two results"] == [[True, True], True, launched(**two)]
    zeroed[1] = "made 2"
    two = {**both, "bounds": "bounds", "last": "made 1", "room": "made 2"}
    assert found["zeroed two"] == [[True, True], True, zeroed, launched(**two)]
    assert found["refused"] == ["OSError", "status 701"]
    assert found["refused in silence"] == ["RuntimeError", "the launch failed with status 701"]
    assert found["elsewhere"] == ["elsewhere"]
    assert found["of fewer tensors"] == ["TypeError", "a launch of 2 tensors"]
    assert found["wrong places"] == "place 7 of 7 pointers"
    assert "workspace" in found["wrong workspace"]
    assert found["wrong last"].endswith("is no tuple")
    assert found["no places"].startswith("1 places of tensors")
    assert found["recorded"] == found["plain"]
    assert found["told"] == [True] * 4
    assert found["told elsewhere"] == ["kept", ["elsewhere"]]


#: Scans whose launches the kernels of the CPU do, by the values that a launch has. What is planned, launched and returned is
#: what a GPU would get.
SCANS = """
import itertools
from scan_registry import linear_scan
from scan_registry.ops import _cpu
from scan_registry.kernels.linear_scan.spec import parameters

problems = []

def launched(function, shape, stream, parameters_, extra):
    problem, pointers, numbers = problems[function - 1]
    values = [ctypes.cast(parameters_[i], POINTER(c_uint64))[0] for i in range(len(pointers) + len(numbers))]
    said.append(problem)
    addresses = tuple(value or None for value in values[: len(pointers)])
    _cpu.forward(problem.dtype, problem.gates_dtype, addresses, numbers, 1)
    return status

class Plan:
    workspace, refuse, decision = 0, None, None

    def __init__(self, index, family, problem, backend, lowest):
        pointers, scalars = plans.POINTERS["forward"], problem.scalars()
        numbers = tuple(scalars[p.name] for p in parameters("forward") if p.kind == "i64")
        problems.append((problem, pointers, numbers))
        self.launch = _launcher.Launch(context, len(problems), (1, 1, 1), (1, 1, 1), 0, len(pointers),
                                       numbers, 0, -1, 0)

plans.prepare = Plan
plans.on_gpu = lambda tensor: True
call._empty = torch._C._dynamo.guards._empty_strided_cpu
plans.forward = None  # nothing else may run forwards

def close(one, other, slack):
    return one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=slack, atol=slack)

def steps(gates, tokens, state, dim, reverse, bounds):
    # The recurrence, one step after the other, and the states after the last steps.
    gates, tokens = (each.expand(shape).unbind(dim) for each in (gates, tokens))
    states, ends = [None] * T, []
    for number, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        x = torch.zeros_like(tokens[0]) if state is None else state.select(dim, number)
        for t in reversed(range(begin, end)) if reverse else range(begin, end):
            x = states[t] = gates[t] * x + tokens[t]
        ends.append(x)
    return torch.stack(states, dim), torch.stack(ends, dim)

torch.manual_seed(0)
B, T, D = 2, 7, 8
bounds = torch.tensor([0, 3, 3, T])
gathered = {"count": 0, "wrong": [], "calls": 0}
for dtypes, dim, reverse, final, with_state, packed, of_gates, tracked in itertools.product(
        ((torch.float32,) * 2, (torch.float32, torch.bfloat16)), (1, -1), (False, True), (False, True),
        (False, True), (False, True), ("full", "channel"), (False, True)):
    if packed and final:
        continue  # left to Python, whose launches are not these
    if (dtypes[1] == torch.float32) ^ (dim == 1) ^ reverse ^ final ^ with_state ^ packed ^ (of_gates == "full") ^ tracked:
        continue  # of all, half, in which every few options occur together
    shape = (B, T, D) if dim == 1 else (B, D, T)
    few = shape if of_gates == "full" else ((D,) if dim == 1 else (D, 1))
    gates = torch.rand(few).to(dtypes[0]).requires_grad_(tracked)
    tokens = torch.randn(shape).to(dtypes[1]).requires_grad_(tracked)
    at = 1 if dim == 1 else 2
    of_state = [*shape]
    if packed:
        of_state[at] = len(bounds) - 1
    else:
        del of_state[at]
    state = torch.randn(of_state).requires_grad_(tracked) if with_state else None
    options = {"dim": dim, "reverse": reverse, "cu_seqlens": bounds if packed else None,
               "return_final_state": final}
    name = [str(each) for each in (*dtypes, dim, reverse, final, with_state, packed, of_gates, tracked)]
    for again in range(2):
        said.clear()
        result = linear_scan(gates, tokens, state, **options)
        gathered["calls"] += 1
        gathered["count"] += len(said)
    results = result if final else (result,)
    wide = [None if each is None else each.detach().double().requires_grad_() for each in (gates, tokens, state)]
    start = wide[2] if packed or wide[2] is None else wide[2].unsqueeze(dim)
    expected, last = steps(*wide[:2], start, dim, reverse, bounds.tolist() if packed else [0, T])
    last = last if packed else last.squeeze(dim)
    slack = 1e-5 if dtypes[1] == torch.float32 else 2e-2
    if not close(results[0], expected, slack):
        gathered["wrong"].append(["states", *name])
    if final and not close(results[1], last, slack):
        gathered["wrong"].append(["last", *name])
    if [each.requires_grad for each in results] != [tracked] * len(results):
        gathered["wrong"].append(["tracked", *name])
    if tracked:
        for used in ([0], [1], [0, 1]) if final else ([0],):
            pairs = [(results[i], (expected, last)[i]) for i in used]
            weights = [torch.randn_like(two) for _, two in pairs]
            ours = torch.autograd.grad([one for one, _ in pairs], [e for e in (gates, tokens, state) if e is not None],
                                       [w.to(one.dtype) for (one, _), w in zip(pairs, weights)], retain_graph=True)
            theirs = torch.autograd.grad([two for _, two in pairs], [e for e in wide if e is not None],
                                         [w.to(one.dtype).double() for (one, _), w in zip(pairs, weights)],
                                         retain_graph=True)
            if not all(close(one, other, 10 * slack) for one, other in zip(ours, theirs)):
                gathered["wrong"].append([f"gradients {used}", *name])
gathered["launches of options"] = len({(p.reverse, p.sequences > 0) for p, *_ in problems})
gathered["plans"] = len(problems)
print(json.dumps(gathered))
"""


def test_scans_with_options(tmp_path: Any) -> None:
    """States in and out, both directions, packed sequences, gates that are broadcast or wider: each call is one launch, and
    results and gradients are those of the reference in float64."""
    found = run(SCANS, tmp_path)
    assert found["wrong"] == []
    assert found["count"] == found["calls"] == 2**7 * 3 // 2
    assert found["launches of options"] == 4
    assert found["plans"] <= found["calls"] // 2
