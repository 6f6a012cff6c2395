"""``gated_scan`` on what stands for its kernels on the CPU: what the operator passes is what they take."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from scan_registry import gated_scan, min_gru, rg_lru
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.gated_scan.problem import GatedScanProblem
from scan_registry.kernels.gated_scan.spec import FAMILY
from scan_registry.kernels.model import Launch
from scan_registry.ops import gated_scan_fast as fast
from scan_registry.ops import gated_scan_plans as plans
from scan_registry.ops.launching import PlanCache, Run

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
BOUNDS = torch.tensor([0, 0, 9, 30, 30, 40])
SHAPE = 2, 8, 40


@pytest.fixture(scope="session")
def stub() -> ModuleType:
    """The module ``gated_scan_stub``."""
    spec = importlib.util.spec_from_file_location(
        "gated_scan_stub", Path(__file__).with_name("gated_scan_stub.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gated_scan_stub"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["fast", "general"])
def used(
    monkeypatch: pytest.MonkeyPatch, stub: ModuleType, request: pytest.FixtureRequest
) -> list[GatedScanProblem]:
    """Has CPU tensors taken for a GPU's, and problems given to the stub; lists those that it got. By the fast path, and
    by the other."""
    found: list[GatedScanProblem] = []

    def prepared(problem: GatedScanProblem, device: torch.device, backend: Any) -> tuple[Run, int]:
        def run(tensors: Mapping[str, Tensor | None]) -> None:
            found.append(problem)
            stub.run(problem, tensors)

        return run, problem.parts

    monkeypatch.setattr(plans, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(plans, "_prepared", prepared)
    monkeypatch.setattr(plans, "plan_cache", PlanCache())
    monkeypatch.setattr(fast, "_kinds", {})
    if request.param == "general":
        module = importlib.import_module("scan_registry.ops.gated_scan")
        monkeypatch.setattr(module, "fast_scan", lambda *_: None)
    return found


def laid(tensor: Tensor, how: str) -> Tensor:
    """The values in memory of another layout."""
    batch, channels, time = tensor.shape
    if how == "channels":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "gaps":
        room = tensor.new_full((batch, channels, 2 * time), torch.nan)
        return room[..., 3 : time + 3].copy_(tensor)
    if how == "channels with gaps":
        room = tensor.new_full((batch, time, 3 * channels), torch.nan)
        return room[..., channels : 2 * channels].copy_(tensor.transpose(1, 2)).transpose(1, 2)
    if how == "batch last":
        return tensor.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    return tensor.contiguous()


WAYS = ("rows", "channels", "gaps", "channels with gaps", "batch last")


def drawn(kind: str, dtype: torch.dtype, shape: Any = SHAPE, packed: bool = False) -> list[Tensor]:
    """Inputs, parameters and the initial state."""
    torch.manual_seed(0)
    of, (batch, channels, _) = KINDS[kind], shape
    inputs = [torch.randn(shape).to(dtype) for _ in of.inputs]
    if kind == "linear":
        inputs[0] = inputs[0].sigmoid()
    parameters = [torch.rand(channels) * 0.9 for _ in of.parameters]
    sequences = (len(BOUNDS) - 1,) if packed else ()
    return [*inputs, *parameters, torch.randn(batch, channels, *sequences)]


def results(
    kind: str, tensors: list[Tensor], ways: Callable[[int], str], wide: bool, **how: Any
) -> list[Tensor]:
    """Outputs and gradients, of sequences that lie in some way each."""
    leaves = [
        laid(t.double() if wide else t, ways(n)) if t.shape == SHAPE else t.clone()
        for n, t in enumerate(tensors)
    ]
    leaves = [(t.double() if wide else t).detach().requires_grad_() for t in leaves]
    *inputs, initial = leaves
    made = gated_scan(kind, *inputs, initial_state=initial, return_final_state=True, **how)
    torch.manual_seed(1)
    grads = [torch.randn(x.shape).to(x.dtype) for x in made]
    grads[0] = laid(grads[0], ways(9))
    assert made[0].stride() == torch.empty_like(inputs[0]).stride()
    return [x.detach() for x in (*made, *torch.autograd.grad(made, leaves, grads))]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reverse": {"reverse": True},
    "resets": {"reset": torch.rand(2, 40, generator=torch.Generator().manual_seed(0)) < 0.2},
    "packed": {"cu_seqlens": BOUNDS},
}
OPTIONS["all"] = {**OPTIONS["reverse"], **OPTIONS["resets"], **OPTIONS["packed"]}


def close(found: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    assert len(found) == len(expected)
    for place, (out, wanted) in enumerate(zip(found, expected, strict=True)):
        assert out.shape == wanted.shape
        assert relative_error(out, wanted) <= TOLERANCE[dtype], place


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_matches_the_composition(
    used: list[GatedScanProblem], kind: str, name: str, dtype: torch.dtype
) -> None:
    """Results and gradients, of tensors that lie in any way, all alike or not."""
    how = OPTIONS[name]
    tensors = drawn(kind, dtype, packed="cu_seqlens" in how)
    expected = results(kind, tensors, lambda _: "rows", True, **how)
    assert not used
    ways: list[Any] = [lambda _, way=way: way for way in WAYS]
    ways += [lambda n, shift=shift: WAYS[(n + shift) % len(WAYS)] for shift in range(len(WAYS))]
    for way in ways if dtype == torch.float32 else ways[-1:]:
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
        fitting = [v for v in kernel.variants if kernel.rules.accepts(v, problem) is None]
        variant = min(fitting, key=lambda variant: kernel.cost(variant, problem))
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
    monkeypatch.setattr(fast, "_kinds", {})
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


def test_what_starts_anew_forgets_what_is_not_finite(used: list[GatedScanProblem]) -> None:
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


def test_float64_and_the_reference_need_no_kernel(used: list[GatedScanProblem]) -> None:
    gate, hidden = (torch.randn(2, 8, 40) for _ in range(2))
    found = min_gru(gate, hidden, backend="reference")
    assert relative_error(found, min_gru(gate.double(), hidden.double())) <= 2e-6
    assert not used


def test_derivatives_of_derivatives(used: list[GatedScanProblem]) -> None:
    tensors = [t.requires_grad_() for t in drawn("rg_lru", torch.float32)]
    wide = [t.detach().double().requires_grad_() for t in tensors]

    def second(leaves: list[Tensor]) -> tuple[Tensor, ...]:
        out = gated_scan("rg_lru", *leaves[:-1], initial_state=leaves[-1])
        assert isinstance(out, Tensor)
        grads = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum((g**2).sum() for g in grads), leaves)

    for found, wanted in zip(second(tensors), second(wide), strict=True):
        assert relative_error(found, wanted) <= 1e-4
    assert [p.direction for p in used] == ["forward", "backward"]


def test_a_model_learns(used: list[GatedScanProblem]) -> None:
    """An optimizer's steps are those of the composition."""
    torch.manual_seed(0)
    x, target = torch.randn(2, 12, 4), torch.randn(2, 12, 6)

    def trained(backend: Any) -> tuple[list[float], Tensor]:
        torch.manual_seed(1)
        project = torch.nn.Linear(4, 18)
        a_param = torch.nn.Parameter(torch.rand(6))
        optimizer = torch.optim.AdamW([*project.parameters(), a_param], lr=1e-2)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            out = rg_lru(*project(x).chunk(3, -1), a_param, dim=1, backend=backend)
            loss = (out - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, a_param.detach()

    (losses, a_param), (expected, of_a) = trained("auto"), trained("reference")
    assert [p.direction for p in used] == ["forward", "backward"] * 5
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
    torch.testing.assert_close(a_param, of_a)
    assert losses[-1] < losses[0]


def test_what_a_hook_lays_otherwise(used: list[GatedScanProblem]) -> None:
    tensors = drawn("min_gru", torch.float32)
    wide = [t.double().requires_grad_() for t in tensors[:2]]
    leaves = [laid(t, "channels").requires_grad_() for t in tensors[:2]]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.contiguous()):
        out = min_gru(*leaves)
    found = torch.autograd.grad(out.sum(), leaves)
    close([*found], [*torch.autograd.grad(min_gru(*wide).sum(), wide)], torch.float32)


