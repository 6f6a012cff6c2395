"""``gated_scan`` on what stands for its kernels on the CPU: what the operator passes is what they take."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from covering import each_pair
from gated_kernels import (
    OPTIONS,
    TOLERANCE,
    WAYS,
    close,
    drawn,
    played,
    results,
)
from planning import forget_plans
from posing import best
from torch import Tensor

from scan_registry import gated_scan, min_gru
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.gated_scan.op import plans
from scan_registry.kernels.gated_scan.problem import GatedScanProblem
from scan_registry.kernels.gated_scan.spec import FAMILY
from scan_registry.kernels.linear_scan.op import autograd as derivatives
from scan_registry.ops.launching import PlanCache, Run

ROUTES = ["fast", "general"]


@pytest.fixture(params=ROUTES)
def used(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[GatedScanProblem]:
    return played(monkeypatch, request.param == "fast")


@pytest.mark.parametrize(
    ("kind", "name", "dtype", "used"),
    each_pair(KINDS, OPTIONS, TOLERANCE, ROUTES),
    ids=str,
    indirect=["used"],
)
def test_matches_the_composition(
    used: list[GatedScanProblem], kind: str, name: str, dtype: torch.dtype
) -> None:
    """Results and gradients, of tensors of any layout, all of one or not: each kind in every layout with some options."""
    how = OPTIONS[name]
    tensors = drawn(kind, dtype, packed="cu_seqlens" in how)
    expected = results(kind, tensors, lambda _: "rows", True, **how)
    assert not used
    first = [*KINDS].index(kind) + [*OPTIONS].index(name)
    turns = [(first + turn) % len(WAYS) for turn in (0, 1)] if dtype == torch.float32 else []
    ways: list[Any] = [lambda _, turn=turn: WAYS[turn] for turn in turns]
    ways += [lambda n, s=shift: WAYS[(n + s) % len(WAYS)] for shift in (*turns, len(WAYS) - 1)]
    for way in ways:
        used.clear()
        close(results(kind, tensors, way, False, **how), expected, dtype)
        by_linear_scan = kind == "linear" and "reset" not in how
        assert [p.direction for p in used] == ["forward", "backward"] * (not by_linear_scan)


@pytest.mark.parametrize("way", ["rows", "channels", "gaps", "channels with gaps"])
@pytest.mark.parametrize("kind", ["rg_lru", "min_gru_identity"])
def test_emulated_kernels_match_the_composition(
    monkeypatch: pytest.MonkeyPatch, cuda_emulator: ModuleType, tmp_path: Path, kind: str, way: str
) -> None:
    """The CUDA kernels themselves, of the family's own choice."""
    used: list[str] = []

    def prepared(problem: Any, device: torch.device, backend: Any) -> tuple[Run, int]:
        kernel = FAMILY.kernel(problem.kernel, "cuda")
        variant = best(kernel, problem)
        library = cuda_emulator.emulated(kernel, variant, tmp_path)

        def run(tensors: Mapping[str, Tensor | None]) -> None:
            assert set(tensors) <= set(kernel.pointers)
            used.append(f"{problem.direction} {variant.text('access')}")
            library.run(problem, tensors, 0)

        launch = kernel.launch(variant, problem, cuda_emulator.SM_COUNT)
        return run, launch.scalars.get("parts", 0)

    how = OPTIONS["resets"]
    tensors = drawn(kind, torch.float32)
    expected = results(kind, tensors, lambda _: "rows", True, **how)
    monkeypatch.setattr(plans, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(plans, "_prepared", prepared)
    monkeypatch.setattr(plans, "plan_cache", PlanCache())
    forget_plans(monkeypatch, "gated_scan")
    close(results(kind, tensors, lambda _: way, False, **how), expected, torch.float32)
    access = "generic" if way == "gaps" else "aligned"
    assert used == [f"forward {access}", f"backward {access}"]


def test_channels_and_time_turned(used: list[GatedScanProblem]) -> None:
    """(batch, time, channels) with ``dim=1`` is the same problem as its transposed view."""
    tensors = drawn("rg_lru", torch.float32)
    views = [t.transpose(1, 2) if t.dim() == 3 else t for t in tensors[:-1]]
    for dim, given in ((1, [v.contiguous() for v in views]), (-1, tensors[:-1])):
        out = gated_scan("rg_lru", *given, initial_state=tensors[-1], dim=dim)
        wide = [t.double() for t in given]
        assert out.stride() == given[0].stride()
        expected = gated_scan("rg_lru", *wide, initial_state=tensors[-1].double(), dim=dim)
        assert relative_error(out, expected) <= 2e-6
    assert [p.layout for p in used] == ["channel_last", "time_last"]
    channels_first = [v.contiguous().transpose(1, 2) for v in views[:-1]]
    gated_scan("rg_lru", *channels_first, views[-1], initial_state=tensors[-1])
    assert used[2] == used[0]


def test_inputs_of_one_projection_are_not_copied(used: list[GatedScanProblem]) -> None:
    both = torch.randn(2, 40, 16)
    gate, hidden = both.chunk(2, -1)
    out = min_gru(gate, hidden, dim=1)
    assert relative_error(out, min_gru(gate.double(), hidden.double(), dim=1)) <= 2e-6
    call = plans.make_call(
        "forward", plans.Arguments((gate, hidden)), plans.Options("min_gru", -2), 0
    )
    assert call.copied == ()
    assert used[0].strides_of("inputs").time == 16
    assert used[0].strides_of("states").time == 8


def test_only_what_is_wanted_is_written(
    used: list[GatedScanProblem], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []
    prepared = plans._prepared

    def watched(problem: Any, *args: Any) -> Any:
        run, parts = prepared(problem, *args)  # type: ignore[misc]

        def watch(tensors: Mapping[str, Any]) -> None:
            seen.append({n for n, t in tensors.items() if t is not None and n.endswith("_grad")})
            run(tensors)

        return watch, parts

    monkeypatch.setattr(plans, "_prepared", watched)
    tensors = drawn("rg_lru", torch.float32)
    names = ["input0_grad", "input1_grad", "input2_grad", "parameters_grad", "initial_state_grad"]
    for place, name in enumerate(names):
        *inputs, initial = given = [*tensors]
        given[place] = given[place].clone().requires_grad_()
        *inputs, initial = given
        out = gated_scan("rg_lru", *inputs, initial_state=initial)
        (found,) = torch.autograd.grad(out.sum(), given[place])
        assert seen.pop() == {name, "states_grad"}
        wide = [t.detach().double() for t in given]
        wide[place].requires_grad_()
        out = gated_scan("rg_lru", *wide[:-1], initial_state=wide[-1])
        (wanted,) = torch.autograd.grad(out.sum(), wide[place])
        assert relative_error(found, wanted) <= 2e-6, name


def test_a_gradient_of_the_final_state_alone(used: list[GatedScanProblem]) -> None:
    tensors = [t.requires_grad_() for t in drawn("hgrn", torch.float32)]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    found = [
        torch.autograd.grad(
            gated_scan("hgrn", *given[:-1], initial_state=given[-1], return_final_state=True)[
                1
            ].sum(),
            given,
        )
        for given in (tensors, wide)
    ]
    close([*found[0]], [*found[1]], torch.float32)
    assert [p.direction for p in used] == ["forward", "backward"]


def test_what_starts_anew_forgets_what_is_not_finite() -> None:
    """On this CPU, by its compiled kernels; what GPUs' kernels do is tested with them."""
    gate, hidden = (torch.randn(2, 8, 40) for _ in range(2))
    hidden[:, :, 3] = torch.inf
    reset = torch.zeros(2, 40, dtype=torch.bool)
    reset[:, 10] = True
    out = min_gru(gate, hidden, reset=reset)
    assert not out[:, :, 9].isfinite().any()
    assert out[:, :, 10:].isfinite().all()


def test_a_reset_in_any_memory(used: list[GatedScanProblem]) -> None:
    gate, hidden = (torch.randn(2, 8, 40) for _ in range(2))
    reset = torch.rand(2, 40) < 0.2
    expected = min_gru(gate.double(), hidden.double(), reset=reset)
    turned = reset.t().contiguous().t()
    late = torch.zeros(83, dtype=torch.bool)[3:].view(2, 40).copy_(reset)
    sliced = torch.zeros(2, 77, dtype=torch.bool)[:, 16:56].copy_(reset)
    for each in (reset, turned, late, sliced):
        assert relative_error(min_gru(gate, hidden, reset=each), expected) <= 2e-6
    assert [p.reset_batch for p in used] == [40, 40, 40, 77]
    assert [p.alignment for p in used] == [
        16
    ] * 4  # an odd reset is copied, and counts for no other
    one = reset[:1].expand(2, 40)
    found = min_gru(gate, hidden, reset=one)
    assert relative_error(found, min_gru(gate.double(), hidden.double(), reset=one)) <= 2e-6


def test_unaligned_tensors_after_aligned_ones(used: list[GatedScanProblem]) -> None:
    for offset in (0, 1, 2, 0, 4):
        room = torch.randn(2, 2 * 8 * 40 + 4)
        gate, hidden = (each[offset:].narrow(0, 0, 640).view(2, 8, 40) for each in room)
        out = min_gru(gate, hidden)
        assert relative_error(out, min_gru(gate.double(), hidden.double())) <= 2e-6
    assert [p.alignment for p in used] == [16, 4, 8, 16, 16]


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 5), (1, 6, 1), (3, 2, 2), (1, 1, 9)])
@pytest.mark.parametrize("dim", [1, 2])
def test_dimensions_of_one_element(
    used: list[GatedScanProblem], shape: tuple[int, ...], dim: int
) -> None:
    x, forget = (torch.randn(shape) for _ in range(2))
    bound = torch.rand(shape[3 - dim])
    out = gated_scan("hgrn", x, forget, bound, dim=dim)
    wide = gated_scan("hgrn", x.double(), forget.double(), bound.double(), dim=dim)
    assert relative_error(out, wide) <= 2e-6
    (problem,) = used
    assert (problem.batch, problem.channels, problem.time) == (
        shape[0],
        *(shape[1:] if dim == 2 else shape[:0:-1]),
    )
    assert problem.plain()


