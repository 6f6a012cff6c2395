"""Whether a module may read the weights of a module inside it, or has to call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules import module as torch_module


def is_plain(module: nn.Module, *forwards: Callable[..., Any]) -> bool:
    """Whether a call runs one of ``forwards`` and nothing else. No hook, and no other forward (adapter, quantization,
    offloading). Parametrizations count as plain: reading the parameter computes them."""
    # Of the class, as Dynamo knows no ``__func__`` of a module's method. A scripted module's class has none. What sets a
    # forward on one module, as offloading does, may set the class's own again afterwards.
    forward: Any = getattr(type(module), "forward", None)
    if "forward" in module.__dict__:
        own = module.__dict__["forward"]
        forward = (
            getattr(own, "__func__", None) if getattr(own, "__self__", None) is module else None
        )
    return forward in forwards and not (
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
    own, linear = module._parameters, cast("nn.Linear", module)
    if "weight" in own and "bias" in own:  # at once, as steps ask for them, too
        return cast("tuple[Tensor, Tensor | None]", (own["weight"], own["bias"]))
    return linear.weight, linear.bias
