"""From a problem to a plan that can be launched: select, fetch the bytes, check them, hand them to the driver.

A binary that selection accepts may still fail: its archive is damaged, the driver rejects it, a compile
fails. The failure is recorded for that device, and selection runs again without that candidate. Errors that
are not the binary's fault, such as running out of memory, are raised.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from scan_registry.artifact.archive import ArchiveError, Binary
from scan_registry.base.frozen import dataclass
from scan_registry.cache import tuned
from scan_registry.cache.store import jit_cache
from scan_registry.catalog.inventory import catalogue
from scan_registry.dispatch.fit import Tier, misfit, nearest_tier
from scan_registry.dispatch.policy import FallbackWarning
from scan_registry.dispatch.select import (
    Backend,
    Candidate,
    Decision,
    Key,
    NoKernelError,
    System,
    advice,
    remedies,
    select,
)
from scan_registry.hardware import driver
from scan_registry.hardware._launcher import Launch
from scan_registry.hardware.device import device
from scan_registry.hardware.target import Target
from scan_registry.kernels import family as family_of
from scan_registry.kernels.model import Family, Kernel, Problem, Variant
from scan_registry.kernels.model import Launch as LaunchShape
from scan_registry.runtime import call_log, jit


class UnfitError(Exception):
    """What fitted on paper does not run here; the message is the reason."""


@dataclass(frozen=True)
class Plan:
    """How a problem is solved on device ``ordinal``: a decision, ready to run. ``launch`` is None if the reference in
    torch runs, or if the binary is not loaded yet.

    ``launch.run`` takes the stream and the kernel's pointers in the order of its parameters;
    ``workspace`` bytes are to be allocated for each run. ``str()`` gives the description that error messages
    use: the kernel, its variant, the launch shape and the problem.
    """

    decision: Decision
    ordinal: int | None = None
    binary: Binary | None = None
    launch: Launch | None = None
    workspace: int = 0

    @cached_property
    def run(self) -> Callable[[Mapping[str, Any]], None]:
        """A function that launches the kernel on the current stream. It takes tensors by the names of the kernel's
        pointers; a pointer whose tensor is missing is null."""
        import torch

        launch, workspace, ordinal = self.launch, self.workspace, self.ordinal
        assert launch is not None
        assert ordinal is not None
        variant = self.decision.taken().variant
        assert variant is not None
        names = self.decision.family.kernel(variant.kernel, variant.language).pointers
        place = names.index("workspace") if workspace else -1
        start, stream = launch.run, torch._C._cuda_getCurrentRawStream
        device = torch.device("cuda", ordinal)

        def run(tensors: Mapping[str, Any]) -> None:
            find = tensors.get
            pointers = [None if (t := find(name)) is None else t.data_ptr() for name in names]
            if workspace:
                # It is freed on return, but torch gives it only to work that runs later on this stream.
                scratch = torch.empty(workspace, dtype=torch.uint8, device=device)
                pointers[place] = scratch.data_ptr()
            if status := start(stream(ordinal), *pointers):
                self.refuse(status)

        return run

    def __str__(self) -> str:
        shape, binary = self.decision.launch(), self.binary
        if shape is None or binary is None:
            return f"the reference, for {self.decision.problem}"
        return (
            f"{binary}, grid {shape.grid}, block {binary.block}, {binary.dynamic_shared} bytes of "
            f"dynamic shared memory, for {self.decision.problem}"
        )

    def refuse(self, status: int) -> None:
        """Raise the ``DriverError`` of a launch that failed."""
        raise driver.DriverError("the launch", status, self)


_functions: dict[tuple[int, str, str], int] = {}
#: Why binaries do not run on a device, and why they do not solve one problem on it.
_failed: dict[int, dict[Key, str]] = {}
_failed_problems: dict[tuple[int, Problem], dict[Key, str]] = {}
_warned: set[object] = set()
_lock = threading.RLock()


def _forget() -> None:
    """Start anew in a forked child, which has neither its parent's context nor the thread that may hold the lock."""
    global _lock  # noqa: PLW0603
    _lock = threading.RLock()
    _functions.clear()


os.register_at_fork(after_in_child=_forget)


def system(
    ordinal: int | None,
    reach: Tier = Tier.JIT,
    pinned: Variant | None = None,
    problem: Problem | None = None,
) -> System:
    """What there is to choose from on device ``ordinal``, or on the CPU; with ``problem``, without what failed to launch on it.

    ``reach`` leaves out archives and compilers whose binaries could only be on a worse tier. ``pinned`` is the one
    variant that may run, which need not be in any wheel.
    """
    if ordinal is None:
        return System(None)
    installed, there = catalogue(), device(ordinal)
    of_problem = {} if problem is None else _failed_problems.get((ordinal, problem), {})
    return System(
        device=there,
        archives=tuple(a for a in installed.archives if nearest_tier(a.arch, there) <= reach),
        toolchains=jit.toolchains() if reach >= Tier.JIT else None,
        denied=installed.denied,
        failed=_failed.get(ordinal, {}) | of_problem,
        tuned=tuned.archive_of(there),
        pinned=pinned,
    )


