"""Operators refuse options of another kind, and say what they got; also those that have no hash."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import scan_registry as s
from scan_registry import compat, nn
from scan_registry.compat.flashrnn import FlashRNNConfig

X = torch.rand(2, 3, 8)
ROWS = torch.rand(2, 4)
SSD = (
    *(torch.rand(2, 8, 4, 3), torch.rand(2, 8, 4), -torch.rand(4)),
    *(torch.rand(2, 8, 2, 5), torch.rand(2, 8, 2, 5)),
)
UPDATE: tuple[Any, ...] = (torch.rand(2, 3, 4), X[..., 0], X[..., 0], -torch.rand(3, 4), ROWS, ROWS)
CALLS: dict[str, Callable[[Any], Any]] = {
    "linear_scan": lambda backend: s.linear_scan(X, X, backend=backend),
    "min_gru": lambda backend: s.min_gru(X, X, backend=backend),
    "selective_scan": lambda backend: s.selective_scan(
        X, X, -torch.rand(3, 4), torch.rand(3, 4), torch.rand(3, 4), backend=backend
    ),
    "selective_state_update": lambda backend: s.selective_state_update(*UPDATE, backend=backend),
    "ssd_scan": lambda backend: s.ssd_scan(*SSD, backend=backend),
    "causal_conv1d": lambda backend: s.causal_conv1d(X, torch.rand(3, 4), backend=backend),
    "rnn": lambda backend: s.rnn(
        *(torch.rand(5, 2, 4, 3, 8), torch.rand(4, 3, 8, 8), torch.rand(4, 3, 8)),
        function="lstm",
        backend=backend,
    ),
}


@pytest.mark.parametrize(
    "backend", [["auto"], numpy.array(["auto", "cuda"]), {}, 1, None], ids=repr
)
@pytest.mark.parametrize("function", CALLS)
def test_backends_that_are_no_words_are_refused(function: str, backend: Any) -> None:
    with pytest.raises(ValueError, match=r"backend is .*; accepted are auto, "):
        CALLS[function](backend)


@pytest.mark.parametrize(
    ("limit", "error", "words"),
    [
        ((True, True), TypeError, r"dt_limit is \(True, True\); it must be a pair of numbers"),
        (("0", 1), TypeError, "must be a pair of numbers"),
        ((math.nan, 1.0), ValueError, r"dt_limit is \(nan, 1.0\); accepted are .* not NaN"),
        ((0.0, math.nan), ValueError, r"dt_limit is \(0.0, nan\); accepted are .* not NaN"),
        ((1.0, 0.5), ValueError, "the first number must not exceed the second"),
    ],
)
def test_ssd_scan_refuses_limits(limit: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        s.ssd_scan(*SSD, dt_limit=limit)


def test_ssd_scan_takes_numpys_numbers_as_limits() -> None:
    limit: Any = numpy.float32(0.25), numpy.int64(1)
    torch.testing.assert_close(
        s.ssd_scan(*SSD, dt_limit=limit), s.ssd_scan(*SSD, dt_limit=(0.25, 1.0))
    )


def test_explain_refuses_the_rows_that_a_call_refuses() -> None:
    for call in (
        s.selective_state_update,
        lambda *a, **k: s.explain(s.selective_state_update, *a, **k),
    ):
        with pytest.raises(
            ValueError, match="state_batch_indices has the number 5, and the state 2 rows"
        ):
            call(*UPDATE, state_batch_indices=torch.tensor([0, 5]))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: s.explain("linear_scan", X, X), TypeError, r"not its name, 'linear_scan'; pass the function, scan_registry\.linear_scan$"),
        (lambda: s.explain("min_gru", X, X), TypeError, r"pass the function, scan_registry\.min_gru$"),
        (lambda: s.explain("nope", X, X), TypeError, r"pass the function, scan_registry\.linear_scan$"),
        (lambda: s.explain(s.linear_scan_step, X, X, X), TypeError, "^the function linear_scan_step cannot be explained; acc"),
        (lambda: s.explain(X, X, X), TypeError, r"^a Tensor of shape \(2, 3, 8\) cannot be explained"),
        (lambda: s.linear_scan(X, X, backend=X), ValueError, r"^backend is a Tensor of shape \(2, 3, 8\); accepted are auto"),
        (lambda: s.linear_scan(X, X, reverse=X), TypeError, r"^reverse is a Tensor of shape \(2, 3, 8\); it must be a bool"),
        (lambda: s.linear_scan(X, X, reverse=torch.Tensor), TypeError, "^reverse is <class 'torch.Tensor'>; it must be a bool"),
        (lambda: s.linear_scan(X, X, initial_state=torch.ones(2, 3).int()), TypeError, "with states of torch.float32; accepted are floating-point dtypes$"),
        (lambda: s.linear_scan(X, X, cu_seqlens=torch.tensor([0, 3, 1, 8])), ValueError, "^cu_seqlens falls from 3 to 1 at index 2; it must rise from 0 to the 8 steps"),
        (lambda: s.ssd_scan(*SSD, dt_limit=torch.tensor([0.0, 1.0])), TypeError, r"^dt_limit is a Tensor of shape \(2,\); it must be a pair"),
        (lambda: compat.uninstall("nope"), ValueError, "^'nope' is not what uninstall takes"),
        (lambda: compat.install("nope"), ValueError, "^'nope' is not what install takes"),
        (lambda: FlashRNNConfig(dtype=torch.float32), ValueError, "^dtype is torch.float32; accepted are .*, so pass dtype='float32'$"),
        (lambda: FlashRNNConfig(dtype=torch.int8), ValueError, "^dtype is torch.int8; accepted are bfloat16, float16, float32, float64$"),
        (lambda: FlashRNNConfig(backend=["cuda"]), ValueError, "^backend is \\['cuda'\\]; accepted are cuda_fused"),
        (lambda: nn.RMSNormGated(8)(torch.zeros(2, 5)), ValueError, r"^RMSNormGated: Expected x of size \(..., 8\), got \(2, 5\)$"),
        (lambda: nn.Mamba2(8, headdim=4)(torch.zeros(4, 8), seqlen=0), ValueError, "^Mamba2: Expected seqlen of 1 or more, got 0$"),
    ],
)  # fmt: skip
def test_messages_say_what_was_passed_and_what_is_accepted(
    call: Callable[[], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        call()
