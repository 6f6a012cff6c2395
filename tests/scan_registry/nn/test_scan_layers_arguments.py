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


def test_constructors_refuse_options_that_are_no_bools() -> None:
    with pytest.raises(TypeError, match="proj_out should be of type bool, got: 'no'"):
        nn.MinGRU(FEATURES, proj_out="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="bidir should be of type bool, got: 'yes'"):
        nn.S5(FEATURES, 6, bidir="yes")  # type: ignore[arg-type]


@EVERY
@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        ([1.0], TypeError, "Expected x to be a Tensor, got list"),
        (torch.zeros(3, 8), ValueError, r"x of size \(batch, time, 8\), got \(3, 8\)"),
        (torch.zeros(2, 3, 7), ValueError, r"x of size \(batch, time, 8\), got \(2, 3, 7\)"),
        (
            torch.zeros(2, 3, 8).double(),
            ValueError,
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