def decide(
    ordinal: int | None, family: Family, problem: Problem, backend: Backend, lowest: Tier, pinned: Variant | None = None
) -> Decision:  # fmt: skip
    """The decision for a problem. It looks at archives of the best tier first, and at others only if those have no winner. So
    usually one archive is read.
    """
    for reach in (Tier.EXACT, Tier.PTX):
        there = system(ordinal, reach, pinned, problem)
        if there.every_archive:
            decision = select(there, family, problem, backend, lowest)
            if decision.winner and decision.winner.tier <= reach:
                return decision
    there = system(ordinal, pinned=pinned, problem=problem)
    return select(there, family, problem, backend, lowest)


def prepare(
    ordinal: int | None, family: Family, problem: Problem, backend: Backend, lowest: Tier, pinned: Variant | None = None
) -> Plan:  # fmt: skip
    """The plan of the best candidate that loads here; with ``pinned``, of that variant.

    ``NoKernelError`` if the policy or ``backend`` leaves none, ``DriverError`` if the driver fails
    for a reason that is not the binary's.
    """
    with _lock:
        for file in catalogue().ignored if ordinal is not None else ():
            _tell(file, file)
        while True:
            decision = decide(ordinal, family, problem, backend, lowest, pinned)
            for loser in decision.damaged:
                _tell(loser.reason, f"{loser.subject} is not used: {loser.reason}")
            winner = decision.taken()
            if ordinal is None or winner.variant is None:
                _log(decision)
                return Plan(decision, ordinal)
            try:
                binary, function = _load_winner(ordinal, decision, winner)
            except UnfitError as error:
                _failed.setdefault(ordinal, {})[winner.key] = str(error)
                continue
            try:
                plan = _plan(ordinal, decision, binary, function)
                _log(decision)
                return plan
            except (OverflowError, ValueError) as error:  # no launch can have these numbers
                _failed_problems.setdefault((ordinal, problem), {})[winner.key] = str(error)


def _log(decision: Decision) -> None:
    if call_log.ON:
        call_log.tell_decision(decision)


def prepare_first(
    ordinal: int, family: Family, alternatives: Sequence[tuple[Problem, Backend]], lowest: Tier
) -> Plan:
    """The plan for the first of ``alternatives`` that a kernel solves here; solving any one of them is enough.

    If no kernel solves any, the plan of the first for which the reference may run; else ``NoKernelError``.
    """
    left: list[Plan] = []
    refused: list[NoKernelError] = []
    for problem, backend in alternatives:
        try:
            plan = prepare(ordinal, family, problem, backend, lowest)
        except NoKernelError as error:
            refused.append(error)
            continue
        if plan.launch is not None:
            return plan
        left.append(plan)
    if not left:
        raise refused[0]
    return left[0]


def _load_winner(ordinal: int, decision: Decision, winner: Candidate) -> tuple[Binary, int]:
    binary, read = _fetch(ordinal, decision, winner)
    return binary, load(ordinal, binary, read, Plan(decision, ordinal, binary))


def _plan(ordinal: int, decision: Decision, binary: Binary, function: int) -> Plan:
    """``OverflowError`` or ``ValueError`` if what the binary's entry or the launch states cannot be."""
    kernel = decision.family.kernel(binary.variant.kernel, binary.variant.language)
    shape = decision.launch()
    assert shape is not None
    launch = _bind(ordinal, kernel, binary, function, shape)
    return Plan(decision, ordinal, binary, launch, shape.workspace)


def _fetch(
    ordinal: int, decision: Decision, winner: Candidate
) -> tuple[Binary, Callable[[], bytes]]:
    """The winner's binary, compiled if need be, and how to get its bytes."""
    if winner.archive is not None and winner.binary is not None:
        archive, binary = winner.archive, winner.binary
        return binary, lambda: archive.read(binary)
    assert winner.variant is not None
    assert winner.target is not None
    try:
        compiled = jit.compile(winner.variant, winner.target)
    except jit.CompileError as error:
        raise UnfitError(str(error)) from error
    binary = compiled.binary
    reason = catalogue().denied.get(binary.sha256) or misfit(binary, device(ordinal))
    if reason:
        raise UnfitError(reason)
    if decision.system.pinned is None:  # who pins a variant expects it to be compiled
        _tell_compiled(decision, winner.variant, compiled)
    return binary, lambda: compiled.content


def load(ordinal: int, binary: Binary, read: Callable[[], bytes], subject: object) -> int:
    """The loaded kernel's handle on device ``ordinal``; each binary is loaded once per device.

    ``subject`` describes the kernel in error messages. ``UnfitError`` if the bytes are damaged or the driver rejects
    them, ``DriverError`` for any other failure of the driver.
    """
    key = (ordinal, binary.sha256, binary.entry)
    with _lock:
        if key not in _functions:
            try:
                image = read()
                context = driver.primary_context(ordinal)
                _functions[key] = driver.load(
                    context, image, binary.entry, binary.dynamic_shared, subject
                )
            except ArchiveError as error:
                _tell(str(error), str(error))
                raise UnfitError(str(error)) from error
            except driver.DriverError as error:
                if error.status in driver.UNFIT:
                    raise UnfitError(str(error)) from error
                raise
        return _functions[key]


