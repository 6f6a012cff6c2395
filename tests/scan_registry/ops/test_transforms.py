"""``torch.func``, forward mode, compiled autograd and sizes that depend on data: eager, through the operators
and under torch.compile, against loops in torch."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad

from scan_registry import linear_scan, nn, rnn
from scan_registry.kernels.rnn.problem import SIZES, Function

Program = Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Any]]
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


def loop(gates: Tensor, tokens: Tensor, initial_state: Tensor) -> Tensor:
    states, state = [], initial_state
    for gate, token in zip(gates.unbind(-1), tokens.unbind(-1), strict=True):
        state = gate * state + token
        states.append(state)
    return torch.stack(states, -1)


OF = "gates", "tokens", "initial_state"


@pytest.mark.parametrize(
    ("program", "of", "how"),
    [
        *(
            (program, of, how)
            for program in PROGRAMS
            for of in OF
            for how in ("function", "operator")
        ),
        *((program, OF[number % 3], "compiled") for number, program in enumerate(PROGRAMS)),
    ],
)
def test_transformed_scans_match_a_loop(program: str, of: str, how: str) -> None:
    gates, tokens, state = (torch.rand(s, dtype=torch.float64) for s in ((2, 4), (2, 4), (2,)))
    given = {"gates": gates, "tokens": tokens, "initial_state": state}
    x, d = given[of], torch.rand_like(given[of])

    def by(scan: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: scan(**{**given, of: x})

    def operator(gates: Tensor, tokens: Tensor, initial_state: Tensor) -> Tensor:
        states: Tensor = OP(gates, tokens, initial_state, None, -1, False, False, "auto")[0]
        return states

    transform = PROGRAMS[program]
    expected = transform(by(loop), d)(x)
    found = transform(by(operator if how == "operator" else linear_scan), d)
    if how == "compiled":
        found = compiled(found)
    torch.testing.assert_close(found(x), expected)


@pytest.mark.parametrize("final", [False, True])
def test_the_operator_carries_tangents(final: bool) -> None:
    gates, tokens, dot = (torch.rand(2, 4, dtype=torch.float64) for _ in range(3))
    expected = func.jvp(lambda g: loop(g, tokens, tokens.new_zeros(2)), (gates,), (dot,))[1]
    with forward_ad.dual_level():
        out = OP(forward_ad.make_dual(gates, dot), tokens, None, None, -1, False, final, "auto")
        tangents = [forward_ad.unpack_dual(each).tangent for each in out]
    torch.testing.assert_close(tangents[0], expected)
    if final:
        torch.testing.assert_close(tangents[1], expected[:, -1])


def test_the_backward_operator_carries_tangents() -> None:
    backward = torch.ops.scan_registry.linear_scan_backward.default
    gates, states, grad, dot = (torch.rand(2, 4, dtype=torch.float64) for _ in range(4))
    rest = None, None, None, -1, False, "auto", [True, True, False]

    def of_gates(gates: Tensor) -> Any:
        return backward(gates, states, grad, *rest)[:2]

    expected = [
        (a - b) / 2e-6
        for a, b in zip(of_gates(gates + 1e-6 * dot), of_gates(gates - 1e-6 * dot), strict=True)
    ]
    with forward_ad.dual_level():
        made = of_gates(forward_ad.make_dual(gates, dot))
        tangents = [forward_ad.unpack_dual(each).tangent for each in made]
    assert all(tangent is not None for tangent in tangents)
    torch.testing.assert_close(tangents, expected, rtol=1e-6, atol=1e-8)


# --- Recurrent networks -----------------------------------------------------------------------


def network(function: Function) -> tuple[list[Tensor], Callable[..., Tensor]]:
    """Arguments of ``rnn`` and what it computes of them with the backend ``reference``, in plain torch."""
    sizes = SIZES[function]
    shapes = [(2, 3, sizes.inputs, 1, 2), (sizes.recurrent, 1, 2, 2), (sizes.bias, 1, 2)]
    drawn = [torch.randn(shape, dtype=torch.float64) / 2 for shape in shapes]
    return drawn, lambda *given: rnn(*given, function=function)[0]


OF_NETWORKS = "jvp", "jvp of grad", "vmap of grad", "grad of grad", "grad"


@pytest.mark.parametrize(
    ("function", "program", "how"),
    [
        *((function, program, "function") for function in SIZES for program in OF_NETWORKS),
        # Each function is compiled, and so is each program.
        *(([*SIZES][k % 4], program, "compiled") for k, program in enumerate(OF_NETWORKS)),
    ],
)
def test_transformed_networks_match_finite_differences(
    function: Function, program: str, how: str
) -> None:
    (wx, r, b), states = network(function)

    def of_r(r: Tensor) -> Tensor:
        return states(wx, r, b)

    d = torch.randn_like(r) / 2
    found = PROGRAMS[program](of_r, d)
    if how == "compiled":
        found = compiled(found)
    made, step = found(r), 1e-5

    def plain_grad(r: Tensor) -> Tensor:
        leaf = r.detach().requires_grad_()
        return torch.autograd.grad(square(of_r)(leaf), leaf)[0]

    if program == "grad":
        expected = plain_grad(r)
    elif program == "vmap of grad":
        expected = torch.stack([plain_grad(r), plain_grad(d)])
    elif program == "jvp":
        expected = (of_r(r + step * d) - of_r(r - step * d)) / (2 * step)
    elif program == "jvp of grad":
        expected = (plain_grad(r + step * d) - plain_grad(r - step * d)) / (2 * step)
    else:  # the derivative along d
        made = (made * d).sum()
        ends = [plain_grad(r + sign * step * d).sin().sum() for sign in (1, -1)]
        expected = (ends[0] - ends[1]) / (2 * step)
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-7)


def test_the_states_of_a_transformed_network_are_apart() -> None:
    """What is done in place to the last states leaves all others as they are."""
    (wx, r, b), _ = network("lstm")
    with forward_ad.dual_level():
        every, last = rnn(forward_ad.make_dual(wx, wx), r, b)
        assert every.untyped_storage().data_ptr() != last.untyped_storage().data_ptr()


# --- Compiled autograd ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("forward", ["eager", "compiled"])
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
    "gates of fewer dimensions": lambda g, u, f: linear_scan(g[0], chosen(u, f), u[0, :, 0]),
    "gates of one batch": lambda g, u, f: linear_scan(g[:1], chosen(u, f)),
    "gates that do not change": lambda g, u, f: linear_scan(g[0, :, :1], chosen(u, f)),
    "time": lambda g, u, f: linear_scan(g[..., f.nonzero()[:, 0]], u[..., f.nonzero()[:, 0]]),
    "time first": lambda g, u, f: linear_scan(chosen(g, f).movedim(2, 0), chosen(u, f).movedim(2, 0), dim=0),
    "transposed": lambda g, u, f: linear_scan(chosen(g, f).mT, chosen(u, f).mT, dim=1),
    "network": lambda g, u, f: rnn(
        chosen(u, f).mT[:, :, None, None], g[:1, None, :, :3], None, function="elman"
    )[0],
}  # fmt: skip


@pytest.mark.parametrize("case", SIZED)
def test_compiles_with_sizes_that_depend_on_data(case: str) -> None:
    function, flags = SIZED[case], torch.tensor([1, 0, 0, 1, 0, 1, 0, 0])
    gates, tokens = torch.rand(2, 3, 8), torch.randn(2, 3, 8)
    made = []
    for each in (function, compiled(function)):
        leaves = [t.clone().requires_grad_() for t in (gates, tokens)]
        out = each(*leaves, flags)
        made.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    torch.testing.assert_close(made[1], made[0])


DEEP = {"num_layers": 2, "bidirectional": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "batch_first", "options", "chosen_time"),
    [
        # Both layouts with either size; kinds with and without a second state; layers both ways in either layout.
        ("LSTM", False, {}, False),
        ("LSTM", True, DEEP, True),
        ("GRU", False, DEEP, True),
        ("RNN", True, {}, False),
        ("SLSTM", True, {}, True),
        ("SLSTM", False, {}, False),
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

    made = []
    for each in (function, compiled(function)):
        leaf = x.clone().requires_grad_()
        out = each(leaf, flags)
        weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
        grads = torch.autograd.grad((out * weights).sum(), [leaf, *module.parameters()])
        made.append((out, *grads))
    torch.testing.assert_close(made[1], made[0])
    assert made[1][0].stride() == made[0][0].stride()


@pytest.mark.slow
def test_inductor_takes_a_network_whose_batch_depends_on_data() -> None:
    module, x, flags = nn.LSTM(3, 4), torch.randn(5, 4, 3), torch.tensor([1, 0, 1, 1])

    def function(x: Tensor, flags: Tensor) -> Tensor:
        return module(x[:, flags.nonzero().flatten()])[0]

    with torch.no_grad():
        torch.testing.assert_close(torch.compile(function)(x, flags), function(x, flags))


# --- torch.jit --------------------------------------------------------------------------------

TRACED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "plain": linear_scan,
    "time first": lambda g, u: linear_scan(g, u, dim=0),
    "one gate": lambda g, u: linear_scan(g[:, :1], u),
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
    found, expected = traced(*other), function(*other)
    torch.testing.assert_close(found, expected)
    first = [each[0] if isinstance(each, tuple) else each for each in (found, expected)]
    grads = [torch.autograd.grad(each.square().sum(), other) for each in first]
    torch.testing.assert_close(*grads)


def test_compiled_scans_refuse_shapes_that_do_not_broadcast() -> None:
    with pytest.raises(Exception, match="they must broadcast to one shape"):
        compiled(linear_scan)(torch.rand(2, 3, 5), torch.rand(2, 4, 5))


# --- Arguments and imports --------------------------------------------------------------------


@pytest.mark.parametrize("dim", [np.int64(1), np.int32(-2), np.uint8(1), torch.tensor(1)], ids=repr)
def test_dimensions_are_whatever_stands_for_an_int(dim: Any) -> None:
    gates, tokens = torch.rand(2, 3, 5), torch.randn(2, 3, 5)
    assert torch.equal(linear_scan(gates, tokens, dim=dim), linear_scan(gates, tokens, dim=1))


def test_numpys_bools_are_bools() -> None:
    gates, tokens = torch.rand(2, 3, 5), torch.randn(2, 3, 5)
    given = linear_scan(gates, tokens, reverse=np.bool_(True), return_final_state=np.bool_(True))  # type: ignore[call-overload]
    expected = linear_scan(gates, tokens, reverse=True, return_final_state=True)
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))
    (wx, r, b), _ = network("lstm")
    rnn(wx, r, b, gradient_recurrent_cut=np.bool_(True), forward_clipval=np.float32(2))  # type: ignore[arg-type]


AGAIN = """
import gc, sys, torch
from scan_registry import linear_scan as old
gates, tokens = torch.rand(2, 3, 5), torch.randn(2, 3, 5)
expected = old(gates, tokens)
for name in [name for name in sys.modules if name.partition(".")[0] == "scan_registry"]:
    del sys.modules[name]
