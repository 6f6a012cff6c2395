"""``RMSNormGated``: mamba_ssm's norm with a gate, on either side of it, in groups."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from scan_registry import nn

FEATURES = 12


def normed(
    x: Tensor, weight: Tensor, z: Tensor | None, eps: float, size: int, first: bool
) -> Tensor:
    """Group by group."""
    if z is not None and not first:
        x = x * silu(z)
    groups = [
        part / (part.square().mean(-1, keepdim=True) + eps).sqrt() for part in x.split(size, -1)
    ]
    y = torch.cat(groups, -1) * weight
    return y * silu(z) if z is not None and first else y


def drawn(*shape: int) -> tuple[Tensor, Tensor]:
    x, z = torch.randn(*shape, FEATURES).double(), torch.randn(*shape, FEATURES).double()
    return x.requires_grad_(), z.requires_grad_()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("size", [None, 1, 4, FEATURES])
def test_it_is_a_norm_of_groups(size: int | None, gated: bool, first: bool) -> None:
    norm = nn.RMSNormGated(FEATURES, 1e-2, size, first, dtype=torch.float64)
    norm.weight.data = torch.randn(FEATURES).double()
    x, z = drawn(2, 5)
    gate = z if gated else None
    found, expected = norm(x, gate), normed(x, norm.weight, gate, 1e-2, size or FEATURES, first)
    torch.testing.assert_close(found, expected)
    leaves, weight = [x, norm.weight, *([z] if gated else [])], torch.randn_like(found)
    torch.testing.assert_close(
        torch.autograd.grad((found * weight).sum(), leaves),
        torch.autograd.grad((expected * weight).sum(), leaves),
    )


@pytest.mark.parametrize("first", [True, False])
def test_its_derivatives(first: bool) -> None:
    norm = nn.RMSNormGated(FEATURES, group_size=3, norm_before_gate=first, dtype=torch.float64)
    assert torch.autograd.gradcheck(norm, drawn(2))
    assert torch.autograd.gradgradcheck(norm, drawn(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    norm, (x, z) = nn.RMSNormGated(FEATURES, norm_before_gate=False), drawn(3, 7)
    x, z = (300 * x).to(dtype), z.to(dtype)  # whose squares float16 does not hold
    found = norm(x, z)
    assert found.dtype == dtype
    expected = normed(x.float(), norm.weight, z.float(), 1e-5, FEATURES, False)
    assert torch.equal(found, norm(x.float(), z.float()).to(dtype))
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=0)


def test_shapes_without_elements_and_without_rows() -> None:
    norm = nn.RMSNormGated(FEATURES, group_size=4)
    assert norm(torch.zeros(0, 3, FEATURES)).shape == (0, 3, FEATURES)
    assert norm(torch.zeros(FEATURES), torch.zeros(FEATURES)).shape == (FEATURES,)


def test_its_constructor_and_its_parameter_are_mamba_ssms() -> None:
    defaults = [(p.name, p.default) for p in inspect.signature(nn.RMSNormGated).parameters.values()]
    assert defaults == [
        ("hidden_size", inspect.Parameter.empty),
        ("eps", 1e-5),
        ("group_size", None),
        ("norm_before_gate", True),
        ("device", None),
        ("dtype", None),
    ]
    norm = nn.RMSNormGated(4, device="cpu", dtype=torch.bfloat16)
    assert {name: value.dtype for name, value in norm.state_dict().items()} == {
        "weight": torch.bfloat16
    }
    assert norm.bias is None
    norm.weight.data.zero_()
    norm.reset_parameters()
    assert bool((norm.weight == 1).all())
    said = nn.RMSNormGated(4, group_size=2, norm_before_gate=False).extra_repr()
    assert said == "4, eps=1e-05, group_size=2, norm_before_gate=False"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"hidden_size": 4.0}, TypeError, "hidden_size should be of type int, got: float"),
        ({"hidden_size": 0}, ValueError, "hidden_size must be greater than zero"),
        ({"group_size": -1}, ValueError, "group_size must be greater than zero"),
        ({"group_size": 3}, ValueError, "group_size should divide hidden_size, got: 3 and 4"),
    ],
)
def test_constructors_refuse(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        nn.RMSNormGated(**{"hidden_size": 4} | options)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((torch.ones(2, 4, dtype=torch.int64),), {}, TypeError, "x has dtype torch.int64"),
        ((torch.ones(2, 4, dtype=torch.complex64),), {}, TypeError, "x has dtype torch.complex64"),
        ((None,), {}, TypeError, "x is a NoneType"),
        ((torch.ones(2, 4), 1), {}, TypeError, "z is a int"),
        ((torch.ones(2, 4), torch.ones(2, 4, device="meta")), {}, ValueError, "z is on meta"),
        ((torch.ones(2, 4),), {"eps": "a"}, TypeError, "eps is a str"),
        ((torch.ones(2, 4),), {"eps": -1.0}, ValueError, "eps is -1.0"),
        ((torch.ones(2, 4),), {"norm_before_gate": "no"}, TypeError, "norm_before_gate is 'no'"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        nn.RMSNormGated(4, **options)(*arguments)


def test_shapes_that_do_not_fit() -> None:
    norm, x = nn.RMSNormGated(4), torch.zeros(2, 4)
    with pytest.raises(
        ValueError, match=r"z has shape \(4,\); for x of shape \(2, 4\) it must be \(2, 4\)"
    ):
        norm(x, x[0])
    with pytest.raises(ValueError, match=r"Expected x of size \(..., 4\), got \(2, 3\)"):
        norm(x[:, 1:])
