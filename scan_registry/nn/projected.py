"""LSTMs with projections (``proj_size``), for which there are no kernels: torch's function, or plain torch.

torch's function runs where it computes what the module does. It has no resets, and it takes part neither in graphs of
``torch.compile`` nor in transforms. There the steps are taken one by one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, linear

from scan_registry.nn import torch_cells
from scan_registry.ops.call import undisturbed
from scan_registry.ops.checks import is_autocast

if TYPE_CHECKING:
    from scan_registry.nn.recurrent import Recurrent
    from scan_registry.nn.states import States


def run(
    module: Recurrent[Any],
    x: Tensor,
    states: States | None,
    sizes: Tensor | None = None,
    marks: Tensor | None = None,
    anew: States | None = None,
) -> tuple[Tensor, States]:
    """All layers, over x (T, B, I), or with ``batch_first`` (B, T, I), or the data of a PackedSequence and its
    ``batch_sizes``: h in the same layout, and the last states.

    Args:
        states: (layers · directions, B, P) and (layers · directions, B, H), in the order of packed data.
        marks: bool, as x without I: the first steps of episodes. ``anew`` has the states that they start from.
    """
    weights = {name: getattr(module, name) for name in module._flat_weights_names}
    casts: AbstractContextManager[Any] = nullcontext()
    if is_autocast(x) and x.dtype != torch.float64:
        kind: str = x.device.type
        dtype = torch.get_autocast_dtype(kind)
        x, weights = x.to(dtype), {name: weight.to(dtype) for name, weight in weights.items()}
        casts = torch.autocast(kind, enabled=False)
    states = _zeros(module, x, sizes) if states is None else [s.to(x.dtype) for s in states]
    with casts:
        if marks is None and _torch_computes(module, x):
            return torch_cells.run(module, x, states, sizes, [*weights.values()])
        if marks is not None:
            anew = _zeros(module, x, sizes) if anew is None else [s.to(x.dtype) for s in anew]
        return _layers(module, x, weights, states, sizes, marks, anew)


def _torch_computes(module: Recurrent[Any], x: Tensor) -> bool:
    if module.backend != "auto" or torch.compiler.is_dynamo_compiling():
        return False
    # In what torch.export makes of torch's function, any batch size goes; torch itself fixes the number of steps.
    return _exporting() or (x.numel() > 0 and undisturbed())


def _exporting() -> bool:
    """Whether torch.export traces the call. torch 2.6 has no function for that; is_compiling is true there in an export
    that Dynamo does not trace, and in no other call that Dynamo does not trace."""
    return bool(getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)())


def _zeros(module: Recurrent[Any], x: Tensor, sizes: Tensor | None) -> States:
    batch = int(sizes[0]) if sizes is not None else x.shape[0 if module.batch_first else 1]
    rows = module.num_layers * module._directions
    return [x.new_zeros(rows, batch, units) for units in (module.proj_size, module.hidden_size)]


def _layers(
    module: Recurrent[Any],
    x: Tensor,
    weights: dict[str, Tensor],
    states: States,
    sizes: Tensor | None,
    marks: Tensor | None,
    anew: States | None,
) -> tuple[Tensor, States]:
    """What ``run`` does, step by step."""
    if sizes is not None:
        return _packed_layers(module, x, weights, states, sizes.tolist(), marks, anew)
    time = int(module.batch_first)  # the dimension of time
    x = x.transpose(0, time)
    shape = x.shape[:2]
    rows = [int(shape[1])] * int(shape[0])
    if marks is not None:
        marks = marks.transpose(0, time).flatten(0, 1)
    h, final_state = _packed_layers(module, x.flatten(0, 1), weights, states, rows, marks, anew)
    return h.unflatten(0, shape).transpose(0, time), final_state


def _packed_layers(
    module: Recurrent[Any],
    x: Tensor,
    weights: dict[str, Tensor],
    states: States,
    rows: list[int],
    marks: Tensor | None,
    anew: States | None,
) -> tuple[Tensor, States]:
    """Steps are laid out as packed data are: all first steps, then all second ones."""
    resets: list[list[Tensor] | None] = [None, None]
    if marks is not None:
        steps = [*marks.split(rows)]
        resets = [steps, _turned(steps) if module._directions > 1 else None]
    ends: list[tuple[Tensor, Tensor]] = []
    for layer in range(module.num_layers):
        if layer and module.dropout:
            x = dropout(x, module.dropout, module.training)
        outs = []
        for backwards, end in enumerate(("", "_reverse")[: module._directions]):
            own = [weights.get(f"{name}_l{layer}{end}") for name in _NAMES]
            k = len(ends)
            initial_state = states[0][k], states[1][k]
            again = None if anew is None else (anew[0][k], anew[1][k])
            out, final_state = _direction(
                *(x, rows, own, initial_state, resets[backwards], again, bool(backwards))
            )
            outs.append(out)
            ends.append(final_state)
        x = outs[0] if len(outs) == 1 else torch.cat(outs, -1)
    return x, [torch.stack(state) for state in zip(*ends, strict=True)]


_NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")


def _turned(marks: list[Tensor]) -> list[Tensor]:
    """Marks of a network that goes backwards, which starts anew at the step before each mark."""
    turned = []
    for step, own in enumerate(marks, 1):
        after = marks[step] if step < len(marks) else own[:0]
        turned.append(torch.cat([after, own.new_zeros(own.shape[0] - after.shape[0])]))
    return turned


def _direction(
    x: Tensor,
    rows: list[int],
    weights: list[Any],
    initial_state: tuple[Tensor, Tensor],
    marks: list[Tensor] | None,
    anew: tuple[Tensor, Tensor] | None,
    backwards: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One layer in one direction: h of every step, and the last states. ``rows`` has the number of sequences at each step."""
    of_inputs, of_h, bias, other, projection = weights
    if bias is not None:
        bias = torch.sub(bias, other, alpha=-1)  # so that their gradients have memory of their own
    inputs = linear(x, of_inputs, bias)

    def step(inputs: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = (inputs + linear(h, of_h)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return linear(o.sigmoid() * c.tanh(), projection), c

    h, c = initial_state
    if not rows:  # of no step, with gradients all the same
        return step(inputs, h[:0], c[:0])[0], initial_state
    parts = inputs.split(rows)
    outs = [h] * len(rows)
    for at in reversed(range(len(rows))) if backwards else range(len(rows)):
        count = rows[at]
        before = h[:count], c[:count]
        if marks is not None and anew is not None:
            mark = marks[at].unsqueeze(1)
            fresh = anew[0][:count], anew[1][:count]
            before = (
                torch.where(mark, fresh[0], before[0]),
                torch.where(mark, fresh[1], before[1]),
            )
        outs[at], after = step(parts[at], *before)
        whole = count == h.shape[0]
        h = outs[at] if whole else torch.cat([outs[at], h[count:]])
        c = after if whole else torch.cat([after, c[count:]])
    return torch.cat(outs), (h, c)
