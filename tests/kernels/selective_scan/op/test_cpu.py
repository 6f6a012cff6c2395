"""What the compiled code of ``selective_scan`` for the CPU refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusing import check_refused

from scan_registry.ops import _cpu

SIZES = (1, 2, 3, 4, 1, 1, 0, 0)
FORWARD = "float32", (1024,) * 12, (*SIZES, *[0] * 20), 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({0: "float64"}, "dtype 'float64'; accepted are float32, bfloat16, float16"),
        ({1: (1024,) * 11}, "takes 12 pointers, got 11"),
        ({1: (None,) * 12}, "pointer 0 is null"),
        ({2: (*SIZES, *[0] * 19)}, "takes 28 scalars, got 27"),
        ({2: (1, 2, 3, 257, *SIZES[4:], *[0] * 20)}, "states is 257; accepted are 1 to 256"),
        ({2: (1, -2, *SIZES[2:], *[0] * 20)}, "size 1 is -2"),
        ({2: (*SIZES[:4], 3, 1, 0, 0, *[0] * 20)}, "3 groups do not divide 2 channels"),
        ({3: 0}, "threads is 0"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[int, Any], words: str) -> None:
    check_refused(_cpu.selective_scan_forward, FORWARD, changes, words)


def test_offsets_must_rise() -> None:
    x, offsets = torch.zeros(1, 2, 4), torch.tensor([0, 3, 2])
    at = x.data_ptr()
    pointers = (at, at, None, at, at, at, at, None, None, None, offsets.data_ptr(), None)
    scalars = (1, 2, 4, 1, 1, 1, 2, 0, *(8, 4, 1) * 4, *(4, 4, 4, 1) * 2)
    with pytest.raises(ValueError, match="offsets do not rise from 0 to time, 4"):
        _cpu.selective_scan_forward("float32", pointers, scalars, 1)
