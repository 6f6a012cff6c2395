"""Constructors and calls of modules refuse options of another kind, and say what they got."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from scan_registry import nn

NAN = math.nan
WORDS = numpy.array(["auto", "random"])
#: A module, its positional arguments and options, the error, and words of its message.
CONSTRUCTORS: list[tuple[Any, tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    (nn.LSTM, (3, 4), {"bidirectional": "no"}, TypeError, "bidirectional should be of type bool, got: 'no'"),
    (nn.GRU, (3, 4), {"bidirectional": 2}, TypeError, "bidirectional should be of type bool, got: 2"),
    (nn.RNN, (3, 4), {"bidirectional": 1}, TypeError, "bidirectional should be of type bool, got: 1"),
    (nn.LSTM, (3, 4), {"bidirectional": None}, TypeError, "bidirectional should be of type bool, got: None"),
    (nn.LSTM, (True, 4), {}, TypeError, "input_size should be of type int, got: bool"),
    (nn.GRU, (3, True), {}, TypeError, "hidden_size should be of type int, got: bool"),
    (nn.LSTM, (3, 4, True), {}, TypeError, "num_layers should be of type int, got: bool"),
    (nn.Mamba, (8,), {"dt_init_floor": NAN}, ValueError, "dt_init_floor should be a number above 0, got: nan"),
    (nn.Mamba, (8,), {"dt_init_floor": math.inf}, ValueError, "dt_init_floor should .* got: inf"),
    (nn.Mamba, (8,), {"dt_init_floor": -1}, ValueError, "dt_init_floor should .* got: -1"),
    (nn.Mamba, (8,), {"dt_scale": NAN}, ValueError, "dt_scale should be a number above 0, got: nan"),
    (nn.Mamba, (8,), {"dt_scale": "1"}, TypeError, "dt_scale should be a number above 0, got: '1'"),
    (nn.Mamba, (8,), {"dt_scale": None}, TypeError, "dt_scale should be a number above 0, got: None"),
    (nn.Mamba, (8,), {"layer_idx": "0"}, TypeError, "layer_idx should be of type int or None, got: '0'"),
    (nn.Mamba2, (64,), {"layer_idx": True}, TypeError, "layer_idx should be of type int or None, got: True"),
    (nn.Mamba2, (64,), {"dt_limit": (0.0, NAN)}, ValueError, r"dt_limit should have no NaN, got: \(0.0, nan\)"),
    (nn.MinGRU, (8,), {"expansion_factor": True}, TypeError, "expansion_factor should be a number above 0, got: True"),
    (nn.RGLRU, (8, 2), {"w_init_variance_scale": True}, TypeError, "w_init_variance_scale .* got: True"),
    (nn.HGRN, (8,), {"elementwise_affine": "no"}, TypeError, "elementwise_affine should be of type bool, got: 'no'"),
    (nn.S5, (8,), {"degree": True}, ValueError, "degree should be 1, got: True"),
    (nn.Mamba, (8,), {"backend": ["auto"]}, ValueError, r"backend should be one of auto, .*got: \['auto'\]"),
    (nn.LSTM, (3, 4), {"backend": ["auto"]}, ValueError, r"backend should be one of auto, .*got: \['auto'\]"),
    (nn.LSTM, (3, 4), {"backend": ["auto"], "proj_size": 2}, ValueError, "backend should be one of auto"),
    (nn.Mamba, (8,), {"dt_init": WORDS}, ValueError, "dt_init should be 'random' or 'constant'"),
    (nn.Mamba, (8,), {"dt_rank": WORDS}, TypeError, "dt_rank should be of type int or 'auto', got: ndarray"),
    (nn.Mamba, (8,), {"dtype": WORDS}, TypeError, "dtype should be one of torch.float32"),
    (nn.LSTM, (3, 4), {"dtype": WORDS}, TypeError, "dtype should be one of torch.float32"),
    (nn.S5, (8,), {"bcInit": WORDS}, ValueError, "bcInit should be 'dense' or 'complex_normal'"),
    (nn.Mamba, (0,), {}, ValueError, "d_model must be greater than zero, got: 0"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "sizes", "options", "error", "words"), CONSTRUCTORS)
def test_constructors_refuse(
    module: Any, sizes: tuple[Any, ...], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        module(*sizes, **options)


@pytest.mark.parametrize(
    ("scale", "error"),
    [(NAN, ValueError), (-1, ValueError), (0, ValueError), (math.inf, ValueError), (True, TypeError)],
)  # fmt: skip
def test_s5_refuses_scales_that_are_no_numbers_above_0(scale: Any, error: type[Exception]) -> None:
    layer = nn.S5(8)
    for call in (
        lambda: layer(torch.zeros(2, 3, 8), step_scale=scale),
        lambda: layer.step(torch.zeros(2, 8), step_scale=scale),
    ):
        with pytest.raises(error, match="S5: Expected step_scale to be a number"):
            call()


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ("x", "Expected inference_params with .*, got str without key_value_memory_dict"),
        (SimpleNamespace(key_value_memory_dict={}), "got SimpleNamespace without seqlen_offset"),
        (
            SimpleNamespace(key_value_memory_dict={}, seqlen_offset="x"),
            "inference_params.seqlen_offset is 'x'; it must be an int",
        ),
    ],
)
def test_mamba_refuses_what_are_no_inference_params(params: Any, words: str) -> None:
    for module in (nn.Mamba(8, layer_idx=0), nn.Mamba2(8, headdim=4, layer_idx=0)):
        with pytest.raises(TypeError, match=words):
            module(torch.zeros(2, 1, 8), inference_params=params)
