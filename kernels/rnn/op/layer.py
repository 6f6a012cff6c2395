"""One layer of a recurrent network from its inputs and torch.nn's parameters, in one function to autograd.

On a GPU a call whose shapes, strides and dtypes were seen before takes a look-up, the product of inputs and weights, the
allocations and the launch. Its backward pass takes the launch, and a product or a sum for each gradient. Composed of ``rnn``
and torch's operators, the same layer takes three times as many operators, and autograd keeps a node for each. A plan keeps
shapes and strides, and never a copy of a weight: optimizers and ``.data`` write to weights in place, which a plan would not
notice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from scan_registry.dispatch import policy
from scan_registry.kernels.rnn import reference
from scan_registry.kernels.rnn.op import plans as rnn_plans
from scan_registry.kernels.rnn.op.arguments import COMPILED, Options
from scan_registry.kernels.rnn.op.layer_composed import Cell, Result, composed, composed_backward
from scan_registry.kernels.rnn.op.layout import UNITS, all_dense, states_before, turned
from scan_registry.kernels.rnn.op.weights import kernel_weights
from scan_registry.kernels.rnn.problem import SIZES
from scan_registry.ops.call import (
    fast_path,
    has_tangents,
    transforms_active,
    unobserved,
    unwatched,
)
from scan_registry.ops.checks import is_autocast
from scan_registry.ops.launching import Run, addresses_of, allocator, plan_cache
from scan_registry.ops.recomputation import gradients

_required = policy.required.get
_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling


def on_gpu(tensor: Tensor) -> bool:
    """Whether kernels for GPUs compute with it."""
    return tensor.is_cuda


class Layer:
    """The plan of calls that agree in all facts about their tensors.

    sizes    time, batch, heads, dim
    resets   whether states start anew at some steps
    """

    def __init__(
        self, cell: Cell, flat: tuple[Any, ...], training: bool, run: Run, options: Options
    ) -> None:
        x, _, recurrent, _, _, reset, *_ = flat
        self.resets, self._turned = reset is not None, turned(x)
        self._contiguous = x.is_contiguous()
        self.cell, self.options, self.required = cell, options, _required()
        self.device, self.dtype = x.device, x.dtype
        time, batch, _ = x.shape
        heads, dim = cell.heads, recurrent.shape[1]
        self.sizes, self.width = (time, batch, heads, dim), heads * dim
        self._run = run
        of = SIZES[cell.function]
        count, hidden = len(of.states), (time, batch, self.width)
        self._single = count == 1
        make = self._maker
        self._new_states = make(hidden if self._single else (count, *hidden))
        self._new_cache = (
            make((time, batch, len(of.cache), self.width)) if training and of.cache else None
        )
        self._new_gates = make((time, batch, of.bias, self.width))
        self._new_initial = make((count, 1, batch, self.width))
        self._new_shell = make((0,))
        row = self.width, 1
        self._of_hidden = hidden, (batch * self.width, *row)
        self._of_last = (1, batch, self.width), (batch * self.width, *row)
        self._to_end = 0 if self._single else 1, time - 1, 1
        self._state_offsets = [k * batch * self.width for k in range(count)]
        self._shapes = tuple(None if t is None else (t.shape, t.stride()) for t in flat)

    def _maker(self, shape: tuple[int, ...]) -> Callable[[], Tensor]:
        return allocator(self.device, shape, self.dtype)

    def forward(
        self, x: Tensor, w: Tensor, r: Tensor, b: Any, c: Any, reset: Any, *states: Tensor
    ) -> tuple[Tensor, list[Tensor], tuple[Any, ...]]:
        """h, the last states, and what the backward pass needs beside the arguments: all states, cache, initial states, and
        R as the kernel takes it if that is a copy."""
        inputs = linear(self._lying(x), w, b)
        recurrent, bias = kernel_weights(self.cell, r, c)
        start = None
        if states:
            start = states[0] if self._single else torch.cat(states)
        every = self._new_states()
        cache = None if self._new_cache is None else self._new_cache()
        self._run(
            {
                "inputs": inputs,
                "recurrent": recurrent,
                "bias": bias,
                "initial": start,
                "reset": reset,
                "states": every,
                "cache": cache,
            }
        )
        copied = None if recurrent is r else recurrent
        h, ends = self._results(every)
        return h, ends, (None if self._single else every, cache, start, copied)

    def _results(self, every: Tensor) -> Result:
        """h and the last states, of all states."""
        last = every.narrow_copy(*self._to_end)
        if self._single:
            return every, [last]
        make, ends = self._new_shell, last.untyped_storage()
        return make().set_(every.untyped_storage(), 0, *self._of_hidden), [
            make().set_(ends, offset, *self._of_last) for offset in self._state_offsets
        ]

    def _lying(self, x: Tensor) -> Tensor:
        """The inputs as the kernel takes what is made of them, which is as they lie."""
        if self._turned:
            return x.transpose(0, 1)
        return x if self._contiguous else x.contiguous()

    def backward(
        self, tensors: tuple[Any, ...], grads: tuple[Tensor | None, ...], wanted: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...] | None:
        """The gradients that are wanted, of the arguments of ``forward``. None if a hook of saved tensors has changed the
        strides of one. ``tensors`` are those arguments, h, and the rest of what ``forward`` returned."""
        count = len(self._shapes)
        flat, (h, every, cache, start, copied) = tensors[:count], tensors[count:]
        x, w, r, _, _, reset, *_ = flat
        if not self._lie_as_planned(flat) or not all_dense(h, every, cache, start, copied):
            return None
        h_grad, *ends = grads
        if h_grad is not None and not all_dense(h_grad):
            h_grad = h_grad.clone(memory_format=torch.contiguous_format)
        run = self._backward(0 if h_grad is None else 1)
        if run is None:
            return None
        function, width = self.cell.function, self.width
        final = self._ends(ends)
        gates, initial = self._new_gates(), self._new_initial()
        run(
            {
                "recurrent": r if copied is None else copied,
                "states": h if every is None else every,
                "initial": start,
                "reset": reset,
                "cache": cache,
                "states_grad": h_grad,
                "final_grad": final,
                "gates_grad": gates,
                "initial_grad": initial,
            }
        )
        of_x, of_w, of_r, of_b, of_c, _, *of_states = wanted
        rows = gates.view(-1, gates.shape[2] * width)
        of_inputs = rows[:, width:] if function == "gru" else rows
        return (
            torch.mm(of_inputs, w).view(x.shape) if of_x else None,
            torch.mm(of_inputs.t(), x.reshape(-1, x.shape[2])) if of_w else None,
            self._recurrent_grad(gates, rows, h, start, reset) if of_r else None,
            *self._bias_grads(rows, of_b, of_c),
            None,
            *(initial[k] if want else None for k, want in enumerate(of_states)),
        )

    def _lie_as_planned(self, flat: tuple[Any, ...]) -> bool:
        for tensor, facts in zip(flat, self._shapes, strict=True):
            if tensor is not None and facts != (tensor.shape, tensor.stride()):
                return False
        return True

    def _bias_grads(
        self, rows: Tensor, of_b: bool, of_c: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of ``bias_ih`` and ``bias_hh`` that are wanted."""
        if not (of_b or of_c):
            return None, None
        total, width = rows.sum(0), self.width
        if self.cell.function == "gru":
            grad_c = total[: 3 * width].roll(-width, 0) if of_c else None
            return total[width:] if of_b else None, grad_c
        if not of_b:
            return None, total
        return total, total.clone() if of_c else None

    def _ends(self, ends: Sequence[Tensor | None]) -> Tensor | None:
        """The gradients of the last states, one after the other in memory; None if there are none."""
        if all(end is None for end in ends):
            return None
        if self._single:
            (end,) = ends
            assert end is not None
            return end if all_dense(end) else end.clone(memory_format=torch.contiguous_format)
        model = next(end for end in ends if end is not None)
        return torch.cat([torch.zeros_like(model) if end is None else end for end in ends])

    def _recurrent_grad(
        self, gates: Tensor, rows: Tensor, h: Tensor, start: Tensor | None, reset: Tensor | None
    ) -> Tensor:
        """The gradient of ``weight_hh``."""
        time, batch, heads, dim = self.sizes
        fed = SIZES[self.cell.function].recurrent
        if heads > 1:
            unit = heads, dim
            seen = gates.view(time, batch, -1, *unit).transpose(0, 1)
            states = h.view(1, time, batch, *unit).transpose(1, 2)
            initial = None if start is None else start.view(-1, batch, *unit)[:1]
            function, wanted = self.cell.function, (True, False)
            grads = reference.parameter_grads(function, seen, states, initial, wanted, reset)
            assert grads[1] is not None
            grad = grads[1].view(fed * self.width, dim)
        else:
            left, before = rows[:, : fed * dim], h.view(-1, dim)
            if reset is not None:
                before = states_before(h, start, reset)
                grad = torch.mm(left[-len(before) :].t(), before)
            elif time > 1:
                grad = torch.mm(left[batch:].t(), before[:-batch])
                if start is not None:
                    grad.addmm_(left[:batch].t(), start.view(-1, batch, dim)[0])
            elif start is not None:
                grad = torch.mm(left.t(), start.view(-1, batch, dim)[0])
            else:
                grad = h.new_zeros(fed * dim, dim)
        return grad.roll(-self.width, 0) if self.cell.function == "gru" else grad

    def _backward(self, graded: int) -> Run | None:
        """The launch, where h has a gradient at every step and where it has not."""
        run: Any = plan_cache.get((self, graded), self)
        if run is self:
            with policy.as_required(self.required):
                run = rnn_plans.prepare_layer(
                    *("backward", self.options, self.sizes, self.device, self.dtype, self.resets),
                    graded=graded,
                )
            plan_cache.keep((self, graded), run)
        return run  # type: ignore[no-any-return]


