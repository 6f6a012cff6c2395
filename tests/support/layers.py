"""The modules on scans, each made with the fewest arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import recorded
from torch import Tensor

from scan_registry import nn

FEATURES, LENGTH, BATCH = 8, 9, 3

MAKERS: dict[str, Callable[..., Any]] = {
    "MinGRU": lambda **how: nn.MinGRU(FEATURES, 1.5, **how),
    "MinGRU-identity": lambda **how: nn.MinGRU(FEATURES, activation="identity", **how),
    "MinLSTM": lambda **how: nn.MinLSTM(FEATURES, **how),
    "MinLSTM-identity": lambda **how: nn.MinLSTM(FEATURES, 2, activation="identity", **how),
    "RGLRU": lambda **how: nn.RGLRU(FEATURES, 2, **how),
    "HGRN": lambda **how: nn.HGRN(FEATURES, 2, **how),
    "LRU": lambda **how: nn.LRU(6, FEATURES, **how),
    "S5": lambda **how: nn.S5(FEATURES, 6, block_count=2, **how),
    "S5-bidir": lambda **how: nn.S5(FEATURES, 6, bidir=True, **how),
}

#: Of blocks on a GPU, with their errors.
EACH_DTYPE = pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 5e-3)],
    ids=str,
)
EVERY = pytest.mark.parametrize("name", MAKERS)
STEPPING = pytest.mark.parametrize("name", [name for name in MAKERS if name != "S5-bidir"])


def check_steps_in_a_graph(block: Any, hidden: Tensor) -> None:
    """That steps of a block of Mamba or Mamba-2, replayed by a CUDA graph, compute what a call on all of ``hidden`` does."""
    batch, length = hidden.shape[:2]
    with torch.no_grad():
        expected = block(hidden)
        states, now = block.allocate_inference_cache(batch, length), hidden[:, :1].clone()
        graph, (out, *_) = recorded(lambda: block.step(now, *states))
        for state in states:
            state.zero_()
        outputs = []
        for x in hidden.split(1, 1):
            now.copy_(x)
            graph.replay()
            outputs.append(out.clone())
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-4, atol=1e-5)
