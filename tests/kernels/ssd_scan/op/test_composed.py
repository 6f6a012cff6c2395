"""``ssd_scan`` in its chunked form against a loop over time in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from ssd_problems import NAMES, draw, drawn_problem, gradients_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scan_registry import ssd_scan
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.ssd_scan import reference
from scan_registry.kernels.ssd_scan.op import composed
from scan_registry.kernels.ssd_scan.op.arguments import Arguments, Options

run = partial(ssd_scan, return_final_state=True)


def agree(problem: dict[str, Any], chunk_size: int | None = None) -> None:
    """The results and the gradients."""
    results, grads = gradients_of(partial(run, chunk_size=chunk_size), problem)
    expected, right = gradients_of(reference.forward, problem)
    torch.testing.assert_close(results, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(grads, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_drawn_problems(seed: int) -> None:
    agree(drawn_problem(seed), (None, None, 1, 7, 16, 100)[seed % 6])


@pytest.mark.parametrize("time", [1, 2, 63, 64, 65, 127, 128, 129, 300])
def test_lengths_about_whole_chunks(time: int) -> None:
    agree(draw(1, time))


@pytest.mark.parametrize(
    "bounds", [(0, 64, 64, 128), (0, 0, 65, 128), (0, 1, 2, 128), (0, 128, 128, 128)]
)
def test_bounds_about_whole_chunks(bounds: tuple[int, ...]) -> None:
    problem = draw(2, 128, sequences=3)
    agree({**problem, "cu_seqlens": torch.tensor(bounds)})


def test_packed_sequences_are_those_alone() -> None:
    lengths = [0, 1, 70, 0, 64, 5, 0]
    offsets = [sum(lengths[:k]) for k in range(len(lengths) + 1)]
    problem = draw(2, sum(lengths), sequences=len(lengths))
    out, final = run(**problem, cu_seqlens=torch.tensor(offsets))
    for k, (begin, length) in enumerate(zip(offsets, lengths, strict=False)):
        alone = {
            name: t[:, begin : begin + length] if name in ("x", "dt", "B", "C", "z") else t
            for name, t in problem.items()
        }
        alone["initial_state"] = problem["initial_state"][:, k]
        one, last = run(**alone)
        torch.testing.assert_close(out[:, begin : begin + length], one, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(final[:, k], last, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("initial", [True, False])
def test_outputs_do_not_depend_on_whether_final_states_are_asked_for(initial: bool) -> None:
    lengths = [1, 0, 3, 40, 1, 1, 17, 0, 16, 1]
    problem = draw(2, sum(lengths), sequences=len(lengths))
    if not initial:
        del problem["initial_state"]
    problem["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    agree(problem)
    out, _ = run(**problem)
    torch.testing.assert_close(ssd_scan(**problem), out, rtol=0, atol=0)


class _Largest(TorchDispatchMode):
    """Remembers how many numbers the largest tensor holds that is computed."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, (tuple, list)) else (result,)
        sizes = (t.untyped_storage().nbytes() // 4 for t in results if isinstance(t, Tensor))
        self.numbers = max(self.numbers, *sizes, 0)
        return result


def test_memory_follows_steps_where_sequences_are_short() -> None:
    """Nothing is as large as a state, or a chunk of 64 steps, of each sequence would be."""
    time, size, states = 256, 64, 64
    x, B, C = (torch.randn(1, time, 1, n) for n in (size, states, states))
    dt, A, bounds = torch.rand(1, time, 1), -torch.ones(1), torch.arange(time + 1)
    arguments = Arguments(x, dt, A, B, C, None, None, None, None, None, bounds)
    with torch.no_grad(), _Largest() as largest:
        composed.forward(arguments, Options())
        composed.backward(arguments, Options(), x, None, (True,) * 5 + (False,) * 4)
    assert 10 * time * size < largest.numbers < time * size * 64 // 3


def test_numbered_sequences_are_those_alone() -> None:
    """Numbers may come again; only the first sequence has the initial state."""
    lengths, numbers = [5, 70, 1, 64, 30], [3, 0, 3, -1, 0]
    problem = draw(1, sum(lengths))
    seq_idx = torch.tensor([numbers]).repeat_interleave(torch.tensor(lengths), 1)
    out, final = run(**problem, seq_idx=seq_idx)
    begin = 0
    for number, length in enumerate(lengths):
        alone = {
            name: t[:, begin : begin + length] if name in ("x", "dt", "B", "C", "z") else t
            for name, t in problem.items()
        }
        alone["initial_state"] = problem["initial_state"] if number == 0 else None
        one, last = run(**alone)
        torch.testing.assert_close(out[:, begin : begin + length], one, rtol=1e-12, atol=1e-12)
        begin += length
    torch.testing.assert_close(final, last, rtol=1e-12, atol=1e-12)


def test_numbers_that_change_between_packed_sequences_keep_initial_states() -> None:
    problem = draw(2, 20, sequences=2)
    bounds, halves = torch.tensor([0, 9, 20]), (torch.arange(20) >= 9).int().repeat(2, 1)
    packed = run(**problem, cu_seqlens=bounds)
    both = run(**problem, cu_seqlens=bounds, seq_idx=halves)
    torch.testing.assert_close(both, packed, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(6))
def test_narrow_dtypes(dtype: torch.dtype, seed: int) -> None:
    problem = draw(2, 200, 4, 8, 2, 16, dtype=dtype, seed=seed)
    del problem["z"]  # what it multiplies is rounded first
    (out, final), grads = gradients_of(partial(run, dt_softplus=True), problem)
    exact = {name: t.double() for name, t in problem.items()}
    (right, right_final), right_grads = gradients_of(
        partial(reference.forward, dt_softplus=True), exact
    )
    most = {torch.float32: 5e-7, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    assert (out.dtype, final.dtype) == (dtype, torch.float32)
    assert relative_error(out, right) < most
    assert relative_error(final, right_final) < 5e-7
    names = [name for name in NAMES if name in problem]
    for name, grad, exact_grad in zip(names, grads, right_grads, strict=True):
        assert grad.dtype == problem[name].dtype
        assert relative_error(grad, exact_grad) < max(most, 2e-6), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_in_narrow_dtypes(dtype: torch.dtype) -> None:
    """Two roundings: before the gate and after it."""
    problem = draw(2, 200, 4, 8, 2, 16, dtype=dtype, wide_D=True)
    (out, _), grads = gradients_of(run, problem)
    exact = {name: t.double() for name, t in problem.items()}
    (right, _), right_grads = gradients_of(reference.forward, exact)
    most = 2 * torch.finfo(dtype).eps / 3
    for name, result, wanted in zip(("out", *NAMES), (out, *grads), (right, *right_grads), strict=True):  # fmt: skip
        if name in ("out", "x", "B", "C", "z"):
            assert result.dtype == dtype
            assert relative_error(result, wanted) < most, name


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 60.0, "mixed"])
def test_decays_of_any_size(scale: Any) -> None:
    """As exact in float32 as a loop in float32, whatever else decays in a chunk; and nothing overflows."""
    problem = draw(2, 300, dtype=torch.float32)
    shape = problem["dt"].shape
    exponents = (
        torch.rand(shape) if scale != "mixed" else torch.empty(shape).uniform_(-6, 1.78).pow_(1)
    )
    sizes = exponents * scale if scale != "mixed" else 10**exponents
    problem |= {"A": -torch.ones(4), "dt": sizes, "dt_bias": None, "z": None}
    problem = {name: t for name, t in problem.items() if t is not None}
    (out, final), grads = gradients_of(run, problem)
    exact = {name: t.double() for name, t in problem.items()}
    (right, right_final), right_grads = gradients_of(reference.forward, exact)
    assert relative_error(out, right) < 1e-6
    assert relative_error(final, right_final) < 1e-6
    for grad, exact_grad in zip(grads, right_grads, strict=True):
        assert torch.isfinite(grad).all()
        assert relative_error(grad, exact_grad) < 5e-6