def _is_taken(reset: Tensor | None, x: Tensor) -> bool:
    """Whether kernels take ``reset`` as it is."""
    if reset is None:
        return True
    time, batch, _ = x.shape
    facts = (batch, time), torch.bool, x.device
    return (reset.shape, reset.dtype, reset.device) == facts and reset.is_contiguous()


def _plan(cell: Cell, flat: tuple[Any, ...], training: bool) -> Layer | None:
    """None if the layer is for ``composed``."""
    x, w, r, b, c, reset, *states = flat
    facts, others = (x.dtype, x.device), (w, r, b, c, *states)
    if any(t is not None and (t.dtype, t.device) != facts for t in others):
        return None
    of, dim = SIZES[cell.function], r.shape[-1]
    width = cell.heads * dim
    if x.dtype not in COMPILED or cell.backend == "reference" or dim % UNITS or x.dim() != 3:
        return None
    expected = {
        "w": (w, (of.inputs * width, x.shape[2])),
        "r": (r, (of.recurrent * width, dim)),
        "b": (b, (of.inputs * width,)),
        "c": (c, (of.recurrent * width,)),
        **{str(k): (state, (1, x.shape[1], width)) for k, state in enumerate(states)},
    }
    for tensor, shape in expected.values():
        if tensor is not None and (tensor.shape != shape or not tensor.is_contiguous()):
            return None
    options = Options(cell.function, cell.backend)
    time, batch, _ = x.shape
    if not _is_taken(reset, x):
        return None
    size, resets = (time, batch, cell.heads, dim), reset is not None
    how = {"training": training, "turned": turned(x)}
    run = rnn_plans.prepare_layer("forward", options, size, x.device, x.dtype, resets, **how)
    return None if run is None else Layer(cell, flat, training, run, options)


