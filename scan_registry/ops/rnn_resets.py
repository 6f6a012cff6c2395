"""What calls of ``rnn`` with resets run, and what the operator refuses of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scan_registry.ops.arguments import has_values
from scan_registry.ops.derivatives import forward_mode, tracing_state, transforms_active
from scan_registry.ops.recording import is_capturing
from scan_registry.ops.rnn_arguments import COMPILED, Arguments, Options

_is_compiling = torch.compiler.is_compiling


def cuts_at_resets(given: Arguments, options: Options) -> bool:
    """Whether a call cuts its sequences at resets, and runs the pieces as rows of a batch. It does so for the Triton
    kernels, which support no resets."""
    inputs, reset = given.inputs, given.reset
    if reset is None or not inputs.is_cuda or options.backend != "triton":
        return False
    if inputs.dtype not in COMPILED or _is_compiling() or not has_values(reset):
        return False
    watched = transforms_active() or forward_mode() or tracing_state() is not None
    return not watched and not is_capturing(inputs)


def before_first(
    initial: Tensor | None, reset: Tensor | None, reset_states: Tensor | None
) -> Tensor | None:
    """The states before the first step (states, B, …), as CUDA kernels take them: where there is a reset at that step,
    its states, if they are given."""
    if reset is None or reset_states is None:
        return initial
    begins = reset[:, 0].view(-1, *[1] * (reset_states.dim() - 2))
    return torch.where(begins, reset_states, 0 if initial is None else initial).contiguous()


def check_reset(reset: Tensor | None, shape: Sequence[int]) -> None:
    """Refuse a ``reset`` of the wrong shape or dtype, in a call of the operator itself."""
    if reset is not None and (reset.dtype != torch.bool or tuple(reset.shape) != tuple(shape)):
        raise ValueError(
            f"the operator's reset has shape {tuple(reset.shape)} and dtype {reset.dtype}; it must have "
            f"{tuple(shape)} and torch.bool"
        )
