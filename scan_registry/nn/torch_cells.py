"""Networks on the CPU by torch's own functions, where they compute what the module does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scan_registry.kernels.rnn.problem import Function
from scan_registry.ops.derivatives import undisturbed

if TYPE_CHECKING:
    from scan_registry.nn.recurrent import Recurrent, States

#: Cells that are torch's, gate by gate; for ``gru`` the reset gate comes after the product in both.
_CALLS: Mapping[Function, Callable[..., Any]] = {
    "lstm": torch._VF.lstm,  # type: ignore[attr-defined]
    "gru": torch._VF.gru,  # type: ignore[attr-defined]
    "elman": torch._VF.rnn_tanh,  # type: ignore[attr-defined]
}
_DTYPES = (torch.float32, torch.float64)


def takes(module: Recurrent[Any], x: Tensor) -> bool:
    """Whether torch's function stands in for this package's: ``backend`` leaves the choice open, sums are
    as precise, and nobody watches, traces or differentiates forwards."""
    return (
        x.device.type == "cpu"
        and module.backend == "auto"
        and module.num_heads == 1
        and module.function in _CALLS
        and x.dtype in _DTYPES
        and x.numel() > 0
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and undisturbed()
    )


def run(
    module: Recurrent[Any], x: Tensor, states: States | None, sizes: Tensor | None = None
) -> tuple[Tensor, States]:
    """All layers, over x (T, B, I), or with ``batch_first`` (B, T, I), or the data of a PackedSequence and
    its ``batch_sizes``: h in the same layout, and the last states. States are (layers · directions, B, H),
    in the order of the packed data."""
    if states is None:
        batch = int(sizes[0]) if sizes is not None else x.shape[0 if module.batch_first else 1]
        rows = module.num_layers * (2 if module.bidirectional else 1)
        zeros = x.new_zeros(rows, batch, module.hidden_size)
        states = [zeros, zeros] if module.function == "lstm" else [zeros]
    given: Any = states if module.function == "lstm" else states[0]
    weights = [getattr(module, name) for name in module._flat_weights_names]
    common = (
        weights,
        module.bias,
        module.num_layers,
        module.dropout,
        module.training,
        module.bidirectional,
    )
    call = _CALLS[module.function]
    if sizes is None:
        h, *last = call(x, given, *common, module.batch_first)
    else:
        h, *last = call(x, sizes, given, *common)
    return h, last
