"""The tests that every operator has: a family describes its own in a class, see ``operator.py``.

class TestMyScan(OperatorTests):
    cases = {"plain": {}, "packed": {"bounds": (0, 3, 3, 9)}}
    ...
"""

from __future__ import annotations

from .calls import Call, close, gradients, results
from .derivatives import Derivatives
from .features import Features, arguments_of
from .operator import Operator
from .sequences import Sequences
from .steps import StepTests
from .values import Values


class OperatorTests(Values, Sequences, Derivatives, Features):
    """All of them."""


__all__ = [
    "Call",
    "Derivatives",
    "Features",
    "Operator",
    "OperatorTests",
    "Sequences",
    "StepTests",
    "Values",
    "arguments_of",
    "close",
    "gradients",
    "results",
]
