"""Modules inside a module are called: what replaces, hooks, parametrizes, quantizes or offloads one of them acts in calls,
in steps and in generation from a cache, as the same change of the weights does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layers import FEATURES
from networks import MAMBA, MODULES, final_state
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize

from scan_registry import nn

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, LENGTH, FACTOR = 2, 5, 1.5
#: The submodules of every module, in which a new module is, too: test_streaming sees to it that MODULES has it.
INSIDE = [
    (name, path) for name in MODULES for path, _ in MODULES[name]().named_modules() if path != ""
]
WHOLE = [name for name in MODULES if any(name == owner for owner, _ in INSIDE)]


def make(name: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(3)
    return MODULES[name](dtype=dtype)


def given(dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(4)
    return torch.randn(BATCH, LENGTH, FEATURES).to(dtype)


# --- What modules compute ----------------------------------------------------------------------


def called(module: Any, x: Tensor) -> Tensor:
    y = module(x)
    result: Tensor = y[0] if isinstance(y, tuple) else y
    return result


def stepped(module: Any, x: Tensor) -> Tensor:
    """By ``step`` alone."""
    outputs: list[Tensor] = []
    state: Any = None
    if isinstance(module, (nn.Mamba, nn.Mamba2)):
        states = module.allocate_inference_cache(x.shape[0], 0)
        return torch.cat([module.step(item, *states)[0] for item in x.split(1, 1)], 1)
    for item in x.unbind(1):
        y, state = module.step(item, state)
        outputs.append(y)
    return torch.stack(outputs, 1)


def generated(module: Any, x: Tensor) -> Tensor:
    """A part of several steps, then one step after the other, each a call that goes on from the states before it."""
    state, outputs = None, []
    for part in x.split([LENGTH - 2, 1, 1], 1):
        y, state = final_state(module, part, state)
        outputs.append(y)
    return torch.cat(outputs, 1)


def ways(module: Any) -> list[Callable[[Any, Tensor], Tensor]]:
    return [called] if getattr(module, "bidir", False) else [called, stepped, generated]


def assert_same(actual: Any, expected: Any, x: Tensor, unlike: Any = None) -> None:
    """In training, with the input's gradient, and in evaluation; and another function than ``unlike``."""
    for compute in ways(expected):
        with torch.no_grad():
            y = compute(actual.eval(), x)
            torch.testing.assert_close(y, compute(expected.eval(), x))
            assert unlike is None or not torch.allclose(y, compute(unlike, x), rtol=1e-3)
    gradients = []
    for module in (actual.train(), expected.train()):
        inputs = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(called(module, inputs).square().sum(), inputs)
        gradients.append(gradient)
    torch.testing.assert_close(*gradients)


# --- Changes of a submodule, each with the same change of its weights ---------------------------


