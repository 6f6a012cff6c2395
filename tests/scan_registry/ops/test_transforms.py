"""``torch.func``, forward mode, compiled autograd and sizes that depend on data, through the operators and under torch.compile:
against the functions, whose transforms each family's tests compare with loops in torch."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, func
from torch._inductor import config

from scan_registry import linear_scan, nn, rnn
from scan_registry.kernels.rnn.problem import SIZES, Function

OP = torch.ops.scan_registry.linear_scan.default


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Nothing compiled before is used; a batching rule that falls back to a loop warns, and fails."""
    torch.manual_seed(0)
    dynamo: Any = importlib.import_module("torch._dynamo")
    dynamo.reset()
    sizes = dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    with sizes, warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop.*")
        yield


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def square(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x).square().sum()


#: What is done to a function of one tensor; the second argument of jvp and vjp is another like it.
PROGRAMS: dict[str, Callable[[Any, Tensor], Callable[[Tensor], Any]]] = {
    "grad": lambda f, d: func.grad(square(f)),
    "jvp": lambda f, d: lambda x: func.jvp(f, (x,), (d,))[1],
    "vjp": lambda f, d: lambda x: func.vjp(f, x)[1](torch.ones_like(f(x)))[0],
    "hessian": lambda f, d: func.hessian(square(f)),
    "grad of grad": lambda f, d: func.grad(lambda x: func.grad(square(f))(x).sin().sum()),
    "jvp of grad": lambda f, d: lambda x: func.jvp(func.grad(square(f)), (x,), (d,))[1],
    "vmap": lambda f, d: lambda x: func.vmap(f)(torch.stack([x, d])),
    "vmap of grad": lambda f, d: lambda x: func.vmap(func.grad(square(f)))(torch.stack([x, d])),
    "jacfwd": lambda f, d: func.jacfwd(f),
    "jacrev": lambda f, d: func.jacrev(f),
}


@pytest.mark.parametrize("how", ["operator", "compiled"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_transformed_scans_match_the_functions(program: str, how: str) -> None:
    """Of each of the three tensors by turns."""
    shapes = {"gates": (2, 4), "tokens": (2, 4), "initial_state": (2,)}
    tensors = {name: torch.rand(shape, dtype=torch.float64) for name, shape in shapes.items()}
    name = [*tensors][([*PROGRAMS].index(program) + (how == "compiled")) % 3]
    x, d = tensors[name], torch.rand_like(tensors[name])

    def operator(gates: Tensor, tokens: Tensor, initial_state: Tensor) -> Tensor:
        states: Tensor = OP(gates, tokens, initial_state, None, -1, False, False, "auto")[0]
        return states

    def by(scan: Callable[..., Tensor]) -> Callable[[Tensor], Any]:
        return PROGRAMS[program](lambda x: scan(**{**tensors, name: x}), d)

    actual = by(operator) if how == "operator" else compiled(by(linear_scan))
    torch.testing.assert_close(actual(x), by(linear_scan)(x))


# --- Recurrent networks -----------------------------------------------------------------------


def network(function: Function) -> tuple[list[Tensor], Callable[..., Tensor]]:
    """Arguments of ``rnn``, and what it computes of them."""
    sizes = SIZES[function]
    shapes = [(2, 3, sizes.inputs, 1, 2), (sizes.recurrent, 1, 2, 2), (sizes.bias, 1, 2)]
    drawn = [torch.randn(shape, dtype=torch.float64) / 2 for shape in shapes]
    return drawn, lambda *inputs: rnn(*inputs, function=function)[0]


#: Of each function another, and two that are made of the same rules as the others.
OF_NETWORKS = {
    "jvp of grad": [pytest.mark.thorough],
    "jvp": [],
    "grad of grad": [],
    "vmap of grad": [pytest.mark.thorough],
}


@pytest.mark.parametrize(
    ("function", "program"),
    [
        pytest.param(function, program, marks=marks)
        for function, (program, marks) in zip(SIZES, OF_NETWORKS.items(), strict=True)
    ],
)
def test_transformed_networks_compile(function: Function, program: str) -> None:
    (wx, r, b), states = network(function)
    transformed = PROGRAMS[program](lambda r: states(wx, r, b), torch.randn_like(r) / 2)
    torch.testing.assert_close(compiled(transformed)(r), transformed(r))


# --- Compiled autograd ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("forward", [pytest.param("eager", marks=pytest.mark.thorough), "compiled"])
def test_compiled_autograd_without_a_break(forward: str) -> None:
    from torch._dynamo import compiled_autograd

    module, x = nn.LSTM(3, 4), torch.randn(5, 2, 3)
    gates, tokens, state = torch.rand(2, 3, 5), torch.randn(2, 3, 5), torch.randn(2, 3)
    leaves = [gates.requires_grad_(), state.requires_grad_(), *module.parameters()]

    def loss() -> Tensor:
        scans = linear_scan(gates, tokens), linear_scan(gates[:, :1], tokens, state)
        last = linear_scan(gates, tokens, state, return_final_state=True)[1]
        return sum(out.square().sum() for out in (*scans, last, module(x)[0]))  # type: ignore[return-value]

    expected = torch.autograd.grad(loss(), leaves)
    value = (compiled(loss) if forward == "compiled" else loss)()
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):  # type: ignore[no-untyped-call]
        value.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close([leaf.grad for leaf in leaves], [*expected])


# --- Sizes that depend on data ----------------------------------------------------------------


def bounds(flags: Tensor) -> Tensor:
    starts = flags.nonzero().flatten()
    return torch.cat([starts, starts.new_full((1,), len(flags))])


def chosen(x: Tensor, flags: Tensor) -> Tensor:
    """Rows by flags, so that nobody knows how many before it runs."""
    return x.repeat(4, 1, 1)[flags.nonzero().flatten()]


SIZED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "bounds": lambda g, u, f: linear_scan(g, u, cu_seqlens=bounds(f)),
    "final states": lambda g, u, f: linear_scan(g, u, cu_seqlens=bounds(f), return_final_state=True)[1],
    "batch": lambda g, u, f: linear_scan(chosen(g, f), chosen(u, f)),
    "gates that do not change": lambda g, u, f: linear_scan(g[0, :, :1], chosen(u, f)),
    "time": lambda g, u, f: linear_scan(g[..., f.nonzero()[:, 0]], u[..., f.nonzero()[:, 0]]),
    "transposed": lambda g, u, f: linear_scan(chosen(g, f).mT, chosen(u, f).mT, dim=1),
    "network": lambda g, u, f: rnn(
        chosen(u, f).mT[:, :, None, None], g[:1, None, :, :3], None, function="elman"
    )[0],
}  # fmt: skip


