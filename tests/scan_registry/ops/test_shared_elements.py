"""Functions that change a state in place refuse one of which elements share memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from scan_registry import causal_conv1d_update, linear_scan_step, selective_state_update
from scan_registry.ops.checks import refuse_shared_elements


def update(state: Tensor) -> Tensor:
    x, rows = torch.ones(state.shape[:-1]), torch.ones(state.shape[0], state.shape[2])
    return selective_state_update(state, x, x, -torch.ones(state.shape[1:]), rows, rows)


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "state of linear_scan_step": lambda state: linear_scan_step(state, state * 2, state * 3),
    "state of selective_state_update": update,
    "conv_state of causal_conv1d_update": lambda state: causal_conv1d_update(
        torch.ones(state.shape[:2]), state, torch.ones(state.shape[1], state.shape[2])
    ),
}
SHARED: dict[str, Callable[[], Tensor]] = {
    "windows": lambda: torch.ones(2, 6).unfold(1, 3, 1),
    "strides": lambda: torch.ones(40).as_strided((2, 4, 3), (1, 3, 1)),
    "rows": lambda: torch.ones(40).as_strided((2, 4, 3), (11, 3, 1)),
}
SEPARATE: dict[str, Callable[[], Tensor]] = {
    "whole": lambda: torch.ones(2, 4, 3),
    "transposed": lambda: torch.ones(3, 4, 2).transpose(0, 2),
    "part": lambda: torch.ones(2, 8, 5)[:, ::2, 1:4],
    "one row": lambda: torch.ones(40).as_strided((1, 4, 3), (1, 3, 1)),
}


@pytest.mark.parametrize("layout", SHARED)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_elements_that_share_memory_are_refused(function: str, layout: str) -> None:
    state, name = SHARED[layout](), function.partition(" ")[0]
    words = rf"{name} has elements that share memory, with strides \({state.stride(0)}, .*{name}.clone\(\)"
    with pytest.raises(ValueError, match=words):
        FUNCTIONS[function](state)
    assert bool((state == 1).all())


@pytest.mark.parametrize("layout", SEPARATE)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_other_layouts_are_taken(function: str, layout: str) -> None:
    state, usual = SEPARATE[layout](), torch.ones(SEPARATE[layout]().shape)
    FUNCTIONS[function](state)
    FUNCTIONS[function](usual)
    torch.testing.assert_close(state, usual)


def test_tensors_without_elements_are_taken() -> None:
    refuse_shared_elements("state", torch.ones(0, 4, 3).as_strided((0, 4, 3), (1, 1, 1)))
