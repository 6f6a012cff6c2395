"""Whatever a wheel leaves out, each of its archives has machine code, or PTX, for every problem."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from planned import jobs_of

from scan_registry.catalog.inventory import catalogue
from scan_registry.dispatch.shipped import holds
from scan_registry.hardware.target import RELEASED, Target
from scan_registry.kernels import families
from scan_registry.kernels.linear_scan import gates_sum
from scan_registry.kernels.linear_scan.problem import STRIDED, LinearScanProblem, Strides
from scan_registry.kernels.linear_scan.spec import DIRECTIONS, FAMILY, LAYOUTS
from scan_registry.kernels.model import ITEM_SIZE, Kernel, Variant

ARCHS = tuple(map(Target.parse, RELEASED))
BROADCAST = ((), (), (), ("time",), ("outer", "batch", "time"), ("batch",), ("channel",))
SMALLEST = 14  # SMs


def padded(layout: str, batch: int, channels: int, time: int, pad: int) -> Strides:
    """Of sequences whose rows along the contiguous dimension have gaps of ``pad`` elements."""
    if layout == "time_last":
        item = time + pad
        return Strides(batch * channels * item, channels * item, item, 1)
    item = channels + pad
    return Strides(batch * time * item, time * item, 1, item)


def problems(count: int) -> Iterator[LinearScanProblem]:
    """Of all sizes, evenly by their logarithms, and with all options."""
    draw = random.Random(20261127)
    for _ in range(count):
        layout, direction = draw.choice(LAYOUTS), draw.choice(DIRECTIONS)
        dtype = draw.choice(list(ITEM_SIZE))
        gates = "float32" if ITEM_SIZE[dtype] == 2 and draw.random() < 0.2 else dtype
        time, channels, batch = (round(2 ** draw.uniform(0, most)) for most in (20, 12, 6))
        if draw.random() < 0.6:
            time, channels = -(-time // 16) * 16, -(-channels // 16) * 16
        outer, pad = draw.choice((1, 1, 1, 2)), draw.choice((0, 0, 0, 3))
        full = padded(layout, batch, channels, time, pad)
        broadcast = draw.choice(BROADCAST) if dtype == gates else ()
        strides = dict.fromkeys(STRIDED[direction], full)
        for name in ("gates", "gates_grad"):
            if name in strides:
                strides[name] = replace(full, **dict.fromkeys(broadcast, 0))
        strides["state"] = Strides(batch * channels, channels, 1, 0)
        summed = direction == "backward" and "time" in broadcast and time > 1
        yield LinearScanProblem(
            direction=direction,
            layout=layout,
            dtype=dtype,
            gates_dtype=gates,
            outer=outer,
            batch=batch,
            channels=channels,
            time=time,
            strides=tuple(strides.values()),
            alignment=draw.choice((16, 16, ITEM_SIZE[dtype])),
            sequences=draw.choice((0, 0, 0, 1, 50)),
            reverse=draw.random() < 0.3,
            sums=summed and draw.random() < 0.5,
        )


#: Many rows of moderate length, each with one gate, which no problem of the others has.
_ROW = Strides(8192, 8192, 2048, 1)
MANY_ROWS = LinearScanProblem(
    *("forward", "time_last", "float32", "float32", 1, 256, 4, 2048),
    strides=(replace(_ROW, batch=0, time=0), _ROW, _ROW, Strides(1024, 4, 1, 0)),
    alignment=16,
)
PROBLEMS = (*problems(400), MANY_ROWS)


def solves(kernel: Kernel, variant: Variant, problem: LinearScanProblem) -> bool:
    refused = kernel.rules.accepts(variant, problem) or kernel.rules.exceeds_residency(
        variant, problem, SMALLEST
    )
    return refused is None


@pytest.mark.parametrize("arch", ARCHS, ids=[arch.label for arch in ARCHS])
def test_every_problem_is_served_in_both_languages(arch: Target) -> None:
    """But for gradients of gates that kernels sum up if they can. Those are served wherever any variant does so, by
    archives whose variants were chosen from times of their own GPUs; by others, at least without the sums."""
    contents: dict[str, list[Variant]] = {}
    for archive, binary in catalogue():
        if archive.arch == arch:
            contents.setdefault(binary.variant.head, []).append(binary.variant)
    if not contents:  # then what a build for it would hold, if nothing of that may be left out
        jobs = jobs_of(arch)
        if any(job.optional for job in jobs):
            pytest.skip(f"no archive for {arch.label} is installed")
        for job in jobs:
            contents.setdefault(job.variant.head, []).append(job.variant)
    for problem in PROBLEMS:
        for kernel in (k for k in FAMILY.kernels if k.name == problem.kernel):
            served = any(solves(kernel, v, problem) for v in contents[kernel.head])
            if problem.sums and not served:
                unsummed = replace(problem, sums=False)
                assert any(solves(kernel, v, unsummed) for v in contents[kernel.head]), unsummed
                serving = (v for v in kernel.every if kernel.rules.serves(v.statics, arch))
                timed = {tuning.capability for tuning in kernel.tunable.tunings()}
                if arch.capability in timed and not arch.is_ptx:
                    assert not any(solves(kernel, v, problem) for v in serving), problem
            else:
                assert served, (kernel.head, problem)


def test_the_problems_are_of_all_kinds() -> None:
    scans = {k.name for k in FAMILY.kernels} - {gates_sum.NAME}
    assert {problem.kernel for problem in PROBLEMS} == scans
    assert sum(problem.sums for problem in PROBLEMS) > 5
    kinds = {
        kernel.tunable.shape(problem).kind.rpartition("=")[2]
        for problem in PROBLEMS
        for kernel in FAMILY.kernels
        if kernel.tunable.shape and kernel.name == problem.kernel and not problem.sums
    }
    few = {"constant_gate", "multi_cta", "resident", "scalar", "short"}
    assert kinds == {"aligned", "generic", "misaligned", "varlen"} | few


@pytest.mark.parametrize("arch", ARCHS, ids=[arch.label for arch in ARCHS])
def test_nothing_is_compiled_twice(arch: Target) -> None:
    jobs = jobs_of(arch)
    assert len({str(job.variant) for job in jobs}) == len(jobs)


def test_what_wheels_hold_is_known_without_a_plan() -> None:
    """``doctor`` and ``explain`` advise wheels by it."""
    for arch, (name, family) in product(ARCHS, families().items()):
        jobs = [job.variant for job in jobs_of(arch) if job.variant.family == name]
        for sample, kernel in product(family.samples, family.kernels):
            problem = sample.problem
            if kernel.name != problem.kernel:
                continue
            contents = any(
                (variant.kernel, variant.language) == (kernel.name, kernel.language)
                and kernel.rules.accepts(variant, problem) is None
                for variant in jobs
            )
            assert holds(arch, family, problem, kernel.language) == contents, (arch, name, sample)
