"""What was not taken, in few words."""

from __future__ import annotations

from collections.abc import Iterable

from scan_registry.dispatch.select import Rejected
from scan_registry.kernels.model import Variant


def grouped(losers: Iterable[Rejected]) -> dict[str, tuple[str, ...]]:
    """The subjects by the reason that they share, in order of appearance."""
    groups: dict[str, list[str]] = {}
    for loser in losers:
        groups.setdefault(loser.reason, []).append(loser.subject)
    return {reason: tuple(subjects) for reason, subjects in groups.items()}


def called(subjects: tuple[str, ...]) -> str:
    """Subjects in one phrase, such as ``12 variants for compute_80, sm_90``."""
    if len(subjects) == 1:
        return subjects[0]
    variants: dict[str, None] = {}
    targets: dict[str, None] = {}
    others: dict[str, None] = {}
    for subject in subjects:
        text, separator, target = subject.rpartition(" for ")
        if separator and _is_variant(text):
            variants[text], targets[target] = None, None
        else:
            others[subject] = None
    if not variants:
        return ", ".join(others)
    count = f"{len(variants)} variants" if len(variants) > 1 else next(iter(variants))
    return ", ".join([f"{count} for {', '.join(targets)}", *others])


def _is_variant(text: str) -> bool:
    try:
        Variant.parse(text)
    except ValueError:
        return False
    return True