def test_empty_tensors_need_no_kernel(used: list[GatedScanProblem]) -> None:
    for shape in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        leaf = torch.randn(shape, requires_grad=True)
        out, last = min_gru(leaf, leaf, return_final_state=True)
        (out.sum() + last.sum()).backward()
        assert out.shape == shape
        assert leaf.grad is not None
    assert not used


def test_triton_scans_gates_that_torch_computes(
    used: list[GatedScanProblem], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel of this family is in Triton."""
    backends: list[str] = []

    def scan(*args: Any) -> Any:
        backends.append(args[-1].backend)
        return derivatives_scan(*args[:-1], args[-1]._replace(backend="auto"))

    derivatives_scan = derivatives.scan
    monkeypatch.setattr(derivatives, "scan", scan)
    inputs = torch.randn(2, 8, 40), torch.randn(2, 8, 40)
    for reset in (None, torch.rand(2, 40) < 0.2):
        tensors, options = plans.Arguments(inputs, (), reset), plans.Options("min_gru")
        expected = min_gru(*(x.double() for x in inputs), reset=reset)
        states, _ = plans.forward(tensors, options._replace(backend="triton"))
        assert relative_error(states, expected) <= 2e-6
        plans.backward(
            *(tensors, states, states, None),
            options._replace(backend="triton"),
            (True, True, False),
        )
    assert [b for b in backends if b != "auto"] == ["triton"] * 4
    assert not used


def test_float64_and_the_reference_need_no_kernel(used: list[GatedScanProblem]) -> None:
    gate, hidden = (torch.randn(2, 8, 40) for _ in range(2))
    found = min_gru(gate, hidden, backend="reference")
    assert relative_error(found, min_gru(gate.double(), hidden.double())) <= 2e-6
    assert not used
