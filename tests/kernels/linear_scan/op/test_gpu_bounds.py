"""``linear_scan`` on a GPU with bounds of sequences that are none: nothing else is touched."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import scan_registry
from scan_registry.kernels.linear_scan.op import plans
from scan_registry.kernels.linear_scan.op.problems import (
    StateLayout,
    make_kernel_call,
    make_reduction_call,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BACKENDS = ("cuda", "triton")


@pytest.fixture(autouse=True)
def seeded(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.delenv("SCAN_REGISTRY_DEBUG", raising=False)


def inputs(*shape):
    tensors = torch.rand(shape, device=DEVICE), torch.randn(shape, device=DEVICE)
    return [t.requires_grad_() for t in tensors]


MALFORMED = [
    [0, 700, 100, 1000],
    [1000, 0],
    [0, 1001],
    [0, 10**9],
    [-1, 1000],
    [-(10**9), 1000],
    [0, 2**40, 1000],
    [0, -(2**40), 1000],
    [2**62, -(2**62), 2**62, 1000],
    [-(2**63), 2**63 - 1],
    [500, 600],
    [0, 0, 0],
    [1000, 1000],
    [0, 999, 998, 997, 1000, 1, 2, 3, 1000, 0],
]
WELL_FORMED = [0, 3, 1000]


class Arena:
    """Memory full of a pattern, with room for tensors far from one another."""

    PATTERN = 0xA5

    def __init__(self, size):
        self.bytes = torch.full((size,), self.PATTERN, dtype=torch.uint8, device=DEVICE)
        self.used = 0
        self.written = []

    def room(self, shape, strides, dtype, *, output=False):
        """An uninitialised tensor; unless it is an ``output``, it must not change any more."""
        extent = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        begin = self.used + 2**18
        size = extent * dtype.itemsize
        self.used = -(-(begin + size) // 256) * 256
        assert self.used + 2**18 <= len(self.bytes)
        if output:
            self.written.append(slice(begin, begin + size))
        return self.bytes[begin : begin + size].view(dtype).as_strided(shape, strides)

    def holding(self, tensor):
        strides = torch.empty_like(tensor).stride()
        return self.room(tensor.shape, strides, tensor.dtype).copy_(tensor)

    def untouched(self):
        """How many elements of float32 outputs were not written."""
        word = int.from_bytes(bytes([self.PATTERN] * 4), "little", signed=True)
        return sum(int((self.bytes[p].view(torch.int32) == word).sum()) for p in self.written)

    def surroundings(self):
        """All bytes but those of outputs, which read as 0."""
        bytes_around = self.bytes.clone()
        for place in self.written:
            bytes_around[place] = 0
        return bytes_around


def launches(arena, backend, dim, bounds, of_gates, reverse):
    """A forward, a backward and, for broadcast gates, a reduction kernel, on tensors of the arena."""
    shape = (2, 48, 1000) if dim == 2 else (2, 1000, 48)
    gates = arena.holding(torch.rand(of_gates or shape, device=DEVICE))
    tokens, states, grad = (arena.holding(torch.randn(shape, device=DEVICE)) for _ in range(3))
    room = StateLayout.of(torch.empty_like(tokens), dim, bounds)
    bounds = arena.holding(bounds)

    def state(output=False):
        made = arena.room(room.shape, room.strides, torch.float32, output=output)
        return made if output else made.normal_()

    def out(like):
        return arena.room(like.shape, like.stride(), like.dtype, output=True)

    device = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)
    options = bounds, dim, reverse
    call = make_kernel_call("forward", gates, {"tokens": tokens}, *options)
    given = {"gates": gates, "tokens": tokens, "initial_state": state(), "offsets": bounds}
    yield call, device, {**given, "states": out(tokens), "final_state": state(True)}

    both = {"states": states, "states_grad": grad}
    call = make_kernel_call("backward", gates, both, *options)
    given = {"gates": gates, **both, "offsets": bounds}
    given |= {"initial_state": state(), "final_state_grad": state()}
    given |= {"tokens_grad": out(grad), "initial_state_grad": state(True)}
    yield call, device, {**given, "gates_grad": None if of_gates else out(grad)}

    if of_gates:
        call = make_reduction_call(gates, states, *options)
        pieces = (call.problem.reduction().pieces, *gates.shape)
        partial_sums = torch.empty(pieces, device="meta")
        given = {"tokens_grad": grad, "states": states, "initial_state": state()}
        yield call, device, {**given, "gates_grad": out(partial_sums), "offsets": bounds}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("of_gates", [None, (1,), "per channel"], ids=str)
@pytest.mark.parametrize("reverse", [False, True], ids=["", "reverse"])
def test_malformed_bounds_touch_nothing_else(reverse, of_gates, dim, backend):
    """Every byte around the outputs stays as it was, and nothing hangs. The outputs are written where
    the bounds are right."""
    if of_gates == "per channel":
        of_gates = (48, 1) if dim == 2 else (48,)
    for values in (*MALFORMED, WELL_FORMED):
        arena = Arena(32 << 20)
        bounds = torch.tensor(values, device=DEVICE)
        for call, device, tensors in launches(arena, backend, dim, bounds, of_gates, reverse):
            assert not call.copied
            run = plans.runner(call.problem, device, backend)
            assert callable(run)
            before = arena.surroundings()
            run(tensors)
            torch.cuda.synchronize()
            assert torch.equal(arena.surroundings(), before), values
        assert values != WELL_FORMED or arena.untouched() == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dim", [1, 2])
def test_malformed_bounds_leave_the_device_alive(dim, backend):
    """Through the public function, to the second derivative; what follows is right."""
    shape = (2, 48, 1000) if dim == 2 else (2, 1000, 48)
    tensors = inputs(*shape)
    scan = partial(scan_registry.linear_scan, dim=dim, backend=backend)
    expected = scan(*tensors)
    for values in MALFORMED:
        bounds = torch.tensor(values, device=DEVICE)
        states = scan(*tensors, cu_seqlens=bounds)
        grads = torch.autograd.grad(states.sum(), tensors, create_graph=True)
        torch.autograd.grad(grads[0].sum(), tensors)
        torch.cuda.synchronize()
    assert torch.equal(scan(*tensors), expected)


def test_bounds_are_checked_on_demand(monkeypatch):
    """Under SCAN_REGISTRY_DEBUG, at the price of waiting for the GPU."""
    gates, tokens = inputs(2, 9)
    words = "it must rise from 0 to the 9 steps of the time dimension"
    monkeypatch.setenv("SCAN_REGISTRY_DEBUG", "1")
    for values, how in (
        ([0, 5, 3, 9], "falls from .*"),
        ([0, 10], "runs from 0 to 10"),
        ([1, 9], "runs from 1 to 9"),
    ):
        with pytest.raises(ValueError, match=f"cu_seqlens {how}; {words}"):
            scan_registry.linear_scan(gates, tokens, cu_seqlens=torch.tensor(values, device=DEVICE))
    bounds = torch.tensor([0, 4, 9], device=DEVICE)
    checked = scan_registry.linear_scan(gates, tokens, cu_seqlens=bounds)
    monkeypatch.delenv("SCAN_REGISTRY_DEBUG")
    assert torch.equal(checked, scan_registry.linear_scan(gates, tokens, cu_seqlens=bounds))
