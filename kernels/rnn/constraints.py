"""A small language for constraints on whole numbers: said once, checked by evaluation or solved.

    rows, split = Name("rows"), Name("split")
    few = Constraint("threads", 32 * rows * split, "<=", 1024)
    few.broken({"rows": 8, "split": 8})  # "threads: 2048 > 1024"

Expressions are sums, differences, products and quotients that are rounded up, of names and whole numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Literal, TypeAlias

from scan_registry.base.frozen import dataclass

Relation = Literal["<=", "==", "divides"]
Values: TypeAlias = Mapping[str, int]

_BROKEN = {"<=": ">", "==": "!=", "divides": "does not divide"}


class Expression(ABC):
    """Something that is a whole number once its names have values."""

    @abstractmethod
    def value(self, values: Values) -> int:
        """What it is; ``KeyError`` if a name has no value."""

    @abstractmethod
    def names(self) -> frozenset[str]:
        """Those that it holds."""

    def __add__(self, other: Operand) -> Expression:
        return Operation("+", self, expression(other))

    def __sub__(self, other: Operand) -> Expression:
        return Operation("-", self, expression(other))

    def __mul__(self, other: Operand) -> Expression:
        return Operation("*", self, expression(other))

    def __radd__(self, other: int) -> Expression:
        return Operation("+", Number(other), self)

    def __rmul__(self, other: int) -> Expression:
        return Operation("*", Number(other), self)


Operand: TypeAlias = Expression | int


@dataclass(frozen=True)
class Number(Expression):
    """A constant."""

    number: int

    def value(self, values: Values) -> int:
        return self.number

    def names(self) -> frozenset[str]:
        return frozenset()


@dataclass(frozen=True)
class Name(Expression):
    """A variable, or what a problem or a GPU gives."""

    name: str

    def value(self, values: Values) -> int:
        return values[self.name]

    def names(self) -> frozenset[str]:
        return frozenset((self.name,))


@dataclass(frozen=True)
class Operation(Expression):
    """``/`` rounds up, and divides by what is positive."""

    sign: Literal["+", "-", "*", "/"]
    left: Expression
    right: Expression

    def value(self, values: Values) -> int:
        left, right = self.left.value(values), self.right.value(values)
        if self.sign == "+":
            return left + right
        if self.sign == "-":
            return left - right
        return left * right if self.sign == "*" else -(-left // right)

    def names(self) -> frozenset[str]:
        return self.left.names() | self.right.names()


def expression(operand: Operand) -> Expression:
    """The expression, or the number as one."""
    return Number(operand) if isinstance(operand, int) else operand


def ceil_div(left: Operand, right: Operand) -> Expression:
    """left / right, rounded up."""
    return Operation("/", expression(left), expression(right))


@dataclass(frozen=True)
class Constraint:
    """``left`` <= ``right``, == it, or divides it; ``what`` says in words what is compared."""

    what: str
    left: Operand
    relation: Relation
    right: Operand

    def names(self) -> frozenset[str]:
        """Those of both sides."""
        return self._names

    @cached_property
    def _names(self) -> frozenset[str]:
        # Found once: constraints are checked for each of thousands of tilings.
        return expression(self.left).names() | expression(self.right).names()

    def broken(self, values: Values) -> str | None:
        """None if it holds, else how it does not. Every name has to have a value."""
        left, right = (expression(side).value(values) for side in (self.left, self.right))
        if self.relation == "divides":
            holds = left != 0 and right % left == 0
        else:
            holds = left == right if self.relation == "==" else left <= right
        return None if holds else f"{self.what}: {left} {_BROKEN[self.relation]} {right}"


def first_broken(constraints: Iterable[Constraint], values: Values) -> str | None:
    """How the first constraint fails whose names all have values, or None."""
    known = values.keys()
    known_ones = (one for one in constraints if one.names() <= known)
    return next((reason for one in known_ones if (reason := one.broken(values))), None)
