"""What calls of ``rnn`` with resets run, and what the operator refuses of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scan_registry.kernels.rnn.op.arguments import COMPILED, Arguments, Options
from scan_registry.ops.call import forward_mode, tracing_state, transforms_active
from scan_registry.ops.recording import is_capturing
from scan_registry.ops.values import has_values

_is_compiling = torch.compiler.is_compiling


def cuts_at_resets(arguments: Arguments, options: Options) -> bool:
    """Whether a call cuts its sequences at resets, and runs the pieces as rows of a batch. It does so on a GPU if
    states are given, as the CUDA kernels start anew from zeros alone, and for the Triton kernels, which support no
    resets. If the values of ``reset`` cannot be read, plain torch runs."""
    inputs, reset = arguments.inputs, arguments.reset
    if reset is None or not inputs.is_cuda or options.backend == "reference":
        return False
    if arguments.reset_states is None and options.backend != "triton":
        return False
    if inputs.dtype not in COMPILED or _is_compiling() or not has_values(reset):
        return False
    watched = transforms_active() or forward_mode() or tracing_state() is not None
    return not watched and not is_capturing(inputs)


def without_kernels(options: Options, reset_states: Tensor | None) -> Options:
    """The options of the operator on a GPU, where no kernel starts anew from given states."""
    if reset_states is None:
        return options
    if options.backend != "auto":
        raise ValueError(
            f"backend is {options.backend!r}, and with reset_states where the values of reset cannot be read, as in "
            "compiled graphs, there is plain torch only; accepted are auto and reference"
        )
    return options._replace(backend="reference")


def check_reset(reset: Tensor | None, shape: Sequence[int]) -> None:
    """Refuse a ``reset`` of the wrong shape or dtype, in a call of the operator itself."""
    if reset is not None and (reset.dtype != torch.bool or tuple(reset.shape) != tuple(shape)):
        raise ValueError(
            f"the operator's reset has shape {tuple(reset.shape)} and dtype {reset.dtype}; it must have "
            f"{tuple(shape)} and torch.bool"
        )
