"""``nn.LSTM`` with ``proj_size``: who computes it, and what is refused. ``test_modules.py`` and ``test_resets.py`` have
its results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from scan_registry import nn
from scan_registry.nn import torch_cells

INPUTS, HIDDEN, PROJECTED, BATCH, TIME = 5, 7, 3, 4, 6
BACKENDS = ("auto", "reference")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pair(backend: str, **options: Any) -> tuple[Any, Any]:
    options = {"dtype": torch.float64, "proj_size": PROJECTED, **options}
    theirs = torch.nn.LSTM(INPUTS, HIDDEN, **options)
    ours = nn.LSTM(INPUTS, HIDDEN, backend=backend, **options)  # type: ignore[arg-type]
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def states_of(module: Any, *batch: int) -> tuple[Tensor, Tensor]:
    rows = module.num_layers * (2 if module.bidirectional else 1)
    h, c = (
        torch.randn(rows, *batch, units, dtype=torch.float64, requires_grad=True)
        for units in (PROJECTED, HIDDEN)
    )
    return h, c


def test_torch_computes_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    run = torch_cells.run
    monkeypatch.setattr(torch_cells, "run", lambda *inputs: calls.append(1) or run(*inputs))
    x = torch.randn(TIME, BATCH, INPUTS)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        _, ours = pair("auto", dtype=dtype)
        assert ours(x.to(dtype))[0].dtype == dtype
    assert len(calls) == 3
    _, ours = pair("auto", dtype=torch.float32)
    ours(x, reset=torch.zeros(TIME, BATCH, dtype=torch.bool))
    torch.func.jvp(lambda x: ours(x)[0], (x,), (x,))
    pair("reference", dtype=torch.float32)[1](x)
    assert len(calls) == 3


@pytest.mark.parametrize("size", [True, 2.0, None, -1, HIDDEN])
def test_sizes_that_are_refused(size: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="proj_size"):
        nn.LSTM(INPUTS, HIDDEN, proj_size=size)


@pytest.mark.parametrize("backend", ["cuda", "cuda_fused", "triton"])
def test_kernels_have_no_projections(backend: Any) -> None:
    with pytest.raises(ValueError, match=f"'auto' or 'reference' with proj_size, got: '{backend}'"):
        nn.LSTM(INPUTS, HIDDEN, proj_size=PROJECTED, backend=backend)
    nn.LSTM(INPUTS, HIDDEN, backend=backend)


def test_states_of_other_sizes() -> None:
    _, ours = pair("auto")
    h, c = states_of(ours, BATCH)
    x = torch.randn(TIME, BATCH, INPUTS, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"hx\[0\] \(h\) of size \(1, 4, 3\), got \(1, 4, 7\)"):
        ours(x, (c, c))
    with pytest.raises(RuntimeError, match=r"hx\[1\] \(c\) of size \(1, 4, 7\), got \(1, 4, 3\)"):
        ours(x, (h, h))


@pytest.mark.parametrize("backend", BACKENDS)
def test_torch_2_6_has_no_word_for_exports(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compiler.is_exporting came with torch 2.7."""
    monkeypatch.delattr(torch.compiler, "is_exporting")
    theirs, ours = pair(backend)
    x = torch.randn(TIME, BATCH, INPUTS, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))
