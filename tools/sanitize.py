"""Launches every installed binary of a family on small problems, for compute-sanitizer to watch: what the ``sanitize_*`` tools
share."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from attest import runnable

from scan_registry.dispatch.fit import Tier, nearest_tier
from scan_registry.kernels import family
from scan_registry.kernels.model import Kernel, Problem, Variant


def takes(kernel: Kernel, variant: Variant, problem: Problem, sm_count: int) -> bool:
    """Whether a variant computes a problem on such a GPU."""
    return not (
        kernel.rules.accepts(variant, problem)
        or kernel.rules.exceeds_residency(variant, problem, sm_count)
    )


def launch(
    name: str,
    trials: Iterable[Any],
    launches: Callable[[Any, Variant], Iterable[Any]],
    tolerance: dict[str, float],
    chosen: Callable[[Variant], bool],
) -> int:
    """The exit status: 1 if an error is over its limit or a binary took no problem, 2 without a GPU.

    trials    the problems, drawn and solved; they are made one after the other
    launches  a trial and a variant -> the cases that the variant may be launched on
    chosen    which of the variants of binaries for exactly this GPU are launched
    """
    import torch

    if not torch.cuda.is_available():
        print(f"error: this runs kernels of {name}, and torch finds no GPU", file=sys.stderr)
        return 2
    from scan_registry.diagnostics.accuracy import run
    from scan_registry.hardware.device import device

    began, gpu, group = time.monotonic(), device(0), family(name)
    binaries = [
        (archive, binary)
        for archive, binary in runnable(group)
        if nearest_tier(archive.arch, gpu) == Tier.EXACT and chosen(binary.variant)
    ]
    counts = dict.fromkeys((str(binary) for _, binary in binaries), 0)
    wrong = 0
    for trial in trials:
        for archive, binary in binaries:
            variant = binary.variant
            kernel = group.kernel(variant.kernel, variant.language)
            for case in launches(trial, variant):
                if not takes(kernel, variant, case.problem, gpu.sm_count):
                    continue
                run(0, binary, partial(archive.read, binary), case)
                counts[str(binary)] += 1
                if not (error := case.error()) <= tolerance[variant.text("dtype")]:
                    wrong += 1
                    print(f"error: {binary} {trial}: {error:.1e}", file=sys.stderr)
    idle = [each for each, count in counts.items() if not count]
    for each in idle:
        print(f"error: {each} took no problem", file=sys.stderr)
    total, seconds = sum(counts.values()), time.monotonic() - began
    print(f"{len(counts)} binaries, {total} launches, {wrong} wrong, {seconds:.0f} s")
    return 1 if wrong or idle or not binaries else 0
