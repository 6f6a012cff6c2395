"""``gated_scan`` in one graph of transforms, and what is saved of it."""

from __future__ import annotations

import pytest
import torch
from gating import FORMULAS, drawn
from torch import Tensor
from torch.func import grad, jvp, vmap

from scan_registry import gated_scan, min_gru
from scan_registry.kernels.gated_scan.kinds import KINDS


def test_one_graph_of_transforms() -> None:
    """Of gradients within maps, and of forward mode."""
    gate, hidden = torch.randn(2, 3, 2, 4, 5)

    def loss(gate: Tensor, hidden: Tensor) -> Tensor:
        return min_gru(gate, hidden).sin().sum()

    def tangent(gate: Tensor, hidden: Tensor) -> Tensor:
        found: Tensor = jvp(loss, (gate, hidden), (hidden, gate))[1]
        return found

    for function in (vmap(grad(loss, (0, 1))), vmap(tangent)):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(gate, hidden), function(gate, hidden))


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_and_states_are_all_that_is_saved(
    kind: str, dtype: torch.dtype, resets: bool
) -> None:
    """Not gates and tokens in float32, nor what they are made by."""
    call = drawn(kind, (2, 4, 64), dtype, resets=resets, initial=True)
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        states = gated_scan(kind, *call.tensors, **call.options)
    size = 2 * 4 * 64
    sequences = (FORMULAS[kind][0] + 1) * size * dtype.itemsize
    others = 4 * 4 * FORMULAS[kind][1] + 4 * 2 * 4 + (2 * 64 if resets else 0)
    assert sum(saved.values()) == sequences + others
    states.sum().backward()
    assert all(leaf.grad is not None for leaf in call.leaves)
