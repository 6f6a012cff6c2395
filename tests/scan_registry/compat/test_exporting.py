"""transformers' models call the stand-ins under ``torch.compile``, also where Dynamo takes each trace to be an export."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from scan_registry import compat
from scan_registry.compat import exporting

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

MODELS = {"mamba": ("Mamba", "selective_scan"), "mamba2": ("Mamba2", "ssd_scan")}
SIZES = {
    "vocab_size": 16,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "state_size": 8,
}
HEADS = {"num_heads": 4, "head_dim": 8, "n_groups": 1}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of transformers that asks, as Dynamo of torch before 2.13 sees it; and no stand-in is imported."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    module = importlib.import_module(exporting.MODULE)
    monkeypatch.setattr(module, exporting.NAME, torch.compiler.is_dynamo_compiling)
    for name in MODELS:
        sys.modules.pop(f"transformers.models.{name}.modeling_{name}", None)
    compat.install("mamba_ssm", "causal_conv1d")
    torch.compiler.reset()
    yield module
    torch.compiler.reset()
    compat.uninstall()


def build(name: str) -> Any:
    place = f"transformers.models.{name}"
    module = importlib.import_module(f"{place}.modeling_{name}")
    prefix, options = MODELS[name][0], SIZES | (HEADS if name == "mamba2" else {})
    config = getattr(importlib.import_module(f"{place}.configuration_{name}"), f"{prefix}Config")
    torch.manual_seed(0)
    return getattr(module, f"{prefix}ForCausalLM")(config(**options))


def called(model: Any) -> list[str]:
    """What the graph of a training step's forward pass calls."""
    targets: list[str] = []

    def look(graph: GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    ids = torch.arange(1, 13)[None]
    torch.compile(model, backend=look, fullgraph=True)(input_ids=ids, use_cache=False)
    return targets


@pytest.mark.parametrize("imported_before", [False, True], ids=["", "stand-ins before"])
@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_model_calls_the_stand_ins(
    name: str, imported_before: bool, hub: ModuleType
) -> None:
    if imported_before:
        for package in ("mamba_ssm", "causal_conv1d"):
            importlib.import_module(package)
        setattr(hub, exporting.NAME, torch.compiler.is_dynamo_compiling)
    targets = called(build(name))
    for operator in ("causal_conv1d", MODELS[name][1]):
        assert any(f"scan_registry.{operator}" in target for target in targets), targets


def test_an_export_still_takes_transformers_own_code(hub: ModuleType) -> None:
    model = build("mamba").eval()
    ids = torch.arange(1, 13)[None]
    program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False})
    assert "scan_registry" not in str(program.graph)
