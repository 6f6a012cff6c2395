"""The public interface on the CPU, once through: what tests/stress/torch_matrix.py runs with each release of torch.

It needs pytest and the installed package, and no other part of these tests, so that it runs in a small environment
too. What torch changes from release to release is in the foreground: dispatch, autograd, transforms and compilation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import scan_registry
from scan_registry import nn

Call = Callable[..., torch.Tensor]

B, T, D, N = 2, 12, 4, 3  # batches, steps, channels, states of a channel


def rand(*shape: int, seed: int = 0, **options: Any) -> torch.Tensor:
    """Uniform numbers in [0.1, 0.9], which suit gates, tokens and step sizes alike."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (0.1 + 0.8 * torch.rand(*shape, generator=generator)).to(**options)


def linear_scan(gates: torch.Tensor, tokens: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    return scan_registry.linear_scan(gates, tokens, start)


def gated_scan(gate: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return scan_registry.min_gru(gate, hidden)


def network(Wx: torch.Tensor, R: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return scan_registry.rnn(Wx, R, b, function="lstm")[0]


def selective_scan(*tensors: torch.Tensor) -> torch.Tensor:
    u, delta, A, *rest = tensors
    return scan_registry.selective_scan(u, delta, -A, *rest, delta_softplus=True)


def convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return scan_registry.causal_conv1d(x, weight, bias, activation="silu")


#: Every operator that has a derivative, with the shapes of its tensors.
CALLS: dict[str, tuple[Call, tuple[tuple[int, ...], ...]]] = {
    "linear_scan": (linear_scan, ((B, D, T), (B, D, T), (B, D))),
    "gated_scan": (gated_scan, ((B, D, T), (B, D, T))),
    "rnn": (network, ((B, T, 4, 1, D), (4, 1, D, D), (4, 1, D))),
    "selective_scan": (
        selective_scan,
        ((B, D, T), (B, D, T), (D, N), (B, N, T), (B, N, T), (D,), (B, D, T)),
    ),
    "causal_conv1d": (convolution, ((B, D, T), (D, 4), (D,))),
}

every_call = pytest.mark.parametrize("name", CALLS)


def leaves(name: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    created = [rand(*shape, seed=n, dtype=dtype) for n, shape in enumerate(CALLS[name][1])]
    return [tensor.requires_grad_() for tensor in created]


def test_a_scan_is_its_recurrence() -> None:
    gates, tokens, state = rand(B, D, T), rand(B, D, T, seed=1), rand(B, D, seed=2)
    states = scan_registry.linear_scan(gates, tokens, state)
    for t in range(T):
        state = gates[..., t] * state + tokens[..., t]
        torch.testing.assert_close(states[..., t], state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_dtypes(dtype: torch.dtype) -> None:
    gates, tokens = rand(B, D, T, dtype=dtype), rand(B, D, T, seed=1, dtype=dtype)
    states = scan_registry.linear_scan(gates, tokens)
    assert states.dtype == dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64
    exact = scan_registry.linear_scan(gates.to(wide if dtype == torch.float64 else dtype), tokens)
    torch.testing.assert_close(states, exact)


def test_options() -> None:
    gates, tokens = rand(B, T, D), rand(B, T, D, seed=1)
    states, last = scan_registry.linear_scan(gates, tokens, dim=1, return_final_state=True)
    torch.testing.assert_close(last, states[:, -1])
    backwards = scan_registry.linear_scan(gates.flip(1), tokens.flip(1), dim=1, reverse=True)
    torch.testing.assert_close(backwards.flip(1), states)
    bounds = torch.tensor([0, 5, T])
    packed = scan_registry.linear_scan(gates[:1], tokens[:1], dim=1, cu_seqlens=bounds)
    torch.testing.assert_close(packed[:, :5], states[:1, :5])
    gate, state = scan_registry.linear_scan_summary(gates, tokens, dim=1)
    torch.testing.assert_close(gate, gates.prod(dim=1))
    torch.testing.assert_close(state, last)
    stepped = scan_registry.linear_scan_step(
        states[:, -2].contiguous(), gates[:, -1], tokens[:, -1]
    )
    torch.testing.assert_close(stepped, last)


@pytest.mark.thorough  # each operator's own tests have this for the torch that is pinned
@every_call
def test_values_and_gradients_are_the_references(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, compared with differences of values."""
    call, _ = CALLS[name]
    if name == "selective_scan":
        pytest.skip("its A has float32 alone; the test below has its gradient")
    assert torch.autograd.gradcheck(call, leaves(name, torch.float64))


@every_call
def test_gradients_exist_and_can_be_differentiated(name: str) -> None:
    call, _ = CALLS[name]
    inputs = leaves(name)
    outputs = call(*inputs)
    result = torch.autograd.grad(outputs.square().sum(), inputs, create_graph=True)
    assert all(bool(gradient.isfinite().all() and gradient.abs().max() > 0) for gradient in result)
    second = torch.autograd.grad(sum(g.square().sum() for g in result), inputs)
    assert all(bool(gradient.isfinite().all()) for gradient in second)


@pytest.mark.thorough
@every_call
def test_compilation_with_dynamic_sizes(name: str) -> None:
    """As one graph, values and gradients. ``test_inductor.py`` has graphs of fixed sizes."""
    call, _ = CALLS[name]
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    plain, inputs = leaves(name), leaves(name)
    expected, actual = call(*plain), compiled(*inputs)
    torch.testing.assert_close(actual, expected)
    expected.sum().backward()
    actual.sum().backward()
    for one, other in zip(inputs, plain, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@every_call
def test_export(name: str) -> None:
    class Module(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return CALLS[name][0](*tensors)

    inputs = tuple(tensor.detach() for tensor in leaves(name))
    exported = torch.export.export(Module(), inputs)
    torch.testing.assert_close(exported.module()(*inputs), CALLS[name][0](*inputs))


@every_call
def test_transforms(name: str) -> None:
    """vmap over all tensors, and forward mode."""
    call, _ = CALLS[name]
    inputs = [tensor.detach() for tensor in leaves(name)]
    mapped = torch.func.vmap(call)(*(torch.stack([tensor, 0.9 * tensor]) for tensor in inputs))
    torch.testing.assert_close(mapped[1], call(*(0.9 * tensor for tensor in inputs)))
    tangents = tuple(torch.ones_like(tensor) for tensor in inputs)
    values, tangent = torch.func.jvp(call, tuple(inputs), tangents)
    torch.testing.assert_close(values, call(*inputs))
    assert bool(tangent.isfinite().all())


def test_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        outputs = network(rand(B, T, 4, 1, D), rand(4, 1, D, D), rand(4, 1, D))
    assert outputs.dtype == torch.bfloat16


def test_generation_changes_states_in_place() -> None:
    state, x, A = rand(B, D, N), rand(B, D), rand(D, N)
    out = scan_registry.selective_state_update(state, x, x, -A, rand(B, N), rand(B, N))
    assert out.shape == (B, D)
    before = rand(B, D, 4)
    after = before.clone()
    out = scan_registry.causal_conv1d_update(x, after, rand(D, 4), rand(D))
    assert out.shape == (B, D)
    torch.testing.assert_close(after[..., :-1], before[..., 1:])


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "LSTM": lambda: nn.LSTM(D, D, batch_first=True),
    "GRU": lambda: nn.GRU(D, D, batch_first=True),
    "RNN": lambda: nn.RNN(D, D, batch_first=True),
    "SLSTM": lambda: nn.SLSTM(D, D, batch_first=True),
    "MinGRU": lambda: nn.MinGRU(D),
    "MinLSTM": lambda: nn.MinLSTM(D),
    "RGLRU": lambda: nn.RGLRU(D, 1),
    "HGRN": lambda: nn.HGRN(D),
    "LRU": lambda: nn.LRU(D, D),
    "S5": lambda: nn.S5(D, D),
    "Mamba": lambda: nn.Mamba(D),
    "Mamba2": lambda: nn.Mamba2(D, N, headdim=D),
    "RMSNormGated": lambda: nn.RMSNormGated(D),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_train_and_keep_their_parameters(name: str) -> None:
    torch.manual_seed(0)
    layer, again = LAYERS[name](), LAYERS[name]()
    again.load_state_dict(layer.state_dict())
    x = rand(B, T, D)
    outputs, copied = layer(x), again(x)
    if isinstance(outputs, tuple):
        outputs, copied = outputs[0], copied[0]
    torch.testing.assert_close(outputs, copied)
    outputs.real.square().sum().backward()
    gradients = [p.grad for p in layer.parameters() if p.requires_grad]
    assert gradients
    assert all(g is not None and bool(g.isfinite().all()) for g in gradients)


def test_every_layer_and_name_is_there() -> None:
    assert set(LAYERS) == set(nn.__all__)
    for name in scan_registry.__all__:
        assert getattr(scan_registry, name) is not None


def test_compat_and_words() -> None:
    from scan_registry.compat.accelerated_scan.ref import scan
    from scan_registry.compat.mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    gates, tokens = rand(B, D, T), rand(B, D, T, seed=1)
    torch.testing.assert_close(scan(gates, tokens), scan_registry.linear_scan(gates, tokens))
    assert callable(selective_scan_fn)
    assert "reference" in str(scan_registry.explain(scan_registry.linear_scan, gates, tokens))
