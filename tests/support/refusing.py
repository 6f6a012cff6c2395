"""Calls of functions in C, each with something that they refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest


def check_refused(
    function: Callable[..., Any], arguments: Sequence[Any], changes: Mapping[int, Any], words: str
) -> None:
    """That the call is refused in these words, with the arguments in some places changed."""
    changed = [changes.get(place, value) for place, value in enumerate(arguments)]
    with pytest.raises(ValueError, match=words):
        function(*changed)
