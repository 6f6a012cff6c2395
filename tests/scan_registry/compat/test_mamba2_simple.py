"""``mamba_ssm.modules.mamba2_simple``: its module's constructor, parameters and initial values, and what it computes."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from mamba2_blocks import LENGTH, WIDTH, block, given

from scan_registry import nn
from scan_registry.compat import mamba_ssm

Mamba2Simple = mamba_ssm.modules.mamba2_simple.Mamba2Simple


def small(**options: Any) -> Any:
    torch.manual_seed(0)
    m = Mamba2Simple(WIDTH, **{"d_state": 5, "headdim": 4} | options).double()
    with torch.no_grad():
        for parameter in (
            m.D,
            m.norm.weight,
            *([m.init_states] if m.learnable_init_states else ()),
        ):
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return m


def test_the_constructor_is_mamba_ssms() -> None:
    parameters = [*inspect.signature(Mamba2Simple).parameters.values()][:-1]
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    assert " ".join(shown) == (
        "d_model d_state=64 d_conv=4 conv_init=None expand=2 headdim=128 ngroups=1 A_init_range=(1, 16) dt_min=0.001 "
        "dt_max=0.1 dt_init_floor=0.0001 dt_limit=(0.0, inf) learnable_init_states=False activation='swish' bias=False "
        "conv_bias=True chunk_size=256 use_mem_eff_path=True layer_idx=None device=None dtype=None"
    )


def test_parameters_are_mamba_ssms() -> None:
    m = Mamba2Simple(128, ngroups=2, learnable_init_states=True, dtype=torch.bfloat16)
    names = ["init_states", "dt_bias", "A_log", "D", "in_proj.weight", "conv1d.weight", "conv1d.bias", "norm.weight", "out_proj.weight"]  # fmt: skip
    assert [name for name, _ in m.named_parameters()] == names
    assert [*m.state_dict()] == names
    assert m.init_states.shape == (2, 128, 64)
    assert m.init_states.dtype == torch.bfloat16
    assert not m.init_states.any()
    assert [name for name, p in m.named_parameters() if hasattr(p, "_no_weight_decay")] == names[:4]
    assert "init_states" not in Mamba2Simple(128).state_dict()


def test_a_seed_draws_in_mamba_ssms_order() -> None:
    """That of ``Mamba2``, as initial states are zeros."""
    torch.manual_seed(0)
    m = Mamba2Simple(64, headdim=32, learnable_init_states=True)
    torch.manual_seed(0)
    other = nn.Mamba2(64, d_state=64, headdim=32)
    for name, parameter in other.named_parameters():
        assert torch.equal(m.get_parameter(name), parameter), name


@pytest.mark.parametrize("options", [{}, {"ngroups": 2, "bias": True}, {"dt_limit": (0.05, 0.3)}], ids=str)  # fmt: skip
def test_it_is_the_block(options: dict[str, Any]) -> None:
    m, hidden = small(**options), given()
    torch.testing.assert_close(m(hidden), block(m, hidden))
    other = Mamba2Simple(WIDTH, **{"d_state": 5, "headdim": 4} | options).double()
    other.load_state_dict(m.state_dict())
    assert torch.equal(other(hidden), m(hidden))
    assert torch.equal(copy.deepcopy(m)(hidden), m(hidden))


def test_initial_states_are_learned() -> None:
    m, hidden = small(learnable_init_states=True), given()
    conv_state, ssm_state = m.allocate_inference_cache(2, 0)
    assert torch.equal(ssm_state, m.init_states.expand_as(ssm_state))
    other = nn.Mamba2(WIDTH, d_state=5, headdim=4).double()
    other.load_state_dict({k: v for k, v in m.state_dict().items() if k != "init_states"})
    expected = other(hidden, states=(conv_state.clone(), ssm_state.clone()))
    torch.testing.assert_close(m(hidden), expected)
    steps = [m.step(x, conv_state, ssm_state)[0] for x in hidden.split(1, 1)]
    torch.testing.assert_close(torch.cat(steps, 1), expected)

    def loss(states: torch.Tensor) -> Any:
        return torch.func.functional_call(m, {"init_states": states}, (hidden,)).square().sum()

    start = m.init_states.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, (start,), fast_mode=True)
    assert torch.autograd.grad(loss(start), start)[0].abs().sum() > 0


def test_numbered_sequences_start_from_zero_but_for_the_first() -> None:
    m, hidden = small(learnable_init_states=True), given()
    numbers = (torch.arange(LENGTH) >= 3).int().expand(2, -1)
    y, zero = m(hidden, numbers), copy.deepcopy(m)
    with torch.no_grad():
        zero.init_states.zero_()
    torch.testing.assert_close(y[:, :3], m(hidden[:, :3]))
    torch.testing.assert_close(y[:, 3:], zero(hidden[:, 3:]))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"activation": "relu"}, ValueError, "activation should be silu or swish, got: 'relu'"),
        ({"learnable_init_states": 1}, TypeError, "learnable_init_states should be of type bool"),
        ({"headdim": 48}, ValueError, r"headdim should divide expand \* d_model"),
    ],
)
def test_constructors_refuse(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Mamba2Simple(**{"d_model": 64} | options)


def test_inputs_that_do_not_fit() -> None:
    m = small()
    with pytest.raises(ValueError, match="Mamba2Simple: Expected seq_idx of size"):
        m(given(), torch.zeros(2, 1, dtype=torch.int32))
    with pytest.raises(TypeError, match="Mamba2Simple: Expected u to be a Tensor"):
        m([1.0])
