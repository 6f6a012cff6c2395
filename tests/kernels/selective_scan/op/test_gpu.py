"""``selective_scan`` on a GPU, through the public function, against float64.

What is composed of scans stands for a loop over time here: a test without a GPU compares the two.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import recorded
from planning import forget_plans
from threading_calls import in_threads
from torch import Tensor

import scan_registry
from scan_registry import selective_scan
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.selective_scan import reference
from scan_registry.kernels.selective_scan.op import plans as selective_scan_plans
from scan_registry.kernels.selective_scan.op.arguments import Options, normalised
from scan_registry.ops.launching import PlanCache

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
NAMES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")

#: Batch, channels, time, states, groups; dtype; whether channels are contiguous; whether sequences are packed; and
#: parts of the backward pass, 0 for as many as are usual.
CASES = (
    ((2, 96, 200, 16, 1), torch.float32, False, False, 1),
    ((2, 96, 200, 16, 2), torch.bfloat16, True, False, 1),
    ((1, 70, 333, 7, 1), torch.float32, False, True, 1),
    ((2, 64, 256, 16, 1), torch.float16, True, False, 3),
    ((1, 66, 517, 40, 3), torch.float32, True, False, 4),
    ((1, 8, 300, 200, 1), torch.float32, False, False, 2),
    ((3, 37, 1, 1, 1), torch.float32, False, False, 0),
    ((2, 48, 997, 4, 4), torch.float32, False, False, 0),
    ((1, 130, 1021, 17, 1), torch.bfloat16, False, True, 0),
    ((1, 64, 2053, 64, 2), torch.float32, True, True, 0),
    ((1, 24, 640, 256, 1), torch.float16, False, False, 0),
    ((1, 96, 20000, 16, 1), torch.float32, False, False, 0),
    ((1, 33, 19997, 16, 3), torch.bfloat16, True, False, 0),
    ((4, 512, 64, 16, 1), torch.bfloat16, False, False, 0),
    # On sm_90 the forward pass of these takes turns over time.
    ((2, 1536, 1000, 16, 1), torch.bfloat16, False, False, 0),
    ((1, 4096, 1128, 12, 2), torch.float16, False, False, 0),
    ((4, 1280, 1004, 16, 1), torch.float32, False, False, 0),
)


def drawn(
    sizes: tuple[int, ...], dtype: torch.dtype, turned: bool = False, packed: bool = False
) -> dict[str, Tensor]:
    """All tensors; step sizes from a thousandth to some tenths once they are softplus."""
    batch, channels, time, states, groups = sizes
    torch.manual_seed(sum(sizes))

    def sequence() -> Tensor:
        if turned:
            return torch.randn(batch, time, channels, device="cuda").transpose(1, 2)
        return torch.randn(batch, channels, time, device="cuda")

    between = (3,) if packed else ()
    B, C = torch.randn(2, batch, groups, states, time, device="cuda").to(dtype)
    found = (
        sequence().to(dtype),
        (sequence() / 2 - 3).to(dtype),
        -torch.rand(channels, states, device="cuda") * 8 - 0.02,
        *(B, C),
        torch.randn(channels, device="cuda"),
        sequence().to(dtype),
        torch.rand(channels, device="cuda"),
        torch.randn(batch, *between, channels, states, device="cuda"),
    )
    return dict(zip(NAMES, found, strict=True))


def results(given: dict[str, Tensor], wide: bool, **options: Any) -> list[Tensor]:
    """Outputs, and gradients of all that is given."""
    leaves = {
        name: (t.detach().double() if wide and not t.is_complex() else t.detach()).requires_grad_()
        for name, t in given.items()
    }
    made = selective_scan(**leaves, return_final_state=True, **options)
    generator = torch.Generator("cuda").manual_seed(1)
    rounded = given["u"].dtype, torch.float32
    grads = [
        torch.randn(x.shape, device="cuda", generator=generator).to(dtype).to(x.dtype)
        for x, dtype in zip(made, rounded, strict=True)
    ]
    return [x.detach() for x in (*made, *torch.autograd.grad(made, leaves.values(), grads))]


def compare(given: dict[str, Tensor], tolerance: float, **options: Any) -> list[Tensor]:
    """Rounding errors of the gradient of A add up over the steps that a state lasts. In float32, where they exceed the
    tolerance, up to twice the error of torch's own float32 operators is allowed. All else is held to the tolerance."""
    found = results(given, False, **options)
    options.pop("backend", None)
    names = ["out", "final_state", *given]
    right = dict(zip(names, results(given, True, **options), strict=True))
    for name, out in zip(names, found, strict=True):
        error = relative_error(out, right[name])
        if name == "A" and tolerance < error and out.dtype == torch.float32:
            by_torch = results(given, False, backend="reference", **options)[names.index(name)]
            assert error <= 2 * relative_error(by_torch, right[name]), name
        else:
            assert error <= tolerance, name
    return found


