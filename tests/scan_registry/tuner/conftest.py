"""A tuner on the CPU: everything is real but the binaries, their launches and the times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from scan_registry.artifact.archive import Binary
from scan_registry.bench import timing
from scan_registry.dispatch.fit import Toolchain
from scan_registry.dispatch.select import System
from scan_registry.hardware.device import Device
from scan_registry.kernels.linear_scan.op import plans
from scan_registry.kernels.model import Variant
from scan_registry.kernels.tables import Run
from scan_registry.tuner import engine
from scan_registry.tuner.engine import Tuner

CPU = torch.device("cpu")
RUN = Run("Imaginary", "580.1", {"sm": 1980}, {"cuda": "nvrtc 12.9.86"}, "9.9.9", "2026-01-31")


@dataclass
class Workshop:
    """Plays the GPU of a tuner. ``ms`` gives a variant's time; what is in ``wrong`` computes nonsense,
    what is in ``unfit`` does not load, and what is in ``missing`` does not compile."""

    device: Device
    make: Callable[..., tuple[Binary, bytes]]
    ms: Callable[[Variant], float] = lambda variant: 1.0
    wrong: set[Variant] = field(default_factory=set)
    unfit: set[Variant] = field(default_factory=set)
    missing: set[Variant] = field(default_factory=set)
    rounds: list[tuple[int, int]] = field(default_factory=list)
    started: list[Variant] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def tuner(self, **options: Any) -> Tuner:
        return Tuner(0, self.device, (), RUN, tell=self.messages.append, **options)

    def obtain_all(self, device: Any, archives: Any, variants: Any) -> Mapping[Variant, Any]:
        return {v: "no such luck" if v in self.missing else self.make(v, "sm90") for v in variants}

    def load(self, ordinal: int, binary: Binary, read: Any, subject: object) -> Variant:
        if binary.variant in self.unfit:
            raise engine.loader.UnfitError("the driver has no use for it")
        assert read() == self.make(binary.variant, "sm90")[1]
        return binary.variant

    def bind(self, ordinal: int, family: Any, problem: Any, binary: Binary, function: Any) -> Any:
        assert function == binary.variant
        return function, problem

    def start(self, ordinal: int, launch: Any, kernel: Any, case: Any, workspace: int) -> None:
        variant, problem = launch
        self.started.append(variant)
        run = plans.runner(replace(problem, sums=False), CPU, "auto")
        assert callable(run)
        if problem.sums:  # which no kernel of the CPU does
            terms = torch.empty_like(case.tensors["tokens_grad"])
            run({**case.tensors, "gates_grad": terms})
            case.tensors["gates_grad"].zero_()[0] = terms.sum(1).flatten()
        else:
            run(case.tensors)
        if variant in self.wrong:
            out = case.tensors["tokens_grad" if "tokens_grad" in case.tensors else "states"]
            out.view(-1)[-1] += 1000

    def record(self, calls: Sequence[Any], device: Any, enough: float) -> Any:
        assert 0 < enough < timing.ENOUGH_MS
        calls[-1]()
        workshop, variant = self, self.started[-1]

        class Recording:
            def ms(self) -> float:
                return workshop.ms(variant)

        return Recording()

    def once(self, call: Any, device: Any) -> float:
        call()
        return self.ms(self.started[-1])

    def compete(self, recordings: Sequence[Any], warm_up: int, rounds: int) -> Any:
        self.rounds.append((len(recordings), rounds))
        return timing.compete(recordings, warm_up, rounds)


@pytest.fixture
def workshop(
    monkeypatch: pytest.MonkeyPatch,
    a_device: Callable[..., Device],
    a_binary: Callable[..., tuple[Binary, bytes]],
) -> Workshop:
    created = Workshop(a_device(), a_binary)
    toolchains = {
        "cuda": Toolchain("nvrtc 12.9.86", (12, 9)),
        "triton": Toolchain("t 3.6", (12, 9)),
    }
    monkeypatch.setattr(Tuner, "place", CPU)
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 1 << 10)
    monkeypatch.setattr(engine, "obtain_all", created.obtain_all)
    monkeypatch.setattr(engine.loader, "load", created.load)
    monkeypatch.setattr(engine.loader, "bind", created.bind)
    monkeypatch.setattr(
        engine.loader, "system", lambda n: System(created.device, toolchains=toolchains)
    )
    monkeypatch.setattr(engine.accuracy, "start", created.start)
    monkeypatch.setattr(engine, "record", created.record)
    monkeypatch.setattr(engine, "once", created.once)
    monkeypatch.setattr(engine, "compete", created.compete)
    return created
