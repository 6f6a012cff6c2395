"""``linear_scan(reset=…)``: by the kernels of ``gated_scan``, whose kind ``linear`` it is, where they take such numbers, and else
by ``resets``.

Those kernels take tensors of three dimensions. Others are seen as such ones: batch, time, and the rest as channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Size, Tensor

from scan_registry.base.symbols import same_shape
from scan_registry.kernels.linear_scan.reference import compute_dtype
from scan_registry.ops import gated_scan_derivatives, gated_scan_plans, gated_scan_problems, resets
from scan_registry.ops.arguments import Options
from scan_registry.ops.derivatives import transforms_active
from scan_registry.ops.gated_scan_arguments import COMPILED, Arguments, check_reset
from scan_registry.ops.gated_scan_arguments import Options as GatedOptions
from scan_registry.ops.gated_scan_problems import KernelCall

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
        given = Arguments((gates, tokens), (), *tensors[2:])
        return gated_scan_derivatives.scan(given, GatedOptions("linear", *options))
    if not gated_scan_plans.on_gpu(tokens) or not has_kernels(gates, tokens) or transforms_active():
        return resets.scan(*tensors, options)
    view = _View(tokens.shape, options.dim)
    of_three = GatedOptions("linear", -2, *options[1:])
    states, last = gated_scan_derivatives.scan(view.arguments(*tensors), of_three)
    if last is not None:
        last = view.state_back(last, cu_seqlens is not None)
    return view.back(states).to(tokens.dtype), last


def check(reset: Tensor, tokens: Tensor, options: Options) -> None:
    """Refuse what is no reset of such a scan."""
    check_reset(reset, resets.reset_shape(tokens.shape, options.dim), tokens.device)


def has_kernels(gates: Tensor, tokens: Tensor) -> bool:
    """Whether ``gated_scan`` has kernels for such numbers, after conversions that lose nothing."""
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
    """The problems of ``gated_scan`` that such a call poses on a GPU, by direction. Nothing is computed."""
    view = _View(tokens.shape, options.dim)
    given = view.arguments(gates, tokens, reset, initial_state, cu_seqlens)
    of_three = GatedOptions("linear", -2, *options[1:])
    return gated_scan_problems.describe(given, of_three, differentiated)


def _alike(gates: Tensor, tokens: Tensor, options: Options) -> bool:
    """Whether these are arguments of ``gated_scan`` as they are."""
    same = gates.dtype == tokens.dtype and same_shape(gates.shape, tokens.shape)
    return same and tokens.dim() == 3 and options.dim != -3 and not tokens.is_complex()


@dataclass(frozen=True)
class _View:
    """Tensors of ``shape`` seen as (batch, time, channels), and back. ``dim`` is time."""

    shape: Size
    dim: int

    @property
    def _places(self) -> tuple[int, int]:
        """Of batch and time."""
        rank = len(self.shape)
        return resets.batch_dim(rank, self.dim), self.dim % rank

    @property
    def _rest(self) -> list[int]:
        """The other sizes."""
        return [n for d, n in enumerate(self.shape) if d not in self._places]

    def three(self, x: Tensor) -> Tensor:
        """Of one with time, or sequences in its place."""
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
        """Gates and tokens of two dtypes become float32, and gates that are broadcast a tensor of their own."""
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
            # Like the tokens, since the states are to lie as these do.
            gates = torch.empty_like(tokens).copy_(gates.expand(self.shape))
        inputs = self.three(gates), self.three(tokens)
        return Arguments(inputs, (), reset, initial_state, cu_seqlens)
