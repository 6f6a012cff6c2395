"""transformers' RecurrentGemma on ``scan_registry.rg_lru``: what ``compat.install("recurrent_gemma")`` does.

transformers computes the gates of an RG-LRU in some twenty operators of torch, and its states in a loop over time in
Python. ``forward`` takes the place of both, in the class ``RecurrentGemmaRglru``, so that models have it that were made
before, too. What it does differently: gates and states are computed in float32 for bfloat16 and float16, and 1 − a² has no
cancellation where a is close to 1. The slope of its square root is bounded by 1000, as transformers bounds it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import torch
from torch import Tensor

from scan_registry.kernels.gated_scan.op.kinds import rg_lru

__all__ = ["forward", "replace", "restore"]

MODULE = "transformers.models.recurrent_gemma.modeling_recurrent_gemma"
CLASS = "RecurrentGemmaRglru"
#: What ``forward`` of the class takes.
ARGUMENTS = ("self", "activations", "position_ids")


def forward(self: Any, activations: Tensor, position_ids: Tensor) -> Tensor:
    """In the place of ``RecurrentGemmaRglru.forward``.

    Args:
        self: the module. Its ``recurrent_states``, (batch, width) or None, is the state before the first step, and is
            replaced by that after the last one.
        activations: (batch, time, width).
        position_ids: (batch, time) or (1, time). At position 0 the state starts anew.

    Returns:
        The states, (batch, time, width), in the dtype of ``activations``.
    """
    batch, time, width = activations.shape
    # (heads, batch · time, width / heads), for one product for each head.
    of_heads = activations.reshape(batch * time, self.num_attention_heads, -1).transpose(0, 1)

    def gate(weight: Tensor, bias: Tensor) -> Tensor:
        """Before its sigmoid. Autocast makes the product narrower than ``activations`` are."""
        product = torch.baddbmm(bias.unsqueeze(1), of_heads, weight)
        return product.transpose(0, 1).reshape(batch, time, width).to(activations.dtype)

    state = self.recurrent_states
    if state is not None:
        state = state.to(activations.device)
    states, self.recurrent_states = rg_lru(
        activations,
        gate(self.recurrent_gate_weight, self.recurrent_gate_bias),
        gate(self.input_gate_weight, self.input_gate_bias),
        self.recurrent_param,
        (position_ids == 0).expand(batch, time),
        initial_state=state,
        dim=1,
        return_final_state=True,
    )
    return states


#: The class's own ``forward``, while ours is in its place.
_originals: dict[Any, Any] = {}


def replace() -> None:
    """Put ``forward`` into transformers' class. Doing so again changes nothing.

    Raises:
        ImportError: transformers is not installed, or its class is not one that ``forward`` fits.
    """
    model_class = _class()
    if model_class not in _originals:
        _originals[model_class] = model_class.forward
        model_class.forward = forward


def restore() -> None:
    """Take ``replace`` back. What another program has put in its place since then stays."""
    for model_class, original in _originals.items():
        if model_class.forward is forward:
            model_class.forward = original
    _originals.clear()


def _class() -> Any:
    """transformers' class, which may be imported anew and so be another one than before."""
    try:
        module = importlib.import_module(MODULE)
    except ImportError as error:
        raise ImportError(
            f"recurrent_gemma needs transformers with {MODULE}: {error}", name=MODULE
        ) from error
    model_class = getattr(module, CLASS, None)
    version = getattr(sys.modules["transformers"], "__version__", "of this version")
    if model_class is None:
        raise ImportError(
            f"transformers {version} has no {CLASS}, so nothing is replaced", name=MODULE
        )
    own = _originals.get(model_class, model_class.forward)
    arguments = tuple(inspect.signature(own).parameters)
    if arguments != ARGUMENTS:
        raise ImportError(
            f"{CLASS}.forward of transformers {version} takes ({', '.join(arguments)}), not "
            f"({', '.join(ARGUMENTS)}), so nothing is replaced; update scan-registry",
            name=MODULE,
        )
    return model_class
