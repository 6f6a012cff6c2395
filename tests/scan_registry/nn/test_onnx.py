"""torch.onnx is told what to export in place of modules whose operators ONNX does not have; what it can export it does."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
from layers import FEATURES
from networks import MODULES, output
from torch import Tensor

REFUSAL = r"torch.onnx cannot export the operator scan_registry::{}: load the module's state dict"
OPERATORS = {
    "LSTM": "rnn",
    "SLSTM": "rnn",
    "MinGRU": "gated_scan",
    "Mamba": "causal_conv1d",
    "Mamba2": "causal_conv1d",
}

pytestmark = pytest.mark.usefixtures("one_thread")
refused = pytest.mark.parametrize("name", OPERATORS)


class Model(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return output(self.inner(x))


def trace(module: torch.nn.Module, **how: Any) -> bytes:
    """By the older exporter, which traces."""
    written = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.ones(2, 5, FEATURES)
        torch.onnx.export(module, (x,), written, dynamo=False, opset_version=17, **how)
    return written.getvalue()


def capture(module: torch.nn.Module, custom_translation_table: Any = None) -> Any:
    """What the newer exporter does first. It itself needs a package that tests do without."""
    return torch.export.export(module, (torch.ones(2, 5, FEATURES),))


@pytest.fixture
def _exporting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)


@refused
def test_the_older_exporter_says_what_to_do(name: str) -> None:
    """Also of a module within another one."""
    module = MODULES[name]()
    with pytest.raises(RuntimeError, match=REFUSAL.format(OPERATORS[name])):
        trace(Model(module) if name == "SLSTM" else module)


@refused
@pytest.mark.usefixtures("_exporting")
def test_the_newer_exporter_says_what_to_do(name: str) -> None:
    with pytest.raises(RuntimeError, match=REFUSAL.format(OPERATORS[name])):
        capture(MODULES[name]())


@pytest.mark.usefixtures("_exporting")
def test_translations_of_the_newer_exporter_go_first() -> None:
    table = {torch.ops.scan_registry.rnn.default: lambda *_: None}
    assert "scan_registry.rnn" in str(capture(MODULES["GRU"](), table).graph)
    with pytest.raises(RuntimeError, match=REFUSAL.format("gated_scan")):
        capture(MODULES["MinGRU"](), table)


def test_translations_of_the_older_exporter_go_first() -> None:
    pytest.importorskip("onnx", reason="torch.onnx writes files by the package onnx")

    def translated(graph: Any, inputs: Any, *_: Any) -> Any:
        return graph.op("mine::network", inputs, outputs=3)

    torch.onnx.register_custom_op_symbolic("scan_registry::rnn", translated, 9)
    try:
        assert b"mine" in trace(MODULES["GRU"](), custom_opsets={"mine": 1})
    finally:
        torch.onnx.unregister_custom_op_symbolic("scan_registry::rnn", 9)


@pytest.mark.parametrize("contents", [False, True])
def test_functions_of_torch_are_exported(contents: bool) -> None:
    pytest.importorskip("onnx", reason="torch.onnx writes files by the package onnx")
    module = MODULES["LSTM projected"]()
    assert trace(Model(module) if contents else module)


def test_flags_reach_a_traced_module() -> None:
    """The older exporter passes them as tensors, and by position."""
    module = MODULES["RGLRU"]()
    with pytest.raises(RuntimeError, match=REFUSAL.format("gated_scan")):
        trace(module, kwargs={"reverse": True})


@pytest.mark.parametrize("name", ["LRU", "S5"])
def test_modules_of_complex_numbers(name: str) -> None:
    """torch would fail at one of its own operators, before one of this package's."""
    with pytest.raises(RuntimeError, match=f"cannot export scan_registry.nn.{name}: load the"):
        trace(MODULES[name]())
