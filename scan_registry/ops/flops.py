"""What ``torch.utils.flop_counter.FlopCounterMode`` counts for the operators.

As in torch, a network counts its products of matrices only, and a convolution its taps, two operations for each
multiplication and addition. A scan has none, so it counts its multiplications and additions one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Formula = Callable[..., int]


def _linear_scan(gates: Tensor, tokens: Tensor, *_: Any, **__: Any) -> int:
    """A product and a sum for each element."""
    product, total = _costs(tokens)
    return (product + total) * tokens.numel()


def _linear_scan_summary(gates: Tensor, tokens: Tensor, *_: Any, **__: Any) -> int:
    """Beside the scan, the product of the gates."""
    product, total = _costs(tokens)
    return (2 * product + total) * tokens.numel()


def _linear_scan_backward(
    gates: Tensor, states: Tensor | None, states_grad: Tensor, *rest: Any, **_: Any
) -> int:
    """A product and a sum for each element of the gradient that runs against the scan; a product more for the
    gates' own, and sums where gates are broadcast."""
    product, total = _costs(states_grad)
    count = states_grad.numel()
    operations = (product + total) * count
    if rest[-1][0]:
        operations += product * count + total * (count - gates.numel())
    return operations


def _gated_scan(kind: str, inputs: Any, *_: Any, **__: Any) -> int:
    """As many as the scan. The operations that compute its gates and tokens are not counted, as torch counts no
    activation."""
    return _linear_scan(inputs[0], inputs[0])


def _gated_scan_backward(kind: str, inputs: Any, *_: Any, **__: Any) -> int:
    """The scan's, with the gradient of gates; likewise."""
    return 3 * int(inputs[0].numel())


def _costs(tensor: Tensor) -> tuple[int, int]:
    """The operations of a multiplication, and of an addition."""
    return (6, 2) if tensor.is_complex() else (1, 1)


def _rnn(inputs: Tensor, recurrent: Tensor, *_: Any, **__: Any) -> int:
    """The recurrent matrices with h, at every step."""
    return 2 * inputs.shape[0] * inputs.shape[1] * recurrent.numel()


def _rnn_backward(
    recurrent: Tensor, states: Tensor, initial: Tensor | None, *_: Any, **__: Any
) -> int:
    """Their transposes with the gates' gradients, at every step that has one before it. The gradients of
    parameters are torch's products, which it counts itself."""
    batch, time = states.shape[1], states.shape[2]
    steps = time if initial is not None else max(time - 1, 0)
    return 2 * batch * steps * recurrent.numel()


def _selective_scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, *rest: Any, **_: Any
) -> int:
    """For each state the products delta·A, gate·h, delta·u·B and C·h and two sums; for each element delta·u, D·u with
    its sum, and the gate's product. Exponentials and softplus are not counted."""
    product, total = _costs(A)
    D, z = rest[:2]
    of_element: int = 1 + (0 if D is None else 2) + (0 if z is None else 1)
    return u.numel() * (A.shape[1] * (4 * product + 2 * total) + of_element)


def _selective_scan_backward(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, *rest: Any, **_: Any
) -> int:
    """For each state its recomputation, three products and a sum; the gradient that runs against the scan, two and a
    sum; that of the exponent, two products; those of delta·u and of delta, each a product and a sum; and such a pair
    for each of A, B and C that wants a gradient."""
    product, total = _costs(A)
    wanted = rest[-1]
    pairs: int = 2 + sum(wanted[2:5])
    return u.numel() * A.shape[1] * (7 * product + 2 * total + pairs * (product + total))


def _selective_state_update(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *rest: Any, **_: Any
) -> int:
    """As many as a selective scan of one step."""
    D, z = rest[:2]
    of_element: int = 1 + (0 if D is None else 2) + (0 if z is None else 1)
    return x.numel() * (A.shape[-1] * 6 + of_element)


def _causal_conv1d(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    """A product and a sum for each tap of each step, as of torch's own convolutions."""
    return 2 * x.numel() * weight.shape[1]


def _causal_conv1d_backward(x: Tensor, weight: Tensor, *rest: Any, **_: Any) -> int:
    """As many for the gradient of x, and as many for that of the filters."""
    of_x, of_weight, *_others = rest[-1]
    return (bool(of_x) + bool(of_weight)) * _causal_conv1d(x, weight)


def _causal_conv1d_update(x: Tensor, state: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    return _causal_conv1d(x, weight)


FORMULAS: dict[str, Formula] = {
    "linear_scan": _linear_scan,
    "linear_scan_backward": _linear_scan_backward,
    "linear_scan_summary": _linear_scan_summary,
    "gated_scan": _gated_scan,
    "gated_scan_backward": _gated_scan_backward,
    "rnn": _rnn,
    "rnn_backward": _rnn_backward,
    "selective_scan": _selective_scan,
    "selective_scan_backward": _selective_scan_backward,
    "selective_state_update": _selective_state_update,
    "causal_conv1d": _causal_conv1d,
    "causal_conv1d_backward": _causal_conv1d_backward,
    "causal_conv1d_update": _causal_conv1d_update,
}


def announce() -> None:
    """Tell torch's counter of the formulas if it is there: all that are made from now on, and those that count
    now. To import it takes longer than a first call, so whoever counts has to have done so."""
    module: Any = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    kind = getattr(module, "_FlopCounterMode", None)
    registries = [module.flop_registry]
    if kind is not None and torch._C._len_torch_dispatch_stack():
        modes: Any = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        registries += [mode.counter.flop_registry for mode in modes if isinstance(mode, kind)]
    for registry in registries:
        for name, formula in FORMULAS.items():
            packet = getattr(torch.ops.scan_registry, name, None)
            if packet is not None:
                registry.setdefault(packet, formula)
