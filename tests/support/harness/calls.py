"""One call of an operator: its arguments, and its results with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from scan_registry.kernels.cases import relative_error

Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Call:
    """Arguments by name: the tensors that have gradients, and all others."""

    tensors: Mapping[str, Tensor]
    others: Mapping[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        return {**self.tensors, **self.others}

    def changed(self, change: Callable[[Tensor], Tensor]) -> Call:
        """With another tensor in place of each that has a gradient."""
        return replace(self, tensors={name: change(t) for name, t in self.tensors.items()})

    def leaves(self, wanted: Iterable[str] | None = None) -> Call:
        """On new leaves, of which those that are ``wanted``, or all, require a gradient."""
        names = self.tensors.keys() if wanted is None else set(wanted)
        copies = {name: alike(t).copy_(t.detach()) for name, t in self.tensors.items()}
        return replace(self, tensors={n: t.requires_grad_(n in names) for n, t in copies.items()})

    def wide(self) -> Call:
        return self.changed(wide)

    def on(self, device: str) -> Call:
        """With memory of another device, whatever is in it."""
        others = {
            n: alike(x, device) if isinstance(x, Tensor) else x for n, x in self.others.items()
        }
        tensors = {name: alike(t, device) for name, t in self.tensors.items()}
        return Call(tensors, others)


def alike(tensor: Tensor, device: str | None = None) -> Tensor:
    """New memory of the same strides, where elements of the tensor do not share memory."""
    if 0 in tensor.stride() and tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device
    )


def wide(tensor: Tensor) -> Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def weights(outputs: Iterable[Tensor], seed: int = 1) -> list[Tensor]:
    """Gradients of outputs: random numbers that all dtypes hold as they are."""
    torch.manual_seed(seed)

    def drawn(out: Tensor) -> Tensor:
        real = torch.randn(*out.shape, 2).bfloat16().float()
        return (torch.view_as_complex(real) if out.is_complex() else real[..., 0]).to(out.dtype)

    return [drawn(out) for out in outputs]


def gradients(
    outputs: Iterable[Tensor], call: Call, of_outputs: Iterable[Tensor] | None = None
) -> dict[str, Tensor]:
    """By name, of the tensors of ``call`` that require one."""
    every = [*outputs]
    seeds = weights(every) if of_outputs is None else [*of_outputs]
    pairs = [pair for pair in zip(every, seeds, strict=True) if pair[0].requires_grad]
    wanted = {n: t for n, t in call.tensors.items() if t.requires_grad}
    grads: Iterable[Tensor] = map(torch.zeros_like, wanted.values())
    if pairs:
        used, seeds = map(list, zip(*pairs, strict=True))
        grads = torch.autograd.grad(used, [*wanted.values()], seeds, materialize_grads=True)
    return {f"gradient of {name}": g for name, g in zip(wanted, grads, strict=True)}


def results(function: Function, call: Call) -> dict[str, Tensor]:
    """Outputs, and gradients of all tensors; the function must leave its arguments as they are."""
    leaves = call.leaves()
    outputs = function(**leaves.arguments)
    grads = gradients(outputs, leaves)
    for name, t in leaves.tensors.items():
        same = torch.isclose(t, call.tensors[name], rtol=0, atol=0, equal_nan=True)
        assert same.all(), f"{name} was written"
    return {f"output {n}": x.detach() for n, x in enumerate(outputs)} | grads


def close(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerance: Callable[[str, Tensor], float],
    what: object = "",
) -> None:
    """Each result is right to a tolerance that may depend on it, relative to the norm of what is expected."""
    assert [*actual] == [*expected]
    for name, out in actual.items():
        right = expected[name].detach()
        assert out.shape == right.shape, (what, name)
        error = relative_error(out, right)
        assert error <= tolerance(name, out), f"{what}: {name} is off by {error:.2g}"