from scan_registry import linear_scan as new, nn, rnn
gc.collect()
assert new is not old
leaf = gates.clone().requires_grad_()
for scan in (new, old):
    scan(leaf, tokens).sum().backward()
    assert torch.equal(torch.func.vmap(scan)(gates, tokens), expected)
compiled = torch.compile(new, backend="aot_eager", fullgraph=True)
assert torch.equal(compiled(leaf, tokens), expected)
compiled(leaf, tokens).sum().backward()
torch.compile(nn.LSTM(3, 4), backend="aot_eager", fullgraph=True)(tokens.mT)[0].sum().backward()
"""


@pytest.mark.slow
def test_the_package_can_be_imported_again_in_one_process(tmp_path: Path) -> None:
    # Not in the sources' folder, which would be imported in place of the installed package.
    command = [sys.executable, "-c", AGAIN]
    run = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", check=False, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("places", [(1, 2, 1), (2, 0, None), (None, 3, 0), (3, None, 1)])
def test_a_mapped_dimension_may_be_any(places: tuple[int | None, ...]) -> None:
    """Of gates, tokens and the initial state."""
    whole = torch.rand(3, 2, 4, 6), torch.randn(3, 2, 4, 6), torch.randn(3, 2, 4)
    given = [
        x[0] if place is None else x.movedim(0, place)
        for x, place in zip(whole, places, strict=True)
    ]
    found = func.vmap(linear_scan, in_dims=places)(*given)
    for n in range(3):
        one = [x[0 if place is None else n] for x, place in zip(whole, places, strict=True)]
        torch.testing.assert_close(found[n], linear_scan(*one))