class Adapted(torch.nn.Module):
    """Another forward, and no weight to read: with a low-rank addition if it is a map, else times ``FACTOR``."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base, self.delta = base, None
        if isinstance(base, torch.nn.Linear):
            self.delta = 0.3 * torch.randn(len(base.weight), 2) @ torch.randn(2, base.in_features)
        elif isinstance(base, torch.nn.Conv1d):
            self.delta = torch.randn(base.weight.shape)
        if self.delta is not None:
            self.delta = self.delta.to(base.weight.dtype)

    def forward(self, *arguments: Any) -> Any:
        result = self.base(*arguments)
        if isinstance(self.base, torch.nn.Linear):
            return result + functional.linear(*arguments, self.delta)
        if isinstance(self.base, torch.nn.Conv1d):
            options = {"padding": self.base.padding, "groups": self.base.groups}
            return result + functional.conv1d(*arguments, self.delta, **options)
        return times(result)


class Times(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return FACTOR * x


def times(result: Any) -> Any:
    """An output, which may have a state beside it."""
    return (FACTOR * result[0], *result[1:]) if isinstance(result, tuple) else FACTOR * result


def outputs_of(inside: Any) -> list[Tensor]:
    """The parameters that an output is proportional to."""
    own = dict(inside.named_parameters())
    return [own["C"], own["D"]] if "C" in own else [*own.values()]


def wrap(module: Any, path: str) -> list[Tensor]:
    adapted = Adapted(module.get_submodule(path))
    module.set_submodule(path, adapted)
    return [] if adapted.delta is None else [adapted.delta]


class Coded(Tensor):
    """A weight whose values ``linear`` alone knows, by position, as torchao's quantized ones do."""

    values: Tensor

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.linear:
            return functional.linear(args[0], args[1].values, *args[2:], **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def code(module: Any, path: str) -> list[Tensor]:
    inside = module.get_submodule(path)
    delta = torch.randn(inside.weight.shape, dtype=inside.weight.dtype)
    values = inside.weight.detach() + delta
    del inside.weight
    inside.weight = torch.zeros_like(values).as_subclass(Coded)
    inside.weight.values = values
    return [delta]


def hook(module: Any, path: str) -> None:
    module.get_submodule(path).register_forward_hook(lambda _, __, result: times(result))


def parametrized(module: Any, path: str) -> None:
    inside = module.get_submodule(path)
    for name in [name for name, item in inside.named_parameters() if is_in(item, inside)]:
        parametrize.register_parametrization(inside, name, Times())


def is_in(parameter: Tensor, inside: Any) -> bool:
    return any(parameter is item for item in outputs_of(inside))


def merged(name: str, path: str, deltas: list[Tensor] | None) -> Any:
    module = make(name)
    inside = module.get_submodule(path)
    with torch.no_grad():
        if deltas:
            inside.weight.add_(deltas[0])
        elif [*inside.parameters()]:
            for parameter in outputs_of(inside):
                parameter.mul_(FACTOR)
        else:
            module.set_submodule(path, Times())
    return module


@pytest.mark.parametrize("change", [wrap, hook, code, parametrized])
@pytest.mark.parametrize(("name", "path"), INSIDE)
def test_a_changed_submodule_is_as_changed_weights(
    name: str, path: str, change: Callable[[Any, str], Any]
) -> None:
    module, x = make(name), given()
    inside = module.get_submodule(path)
    if change is parametrized and not [*inside.parameters()]:
        return
    if change is code and not isinstance(inside, torch.nn.Linear):
        return
    deltas = change(module, path)
    assert_same(module, merged(name, path, deltas), x, unlike=make(name))
    assert repr(module)


@pytest.mark.parametrize("name", WHOLE)
def test_every_submodule_is_called(name: str) -> None:
    """By what watches all calls of all modules."""
    module, x = make(name), given()
    paths = {inside: path for path, inside in module.named_modules()}
    for compute in ways(module):
        seen: set[str] = set()
        watching = register_module_forward_hook(lambda item, *_: seen.add(paths[item]))  # noqa: B023
        try:
            compute(module, x)
        finally:
            watching.remove()
        assert seen >= {path for owner, path in INSIDE if owner == name}, compute.__name__


@pytest.mark.parametrize("name", MAMBA)
def test_a_convolution_that_returns_too_little_is_refused(name: str) -> None:
    module, x = make(name), given()
    base = module.conv1d
    module.conv1d = torch.nn.Sequential(base, torch.nn.AvgPool1d(4))
    with pytest.raises(
        ValueError, match=r"conv1d returned \(2, (16|32), 2\) for \(2, (16|32), 5\)"
    ):
        module(x)


# --- Quantized and offloaded submodules ----------------------------------------------------------


def linears(module: Any) -> list[tuple[str, Any]]:
    return [(p, item) for p, item in module.named_modules() if isinstance(item, torch.nn.Linear)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", [name for name in WHOLE if linears(MODULES[name]())])
def test_torchs_dynamic_quantization(name: str) -> None:
    module, x = make(name, torch.float32).eval(), given(torch.float32)
    quantized = torch.ao.quantization.quantize_dynamic(module, {torch.nn.Linear})
    assert not linears(quantized)
    for compute in ways(module):
        with torch.no_grad():
            actual, expected = compute(quantized, x), compute(module, x)
        assert 0 < (actual - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("name", MODULES)
def test_parameters_that_hooks_bring(name: str) -> None:
    """On meta but during a call of the module that they are of."""
    module, expected, x = make(name).eval(), make(name).eval(), given()
    for inside in module.modules():
        kept = {key: p.detach().clone() for key, p in inside.named_parameters(recurse=False)}

        def place(inside: Any, *_: Any, to: dict[str, Tensor]) -> None:
            for key, value in to.items():
                setattr(inside, key, torch.nn.Parameter(value, requires_grad=False))

        away = {key: value.to("meta") for key, value in kept.items()}
        if not kept:
            continue
        place(inside, to=away)
        inside.register_forward_pre_hook(lambda m, _, to=kept, place=place: place(m, to=to))
        inside.register_forward_hook(lambda m, *_, to=away, place=place: place(m, to=to))
    with torch.no_grad():
        y, _ = final_state(module, x, None)
        torch.testing.assert_close(y, final_state(expected, x, None)[0])
        assert all(p.is_meta for p in module.parameters())


@pytest.mark.parametrize("name", MAMBA)
def test_mamba_with_a_scripted_convolution(name: str) -> None:
    module, x = make(name).eval(), given()
    expected, *states = make(name).eval(), *module.allocate_inference_cache(x.shape[0], 0)
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        module.conv1d = torch.jit.script(module.conv1d)
    with torch.no_grad():
        torch.testing.assert_close(module(x), expected(x))
        for actual, y in zip(x.split(1, 1), expected(x).split(1, 1), strict=True):
            torch.testing.assert_close(module.step(actual, *states)[0], y)


@pytest.mark.parametrize("change", [{"dilation": 2, "padding": 6}, {"padding_mode": "replicate"}])
@pytest.mark.parametrize("name", MAMBA)
def test_mamba_refuses_another_convolution(name: str, change: dict[str, Any]) -> None:
    module, x = make(name), given()
    own: Any = module.conv1d
    sizes = {"groups": own.groups, "padding": own.padding[0]} | change
    module.conv1d = torch.nn.Conv1d(
        own.in_channels, own.out_channels, *own.kernel_size, **sizes
    ).to(x)
    with pytest.raises(ValueError, match=f"{name}: Expected conv1d with .*({'|'.join(change)})"):
        module(x)


@pytest.mark.parametrize("features", [-1, 1])
def test_mamba_refuses_a_projection_to_another_number_of_features(features: int) -> None:
    module, x = make("Mamba"), given()
    own: Any = module.x_proj
    wrong = own.out_features + features
    linear = torch.nn.Linear(own.in_features, wrong, bias=False)
    module.x_proj = torch.nn.Sequential(linear).to(x)
    states = module.allocate_inference_cache(x.shape[0], 0)
    words = f"x_proj returned {wrong} features; .* has to return {own.out_features}"
    for call in (lambda: module(x), lambda: module.step(x[:, :1], *states)):
        with pytest.raises(ValueError, match=words):
            call()