@pytest.fixture(autouse=True)
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The plans that the fast path makes."""
    monkeypatch.setattr(selective_scan_plans, "plan_cache", PlanCache())
    return forget_plans(monkeypatch, "selective_scan")[0]


@pytest.mark.parametrize(("sizes", "dtype", "turned", "packed", "parts"), CASES)
def test_results_and_gradients_and_the_same_in_every_run(
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    turned: bool,
    packed: bool,
    parts: int,
    planned: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if parts:
        monkeypatch.setattr(selective_scan_plans, "parts_of", lambda *_: parts)
    given, time = drawn(sizes, dtype, turned, packed), sizes[2]
    bounds = torch.tensor([0, time // 3, time // 3, time], device="cuda") if packed else None
    options: Any = {"delta_softplus": True, "cu_seqlens": bounds}
    found = compare(given, TOLERANCE[dtype], backend="cuda", **options)
    again = results(given, False, backend="cuda", **options)
    for one, other in zip(found, again, strict=True):
        assert torch.equal(one, other)
    assert any(plan is not None for plan in planned)


@pytest.mark.parametrize("softplus", [False, True], ids=["", "softplus"])
@pytest.mark.parametrize(
    "without", [(), ("D",), ("z",), ("delta_bias",), ("initial_state",), NAMES[5:]]
)
def test_each_option(without: tuple[str, ...], softplus: bool) -> None:
    given = drawn((2, 48, 131, 16, 2), torch.float32)
    if not softplus:
        given["delta"] = given["delta"].exp()
        given["delta_bias"] = given["delta_bias"] / 10
    for name in without:
        del given[name]
    compare(given, 2e-6, delta_softplus=softplus)


def test_projections_of_three_dimensions_and_of_strides() -> None:
    given = drawn((2, 32, 96, 16, 1), torch.bfloat16)
    expected = results(given, False, delta_softplus=True)
    flat = {**given, "B": given["B"][:, 0], "C": given["C"][:, 0]}
    for one, other in zip(expected, results(flat, False, delta_softplus=True), strict=True):
        assert torch.equal(one.view(other.shape), other)
    turned = {**given, "B": given["B"].transpose(2, 3).contiguous().transpose(2, 3)}
    for one, other in zip(expected, results(turned, False, delta_softplus=True), strict=True):
        assert relative_error(one, other) <= 1e-2


@pytest.mark.parametrize("kind", ["complex", "constant", "complex constant", "float64"])
def test_what_is_composed_of_scans(kind: str) -> None:
    """Against the loop, on the CPU."""
    given = drawn((2, 12, 150, 5, 1), torch.float32)
    dtype = torch.float32
    if "constant" in kind:
        given |= {"B": torch.randn(12, 5, device="cuda"), "C": torch.randn(12, 5, device="cuda")}
    if "complex" in kind:
        given["A"] = torch.complex(given["A"], torch.randn(12, 5, device="cuda"))
        given["initial_state"] = given["initial_state"].to(torch.complex64)
        for name in "BC":
            if "constant" in kind:
                given[name] = torch.complex(given[name], torch.randn(12, 5, device="cuda"))
            else:
                given[name] = torch.cat([given[name], given[name]], -1)
    if kind == "float64":
        given = {name: t.double() for name, t in given.items()}
        dtype = torch.float64
    leaves = [t.requires_grad_() for t in given.values()]
    wide = [
        t.detach().cpu().to(torch.complex128 if t.is_complex() else torch.float64) for t in leaves
    ]
    wide = [t.requires_grad_() for t in wide]
    made = selective_scan(*leaves[:8], True, leaves[8], return_final_state=True)
    right = reference.forward(*wide[:8], True, wide[8])
    found = *made, *torch.autograd.grad(made[0].sum(), leaves)
    expected = *right, *torch.autograd.grad(right[0].sum(), wide)
    for out, wanted in zip(found, expected, strict=True):
        error = (out.detach().cpu() - wanted.detach()).abs().norm() / wanted.abs().norm()
        assert error <= (1e-12 if dtype == torch.float64 else 4e-6)


def test_a_kernel_is_asked_for_where_there_is_none() -> None:
    given = drawn((1, 8, 20, 4, 1), torch.float32)
    constant = {**given, "B": torch.randn(8, 4, device="cuda")}
    with pytest.raises(ValueError, match="'cuda', which has no kernel for B of two dimensions"):
        selective_scan(**constant, backend="cuda")


@pytest.mark.parametrize("size", ["batch", "time"])
def test_nothing(size: str) -> None:
    given = drawn((2, 8, 20, 4, 1), torch.float32)
    place = {"batch": 0, "time": -1}[size]
    names = ("u", "delta", "z", "B", "C", *(["initial_state"] if size == "batch" else []))
    for name in names:
        given[name] = given[name].narrow(place, 0, 0).requires_grad_()
    out, last = selective_scan(**given, return_final_state=True)
    assert out.shape == given["u"].shape
    (out.sum() + last.sum()).backward()
    assert given["u"].grad is not None


def test_one_graph_by_inductor() -> None:
    torch._dynamo.reset()
    given = drawn((2, 64, 128, 16, 1), torch.bfloat16)

    def step(**tensors: Tensor) -> Tensor:
        return selective_scan(**tensors, delta_softplus=True).float().square().mean()

    compiled: Any = torch.compile(step, fullgraph=True)
    found = []
    for function in (step, compiled):
        leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
        value = function(**leaves)
        found.append([value, *torch.autograd.grad(value, leaves.values())])
    for one, other in zip(*found, strict=True):
        assert relative_error(one.detach(), other.detach()) <= 1e-5


@pytest.mark.parametrize("parts", [1, 2])
def test_a_graph_of_a_training_step(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selective_scan_plans, "parts_of", lambda *_: parts)
    given = {
        name: t.requires_grad_() for name, t in drawn((2, 64, 512, 16, 1), torch.bfloat16).items()
    }

    def step() -> list[Tensor]:
        out = selective_scan(**given, delta_softplus=True)
        return [out, *torch.autograd.grad(out, given.values(), torch.ones_like(out))]

    graph, captured = recorded(step, warm_ups=2)
    with torch.no_grad():
        given["u"].normal_()
        given["z"].normal_()
    graph.replay()
    torch.cuda.synchronize()
    for one, other in zip(captured, step(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_backward_pass_in_two_halves(
    parts: int, turned: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the kernel ``adjoint`` finds in advance gives the same gradients, and that of the state before."""
    monkeypatch.setattr(selective_scan_plans, "parts_of", lambda *_: parts)
    monkeypatch.setattr(selective_scan_plans, "plan_cache", PlanCache())
    tensors = drawn((2, 96, 520, 16, 1), dtype, turned)
    options = Options(True)
    given = normalised(*(tensors[name] for name in NAMES), None, *options)
    out_grad, after = torch.randn_like(given.u), torch.randn(2, 96, 16, device="cuda")
    kept = selective_scan_plans.forward(given, options, True).checkpoints
    how: Any = given, kept, out_grad, after, options, (True,) * 9
    adjoints = selective_scan_plans.adjoint(given, out_grad, options)
    assert adjoints is not None
    expected = selective_scan_plans.backward(*how)
    found = selective_scan_plans.backward(*how, adjoints)
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    for part in reversed(range(parts)):
        decay = torch.exp(adjoints.sizes[:, part, :, None] * given.A)
        after = adjoints.gradients[:, part] + decay * after
    assert expected[8] is not None
    assert relative_error(after, expected[8]) <= 1e-4


