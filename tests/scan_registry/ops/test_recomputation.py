"""Gradients of a function that is computed once more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from scan_registry.ops.recomputation import gradients

WEIGHT = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)


class Product(torch.autograd.Function):
    """x · y², whose backward pass computes it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        def recompute(leaves: list[Any], _: bool) -> Any:
            x, y = leaves
            return [(x * y * y, grad)]

        return gradients(ctx.saved_tensors, ctx.needs_input_grad, recompute)


def given() -> Tensor:
    return torch.tensor([0.5, 1.5, -1.0], dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("create_graph", [False, True])
def test_one_argument_may_be_computed_from_another(create_graph: bool) -> None:
    """The gradient of each is its own share, and what passes through the other comes on top of it once."""
    x = given()
    y = x.sin()
    of_x, of_y = torch.autograd.grad(Product.apply(x, y), (x, y), WEIGHT, create_graph=create_graph)
    torch.testing.assert_close(of_y, 2 * WEIGHT * x * y)
    torch.testing.assert_close(of_x, WEIGHT * (y * y + 2 * x * y * x.cos()))


def test_the_same_argument_twice() -> None:
    x = given()
    (result,) = torch.autograd.grad(Product.apply(x, x), x, WEIGHT, create_graph=True)
    torch.testing.assert_close(result, 3 * WEIGHT * x * x)


def test_second_derivatives() -> None:
    def of(x: Tensor) -> Tensor:
        result: Tensor = Product.apply(x, x.sin())
        return result

    assert torch.autograd.gradgradcheck(of, (given(),))


def test_an_argument_without_a_gradient() -> None:
    x, y = given(), given().detach()
    (result,) = torch.autograd.grad(Product.apply(x, y), x, WEIGHT, create_graph=True)
    torch.testing.assert_close(result, WEIGHT * y * y)