def test_what_torch_compiles(used: list[GatedScanProblem]) -> None:
    """One graph, forwards and backwards, whose operators run kernels."""
    tensors = drawn("rg_lru", torch.float32)
    reset = OPTIONS["resets"]["reset"]

    def function(*leaves: Tensor) -> Tensor:
        *inputs, initial = leaves
        made = gated_scan("rg_lru", *inputs, initial_state=initial, reset=reset)
        assert isinstance(made, Tensor)
        return made * 2

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    leaves = [t.requires_grad_() for t in tensors]
    found = torch.autograd.grad(compiled(*leaves).sum(), leaves)
    assert [p.direction for p in used] == ["forward", "backward"]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    close([*found], [*torch.autograd.grad(function(*wide).sum(), wide)], torch.float32)


def test_two_threads(used: list[GatedScanProblem]) -> None:
    """Each with shapes of its own, in turn."""
    failures: list[BaseException] = []

    def work(time: int) -> None:
        try:
            for _ in range(10):
                gate, hidden = (torch.randn(2, 8, time, requires_grad=True) for _ in range(2))
                out = min_gru(gate, hidden)
                out.sum().backward()
                wide = gate.detach().double(), hidden.detach().double()
                assert relative_error(out.detach(), min_gru(*wide)) <= 2e-6
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(time,)) for time in (20, 40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(used) == 40


def test_where_no_kernel_fits_the_composition_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selection itself says so here, on a machine that it sees no GPU on."""
    monkeypatch.setattr(plans, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(plans, "plan_cache", PlanCache())
    monkeypatch.setattr(fast, "_kinds", {})
    tensors = drawn("rg_lru", torch.float32)
    expected = results("rg_lru", tensors, lambda _: "rows", True)
    close(results("rg_lru", tensors, lambda _: "rows", False), expected, torch.float32)
    assert set(fast._kinds.values()) == {None}


def test_a_launch_says_how_many_sums_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The room for partial sums is that launch's, and all of them are added up."""
    shapes: list[torch.Size] = []

    def run(tensors: Mapping[str, Tensor | None]) -> None:
        sums = tensors["parameters_grad"]
        assert sums is not None
        shapes.append(sums.shape)
        sums.copy_(torch.arange(7.0).view(7, 1, 1))

    def prepared(ordinal: Any, group: Any, problem: Any, *_: Any) -> Any:
        scalars = {"parts": 7} if problem.direction == "backward" else {}
        launch = Launch((1, 1, 1), scalars)
        forward = problem.direction == "forward"
        return SimpleNamespace(
            launch=launch,
            decision=SimpleNamespace(launch=lambda: launch),
            run=(lambda tensors: None) if forward else run,
        )

    monkeypatch.setattr(plans, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(plans, "prepare", prepared)
    monkeypatch.setattr(plans, "plan_cache", PlanCache())
    monkeypatch.setattr(fast, "_kinds", {})
    *inputs, a_param, _ = drawn("rg_lru", torch.float32)
    a_param.requires_grad_()
    out = gated_scan("rg_lru", *inputs, a_param)
    assert isinstance(out, Tensor)
    (grad,) = torch.autograd.grad(out.sum(), a_param)
    assert shapes == [(7, 1, 8)]
    assert torch.equal(grad, torch.full((8,), 21.0))


def test_plain_calls_are_planned_once(used: list[GatedScanProblem]) -> None:
    gate, hidden = (torch.randn(SHAPE, requires_grad=True) for _ in range(2))
    for _ in range(3):
        min_gru(gate, hidden).sum().backward()
    with torch.no_grad():
        min_gru(gate, hidden)
    assert len(used) == 7
    kinds = [*fast._kinds.values()]
    if kinds:  # with gradients and without
        assert [kind is not None for kind in kinds] == [True, True]
        assert [len(kind._backwards) for kind in kinds if kind is not None] == [1, 0]


def test_what_the_fast_path_leaves_to_others(used: list[GatedScanProblem]) -> None:
    gate, hidden = (torch.randn(SHAPE) for _ in range(2))
    with pytest.raises(TypeError, match=r"hidden has dtype torch\.float64"):
        min_gru(gate, hidden.double())
    with pytest.raises(ValueError, match="backend is 'fast'"):
        min_gru(gate, hidden, backend="fast")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="reverse is 1; it must be a bool"):
        min_gru(gate, hidden, reverse=1)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="gate must be a"):
        min_gru(None, hidden)  # type: ignore[call-overload]
    assert not any(fast._kinds.values())
    narrow = torch.rand(8).bfloat16()
    out = rg_lru(gate, hidden, gate, narrow, cu_seqlens=BOUNDS.int())
    wide = gate.double(), hidden.double(), gate.double(), narrow.double()
    assert relative_error(out, rg_lru(*wide, cu_seqlens=BOUNDS)) <= 2e-6
    assert not any(fast._kinds.values())


def test_training_after_a_change_of_an_input_is_refused(used: list[GatedScanProblem]) -> None:
    gate, hidden = (torch.randn(SHAPE, requires_grad=True) for _ in range(2))
    out = min_gru(gate, hidden)
    with torch.no_grad():
        hidden.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