def test_a_graph_of_packed_sequences_that_are_composed() -> None:
    """No value of the bounds comes to the host."""
    given = drawn((1, 8, 120, 4, 1), torch.float32, packed=True)
    given["B"] = torch.randn(8, 4, device="cuda")
    bounds = torch.tensor([0, 40, 40, 120], device="cuda")
    expected = selective_scan(**given, delta_softplus=True, cu_seqlens=bounds)
    graph, captured = recorded(
        lambda: selective_scan(**given, delta_softplus=True, cu_seqlens=bounds), warm_ups=0
    )
    graph.replay()
    torch.testing.assert_close(captured, expected)


def test_memory_is_of_inputs_and_outputs() -> None:
    """There is no number for each state of each step: those would be 16 tensors of the size of u, in twice its bytes."""
    given = drawn((2, 1024, 4096, 16, 1), torch.bfloat16)
    given = {name: t.requires_grad_() for name, t in given.items()}
    selective_scan(**given, delta_softplus=True).sum().backward()
    for t in given.values():
        t.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    selective_scan(**given, delta_softplus=True).sum().backward()
    used = torch.cuda.max_memory_allocated() - before
    assert used <= 10 * given["u"].nbytes


def test_every_stream_and_two_threads() -> None:
    given = drawn((2, 64, 256, 16, 1), torch.float32)
    expected = results(given, False, delta_softplus=True)
    found: list[Any] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                found.append(results(given, False, delta_softplus=True))
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    in_threads(work, work)
    assert len(found) == 20
    for each in found:
        for one, other in zip(each, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("training", [False, True], ids=["", "training"])
def test_the_operator_is_as_torch_wants_it(training: bool) -> None:
    given = [t.requires_grad_(training) for t in drawn((2, 8, 40, 4, 1), torch.float32).values()]
    torch.library.opcheck(
        torch.ops.scan_registry.selective_scan.default, (*given, None, True, "auto", training)
    )


def test_a_profiler_and_a_counter_see_the_operator() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    given = drawn((2, 8, 40, 4, 1), torch.float32)
    expected = selective_scan(**given, delta_softplus=True)
    with FlopCounterMode(display=False) as counter:
        torch.testing.assert_close(selective_scan(**given, delta_softplus=True), expected)
    assert counter.get_total_flops() > 0
    with torch.profiler.profile() as profiler:
        torch.testing.assert_close(selective_scan(**given, delta_softplus=True), expected)
    assert "scan_registry::selective_scan" in {event.key for event in profiler.key_averages()}


def test_what_a_policy_forbids_stays_forbidden() -> None:
    given = drawn((1, 8, 40, 4, 1), torch.float32)
    explanation = scan_registry.explain(selective_scan, *[*given.values()][:5])
    assert explanation.steps[0].decision.winner is not None
    with scan_registry.require("ptx"):
        selective_scan(**given)
