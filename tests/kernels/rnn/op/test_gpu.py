"""``rnn`` on a GPU, through the public function, against the float64 reference; and among torch's own
graphs, streams and compilers."""

from __future__ import annotations

import pytest
import torch
from graphs import recorded

import scan_registry
from scan_registry import nn, rnn
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.rnn import reference
from scan_registry.kernels.rnn.cases import TOLERANCE
from scan_registry.kernels.rnn.problem import SIZES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("seeded")]

DEVICE = "cuda"
BACKENDS = ("cuda_fused", "cuda_alternating")


def draw(function, batch, time, heads, dim, dtype="bfloat16", grad=True):
    """Wx, R, b and states."""
    sizes = SIZES[function]
    tensors = (
        torch.randn(batch, time, sizes.inputs, heads, dim, device=DEVICE) / 2,
        torch.randn(sizes.recurrent, heads, dim, dim, device=DEVICE) / dim**0.5,
        torch.randn(sizes.bias, heads, dim, device=DEVICE) / 2,
        1 + torch.rand(len(sizes.states), batch, 1, heads, dim, device=DEVICE),
    )
    return [tensor.to(getattr(torch, dtype)).requires_grad_(grad) for tensor in tensors]


def check(function, shape, dtype, backend):
    """States, and gradients of all inputs from one of h and of the last h."""
    inputs = draw(function, *shape, dtype)
    states, last = rnn(*inputs, function=function, backend=backend)
    weight, end = torch.randn_like(states[0]), torch.randn_like(last[0])
    found = torch.autograd.grad((states[0], last[0]), inputs, (weight, end))
    wx, r, b, start = (tensor.detach().double() for tensor in inputs)
    initial = start.squeeze(2)
    expected, cache = reference.forward(function, wx, r, b, initial)
    final = torch.zeros_like(initial)
    final[0] = end.squeeze(1).double()
    gates_grad, initial_grad = reference.backward(
        function, r, expected, initial, cache, weight.double().unsqueeze(0), final
    )
    wanted = reference.parameter_grads(function, gates_grad, expected, initial)
    for out, ref in zip((*states, last), (*expected, expected[:, :, -1:]), strict=True):
        assert relative_error(out, ref) <= TOLERANCE[dtype]
    for out, ref in zip(found, (*wanted, initial_grad.unsqueeze(2)), strict=True):
        assert relative_error(out, ref) <= TOLERANCE[dtype]


# --- What it computes -------------------------------------------------------------------------

SHAPES = [
    *((1, 1, 1, 16), (2, 2, 3, 32), (7, 3, 12, 64), (16, 257, 1, 128), (65, 33, 3, 256)),
    *((16, 65, 1, 768), (3, 5, 2, 37)),
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("function", SIZES)
@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_results_and_gradients(function, shape, dtype, backend):
    if backend == "cuda_fused" and dtype == "float32" and shape[3] > 256:
        pytest.skip("more than registers and shared memory hold")
    check(function, shape, dtype, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_steps_than_65535(backend):
    inputs = draw("lstm", 1, 70_001, 1, 16, "float32")
    out = rnn(*inputs, backend=backend)[0]
    alone = rnn(inputs[0][:, 70_000:], *inputs[1:3], out[:, :, 69_999:70_000], backend=backend)[0]
    torch.testing.assert_close(out[:, :, 70_000:], alone)


def test_heads_too_wide_for_one_launch_go_step_by_step():
    inputs = draw("lstm", 2, 3, 1, 4096)
    with pytest.raises(scan_registry.NoKernelError):
        rnn(*inputs, backend="cuda_fused")
    found = scan_registry.explain(rnn, *inputs)
    assert [step.decision.problem.scope for step in found.steps] == ["step", "step"]
    check("lstm", (2, 3, 1, 4096), "bfloat16", "auto")


@pytest.mark.parametrize("backend", BACKENDS)
def test_clips(backend):
    for function in SIZES:
        inputs = draw(function, 4, 9, 2, 32, "float32")
        options = {"forward_clipval": 0.3, "gradient_recurrent_clipval": 0.1}
        outs = [
            rnn(*inputs, function=function, backend=each, **options)
            for each in (backend, "reference")
        ]
        grads = [torch.autograd.grad(out[0][0].sum(), inputs) for out in outs]
        torch.testing.assert_close(outs[0], outs[1], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_modules(kind):
    options = {"num_layers": 2, "bidirectional": True, "device": DEVICE}
    theirs, ours = (getattr(home, kind)(24, 48, **options) for home in (torch.nn, nn))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(33, 5, 24, device=DEVICE)
    with torch.backends.cudnn.flags(allow_tf32=False):
        torch.testing.assert_close(ours(x)[0], theirs(x)[0], rtol=1e-4, atol=1e-5)


# --- Among torch's own ------------------------------------------------------------------------


def step(inputs, **options):
    states, last = rnn(*inputs, **options)
    weight = torch.cos(states.detach())
    return (states, last, *torch.autograd.grad(states, inputs, weight))


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_bits_from_run_to_run(backend):
    """The first call goes without a graph, the second records it, and the third replays."""
    for function in SIZES:
        inputs = draw(function, 7, 150, 2, 64)
        first = step(inputs, function=function, backend=backend)
        for _ in range(3):
            for one, other in zip(
                step(inputs, function=function, backend=backend), first, strict=True
            ):
                assert torch.equal(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_a_graph(backend):
    inputs = draw("lstm", 7, 70, 2, 64, grad=False)
    graph, (states, _) = recorded(lambda: rnn(*inputs, backend=backend))
    for seed in range(2):
        torch.manual_seed(seed)
        inputs[0].copy_(torch.randn_like(inputs[0]))
        graph.replay()
        assert torch.equal(states, rnn(*inputs, backend=backend)[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_on_several_streams(backend):
    """Their calls do not share rooms."""
    inputs = [draw("lstm", 7, 150, 2, 64, grad=False) for _ in range(3)]
    expected = [rnn(*each, backend=backend)[0] for each in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    found = []
    for _ in range(3):
        for each, stream in zip(inputs, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(rnn(*each, backend=backend)[0])
    torch.cuda.synchronize()
    for number, out in enumerate(found):
        assert torch.equal(out, expected[number % 3])


def test_compiled():
    inputs = draw("lstm", 7, 33, 2, 64, "float32")
    compiled = torch.compile(lambda *tensors: rnn(*tensors)[0] * 2, fullgraph=True)
    out = compiled(*inputs)
    torch.testing.assert_close(out, rnn(*inputs)[0] * 2)
    grads = torch.autograd.grad(out.sum(), inputs)
    torch.testing.assert_close(
        grads, torch.autograd.grad((rnn(*inputs)[0] * 2).sum(), inputs), rtol=1e-4, atol=1e-5
    )


def test_autocast():
    inputs = draw("lstm", 7, 33, 2, 64, "float32")
    with torch.autocast("cuda", dtype=torch.float16):
        states, _ = rnn(*inputs)
    assert states.dtype == torch.float16
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(states.float().sum(), inputs))


def test_inference_keeps_no_cache():
    inputs = draw("lstm", 16, 512, 1, 256, grad=False)
    rnn(*inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    states, _ = rnn(*inputs)
    used = torch.cuda.max_memory_allocated() - before
    assert used < 1.5 * states.nbytes
