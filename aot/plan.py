"""Which variants are compiled for which architectures."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from scan_registry.hardware.target import RELEASED, Target
from scan_registry.kernels import families
from scan_registry.kernels.model import Kernel, Variant
from scan_registry.kernels.tuning import Tuning, fewest, nearest_arch

#: A variant counts as fast enough on an architecture without a table of its own if its time, on the GPU that was
#: measured, is at most this many times the fastest's. A smaller number would put more variants into wheels than there
#: is room for.
BORROWED = 2.0


@dataclass(frozen=True)
class Job:
    """One variant to compile for one architecture.

    An ``optional`` one is left out, and that is said, where it does not compile, spills or does not fit: it
    was found to be good on another architecture.
    """

    variant: Variant
    arch: Target
    optional: bool = False


def chosen_archs(settings: Mapping[str, object] | None = None) -> tuple[Target, ...]:
    """The architectures to build: ``-C archs=…``, else ``SCAN_REGISTRY_ARCHS``, else what releases hold.

    A list separated by commas, semicolons or blanks; ``all`` is the default and ``none`` builds no
    binaries. ``ValueError`` names a word that is not an architecture.
    """
    setting = (settings or {}).get("archs") or os.environ.get("SCAN_REGISTRY_ARCHS") or "all"
    text = " ".join(setting) if isinstance(setting, list) else str(setting)
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
    """The jobs of each architecture's archive, in the order of the specs: the kernels' defaults, and
    what the tunings name that go into the archive."""
    kernels = [kernel for family in families().values() for kernel in family.kernels]
    return {arch: tuple(job for kernel in kernels for job in _jobs(kernel, arch)) for arch in archs}


def _jobs(kernel: Kernel, arch: Target) -> Iterator[Job]:
    """What the archive's tunings name; and the kernel's defaults, of kinds for which it has none."""
    tunings = tunings_for(kernel, arch)
    named = {label for tuning in tunings for label in tuning.labels}
    tuned = {kind for tuning in tunings for kind in tuning.kinds}
    borrowed = any(arch.is_ptx or tuning.capability != arch.capability for tuning in tunings)
    for variant in kernel.every if named else kernel.by_text.values():
        rules = kernel.rules
        if not (rules.serves(variant.statics, arch) and rules.ships(variant.statics, arch)):
            continue
        label = kernel.label(variant)
        if label in named:
            yield Job(variant, arch, optional=borrowed)
        elif str(variant) in kernel.by_text and not any(label.startswith(f"{k},") for k in tuned):
            yield Job(variant, arch)


def tunings_for(kernel: Kernel, arch: Target) -> tuple[Tuning, ...]:
    """What tuning found of a kernel, as an archive has it: of its own GPUs; else of the nearest ones, and for PTX of
    all, with the times of few variants that are good there."""
    own = tuple(t for t in kernel.tunable.tunings() if t.capability == arch.capability)
    if own and not arch.is_ptx:
        return own
    general = [tuning for tuning in kernel.tunable.timings() if not tuning.exclusive]
    nearest = nearest_arch(general, arch.capability)
    sources = general if arch.is_ptx else [nearest] if nearest else []
    borrowed = (_borrowed(kernel, tuning, arch) for tuning in sources)
    return tuple(tuning for tuning in borrowed if tuning.labels)


def _borrowed(kernel: Kernel, tuning: Tuning, arch: Target) -> Tuning:
    """What is taken over from another GPU: of the variants that archives hold and there is room for, few that are near the
    fastest. If default variants were timed on one problem of a kind, or none, they serve that kind."""
    usual = {kernel.label(variant) for variant in kernel.by_text.values()}
    kept = dict[str, set[str]]()
    for kind, problems in _serving_times(kernel, tuning, arch).items():
        has_usual = any(label.startswith(f"{kind},") for label in usual)
        if sum(not usual.isdisjoint(times) for times in problems) > 1 or (
            problems and not has_usual
        ):
            kept[kind] = set(fewest(problems, BORROWED))
    return tuning.only(kept)


def _serving_times(
    kernel: Kernel, tuning: Tuning, arch: Target
) -> Mapping[str, list[dict[str, float]]]:
    """By kind, the times of each problem by those variants alone that serve and ship for ``arch``."""
    rules = kernel.rules
    serving = {
        kernel.label(v)
        for v in kernel.every
        if rules.serves(v.statics, arch) and rules.ships(v.statics, arch)
    }
    rows = {
        kind: [{k: t for k, t in row.times.items() if k in serving} for row in tuning.rows(kind)]
        for kind in tuning.kinds
    }
    return {kind: [times for times in timed if times] for kind, timed in rows.items()}
