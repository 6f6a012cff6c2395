"""``selective_scan`` composed of scans and torch's operators, piece by piece, against a loop over time in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import scan_registry
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.selective_scan import reference
from scan_registry.kernels.selective_scan.op import composed
from scan_registry.kernels.selective_scan.op.arguments import Options, normalised

WIDE, COMPLEX = torch.float64, torch.complex128
TIME = 50
BOUNDS = torch.tensor([0, 0, 7, 16, 17, 49, 49, TIME, TIME])


def drawn(kind: str, B: str = "BGNL", C: str = "BNL", packed: bool = False) -> list[Tensor]:
    """u, delta, A, B, C, D, z, delta_bias, initial_state; real or complex."""
    torch.manual_seed(len(kind + B + C))
    complex_numbers = kind == "complex"
    dtype, length = (COMPLEX, 2 * TIME) if complex_numbers else (WIDE, TIME)

    def projection(how: str) -> Tensor:
        sizes = {"DN": (6, 3), "BNL": (2, 3, length), "BGNL": (2, 2, 3, length)}[how]
        return torch.randn(sizes, dtype=dtype if how == "DN" else WIDE)

    u, delta, z = torch.randn(3, 2, 6, TIME, dtype=WIDE)
    D, bias = torch.randn(2, 6, dtype=WIDE)
    between = (len(BOUNDS) - 1,) if packed else ()
    initial = torch.randn(2, *between, 6, 3, dtype=dtype)
    A = -torch.rand(6, 3, dtype=dtype)
    return [u, delta, A, projection(B), projection(C), D, z, bias, initial]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 steps, so that 50 are three and a shorter one."""
    monkeypatch.setattr(composed, "_PIECE", {False: 1, True: 1})


FORMS = [
    ("real", "BGNL", "BNL", False),
    ("real", "DN", "BGNL", False),
    ("real", "BNL", "DN", True),
    ("real", "DN", "DN", False),
    ("complex", "BGNL", "BNL", True),
    ("complex", "DN", "BNL", False),
    ("complex", "DN", "DN", True),
]


@pytest.mark.parametrize(("kind", "B", "C", "packed"), FORMS)
@pytest.mark.parametrize("final", [False, True], ids=["", "final"])
def test_it_is_a_loop_and_so_are_its_gradients(
    kind: str, B: str, C: str, packed: bool, final: bool
) -> None:
    tensors = [t.requires_grad_() for t in drawn(kind, B, C, packed)]
    bounds = BOUNDS if packed else None
    out, last = scan_registry.selective_scan(
        *tensors[:8], True, tensors[8], cu_seqlens=bounds, return_final_state=True
    )
    expected = reference.forward(*tensors[:8], True, tensors[8], bounds)
    torch.testing.assert_close((out, last), expected, rtol=1e-11, atol=1e-11)
    made, wanted = (out, last)[: 1 + final], expected[: 1 + final]
    grads = [torch.randn_like(x) for x in made]
    found = torch.autograd.grad(made, tensors, grads, allow_unused=True)
    right = torch.autograd.grad(wanted, tensors, grads, allow_unused=True)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("kind", "B", "C", "packed"), FORMS)
def test_only_what_is_wanted(kind: str, B: str, C: str, packed: bool) -> None:
    tensors = drawn(kind, B, C, packed)
    for place in range(len(tensors)):
        leaf = tensors[place].clone().requires_grad_()
        given = [*tensors[:place], leaf, *tensors[place + 1 :]]
        bounds = BOUNDS if packed else None
        out = scan_registry.selective_scan(*given[:8], False, given[8], cu_seqlens=bounds)
        expected, _ = reference.forward(*given[:8], False, given[8], bounds)
        (found,) = torch.autograd.grad(out.sum(), leaf)
        (right,) = torch.autograd.grad(expected.sum(), leaf)
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)


