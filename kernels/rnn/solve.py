"""The constraints on tilings, handed to a solver: OR-tools' CP-SAT, which only this module needs.

Its answers are those of ``tilings.enumerate_tilings``, found without trying every combination: for
domains that are too large for that. Nothing at run time solves anything.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from scan_registry.kernels.rnn.constraints import (
    Constraint,
    Expression,
    Name,
    Number,
    Operand,
    Operation,
    Values,
    expression,
)


class MissingSolverError(ImportError):
    """OR-tools is not installed."""


def _solver() -> Any:
    try:
        return importlib.import_module("ortools.sat.python.cp_model")
    except ImportError as error:
        raise MissingSolverError(
            "OR-tools is not installed; `pip install scan-registry[tune]` brings it"
        ) from error


def solve(
    domains: Mapping[str, Iterable[int]], constraints: Iterable[Constraint], known_values: Values
) -> list[dict[str, int]]:
    """Every choice from the domains that breaks no constraint whose names all have values, in order.

    ``MissingSolverError`` where OR-tools is not installed.
    """
    cp = _solver()
    model = cp.CpModel()
    variables = {
        name: model.new_int_var_from_domain(cp.Domain.from_values(sorted(values)), name)
        for name, values in domains.items()
    }
    translation = _Translation(cp, model, {**known_values, **variables}, domains)
    known = translation.values.keys()
    for constraint in constraints:
        if constraint.names <= known:
            translation.add(constraint)

    solutions: list[dict[str, int]] = []

    class Collector(cp.CpSolverSolutionCallback):  # type: ignore[misc, name-defined]
        def on_solution_callback(self) -> None:
            solutions.append({name: self.value(variable) for name, variable in variables.items()})

    solver = cp.CpSolver()
    solver.parameters.enumerate_all_solutions = True
    solver.parameters.num_workers = 1
    solver.solve(model, Collector())
    return sorted(solutions, key=lambda tiling: tuple(tiling.values()))


class _Translation:
    """Expressions as CP-SAT knows them: sums as they are, of products and quotients a variable each."""

    def __init__(
        self, cp: Any, model: Any, values: Mapping[str, Any], domains: Mapping[str, Iterable[int]]
    ) -> None:
        self.cp, self.model, self.values = cp, model, values
        self.bounds = {name: (min(domain), max(domain)) for name, domain in domains.items()}

    def add(self, constraint: Constraint) -> None:
        """Have it hold."""
        left, right = self.of(constraint.left), self.of(constraint.right)
        if constraint.relation == "divides":
            self.model.add_modulo_equality(0, self.variable(right), self.variable(left))
        elif constraint.relation == "==":
            self.model.add(self.linear(left) == right[0])
        else:
            self.model.add(self.linear(left) <= right[0])

    def of(self, operand: Operand) -> Any:
        """A linear expression, and its least and largest value."""
        node: Expression = expression(operand)
        if isinstance(node, Number):
            return node.number, node.number, node.number
        if isinstance(node, Name):
            value = self.values[node.name]
            return (value, *self.bounds.get(node.name, (value, value)))
        assert isinstance(node, Operation)
        left, right = self.of(node.left), self.of(node.right)
        if node.sign == "+":
            return left[0] + right[0], left[1] + right[1], left[2] + right[2]
        if node.sign == "-":
            return left[0] - right[0], left[1] - right[2], left[2] - right[1]
        return self.product(left, right) if node.sign == "*" else self.quotient(left, right)

    def product(self, left: tuple[Any, int, int], right: tuple[Any, int, int]) -> Any:
        """Linear where one side is a number."""
        ends = [a * b for a in left[1:] for b in right[1:]]
        low, high = min(ends), max(ends)
        if left[1] == left[2] or right[1] == right[2]:
            number, other = (left[1], right[0]) if left[1] == left[2] else (right[1], left[0])
            return number * other, low, high
        product = self.model.new_int_var(low, high, "")
        self.model.add_multiplication_equality(product, [self.variable(left), self.variable(right)])
        return product, low, high

    def quotient(self, left: tuple[Any, int, int], right: tuple[Any, int, int]) -> Any:
        """Rounded up: of (left + right - 1) / right what is rounded towards zero."""
        above = left[0] + right[0] - 1, left[1] + right[1] - 1, left[2] + right[2] - 1
        low, high = -(-left[1] // right[2]), -(-left[2] // right[1])
        result = self.model.new_int_var(low, high, "")
        self.model.add_division_equality(result, self.variable(above), self.variable(right))
        return result, low, high

    def variable(self, of: tuple[Any, int, int]) -> Any:
        """A variable that is equal to it."""
        result = self.model.new_int_var(of[1], of[2], "")
        self.model.add(result == of[0])
        return result

    def linear(self, of: tuple[Any, int, int]) -> Any:
        """Something that can be compared with numbers to make a constraint."""
        return self.variable(of) if isinstance(of[0], int) else of[0]
