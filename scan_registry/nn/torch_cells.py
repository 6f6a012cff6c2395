"""Networks on the CPU by torch's own functions, where they compute what the module does and are faster.

torch has one function for all steps of an LSTM, but goes step by step through GRU and Elman networks.
This package's compiled code takes longer before the first step, and less time for each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scan_registry.ops.call import undisturbed
from scan_registry.ops.checks import is_autocast

if TYPE_CHECKING:
    from scan_registry.nn.recurrent import Recurrent
    from scan_registry.nn.states import States

#: Cells that are torch's, gate by gate; for ``gru`` the reset gate comes after the product in both.
_CALLS: Mapping[str, Callable[..., Any]] = {
    "lstm": torch._VF.lstm,
    "gru": torch._VF.gru,
    "elman": torch._VF.rnn_tanh,
}

# Limits are from times of one thread, in which torch's functions and this package's code took turns: LSTM, GRU and RNN with 1,
# 8 and 64 sequences of 1, 8, 32 and 128 steps and 32, 128 and 512 hidden units, with gradients and without.
#: torch converts an LSTM's weights at each call. With so many hidden units or more that does not pay off if all sequences
#: together have at most so many steps.
_LARGE, _FEW_STEPS = 256, 64
#: From so many steps on this package's code is faster than torch's, which goes step by step.
_FEWEST_STEPS: Mapping[str, int] = {"gru": 8, "elman": 16}
#: With gradients torch's LSTM in bfloat16 is faster up to so many hidden units.
_MOST_UNITS_IN_BFLOAT16 = 256


def takes(module: Recurrent[Any], x: Tensor, steps: tuple[int, int]) -> bool:
    """Whether torch's function runs in place of this package's: if ``backend`` leaves the choice open, sums
    are as precise, no mode, transform or forward-mode derivative is active, and torch's function is faster.
    ``steps`` has the steps of the longest sequence, and of all sequences together."""
    return (
        not torch.compiler.is_compiling()  # first, as sizes may be unknown in a graph, such as x.numel()
        and x.device.type == "cpu"
        and module.backend == "auto"
        and module.num_heads == 1
        and module.function in _CALLS
        and x.numel() > 0
        and not is_autocast(x)
        and undisturbed()
        and _does(module, x.dtype, steps)
    )


def _does(module: Recurrent[Any], dtype: torch.dtype, steps: tuple[int, int]) -> bool:
    """Whether torch's function is as precise and faster in this dtype."""
    function, units = module.function, module.hidden_size
    if dtype == torch.float32:
        return is_faster(function, units, *steps)
    if dtype == torch.bfloat16:  # torch rounds each gate of the other cells
        fits = units <= _MOST_UNITS_IN_BFLOAT16 or not torch.is_grad_enabled()
        return function == "lstm" and fits and has_bfloat16()
    return dtype == torch.float64


def is_faster(function: str, units: int, steps: int, all_steps: int) -> bool:
    """Whether torch's function is faster, in float32."""
    if function == "lstm":
        return units < _LARGE or all_steps > _FEW_STEPS
    return steps < _FEWEST_STEPS[function]


def has_bfloat16() -> bool:
    """Whether torch computes LSTMs by oneDNN in bfloat16, with instructions for it, which is precise and fast."""
    return bool(torch.backends.mkldnn.enabled) and _instructions()


@cache
def _instructions() -> bool:
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return torch.backends.mkldnn.is_available() and supported is not None and bool(supported())


def run(
    module: Recurrent[Any],
    x: Tensor,
    states: States | None,
    sizes: Tensor | None = None,
    weights: list[Tensor] | None = None,
    *,
    first: bool | None = None,
) -> tuple[Tensor, States]:
    """All layers, over x (T, B, I), or with ``batch_first`` (B, T, I), or the data of a PackedSequence and
    its ``batch_sizes``: h in the same layout, and the last states. States are (layers · directions, B, H),
    in the order of the packed data. ``weights`` and ``first``, which is whether B comes first, are those of the module if
    None."""
    first = module.batch_first if first is None else first
    if states is None:
        batch = int(sizes[0]) if sizes is not None else x.shape[0 if first else 1]
        rows = module.num_layers * (2 if module.bidirectional else 1)
        zeros = x.new_zeros(rows, batch, module.hidden_size)
        states = [zeros, zeros] if module.function == "lstm" else [zeros]
    initial_state: Any = states if module.function == "lstm" else states[0]
    if weights is None:
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
        h, *final_state = call(x, initial_state, *common, first)
    else:
        h, *final_state = call(x, sizes, initial_state, *common)
    return h, final_state
