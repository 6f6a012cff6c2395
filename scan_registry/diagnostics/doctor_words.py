"""The words of doctor's findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from scan_registry.dispatch.fit import Tier, Toolchain, dotted, jit_driver
from scan_registry.dispatch.select import Backend
from scan_registry.hardware.device import Device, driver_text
from scan_registry.hardware.target import COMPILERS, OLDEST, RELEASED, Target

if TYPE_CHECKING:
    from scan_registry.diagnostics.doctor_report import Answer


def outcome(device: Device, backend: Backend, tier: Tier | None) -> str:
    """What happens to calls that get this tier, or no tier (None)."""
    if device.capability < OLDEST and tier is Tier.REFERENCE:
        return (
            f"too old: its compute capability is {dotted(device.capability)}, and the kernels need "
            f"{dotted(OLDEST)} or later; falls to plain torch (reference)"
        )
    if tier is None:
        pinned = "" if backend == "auto" else f' with backend="{backend}"'
        return f"nothing runs{pinned}, the call raises NoKernelError"
    return {
        Tier.PTX: "compiled from PTX by the driver, at its first use",
        Tier.JIT: "compiled here, at its first use",
        Tier.REFERENCE: "falls to plain torch (reference)",
    }[tier]


def wheel_for(target: Target, device: Device) -> str:
    """How to come by a wheel for the architecture; with the driver that it needs, if the device's is too old."""
    text = f"`pip install scan-registry-{target.label}`"
    if target.label not in RELEASED:
        text = f"build a wheel for {target.label}: `pip wheel . -C archs={target.label}`"
    needed = jit_driver(Toolchain("of wheels", COMPILERS), target)
    return text if needed <= device.driver else f"{text}, and {driver_text(needed)}"


def listed(some: Iterable[Answer], every: Iterable[Answer]) -> str:
    """The kernels of ``some`` in one phrase. A kernel has its dtypes and accesses beside it if
    ``some`` has not all of them."""
    meant, there = _by_kernel(some), _by_kernel(every)
    if meant == there:
        return "every kernel"
    phrases = []
    for kernel, pairs in meant.items():
        which = condensed(pairs, there[kernel])
        phrases.append(f"{kernel} ({which})" if which else kernel)
    return ", ".join(phrases)


def _by_kernel(answers: Iterable[Answer]) -> dict[str, list[tuple[str, str]]]:
    by_kernel: dict[str, list[tuple[str, str]]] = {}
    for a in answers:
        by_kernel.setdefault(f"{a.family}.{a.kernel}", []).append(a.pair)
    return by_kernel


def condensed(some: Iterable[tuple[str, str]], every: Iterable[tuple[str, str]]) -> str:
    """Pairs of dtype and access, or dtype and size, in few words; an empty string if ``some`` has every pair."""
    meant, there = dict.fromkeys(some), dict.fromkeys(every)
    if meant.keys() == there.keys():
        return ""
    pick: Callable[[tuple[str, str]], str]
    for pick in (lambda pair: pair[1], lambda pair: pair[0]):
        words = dict.fromkeys(map(pick, meant))
        if meant.keys() == {pair for pair in there if pick(pair) in words}:
            return ", ".join(words)
    return ", ".join(" ".join(pair) for pair in meant)
