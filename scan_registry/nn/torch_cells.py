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

from scan_registry.kernels.rnn.problem import Function
from scan_registry.ops.derivatives import undisturbed

if TYPE_CHECKING:
    from scan_registry.nn.recurrent import Recurrent
    from scan_registry.nn.states import States

#: Cells that are torch's, gate by gate; for ``gru`` the reset gate comes after the product in both.
_CALLS: Mapping[Function, Callable[..., Any]] = {
    "lstm": torch._VF.lstm,
    "gru": torch._VF.gru,
    "elman": torch._VF.rnn_tanh,
}

_NEVER = 1 << 62
#: From how many steps on this package's code is faster than torch's. Each entry is for at least as many units of all sequences
#: together (batch size times hidden units) as its first number says. The second number holds without gradients, the third with
#: gradients. Torch multiplies all sequences' states by the weights in one product of matrices, which gains with its size.
_FEWEST_STEPS: Mapping[Function, tuple[tuple[int, int, int], ...]] = {
    "gru": (
        (32768, _NEVER, _NEVER),
        (16384, _NEVER, 12),
        (8192, 32, 8),
        (512, 12, 8),
        (0, 8, 8),
    ),
    "elman": ((16384, _NEVER, _NEVER), (4096, 32, 32), (0, 24, 16)),
}
#: With so many hidden units or more, packing R for the kernel takes as long as some steps. The packing does
#: not pay off if all sequences together have fewer steps than the second number, or than the third for a GRU without
#: gradients. Without gradients, the fixed time of a call does not pay off either.
_LARGE, _FEWEST_OF_ALL, _FEWEST_OF_LARGE_GRU = 256, 16, 96
#: torch converts an LSTM's weights at each call, which is slow if they are large. torch is faster only if
#: all sequences together have more steps than so many.
_MOST_OF_LARGE_LSTM = 512
#: torch's threads share each step of an LSTM, where this package's code has one thread for a sequence. Without gradients
#: torch is faster if batch size times hidden units is at most the first number, and hidden units divided by steps at most
#: the second.
_MOST_SHARED_UNITS, _MOST_UNITS_A_STEP = 1024, 32
#: In bfloat16 the conversion takes longer beside the steps. Without gradients it pays off from the second step on.
_LARGE_IN_BFLOAT16 = 512


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
        and not torch.is_autocast_enabled("cpu")
        and undisturbed()
        and _does(module, x.dtype, steps)
    )


def _does(module: Recurrent[Any], dtype: torch.dtype, steps: tuple[int, int]) -> bool:
    """Whether torch's function is as precise and faster in this dtype."""
    function, units = module.function, module.hidden_size
    if dtype == torch.float32:
        return is_faster(function, units, *steps)
    if dtype == torch.bfloat16:  # torch rounds each gate of the other cells
        return function == "lstm" and has_bfloat16() and is_faster_in_bfloat16(units, *steps)
    return dtype == torch.float64


def is_faster(function: Function, units: int, steps: int, all_steps: int) -> bool:
    """Whether torch's function is faster, in float32."""
    if function == "lstm":
        return (
            units < _LARGE
            or all_steps > _MOST_OF_LARGE_LSTM
            or (
                not torch.is_grad_enabled()
                and units <= _MOST_UNITS_A_STEP * steps
                and units * all_steps <= _MOST_SHARED_UNITS * steps
                and torch.get_num_threads() > 1
            )
        )
    untracked = not torch.is_grad_enabled()
    if all_steps < _FEWEST_OF_ALL and (units >= _LARGE or untracked):
        return True
    if function == "gru" and untracked and units >= _LARGE and all_steps < _FEWEST_OF_LARGE_GRU:
        return True
    of_a_step = units * all_steps // max(1, steps)
    without, recorded = next(
        fewest for least, *fewest in _FEWEST_STEPS[function] if of_a_step >= least
    )
    return steps < (without if untracked else recorded)


def is_faster_in_bfloat16(units: int, steps: int, all_steps: int) -> bool:
    """Whether torch's function is faster for an LSTM in bfloat16."""
    if not torch.is_grad_enabled():
        return units < _LARGE_IN_BFLOAT16 or steps > 1
    return units <= _LARGE or all_steps >= _MOST_OF_LARGE_LSTM


def has_bfloat16() -> bool:
    """Whether torch computes LSTMs by oneDNN in bfloat16, with instructions for it, which is precise and fast."""
    return bool(torch.backends.mkldnn.enabled) and _instructions()


@cache
def _instructions() -> bool:
    found = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return torch.backends.mkldnn.is_available() and found is not None and bool(found())


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
    given: Any = states if module.function == "lstm" else states[0]
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
        h, *last = call(x, given, *common, first)
    else:
        h, *last = call(x, sizes, given, *common)
    return h, last