def bind(ordinal: int, family: Family, problem: Problem, binary: Binary, function: int) -> Launch:
    """A launch of a loaded function on a problem."""
    kernel = family.kernel(binary.variant.kernel, binary.variant.language)
    shape = kernel.launch(binary.variant, problem, device(ordinal).sm_count)
    return _bind(ordinal, kernel, binary, function, shape)


def _bind(
    ordinal: int, kernel: Kernel, binary: Binary, function: int, shape: LaunchShape
) -> Launch:
    return Launch(
        context=driver.primary_context(ordinal),
        function=function,
        grid=shape.grid,
        block=binary.block,
        shared=binary.dynamic_shared,
        pointers=len(kernel.pointers),
        scalars=tuple(shape.scalars[p.name] for p in kernel.parameters if p.kind == "i64"),
        hidden=binary.hidden,
        workspace=kernel.pointers.index("workspace") if shape.workspace else -1,
        workspace_bytes=shape.workspace if shape.zeroed else 0,
    )


def launch_again(
    ordinal: int, variant: Variant, target: Target, sha256: str, shape: LaunchShape
) -> Launch:
    """A launch that was planned before, maybe by another process or for another GPU, of the binary with this digest.

    ``UnfitError`` if there is no such binary here any more, or if it does not run on this GPU.
    """
    with _lock:
        binary, read = _of_digest(variant, target, sha256)
        if reason := catalogue().denied.get(sha256) or misfit(binary, device(ordinal)):
            raise UnfitError(f"{binary} does not run on {device(ordinal).name}: {reason}")
        function = load(ordinal, binary, read, binary)
        kernel = family_of(variant.family).kernel(variant.kernel, variant.language)
        return _bind(ordinal, kernel, binary, function, shape)


def _of_digest(variant: Variant, target: Target, sha256: str) -> tuple[Binary, Callable[[], bytes]]:
    """A binary that is installed or, if none is, compiled here; and how to get its bytes."""
    for archive in catalogue().archives:
        if archive.arch.capability != target.capability:
            continue
        for entry in archive.of(variant.family, variant.kernel, variant.language):
            if entry.text == str(variant) and entry.binary.sha256 == sha256:
                return entry.binary, partial(archive.read, entry.binary)
    try:
        compiled = jit.compile(variant, target)
    except jit.CompileError as error:
        raise UnfitError(f"{variant} for {target} is no longer installed: {error}") from error
    if compiled.binary.sha256 != sha256:
        raise UnfitError(
            f"{variant} for {target} with digest {sha256} is no longer installed; compile the program again that was "
            "compiled for it"
        )
    return compiled.binary, lambda: compiled.content


# --- Words ------------------------------------------------------------------------------------


def _tell(key: object, text: str) -> None:
    """Warn, once per process and key."""
    if key not in _warned:
        _warned.add(key)
        warnings.warn(text, FallbackWarning, stacklevel=2)


def _tell_compiled(decision: Decision, variant: Variant, compiled: jit.Compiled) -> None:
    there = decision.system.device
    assert there is not None
    ship = "ship what `scan-registry cache export` makes"
    how = "taken from the cache" if compiled.cached else f"compiled by {compiled.binary.compiler}"
    _tell(
        (variant.family, variant.kernel, variant.language, Tier.JIT),
        f"{variant.family}.{variant.kernel} runs on tier jit on {there.name} ({there.arch}), as "
        f"nothing that is installed fits: {variant} was {how} in {compiled.milliseconds:.0f} ms, "
        f"folder {jit_cache().folder}. To avoid it, {', or '.join([*remedies(decision), ship])}",
    )


def run_reference(decision: Decision, reference: Callable[..., Any], *arguments: Any) -> Any:
    """Run the reference on a GPU; the first time for a kernel, measure it and warn."""
    import torch

    run = partial(reference, *arguments)
    there = decision.system.device
    key = decision.family.name, decision.problem.kernel, Tier.REFERENCE
    if there is None or decision.backend == "reference" or key in _warned:
        return run()
    if torch.cuda.is_current_stream_capturing():
        return run()
    torch.cuda.synchronize()
    started = time.perf_counter()
    result = run()
    torch.cuda.synchronize()
    _tell(
        key,
        f"{decision.family.name}.{decision.problem.kernel} runs on tier reference on {there.name} "
        f"({there.arch}), which is {decision.family.stand_in}: this call took "
        f"{1e3 * (time.perf_counter() - started):.0f} ms. {advice(decision)}; "
        "`scan-registry doctor` tells more",
    )
    return result
