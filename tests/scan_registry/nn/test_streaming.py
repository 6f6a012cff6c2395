"""A sequence in parts, with the state handed on, is the whole sequence: outputs, and derivatives through the states."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from layers import FEATURES, MAKERS
from networks import BOTH_WAYS, MAMBA, MODULES, PROJECTED, RECURRENT, final_state
from torch import Tensor

from scan_registry import nn

BATCH, LENGTH = 2, 11
#: A module that goes both ways has no state to hand on.
STREAMING = [name for name in MODULES if name not in BOTH_WAYS and name != "S5-bidir"]


def make(name: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(3)
    return MODULES[name](dtype=dtype)


def given(dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(4)
    return torch.randn(BATCH, LENGTH, FEATURES).to(dtype).requires_grad_()


def cuts(seed: int) -> list[int]:
    """Lengths of parts, of which some have one step and some none."""
    generator = random.Random(seed)
    at = sorted(generator.choices(range(LENGTH + 1), k=generator.randint(1, 5)))
    return [end - begin for begin, end in zip([0, *at], [*at, LENGTH], strict=True)]


def in_parts(module: Any, x: Tensor, lengths: list[int]) -> tuple[Tensor, Any]:
    state, outputs = None, []
    for part in x.split(lengths, 1):
        y, state = final_state(module, part, state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def flat(state: Any) -> list[Tensor]:
    return [state] if isinstance(state, Tensor) else [*state]


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual[0], expected[0])
    torch.testing.assert_close(flat(actual[1]), flat(expected[1]))


def test_every_module_is_here() -> None:
    assert {type(make(name)).__name__ for name in STREAMING} == {*nn.__all__} - {"RMSNormGated"}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", STREAMING)
def test_parts_are_the_whole(name: str, seed: int) -> None:
    module, x = make(name), given()
    with torch.no_grad():
        assert_same(in_parts(module, x, cuts(seed)), final_state(module, x, None))


@pytest.mark.parametrize("name", [name for name in STREAMING if name not in MAMBA])
def test_derivatives_go_through_the_states(name: str) -> None:
    module, x = make(name), given()
    wanted = [x, *module.parameters()]

    def gradients(actual: tuple[Tensor, Any]) -> list[Tensor]:
        loss = actual[0].square().sum() + sum(
            state.abs().square().sum() for state in flat(actual[1])
        )
        return [*torch.autograd.grad(loss, wanted)]

    expected = gradients(final_state(module, x, None))
    for seed in range(2):
        torch.testing.assert_close(gradients(in_parts(module, x, cuts(seed))), expected)


@pytest.mark.parametrize("name", STREAMING)
def test_one_step_at_a_time(name: str) -> None:
    """By ``step`` where there is one."""
    module, x = make(name), given().detach()
    with torch.no_grad():
        whole = final_state(module, x, None)
        state, outputs = None, []
        if name in MAMBA:
            state = module.allocate_inference_cache(BATCH, 0)
        for part in x.split(1, 1):
            if name in RECURRENT | PROJECTED:
                y, state = module(part, state)
            elif name in MAKERS:
                y, state = module.step(part.squeeze(1), state)
                y = y.unsqueeze(1)
            else:
                y, *state = module.step(part, *state)
            outputs.append(y)
        assert_same((torch.cat(outputs, 1), state), whole)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_state_may_come_from_torch(kind: str) -> None:
    """And go there: a stream may change from one to the other."""
    module, x = make(kind), given()
    theirs = getattr(torch.nn, kind)(FEATURES, FEATURES, batch_first=True, dtype=torch.float64)
    theirs.load_state_dict(module.state_dict())
    whole = module(x)
    for first, second in ((module, theirs), (theirs, module)):
        y, state = first(x[:, :4])
        rest, last = second(x[:, 4:], state)
        assert_same((torch.cat([y, rest], 1), last), whole)
