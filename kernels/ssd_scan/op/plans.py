"""How a state space dual scan runs: by kernels or by torch's matrix products, forwards and backwards.

A call with shapes, strides and dtypes seen before finds its selection in a plan. Arguments are as ``normalised`` makes
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scan_registry.dispatch import policy
from scan_registry.dispatch.select import Decision
from scan_registry.kernels import family
from scan_registry.kernels.ssd_scan import reference
from scan_registry.kernels.ssd_scan.op import composed, gating
from scan_registry.kernels.ssd_scan.op.arguments import DIFFERENTIABLE, Arguments, Options
from scan_registry.kernels.ssd_scan.op.problems import (
    copied,
    has_kernels,
    make_problem,
    stretches,
)
from scan_registry.kernels.ssd_scan.op.stretches import Stretches
from scan_registry.kernels.ssd_scan.problem import Direction, SSDScanProblem
from scan_registry.ops.launching import Run, allocator, plan_cache
from scan_registry.runtime.loader import prepare, run_reference

_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality

#: The output; the final state if it is asked for; and what z gates, if a backward pass needs it.
Outputs = tuple[Tensor, Tensor | None, Tensor | None]
Gradients = tuple[Tensor | None, ...]
#: What a call does to its tensors.
Plan = Callable[..., Any]
#: Kernels of a forward pass, of all time at once and of stretches.
_FORWARD: tuple[tuple[Direction, ...], ...] = (("forward",), ("states", "forward"))
#: Arguments that kernels take without gaps.
_DENSE = ("A", "D", "dt_bias", "seq_idx", "cu_seqlens")
#: The place of z among the arguments.
_OF_Z = Arguments._fields.index("z")


def on_gpu(tensor: Tensor) -> bool:
    """Where kernels run."""
    return bool(tensor.is_cuda)


def _in_torch(arguments: Arguments, options: Options) -> bool:
    x = arguments.x
    named = options.backend == "reference"
    return named or not on_gpu(x) or x.numel() == 0 or not has_kernels(arguments)


def _prepared(
    directions: Sequence[Direction],
    arguments: Arguments,
    options: Options,
    out_grad: Tensor | None,
    copies: tuple[str, ...],
    sequences: int = 0,
) -> list[tuple[Run, SSDScanProblem]] | Decision:
    """The kernels of these directions, with their problems; or the decision that there is none for one of them. ``sequences``: those
    that arguments without ``cu_seqlens`` are cut into; states are computed of all but the last one."""
    kernels, backend = [], options.backend
    for direction in directions:
        problem = make_problem(direction, arguments, options, out_grad, copies)
        if sequences:
            problem = replace(problem, sequences=sequences - (direction == "states"))
        index = arguments.x.device.index
        plan = prepare(index, family("ssd_scan"), problem, backend, policy.lowest())  # type: ignore[arg-type]
        if plan.launch is None:
            return plan.decision
        kernels.append((plan.run, problem))
    return kernels


def state_shape(arguments: Arguments) -> tuple[Any, ...]:
    """Of the states before and after."""
    batch, _, heads, size = arguments.x.shape
    bounds = arguments.cu_seqlens
    between = () if bounds is None else (bounds.shape[0] - 1,)
    return (batch, *between, heads, size, arguments.B.shape[3])


def _keeps_ungated(arguments: Arguments, options: Options, training: bool) -> bool:
    """Whether a forward pass returns what z gates, as kernels of the backward pass need it. A tensor that stands for one on a GPU,
    when operators are traced, is on meta here."""
    x = arguments.x
    stood_for = getattr(x, "fake_device", None)
    there = on_gpu(x) if stood_for is None else stood_for.type == "cuda"
    named = options.backend == "reference"
    return training and arguments.z is not None and there and not named and has_kernels(arguments)


def empty_outputs(arguments: Arguments, options: Options, training: bool) -> Outputs:
    """The outputs, not yet computed."""
    x = arguments.x
    dtype = reference.compute_dtype(x.dtype)
    final = x.new_empty(state_shape(arguments), dtype=dtype) if options.final else None
    ungated = x.new_empty(x.shape) if _keeps_ungated(arguments, options, training) else None
    return x.new_empty(x.shape), final, ungated


def inputs_of(model: Arguments, copies: Sequence[str]) -> Callable[..., dict[str, Any]]:
    """The kernels' pointers that are arguments, of all arguments like ``model``."""
    gaps = [
        name for name in _DENSE if (t := getattr(model, name)) is not None and not t.is_contiguous()
    ]

    def pointers(arguments: Arguments, out_grad: Tensor | None = None) -> dict[str, Any]:
        tensors = {**arguments._asdict(), "out_grad": out_grad}
        for name in (*copies, *gaps):
            # A new tensor, also where it lies without gaps but starts off the boundaries of 16 bytes.
            tensors[name] = tensors[name].clone(memory_format=torch.contiguous_format)
        tensors["initial_state"] = _in_pairs(tensors["initial_state"])
        return tensors

    return pointers


