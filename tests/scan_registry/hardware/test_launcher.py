"""The C launcher, as far as it goes without a driver."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import pytest

from scan_registry.hardware import _launcher
from scan_registry.hardware._launcher import Launch

FIXED: dict[str, Any] = {
    "context": 0,
    "function": 0,
    "grid": (1, 1, 1),
    "block": (32, 1, 1),
    "shared": 0,
    "pointers": 2,
    "scalars": (1, -1, 2**63 - 1),
    "hidden": 2,
    "workspace": -1,
    "workspace_bytes": 0,
}


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"grid": (2**32 + 4, 1, 1)}, ValueError, "4294967300 x 1 x 1 blocks"),
        ({"grid": (1, 65536, 1)}, ValueError, "1 x 65536 x 1 blocks"),
        ({"scalars": (0,) * 64}, ValueError, "at most 64 parameters"),
        ({"scalars": (2**63,)}, OverflowError, "too (large|big)"),
        ({"scalars": [1]}, TypeError, "tuple"),
        ({"workspace": 2}, ValueError, "parameters"),
    ],
)
def test_what_cannot_be_launched(wrong: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Launch(**FIXED | wrong)


def test_run_wants_a_stream_and_every_pointer() -> None:
    with pytest.raises(TypeError, match="a stream and 2 pointers, got 2 arguments"):
        Launch(**FIXED).run(0, 1)


def test_copies_of_the_package_that_share_the_library_share_its_types() -> None:
    """Otherwise the first copy's functions would refuse its own launches once the second copy is imported."""
    spec = spec_from_file_location("another_copy._launcher", _launcher.__file__)
    assert spec is not None
    assert spec.loader is not None
    copy = module_from_spec(spec)
    spec.loader.exec_module(copy)
    assert copy is not _launcher
    for name in ("Launch", "FastLaunch", "FastPath"):
        assert getattr(copy, name) is getattr(_launcher, name)
