"""Frozen dataclasses that take little time to make.

For every frozen class ``dataclasses`` writes and compiles six methods. That takes a millisecond, and for the
classes that a first call needs longer than all else that it does. Here all classes share those methods.
To mypy, and to ``fields``, ``replace`` and ``asdict``, they are dataclasses like others.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]


def _init(self: Any, *values: Any, **named: Any) -> None:
    fields = self.__dataclass_fields__
    if not named and len(values) == len(fields):
        vars(self).update(zip(fields, values, strict=True))
        return
    arguments = {**dict(zip(fields, values, strict=False)), **named}
    if len(arguments) != len(values) + len(named) or not arguments.keys() <= fields.keys():
        raise TypeError(f"{_call(self, values, named)}: its fields are {', '.join(fields)}")
    if named or len(arguments) < len(fields):  # in the fields' order
        arguments = {
            n: arguments[n] if n in arguments else _default(self, f) for n, f in fields.items()
        }
    vars(self).update(arguments)


def _default(instance: Any, field: dataclasses.Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    if field.default_factory is not MISSING:
        return field.default_factory()
    raise TypeError(f"{type(instance).__qualname__}() misses {field.name!r}")


def _call(instance: Any, values: tuple[Any, ...], named: dict[str, Any]) -> str:
    arguments = [*map(repr, values), *(f"{name}={value!r}" for name, value in named.items())]
    return f"{type(instance).__qualname__}({', '.join(arguments)})"


def _values(instance: Any) -> tuple[Any, ...]:
    """Of the fields, in their order."""
    return tuple([getattr(instance, name) for name in instance.__dataclass_fields__])


def _repr(self: Any) -> str:
    return _call(self, (), dict(zip(self.__dataclass_fields__, _values(self), strict=True)))


def _hash(self: Any) -> int:
    return hash(_values(self))


def _comparison(compare: Callable[[Any, Any], bool]) -> Callable[[Any, object], Any]:
    def method(self: Any, other: object) -> Any:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return compare(_values(self), _values(other))

    return method


def _set(self: Any, name: str, value: Any) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _delete(self: Any, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


_METHODS = {
    "__init__": _init,
    "__repr__": _repr,
    "__eq__": _comparison(operator.eq),
    "__hash__": _hash,
    "__setattr__": _set,
    "__delattr__": _delete,
}
_ORDER = {
    f"__{comparison.__name__}__": _comparison(comparison)
    for comparison in (operator.lt, operator.le, operator.gt, operator.ge)
}

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(*, frozen, order=False):
        """``dataclasses.dataclass(frozen=True)``; ``ValueError`` for a class that is not to be frozen."""
        if not frozen:
            raise ValueError("dataclasses.dataclass makes classes that are not frozen")
        methods = _METHODS | _ORDER if order else _METHODS

        def decorated(cls):
            for name, method in methods.items():
                setattr(cls, name, method)
            return dataclasses.dataclass(init=False, repr=False, eq=False)(cls)

        return decorated
