"""``linear_scan_summary`` on a GPU, through the public function, against the float64 reference."""

from __future__ import annotations

import pytest
import torch
from graphs import recorded

import scan_registry
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.linear_scan import reference
from scan_registry.kernels.linear_scan.cases import TOLERANCE, wide

pytestmark = pytest.mark.gpu

#: Rows and columns, few and many, one step, primes, and one sequence cut into segments.
SHAPES = (
    ((1,), 0),
    ((7, 1), -1),
    ((3, 131), -1),
    ((2, 64, 1024), -1),
    ((2, 1024, 64), 1),
    ((5, 1021, 37), 1),
    ((300_007,), 0),
    ((20_011, 16), 0),
    ((4, 3, 2053), -1),
)


def inputs(shape, dtype, span):
    """Gates whose product over ``span`` steps is not too small to be compared; a tenth are below zero."""
    dtype = getattr(torch, dtype)
    gates = 1 - torch.rand(shape, device="cuda", dtype=torch.float64) / span
    gates = gates * torch.where(torch.rand_like(gates) < 0.1, -1, 1)
    if dtype.is_complex:
        gates = torch.polar(gates.abs(), 6.28 * torch.rand_like(gates))
    return gates.to(dtype), torch.randn(shape, device="cuda", dtype=dtype)


def check(found, gates, tokens, dim, reverse, dtype):
    """A final state cancels, and is compared by the size of the tokens."""
    expected = reference.summary(wide(gates), wide(tokens), dim=dim, reverse=reverse)
    for out, ref, among in zip(found, expected, (None, tokens), strict=True):
        assert out.shape == ref.shape
        assert relative_error(out, ref, among) <= max(TOLERANCE[dtype], 3e-14)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("shape", "dim"), [each for each in SHAPES if max(each[0]) < 30_000])
def test_matches_the_reference(shape, dim, dtype, reverse):
    torch.manual_seed(0)
    gates, tokens = inputs(shape, dtype, shape[dim])
    how = {"dim": dim, "reverse": reverse}
    found = scan_registry.linear_scan_summary(gates, tokens, backend="cuda", **how)
    check(found, gates, tokens, dim, reverse, dtype)
    transposed = [each.transpose(0, -1).contiguous().transpose(0, -1) for each in (gates, tokens)]
    found = scan_registry.linear_scan_summary(*transposed, backend="cuda", **how)
    check(found, gates, tokens, dim, reverse, dtype)


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_results_are_the_same_in_every_run(shape, dim):
    gates, tokens = inputs(shape, "bfloat16", shape[dim])
    first = scan_registry.linear_scan_summary(gates, tokens, dim=dim)
    for _ in range(5):
        again = scan_registry.linear_scan_summary(gates, tokens, dim=dim)
        assert all(map(torch.equal, first, again))


def test_agrees_with_the_scan_in_what_it_reads_and_how():
    """Gates that broadcast, other dtypes, transposed tokens and a derivative."""
    torch.manual_seed(0)
    tokens = torch.randn(3, 50, 40, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    for gates in (
        torch.rand(40, 1, device="cuda"),
        torch.rand(3, 1, 50, device="cuda", dtype=torch.bfloat16),
        torch.rand(3, 40, 50, device="cuda"),
    ):
        _, expected = scan_registry.linear_scan(gates, tokens, return_final_state=True)
        final_gate, final_state = scan_registry.linear_scan_summary(gates, tokens)
        assert (final_state - expected).norm() <= 1e-5 * expected.norm()
        product = gates.double().expand(tokens.shape).prod(-1)
        assert (final_gate - product).norm() <= 1e-5 * product.norm().clamp_min(1e-30)
    gates, tokens = torch.rand(2, 5, 300, device="cuda"), torch.randn(2, 5, 300, device="cuda")
    pairs = [[t.to(device).requires_grad_() for t in (gates, tokens)] for device in ("cuda", "cpu")]
    grads = []
    for pair in pairs:
        final_gate, final_state = scan_registry.linear_scan_summary(*pair)
        grads.append(torch.autograd.grad(final_gate.sum() + final_state.sum(), pair))
    for on_gpu, on_cpu in zip(*grads, strict=True):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-4, atol=1e-4)


def test_there_is_no_triton_kernel():
    gates = torch.rand(2, 8, device="cuda")
    with pytest.raises(scan_registry.NoKernelError):
        scan_registry.linear_scan_summary(gates, gates, backend="triton")


def test_compiled_and_captured():
    gates, tokens = torch.rand(2, 1 << 16, device="cuda"), torch.randn(2, 1 << 16, device="cuda")
    expected = scan_registry.linear_scan_summary(gates, tokens)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        scan_registry.linear_scan_summary(gates, tokens)
    torch.cuda.synchronize()
    graph, captured = recorded(lambda: scan_registry.linear_scan_summary(gates, tokens), warm_ups=0)
    for _ in range(2):
        graph.replay()
        assert all(map(torch.equal, captured, expected))
