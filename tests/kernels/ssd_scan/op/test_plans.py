"""How ``ssd_scan`` calls its kernels. In their place stands what they are to compute in float64, of the tensors, strides and numbers
that a launch gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ssd_problems import NAMES, draw, gradients_of
from torch import Tensor

import scan_registry
from scan_registry.dispatch import policy
from scan_registry.dispatch.select import Decision
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.ssd_scan import reference
from scan_registry.kernels.ssd_scan.cases import OUTPUTS
from scan_registry.kernels.ssd_scan.op import plans, problems
from scan_registry.kernels.ssd_scan.problem import CHUNK, STRIDED, SSDScanProblem
from scan_registry.kernels.ssd_scan.solution import solve
from scan_registry.kernels.ssd_scan.spec import POINTERS
from scan_registry.ops import launching

run = partial(scan_registry.ssd_scan, dt_softplus=True, return_final_state=True)
right = partial(reference.forward, dt_softplus=True)


class Kernels:
    """Kernels that write what is expected, and NaN where nothing is."""

    def __init__(self) -> None:
        self.launched: list[SSDScanProblem] = []
        self.kept: dict[str, Tensor] = {}
        self.written: set[str] = set()

    def prepare(self, index: Any, family: Any, problem: SSDScanProblem, *rest: Any) -> Any:
        kernel = family.kernel(problem.direction, "cuda")
        assert any(kernel.rules.accepts(variant, problem) is None for variant in kernel.variants)
        return SimpleNamespace(launch=True, run=partial(self.run, problem))

    def run(self, problem: SSDScanProblem, tensors: Mapping[str, Any]) -> None:
        self.launched.append(problem)
        names = POINTERS[problem.direction]
        for name in names:
            tensor = tensors.get(name)
            if tensor is not None and name != "dt" and name not in ("x", "B", "C", "z", "out_grad"):
                assert tensor.is_contiguous(), name
                assert tensor.data_ptr() % 8 == 0 or tensor.dtype == torch.int32, name
        inputs = {name: tensors.get(name) for name in (*names, "C", "out_grad", "final_grad", "D")}
        shapes = {"x": (problem.heads, problem.head_size), "dt": (problem.heads,), "B": (problem.groups, problem.state_size)}  # fmt: skip
        shapes |= {"C": shapes["B"], "grad": shapes["x"], "z": shapes["x"]}
        strides, scalars = dict[str, tuple[int, ...]](), problem.scalars()
        for stride_of, dimensions in STRIDED[problem.direction].items():
            strides[stride_of] = tuple(scalars[f"{stride_of}_{of}"] for of in dimensions)
            tensor = tensors["out_grad" if stride_of == "grad" else stride_of]
            if tensor is None:
                assert (stride_of, strides[stride_of]) == ("z", (0, 0, 0))
                continue
            size = problem.batch, problem.time, *shapes[stride_of]
            along = (*strides[stride_of], 1)[: len(size)]
            read = torch.as_strided(tensor, size, along)
            torch.testing.assert_close(read, tensor, rtol=0, atol=0)
            if stride_of != "dt":
                assert not any(step * tensor.element_size() % 16 for step in along[:3])
                assert tensor.data_ptr() % 16 == 0
        self.complete(problem, inputs, tensors)
        self.write(problem, inputs, tensors)

    def complete(
        self, problem: SSDScanProblem, inputs: dict[str, Any], tensors: Mapping[str, Any]
    ) -> None:
        """Add what ``solve`` takes, and this kernel does not."""
        for name, like in (("out_grad", "x"), ("C", "B"), ("x", "out_grad"), ("B", "C")):
            if inputs.get(name) is None:
                inputs[name] = torch.zeros_like(inputs[like])
        inputs |= dict.fromkeys({"z", "dt_bias", "initial_state", "cu_seqlens", "seq_idx"} - inputs.keys())  # fmt: skip
        # What kernels handed on is of the same problem, of which this computes all again.
        for name in ("states", "adjoints"):
            if name in POINTERS[problem.direction] and name not in OUTPUTS[problem.direction]:
                assert relative_error(tensors[name], self.kept[name]) < 1e-2
        for name in ("initial_state", "final_grad"):
            inputs[name] = tensors.get(name)
        for name in ("initial_state", "final_grad"):
            if inputs[name] is not None and not problem.sequences:
                inputs[name] = inputs[name].unsqueeze(1)

    def write(
        self, problem: SSDScanProblem, inputs: dict[str, Any], tensors: Mapping[str, Any]
    ) -> None:
        assert (inputs["dt"].dtype == torch.float32) == problem.wide_dt
        D = inputs["D"]
        assert problem.scalars().get("D_channel") == (D is not None and D.dim() == 2)
        solution = solve(inputs, problem.softplus, (problem.low, problem.high))
        self.written = {n for n in OUTPUTS[problem.direction] if tensors.get(n) is not None}
        for name in OUTPUTS[problem.direction]:
            target, result = tensors.get(name), solution.results.get(name)
            if name in ("states", "adjoints"):
                self.kept[name] = result
            if target is None:
                assert name in ("final_state", "initial_grad", "ungated", "states", "sequence_decays")  # fmt: skip
                continue
            assert result is not None
            if name == "head_grads":
                assert target.shape == (3, problem.batch, problem.slots, problem.heads)
                target.zero_()[:, -1, -1] = result
            elif name in ("B_grad", "C_grad"):
                assert target.shape[0] == problem.splits
                target.zero_()[-1] = result
            else:
                target.copy_(result.view(target.shape))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    played = Kernels()
    monkeypatch.setattr(plans, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(plans, "prepare", played.prepare)
    monkeypatch.setattr(launching.plan_cache, "_plans", {})
    return played


@pytest.mark.parametrize("heads", [1, 3, 4, 6])
def test_gradients_of_heads_begin_on_16_bytes(heads: int) -> None:
    """As torch.compile asserts of an operator's results, also where heads are no multiple of four."""
    terms = torch.randn(3, 2, 5, heads)
    sums = plans._sums_of_heads(terms)
    torch.testing.assert_close(sums, terms.sum((1, 2)), rtol=0, atol=0)
    assert all(row.is_contiguous() and row.data_ptr() % 16 == 0 for row in sums)


