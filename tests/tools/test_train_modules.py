"""``tools/train_modules.py``: our modules train as torch's do, whatever is done to gradients in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

KINDS = ("LSTM", "GRU", "RNN", "SLSTM")
MANNERS = ("clipped", "scaled", "accumulated")


@pytest.fixture(scope="module")
def tool(load_tool: Callable[[str], ModuleType]) -> Any:
    return load_tool("train_modules")


@pytest.mark.slow
@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("kind", KINDS)
def test_sixty_adam_steps_match_torch(tool: Any, kind: str, manner: str) -> None:
    of_losses, of_weights = tool.compare(kind, manner, tool.Size(), "cpu")
    assert of_losses <= tool.LOSS_TOLERANCE
    assert of_weights <= tool.WEIGHT_TOLERANCE


@pytest.fixture
def exact_float32() -> Iterator[None]:
    """torch's products without TF32. Its settings are no attributes that monkeypatch could take back."""
    import torch

    settings = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [each.allow_tf32 for each in settings]
    for each in settings:
        each.allow_tf32 = False
    yield
    for each, allowed in zip(settings, before, strict=True):
        each.allow_tf32 = allowed


@pytest.mark.gpu
@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("kind", KINDS)
def test_sixty_adam_steps_match_torch_on_a_gpu(
    tool: Any, kind: str, manner: str, exact_float32: None
) -> None:
    of_losses, of_weights = tool.compare(kind, manner, tool.Size(24, 8, 32, 64), "cuda")
    assert of_losses <= tool.LOSS_TOLERANCE
    assert of_weights <= tool.WEIGHT_TOLERANCE
