"""What torch does with modules, of each of the package's: compilers, exports, parametrizations, hooks, threads, and inputs
of no row and no step."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layers import FEATURES
from networks import MAMBA, MODULES, PROJECTED, output
from threading_calls import in_threads
from torch import Tensor
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from scan_registry.ops.operator import operators
from scan_registry.ops.registration import NAMESPACE

EVERY = pytest.mark.parametrize("name", MODULES)
BATCH, LENGTH = 2, 5


@pytest.fixture
def _nothing_compiled() -> None:
    torch.compiler.reset()


def make(name: str, **how: Any) -> Any:
    torch.manual_seed(0)
    return MODULES[name](**how)


def given(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, length, FEATURES, requires_grad=True)


def gradients(module: Any, x: Tensor, call: Callable[..., Any] | None = None) -> list[Tensor]:
    """Of all parameters that have one, and of the input."""
    y = output((module if call is None else call)(x))
    wanted = [*[p for p in module.parameters() if p.requires_grad], x]
    return [*torch.autograd.grad(y.float().square().sum(), wanted)]


def matrices(module: Any) -> list[tuple[Any, str]]:
    """Every real matrix, or stack of some, that is not zero, by the module that holds it and its name."""
    return [
        (owner, name)
        for owner in [*module.modules()]
        for name, parameter in [*owner.named_parameters(recurse=False)]
        if parameter.dim() >= 2 and not parameter.is_complex() and parameter.abs().sum() > 0
    ]


# --- Compilers ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("_nothing_compiled")
def test_one_graph_with_its_gradients() -> None:
    """Of several layers, in both directions. ``test_inductor.py`` has a module of each class."""
    module, x = make("LSTM both ways"), given()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x))
    torch.testing.assert_close(gradients(module, x, compiled), gradients(module, x))


@pytest.mark.usefixtures("_nothing_compiled")
@pytest.mark.parametrize("name", ["GRU", "MinGRU"])
def test_one_graph_of_parametrized_weights(name: str) -> None:
    module, x = make(name), given()
    for owner, weight in matrices(module):
        parametrizations.weight_norm(owner, weight)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(module, x, compiled), gradients(module, x))


@pytest.mark.usefixtures("_nothing_compiled")
@pytest.mark.parametrize(
    ("name", "strict"),
    [
        *((name, False) for name in ("SLSTM", "GRU both ways", *PROJECTED, "MinLSTM", "LRU")),
        *((name, True) for name in ("LSTM", *MAMBA)),
    ],
)
def test_exports(name: str, strict: bool) -> None:
    module, x = make(name), given().detach()
    auto = torch.export.Dim.AUTO
    fixed = name in PROJECTED  # torch fixes the number of steps of its own function
    sizes = () if strict else ({0: auto} if fixed else {0: auto, 1: auto},)
    exported = torch.export.export(module, (x,), dynamic_shapes=sizes or None, strict=strict)
    other = x if strict else given(3, LENGTH if fixed else 7).detach()
    torch.testing.assert_close(exported.module()(other), module(other))


# --- Dtypes -------------------------------------------------------------------------------------


@EVERY
def test_autocast(name: str) -> None:
    """The output is in autocast's dtype, but RG-LRU's, which has no product that autocast converts; gradients have the dtypes
    of what they are of."""
    module, x = make(name), given()
    with torch.autocast("cpu", torch.bfloat16):
        y = output(module(x))
    assert y.dtype == (torch.float32 if name == "RGLRU" else torch.bfloat16)
    torch.testing.assert_close(y.float(), output(module(x)), rtol=0.1, atol=0.1)
    wanted = [*module.parameters(), x]
    actual = torch.autograd.grad(y.float().square().sum(), wanted)
    assert [grad.dtype for grad in actual] == [item.dtype for item in wanted]


@EVERY
def test_meta(name: str) -> None:
    module, x = make(name, device="meta"), torch.empty(2, 5, FEATURES, device="meta")
    y = output(module(x))
    assert y.is_meta
    y.sum().backward()
    module = module.to_empty(device="cpu")
    module.load_state_dict(make(name).state_dict())
    torch.testing.assert_close(output(module(given())), output(make(name)(given())))


# --- Parameters ---------------------------------------------------------------------------------


@EVERY
def test_weight_norm(name: str) -> None:
    """The weights are computed anew at each call, from what the optimizer changes."""
    module, x = make(name), given()
    before = output(module(x))
    for owner, weight in matrices(module):
        parametrizations.weight_norm(owner, weight)
    torch.testing.assert_close(output(module(x)), before)
    parameters = dict(module.named_parameters())
    loss = output(module(x)).square().sum()
    for key, grad in zip(
        parameters, torch.autograd.grad(loss, [*parameters.values()]), strict=True
    ):
        assert grad.abs().sum() > 0 or "original0" not in key
    with torch.no_grad():
        for key, parameter in parameters.items():
            if "original0" in key:
                parameter.mul_(1.5)
    changed = output(module(x))
    assert not torch.allclose(changed, before)
    for owner, weight in matrices(module):
        if torch.nn.utils.parametrize.is_parametrized(owner, weight):
            torch.nn.utils.parametrize.remove_parametrizations(owner, weight)
    torch.testing.assert_close(output(module(x)), changed)


@EVERY
def test_frozen_parameters(name: str) -> None:
    module, x = make(name), given()
    full = gradients(module, x)
    for k, parameter in enumerate(module.parameters()):
        parameter.requires_grad_(False)
        torch.testing.assert_close(gradients(module, x), full[:k] + full[k + 1 :])
        parameter.requires_grad_(True)
    module.requires_grad_(False)
    torch.testing.assert_close(gradients(module, x), full[-1:])
    assert not output(module(x.detach())).requires_grad


@EVERY
def test_conversions(name: str) -> None:
    module, x = make(name), given().detach()
    for dtype in (torch.float64, torch.bfloat16):
        y = output(copy.deepcopy(module).to(dtype)(x.to(dtype)))
        assert y.dtype == dtype
        torch.testing.assert_close(y.float(), output(module(x)), rtol=0.1, atol=0.1)
    assert torch.equal(output(pickle.loads(pickle.dumps(module))(x)), output(module(x)))
    loaded = MODULES[name]()
    loaded.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)
    assert torch.equal(output(loaded(x)), output(module(x)))


# --- Calls --------------------------------------------------------------------------------------


@EVERY
def test_hooks(name: str) -> None:
    module, seen = make(name), []
    module.register_forward_pre_hook(lambda *_: seen.append("before"))
    module.register_forward_hook(lambda *_: seen.append("after"))
    module.register_full_backward_hook(lambda *_: seen.append("backward"))
    for key, parameter in module.named_parameters():
        parameter.register_hook(lambda _, key=key: seen.append(key))
    output(module(given())).sum().backward()
    assert seen[:2] == ["before", "after"]
    assert sorted(seen[2:]) == sorted(["backward", *dict(module.named_parameters())])


@EVERY
@pytest.mark.parametrize("shape", [(0, LENGTH), (BATCH, 0), (0, 0), (1, 1), (BATCH, 1)], ids=str)
def test_few_rows_and_steps(name: str, shape: tuple[int, int]) -> None:
    module, x = make(name), given(*shape)
    y = output(module(x))
    assert y.shape[:2] == shape
    result = gradients(module, x)
    assert [grad.shape for grad in result] == [p.shape for p in (*module.parameters(), x)]
    if 0 in shape:
        assert not any(grad.any() for grad in result)


@EVERY
def test_threads(name: str) -> None:
    module, x = make(name), given()
    expected, wrong = gradients(module, x), []

    def work() -> None:
        own = x.detach().clone().requires_grad_()
        for _ in range(3):
            actual = gradients(module, own)
            wrong.extend(
                k for k, (one, two) in enumerate(zip(actual, expected, strict=True))
                if not torch.allclose(one, two, rtol=1e-4, atol=1e-5)
            )  # fmt: skip

    in_threads(work, work)
    assert not wrong


def test_modules_may_go_before_their_graphs() -> None:
    graphs = []
    for name in MODULES:
        module, x = make(name), given()
        graphs.append((output(module(x)).square().sum(), x, gradients(module, x)[-1]))
        del module
    gc.collect()
    for loss, x, expected in graphs:
        torch.testing.assert_close(torch.autograd.grad(loss, x)[0], expected)


@EVERY
def test_checkpoints(name: str) -> None:
    module, x = make(name), given()
    result = gradients(module, x, lambda x: checkpoint(module, x, use_reentrant=False))
    torch.testing.assert_close(result, gradients(module, x))


@EVERY
def test_transforms(name: str) -> None:
    module, x = make(name), given().detach()
    values = {key: item.detach() for key, item in module.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return output(torch.func.functional_call(module, values, (x,))).square().sum()

    actual = torch.func.vmap(torch.func.grad(loss), (None, 0))(values, torch.stack([x, -x]))
    for sign, row in ((1, 0), (-1, 1)):
        expected = gradients(module, (sign * x).requires_grad_())[:-1]
        for grad, other in zip(actual.values(), expected, strict=True):
            torch.testing.assert_close(grad[row], other, rtol=1e-4, atol=1e-5)


@EVERY
def test_gradients_that_are_differentiated(name: str) -> None:
    """They are those that are not, though what a scan is given is all computed from one input."""
    module = make(name, dtype=torch.float64)
    x = given(BATCH, 3).detach().double().requires_grad_()
    y, wanted = output(module(x)), [x, *module.parameters()]
    weight = torch.randn_like(y)
    expected = torch.autograd.grad(y, wanted, weight, retain_graph=True)
    actual = torch.autograd.grad(y, wanted, weight, create_graph=True)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)
    assert torch.autograd.gradgradcheck(
        lambda x: output(module(x)), (x,), (weight,), fast_mode=True, atol=1e-4
    )


@EVERY
def test_batches_of_gradients(name: str) -> None:
    """As Jacobians are taken: by torch's own batches, and by ``torch.func.vmap`` over a backward pass."""
    module = make(name, dtype=torch.float64)
    x = given().detach().double().requires_grad_()
    y, wanted = output(module(x)), [x, *module.parameters()]
    vectors = torch.randn(2, *y.shape, dtype=y.dtype)

    def backward(vector: Tensor, **how: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, wanted, vector, retain_graph=True, **how)

    for actual in (backward(vectors, is_grads_batched=True), torch.func.vmap(backward)(vectors)):
        for row, vector in enumerate(vectors):
            for grad, expected in zip(actual, backward(vector), strict=True):
                torch.testing.assert_close(grad[row], expected, rtol=1e-5, atol=1e-7)


@EVERY
def test_inference_mode(name: str) -> None:
    module, x = make(name), given().detach()
    expected = output(module(x))
    with torch.inference_mode():
        torch.testing.assert_close(output(module(x)), expected)
        own = copy.deepcopy(module)
    with torch.no_grad():
        torch.testing.assert_close(output(own(x)), expected)
    assert output(module(x)).requires_grad


# --- Operators ---------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Names of the package's operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == NAMESPACE:
            self.names.add(function._schema.name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MODULES)
def test_a_module_names_the_operators_that_it_calls(name: str) -> None:
    """``explain`` tells these names. A kind of ``gated_scan`` is an operator in the public interface alone."""
    module = MODULES[name]()
    with torch.no_grad(), Calls() as calls:
        module(torch.randn(2, 5, FEATURES))
    kinds = operators()["gated_scan"].others
    own = {"gated_scan" if operator in kinds else operator for operator in module.operators}
    assert {called.partition("::")[2] for called in calls.names} == own
    assert bool(own) == (name not in PROJECTED | {"LSTM projected both ways": None})
