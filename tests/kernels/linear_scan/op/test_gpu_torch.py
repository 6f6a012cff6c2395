"""``linear_scan`` on a GPU among torch's own: graphs, streams, threads, torch.compile."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from gpu_scans import inputs, with_states
from graphs import recorded
from processes import captured

import scan_registry

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("seeded")]

DEVICE = "cuda"
BACKENDS = ("cuda", "triton")


def training_step(tensors, dim, bounds, **options):
    scan = partial(scan_registry.linear_scan, dim=dim, cu_seqlens=bounds, **options)
    states, last = scan(*tensors, return_final_state=True)
    weights = torch.cos(states.detach()), torch.cos(last.detach())
    return (states, last, *torch.autograd.grad((states, last), tensors, weights))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("gates", [None, (1,), (2048, 1), (4, 1, 1)], ids=str)
def test_same_bits_from_run_to_run(gates, packed, dim, backend):
    tensors, bounds = with_states(4, 2048, 2048, dim=dim, packed=packed, gates=gates)
    first = training_step(tensors, dim, bounds, backend=backend)
    for _ in range(5):
        again = training_step(tensors, dim, bounds, backend=backend)
        assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("gates", [None, (700, 1)], ids=["", "decay"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_graph_capture_of_a_training_step(packed, gates, dim, backend):
    """Forward and backward; tensors and bounds may hold other values when the graph is replayed."""
    if gates is not None and dim == 1:
        gates = (512,)
    tensors, bounds = with_states(2, 700, 512, dim=dim, packed=packed, gates=gates)
    if bounds is not None:
        bounds = bounds.int()
    step = partial(training_step, tensors, dim, bounds, backend=backend)
    graph, captured = recorded(step, warm_ups=3)
    for first in (1, 5, 40):
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(torch.rand_like(tensor))
        if bounds is not None:
            bounds[1], bounds[2] = first, first + 8
        graph.replay()
        assert all(map(torch.equal, captured, step()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_columns_in_memory_that_holds_anything(dtype):
    """Blocks that read a column at once tell one another maps in memory that nobody zeroes: whatever is left
    there, by a replay on other inputs, too, and whatever launches of other graphs do meanwhile."""
    scan = partial(scan_registry.linear_scan, dim=1)
    calls = [torch.rand(2, 1, 16384, 64, device="cuda").to(dtype) for _ in range(4)]
    others = [torch.rand_like(call) for call in calls]
    wanted = [scan(*call, backend="reference") for call in (*calls, *others)]
    for byte in (0, 1, 255):
        for size in (1 << 16, 1 << 20, 1 << 22):
            torch.full((size,), byte, dtype=torch.uint8, device="cuda")
        torch.testing.assert_close([scan(*call) for call in (*calls, *others)], wanted)
    graphs, captured = [torch.cuda.CUDAGraph() for _ in calls], []
    for graph, call in zip(graphs, calls, strict=True):
        with torch.cuda.graph(graph):
            captured.append(scan(*call))
    streams = [torch.cuda.Stream() for _ in graphs]
    found = []
    torch.cuda.synchronize()
    for _ in range(25):
        for stream, graph, call, other, states in zip(
            streams, graphs, calls, others, captured, strict=True
        ):
            with torch.cuda.stream(stream):
                graph.replay()
                found.append(states.clone())
                kept = call.clone()
                call.copy_(other)
                other.copy_(kept)
    torch.cuda.synchronize()
    for turn in range(25):
        want = wanted[4 * (turn % 2) :][:4]
        torch.testing.assert_close(found[4 * turn :][:4], want)


def test_first_use_inside_a_capture():
    """Loading a module must not break off the capture that it happens in."""
    script = """
import torch, scan_registry
gates = torch.rand(2, 700, 512, device="cuda")
bounds = torch.tensor([0, 100, 700], device="cuda", dtype=torch.int32)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = scan_registry.linear_scan(gates, gates, dim=1)
    packed = scan_registry.linear_scan(gates[0], gates, dim=1, cu_seqlens=bounds, reverse=True)
graph.replay()
same = torch.equal(out, scan_registry.linear_scan(gates, gates, dim=1))
again = scan_registry.linear_scan(gates[0], gates, dim=1, cu_seqlens=bounds, reverse=True)
print(same and torch.equal(packed, again))
"""
    done = captured([sys.executable, "-c", script], cwd="/")
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_threads_and_streams(packed):
    tensors, bounds = with_states(4, 1000, 128, dim=1, packed=packed, gates=(128,))
    want = training_step(tensors, 1, bounds)
    torch.cuda.synchronize()

    def work(_):
        """How many of the results were others."""
        wrong = 0
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                found = training_step(tensors, 1, bounds)
                torch.cuda.current_stream().synchronize()
                wrong += not all(map(torch.equal, found, want))
        return wrong

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(8))) == [0] * 8


def test_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors = [t.detach().to("cuda:1").requires_grad_() for t in inputs(2, 64, 512)]
    states = scan_registry.linear_scan(*tensors, reverse=True)
    assert states.device == torch.device("cuda:1")
    grads = torch.autograd.grad(states.sum(), tensors)
    here = [t.detach().to("cuda:0").requires_grad_() for t in tensors]
    expected = scan_registry.linear_scan(*here, reverse=True)
    assert torch.equal(states.cpu(), expected.cpu())
    for grad, ref in zip(grads, torch.autograd.grad(expected.sum(), here), strict=True):
        assert torch.equal(grad.cpu(), ref.cpu())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_nothing_waits_for_the_gpu(dtype):
    """Neither pass, with every option, once its kernels are loaded."""
    tensors, bounds = with_states(2, 256, 320, dim=2, packed=True, gates=(256, 1))
    bounds = bounds.to(dtype)
    weight = torch.randn(2, 256, 320, device=DEVICE)

    def step():
        scan = partial(scan_registry.linear_scan, reverse=True, cu_seqlens=bounds)
        states, last = scan(*tensors, return_final_state=True)
        torch.autograd.grad((states, last), tensors, (weight, torch.ones_like(last)))

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_by_inductor(dynamic):
    """Values and gradients of a layer whose other operators are fused around the scan."""
    pytest.importorskip("triton", reason="inductor needs triton")

    def layer(gates, tokens, state, bounds):
        states, last = scan_registry.linear_scan(
            gates.sigmoid(),
            tokens * 2,
            state,
            dim=1,
            reverse=True,
            cu_seqlens=bounds,
            return_final_state=True,
        )
        states = scan_registry.linear_scan(torch.sigmoid(gates[0, :1] + 1), states.tanh(), dim=1)
        return (states * tokens).mean() + last.square().mean()

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
    for time in (96, 160):
        tensors, bounds = with_states(2, time, 64, dim=1, packed=True)
        copies = [t.detach().clone().requires_grad_() for t in tensors]
        found, expected = compiled(*tensors, bounds), layer(*copies, bounds)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        found.backward()
        expected.backward()
        for tensor, copy in zip(tensors, copies, strict=True):
            torch.testing.assert_close(tensor.grad, copy.grad, rtol=1e-3, atol=1e-5)