class RecurrentLayer(Function):
    """Runs a plan under autograd."""

    # torch looks these attributes up at each call, and finds them faster here than in its base classes.
    setup_context = staticmethod(Function.setup_context)
    clear_saved_tensors_on_access = boxed_grads_call = False

    @staticmethod
    def forward(ctx: Any, layer: Layer, *flat: Any) -> Any:
        h, last, kept = layer.forward(*flat)
        # As ``set_materialize_grads`` and ``save_for_backward`` do, at half the cost.
        ctx.materialize_grads = False
        ctx.to_save = *flat, h, *kept
        ctx.layer = layer
        return h, *last

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        layer, tensors, wanted = ctx.layer, ctx.saved_tensors, ctx.needs_input_grad[1:]
        gradients_of_flat = None
        if not _is_compiling() and not _enabled() and unobserved(*grads):
            gradients_of_flat = layer.backward(tensors, grads, wanted)
        if gradients_of_flat is not None:
            return None, *gradients_of_flat

        flat = tensors[: len(wanted)]
        if transforms_active() or has_tangents(
            *grads
        ):  # in which torch.autograd.grad is not to be called
            return None, *composed_backward(layer.cell, flat, grads, wanted)

        def recompute(flat: list[Any], _: bool) -> Any:
            h, last = composed(layer.cell, *flat)
            return zip((h, *last), grads, strict=True)

        if _is_compiling():  # by compiled autograd, which knows of no context variables
            return None, *gradients(flat, wanted, recompute)
        with policy.as_required(layer.required):
            return None, *gradients(flat, wanted, recompute)


#: ``RecurrentLayer.apply`` without torch's search for transforms: calls that get here are under none.
_recorded: Callable[..., Any] = super(Function, RecurrentLayer).apply


def _plan_call(
    recorded: bool, flat: tuple[Any, ...], options: tuple[Any, ...]
) -> Callable[..., Result] | None:
    """The plan of a call of ``fast_layer``. None if an argument has to be converted, if ``composed`` first copies a tensor that
    does not start at a multiple of 16 bytes, or if no kernel takes all steps in one launch."""
    *of_cell, first = options
    cell, (x, *others) = Cell(*of_cell), flat
    if addresses_of(flat) or (first and x.dim() != 3):
        return None
    with torch.no_grad():
        layer = _plan(cell, (x.transpose(0, 1) if first else x, *others), recorded)
    if layer is None:
        return None

    def untracked(*flat: Any) -> Result:
        h, last, _ = layer.forward(*flat)
        return h, last

    def tracked(*flat: Any) -> Result:
        h, *last = _recorded(layer, *flat)
        return h, last

    run = tracked if recorded else untracked
    return (lambda x, *others: run(x.transpose(0, 1), *others)) if first else run


_fast = fast_path(_plan_call)


def fast_layer(cell: Cell, flat: tuple[Any, ...], first: bool = False) -> Result | None:
    """What ``composed`` computes from the same tensors, or with ``first`` from x (B, T, I). None if ``composed`` has to compute
    it: if an argument has to be converted, no kernel takes all steps in one launch, or the dispatcher would do more than find
    the kernels."""
    if _is_compiling() or not on_gpu(flat[0]) or is_autocast(flat[0]) or not unwatched():
        return None
    result: Result | None = _fast(flat, (*cell, first))
    return result