@pytest.mark.parametrize("case", SIZED)
def test_compiles_with_sizes_that_depend_on_data(case: str) -> None:
    function, flags = SIZED[case], torch.tensor([1, 0, 0, 1, 0, 1, 0, 0])
    gates, tokens = torch.rand(2, 3, 8), torch.randn(2, 3, 8)
    created = []
    for item in (function, compiled(function)):
        leaves = [t.clone().requires_grad_() for t in (gates, tokens)]
        out = item(*leaves, flags)
        created.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    torch.testing.assert_close(created[1], created[0])


DEEP = {"num_layers": 2, "bidirectional": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "batch_first", "options", "chosen_time"),
    [
        # Both layouts with either size; kinds with and without a second state; layers both ways in either layout.
        ("LSTM", True, {}, True),
        pytest.param("LSTM", True, DEEP, True, marks=pytest.mark.thorough),
        pytest.param("GRU", False, DEEP, True, marks=pytest.mark.thorough),
        ("RNN", True, {}, False),
    ],
)
def test_modules_compile_with_sizes_that_depend_on_data(
    kind: str, batch_first: bool, options: dict[str, Any], chosen_time: bool
) -> None:
    """A compiled function knows only strides that the operator tells it beforehand."""
    module = getattr(nn, kind)(3, 4, batch_first=batch_first, **options)
    x, flags = torch.randn(4, 4, 3), torch.tensor([1, 0, 1, 1])

    def function(x: Tensor, flags: Tensor) -> Tensor:
        places = flags.nonzero().flatten()
        first = x[places] if chosen_time != batch_first else x[:, places]
        return module(first)[0]

    created = []
    for item in (function, compiled(function)):
        leaf = x.clone().requires_grad_()
        out = item(leaf, flags)
        weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
        grads = torch.autograd.grad((out * weights).sum(), [leaf, *module.parameters()])
        created.append((out, *grads))
    torch.testing.assert_close(created[1], created[0])
    assert created[1][0].stride() == created[0][0].stride()


@pytest.mark.slow
def test_inductor_takes_a_network_whose_batch_depends_on_data() -> None:
    module, x, flags = nn.LSTM(3, 4), torch.randn(5, 4, 3), torch.tensor([1, 0, 1, 1])

    def function(x: Tensor, flags: Tensor) -> Tensor:
        return module(x[:, flags.nonzero().flatten()])[0]

    fallback: Any = config.patch(compile_threads=1, fallback_by_default=True)
    with torch.no_grad(), fallback:  # on torch's own operators, so that no C++ is compiled
        torch.testing.assert_close(torch.compile(function)(x, flags), function(x, flags))


# --- torch.jit --------------------------------------------------------------------------------

TRACED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "fewer dimensions": lambda g, u: linear_scan(g[0], u),
    "states": lambda g, u: linear_scan(g, u, u[:, 0], reverse=True, return_final_state=True),
    "packed": lambda g, u: linear_scan(g, u, cu_seqlens=torch.tensor([0, 2, 5])),
}


@pytest.mark.parametrize("case", TRACED)
def test_scans_can_be_traced_by_jit(case: str) -> None:
    function, (gates, tokens) = TRACED[case], (torch.rand(3, 5), torch.randn(3, 5))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*deprecated.*")
        traced = torch.jit.trace(function, (gates, tokens))
    other = torch.rand(3, 5).requires_grad_(), torch.randn(3, 5).requires_grad_()
    actual, expected = traced(*other), function(*other)
    torch.testing.assert_close(actual, expected)
    first = [item[0] if isinstance(item, tuple) else item for item in (actual, expected)]
    grads = [torch.autograd.grad(item.square().sum(), other) for item in first]
    torch.testing.assert_close(*grads)


# --- Arguments and imports --------------------------------------------------------------------


@pytest.mark.parametrize("dim", [np.int32(-2), np.uint8(1), torch.tensor(1)], ids=repr)
def test_options_are_whatever_stands_for_an_int_or_a_bool(dim: Any) -> None:
    gates, tokens = torch.rand(2, 3, 5), torch.randn(2, 3, 5)
    how: dict[str, Any] = {"reverse": np.bool_(True), "return_final_state": np.bool_(True)}
    expected = linear_scan(gates, tokens, dim=1, reverse=True, return_final_state=True)
    assert all(map(torch.equal, linear_scan(gates, tokens, dim=dim, **how), expected))
    (wx, r, b), _ = network("lstm")
    how = {"gradient_recurrent_cut": np.bool_(True), "forward_clipval": np.float32(2)}
    rnn(wx, r, b, **how)