def test_the_final_state_alone() -> None:
    tensors = drawn("real")
    tensors[0].requires_grad_()
    _, last = scan_registry.selective_scan(*tensors[:5], return_final_state=True)
    _, expected = reference.forward(*tensors[:5])
    (found,) = torch.autograd.grad(last.sum(), tensors[0])
    (right,) = torch.autograd.grad(expected.sum(), tensors[0])
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("kind", "B", "C", "packed"), FORMS)
def test_derivatives_of_derivatives(kind: str, B: str, C: str, packed: bool) -> None:
    tensors = [t.requires_grad_() for t in drawn(kind, B, C, packed)]
    bounds = BOUNDS if packed else None

    def second(made: Any) -> tuple[Tensor, ...]:
        grads = torch.autograd.grad(made[0].sin().sum(), tensors, create_graph=True)
        total = sum((g.abs() ** 2).sum() for g in grads)
        return torch.autograd.grad(total, tensors)

    kwargs: Any = {"cu_seqlens": bounds, "return_final_state": True}
    found = second(scan_registry.selective_scan(*tensors[:8], True, tensors[8], **kwargs))
    right = second(reference.forward(*tensors[:8], True, tensors[8], bounds))
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_narrow_numbers_are_computed_in_float32() -> None:
    wide = drawn("real", "DN", "BNL")
    narrow = [t.float() for t in wide]
    out, _ = scan_registry.selective_scan(*narrow[:8], True, narrow[8], return_final_state=True)
    expected, _ = reference.forward(*[t.double() for t in narrow[:8]], True, narrow[8].double())
    assert relative_error(out, expected) < 2e-6
    for place in (0, 1, 3, 4, 6):
        narrow[place] = narrow[place].bfloat16()
    out = scan_registry.selective_scan(*narrow[:8], True, narrow[8])
    expected, _ = reference.forward(*[t.double() for t in narrow[:8]], True, narrow[8].double())
    assert out.dtype == torch.bfloat16
    assert relative_error(out, expected) < 1e-2


@pytest.mark.parametrize("place", [0, 1, 2, 8], ids=["u", "delta", "A", "initial"])
@pytest.mark.parametrize(("kind", "B", "C", "packed"), [form for form in FORMS if form[3]])
def test_packed_sequences_start_anew_whatever_was_before(
    kind: str, B: str, C: str, packed: bool, place: int
) -> None:
    """What is not finite stays in its sequence, which is steps 17 to 48 and goes through three pieces."""
    tensors = drawn(kind, B, C, packed)
    if place == 2:
        tensors[2] += 1000  # so that the state overflows, but not by one step
        tensors[1].zero_()[..., 17:49] = 0.5
        tensors[7].zero_()
    elif place == 8:
        tensors[8][:, 4] = torch.inf
    else:
        tensors[place][..., 20] = torch.nan
    leaves = [t.clone().requires_grad_() for t in tensors]
    *before, initial = leaves
    out, last = scan_registry.selective_scan(
        *before, False, initial, cu_seqlens=BOUNDS, return_final_state=True
    )
    assert not out[..., 48].isfinite().any()
    assert out[..., [*range(17), 49]].isfinite().all()
    assert last[:, [*range(4), 5, 6, 7]].isfinite().all()
    (found,) = torch.autograd.grad(out[..., 49].sum(), leaves[0])
    assert found[..., 49].isfinite().all()


def test_memory_is_of_one_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of the backward pass has all of the states."""
    largest = 0
    scan = composed.linear_scan

    def watched(gates: Tensor, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal largest
        largest = max(largest, tokens.shape[-1])
        return scan(gates, tokens, *args, **kwargs)

    monkeypatch.setattr(composed, "linear_scan", watched)
    tensors = [t.requires_grad_() for t in drawn("real")]
    scan_registry.selective_scan(*tensors[:8], True).sum().backward()
    assert largest == 16


def test_the_reference_is_asked_for_in_scans_too(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = []
    scan = composed.linear_scan

    def watched(*args: Any, backend: str, **kwargs: Any) -> Any:
        backends.append(backend)
        return scan(*args, backend=backend, **kwargs)

    monkeypatch.setattr(composed, "linear_scan", watched)
    tensors = drawn("real")
    for backend in ("auto", "reference"):
        given = normalised(*tensors[:5], None, None, None, None, None, False, backend)
        composed.forward(given, Options(False, backend))
    assert backends == ["auto"] * 4 + ["reference"] * 4
