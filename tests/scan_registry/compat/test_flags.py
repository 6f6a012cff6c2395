"""Stand-ins refuse what is no flag; 0 and 1 are taken, as the replaced functions take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from scan_registry.compat.accelerated_scan import ref, warp

PAIR = torch.rand(2, 3, 8), torch.rand(2, 3, 8)
FLAGS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "warp.scan_forward": ("reverse", lambda flag: warp.scan_forward(*PAIR, reverse=flag)),
    "ref.scan": ("reverse", lambda flag: ref.scan(*PAIR, reverse=flag)),
    "ref.scan of an operator": (
        "reverse",
        lambda flag: ref.scan(*PAIR, add=torch.maximum, reverse=flag),
    ),
}


@pytest.mark.parametrize("wrong", ["no", 2, None, [True]], ids=repr)
@pytest.mark.parametrize("function", FLAGS)
def test_what_is_no_flag_is_refused(function: str, wrong: Any) -> None:
    name, call = FLAGS[function]
    with pytest.raises(TypeError, match=f"{name} is .*; it must be a bool"):
        call(wrong)


@pytest.mark.parametrize("function", FLAGS)
def test_0_and_1_are_flags(function: str) -> None:
    _, call = FLAGS[function]
    for number in (0, 1):
        torch.testing.assert_close(call(number), call(bool(number)))
