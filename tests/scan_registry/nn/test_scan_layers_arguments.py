"""What ``MinGRU``, ``MinLSTM``, ``RGLRU``, ``HGRN``, ``LRU`` and ``S5`` refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layers import EVERY, FEATURES, MAKERS, STEPPING

from scan_registry import nn


@EVERY
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"dtype": torch.int32}, TypeError, "dtype should be one of"),
        ({"backend": "metal"}, ValueError, "backend should be one of"),
        ({"batch_first": "no"}, TypeError, "batch_first should be of type bool, got: 'no'"),
    ],
)
def test_constructors_refuse(
    name: str, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        MAKERS[name](**options)


#: The arguments that each constructor needs.
NEEDED: dict[Any, dict[str, Any]] = {
    nn.HGRN: {"hidden_size": 6},
    nn.LRU: {"d_hidden": 5, "d_model": 7},
    nn.Mamba: {"d_model": 8},
    nn.MinGRU: {"dim": 4},
    nn.MinLSTM: {"dim": 4},
    nn.RGLRU: {"width": 12, "num_heads": 3},
    nn.S5: {"width": 5, "state_width": 6},
}


@pytest.mark.parametrize(
    ("module", "options", "error", "words"),
    [
        (nn.HGRN, {"hidden_size": -1}, ValueError, "hidden_size must be greater than zero"),
        (nn.HGRN, {"hidden_size": "6"}, TypeError, "hidden_size should be of type int, got: str"),
        (nn.HGRN, {"expand_ratio": 0.1}, ValueError, "hidden_size [*] expand_ratio must be 1"),
        (nn.HGRN, {"norm_eps": float("nan")}, ValueError, "norm_eps should be a number above 0"),
        (nn.LRU, {"d_hidden": 0}, ValueError, "d_hidden must be greater than zero"),
        (nn.LRU, {"r_min": 0.9, "r_max": 0.9}, ValueError, "0 <= r_min < r_max <= 1, got: 0.9"),
        (nn.LRU, {"r_max": 1.5}, ValueError, "0 <= r_min < r_max <= 1"),
        (nn.LRU, {"r_min": "0"}, ValueError, "0 <= r_min < r_max <= 1"),
        (nn.LRU, {"max_phase": 0}, ValueError, "max_phase should be a number above 0"),
        (nn.Mamba, {"d_model": 8.0}, TypeError, "d_model should be of type int, got: float"),
        (nn.Mamba, {"d_state": 257}, ValueError, "d_state should be at most 256, got: 257"),
        (nn.Mamba, {"d_conv": 1}, ValueError, "d_conv should be from 2 to 8, got: 1"),
        (nn.Mamba, {"d_conv": 9}, ValueError, "d_conv should be from 2 to 8, got: 9"),
        (nn.Mamba, {"expand": 0}, ValueError, "expand should be a number above 0, got: 0"),
        (nn.Mamba, {"expand": 0.01}, ValueError, "expand [*] d_model must be 1 or more"),
        (nn.Mamba, {"dt_rank": "all"}, TypeError, "dt_rank should be of type int or 'auto'"),
        (nn.Mamba, {"dt_min": 0.2}, ValueError, "dt_min should be at most dt_max, got: 0.2"),
        (nn.Mamba, {"conv_bias": "no"}, TypeError, "conv_bias should be of type bool, got: str"),
        (nn.Mamba, {"dt_init": "zeros"}, ValueError, "dt_init should be 'random' or 'constant'"),
        (nn.Mamba, {"dtype": torch.int32}, TypeError, "dtype should be one of"),
        (nn.MinGRU, {"dim": 4.0}, TypeError, "dim should be of type int, got: float"),
        (nn.MinGRU, {"expansion_factor": 0.1}, ValueError, "dim [*] expansion_factor must be 1"),
        (nn.MinGRU, {"expansion_factor": 2, "proj_out": False}, ValueError, "proj_out should be"),
        (nn.MinGRU, {"proj_out": "no"}, TypeError, "proj_out should be of type bool, got: 'no'"),
        (nn.MinGRU, {"expansion_factor": "2"}, TypeError, "should be a number above 0, got: '2'"),
        (nn.MinGRU, {"expansion_factor": 32}, ValueError, "For 32 channels pass MinGRU"),
        (nn.Mamba, {"expand": "2"}, TypeError, "expand should be a number above 0, got: '2'"),
        (nn.MinLSTM, {"expansion_factor": -1}, ValueError, "should be a number above 0"),
        (nn.MinLSTM, {"activation": "tanh"}, ValueError, "should be 'positive' or 'identity'"),
        (nn.RGLRU, {"num_heads": True}, TypeError, "num_heads should be of type int, got: bool"),
        (nn.RGLRU, {"num_heads": 5}, ValueError, r"width \(12\) must be divisible by num_heads"),
        (nn.RGLRU, {"w_init_variance_scale": 0}, ValueError, "w_init_variance_scale should be a"),
        (nn.S5, {"state_width": 1.5}, TypeError, "state_width should be of type int, got: float"),
        (nn.S5, {"block_count": 4}, ValueError, r"state_width \(6\) must be divisible by block_"),
        (nn.S5, {"dt_min": 0.2}, ValueError, "dt_min should be at most dt_max, got: 0.2 and 0.1"),
        (nn.S5, {"factor_rank": 2}, ValueError, "factor_rank should be None, got: 2"),
        (nn.S5, {"liquid": True}, ValueError, "liquid should be False, got: True"),
        (nn.S5, {"bidir": "yes"}, TypeError, "bidir should be of type bool, got: 'yes'"),
        (nn.S5, {"bcInit": "factorized"}, ValueError, "should be 'dense' or 'complex_normal'"),
        (nn.S5, {"discretization": "euler"}, ValueError, "should be 'zoh' or 'bilinear'"),
    ],
)
def test_arguments_of_constructors(
    module: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        module(**NEEDED[module] | options)


def test_a_factor_that_may_be_a_size_is_refused_with_both_meanings() -> None:
    for module in (nn.MinGRU, nn.MinLSTM):
        with pytest.raises(ValueError, match="is a factor") as error:
            module(16, 32)
        for channels, factor in ((32, "2"), (512, "32.0")):
            spelled = f"{module.__name__}(16, expansion_factor={factor})"
            assert f"or {channels}" in str(error.value)
            assert spelled in str(error.value)
            assert module(16, expansion_factor=float(factor)).channels == channels
        assert module(16, 8).channels == 128


@EVERY
@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        ([1.0], TypeError, "Expected x to be a Tensor, got list"),
        (torch.zeros(3, 8), ValueError, r"x of size \(batch, time, 8\), got \(3, 8\)"),
        (torch.zeros(2, 3, 7), ValueError, r"x of size \(batch, time, 8\), got \(2, 3, 7\)"),
        (
            torch.zeros(2, 3, 8).double(),
            TypeError,
            "of dtype torch.float32, as the parameters are",
        ),
        (torch.zeros(2, 3, 8, device="meta"), ValueError, "on one device"),
    ],
)
def test_inputs_that_do_not_fit(name: str, x: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        MAKERS[name]()(x)


@EVERY
def test_resets_and_states_that_do_not_fit(name: str) -> None:
    m, x = MAKERS[name](), torch.zeros(2, 3, FEATURES)
    with pytest.raises(TypeError, match="Expected reset to be a Tensor, got bool"):
        m(x, reset=True)
    with pytest.raises(TypeError, match=r"Expected reset of dtype torch.bool, got torch.float32"):
        m(x, reset=torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"Expected reset of size \(2, 3\), got \(3, 2\)"):
        m(x, reset=torch.zeros(3, 2, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"reset is sparse; .* pass reset.to_dense\(\)"):
        m(x, reset=torch.zeros(2, 3, dtype=torch.bool).to_sparse())
    with pytest.raises(ValueError, match="initial_state"):
        m(x, initial_state=torch.zeros(2, m.channels + 1))


@STEPPING
def test_steps_that_do_not_fit(name: str) -> None:
    m, x = MAKERS[name](), torch.zeros(2, FEATURES)
    with pytest.raises(ValueError, match=r"x of size \(batch, 8\), got \(2, 1, 8\)"):
        m.step(x.unsqueeze(1))
    with pytest.raises(TypeError, match="Expected state to be a Tensor, got int"):
        m.step(x, 0)
    with pytest.raises(ValueError, match=rf"state of size \(2, {m.channels}\), got \(1, 3\)"):
        m.step(x, torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"reset of size \(2,\), got \(2, 1\)"):
        m.step(x, reset=torch.zeros(2, 1, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"reset is sparse; .* pass reset.to_dense\(\)"):
        m.step(x, reset=torch.zeros(2, dtype=torch.bool).to_sparse())
    with pytest.raises(TypeError, match=r"state is sparse; .* pass state.to_dense\(\)"):
        m.step(x, torch.zeros(2, m.channels).to_sparse())
    for dtype in (torch.int64, torch.bool):  # which a call on a sequence refuses, too
        with pytest.raises(TypeError, match=f"Expected a .*floating-point state, got {dtype}"):
            m.step(x, torch.zeros(2, m.channels, dtype=dtype))
    if not m.is_complex:
        with pytest.raises(TypeError, match=r"Expected a floating-point state, got torch.complex"):
            m.step(x, torch.zeros(2, m.channels, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (nn.HGRN(6, 2), "6, expand_ratio=2"),
        (nn.LRU(5, 7), "5, 7"),
        (nn.LRU(5, 7, 0.9, 0.999), "5, 7, r_min=0.9, r_max=0.999"),
        (nn.Mamba(8), "8, d_state=16, d_conv=4, expand=2, dt_rank=1"),
        (nn.MinGRU(4), "4, expansion_factor=1.0"),
        (nn.MinLSTM(4, 2, activation="identity"), "4, expansion_factor=2, activation='identity'"),
        (nn.RGLRU(12, 3, 0.1), "12, num_heads=3, w_init_variance_scale=0.1"),
        (nn.S5(5, 6, bidir=True), "5, state_width=6, bidir=True"),
    ],
)
def test_it_says_what_it_is(module: torch.nn.Module, text: str) -> None:
    assert module.extra_repr() == text
