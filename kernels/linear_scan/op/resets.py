"""``linear_scan(reset=…)``. It is the kind ``linear`` of ``gated_scan``, whose kernels compute it where they have the dtype; else
``resets`` does.

The kernels of ``gated_scan`` take tensors of three dimensions. Other tensors are viewed as (batch, time, channels), with all
dimensions but batch and time as channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Size, Tensor

from scan_registry.base.symbols import same_shape
from scan_registry.kernels.gated_scan.op import autograd as gated_scan_derivatives
from scan_registry.kernels.gated_scan.op import plans as gated_scan_plans
from scan_registry.kernels.gated_scan.op import problems as gated_scan_problems
from scan_registry.kernels.gated_scan.op.arguments import COMPILED, Arguments
from scan_registry.kernels.gated_scan.op.arguments import Options as GatedOptions
from scan_registry.kernels.gated_scan.op.calls import KernelCall
from scan_registry.kernels.linear_scan.op import stretches as resets
from scan_registry.kernels.linear_scan.op.arguments import Options
from scan_registry.kernels.linear_scan.reference import compute_dtype
from scan_registry.ops.call import transforms_active
from scan_registry.ops.checks import check_reset

Outputs = tuple[Tensor, Tensor | None]


def scan(
    gates: Tensor,
    tokens: Tensor,
    reset: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    options: Options,
) -> Outputs:
    """States and, if asked for, the final state, of ``arguments.normalised`` arguments."""
    check(reset, tokens, options)
    tensors = gates, tokens, reset, initial_state, cu_seqlens
    if _alike(gates, tokens, options):
        arguments = Arguments((gates, tokens), (), *tensors[2:])
        return gated_scan_derivatives.scan(arguments, GatedOptions("linear", *options))
    if not gated_scan_plans.on_gpu(tokens) or not has_kernels(gates, tokens) or transforms_active():
        return resets.scan(*tensors, options)
    view = _View(tokens.shape, options.dim)
    of_three = GatedOptions("linear", -2, *options[1:])
    states, final_state = gated_scan_derivatives.scan(view.arguments(*tensors), of_three)
    if final_state is not None:
        final_state = view.state_back(final_state, cu_seqlens is not None)
    return view.back(states).to(tokens.dtype), final_state


def check(reset: Tensor, tokens: Tensor, options: Options) -> None:
    """Raise if ``reset`` does not fit the scan."""
    check_reset(reset, resets.reset_shape(tokens.shape, options.dim), tokens.device)


def has_kernels(gates: Tensor, tokens: Tensor) -> bool:
    """Whether ``gated_scan`` has kernels for these dtypes, perhaps after a conversion to float32."""
    return gates.dtype in COMPILED and tokens.dtype in COMPILED and tokens.numel() > 0


def describe(
    gates: Tensor,
    tokens: Tensor,
    reset: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    options: Options,
    differentiated: bool,
) -> Mapping[str, KernelCall]:
    """The kernel calls of ``gated_scan`` that compute it on a GPU, by direction. Nothing is computed."""
    view = _View(tokens.shape, options.dim)
    arguments = view.arguments(gates, tokens, reset, initial_state, cu_seqlens)
    of_three = GatedOptions("linear", -2, *options[1:])
    return gated_scan_problems.describe(arguments, of_three, differentiated)


def _alike(gates: Tensor, tokens: Tensor, options: Options) -> bool:
    """Whether ``gated_scan`` takes these tensors without a conversion or another view."""
    same = gates.dtype == tokens.dtype and same_shape(gates.shape, tokens.shape)
    return same and tokens.dim() == 3 and options.dim != -3 and not tokens.is_complex()


@dataclass(frozen=True)
class _View:
    """Views tensors of ``shape`` as (batch, time, channels), and results in ``shape`` again. ``dim`` is time."""

    shape: Size
    dim: int

    @property
    def _places(self) -> tuple[int, int]:
        """The dimensions of batch and time."""
        rank = len(self.shape)
        return resets.batch_dim(rank, self.dim), self.dim % rank

    @property
    def _rest(self) -> list[int]:
        """The sizes of the other dimensions."""
        return [n for d, n in enumerate(self.shape) if d not in self._places]

    def three(self, x: Tensor) -> Tensor:
        """A tensor as (batch, time, channels). In a packed state, sequences take the place of time."""
        if len(self.shape) == 1:
            return x.reshape(1, -1, 1)
        x = x.movedim(self._places, (0, 1))
        return x.flatten(2) if self._rest else x.unsqueeze(2)

    def back(self, x: Tensor) -> Tensor:
        if len(self.shape) == 1:
            return x.reshape(-1)
        x = x.unflatten(2, self._rest) if self._rest else x.squeeze(2)
        return x.movedim((0, 1), self._places)

    def state_back(self, state: Tensor, packed: bool) -> Tensor:
        if packed:
            return self.back(state)
        time = self.dim % len(self.shape)
        return state.reshape([n for d, n in enumerate(self.shape) if d != time])

    def arguments(
        self,
        gates: Tensor,
        tokens: Tensor,
        reset: Tensor,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> Arguments:
        """The arguments of ``gated_scan``. Gates and tokens of different dtypes are converted to float32. Gates that broadcast
        are expanded into a new tensor."""
        if gates.dtype != tokens.dtype:
            compute = compute_dtype(tokens.dtype)
            gates, tokens = gates.to(compute), tokens.to(compute)
        if len(self.shape) == 1:
            reset = reset.unsqueeze(0)
        if initial_state is not None and cu_seqlens is not None:
            initial_state = self.three(initial_state)
        elif initial_state is not None:
            batch = self.shape[self._places[0]] if len(self.shape) > 1 else 1
            initial_state = initial_state.reshape(batch, -1)
        if not same_shape(gates.shape, self.shape):
            # With the strides of the tokens, since the states get the strides of the gates.
            gates = torch.empty_like(tokens).copy_(gates.expand(self.shape))
        inputs = self.three(gates), self.three(tokens)
        return Arguments(inputs, (), reset, initial_state, cu_seqlens)
