"""Derivatives of any order and mode, and what ``torch.func`` makes of an operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from .calls import Call, weights
from .operator import Operator


def one_by_one(
    function: Any, values: tuple[Tensor, ...], dims: tuple[int | None, ...]
) -> tuple[Tensor, ...]:
    """What ``vmap`` is to give, for three of the mapped tensors."""
    pairs = [*zip(values, dims, strict=True)]
    singles = [function(*(v[k] if d == 0 else v for v, d in pairs)) for k in range(3)]
    return tuple(torch.stack(x) for x in zip(*singles, strict=True))


class Derivatives(Operator):
    def of_tensors(self, call: Call, function: Any = None) -> Any:
        """The operator as a function of the tensors alone."""

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            named = dict(zip(call.tensors, tensors, strict=True))
            outputs: tuple[Tensor, ...] = (function or self.run)(**named, **call.others)
            return outputs

        return run

    def loss(self, call: Call, function: Any = None) -> Any:
        """A number that depends on all outputs, and not linearly."""

        def total(*tensors: Tensor) -> Tensor:
            outputs = self.of_tensors(call, function)(*tensors)
            return torch.stack([out.abs().square().sin().sum() for out in outputs]).sum()

        return total

    def test_derivatives_by_finite_differences(self, few: str) -> None:
        call = self.draw(few, self.small, self.exact).leaves()
        tensors, how = tuple(call.tensors.values()), {"fast_mode": True}
        assert gradcheck(
            self.of_tensors(call),
            tensors,
            check_forward_ad=self.forward_ad,
            check_batched_grad=True,
            **how,
        )
        assert gradgradcheck(self.of_tensors(call), tensors, **how)

    def test_second_derivatives(self, case: str) -> None:
        """Those of the reference, through gradients that were computed to be differentiated."""
        call = self.draw(case, self.small, self.exact)
        second = []
        for function in (self.run, self.right):
            tensors = [*call.leaves().tensors.values()]
            loss = self.loss(call, function)(*tensors)
            first = torch.autograd.grad(loss, tensors, create_graph=True, materialize_grads=True)
            total = torch.stack([g.abs().square().sin().sum() for g in first]).sum()
            second.append((first, torch.autograd.grad(total, tensors, materialize_grads=True)))
        torch.testing.assert_close(second[0], second[1], rtol=1e-6, atol=1e-8)

    def test_functional_transforms(self, case: str) -> None:
        """grad, jvp, and jacrev or a Hessian in one tensor, are those of the reference."""
        call = self.draw(case, self.small, self.exact)
        tensors = tuple(call.tensors.values())
        everything = tuple(range(len(tensors)))
        ours, theirs = self.loss(call), self.loss(call, self.right)
        leaves = [*call.leaves().tensors.values()]
        expected = torch.autograd.grad(theirs(*leaves), leaves, materialize_grads=True)
        torch.testing.assert_close(torch.func.grad(ours, everything)(*tensors), expected)
        tangents = tuple(weights(tensors))
        if self.forward_ad:
            outputs = (
                torch.func.jvp(self.of_tensors(call, function), tensors, tangents)
                for function in (self.run, self.right)
            )
            torch.testing.assert_close(*outputs)

            def along(function: Any) -> Any:
                first = torch.func.grad(function, everything)
                return torch.func.jvp(first, tensors, tangents)[1]

            torch.testing.assert_close(along(ours), along(theirs), rtol=1e-6, atol=1e-8)

    def test_vmap(self, few: str) -> None:
        """Over each argument, and over all; values and gradients are those of one call after the other."""
        call = self.draw(few, self.small, self.exact)
        arguments = self.mapped(call)
        several = {
            n: torch.stack([self.another(n, t, k) for k in range(3)]) for n, t in arguments.items()
        }
        of_tensors = tuple(call.tensors)

        def outputs(*values: Any) -> tuple[Tensor, ...]:
            return self.run(**{**call.others, **dict(zip(arguments, values, strict=True))})

        def total(*values: Any) -> Tensor:
            return torch.stack([x.abs().square().sum() for x in outputs(*values)]).sum()

        places = tuple(n for n, name in enumerate(arguments) if name in of_tensors)
        for mapped in [{n} for n in arguments] + [set(arguments)]:
            dims = tuple(0 if n in mapped else None for n in arguments)
            values = tuple(several[n] if n in mapped else t for n, t in arguments.items())
            for function in (outputs, torch.func.grad(total, places)):
                by_vmap = torch.func.vmap(function, in_dims=dims)(*values)
                torch.testing.assert_close(tuple(by_vmap), one_by_one(function, values, dims))

    def mapped(self, call: Any) -> dict[str, Tensor]:
        """The tensors that ``vmap`` may map over."""
        accepted = (*call.tensors, *self.maps)
        every = call.arguments.items()
        return {n: t for n, t in every if n in accepted and isinstance(t, Tensor)}

    def another(self, name: str, value: Tensor, number: int) -> Tensor:
        """Of the same kind: bounds of other sequences, other resets, or other numbers."""
        if name == "cu_seqlens":
            return value[-1] - value.flip(0) if number == 1 else value
        if value.dtype == torch.bool:
            return value.roll(number, -1)
        if not value.is_floating_point() and not value.is_complex():
            return value
        return value * (1 - number / 8)