def agrees(problem: dict[str, Any], **options: Any) -> None:
    results, grads = gradients_of(partial(run, **options), problem)
    exact = {
        n: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t
        for n, t in problem.items()
    }
    expected, wanted = gradients_of(right, exact)
    for result, value in zip(results, expected, strict=True):
        assert relative_error(result, value) < 5e-3
    names = [name for name in NAMES if name in problem]
    for name, grad, value in zip(names, grads, wanted, strict=True):
        assert grad.dtype == problem[name].dtype
        assert relative_error(grad, value) < 2e-2, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_a_training_step(kernels: Kernels, dtype: torch.dtype, packed: bool) -> None:
    problem = draw(2, 150, 4, 8, 2, 16, 3 if packed else 0, dtype, seed=3)
    del problem["z"]
    if packed:
        problem |= {"cu_seqlens": torch.tensor([0, 0, 90, 150]), "seq_idx": (torch.arange(150) // 40).repeat(2, 1)}  # fmt: skip
    agrees(problem)
    directions = [played.direction for played in kernels.launched]
    assert directions == ["forward", "states", "adjoint", "backward"]
    assert {played.slots for played in kernels.launched} == {150 // CHUNK + (3 if packed else 1)}
    assert kernels.launched[-1].splits == 2


def test_without_what_may_be_left_out(kernels: Kernels) -> None:
    problem = draw(1, 70, 4, 8, 1, 8, dtype=torch.bfloat16)
    for name in ("D", "z", "dt_bias", "initial_state"):
        del problem[name]
    problem["dt"] = problem["dt"].bfloat16()
    agrees(problem)
    out = scan_registry.ssd_scan(**problem, dt_softplus=True)
    assert relative_error(out, right(**{n: t.double() for n, t in problem.items()})[0]) < 5e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gates_and_wide_skips(kernels: Kernels, dtype: torch.dtype) -> None:
    agrees(draw(1, 70, 4, 8, 1, 8, dtype=dtype, wide_D=True))
    assert len(kernels.launched) == 4


def test_what_is_gated_is_kept_for_gradients_alone(kernels: Kernels) -> None:
    problem = draw(1, 70, 4, 8, 1, 8, dtype=torch.bfloat16)
    run(**problem)
    assert kernels.written == {"out", "final_state"}
    run(**problem | {"x": problem["x"].clone().requires_grad_()})
    assert kernels.written == {"out", "final_state", "ungated"}
    without = {name: t for name, t in problem.items() if name != "z"}
    run(**without | {"x": problem["x"].clone().requires_grad_()})
    assert kernels.written == {"out", "final_state"}


def test_what_is_gated_may_exceed_the_dtype(kernels: Kernels) -> None:
    """In float16, y is up to 65504; y·silu(z) is rounded once."""
    problem = draw(1, 70, 4, 8, 1, 8, dtype=torch.float16)
    problem |= {"x": problem["x"] * 0 + 1, "D": problem["D"] * 0 + 1e6, "z": problem["z"] * 0 - 9}
    out, _ = run(**problem)
    exact = {n: t.double() for n, t in problem.items()}
    assert relative_error(out, right(**exact)[0]) < 1e-3


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.mT.contiguous().mT,
        lambda t: t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t),
        lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: torch.cat([t, t[..., :4]], -1)[..., : t.shape[-1]],
    ],
    ids=["turned", "off 16 bytes", "with gaps", "time first", "rows off 16 bytes"],
)
def test_strides(kernels: Kernels, change: Callable[[Tensor], Tensor]) -> None:
    problem = draw(2, 70, 4, 8, 2, 8, dtype=torch.bfloat16)
    plain = gradients_of(run, problem)

    def of_changed(**leaves: Any) -> Any:
        return run(**{n: change(t) if n in ("x", "B", "C", "z") else t for n, t in leaves.items()})

    torch.testing.assert_close(gradients_of(of_changed, problem), plain, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["A", "D", "dt_bias", "initial_state", "seq_idx", "dt"])
