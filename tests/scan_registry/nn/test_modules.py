"""The modules against torch.nn's, with its state dicts, ``LSTM`` also with projections; and SLSTM against ``rnn`` by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import scan_registry
from scan_registry import nn
from scan_registry.nn import torch_cells

#: A projected LSTM has ``PROJECTED`` units in h.
KINDS = ("LSTM", "GRU", "RNN", "projected")
PROJECTED = 4
OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_layers": 3, "batch_first": True},
    {"bias": False, "bidirectional": True},
    {"num_layers": 2, "bidirectional": True, "batch_first": True, "dtype": torch.float64},
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["torch", "own"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's functions where they would do, however fast they are, and by this package alone."""
    if request.param == "own":
        monkeypatch.setattr(torch_cells, "takes", lambda *inputs: False)
    else:
        monkeypatch.setattr(torch_cells, "is_faster", lambda *item: True)


def make(home: Any, kind: str, *sizes: int, **options: Any) -> Any:
    """A module of torch.nn or of this package."""
    if kind == "projected":
        return home.LSTM(*sizes, proj_size=PROJECTED, **options)
    return getattr(home, kind)(*sizes, **options)


def pair(kind: str, **options: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """torch's module, and ours with its parameters."""
    theirs, ours = (make(home, kind, 5, 6, **options) for home in (torch.nn, nn))
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def flat(results: Any) -> list[Tensor]:
    if isinstance(results, Tensor):
        return [results]
    return [tensor for result in results if result is not None for tensor in flat(result)]


def alike(theirs: torch.nn.Module, ours: torch.nn.Module, *inputs: Any) -> None:
    """Equal results, and equal gradients of all parameters and inputs."""
    expected, actual = theirs(*inputs), ours(*inputs)
    assert type(actual[1]) is type(expected[1])
    of = [t for t in flat(inputs) if t.requires_grad]
    grads = []
    for results, module in ((expected, theirs), (actual, ours)):
        outs = [out for out in flat(results) if out.is_floating_point()]
        weights = [torch.linspace(-1, 2, o.numel(), dtype=o.dtype).view(o.shape) for o in outs]
        loss = sum((out * weight).sum() for out, weight in zip(outs, weights, strict=True))
        grads.append(torch.autograd.grad(loss, [*module.parameters(), *of]))
    torch.testing.assert_close(flat(actual), flat(expected))
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)


def states_of(kind: str, options: dict[str, Any], batch: int | None = 3) -> Any:
    rows = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    lead = (rows,) if batch is None else (rows, batch)
    sizes = {"LSTM": (6, 6), "projected": (PROJECTED, 6)}.get(kind, (6,))
    drawn = [
        torch.randn(*lead, size, dtype=options.get("dtype"), requires_grad=True) for size in sizes
    ]
    return tuple(drawn) if len(drawn) > 1 else drawn[0]


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("kernels")
def test_results_and_gradients(kind: str, options: dict[str, Any], start: bool) -> None:
    x = torch.randn(3, 7, 5, dtype=options.get("dtype"), requires_grad=True)
    if not options.get("batch_first"):
        x = x.detach().transpose(0, 1).contiguous().requires_grad_()
    alike(*pair(kind, **options), x, *([states_of(kind, options)] if start else []))


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("kernels")
def test_unbatched(kind: str, start: bool) -> None:
    options = {"bidirectional": True}
    x = torch.randn(7, 5, requires_grad=True)
    alike(*pair(kind, **options), x, *([states_of(kind, options, None)] if start else []))


