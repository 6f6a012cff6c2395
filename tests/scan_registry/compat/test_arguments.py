"""What every stand-in refuses, in the names of its own arguments rather than ``linear_scan``'s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from scan_registry.compat import accelerated_scan, sequential_scan

X = torch.rand(2, 3, 8)
#: Each function, and what it calls gates and tokens.
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], str, str]] = {
    "warp": (accelerated_scan.warp.scan, "gates", "tokens"),
    "scalar": (accelerated_scan.scalar.scan, "forget", "inputs"),
    "triton": (accelerated_scan.triton.scan, "gates", "tokens"),
    "complex": (accelerated_scan.complex.scan, "forget", "inputs"),
    "scan_cu": (sequential_scan.scan_cu, "alpha", "beta"),
    "scan_cu_single": (sequential_scan.scan_cu_single, "alpha", "beta"),
    "scan_tr": (sequential_scan.scan_tr, "alpha", "beta"),
}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda x: x.tolist(), TypeError, "{} must be a torch.Tensor, not list"),
        (lambda x: x.to_sparse(), TypeError, r"{} is sparse; .* pass {}.to_dense\(\)"),
        (lambda x: x.to_mkldnn(), TypeError, r"{} is in oneDNN's layout; .* pass {}.to_dense\(\)"),
        (lambda x: x.int(), TypeError, "{} has dtype torch.int32"),
        (lambda x: x.double(), TypeError, "float64 does not mix"),
        (lambda x: x[0], ValueError, r"{} has shape \(3, 8\)"),
        (lambda x: x[:, :1], ValueError, r"\(2, 1, 8\)"),
        (lambda x: x.to("meta"), ValueError, "on meta"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_name_the_callers_arguments(
    name: str, place: int, change: Callable[[Tensor], Any], error: type[Exception], words: str
) -> None:
    function, *names = FUNCTIONS[name]
    inputs: list[Any] = [X, X]
    inputs[place] = change(X)
    with pytest.raises(error, match=words.replace("{}", names[place])) as caught:
        function(*inputs)
    others = {"gates", "tokens"} - {*names}
    assert not any(f"{other} " in str(caught.value) for other in others)
