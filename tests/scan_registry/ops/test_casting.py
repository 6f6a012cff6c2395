"""Calls whose small tensors are in a narrow dtype find their plans as others do: they are cast, and checked once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from scan_registry.kernels.selective_scan.op import autograd as selective_scan_autograd
from scan_registry.kernels.selective_scan.op import function as selective_scan_function
from scan_registry.kernels.ssd_scan.op import autograd as ssd_scan_autograd
from scan_registry.kernels.ssd_scan.op import function as ssd_scan_function
from scan_registry.ops.call import casting

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, TIME, CHANNELS, STATES = 2, 7, 4, 3
NARROW = torch.bfloat16


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape).to(NARROW).requires_grad_()


def selective(A: Tensor, D: Tensor, bias: Tensor) -> Tensor:
    u, delta, z = (drawn(BATCH, TIME, CHANNELS).mT for _ in range(3))
    B, C = (drawn(BATCH, TIME, STATES).mT for _ in range(2))
    A = -A.abs().unsqueeze(1).expand(CHANNELS, STATES).contiguous()
    out: Any = selective_scan_function.selective_scan(u, delta, A, B, C, D, z, bias, True)
    return out


def ssd(A: Tensor, D: Tensor, bias: Tensor) -> Tensor:
    x, dt = drawn(BATCH, TIME, CHANNELS, 2), drawn(BATCH, TIME, CHANNELS)
    B, C = (drawn(BATCH, TIME, 1, STATES) for _ in range(2))
    out: Any = ssd_scan_function.ssd_scan(
        *(x, dt, -A.abs(), B, C, D), dt_bias=bias, dt_softplus=True
    )
    return out


CALLS: dict[str, tuple[Callable[..., Tensor], tuple[Any, Any]]] = {
    "selective_scan": (selective, (selective_scan_autograd, selective_scan_function)),
    "ssd_scan": (ssd, (ssd_scan_autograd, ssd_scan_function)),
}


def results(name: str, dtype: torch.dtype) -> list[Tensor]:
    """The output, and the gradients of three small tensors of a dtype, whose values are those of the narrow one."""
    torch.manual_seed(0)
    small = [torch.randn(CHANNELS).to(NARROW).to(dtype).requires_grad_() for _ in range(3)]
    out = CALLS[name][0](*small)
    gradients = torch.autograd.grad(out, small, torch.ones_like(out))
    assert [gradient.dtype for gradient in gradients] == [dtype] * 3
    return [out, *gradients]


@pytest.mark.parametrize("name", CALLS)
def test_narrow_parameters_are_checked_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = results(name, torch.float32)
    first = results(name, NARROW)

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("checked again")

    for module in CALLS[name][1]:
        monkeypatch.setattr(module, "normalised", refuse)
    for one, again, wide in zip(first, results(name, NARROW), expected, strict=True):
        assert torch.equal(one, again)
        # Behind the scan, gradients are rounded to the narrow dtype, and the one of A is summed in it.
        torch.testing.assert_close(one, wide.to(NARROW), rtol=1e-2, atol=1e-2)
    assert torch.equal(first[0], expected[0])


@pytest.mark.parametrize("name", CALLS)
def test_a_mix_of_dtypes_that_is_not_accepted_is_refused(name: str) -> None:
    small = [torch.randn(CHANNELS, dtype=torch.float64) for _ in range(3)]
    for _ in range(2):
        with pytest.raises(TypeError, match="float64"):
            CALLS[name][0](*small)


def test_integers_are_left_to_the_checked_call_under_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, factor = torch.tensor([0, 7]), torch.ones(2, dtype=NARROW)
    for raw in (wide, factor):
        taken = raw.to(torch.int32 if raw is wide else torch.float32)
        plan = casting(lambda tensors, options: tensors, [raw], [taken], ())
        assert plan is not None
        for value, checked in (("0", False), ("1", True), ("0", False)):
            monkeypatch.setenv("SCAN_REGISTRY_DEBUG", value)
            if checked and raw is wide:
                assert plan(raw) is None
            else:
                assert plan(raw)[0].dtype == taken.dtype