@pytest.mark.parametrize("enforce_sorted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("kernels")
def test_packed_sequences(kind: str, enforce_sorted: bool) -> None:
    options = {"bidirectional": True, "num_layers": 2}
    lengths = [9, 4, 1] if enforce_sorted else [4, 9, 1]
    packed = pack_padded_sequence(
        torch.randn(9, 3, 5), torch.tensor(lengths), enforce_sorted=enforce_sorted
    )
    theirs, ours = pair(kind, **options)
    hx = states_of(kind, options)
    expected, actual = theirs(packed, hx), ours(packed, hx)
    torch.testing.assert_close(actual[0].data, expected[0].data)
    torch.testing.assert_close(pad_packed_sequence(actual[0]), pad_packed_sequence(expected[0]))
    torch.testing.assert_close(flat(actual[1]), flat(expected[1]))
    grads = [
        torch.autograd.grad(out.data.square().sum(), [*module.parameters(), *flat(hx)])
        for (out, _), module in ((expected, theirs), (actual, ours))
    ]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_parameters(kind: str) -> None:
    modules = []
    for home in (torch.nn, nn):
        torch.manual_seed(1)
        modules.append(make(home, kind, 5, 6, num_layers=2, bidirectional=True))
    theirs, ours = (module.state_dict() for module in modules)
    assert repr(modules[0]) == repr(modules[1])
    assert list(theirs) == list(ours)
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    modules[0].load_state_dict(ours)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_between_layers_and_in_training_only(kind: str) -> None:
    x = torch.randn(7, 3, 5)
    theirs, ours = pair(kind, num_layers=2, dropout=0.5)
    alike(theirs.eval(), ours.eval(), x)
    # Small networks on the CPU run by torch's function; those of a named backend do not.
    ours.backend = "reference"
    alike(theirs, ours, x)
    torch.manual_seed(1)
    expected = theirs.train()(x)[0]
    torch.manual_seed(1)
    one, other = ours.train()(x)[0], ours(x)[0]
    torch.testing.assert_close(one, expected)
    assert not torch.equal(one, other)
    _, single = pair(kind, num_layers=1)
    assert torch.equal(single(x)[0], single(x)[0])


# --- Gradients, as optimizers use them --------------------------------------------------------


def span(tensor: Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first to past its last byte."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def apart(tensors: list[Tensor]) -> bool:
    spans = sorted(span(tensor) for tensor in tensors if tensor.numel())
    return all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


@pytest.mark.parametrize("how", ["backward", "grad"])
@pytest.mark.parametrize("options", [*OPTIONS, {"num_layers": 2}], ids=str)
@pytest.mark.parametrize("kind", [*KINDS, "SLSTM"])
@pytest.mark.usefixtures("kernels")
def test_no_gradients_or_outputs_share_memory(kind: str, options: dict[str, Any], how: str) -> None:
    module, dtype = make(nn, kind, 5, 6, **options), options.get("dtype")
    x = torch.randn(3, 7, 5, dtype=dtype, requires_grad=True)
    results = flat(module(x))
    assert apart([*results, *module.parameters(), x])
    loss, leaves = sum(out.square().sum() for out in results), [*module.parameters(), x]
    if how == "grad":
        assert apart([*torch.autograd.grad(loss, leaves)])
    else:
        loss.backward()
        assert apart([leaf.grad for leaf in leaves if leaf.grad is not None])


# --- Strides ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 2, 3), (5, 1, 3), (1, 2, 3), (5, 3)], ids=str)
@pytest.mark.parametrize("first", [False, True], ids=["time first", "batch first"])
@pytest.mark.parametrize("bidirectional", [False, True], ids=["one way", "both ways"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("kernels")
def test_strides_match_torch(
    kind: str, bidirectional: bool, first: bool, shape: tuple[int, ...]
) -> None:
    for layers in (1, 2):
        options = {"bidirectional": bidirectional, "batch_first": first, "num_layers": layers}
        theirs, ours = (make(home, kind, 3, 5, **options) for home in (torch.nn, nn))
        x = torch.randn(shape)
        views = [x, torch.randn(*shape, 2)[..., 0], x.transpose(0, 1).contiguous().transpose(0, 1)]
        for view in views:
            expected, actual = flat(theirs(view)), flat(ours(view))
            assert [out.stride() for out in actual] == [out.stride() for out in expected]
    size = PROJECTED if kind == "projected" else 5
    assert kind == "GRU" or bidirectional or first or ours(x)[0].view(-1, size).shape[1] == size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("kernels")
def test_strides_of_packed_sequences_match_torch(kind: str) -> None:
    packed = pack_padded_sequence(
        torch.randn(9, 3, 5), torch.tensor([4, 9, 1]), enforce_sorted=False
    )
    for options in ({}, {"bidirectional": True}, {"batch_first": True}):
        theirs, ours = pair(kind, **options)
        expected, actual = theirs(packed), ours(packed)
        assert actual[0].data.stride() == expected[0].data.stride()
        assert [t.stride() for t in flat(actual[1])] == [t.stride() for t in flat(expected[1])]


@pytest.mark.parametrize("kind", [*KINDS[:3], "SLSTM"])
@pytest.mark.parametrize("first", [False, True])
def test_outputs_may_be_changed_in_place(kind: str, first: bool) -> None:
    """Without a backward pass after it; with one autograd says what was changed, as for torch.nn.LSTM,
    unless torch computes it, which needs no outputs of GRU and RNN."""
    module, x = getattr(nn, kind)(3, 4, batch_first=first), torch.randn(5, 2, 3)
    out = module(x)[0]
    expected = out.detach() * 2
    assert torch.equal(out.mul_(2), expected)
    out[-1].relu_()
    if kind in ("GRU", "RNN"):
        out.sum().backward()
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# --- torch.jit and torch.fx -------------------------------------------------------------------


class Holder(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)[0] * 2


@pytest.mark.parametrize("kind", [*KINDS[:3], "SLSTM"])
def test_modules_can_be_traced_by_jit(kind: str) -> None:
    module, x = getattr(nn, kind)(3, 4), torch.randn(5, 2, 3)
    traced = torch.jit.trace(module, x)
    other = torch.randn(5, 2, 3)
    torch.testing.assert_close(flat(traced(other)), flat(module(other)))
    actual = torch.autograd.grad(traced(other)[0].square().sum(), [*module.parameters()])
    expected = torch.autograd.grad(module(other)[0].square().sum(), [*module.parameters()])
    torch.testing.assert_close(actual, expected)
    with torch.no_grad():
        torch.testing.assert_close(flat(traced(other)), flat(module(other)))


@pytest.mark.parametrize("kind", [*KINDS[:3], "SLSTM"])
def test_modules_are_leaves_of_fx(kind: str) -> None:
    holder, x = Holder(getattr(nn, kind)(3, 4)), torch.randn(5, 2, 3)
    graph = torch.fx.symbolic_trace(holder)
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == ["inner"]
    assert torch.equal(graph(x), holder(x))


@pytest.mark.parametrize("contents", [False, True])
def test_scripting_says_what_to_use_instead(contents: bool) -> None:
    module = nn.LSTM(3, 4)
    with pytest.raises(
        RuntimeError, match=r"cannot compile scan_registry.nn.LSTM; use torch.compile"
    ):
        torch.jit.script(Holder(module) if contents else module)


# --- SLSTM ------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 3])
def test_slstm(heads: int) -> None:
    batch, time, hidden = 2, 7, 6
    module = nn.SLSTM(5, hidden, num_layers=2, num_heads=heads, batch_first=True)
    x = torch.randn(batch, time, 5)
    start = tuple(torch.rand(2, batch, hidden) for _ in range(4))
    out, ends = module(x, start)
    dim = hidden // heads
    for layer in range(2):
        w, u, one, two = (
            getattr(module, f"{name}_l{layer}")
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        states, last = scan_registry.rnn(
            (x @ w.T).view(batch, time, 4, heads, dim),
            u.view(4, heads, dim, dim),
            (one + two).view(4, heads, dim),
            torch.stack([s[layer].view(batch, 1, heads, dim) for s in start]),
            function="slstm",
        )
        x = states[0].flatten(2)
        for state, end in zip(last, ends, strict=True):
            torch.testing.assert_close(end[layer], state.flatten(1))
    torch.testing.assert_close(out, x)


def test_slstms_parameters() -> None:
    module = nn.SLSTM(5, 6, num_heads=3, bidirectional=True)
    assert module.weight_hh_l0.shape == module.weight_hh_l0_reverse.shape == (24, 2)
    assert {n.rpartition("_l0")[0] for n in module.state_dict()} == {
        "weight_ih",
        "weight_hh",
        "bias_ih",
        "bias_hh",
    }
    bound = 1 / 6**0.5
    assert all(parameter.abs().max() <= bound for parameter in module.parameters())
    out, ends = module.double()(torch.randn(4, 2, 5).double())
    assert (out.shape, len(ends), ends[3].shape) == ((4, 2, 12), 4, (2, 2, 6))