def test_gaps_in_what_kernels_take_without(kernels: Kernels, name: str) -> None:
    problem = draw(2, 70, 4, 8, 2, 8, dtype=torch.bfloat16)
    problem["seq_idx"] = (torch.arange(70) // 30).repeat(2, 1).int()
    expected = run(**problem)
    spread = torch.stack([problem[name]] * 2, -1)[..., 0]
    assert not spread.is_contiguous()
    torch.testing.assert_close(run(**{**problem, name: spread}), expected, rtol=0, atol=0)


def test_states_off_eight_bytes_are_copied(kernels: Kernels) -> None:
    problem = draw(1, 70, 4, 8, 1, 8, dtype=torch.bfloat16)
    state = problem["initial_state"]
    off = state.new_empty(state.numel() + 1)[1:].view(state.shape).copy_(state)
    assert off.is_contiguous()
    assert off.data_ptr() % 8
    torch.testing.assert_close(
        run(**{**problem, "initial_state": off}), run(**problem), rtol=0, atol=0
    )


def test_derivatives_of_derivatives_are_composed(kernels: Kernels) -> None:
    problem = draw(1, 20, 2, 8, 1, 8, dtype=torch.bfloat16)
    dt = problem["dt"].requires_grad_()
    (gradient,) = torch.autograd.grad(run(**problem)[0].float().sum(), dt, create_graph=True)
    assert [played.direction for played in kernels.launched] == ["forward"]
    (second,) = torch.autograd.grad(gradient.square().sum(), dt)
    assert second.abs().sum() > 0


def test_a_call_again_finds_its_plan(kernels: Kernels) -> None:
    problem = draw(1, 70, 4, 8, 1, 8, dtype=torch.bfloat16)
    first = run(**problem)
    prepared, plans_kept = len(kernels.launched), len(launching.plan_cache._plans)
    torch.testing.assert_close(run(**problem), first, rtol=0, atol=0)
    assert len(kernels.launched) == 2 * prepared
    assert len(launching.plan_cache._plans) == plans_kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("starts", [False, True], ids=["", "from a state"])
def test_time_of_few_heads_is_cut(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, starts: bool
) -> None:
    """Into stretches of whole chunks but for the last one, forwards alone."""
    monkeypatch.setattr(problems, "LEAST_STRETCH", 60)
    problem = draw(2, 310, 2, 8, 1, 8, dtype=dtype)
    if not starts:
        del problem["initial_state"]
    agrees(problem)
    played = [(one.direction, one.sequences) for one in kernels.launched]
    backward = [("states", 0), ("adjoint", 0), ("backward", 0)]
    assert played == [("states", 4), ("forward", 5), *backward]
    kernels.launched.clear()
    out = scan_registry.ssd_scan(**problem, dt_softplus=True)
    torch.testing.assert_close(out, run(**problem)[0], rtol=0, atol=0)
    assert len(kernels.launched) == 4
    indexed = problem | {"seq_idx": torch.zeros(2, 310, dtype=torch.int32)}
    torch.testing.assert_close(run(**indexed)[0], out, rtol=2e-2, atol=2e-2)
    assert kernels.launched[-1].sequences == 0


def test_float32_where_a_gpu_has_no_kernel_of_the_backward_pass(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of what forward kernels computed are composed, that of z, too."""

    def prepare(index: Any, family: Any, problem: SSDScanProblem, *rest: Any) -> Any:
        if problem.direction == "backward":
            system: Any = SimpleNamespace(device=None)
            refusal = Decision(system, family, problem, "auto", policy.lowest(), None)
            return SimpleNamespace(launch=None, decision=refusal)
        return kernels.prepare(index, family, problem, *rest)

    monkeypatch.setattr(plans, "prepare", prepare)
    agrees(draw(1, 90, 4, 8, 1, 8, dtype=torch.float32, wide_D=True))
    assert [played.direction for played in kernels.launched] == ["forward"]


def test_float64_has_no_kernels(kernels: Kernels) -> None:
    gradients_of(run, draw(1, 20, 2, 8, 1, 8, dtype=torch.float64))
    assert not kernels.launched
