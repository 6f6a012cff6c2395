"""``Mamba`` and ``Mamba2``: a call that is refused leaves the states of the convolution and of the scan as they are."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from scan_registry import nn

BLOCKS: dict[str, Callable[[], Any]] = {
    "Mamba": lambda: nn.Mamba(8, layer_idx=0),
    "Mamba2": lambda: nn.Mamba2(8, d_state=4, headdim=4, layer_idx=0),
}
CALLS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "step": lambda m, c, s: m.step(torch.randn(2, 1, 8), c, s),
    "one step": lambda m, c, s: m(torch.randn(2, 1, 8), states=(c, s)),
    "several steps": lambda m, c, s: m(torch.randn(2, 5, 8), states=(c, s)),
    "beginning anew": lambda m, c, s: m(
        torch.randn(2, 5, 8),
        inference_params=SimpleNamespace(seqlen_offset=0, key_value_memory_dict={0: (c, s)}),
    ),
}


def ones(module: Any, batch: int = 2) -> tuple[Tensor, Tensor]:
    conv, scan = module.allocate_inference_cache(batch, 1)
    return conv.fill_(1), scan.fill_(1)


def inference(state: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.ones(state.shape)


def overlapping(state: Tensor) -> Tensor:
    memory = torch.ones(state.numel() + 8)
    return memory.as_strided(state.shape, (*state[0].contiguous().stride(), 1)[-state.dim() :])


WRONG: dict[str, tuple[Callable[[Tensor], Any], type[Exception], str]] = {
    "batch": (lambda state: state[:1].clone(), ValueError, "of size"),
    "size": (lambda state: state[..., :-1].clone(), ValueError, "of size"),
    "dtype": (lambda state: state.double(), TypeError, "got torch.float64"),
    "expanded": (lambda state: state[:1].expand(state.shape), ValueError, "is expanded"),
    "overlapping": (overlapping, ValueError, "has elements that share memory, with strides"),
    "inference": (inference, RuntimeError, "was made under torch.inference_mode"),
    "no tensor": (lambda state: "state", TypeError, "to be a Tensor, got str"),
}


@pytest.mark.parametrize("position", [0, 1], ids=["conv_state", "ssm_state"])
@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("block", BLOCKS)
def test_a_wrong_state_is_named_and_neither_changes(
    block: str, call: str, kind: str, position: int
) -> None:
    module, (change, error, words) = BLOCKS[block](), WRONG[kind]
    states: list[Any] = [*ones(module)]
    states[position] = change(states[position])
    with torch.no_grad(), pytest.raises(error, match=words) as raised:
        CALLS[call](module, *states)
    assert ("conv_state", "ssm_state")[position] in str(raised.value)
    assert all(bool((state == 1).all()) for state in states if isinstance(state, Tensor))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("block", BLOCKS)
def test_states_that_share_memory_with_each_other_are_refused(block: str, call: str) -> None:
    module = BLOCKS[block]()
    conv, scan = ones(module)
    memory = torch.ones(conv.numel() + scan.numel())
    shared = memory[: conv.numel()].view(conv.shape), memory[4:][: scan.numel()].view(scan.shape)
    with torch.no_grad(), pytest.raises(ValueError, match="conv_state and ssm_state in separate m"):
        CALLS[call](module, *shared)
    assert bool((memory == 1).all())


@pytest.mark.parametrize("block", BLOCKS)
def test_states_may_be_parts_of_one_buffer(block: str) -> None:
    """One behind the other, or beside each other in each sequence's row."""
    module, x = BLOCKS[block](), torch.randn(2, 1, 8)
    conv, scan = ones(module)
    whole = torch.ones(conv.numel() + scan.numel())
    rows = torch.ones(2, conv[0].numel() + scan[0].numel())
    parts = (
        (whole[: conv.numel()].view(conv.shape), whole[conv.numel() :].view(scan.shape)),
        (rows[:, : conv[0].numel()].view(conv.shape), rows[:, conv[0].numel() :].view(scan.shape)),
    )
    expected, *_ = module.step(x, conv, scan)
    for pair in parts:
        torch.testing.assert_close(module.step(x, *pair)[0], expected)
        for state, as_expected in zip(pair, (conv, scan), strict=True):
            torch.testing.assert_close(state, as_expected)
    with pytest.raises(ValueError, match="in separate memory"):
        module.step(x, parts[1][0], rows[:, -scan[0].numel() - 1 : -1].view(scan.shape))


REPLACED: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "dt_proj": ("Mamba", "dt_proj.weight", lambda: torch.nn.Linear(1, 3)),
    "x_proj": ("Mamba", "x_proj", lambda: torch.nn.Linear(16, 5)),
    "out_proj": ("Mamba", "out_proj", lambda: torch.nn.Linear(5, 8)),
    "A_log": ("Mamba", "A_log", lambda: torch.nn.Parameter(torch.zeros(16, 3))),
    "D": ("Mamba", "D", lambda: torch.nn.Parameter(torch.zeros(5))),
    "A_log of Mamba2": ("Mamba2", "A_log", lambda: torch.nn.Parameter(torch.zeros(3))),
    "D of Mamba2": ("Mamba2", "D", lambda: torch.nn.Parameter(torch.zeros(3))),
    "dt_bias": ("Mamba2", "dt_bias", lambda: torch.nn.Parameter(torch.zeros(3))),
    "out_proj of Mamba2": ("Mamba2", "out_proj", lambda: torch.nn.Linear(5, 8)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", REPLACED)
def test_a_parameter_of_a_wrong_size_is_named_and_no_state_changes(name: str, call: str) -> None:
    block, what, replacement = REPLACED[name]
    module = BLOCKS[block]()
    setattr(module, what.partition(".")[0], replacement())
    states = ones(module)
    with torch.no_grad(), pytest.raises(ValueError, match=f"{block}: Expected {what} "):
        CALLS[call](module, *states)
    assert all(bool((state == 1).all()) for state in states)


#: Of each block those that are read after a state has changed.
OF_ONE_DTYPE = {
    "Mamba": ("x_proj.weight", "dt_proj.weight", "dt_proj.bias", "out_proj.weight", "A_log", "D"),
    "Mamba2": ("out_proj.weight", "A_log", "D", "dt_bias"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("block", "what"), [(block, what) for block, names in OF_ONE_DTYPE.items() for what in names]
)
def test_a_parameter_of_a_wrong_dtype_is_named_and_no_state_changes(
    block: str, what: str, call: str
) -> None:
    module = BLOCKS[block]()
    inner, _, name = what.rpartition(".")
    wide = torch.nn.Parameter(module.get_parameter(what).detach().double())
    setattr(module.get_submodule(inner), name, wide)
    states = ones(module)
    with torch.no_grad(), pytest.raises(TypeError, match=f"{block}: Expected {what} of .*float64"):
        CALLS[call](module, *states)
    assert all(bool((state == 1).all()) for state in states)


def test_autocast_converts_projections_of_another_dtype() -> None:
    module = nn.Mamba(8)
    expected, *_ = module.step(torch.ones(2, 1, 8), *ones(module))
    for inner in (module.x_proj, module.dt_proj, module.out_proj):
        inner.weight = torch.nn.Parameter(inner.weight.detach().bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, *_ = module.step(torch.ones(2, 1, 8), *ones(module))
    torch.testing.assert_close(y.float(), expected, rtol=0.03, atol=0.01)
