"""Which variants are compiled for which architectures."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from scan_registry.hardware.target import RELEASED, SHARED_MEMORY, Target
from scan_registry.kernels import families
from scan_registry.kernels.model import Kernel, Variant
from scan_registry.kernels.tuning import Tuning, fewest, nearest_arch

#: Of the fastest's time on another GPU, what is close enough to be taken over from there: a guess, and as much as
#: leaves room in the wheel, since nobody has timed it here.
BORROWED = 1.8


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
    """The jobs of each architecture's archive, in the order of the specs: the kernels' defaults, and
    what the tunings name that go into the archive."""
    kernels = [kernel for family in families().values() for kernel in family.kernels]
    return {arch: tuple(job for kernel in kernels for job in _jobs(kernel, arch)) for arch in archs}


def _jobs(kernel: Kernel, arch: Target) -> Iterator[Job]:
    own, borrowed = set[str](), set[str]()
    for tuning in tunings_for(kernel, arch):
        if not arch.is_ptx and tuning.capability == arch.capability:
            own.update(tuning.labels)
        else:
            borrowed |= _borrowed(kernel, tuning, arch)
    for variant in kernel.variants:
        if not kernel.rules.serves(variant.statics, arch):
            continue
        label = kernel.label(variant)
        if str(variant) in kernel.by_text or label in own:
            yield Job(variant, arch)
        elif label in borrowed:
            yield Job(variant, arch, optional=True)


def _borrowed(kernel: Kernel, tuning: Tuning, arch: Target) -> set[str]:
    """What is taken over from another GPU's tuning, on which times are a guess: of the variants that there is room
    for few, near the fastest there on several problems. Kinds that have usual variants do with those where
    only one problem asks for more, and PTX does anyway; others, such as packed sequences, have to have some."""
    usual = {kernel.label(variant) for variant in kernel.by_text.values()}
    room = math.inf if arch.is_ptx else SHARED_MEMORY.get(arch.capability, math.inf)
    small = {kernel.label(v) for v in kernel.variants if kernel.code.shared(v) <= room}
    found = set[str]()
    for kind in tuning.kinds:
        has_usual = any(label.startswith(f"{kind},") for label in usual)
        if has_usual and arch.is_ptx:
            continue
        rows = [{k: t for k, t in row.times.items() if k in small} for row in tuning.rows(kind)]
        problems = [times for times in rows if times]
        for label in fewest(problems, [BORROWED] * len(problems)):
            served = [t for t in problems if t.get(label, math.inf) <= BORROWED * min(t.values())]
            if len(served) > 1 or not has_usual:
                found.add(label)
    return found


def tunings_for(kernel: Kernel, arch: Target) -> tuple[Tuning, ...]:
    """What tuning found of a kernel that is of use in an archive: machine code runs on one kind of GPU,
    and gets what is nearest to it, and what is for single GPUs of that kind; PTX gets the rows of all tunings
    that are not for single ones."""
    every = kernel.tunable.tunings()
    if arch.is_ptx:
        return tuple(tuning for tuning in every if not tuning.exclusive)
    nearest = nearest_arch(every, arch.capability)
    own = (t for t in every if t.exclusive and t.capability == arch.capability)
    return (*((nearest,) if nearest else ()), *own)
