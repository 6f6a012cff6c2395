"""Which variants are compiled for which architectures."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scan_registry.kernels import families
from scan_registry.kernels.model import Variant
from scan_registry.target import RELEASED, Target


@dataclass(frozen=True)
class Job:
    """One variant to compile for one architecture."""

    variant: Variant
    arch: Target


def chosen_archs(settings: Mapping[str, object] | None = None) -> tuple[Target, ...]:
    """The architectures to build: ``-C archs=…``, else ``SCAN_REGISTRY_ARCHS``, else what releases hold.

    A list separated by commas, semicolons or blanks; ``all`` is the default and ``none`` builds no
    binaries. ``ValueError`` names a word that is not an architecture.
    """
    given = (settings or {}).get("archs") or os.environ.get("SCAN_REGISTRY_ARCHS") or "all"
    text = " ".join(given) if isinstance(given, list) else str(given)
    words = text.replace(",", " ").replace(";", " ").split()
    if words == ["none"]:
        return ()
    if words == ["all"]:
        words = list(RELEASED)
    if not words:
        raise ValueError(
            f"archs is {text!r}, which names no architecture; `none` builds no binaries"
        )
    return tuple(dict.fromkeys(map(Target.parse, words)))


def plan(archs: Iterable[Target]) -> dict[Target, tuple[Job, ...]]:
    """The jobs of each architecture's archive, in the order of the specs."""
    variants = [variant for family in families().values() for variant in family.variants()]
    return {arch: tuple(Job(variant, arch) for variant in variants) for arch in archs}