@pytest.mark.parametrize("name", ["x", "dt", "B", "C", "z", "initial_state"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row_and_its_sequence(name: str, value: float) -> None:
    problem = draw(2, 90, sequences=3)
    problem["cu_seqlens"] = bounds = torch.tensor([0, 30, 60, 90])
    (clean, clean_final), clean_grads = gradients_of(run, problem)
    spoiled = {k: t.clone() for k, t in problem.items()}
    spoiled[name][0, 1 if name == "initial_state" else 40] = value
    (out, final), grads = gradients_of(run, spoiled)
    assert not torch.isfinite(out[0, 30:60]).all()
    torch.testing.assert_close(out[1], clean[1], rtol=0, atol=0)
    torch.testing.assert_close(final[1], clean_final[1], rtol=0, atol=0)
    for begin, end in ((0, 30), (60, 90)):
        torch.testing.assert_close(out[0, begin:end], clean[0, begin:end], rtol=0, atol=0)
    torch.testing.assert_close(final[0, ::2], clean_final[0, ::2], rtol=0, atol=0)
    for key, grad, right in zip(NAMES, grads, clean_grads, strict=True):
        if key in ("x", "dt", "B", "C", "z", "initial_state"):
            torch.testing.assert_close(grad[1], right[1], rtol=0, atol=0)
    assert bounds.tolist() == [0, 30, 60, 90]


def small(**options: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """A function of tensors, and small tensors that require gradients."""
    problem = draw(1, 5, 2, 2, 1, 2, sequences=3 if "cu_seqlens" in options else 0)

    def function(*tensors: Tensor) -> Any:
        return run(**dict(zip(NAMES, tensors, strict=True)), chunk_size=2, **options)

    return function, tuple(problem[name].requires_grad_() for name in NAMES)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"dt_softplus": True, "seq_idx": torch.tensor([[0, 0, 1, 1, 1]])},
            marks=pytest.mark.thorough,
        ),
        {
            "dt_softplus": True,
            "dt_limit": (0.3, 1.2),
            "cu_seqlens": torch.tensor([0, 3, 3, 5]),
        },
    ],
)
def test_derivatives_twice(options: dict[str, Any], thorough: bool) -> None:
    """The second ones along a few directions, or all of them."""
    function, tensors = small(**options)
    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors, fast_mode=not thorough)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)], ids=["batch", "time"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_nothing(shape: tuple[int, int], packed: bool) -> None:
    problem = draw(*shape, sequences=2 if packed else 0, dtype=torch.float32)
    if packed:
        problem["cu_seqlens"] = torch.tensor([0, shape[1] // 2, shape[1]])
    (out, final), grads = gradients_of(run, problem)
    assert out.shape == problem["x"].shape
    if not shape[1]:
        torch.testing.assert_close(final, problem["initial_state"])
    assert [g.shape for g in grads] == [problem[name].shape for name in NAMES]


def test_strides_do_not_matter() -> None:
    problem = draw(2, 70)
    expected = run(**problem)
    strange = {}
    for name, t in problem.items():
        strange[name] = torch.stack([t, t], -1)[..., 0] if t.dim() < 3 else t.mT.contiguous().mT
    torch.testing.assert_close(run(**strange), expected, rtol=1e-12, atol=1e-12)


def test_autocast_does_not_narrow_the_products() -> None:
    problem = draw(2, 70, dtype=torch.float32)
    expected = gradients_of(run, problem)
    with torch.autocast("cpu", torch.bfloat16):
        results = gradients_of(run, problem)
    torch.testing.assert_close(results, expected, rtol=0, atol=0)
