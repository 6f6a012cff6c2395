"""One thread, for tests of operators, modules and stand-ins."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> None:
    """Tensors are small here. Tests of threads set their number themselves."""
    computes = {"compat", "nn", "ops"} & {*request.path.parent.parts}
    if computes and request.node.get_closest_marker("gpu") is None:
        request.getfixturevalue("one_thread")


@pytest.fixture
def exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TF32 on GPUs."""
    import torch

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
