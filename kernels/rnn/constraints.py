"""A small language for constraints on whole numbers: said once, checked by evaluation or solved.

    rows, split = Name("rows"), Name("split")
    few = Constraint("threads", 32 * rows * split, "<=", 1024)
    few.broken({"rows": 8, "split": 8})  # "threads: 2048 > 1024"

Expressions are sums, differences, products and quotients that are rounded up, of names and whole numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Literal, TypeAlias

from scan_registry.base.frozen import dataclass

Relation = Literal["<=", "==", "divides"]
Values: TypeAlias = Mapping[str, int]

_BROKEN = {"<=": ">", "==": "!=", "divides": "does not divide"}


class Expression(ABC):
    """Something that is a whole number once its names have values."""

    @abstractmethod
    def source(self) -> str:
        """It as Python's expression of a mapping ``values``."""

    @cached_property
    def value(self) -> Callable[[Values], int]:
        """What it is, by the values of names; ``KeyError`` if one has none. Compiled once."""
        return eval(f"lambda values: {self.source()}")  # type: ignore[no-any-return]

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

    def source(self) -> str:
        return str(self.number)

    def names(self) -> frozenset[str]:
        return frozenset()


@dataclass(frozen=True)
class Name(Expression):
    """A variable, or what a problem or a GPU gives."""

    name: str

    def source(self) -> str:
        return f"values[{self.name!r}]"

    def names(self) -> frozenset[str]:
        return frozenset((self.name,))


@dataclass(frozen=True)
class Operation(Expression):
    """``/`` rounds up, and divides by what is positive."""

    sign: Literal["+", "-", "*", "/"]
    left: Expression
    right: Expression

    def source(self) -> str:
        left, right = self.left.source(), self.right.source()
        return f"-(-{left} // {right})" if self.sign == "/" else f"({left} {self.sign} {right})"

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

    # Each side and its names are prepared once: constraints are checked for each of thousands of tilings.
    @cached_property
    def _sides(self) -> tuple[Expression, Expression]:
        return expression(self.left), expression(self.right)

    @cached_property
    def names(self) -> frozenset[str]:
        """Those of both sides."""
        return self._sides[0].names() | self._sides[1].names()

    def broken(self, values: Values) -> str | None:
        """None if it holds, else how it does not. Every name has to have a value."""
        left, right = self._sides[0].value(values), self._sides[1].value(values)
        if self.relation == "divides":
            holds = left != 0 and right % left == 0
        else:
            holds = left == right if self.relation == "==" else left <= right
        return None if holds else f"{self.what}: {left} {_BROKEN[self.relation]} {right}"


def first_broken(constraints: Iterable[Constraint], values: Values) -> str | None:
    """How the first constraint fails whose names all have values, or None."""
    known = values.keys()
    known_ones = (one for one in constraints if one.names <= known)
    return next((reason for one in known_ones if (reason := one.broken(values))), None)