def _in_pairs(state: Tensor | None) -> Tensor | None:
    """A state without gaps, whose pairs of numbers start on 8 bytes, as kernels load them; a copy where they do not."""
    if state is None or (state.is_contiguous() and state.data_ptr() % 8 == 0):
        return state
    return state.clone(memory_format=torch.contiguous_format)


# --- Forward ----------------------------------------------------------------------------------


def forward(arguments: Arguments, options: Options, training: bool) -> Outputs:
    """``Outputs``; in ``training`` with what z gates, if there is a z."""
    outputs: Outputs = plan_cache.run(make_forward, tuple(arguments), options, training)
    return outputs


def make_forward(*args: Any) -> Plan:
    """The plan of ``forward``, from its tensors and options, and whether it is training."""
    *tensors, options, training = args
    arguments = Arguments(*tensors)
    keeps = _keeps_ungated(arguments, options, training)

    def by_torch(*tensors: Any) -> Outputs:
        every = Arguments(*tensors)
        out, final = composed.forward(every, options)
        ungated = composed.forward(every._replace(z=None), options)[0] if keeps else None
        return out, None if final is None else final.contiguous(), ungated

    if _in_torch(arguments, options):
        return by_torch
    copies = copied(arguments)
    cut = Stretches.of(arguments.x.shape[1], stretches(arguments))
    directions, count = _FORWARD[cut.count > 1], cut.count if cut.count > 1 else 0
    kernels = _prepared(directions, arguments, options, None, copies, count)
    if isinstance(kernels, Decision):
        return partial(run_reference, kernels, by_torch)
    *first, run = [run for run, _ in kernels]
    inputs, x = inputs_of(arguments, copies), arguments.x
    new_out = allocator(x.device, x.shape, x.dtype)
    state = state_shape(arguments)
    new_final = allocator(x.device, state) if options.final else lambda: None
    new_ungated = new_out if keeps else lambda: None

    def plan(*tensors: Any) -> Outputs:
        pointers = inputs(Arguments(*tensors))
        out, ungated = new_out(), new_ungated()
        pointers |= {"out": out, "ungated": ungated}
        if cut.count > 1:
            last = cut.run(first[0], run, pointers, state)
            return out, last.clone() if options.final else None, ungated
        final = new_final()
        run(pointers | {"final_state": final})
        return out, final, ungated

    return plan


# --- Backward ---------------------------------------------------------------------------------


def backward(
    arguments: Arguments,
    ungated: Tensor | None,
    out_grad: Tensor,
    final_grad: Tensor | None,
    options: Options,
    wanted: tuple[bool, ...],
) -> Gradients:
    """The gradients that are wanted, of the differentiable arguments, each in its own dtype and without gaps. ``ungated`` is
    what the forward pass has kept."""
    tensors = *arguments, ungated, out_grad, final_grad
    gradients: Gradients = plan_cache.run(make_backward, tensors, options, wanted)
    return gradients


