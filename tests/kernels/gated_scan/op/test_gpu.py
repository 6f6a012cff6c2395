"""``gated_scan`` on a GPU, through the public function, against float64.

What is composed of operators stands for a loop over time here: a test without a GPU compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from graphs import recorded
from planning import forget_plans
from threading_calls import in_threads
from torch import Tensor

from scan_registry import gated_scan, hgrn, linear_scan, min_gru, min_lstm, rg_lru
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.gated_scan.op import plans as gated_scan_plans
from scan_registry.ops.launching import PlanCache

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
#: Numbers below this count as 0.
NOTHING = 1e-15
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reverse": {"reverse": True},
    "resets": {"reset": True},
    "packed": {"cu_seqlens": True},
    "all": {"reverse": True, "reset": True, "cu_seqlens": True},
}
#: Batch, channels and time: what every access and every way of cutting time takes.
SHAPES = ((2, 64, 256), (3, 37, 101), (1, 8, 5000), (8, 512, 96), (1, 192, 20000), (4, 1024, 1))


@pytest.fixture(autouse=True)
def _planned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_scan_plans, "plan_cache", PlanCache())
    forget_plans(monkeypatch, "gated_scan")


def drawn(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, turned: bool, options: Mapping[str, Any]
) -> tuple[list[Tensor], dict[str, Any]]:
    """Inputs, parameters and the initial state; and the options with their tensors."""
    torch.manual_seed(sum(shape))
    of, (batch, channels, time) = KINDS[kind], shape

    def sequence() -> Tensor:
        if turned:
            return torch.randn(batch, time, channels, device="cuda").transpose(1, 2).to(dtype)
        return torch.randn(shape, device="cuda").to(dtype)

    inputs = [sequence() for _ in of.inputs]
    if kind == "linear":
        inputs[0] = inputs[0].sigmoid()
    parameters = [torch.rand(channels, device="cuda") * 0.9 for _ in of.parameters]
    how = dict(options)
    between: tuple[int, ...] = ()
    if "reset" in how:
        how["reset"] = torch.rand(batch, time, device="cuda") < 0.05
    if "cu_seqlens" in how:
        ends = [0, 0, time // 3, time // 2, time // 2, time]
        how["cu_seqlens"] = torch.tensor(ends, device="cuda")
        between = (len(ends) - 1,)
    return [*inputs, *parameters, torch.randn(batch, channels, *between, device="cuda")], how


def results(kind: str, tensors: list[Tensor], wide: bool, **how: Any) -> list[Tensor]:
    """Outputs, and gradients of all tensors."""
    leaves = [(t.double() if wide else t).detach().clone().requires_grad_() for t in tensors]
    made = gated_scan(kind, *leaves[:-1], initial_state=leaves[-1], return_final_state=True, **how)
    generator = torch.Generator("cuda").manual_seed(1)
    grads = [
        torch.randn(x.shape, device="cuda", generator=generator).to(dtype).to(x.dtype)
        for x, dtype in zip(made, (tensors[0].dtype, torch.float32), strict=True)
    ]
    return [x.detach() for x in (*made, *torch.autograd.grad(made, leaves, grads))]


def compare(
    kind: str,
    tensors: list[Tensor],
    tolerance: float,
    *,
    of_parameters: float | None = None,
    **how: Any,
) -> list[Tensor]:
    """``of_parameters``: the tolerance of the gradients of channel parameters, where it is another one."""
    found = results(kind, tensors, False, **how)
    how.pop("backend", None)
    inputs, parameters = len(KINDS[kind].inputs), len(KINDS[kind].parameters)
    sums = range(2 + inputs, 2 + inputs + parameters)
    for place, (out, right) in enumerate(
        zip(found, results(kind, tensors, True, **how), strict=True)
    ):
        limit = of_parameters if of_parameters is not None and place in sums else tolerance
        # What is left of a gradient where a gate is shut: torch's own sigmoid has no digit of it right.
        one, other = (torch.where(x.abs() < NOTHING, 0, x) for x in (out, right))
        assert relative_error(one, other) <= limit, place
    return found


@pytest.mark.parametrize("turned", [False, True], ids=["time", "channels"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_layout_and_option_and_the_same_in_every_run(
    kind: str, name: str, dtype: torch.dtype, turned: bool
) -> None:
    for shape in SHAPES:
        tensors, how = drawn(kind, shape, dtype, turned, OPTIONS[name])
        found = compare(kind, tensors, TOLERANCE[dtype], backend="cuda", **how)
        again = results(kind, tensors, False, backend="cuda", **how)
        for one, other in zip(found, again, strict=True):
            assert torch.equal(one, other), shape


@pytest.mark.parametrize("kind", ["min_gru", "rg_lru", "hgrn"])
def test_triton_scans_what_torch_computes(kind: str) -> None:
    for turned in (False, True):
        tensors, _ = drawn(kind, (2, 64, 256), torch.float32, turned, {})
        compare(kind, tensors, 2e-6, backend="triton")


@pytest.mark.parametrize("turned", [False, True], ids=["time", "channels"])
def test_extremes(turned: bool) -> None:
    """Gates that are 0 or 1 to the last bit, and all states starting anew: finite, and right."""
    shape = 2, 64, 512
    for kind, of in KINDS.items():
        if kind == "linear":
            continue
        # The few steps that count are all that the sum for a parameter has, and they may cancel.
        for dtype, tolerance, of_sums in (
            (torch.float32, 2e-6, 5e-5),
            (torch.bfloat16, 1e-2, 5e-2),
        ):
            tensors, _ = drawn(kind, shape, dtype, turned, {})
            for n in range(len(of.inputs)):
                large = torch.where(torch.rand_like(tensors[n]) < 0.5, -50, 50).to(dtype)
                given = [large if m == n else t for m, t in enumerate(tensors)]
                found = compare(kind, given, tolerance, of_parameters=of_sums)
                assert all(t.isfinite().all() for t in found)
            reset = torch.ones(2, 512, dtype=torch.bool, device="cuda")
            found = compare(kind, tensors, TOLERANCE[dtype], reset=reset)
            assert not found[-1].any()  # no state reaches any other


@pytest.mark.parametrize("turned", [False, True], ids=["time", "channels"])
def test_a_gate_of_rg_lru_close_to_one(turned: bool) -> None:
    """a = 1 - 1e-6 and less: the root has no digits left if it is a difference."""
    tensors, _ = drawn("rg_lru", (2, 64, 512), torch.float32, turned, {})
    tensors[1] = tensors[1] - 15
    found = compare("rg_lru", tensors, 5e-6)
    assert all(t.isfinite().all() for t in found)


#: Of each header, the input that tokens are proportional to, or nearly so.
VALUE = {"linear": 1, "min_gru": 1, "min_lstm": 2, "rg_lru": 0, "hgrn": 0}


@pytest.mark.parametrize("turned", [False, True], ids=["time", "channels"])
@pytest.mark.parametrize("time", [512, 509])
@pytest.mark.parametrize("kind", KINDS)
def test_what_starts_anew_forgets_what_is_not_finite(kind: str, time: int, turned: bool) -> None:
    for dtype, bad in product((torch.float32, torch.bfloat16), (torch.inf, torch.nan)):
        tensors, _ = drawn(kind, (2, 64, time), dtype, turned, {})
        *inputs, initial = tensors
        inputs[VALUE[KINDS[kind].source]][:, :, 100], initial[:] = bad, bad
        reset = torch.zeros(2, time, dtype=torch.bool, device="cuda")
        reset[:, [0, 300]] = True
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = gated_scan(kind, *leaves, initial_state=initial, reset=reset, backend="cuda")
        assert isinstance(out, Tensor)
        assert out[..., :100].isfinite().all()
        # Until a product of gates underflows.
        assert not out[..., 100:104].isfinite().any()
        assert out[..., 300:].isfinite().all()
        found = torch.autograd.grad(out[..., 300:].sum(), leaves)
        alone = [t[..., 300:].contiguous() if t.dim() == 3 else t for t in inputs]
        wide = [t.double().requires_grad_() for t in alone]
        right = gated_scan(kind, *wide, reset=reset[:, 300:])
        assert isinstance(right, Tensor)
        assert relative_error(out[..., 300:], right) <= TOLERANCE[dtype]
        # A sum over all steps has a part of those that are not finite.
        count = len(KINDS[kind].inputs)
        for one, other in zip(found[:count], torch.autograd.grad(right.sum(), wide), strict=False):
            assert relative_error(one[..., 300:], other) <= 2 * TOLERANCE[dtype]
        if KINDS[kind].inputs[0] != "gates":
            continue
        assert not found[0][..., 300].any()


@pytest.mark.parametrize("turned", [False, True], ids=["time", "channels"])
def test_a_recurrence_gate_does_not_count_at_a_reset(turned: bool) -> None:
    for dtype, bad in product((torch.float32, torch.bfloat16), (torch.inf, torch.nan)):
        tensors, how = drawn("rg_lru", (2, 64, 512), dtype, turned, {"reset": True})
        expected = results("rg_lru", tensors, False, **how)
        tensors[1] = torch.where(how["reset"].unsqueeze(1), bad, tensors[1])
        found = results("rg_lru", tensors, False, **how)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("turned", [False, True], ids=["time", "channels"])
def test_the_largest_parameters_of_rg_lru(turned: bool) -> None:
    tensors, _ = drawn("rg_lru", (2, 64, 512), torch.float32, turned, {})
    tensors[3] = torch.full_like(tensors[3], 1e38)
    found = compare("rg_lru", tensors, 2e-6)
    assert all(t.isfinite().all() for t in found)


def test_inputs_of_one_projection() -> None:
    """Slices of what one matrix product makes: no copies, and gradients in memory of their own."""
    for dtype, tolerance in TOLERANCE.items():
        x = torch.randn(2, 300, 3 * 256, device="cuda").to(dtype)
        leaves = [t.detach().requires_grad_() for t in x.chunk(3, -1)]
        a_param = torch.rand(256, device="cuda", requires_grad=True)
        out = rg_lru(*leaves, a_param, dim=1)
        wide = [t.detach().double().requires_grad_() for t in (*leaves, a_param)]
        right = rg_lru(*wide, dim=1)
        assert relative_error(out, right) <= tolerance
        found = torch.autograd.grad(out.sum(), [*leaves, a_param])
        for one, other in zip(found, torch.autograd.grad(right.sum(), wide), strict=True):
            assert relative_error(one, other) <= tolerance


def test_linear_scan_with_resets() -> None:
    for turned in (False, True):
        tensors, how = drawn("linear", (2, 64, 512), torch.float32, turned, {"reset": True})
        wide = [t.double() for t in tensors]
        out = linear_scan(*tensors[:2], tensors[2], **how)
        assert relative_error(out, linear_scan(*wide[:2], wide[2], **how)) <= 2e-6


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("shape", "dim", "gates_shape", "gates_dtype", "dtype"),
    [
        ((2, 3, 512, 32), 2, (32,), torch.float32, torch.float32),
        ((2, 4, 16, 512), -1, (16, 1), torch.float32, torch.bfloat16),
        ((512, 2, 64), 0, (512, 2, 64), torch.bfloat16, torch.bfloat16),
        ((8, 600), 1, (8, 600), torch.float32, torch.float32),
        ((5000,), 0, (5000,), torch.float32, torch.float32),
    ],
    ids=str,
)
def test_linear_scan_with_resets_of_any_shape(
    shape: tuple[int, ...], dim: int, gates_shape: Any, gates_dtype: Any, dtype: Any, reverse: bool
) -> None:
    """By a kernel, forwards and backwards, which does not pass on what is not finite."""
    torch.manual_seed(0)
    rank, dim = len(shape), dim % len(shape)
    gates = torch.rand(gates_shape, device="cuda").to(gates_dtype)
    tokens = torch.randn(shape, device="cuda").to(dtype)
    time, batch = shape[dim], shape[1 if dim == 0 else 0] if rank > 1 else None
    reset = torch.rand(*(() if batch is None else (batch,)), time, device="cuda") < 0.02
    initial = torch.randn([n for d, n in enumerate(shape) if d != dim], device="cuda")
    weight = torch.randn(shape, device="cuda").to(dtype)

    def of(wide: bool) -> list[Tensor]:
        leaves = [t.double() if wide else t.clone() for t in (gates, tokens, initial)]
        leaves = [t.requires_grad_() for t in leaves]
        out = linear_scan(
            *leaves, reset=reset, dim=dim, reverse=reverse, backend="auto" if wide else "cuda"
        )
        return [out, *torch.autograd.grad(out, leaves, weight.to(out.dtype))]

    for one, other in zip(of(False), of(True), strict=True):
        assert relative_error(one, other) <= TOLERANCE[dtype]
    tokens.select(dim, time - 1 if reverse else 0).fill_(torch.inf)
    if reset.dim() == 1:
        reset = reset.unsqueeze(0)
    reset[:, time // 2] = True
    out = linear_scan(
        gates, tokens, reset=reset.view(-1) if rank == 1 else reset, dim=dim, reverse=reverse
    )
    assert out.narrow(dim, 0 if reverse else time // 2, time // 2).isfinite().all()


def test_derivatives_of_derivatives() -> None:
    def second(leaves: list[Tensor]) -> tuple[Tensor, ...]:
        out = gated_scan("rg_lru", *leaves[:-1], initial_state=leaves[-1])
        assert isinstance(out, Tensor)
        grads = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum((g**2).sum() for g in grads), leaves)

    tensors, _ = drawn("rg_lru", (2, 8, 40), torch.float32, False, {})
    wide = [t.double().requires_grad_() for t in tensors]
    found = second([t.requires_grad_() for t in tensors])
    for one, other in zip(found, second(wide), strict=True):
        assert relative_error(one, other) <= 1e-4


@pytest.mark.parametrize("turned", [False, True], ids=["time", "channels"])
def test_a_cuda_graph(turned: bool) -> None:
    """Captured after a warm-up, forwards and backwards, and replayed on other values."""
    tensors, how = drawn("rg_lru", (1, 128, 4096), torch.bfloat16, turned, {"reset": True})
    leaves = [t.requires_grad_() for t in tensors]

    def step() -> list[Tensor]:
        out = gated_scan("rg_lru", *leaves[:-1], initial_state=leaves[-1], **how)
        assert isinstance(out, Tensor)
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    graph, captured = recorded(step, warm_ups=3)
    with torch.no_grad():
        for leaf in leaves[:3]:
            leaf.copy_(torch.randn_like(leaf))
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    for one, other in zip(captured, step(), strict=True):
        assert torch.equal(one, other)


def test_two_streams_and_threads() -> None:
    """Each thread on a stream of its own, with shapes that are cut into tiles whose order a counter gives."""
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for time in (5000, 20000):
                    tensors, _ = drawn("hgrn", (1, 8, time + seed), torch.float32, bool(seed), {})
                    first = results("hgrn", tensors, False)
                    for _ in range(20):
                        for one, other in zip(first, results("hgrn", tensors, False), strict=True):
                            assert torch.equal(one, other)
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            failures.append(error)

    in_threads(*(partial(work, seed) for seed in range(2)))
    assert not failures


def test_what_torch_compiles() -> None:
    """One graph, whose results are those of eager calls."""

    def function(forget: Tensor, input: Tensor, hidden: Tensor) -> Tensor:
        made = min_lstm(forget, input, hidden, dim=1)
        assert isinstance(made, Tensor)
        return made * 2

    leaves = [torch.randn(2, 300, 64, device="cuda", requires_grad=True) for _ in range(3)]
    compiled = torch.compile(function, fullgraph=True)
    out, eager = compiled(*leaves), function(*leaves)
    assert torch.equal(out, eager)
    both = (torch.autograd.grad(x.sum(), leaves) for x in (out, eager))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other)


def test_memory_for_a_step_of_training() -> None:
    """Inputs and states are kept, and the gradients of inputs are made: nothing in float32."""
    x, forget = (
        torch.randn(4, 1024, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2)
    )
    bound = torch.full((1024,), 0.1, device="cuda", requires_grad=True)
    grad = torch.randn_like(x)
    hgrn(x, forget, bound, dim=1).backward(grad)
    x.grad = forget.grad = bound.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    hgrn(x, forget, bound, dim=1).backward(grad)
    size = x.numel() * x.element_size()
    assert torch.cuda.max_memory_allocated() - before < 3.3 * size


def test_more_than_2_to_the_31_elements() -> None:
    """Offsets are of 64 bits."""
    shape = 1, 2**31 // 4096 + 64, 4096
    free, _ = torch.cuda.mem_get_info()
    if free < 10 * 2**31 * 2:
        pytest.skip("the GPU has not enough memory free")
    gate = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(1, 1, 4096, device="cuda").to(torch.bfloat16).expand(shape).contiguous()
    out = min_gru(gate, hidden, dim=1)
    last = min_gru(gate[:, -64:].clone(), hidden[:, -64:].clone(), dim=1)
    assert relative_error(out[:, -1], last[:, -1].double()) <= 1e-2
