"""What wheels hold, whether they are installed or not. Some variants are in no wheel and are compiled at their first call."""

from __future__ import annotations

import math
from collections.abc import Iterator

from scan_registry.dispatch.candidates import Backend
from scan_registry.hardware.device import Device
from scan_registry.hardware.target import COMPILERS, FIRST_CUDA, RELEASED, CudaVersion, Target
from scan_registry.kernels.model import Family, Problem

_NEVER: CudaVersion = (99, 0)  # a CUDA release that knows any GPU


def can_be_built(target: Target) -> bool:
    """Whether the compilers that make wheels know the architecture."""
    return FIRST_CUDA.get(target.capability, _NEVER) <= COMPILERS


def targets_of(device: Device) -> Iterator[Target]:
    """The architectures of wheels that the device runs: released ones, the closest first and PTX last, and its own, if wheels can
    be built for that."""
    fitting = [t for t in map(Target.parse, RELEASED) if not t.misfit(device.capability)]
    yield from sorted(fitting, key=lambda target: (target.is_ptx, -target.number))
    own = Target(device.capability)
    if own not in fitting and can_be_built(own):
        yield own


def holds(
    target: Target,
    family: Family,
    problem: Problem,
    backend: Backend,
    shared_memory: float = math.inf,
) -> bool:
    """Whether a wheel for this architecture holds what solves the problem, in the language, or with ``auto`` in any, and with at most
    so much shared memory for a CTA."""
    for kernel in family.kernels:
        if kernel.name != problem.kernel or backend not in ("auto", kernel.language):
            continue
        rules = kernel.rules
        if any(
            rules.serves(variant.statics, target)
            and rules.ships(variant.statics, target)
            and rules.accepts(variant, problem) is None
            and kernel.code.shared(variant) <= shared_memory
            for variant in kernel.held(problem.dtype, target)
        ):
            return True
    return False
