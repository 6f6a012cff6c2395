"""``linear_scan`` on a GPU: how much memory it takes, and how much it can work on."""

from __future__ import annotations

import gc
from functools import partial
from itertools import pairwise

import pytest
import torch
from gpu_scans import inputs, with_states

import scan_registry
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.linear_scan.cases import TOLERANCE, wide

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("seeded")]

DEVICE = "cuda"
BACKENDS = ("cuda", "triton")


# --- Memory -----------------------------------------------------------------------------------


def peak_of(function):
    """What ``function`` returns, and the bytes it took at most beyond those there before."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = function()
    torch.cuda.synchronize()
    return found, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("gates", [None, (8, 1), (1, 1), "per channel"], ids=str)
def test_peak_memory_of_a_training_step(gates, dim, backend):
    """States, which are output and saved, and the gradients that are asked for: nothing else of their
    size, though broadcast gates take the gradient of tokens to have theirs. Of contiguous channels with one gate each, there is
    a float32 sum for each 64 steps besides."""
    shape = (8, 1024, 8192) if dim == 2 else (8, 8192, 1024)
    if gates == "per channel":
        gates = (1024, 1) if dim == 2 else (1024,)
    elif gates is not None:
        gates = (gates[0], 1, 1)
    tensors = inputs(*shape, gates=gates)
    weight = torch.randn(shape, device=DEVICE)
    scan = partial(scan_registry.linear_scan, dim=dim, backend=backend)
    torch.autograd.grad(scan(*tensors), tensors, weight)  # loads the kernels
    states, forward = peak_of(lambda: scan(*tensors))
    assert forward <= 1.01 * states.nbytes
    grads, backward = peak_of(lambda: torch.autograd.grad(states, tensors, weight))
    summed = dim == 1 and gates is not None and backend == "cuda"
    sums = states.numel() // 64 * 4 if summed else 0
    assert backward <= 1.01 * sum(grad.nbytes for grad in grads) + sums


@pytest.mark.parametrize("dim", [1, 2])
def test_peak_memory_with_states_and_sequences(dim):
    shape = (4, 1024, 8192) if dim == 2 else (4, 8192, 1024)
    tensors, bounds = with_states(*shape, dim=dim, packed=True)
    scan = partial(scan_registry.linear_scan, dim=dim, reverse=True, return_final_state=True)

    def step():
        states, last = scan(*tensors, cu_seqlens=bounds)
        return (states, last, *torch.autograd.grad(last.sum(), tensors))

    step()
    outputs, peak = peak_of(step)
    assert peak <= 1.01 * sum(t.nbytes for t in outputs)


def test_what_is_not_needed_is_not_kept():
    """Tokens never are; states are not where gates want no gradient."""
    gc.collect()
    torch.cuda.empty_cache()
    gates, leaf = inputs(4, 1024, 4096)
    gates.requires_grad_(False)
    tokens = leaf + 1
    states = scan_registry.linear_scan(gates, tokens)
    node, size = states.grad_fn, states.nbytes
    held = torch.cuda.memory_allocated()
    del states
    assert held - torch.cuda.memory_allocated() == size
    del tokens
    assert held - torch.cuda.memory_allocated() == 2 * size
    assert node is not None


def test_transposed_view_is_not_copied():
    gates, tokens = (t.transpose(1, 2) for t in inputs(8, 512, 256, grad=False))
    scan_registry.linear_scan(gates, tokens)
    out, peak = peak_of(lambda: scan_registry.linear_scan(gates, tokens))
    assert out.stride() == tokens.stride()
    # The output and the carries between tiles, nothing of the inputs' size beside it.
    assert peak < 1.2 * out.nbytes


@pytest.mark.parametrize("options", [{}, {"reverse": True}], ids=str)
def test_no_memory_is_kept(options):
    gates, tokens = inputs(4, 512, 256)

    def step():
        scan_registry.linear_scan(gates, tokens, dim=1, **options).sum().backward()
        gates.grad = tokens.grad = None

    step()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


# --- Sizes ------------------------------------------------------------------------------------


def needs_memory(gigabytes):
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 1e9
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes} GB of free memory on the GPU, which has {free:.0f} GB")


@pytest.mark.parametrize(
    ("least", "dtype"),
    [*((0.999, dtype) for dtype in TOLERANCE if dtype != "float16"), (1.0, "float32")],
)
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("broadcast", [False, True], ids=["", "decay"])
def test_a_million_steps_with_gates_close_to_one(broadcast, layout, least, dtype):
    """Against the CPU in float64: what is far back still counts."""
    time = 2**20
    shape, dim = ((2, time), 1) if layout == "rows" else ((time, 2), 0)
    of_gates = [1 if broadcast and size == time else size for size in shape]
    limit, dtype = TOLERANCE[dtype], getattr(torch, dtype)
    gates = 1 - (1 - least) * torch.rand(of_gates, dtype=torch.float64)
    if dtype.is_complex:
        gates = torch.polar(gates, 6.28 * torch.rand(of_gates, dtype=torch.float64))
    tensors = [gates.to(dtype), torch.randn(shape).to(dtype)]
    weight = torch.randn(shape).to(dtype)
    exact = [wide(t).requires_grad_() for t in tensors]
    known = scan_registry.linear_scan(*exact, dim=dim, return_final_state=True)
    grads = torch.autograd.grad(known[0], exact, wide(weight))
    # The sum over a million terms, which cancel, has the error of a sum of their sizes.
    size = grads[0].norm()
    if broadcast:
        whole = [exact[0].detach().expand(shape).clone().requires_grad_(), exact[1].detach()]
        states = scan_registry.linear_scan(*whole, dim=dim)
        (terms,) = torch.autograd.grad(states, whole[0], wide(weight))
        size = terms.abs().sum_to_size(of_gates).norm()
    for backend in BACKENDS:
        leaves = [t.to(DEVICE).requires_grad_() for t in tensors]
        scan = partial(scan_registry.linear_scan, dim=dim, backend=backend)
        found = scan(*leaves, return_final_state=True)
        of_gates_grad, of_tokens_grad = torch.autograd.grad(found[0], leaves, weight.to(DEVICE))
        for out, ref in ((found[0], known[0]), (of_tokens_grad, grads[1])):
            assert relative_error(out.detach().cpu(), ref.detach()) <= limit, backend
        # One number a row, which chance may bring close to zero.
        off = (wide(found[1]).cpu() - known[1]).detach().norm()
        assert float(off / known[0].detach().norm()) * time**0.5 <= limit, backend
        assert float((wide(of_gates_grad).cpu() - grads[0]).norm() / size) <= limit, backend


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((1, 2**31 + 4096), 1), ((2, 1025, 2**20), 2), ((2, 2**20, 1025), 1)],
    ids=str,
)
def test_more_elements_than_31_bits_count(shape, dim, dtype, backend):
    """States and gradients of the whole, against those of pieces that follow one another."""
    needs_memory(32)
    gates = torch.empty(shape, dtype=dtype, device=DEVICE).uniform_(0.5, 1).requires_grad_()
    tokens = torch.empty(shape, dtype=dtype, device=DEVICE).normal_().requires_grad_()
    weight = tokens.detach()
    scan = partial(scan_registry.linear_scan, dim=dim, backend=backend, return_final_state=True)
    states, last = scan(gates, tokens)
    gates_grad, tokens_grad = torch.autograd.grad(states, (gates, tokens), weight)
    states, last = states.detach(), last.detach()

    ends = [shape[dim] * n // 8 for n in range(9)]
    pieces = [(slice(None),) * dim + (slice(begin, end),) for begin, end in pairwise(ends)]
    carried = [None]  # the state before each piece
    with torch.no_grad():
        for piece in pieces:
            carried.append(scan(gates[piece], tokens[piece], carried[-1])[1])
    limit = TOLERANCE[str(dtype).removeprefix("torch.")]
    assert relative_error(last, carried.pop()) <= limit
    state_grad = torch.zeros_like(last)
    for piece, before in zip(reversed(pieces), reversed(carried), strict=True):
        given = (gates[piece], tokens[piece], before)
        leaves = [t.detach().requires_grad_() for t in given if t is not None]
        outputs = scan(*leaves)
        grads = torch.autograd.grad(outputs, leaves, (weight[piece], state_grad))
        state_grad = grads[-1]  # of the state before the piece; the first piece has none
        found = states[piece], gates_grad[piece], tokens_grad[piece]
        for out, ref in zip(found, (outputs[0], *grads[:2]), strict=True):
            assert relative_error(out, ref.detach().float()) <= limit


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("steps", [1, 2])
def test_more_rows_than_31_bits_count(steps, backend):
    """Of so few steps that states and gradients are known without a scan."""
    needs_memory(32)
    shape, dim = ((2**31 + 64, 1), 1) if steps == 1 else ((2, 2**30 + 32), 0)
    gates = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).uniform_(0.5, 1)
    tokens = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_()
    tensors = [t.requires_grad_() for t in (gates, tokens)]
    states = scan_registry.linear_scan(*tensors, dim=dim, backend=backend)
    grads = torch.autograd.grad(states.sum(), tensors)
    everything = (gates, tokens, states, *grads)
    for rows in zip(*(t.detach().split(2**28, 1 - dim) for t in everything), strict=True):
        gate, token, state, gate_grad, token_grad = (t.unbind(dim) for t in rows)
        assert torch.equal(state[0], token[0])
        assert float(gate_grad[0].abs().max()) == 0.0
        assert torch.equal(token_grad[-1], torch.ones_like(token_grad[-1]))
        if steps == 2:
            second = torch.addcmul(token[1].float(), gate[1].float(), token[0].float())
            assert torch.equal(state[1], second.bfloat16())
            assert torch.equal(gate_grad[1], token[0])
            assert torch.equal(token_grad[0], gate[1] + 1)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dim", [1, 2])
def test_packed_decays_over_more_elements_than_31_bits_count(dim, backend):
    """Sequences that begin past the 31st bit, and the sum over all of them for one gate each."""
    needs_memory(24)
    shape, of_gates = ((2, 1025, 2**20), (1025, 1)) if dim == 2 else ((2, 2**20, 1025), (1025,))
    time = shape[dim]
    gates = torch.empty(of_gates, device=DEVICE).uniform_(0.5, 1).requires_grad_()
    tokens = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_()
    bounds = torch.tensor([0, 5, time - 3, time], device=DEVICE)
    scan = partial(scan_registry.linear_scan, dim=dim, backend=backend)
    states = scan(gates, tokens, cu_seqlens=bounds)
    (grad,) = torch.autograd.grad(states.sum(), gates)
    total = torch.zeros_like(gates)
    states = states.detach()
    for begin, end in ((0, 5), (5, time - 3), (time - 3, time)):
        state, done = None, begin
        while done < end:
            length = min(2**17, end - done)
            piece = tokens.narrow(dim, done, length)
            found, state = scan(gates.detach(), piece, state, return_final_state=True)
            expected = found.float()
            assert (
                relative_error(states.narrow(dim, done, length), expected) <= TOLERANCE["bfloat16"]
            )
            done += length
        # d/dg of Σ x[t], from x' = x[t−1] + g x'[t−1] in place of the backward pass.
        total += _slope(gates.detach(), tokens, states, dim, begin, end)
    assert relative_error(grad, total) <= 0.02


def _slope(gates, tokens, states, dim, begin, end):
    """Sum over all steps of the derivative of states by their gate, which is a scan over the states
    before each step."""
    total, state, before, done = torch.zeros_like(gates), None, None, begin
    while done < end:
        length = min(2**17, end - done)
        piece = states.narrow(dim, done, length)
        if before is None:
            before = torch.zeros_like(piece.narrow(dim, 0, 1))
        shifted = torch.cat([before, piece.narrow(dim, 0, length - 1)], dim)
        slopes, state = scan_registry.linear_scan(
            gates, shifted, state, dim=dim, return_final_state=True
        )
        total += slopes.float().sum_to_size(gates.shape)
        before, done = piece.narrow(dim, length - 1, 1), done + length
    return total
