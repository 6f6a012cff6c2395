"""What wheels are to hold, planned once for the tests of a process."""

from __future__ import annotations

from functools import cache

from scan_registry.aot.plan import Job, plan
from scan_registry.hardware.target import Target


@cache
def jobs_of(arch: Target) -> tuple[Job, ...]:
    return tuple(plan([arch])[arch])
