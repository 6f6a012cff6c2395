"""Whether a module may read the weights of a module inside it, or has to call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module


def is_plain(module: nn.Module, *forwards: Callable[..., Any]) -> bool:
    """Whether a call runs one of ``forwards`` and nothing else. No hook, and no other forward (adapter, quantization,
    offloading). Parametrizations count as plain: reading the parameter computes them."""
    return getattr(module.forward, "__func__", None) in forwards and not (
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or torch_module._has_any_global_hook()
    )


def weights_of(module: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of a linear layer or a convolution; None where it has to be called."""
    if not is_plain(module, nn.Linear.forward, nn.Conv1d.forward):
        return None
    linear: Any = module
    return linear.weight, linear.bias
