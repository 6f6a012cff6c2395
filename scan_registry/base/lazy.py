"""Names of a package that load what they need when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def names(
    namespace: dict[str, Any],
    homes: Mapping[str, str | None],
    others: Callable[[], Mapping[str, str]] = dict,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and the ``__dir__`` of the package whose globals are ``namespace``.

    ``homes`` has the module that defines each name, relative to the package if it begins with a dot, or None for a name that
    is a module of the package.
    ``others`` returns more of them, and is first called for a name that is not in ``homes``.
    """
    package = namespace["__name__"]

    def load(name: str) -> Any:
        from importlib import import_module

        home = homes[name] if name in homes else others().get(name, "")
        if home == "":
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if home is None:
            value: Any = import_module(f"{package}.{name}")
        else:
            value = getattr(import_module(home, package), name)
        # Kept in this copy of the package: after a reload, sys.modules may hold another one.
        namespace[name] = value
        return value

    def listed() -> list[str]:
        return sorted({*namespace, *homes, *others()})

    return load, listed
