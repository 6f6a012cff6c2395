"""Variants whose static parameters have the same names, which archives keep together."""

from __future__ import annotations

from collections.abc import Iterable

from scan_registry.kernels.model import Variant


def by_names(variants: Iterable[Variant]) -> list[list[Variant]]:
    """The variants of each set of names, in order of appearance."""
    kinds: dict[tuple[str, ...], list[Variant]] = {}
    for variant in variants:
        kinds.setdefault(tuple(name for name, _ in variant.statics), []).append(variant)
    return list(kinds.values())
