"""The decision for a call, without the call: what would run, what would not, and why.

Everything here is read from the :class:`Decision` that dispatch itself would act on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from scan_registry.artifact.archive import Binary
from scan_registry.base.package import NAME
from scan_registry.catalog.inventory import Attestation, worst_attestations
from scan_registry.diagnostics.explanation_call import described, heading, place, refuse_device
from scan_registry.diagnostics.explanation_words import called, grouped
from scan_registry.dispatch import policy
from scan_registry.dispatch.alternatives import select_first
from scan_registry.dispatch.fit import Tier, dotted
from scan_registry.dispatch.select import Candidate, Decision, System
from scan_registry.hardware.device import Device
from scan_registry.kernels import ROOT, family
from scan_registry.kernels.model import PLAIN_TORCH, Launch, Problem
from scan_registry.ops.operator import KernelCall, called_by, operators

_LABEL = 11  # columns before the text of a line
_EMPTY = "nothing runs: the tensors are empty"


@dataclass(frozen=True)
class Step:
    """One kernel of a call, such as ``forward``: inputs that are copied before it because of their strides, and the decision."""

    name: str
    copied: tuple[str, ...]
    decision: Decision

    def to_json(self) -> dict[str, Any]:
        return {"step": self.name, "copied": list(self.copied), **decision_record(self.decision)}

    def _copies(self) -> str:
        """What is copied before the kernel; empty if nothing is."""
        return f"{', '.join(self.copied)} first" if self.copied else ""

    def text(self, *, everything: bool = False) -> str:
        """A line for each fact. What was not taken is grouped by reason, unless ``everything``."""
        winner = self.decision.winner
        lines = [f"{self.name}: {f'tier {winner.tier}' if winner else 'nothing runs'}"]
        lines += [f"  {label:{_LABEL}}{text}" for label, text in self._facts()]
        losers = self.decision.rejected
        if losers:
            lines.append("  not taken:")
        if everything:
            lines += [f"    {loser.subject}: {loser.reason}" for loser in losers]
        else:
            lines += [f"    {called(group)}: {reason}" for reason, group in grouped(losers).items()]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def brief(self, most: int) -> list[str]:
        """What wins, how it is launched, why, and what would run in its place, in at most ``most`` lines, 3 or
        more."""
        decision, winner, losers = self.decision, self.decision.winner, self.decision.rejected
        if winner is None:
            # First the candidates that would run if the policy allowed their tier.
            reasons = sorted(
                grouped(losers).items(), key=lambda item: not item[0].startswith("tier ")
            )
            groups = [f"  {called(group)}: {reason}" for reason, group in reasons]
            if len(groups) >= most:
                groups[most - 2 :] = ["  and more reasons: --all"]
            return [f"{self.name}: nothing runs, the call raises NoKernelError", *groups]
        if winner.variant is None:
            lines = [f"{self.name}: {winner.tier}, {self._torch_or_cpu()}"]
        else:
            attestation = _attestations().get(winner.binary.sha256) if winner.binary else None
            tested = "GPU-tested" if attestation and attestation.passed else "not GPU-tested"
            lines = [f"{self.name}: {winner.tier}, {winner.subject}, {tested}"]
            copied = self._copies()
            copies = f"; copies {copied}" if copied else ""
            launch = f"  {'launch':{_LABEL}}{_launch(decision)}{copies}"
            tuning = _tuning(decision, winner)
            lines += (
                [launch, f"  {'tuning':{_LABEL}}{tuning}"]
                if most > 3
                else [f"{launch}; tuning: {tuning}"]
            )
        second = decision.runner_up
        text = (
            f"{second.subject}: {second.reason}" if second else "none: nothing else solves it here"
        )
        if winner.variant is not None or second:
            lines.append(f"  {'runner-up':{_LABEL}}{text}")
        return lines

    def _torch_or_cpu(self) -> str:
        decision, family = self.decision, self.decision.family
        here = not decision.system.device and decision.backend == "auto"
        if here and family.compiled_for_cpu(decision.problem.dtype):
            return "this package's compiled code for the CPU"
        on_gpu = decision.system.device and decision.backend != "reference"
        return family.stand_in if on_gpu or not family.on_cpu else PLAIN_TORCH

    def _facts(self) -> Iterator[tuple[str, str]]:
        decision, winner = self.decision, self.decision.winner
        yield "problem", _problem(decision)
        if winner is None:
            yield "outcome", "the call raises NoKernelError"
        elif winner.variant is None:
            yield "runs", self._torch_or_cpu()
        else:
            yield "variant", str(winner.variant)
            origin = "compiled here, at its first use or taken from the cache"
            if winner.archive:
                origin = f"from {winner.archive.provider}, {winner.archive.path}"
            yield "target", f"{winner.target}, {origin}"
            if winner.binary:
                yield "sha256", winner.binary.sha256
                yield "GPU-tested", _gpu_test(winner.binary)
            yield "launch", _launch(decision)
            yield "copies", self._copies() or "none"
            yield "tuning", _tuning(decision, winner)
        device = decision.system.device
        if device and decision.backend != "reference" and (not winner or winner.tier > Tier.PTX):
            yield "help", "`scan-registry doctor` tells what would lift it to a closer tier"


@dataclass(frozen=True)
class Explanation:
    """What a call would do, step by step; prints as text. ``device`` is None for the CPU. ``problem`` is what the first kernel is
    asked for, None where there is none. The driver is assumed where the device is described without one."""

    operator: str
    device: Device | None
    steps: tuple[Step, ...]
    problem: Problem | None = None
    driver_is_assumed: bool = False
    nothing: str = _EMPTY  # what to say where there is no step

    @property
    def runs(self) -> bool:
        """Whether there is something that solves every step."""
        return all(step.decision.winner for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        return {
            "operator": self.operator,
            "device": device_record(self.device) if self.device else None,
            "steps": [step.to_json() for step in self.steps],
        }

    def text(self, *, everything: bool = False) -> str:
        """As ``str``; with ``everything``, one line for each candidate that was not taken."""
        steps = [step.text(everything=everything) for step in self.steps]
        return "\n\n".join([self._title(), *(steps or [self.nothing])])

    def brief(self) -> str:
        """What wins and why, in at most 12 lines for a call of up to three kernels."""
        most = 4 if len(self.steps) <= 2 else 3
        lines = [line for step in self.steps for line in step.brief(most)]
        return "\n".join([self._title(), *(lines or [self.nothing])])

    def _title(self) -> str:
        where = place(self.device, assumed=self.driver_is_assumed)
        steps = [(step.name, step.decision) for step in self.steps]
        return heading(self.operator, where, self.problem, steps)

    def __str__(self) -> str:
        return self.text()


def explain(operator: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """The decision for ``operator(*args, **kwargs)``, which is not run.

    Args:
        operator: a public operator, a function of ``scan_registry`` that runs kernels; also a function of one kind of
            ``gated_scan``, such as ``min_gru``, or a function of ``scan_registry.jax``.
        args, kwargs: what it would be called with. The tensors' device decides; a derivative counts
            where a tensor requires one.

    Returns:
        An ``Explanation``, with the decision for each kernel of the call: the winner, its launch,
        and everything that lost, with its reason.

    Raises:
        TypeError: not an operator of this package.
        TypeError, ValueError: the call itself would raise it.
        ValueError: the tensors are neither on the CPU nor on a CUDA device.
    """
    from scan_registry.runtime.loader import system

    if f"{NAME}.jax.ffi" in sys.modules:  # as it is where a function for JAX is
        from scan_registry.diagnostics.explanation_of_jax import explained_for_jax

        if (for_jax := explained_for_jax(operator, args, kwargs)) is not None:
            return for_jax
    explained, name = called_by(operator)
    refuse_device(explained, name, kwargs)
    if name != explained.name:
        args, kwargs = explained.call_of(name, args, kwargs)
    calls, device = described(explained, args, kwargs)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the tensors are on {device}; accepted are the CPU and CUDA devices")
    ordinal = device.index if device.type == "cuda" else None
    backend = kwargs.get("backend", "auto")
    lowest = (
        Tier.REFERENCE if ordinal is None else policy.lowest()
    )  # it is GPUs' calls that compile
    return decided(explained.name, calls, system(ordinal), backend, lowest)


def explain_for(there: System, name: str, /, *args: Any, **kwargs: Any) -> Explanation:
    """The same for a system that is described, not present; ``args`` may be tensors on meta.

    ``ValueError`` if there is no operator called ``name``.
    """
    known = operators()
    if name not in known:
        raise ValueError(f"no operator {name!r}; accepted are {', '.join(known)}")
    backend, accepted = kwargs.pop("backend", "auto"), known[name].backends
    if not isinstance(backend, str) or backend not in accepted:
        raise ValueError(f"backend is {backend!r}; accepted are {', '.join(accepted)}")
    if there.device is None:
        kwargs["backend"] = backend  # on a GPU any will do, whatever the tensors are on
    calls, _ = described(known[name], args, kwargs)
    if there.device is not None:
        gpu, of = there.device, known[name]
        calls = {step: of.on_gpu(call, gpu) for step, call in calls.items()}
    lowest = Tier.REFERENCE if there.device is None else policy.lowest()
    return decided(name, calls, there, backend, lowest)


def decided(
    name: str, calls: Mapping[str, KernelCall], there: System, backend: str, lowest: Tier
) -> Explanation:
    """The decisions for the kernel calls of one operator's call. Only kernels need copies; the reference does not. Where torch's
    operators and another family's kernel stand in for a kernel, the step of that kernel follows the kernel's own. Only the
    former is there with backend "triton", as no family that has stand-ins is in Triton."""
    steps: list[Step] = []
    operator = operators()[name]
    problem = next((call.alternatives(backend)[0][0] for call in calls.values()), None)
    is_fused = False
    for step, call in calls.items():
        if call.after_fused not in (None, is_fused):
            continue
        of = family(operator.family_of(call))
        posed = call.alternatives(backend)
        # After a fused kernel, torch does the rest where there is none.
        if ready := _ready(call, posed, there):
            decision = select_first(there, of, ready, min(lowest, Tier.PTX))
            if decision.launches:
                is_fused = True
                steps.append(Step(step, (), decision))
            if decision.launches or call.after_fused:
                continue
        decision = select_first(there, of, posed, lowest)
        stand_in = operator.stand_in(call)
        if stand_in is None or backend != "triton":
            steps.append(_step(step, call, decision))
        composed = backend == "auto" and decision.winner and not decision.launches and there.device
        if stand_in is not None and (composed or backend == "triton"):
            other, inner = stand_in
            decision = select_first(there, family(other), inner.alternatives(backend), lowest)
            steps.append(_step(f"{step}, {other}", inner, decision))
    return Explanation(name, there.device, tuple(steps), problem)


def _ready(
    call: KernelCall, posed: tuple[tuple[Any, Any], ...], there: System
) -> tuple[tuple[Any, Any], ...]:
    """What is posed to kernels that need not be compiled; nothing if they are not asked."""
    if call.after_fused:
        return posed
    fused = call.fused() if there.device else None
    return () if fused is None else ((fused, posed[0][1]),)


def _step(name: str, call: KernelCall, decision: Decision) -> Step:
    return Step(name, call.copied if decision.launch() else (), decision)


# --- JSON -------------------------------------------------------------------------------------


def decision_record(decision: Decision) -> dict[str, Any]:
    """A decision as JSON, with everything that ``str`` says of it."""
    winner, launch = decision.winner, decision.launch()
    binary, archive = (winner.binary, winner.archive) if winner else (None, None)
    kernel = winner if winner and winner.variant else None
    return {
        "kernel": decision.problem.kernel,
        "problem": str(decision.problem),
        "backend": decision.backend,
        "lowest_tier": str(decision.lowest),
        "tier": str(winner.tier) if winner else None,
        "variant": str(kernel.variant) if kernel else None,
        "target": str(winner.target) if winner and winner.target else None,
        "sha256": binary.sha256 if binary else None,
        "archive": str(archive.path) if archive else None,
        "provider": archive.provider if archive else None,
        **_attestation_record(binary),
        "cost": kernel.cost if kernel else None,
        "tuning": _tuning_record(decision),
        "launch": _launch_record(launch, binary) if launch else None,
        "rejected": [asdict(loser) for loser in decision.rejected],
    }


def _attestation_record(binary: Binary | None) -> dict[str, Any]:
    if binary is None:
        return {"gpu_tested": None, "attestation": None}
    attestation = _attestations().get(binary.sha256)
    passed = bool(attestation and attestation.passed)
    return {"gpu_tested": passed, "attestation": attestation and asdict(attestation)}


def _launch_record(launch: Launch, binary: Binary | None) -> dict[str, Any]:
    """What is known once the kernel is compiled is null before."""
    return {
        "grid": list(launch.grid),
        "block": list(binary.block) if binary else None,
        "static_shared": binary.static_shared if binary else None,
        "dynamic_shared": binary.dynamic_shared if binary else None,
        "workspace": launch.workspace,
        "scalars": dict(launch.scalars),
    }


def _tuning_record(decision: Decision) -> dict[str, Any] | None:
    """The row that the winner goes by; ``ms`` and ``counted`` are null where the row does not name it."""
    winner, device = decision.winner, decision.system.device
    if winner is None or winner.tuned is None or device is None:
        return None
    tuned = winner.tuned
    return {
        **asdict(tuned.origin),
        "own_arch": tuned.tuning.arch == device.arch,
        "sizes": dict(tuned.row.sizes),
        "distance": tuned.distance,
        "ms": _there(decision, winner),
        "counted": winner.ms,
        "times": dict(tuned.row.times),
        "rule": winner.rule,
    }


def device_record(device: Device) -> dict[str, Any]:
    """A GPU as JSON."""
    return {
        "name": device.name,
        "arch": device.arch,
        "sm_count": device.sm_count,
        "shared_memory_per_block": device.shared_memory_per_block,
        "registers_per_block": device.registers_per_block,
        "threads_per_block": device.threads_per_block,
        "driver": dotted(device.driver),
    }


# --- Words ------------------------------------------------------------------------------------


@cache
def _attestations() -> Mapping[str, Attestation]:
    """By digest. They come with this package, whatever archives there are to ask about."""
    return worst_attestations(ROOT)


def _problem(decision: Decision) -> str:
    """The kernel and the plain facts of the problem; JSON has the strides, too."""
    plain = {k: v for k, v in vars(decision.problem).items() if isinstance(v, str | int)}
    facts = ", ".join(f"{name} {value}" for name, value in plain.items())
    return f"{decision.problem.kernel}: {facts}"


def _tuning(decision: Decision, winner: Candidate) -> str:
    """The row of the nearest tuned problem, and where it comes from; or what decided without one."""
    estimate = f"the spec's estimate decided ({winner.cost:g}, smaller is better)"
    tuned, device = winner.tuned, decision.system.device
    if tuned is None or device is None:
        return f"no row for problems of this kind; {estimate}"
    sizes = ", ".join(f"{name} {size:g}" for name, size in tuned.row.sizes.items() if size != 1)
    origin = str(tuned.origin)
    if tuned.tuning.arch != device.arch:
        origin += f"; another architecture's, as there is none for {device.arch}"
    there = _there(decision, winner)
    if winner.rule == "timing_model":
        estimate = f"{winner.ms:.4g} ms by the timing model that is fitted to the tuning tables"
        return f"{estimate}; the nearest row, of {sizes or 'size 1'} ({origin}), is too far away"
    if there is None:
        outcome = f"which names nothing that runs here: {estimate}"
    elif there == winner.ms:
        outcome = f"{there:g} ms there"
    else:
        outcome = f"{there:g} ms there, counted as {winner.ms:.4g} for these sizes"
    return f"the row of {sizes or 'size 1'} ({origin}), {outcome}"


def _there(decision: Decision, winner: Candidate) -> float | None:
    """The winner's time on the tuned problem, if the row names it."""
    if winner.tuned is None or winner.variant is None:
        return None
    kernel = decision.family.kernel(winner.variant.kernel, winner.variant.language)
    return winner.tuned.row.times.get(kernel.label(winner.variant))


def _gpu_test(binary: Binary) -> str:
    attestation = _attestations().get(binary.sha256)
    if attestation is None:
        return "no; no GPU has been seen to run these bytes"
    words = "yes" if attestation.passed else "no, it failed"
    return (
        f"{words}; error {attestation.error:.1e}, tolerance {attestation.tolerance:.1e}, "
        f"on {attestation.gpu}, {attestation.date}"
    )


def _launch(decision: Decision) -> str:
    launch, winner = decision.launch(), decision.winner
    assert launch is not None
    assert winner is not None
    parts = [f"grid {_extent(launch.grid)}"]
    if winner.binary:
        static, dynamic = winner.binary.static_shared, winner.binary.dynamic_shared
        parts += [
            f"block {_extent(winner.binary.block)}",
            f"shared memory {'?' if static is None else static} static + {dynamic} dynamic bytes per block",
        ]
    else:
        parts.append("block and shared memory known once it is compiled")
    return ", ".join([*parts, f"workspace {launch.workspace} bytes"])


def _extent(extent: Iterable[int]) -> str:
    return " × ".join(map(str, extent))
