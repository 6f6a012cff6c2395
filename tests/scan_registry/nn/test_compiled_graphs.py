"""What Dynamo's graph of a module calls: the same operators as the module without ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from scan_registry import nn
from scan_registry.nn.submodules import weights_of

pytestmark = pytest.mark.usefixtures("one_thread", "_nothing_compiled")

TIME = 12


@pytest.fixture
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def graph_of(module: torch.nn.Module, x: Tensor, **options: Any) -> list[str]:
    """What the only graph of a call calls. Its result has to be that of the call without ``torch.compile``."""
    targets: list[str] = []

    def look(graph: GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        targets.extend(f"{node.target}" for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    with torch.no_grad():
        compiled = torch.compile(module, backend=look, fullgraph=True, dynamic=False)
        torch.testing.assert_close(compiled(x, **options), module(x, **options))
    return targets


def calls(targets: list[str], name: str) -> bool:
    return any(name in target for target in targets)


def mamba2(conv: str = "own") -> torch.nn.Module:
    torch.manual_seed(0)
    module = nn.Mamba2(16, d_state=8, headdim=8)
    if conv == "offloaded and back":
        module.conv1d.forward = module.conv1d.forward
    return module


@pytest.mark.parametrize("conv", ["own", "offloaded and back"])
@pytest.mark.parametrize("packing", ["none", "cu_seqlens", "seq_idx"])
def test_mamba2_calls_the_kernel_of_the_convolution(packing: str, conv: str) -> None:
    options: dict[str, Tensor] = {}
    if packing == "cu_seqlens":
        options["cu_seqlens"] = torch.tensor([0, 5, TIME], dtype=torch.int32)
    if packing == "seq_idx":
        options["seq_idx"] = torch.arange(TIME, dtype=torch.int32).div(5).int()[None]
    targets = graph_of(mamba2(conv), torch.randn(1, TIME, 16), **options)
    assert calls(targets, "causal_conv1d")
    assert calls(targets, "ssd_scan")
    assert not calls(targets, "<built-in method conv1d")


def test_mamba_calls_the_kernel_of_the_convolution() -> None:
    torch.manual_seed(0)
    targets = graph_of(nn.Mamba(16, d_state=4), torch.randn(2, TIME, 16))
    assert calls(targets, "causal_conv1d")
    assert calls(targets, "selective_scan")
    assert not calls(targets, "<built-in method conv1d")


class Reads(torch.nn.Module):
    """Multiplies by the weight of ``layer`` where ``weights_of`` has it, and calls the layer where it has none."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        weights = weights_of(self.layer)
        return self.layer(x) if weights is None else x @ weights[0].T


class Doubled(torch.nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def hooked() -> torch.nn.Linear:
    layer = torch.nn.Linear(4, 4, bias=False)
    layer.register_forward_hook(lambda _, __, result: 2 * result)
    return layer


def on_one_module() -> torch.nn.Linear:
    layer, other = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    layer.forward = other.forward  # type: ignore[method-assign]
    return layer


def test_the_weight_of_a_linear_layer_is_read() -> None:
    targets = graph_of(Reads(torch.nn.Linear(4, 4, bias=False)), torch.randn(3, 4))
    assert calls(targets, "matmul")
    assert not calls(targets, "linear")


@pytest.mark.parametrize(
    "layer",
    [lambda: Doubled(4, 4, bias=False), hooked, on_one_module],
    ids=["class", "hook", "set"],
)
def test_a_linear_layer_that_does_more_is_called(layer: Callable[[], torch.nn.Module]) -> None:
    targets = graph_of(Reads(layer()), torch.randn(3, 4))
    assert calls(targets, "linear")
    assert not calls(targets, "matmul")
