"""Public operators, modules and their steps, compiled by inductor: outputs, states and gradients are those of eager calls.

Inductor checks the strides of what operators return, which "aot_eager" does not. Most tests have inductor call torch's own
operators, so that nothing waits for a C++ compiler; some generate C++ as users have it.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
from covering import rest_thorough
from layers import FEATURES
from networks import MAMBA, MODULES, final_state, output
from torch import Tensor
from torch._inductor import config

import scan_registry as sr
from scan_registry import nn

B, D, N, T, W = 2, 4, 3, 5, 3

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    with config.patch(compile_threads=1, force_disable_caches=True, fallback_by_default=True):
        yield


@pytest.fixture
def _generated() -> Iterator[None]:
    """Inductor generates C++, one number at a time: its loops over vectors are torch's own matter, and their headers, and trials
    of what the processor can do, would take most of the time."""
    if shutil.which(config.cpp.cxx[1]) is None:
        pytest.skip(f"needs {config.cpp.cxx[1]}")
    scalar = {"cpp.simdlen": 1, "cpp.vec_isa_ok": True}
    with config.patch({"fallback_by_default": False, **scalar}):
        yield


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True)


def some(*shape: int) -> Tensor:
    return 0.1 + 0.8 * torch.rand(*shape)


def turned(*shape: int) -> Tensor:
    """With its last two dimensions the other way round in memory."""
    return some(*shape[:-2], shape[-1], shape[-2]).mT


final = {"return_final_state": True}
#: Of each function: how it is called, and its tensors.
TRAINING: dict[str, tuple[Callable[..., Any], Callable[[], list[Tensor]]]] = {
    "linear_scan": (
        partial(sr.linear_scan, dim=1, **final),
        lambda: [some(1, T, 1), turned(B, T, D), some(B, D)],
    ),
    "linear_scan_summary": (sr.linear_scan_summary, lambda: [turned(B, D, T), some(B, D, T)]),
    "gated_scan": (
        lambda *tensors: sr.gated_scan("hgrn", *tensors[:3], initial_state=tensors[3], **final),
        lambda: [some(B, D, T), turned(B, D, T), some(D), some(B, D)],
    ),
    "rnn": (
        partial(sr.rnn, function="gru"),
        lambda: [some(T, B, 3, 1, D).transpose(0, 1), turned(3, 1, D, D), some(4, 1, D)],
    ),
    "selective_scan": (
        lambda *tensors: sr.selective_scan(*tensors, delta_softplus=True, **final),  # type: ignore[call-overload]
        lambda: [
            *(some(B, D, T), turned(B, D, T), -turned(D, N), turned(B, N, T), turned(B, N, T)),
            *(some(D), turned(B, D, T), some(D)),
        ],
    ),
    "ssd_scan": (
        lambda *tensors: sr.ssd_scan(*tensors, dt_softplus=True, **final),  # type: ignore[call-overload]
        lambda: [
            *(some(B, T, 2, D), some(B, T, 2), -some(2), some(B, T, 1, N), some(B, T, 1, N)),
            *(some(2), some(B, T, 2, D), some(2)),
        ],
    ),
    "causal_conv1d": (
        lambda x, weight, bias, state: sr.causal_conv1d(
            x, weight, bias, initial_state=state, activation="silu", return_final_state=True
        ),
        lambda: [turned(B, D, T), turned(D, W), some(D), some(B, D, W - 1)],
    ),
}
#: Functions without derivatives, and which of the tensors is changed in place.
STEPS: dict[str, tuple[Callable[..., Any], int, Callable[[], list[Tensor]]]] = {
    "linear_scan_step": (sr.linear_scan_step, 0, lambda: [turned(B, D), some(B, D), some(B, D)]),
    "causal_conv1d_update": (
        sr.causal_conv1d_update,
        1,
        lambda: [some(B, D), turned(B, D, W), some(D, W), some(D)],
    ),
    "selective_state_update": (
        partial(sr.selective_state_update, dt_softplus=True),
        0,
        lambda: [
            *(turned(B, D, N), some(B, D), some(B, D), -some(D, N), some(B, N), some(B, N)),
            *(some(D), some(B, D), some(D)),
        ],
    ),
}


def test_every_public_operator_has_a_case() -> None:
    public = {name: getattr(sr, name) for name in sr.__all__}
    operators = {
        name
        for name, item in public.items()
        if isinstance(item, FunctionType) and item.__module__.startswith("scan_registry.kernels.")
    }
    # Modules of each kind of gated scan train below.
    assert operators == {*TRAINING, *STEPS, "hgrn", "min_gru", "min_lstm", "rg_lru"}


def outputs_and_gradients(function: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    result = function(*leaves)
    outputs = [result] if isinstance(result, Tensor) else [*result]
    loss = sum((y * torch.linspace(1, 2, y.numel()).view(y.shape)).sum() for y in outputs)
    return [*outputs, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("name", TRAINING)
def test_operators(name: str) -> None:
    torch.manual_seed(0)
    function, make = TRAINING[name]
    tensors = make()
    expected = outputs_and_gradients(function, tensors)
    actual = outputs_and_gradients(compiled(function), tensors)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", STEPS)
def test_operators_that_change_a_state(name: str) -> None:
    torch.manual_seed(0)
    function, place, make = STEPS[name]
    tensors = make()
    before = tensors[place].clone()
    others = [t.clone() for t in tensors]

    def of(*tensors: Tensor) -> Tensor:
        return function(*tensors) * 2  # type: ignore[no-any-return]

    for _ in range(2):
        torch.testing.assert_close(compiled(of)(*tensors), of(*others))
        torch.testing.assert_close(tensors, others)
    assert not torch.equal(tensors[place], before)


#: A module of each class; those left out differ from them in no operator.
NAMES = [*(name for name in nn.__all__ if name != "RMSNormGated"), "LSTM projected"]
#: A class of each operator. That of selective scans is trained with generated code below.
FEW = ("LSTM", "MinGRU", "LRU", "Mamba2")


STEPPING = [name for name in nn.__all__ if hasattr(getattr(nn, name), "step")]


def trained(name: str) -> None:
    torch.manual_seed(0)
    module, x = MODULES[name](), torch.randn(B, T, FEATURES)
    created = []
    for item, of in ((copy.deepcopy(module), lambda one: one), (module, compiled)):
        optimizer, call, losses = torch.optim.SGD(item.parameters(), lr=1e-3), of(item), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = output(call(x)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        gradients = [p.grad for p in item.parameters() if p.grad is not None]
        created.append([*losses, *gradients, *item.parameters()])
    torch.testing.assert_close(*created)
    assert created[0][0] != created[0][2]


def stepped(name: str) -> None:
    torch.manual_seed(0)
    module, x = MODULES[name](), torch.randn(B, T, FEATURES)
    in_place, created = name in MAMBA, []
    with torch.no_grad():
        for step in (module.step, compiled(module.step)):
            first = state = final_state(module, x, None)[1]
            for t in (0, 1):
                if in_place:
                    y, *state = step(x[:, t : t + 1], *state)
                else:
                    y, state = step(x[:, t], state)
            created.append((y, state, first))
    torch.testing.assert_close(*created)
    assert not in_place or torch.equal(created[1][1][0], created[1][2][0])


@pytest.mark.parametrize("name", rest_thorough(NAMES, FEW))
def test_modules_train(name: str) -> None:
    trained(name)


@pytest.mark.parametrize("name", rest_thorough(STEPPING, FEW))
def test_steps(name: str) -> None:
    stepped(name)


@pytest.mark.parametrize("name", rest_thorough(["Mamba", "Mamba2"], ["Mamba2"]))
def test_gradients_are_those_of_the_states_before_the_call(name: str) -> None:
    """Of a call that changes states in place. Other backends drop no copies."""
    block = nn.Mamba(8) if name == "Mamba" else nn.Mamba2(8, d_state=4, headdim=8)
    x = torch.randn(2, 6, 8)

    def gradients(function: torch.nn.Module) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        states = tuple(torch.randn_like(state) for state in block.allocate_inference_cache(2, 0))
        loss = sum(function(part, states=states).square().sum() for part in x.split(3, 1))
        assert isinstance(loss, Tensor)
        return torch.autograd.grad(loss, [*block.parameters()])

    torch.testing.assert_close(gradients(compiled(block)), gradients(block), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("_generated")
def test_generated_code(thorough: bool) -> None:
    """Of the module of most operators, and once a week of one operator. A compiler takes seconds for each, and as many for the
    headers that they share, and so they are one test."""
    for check, name in ((trained, "Mamba"), (test_operators, "linear_scan"))[: 1 + thorough]:
        torch.compiler.reset()
        check(name)
