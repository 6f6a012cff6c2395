"""``linear_scan`` on a GPU, through the public function, against the float64 reference."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest
import torch

import scan_registry
from scan_registry.kernels.linear_scan import reference
from scan_registry.kernels.linear_scan.cases import TOLERANCE, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU"),
]

BACKENDS = ("cuda", "triton")


def inputs(*shape, dtype="float32", grad=True):
    gates = 1 - torch.rand(*shape, device="cuda") ** 3
    tokens = torch.randn(*shape, device="cuda")
    return [t.to(getattr(torch, dtype)).requires_grad_(grad) for t in (gates, tokens)]


def expected(gates, tokens, weight, dim):
    """Float64 states and gradients of (states * weight).sum()."""
    gates, tokens = gates.detach().double(), tokens.detach().double()
    states = reference.forward(gates, tokens, dim=dim)
    gates_grad, tokens_grad, _ = reference.backward(gates, states, weight.double(), dim=dim)
    return states, gates_grad, tokens_grad


def check(gates, tokens, dim, backend, dtype):
    states = scan_registry.linear_scan(gates, tokens, dim=dim, backend=backend)
    weight = torch.randn_like(states)
    grads = torch.autograd.grad(states, (gates, tokens), weight)
    for out, ref in zip((states, *grads), expected(gates, tokens, weight, dim), strict=True):
        assert out.shape == ref.shape
        assert relative_error(out, ref) <= TOLERANCE[dtype]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((1,), 0),
        ((131,), -1),
        ((3, 5), 0),
        ((100_000, 3), 1),
        ((2, 64, 1024), -1),
        ((2, 1024, 64), 1),
        ((3, 37, 509), -1),
        ((3, 509, 37), 1),
        ((2, 3, 4, 65, 8), 3),
        ((2, 65, 3, 8), 1),
        ((2, 2, 2, 2, 33), -1),
    ],
)
def test_shapes(shape, dim, dtype, backend):
    gates, tokens = inputs(*shape, dtype=dtype)
    check(gates, tokens, dim, backend, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.transpose(1, 2),
        lambda t: t[:, 1:, :],
        lambda t: t[..., 1:],
        lambda t: t[..., ::2],
        lambda t: t[:1].expand(6, -1, -1),
        lambda t: t[..., :1].expand(-1, -1, 40),
        lambda t: t.permute(2, 0, 1),
    ],
)
def test_views(view, backend):
    gates, tokens = inputs(6, 40, 72)
    check(view(gates), view(tokens), -1, backend, "float32")
    check(view(gates), view(tokens).contiguous(), -1, backend, "float32")


def test_transposed_view_is_not_copied():
    gates, tokens = (t.transpose(1, 2) for t in inputs(8, 512, 256, grad=False))
    scan_registry.linear_scan(gates, tokens)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = scan_registry.linear_scan(gates, tokens)
    assert out.stride() == tokens.stride()
    # The output and the carries between tiles, nothing of the inputs' size beside it.
    assert torch.cuda.max_memory_allocated() - before < 1.2 * out.nbytes


@pytest.mark.parametrize("dim", [1, 2])
def test_same_bits_from_run_to_run(dim):
    gates, tokens = inputs(4, 2048, 2048, grad=False)
    first = scan_registry.linear_scan(gates, tokens, dim=dim)
    for _ in range(5):
        assert torch.equal(first, scan_registry.linear_scan(gates, tokens, dim=dim))


@pytest.mark.parametrize("dim", [1, 2])
def test_graph_capture(dim):
    gates, tokens = inputs(2, 700, 512, grad=False)
    scan_registry.linear_scan(gates, tokens, dim=dim)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scan_registry.linear_scan(gates, tokens, dim=dim)
    for _ in range(3):
        tokens.copy_(torch.randn_like(tokens))
        graph.replay()
        assert torch.equal(out, scan_registry.linear_scan(gates, tokens, dim=dim))


def test_first_use_inside_a_capture():
    """Loading a module must not break off the capture that it happens in."""
    script = """
import torch, scan_registry
gates = torch.rand(2, 700, 512, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = scan_registry.linear_scan(gates, gates, dim=1)
graph.replay()
print(torch.equal(out, scan_registry.linear_scan(gates, gates, dim=1)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "True", done.stderr


def test_threads_and_streams():
    gates, tokens = inputs(4, 1000, 128, grad=False)
    want = scan_registry.linear_scan(gates, tokens, dim=1)
    torch.cuda.synchronize()
    wrong = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                out = scan_registry.linear_scan(gates, tokens, dim=1)
                torch.cuda.current_stream().synchronize()
                if not torch.equal(out, want):
                    wrong.append(out)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_no_memory_is_kept():
    gates, tokens = inputs(4, 512, 256)

    def step():
        scan_registry.linear_scan(gates, tokens, dim=1).sum().backward()
        gates.grad = tokens.grad = None

    step()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_second_derivative():
    gates, tokens = inputs(2, 3, 50)
    penalty = torch.autograd.grad(
        scan_registry.linear_scan(gates, tokens).square().sum(), gates, create_graph=True
    )[0]
    found = torch.autograd.grad(penalty.square().sum(), (gates, tokens))
    wide = [t.detach().double().cpu().requires_grad_() for t in (gates, tokens)]
    penalty = torch.autograd.grad(
        scan_registry.linear_scan(*wide).square().sum(), wide[0], create_graph=True
    )[0]
    for out, ref in zip(found, torch.autograd.grad(penalty.square().sum(), wide), strict=True):
        assert relative_error(out.cpu(), ref) < 1e-5


def test_inputs_are_not_written():
    gates, tokens = inputs(2, 64, 640)
    copies = gates.detach().clone(), tokens.detach().clone()
    scan_registry.linear_scan(gates, tokens).sum().backward()
    assert torch.equal(gates, copies[0])
    assert torch.equal(tokens, copies[1])


def test_bad_input():
    gates, tokens = inputs(2, 3, 4, grad=False)
    with pytest.raises(ValueError, match=r"tokens is on cpu, gates on cuda:0"):
        scan_registry.linear_scan(gates, tokens.cpu())
    with pytest.raises(TypeError, match=r"float64; accepted are float32, bfloat16, float16"):
        scan_registry.linear_scan(gates.double(), tokens.double())


def test_nothing_compiles():
    """The whole path works where neither triton nor NVRTC can be imported."""
    script = """
import sys
for name in ("triton", "cuda", "nvidia", "pynvrtc"):
    sys.modules[name] = None
import torch, scan_registry
gates = torch.rand(2, 64, 512, device="cuda", requires_grad=True)
for backend in ("cuda", "triton"):
    scan_registry.linear_scan(gates, gates, backend=backend).sum().backward()
print(gates.grad.isfinite().all().item())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "True", done.stderr
