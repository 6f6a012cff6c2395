"""The Triton kernels of recurrent networks on the CPU, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreting import interpret

SCRIPT = Path(__file__).with_name("interpret_rnn.py")


@pytest.mark.slow
@pytest.mark.parametrize("words", [("few",), pytest.param((), marks=pytest.mark.thorough)])
def test_matches_the_reference(words: tuple[str, ...]) -> None:
    interpret(SCRIPT, *words)