def make_backward(*args: Any) -> Plan:
    """The plan of ``backward``, from its tensors, options and what is wanted."""
    *tensors, options, wanted = args
    *every, _, out_grad, _ = tensors
    arguments = Arguments(*every)

    def by_torch(*tensors: Any) -> Gradients:
        # Below autograd, where the dispatcher may have come to by now, no derivatives are recorded.
        recorded = torch._C._SetExcludeDispatchKeyGuard(_AUTOGRAD, False)
        with recorded, torch.no_grad():
            gradients = composed.backward(
                Arguments(*tensors[:-3]), options, tensors[-2], tensors[-1], wanted
            )
        return tuple(None if g is None else g.contiguous() for g in gradients)

    if _in_torch(arguments, options):
        return by_torch
    needed = tuple(
        want and tensor is not None for want, tensor in zip(wanted, arguments, strict=False)
    )
    if arguments.z is not None:  # kernels take the gradient of what it gates, without gaps
        arguments = arguments._replace(z=None)
        out_grad = torch.empty(out_grad.shape, dtype=out_grad.dtype, device="meta")
    copies = copied(arguments, out_grad)
    directions: tuple[Direction, ...] = ("states", "adjoint", "backward")
    kernels = _prepared(directions, arguments, options, out_grad, copies)
    if isinstance(kernels, Decision):
        return partial(run_reference, kernels, by_torch)
    runs, problem = [run for run, _ in kernels], kernels[-1][1]
    inputs = inputs_of(arguments, copies)
    buffers = {
        name: allocator(arguments.x.device, shape, dtype)
        for name, (shape, dtype) in written(arguments, problem, needed[-1]).items()
    }

    def plan(*tensors: Any) -> Gradients:
        *every, ungated, out_grad, final_grad = tensors
        arguments, inner_grad = Arguments(*every), out_grad
        if arguments.z is not None:
            inner_grad = gating.gradient_of_ungated(out_grad, arguments.z)
        pointers = inputs(arguments, inner_grad)
        pointers["final_grad"] = _in_pairs(final_grad)
        pointers |= {name: new() for name, new in buffers.items()}
        for run in runs:
            run(pointers)
        gradients = finished(arguments, pointers, needed)
        if needed[_OF_Z]:
            assert arguments.z is not None
            z_grad = gating.gradient_of_z(out_grad, ungated, arguments.z)
            return *gradients[:_OF_Z], z_grad, *gradients[_OF_Z + 1 :]
        return gradients

    return plan


def _slots_shape(problem: SSDScanProblem) -> tuple[int, ...]:
    """Of the states before chunks."""
    p = problem
    return p.batch, p.slots, p.heads, p.head_size, p.state_size


def written(
    arguments: Arguments, problem: SSDScanProblem, initial: bool
) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what a backward pass writes, and of what its kernels hand on to each other, by the names of
    pointers. ``initial``: whether the initial state's gradient is wanted."""
    x, wide, p = arguments.x, torch.float32, problem
    heads = 3, p.batch, p.slots, p.heads
    projection = p.splits, *arguments.B.shape
    of_sums = wide if p.splits > 1 else x.dtype
    buffers = {
        "states": (_slots_shape(p), x.dtype),
        "adjoints": (_slots_shape(p), x.dtype),
        "x_grad": (x.shape, x.dtype),
        "dt_grad": (x.shape[:3], wide),
        "head_grads": (heads, wide),
        "B_grad": (projection, of_sums),
        "C_grad": (projection, of_sums),
    }
    if initial:
        buffers["initial_grad"] = state_shape(arguments), wide
    return buffers


def finished(
    arguments: Arguments, pointers: Mapping[str, Any], needed: tuple[bool, ...]
) -> Gradients:
    """The gradients that are needed, of what kernels wrote; None for that of z."""
    dt_grad = pointers["dt_grad"]
    of_heads = _sums_of_heads(pointers["head_grads"])
    wide_D = arguments.D is not None and arguments.D.dim() == 2
    gradients: list[Callable[[], Tensor | None]] = [
        lambda: pointers["x_grad"],
        lambda: dt_grad.to(arguments.dt.dtype),
        lambda: of_heads[0],
        lambda: _total(pointers["B_grad"], arguments.B.dtype),
        lambda: _total(pointers["C_grad"], arguments.C.dtype),
        lambda: _skip_gradient(arguments, pointers["out_grad"]) if wide_D else of_heads[1],
        lambda: None,  # of z
        lambda: of_heads[2],
        lambda: pointers["initial_grad"],
    ]
    assert len(gradients) == DIFFERENTIABLE
    return tuple(
        gradient() if need else None for gradient, need in zip(gradients, needed, strict=True)
    )


def _sums_of_heads(terms: Tensor) -> Tensor:
    """The gradients of A, D and the bias, (3, heads). Each begins on a 16-byte boundary, as compiled graphs expect of results."""
    heads = terms.shape[-1]
    rows = terms.new_empty(terms.shape[0], -(-heads // 4) * 4)[:, :heads]
    return torch.sum(terms, (1, 2), out=rows)


def _skip_gradient(arguments: Arguments, out_grad: Tensor) -> Tensor:
    """That of D (H, P)."""
    return (out_grad.float() * arguments.x).sum((0, 1))


def _total(terms: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the first dimension; of two terms in one launch, which adds in their dtype and rounds once."""
    if terms.shape[0] == 2:
        first, second = terms.unbind()
        same = first.dtype == dtype
        out = first if same else first.new_empty(first.shape, dtype=dtype)
        return torch.add(first, second, out=out)
    return (terms[0] if terms.shape[0] == 1 else terms.sum(0)).to(dtype)
