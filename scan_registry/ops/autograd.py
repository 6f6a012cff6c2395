"""What autograd needs of an operator, written once for all: dispatch, and derivatives in both modes, of any order.

A family of kernels gives its forward pass, its first derivative, and both composed of operators that torch differentiates. The
composed ones compute derivatives of derivatives, forward mode and ``torch.func``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from scan_registry.base.environment import flag
from scan_registry.dispatch import policy
from scan_registry.dispatch.fit import Tier
from scan_registry.ops import flops
from scan_registry.ops.call import (
    fast_path,
    forward_mode,
    has_tangents,
    tracing_state,
    transforms_active,
    unobserved,
    unwatched,
    wants_gradient,
)
from scan_registry.ops.registration import register

#: A tuple of tensors, of which some may be None.
Tensors = Any
Gradients = tuple[Tensor | None, ...]

_is_compiling = torch.compiler.is_compiling
_required = policy.required.get
_enabled = torch.is_grad_enabled


class Pass(NamedTuple):
    """A backward pass: what is saved, the gradients of the results, the options, and which gradients are wanted."""

    saved: Tensors
    grads: Tensors
    options: Any
    wanted: Any


class Recording:
    """What a node of autograd's graph keeps of a call.

    compute  the results of the tensors; with what is kept for the backward pass, if there is any
    results  how many of them the call returns in a tuple; 0 for the first one alone, None for what ``compute`` returns

    ``dispatched`` says whether torch's dispatcher has seen the call.
    """

    def __init__(
        self,
        family: Derivatives,
        options: Any,
        compute: Any,
        results: int | None = None,
    ) -> None:
        self.family, self.options, self.compute, self.results = family, options, compute, results
        self.required, self.dispatched = _required(), False


class Recorded(Function):
    """Tells autograd of a call, which is a recording and a tuple of results; if this is None, ``recording.compute`` runs."""

    # torch looks these attributes up at each call, and finds them faster here than in its base classes.
    setup_context = staticmethod(Function.setup_context)
    clear_saved_tensors_on_access = boxed_grads_call = False

    @staticmethod
    def forward(ctx: Any, call: tuple[Recording, Any], *tensors: Any) -> Any:
        recording, done = call
        results = recording.compute(*tensors) if done is None else done
        # As ``set_materialize_grads`` and ``save_for_backward`` do, at half the cost.
        ctx.materialize_grads = False
        ctx.recording = recording
        ctx.to_save = recording.family.saved(ctx, tensors, results)
        count = recording.results
        if count is None:
            return results
        return results[:count] if count else results[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        recording, needs = ctx.recording, ctx.needs_input_grad
        family, options = recording.family, recording.options
        grads = family.incoming(grads, options)
        if all(grad is None for grad in grads):
            return (None,) * len(needs)
        saved = family.restored(ctx.saved_tensors)
        wanted = needs[1 : len(needs) - family.others]
        back = Pass(saved, family.with_zeros(ctx, saved, grads), options, wanted)
        gradients = family.first_derivative(back, recording.required)
        return None, *gradients, *(None,) * family.others


class Derivatives:
    """The derivatives of an operator. A call of the operator is a tuple of tensors, of which some may be None, and options.

    options  the type of the options, a named tuple of numbers, bools and strings
    tensors  how many tensors there are
    others   how many of the tensors have no derivatives, the last ones
    kept     how many tensors are saved after those of the call
    grads    how many results have derivatives
    shaped   the place of the saved tensor that the first result is like: without a gradient of that, the backward pass gets zeros;
             None if it needs none
    trains   whether results that are kept for a backward pass are computed on request only
    rules    what maps the operator under ``torch.func``; "" if its composition does, also in forward mode
    node     the function of autograd that calls are recorded as

    A family gives functions of the tensors, the options and whether autograd records the call:

    forward   the results; None for one that is not asked for
    empty     tensors like them, not computed
    composed  the results but for those that are kept, of operators that torch differentiates; of tensors and options only

    And functions of a backward pass. All but the first return the gradients that are wanted, and None for others:

    plan_backward      a function of the saved tensors and the results' gradients; None if ``backward`` has to compute it
    backward           by the plan
    empty_gradients    tensors like the gradients, not computed
    composed_backward  of operators that torch differentiates

    ``saved`` returns what the backward pass needs, from autograd's context, the tensors and the results.
    """

    options: Any
    tensors: int
    others: int
    kept = 1
    grads = 2
    shaped: int | None = 0
    trains = False
    rules = ""
    node: type[Recorded] = Recorded
    op: Any
    backward_op: Any

    def __init__(self) -> None:
        # Without the search for transforms, which calls on the fast path are not under.
        self.record: Callable[..., Any] = super(Function, self.node).apply  # type: ignore[misc]
        self.backward_path = fast_path(self._plan_of_backward)

    # What a family gives.
    forward: Callable[[Tensors, Any, bool], Tensors]
    empty: Callable[[Tensors, Any, bool], Tensors]
    composed: Callable[[Tensors, Any], Tensors]
    saved: Callable[[Any, Tensors, Any], Tensors]
    plan_backward: Callable[[Pass], Callable[..., Gradients] | None]
    backward: Callable[[Pass], Gradients]
    empty_gradients: Callable[[Pass], Gradients]
    composed_backward: Callable[[Pass], Gradients]

    # What a family may do otherwise.

    def restored(self, saved: Tensors) -> Tensors:
        """The saved tensors, as the backward pass takes them."""
        return saved

    def incoming(self, grads: Tensors, options: Any) -> Tensors:
        """The gradients of the results. A result that was not asked for has none."""
        return (*grads, None)[:2] if options.final else (grads[0], None)

    def with_zeros(self, ctx: Any, saved: Tensors, grads: Tensors) -> Tensors:
        """The gradients of the results, with zeros where the backward pass needs a tensor."""
        first, *others = grads
        if first is None and self.shaped is not None:
            first = torch.zeros_like(saved[self.shaped])
        return first, *others

    def asked_for(self, results: Tensors, options: Any) -> Tensors:
        """The results of the registered operator, without those that were not asked for."""
        return results[0], results[1] if options.final else None

    def inputs(self, tensors: Tensors) -> Tensors:
        """The tensors of a call or of its backward pass that derivatives go through."""
        return tensors[: len(tensors) - self.others]

    def differentiated(self, back: Pass) -> Tensors:
        """The tensors of a backward pass that derivatives of derivatives go through."""
        return *self.inputs(back.saved[: len(back.saved) - self.kept]), *back.grads

    def flat(self, options: Any) -> tuple[Any, ...]:
        """The options as numbers, bools and strings."""
        return tuple(options)

    def unflat(self, values: Sequence[Any]) -> Any:
        """The inverse of ``flat``."""
        return self.options(*values)

    def joined(self, tensors: Tensors, options: Any, training: bool) -> Tensors:
        """The arguments of the registered operator."""
        return *tensors, *self.flat(options), *((training,) if self.trains else ())

    def split(self, args: Sequence[Any]) -> tuple[Tensors, Any, bool]:
        """The inverse of ``joined``."""
        tensors, others = tuple(args[: self.tensors]), list(args[self.tensors :])
        training = others.pop() if self.trains else False
        return tensors, self.unflat(others), training

    def backward_joined(self, back: Pass) -> Tensors:
        """The arguments of the registered operator's backward pass."""
        return *back.saved, *back.grads, *self.flat(back.options), [*back.wanted]

    def backward_split(self, args: Sequence[Any]) -> Pass:
        """The inverse of ``backward_joined``."""
        saved = self.tensors + self.kept
        count = saved + self.grads
        options, wanted = self.unflat(args[count:-1]), tuple(args[-1])
        return Pass(tuple(args[:saved]), tuple(args[saved:count]), options, wanted)

    # Calls.

    def fast_run(
        self,
        options: Any,
        compute: Any,
        run: Any,
        results: int | None,
        recorded: bool,
        checked: bool,
    ) -> Callable[..., Any]:
        """How calls run that have a plan ``compute``: by ``run`` or, if autograd records them, with so many results. ``checked``:
        while SCAN_REGISTRY_DEBUG is set, their values are checked, and they get None here."""
        if recorded:
            run = partial(self.record, (Recording(self, options, compute, results), None))
        if checked:
            return lambda *tensors: None if flag("SCAN_REGISTRY_DEBUG") else run(*tensors)
        return run  # type: ignore[no-any-return]

    def __call__(self, tensors: Tensors, options: Any) -> Tensors:
        """The results of ``normalised`` arguments, differentiable; None for one that is not asked for."""
        if not _is_compiling():
            if not self.rules and (transforms_active() or forward_mode()):
                return self.composed(tensors, options)
            if unobserved(*tensors):
                if not _enabled() or not wants_gradient(*self.inputs(tensors)):
                    return self.forward(tensors, options, False)
                recording = Recording(self, options, lambda *t: self.forward(t, options, True))
                results: Tensors = self.record((recording, None), *tensors)
                return results
            flops.announce()
        # A trace holds for calls with and without gradients, so nothing in it may depend on which is traced.
        tracing = not _is_compiling() and tracing_state() is not None
        # All tensors are looked at, also those that never require gradients: torch.compile of 2.6 to 2.9 supports neither
        # properties nor slices of named tuples.
        training = self.trains and not tracing and _enabled() and wants_gradient(*tensors)
        return self.asked_for(self.op(*self.joined(tensors, options, training)), options)

    def first_derivative(self, back: Pass, required: Tier | None) -> Gradients:
        """The gradients that are wanted, under what ``required`` was in the forward pass; in what compiled autograd traces,
        under what it is when the graph runs. They are differentiable where derivatives are recorded."""
        if _is_compiling():  # by compiled autograd, which knows of no context variables
            return self.derivative(back)
        if not _enabled() and unwatched():
            level = None if required is None else int(required)
            options = level, len(back.wanted), *back.wanted, *self.flat(back.options)
            gradients: Gradients | None = self.backward_path((*back.saved, *back.grads), options)
            if gradients is not None:
                return gradients
        with policy.as_required(required):
            return self.derivative(back)

    def _plan_of_backward(self, recorded: bool, tensors: Tensors, options: Tensors) -> Any:
        if recorded:
            return None
        required, count, *others = options
        saved = len(tensors) - self.grads
        how, wanted = self.unflat(others[count:]), tuple(others[:count])
        back = Pass(tensors[:saved], tensors[saved:], how, wanted)
        with policy.as_required(None if required is None else Tier(required)), torch.no_grad():
            return self.plan_backward(back)

    def derivative(self, back: Pass) -> Gradients:
        """The gradients that are wanted, by the plan, the registered operator or the composition."""
        every = self.differentiated(back)
        again = (_enabled() and wants_gradient(*every)) or transforms_active()
        if again or (not _is_compiling() and has_tangents(*every)):
            return self.composed_backward(back)
        if not _is_compiling() and unobserved(*back.saved, *back.grads):
            return self.backward(back)
        if not _is_compiling():
            flops.announce()
        gradients = self.backward_op(*self.backward_joined(back))
        return tuple([g if want else None for g, want in zip(gradients, back.wanted, strict=True)])

    # The operators of torch.

    def register(
        self,
        module: str,
        attribute: str,
        formulas: Mapping[str, flops.Formula],
        schema: str,
        backward_schema: str,
    ) -> None:
        """Register the operator and its backward pass, and what counts their operations. ``attribute`` of ``module`` is this
        object."""

        def functions(*names: str) -> dict[str, str]:
            keys = "device", "Autograd", "Meta", "FuncTorchBatchedDecomposition"
            return {key: f"{attribute}.{name}" for key, name in zip(keys, names, strict=True)}

        names = "on_device", "under_autograd", "on_meta", "on_composed"
        of_calls = functions(*names)
        if self.rules:
            del of_calls["FuncTorchBatchedDecomposition"]
            of_calls["FuncTorchBatched"] = self.rules
        self.op = register(schema, module, of_calls)
        backward = functions(*[f"backward_{name}" for name in names])
        self.backward_op = register(backward_schema, module, backward)
        flops.add(
            formulas
        )  # now, for graphs of torch.compile, which call the operators by themselves

    def on_device(self, *args: Any) -> Tensors:
        """The operator's kernel."""
        return _present(self.forward(*self.split(args)))

    def on_meta(self, *args: Any) -> Tensors:
        """What the operator's results are like."""
        return _present(self.empty(*self.split(args)))

    def on_composed(self, *args: Any) -> Tensors:
        """The operator of others, which torch transforms."""
        tensors, options, _ = self.split(args)
        results = self.composed(tensors, options)
        return _present((*results, None) if self.trains else results)

    def under_autograd(self, *args: Any) -> Tensors:
        """The operator where derivatives may be recorded."""
        tensors, options, _ = self.split(args)
        inputs = self.inputs(tensors)
        if transforms_active() or has_tangents(*inputs):
            return self.on_composed(*args)
        if _enabled() and wants_gradient(*inputs):
            return tuple(self.record((self.dispatched(options), None), *tensors))
        return self._below(args)

    def dispatched(self, options: Any) -> Recording:
        """What is recorded of a call of the operator."""
        recording = Recording(self, options, lambda *t: self._below(self.joined(t, options, True)))
        recording.dispatched = True
        return recording

    def _below(self, args: Tensors) -> Tensors:
        with torch._C._AutoDispatchBelowAutograd():
            results: Tensors = self.op(*args)
            return results

    def backward_on_device(self, *args: Any) -> Any:
        """The kernel of the operator's backward pass."""
        back = self.backward_split(args)
        return self.together(self.backward(back), back)

    def backward_on_meta(self, *args: Any) -> Any:
        """What the results of the operator's backward pass are like."""
        back = self.backward_split(args)
        return self.together(self.empty_gradients(back), back)

    def backward_on_composed(self, *args: Any) -> Any:
        """The operator's backward pass of others, which torch differentiates and transforms."""
        back = self.backward_split(args)
        return self.together(self.composed_backward(back), back)

    def backward_under_autograd(self, *args: Any) -> Any:
        """The operator's backward pass where derivatives may be recorded."""
        every = self.differentiated(self.backward_split(args))
        again = _enabled() and wants_gradient(*every)
        if again or transforms_active() or has_tangents(*every):
            return self.backward_on_composed(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return self.backward_op(*args)

    def together(self, gradients: Sequence[Tensor | None], back: Pass) -> Any:
        """The gradients as operators return them."""
        return _present(gradients, next(grad for grad in back.grads if grad is not None))


def _present(results: Sequence[Tensor | None], model: Tensor | None = None) -> tuple[Tensor, ...]:
    """Operators return tensors; an empty one stands for none."""
    like: Any = results[0] if model is None else model
    return tuple([like.new_empty(0) if result is None else result for result in results])
