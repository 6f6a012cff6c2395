"""How a causal convolution runs: by a kernel, or in plain torch; forwards, backwards and step by step.

Arguments are as ``normalised`` makes them. A call of shapes, strides and dtypes seen before finds its selection in a
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scan_registry.base.alignment import common_alignment
from scan_registry.dispatch import policy
from scan_registry.dispatch.select import Decision
from scan_registry.kernels.causal_conv1d import reference
from scan_registry.kernels.causal_conv1d.op import cpu as causal_conv1d_cpu
from scan_registry.kernels.causal_conv1d.op.arguments import (
    COMPILED,
    Arguments,
    Options,
    UpdateArguments,
    UpdateOptions,
)
from scan_registry.kernels.causal_conv1d.problem import (
    ConvProblem,
    Direction,
    ReductionProblem,
    Strides,
    UpdateProblem,
    layout_of,
)
from scan_registry.kernels.causal_conv1d.spec import FAMILY, pieces
from scan_registry.kernels.model import Variant
from scan_registry.ops.launching import Run, allocator, plan_cache
from scan_registry.ops.operator import SingleCall
from scan_registry.runtime.loader import prepare, run_reference

Wanted = tuple[bool, bool, bool, bool]  # the gradients of x, weight, bias and the initial state
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]

# --- Problems ---------------------------------------------------------------------------------


class KernelCall(SingleCall[ConvProblem | ReductionProblem | UpdateProblem]):
    """One kernel's part in an operator's call: its problem, and the names of the inputs that are copied first."""


def _new_strides(x: Tensor) -> tuple[int, ...]:
    """Of a new tensor like x."""
    return x.stride() if x.is_contiguous() else torch.empty_like(x, device="meta").stride()


def make_kernel_call(
    direction: Direction,
    arguments: Arguments,
    options: Options,
    y_grad: Tensor | None = None,
    others: Sequence[Tensor | None] = (),
) -> KernelCall:
    """The kernel call of one direction. Tensors that have other strides than x, or no dimension of unit stride, are
    copied first: to the strides of a new tensor like x, or without gaps. The kernel also reads ``others``."""
    x, dense = arguments.x, _new_strides(arguments.x)
    own = {"x": x.stride(), **({} if y_grad is None else {"y_grad": y_grad.stride()})}
    copied: tuple[str, ...] = ()
    layout = layout_of(x.shape, [*own.values(), dense])
    if layout is None:
        layout = layout_of(x.shape, [x.stride(), dense])
        copied = ("y_grad",)
        if layout is None:
            copied = tuple(own)
            layout = layout_of(x.shape, [dense])
            if layout is None:  # batch has unit stride
                layout = "time_last"
                dense = torch.empty(x.shape, device="meta").stride()
        own |= dict.fromkeys(copied, dense)
    batch, channels, time = x.shape
    problem = ConvProblem(
        *(direction, layout, str(x.dtype).removeprefix("torch.")),
        *(batch, channels, time, arguments.weight.shape[1]),
        strides=tuple(Strides(*own) for own in (*own.values(), dense)),
        alignment=common_alignment(
            t.data_ptr() for t in (*arguments, y_grad, *others) if t is not None and not t.is_meta
        ),
        sequences=0 if arguments.cu_seqlens is None else arguments.cu_seqlens.shape[0] - 1,
        indexed=arguments.seq_idx is not None,
        silu=options.silu,
        wide_weights=arguments.weight.dtype != x.dtype,
    )
    return KernelCall(problem, copied)


def make_reduction_call(arguments: Arguments, count: int) -> KernelCall:
    """The sum over a backward kernel's ``count`` pieces."""
    output = str(arguments.weight.dtype).removeprefix("torch.")
    channels, width = arguments.weight.shape
    return KernelCall(ReductionProblem(output, count, channels, width))


def make_update_call(arguments: UpdateArguments, options: UpdateOptions) -> KernelCall:
    """What an update makes of its inputs."""
    x, state, bounds = arguments.x, arguments.state, arguments.cu_seqlens
    batch, channels, time = x.shape
    problem = UpdateProblem(
        str(x.dtype).removeprefix("torch."),
        *(batch, channels, time, arguments.weight.shape[1]),
        slots=state.shape[0],
        length=state.shape[2],
        strides=tuple(Strides(*own) for own in (x.stride(), state.stride(), _new_strides(x))),
        silu=options.silu,
        wide_weights=arguments.weight.dtype != x.dtype,
        sequences=0 if bounds is None else bounds.shape[0] - 1,
        pad_slot_id=options.pad_slot_id,
        wide_bounds=bounds is not None and bounds.dtype == torch.int64,
        alignment=common_alignment(
            t.data_ptr() for t in arguments[:4] if t is not None and not t.is_meta
        ),
        in_order=arguments.positions is None and arguments.accepted is None,
    )
    return KernelCall(problem)


def _runner(
    call: KernelCall, device: torch.device, options: Options | UpdateOptions
) -> tuple[Run, Variant] | Decision:
    """A function that runs the best kernel for the problem; where only plain torch solves it, the decision that says
    so."""
    backend: Any = options.backend
    plan = prepare(device.index, FAMILY, call.problem, backend, policy.lowest())
    variant = plan.decision.taken().variant
    if plan.launch is None or variant is None:
        return plan.decision
    return plan.run, variant


def _is_plain(x: Tensor, options: Options | UpdateOptions) -> bool:
    """Whether no kernel on a GPU is looked for."""
    return (
        options.backend == "reference"
        or x.device.type == "cpu"
        or x.dtype not in COMPILED
        or x.numel() == 0
    )


def _like(model: Tensor, tensor: Tensor) -> Tensor:
    """In the dtype and the memory layout of a new tensor like the model."""
    if tensor.dtype == model.dtype and tensor.stride() == _new_strides(model):
        return tensor
    return torch.empty_like(model).copy_(tensor)


def _copied(tensors: Mapping[str, Tensor], call: KernelCall) -> dict[str, Tensor]:
    """The tensors, with copies, in the strides of the problem, of those that ``call`` names."""
    problem = call.problem
    assert isinstance(problem, ConvProblem)
    strides = tuple(vars(problem.strides[-1]).values())
    return {
        name: torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)
        if name in call.copied
        else t
        for name, t in tensors.items()
    }


def _written_like(x: Tensor, call: KernelCall) -> tuple[Callable[[], Any], bool]:
    """A function that makes what a kernel writes in the shape of x, and whether that lies as a new tensor like x does."""
    assert isinstance(call.problem, ConvProblem)
    strides = tuple(vars(call.problem.strides[-1]).values())
    return allocator(x.device, x.shape, x.dtype, strides), strides == _new_strides(x)


def _gaps(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the weight or the bias has to be copied for the kernels, which read them without gaps."""
    return not (weight.is_contiguous() and (bias is None or bias.is_contiguous()))


# --- Forward ----------------------------------------------------------------------------------


def _check(arguments: Arguments, final_grad: Tensor | None = None) -> None:
    """Raise for tensors that kernels must not be given: users may call the registered operator directly."""
    x, weight, bias, state, seq_idx, cu_seqlens = arguments
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    of_state = rows, x.shape[1], weight.shape[-1] - 1
    expected = {
        "weight": (weight, (x.shape[1], weight.shape[-1]), (x.dtype, torch.float32)),
        "bias": (bias, (x.shape[1],), (weight.dtype,)),
        "initial_state": (state, of_state, (x.dtype,)),
        "the final state's gradient": (final_grad, of_state, (x.dtype,)),
        "seq_idx": (seq_idx, (x.shape[0], x.shape[2]), (torch.int32,)),
        "cu_seqlens": (cu_seqlens, (rows + 1,), (torch.int64,)),
    }
    for name, (tensor, shape, dtypes) in expected.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes or tensor.device != x.device:
            raise ValueError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}; the operator "
                f"takes {' or '.join(map(str, dtypes))} of shape {shape} on {x.device}"
            )


def forward(arguments: Arguments, options: Options) -> tuple[Tensor, Tensor | None]:
    """y, and the final state if ``options`` asks for it."""
    outputs: tuple[Tensor, Tensor | None] = plan_cache.run(plan_forward, arguments, options)
    return outputs


def _new_state(shape: Sequence[int], x: Tensor, packed: bool, entering: Tensor | None) -> Tensor:
    """Memory for a state or its gradient. A kernel writes nothing for packed sequences without steps, which keep
    ``entering``."""
    state = torch.empty(shape, dtype=x.dtype, device=x.device)
    if packed:
        state = state.zero_() if entering is None else state.copy_(entering)
    return state


def plan_forward(*args: Any) -> Callable[..., Any]:
    """The plan of ``forward``, from its tensors and options."""
    *tensors, options = args
    arguments = Arguments(*tensors)
    _check(arguments)

    def by_reference(*tensors: Any) -> Any:
        x, weight, bias, state, seq_idx, cu_seqlens = tensors
        runs = reference.Runs(seq_idx, cu_seqlens)
        how = runs, options.silu, options.final
        y, final_state = reference.forward(x, weight, bias, state, *how)
        return _like(x, y), None if final_state is None else final_state.contiguous()

    if _is_plain(arguments.x, options):
        return causal_conv1d_cpu.plan_forward(arguments.x, options) or by_reference
    call = make_kernel_call("forward", arguments, options)
    runner = _runner(call, arguments.x.device, options)
    if isinstance(runner, Decision):
        return partial(run_reference, runner, by_reference)
    run, shape, packed = runner[0], arguments.state_shape, arguments.cu_seqlens is not None
    new_y, alike = _written_like(arguments.x, call)
    gaps = _gaps(arguments.weight, arguments.bias)

    def plan(*tensors: Any) -> Any:
        x, weight, bias, state, seq_idx, cu_seqlens = tensors
        inputs = _copied({"x": x}, call) if call.copied else {"x": x}
        y = new_y()
        final_state = _new_state(shape, x, packed, state) if options.final else None
        run(
            {
                **inputs,
                "weight": weight.contiguous() if gaps else weight,
                "bias": bias.contiguous() if gaps and bias is not None else bias,
                "initial_state": state,
                "seq_idx": seq_idx,
                "cu_seqlens": cu_seqlens,
                "y": y,
                "final_state": final_state,
            }
        )
        return y if alike else _like(x, y), final_state

    return plan


# --- Backward ---------------------------------------------------------------------------------


def backward(
    arguments: Arguments,
    y_grad: Tensor,
    final_grad: Tensor | None,
    options: Options,
    wanted: Wanted,
) -> Gradients:
    """The gradients that are wanted, in the dtypes of what they are of."""
    tensors = *arguments, y_grad, final_grad
    return plan_cache.run(plan_backward, tensors, options, wanted)  # type: ignore[no-any-return]


def _reduction(arguments: Arguments, count: int, options: Options) -> Run | None:
    """Runs the kernel that adds partial sums up. Where there is none, plain torch does, in another order."""
    runner = _runner(make_reduction_call(arguments, count), arguments.x.device, options)
    return None if isinstance(runner, Decision) else runner[0]


def _new_sums(arguments: Arguments, count: int) -> tuple[Callable[[], Any], ...]:
    """Functions that make a backward kernel's partial sums, and the gradients of the weight and of the bias."""
    device, weight = arguments.x.device, arguments.weight
    channels, width = weight.shape
    return (
        allocator(device, (count, width + 1, channels)),
        allocator(device, weight.shape, weight.dtype),
        allocator(device, (channels,), weight.dtype),
    )


def narrowed(arguments: Arguments, gradients: reference.Gradients, wanted: Wanted) -> Gradients:
    """Those that are wanted, in the dtypes of what they are of."""
    x, weight, bias, state, *_ = arguments
    models = x, weight, weight if bias is None else bias, x if state is None else state
    of_x, of_weight, of_bias, of_state = (
        grad.to(model.dtype) if want else None
        for grad, model, want in zip(gradients, models, wanted, strict=True)
    )
    return of_x, of_weight, of_bias, of_state


def plan_backward(*args: Any) -> Callable[..., Any]:
    """The plan of ``backward``, from its tensors, options and what is wanted."""
    arguments, (y_grad, final_grad, options, wanted) = Arguments(*args[:6]), args[6:]
    _check(arguments, final_grad)
    if y_grad.shape != arguments.x.shape or y_grad.dtype != arguments.x.dtype:
        raise ValueError(
            f"y_grad is {y_grad.dtype} of shape {tuple(y_grad.shape)}; the operator takes {arguments.x.dtype} of "
            f"shape {tuple(arguments.x.shape)}"
        )

    def by_reference(*tensors: Any) -> Any:
        arguments, (grad, last) = Arguments(*tensors[:6]), tensors[6:]
        x, weight, bias, state, seq_idx, cu_seqlens = arguments
        runs = reference.Runs(seq_idx, cu_seqlens)
        grads = reference.backward(x, weight, bias, state, grad, last, runs, options.silu)
        of_x, of_weight, of_bias, of_state = narrowed(arguments, grads, wanted)
        return (
            None if of_x is None else _like(x, of_x),
            None if of_weight is None else of_weight.contiguous(),
            of_bias,
            None if of_state is None else of_state.clone(memory_format=torch.contiguous_format),
        )

    if _is_plain(arguments.x, options):
        return causal_conv1d_cpu.plan_backward(arguments.x, options, wanted) or by_reference
    call = make_kernel_call("backward", arguments, options, y_grad, [final_grad])
    runner = _runner(call, arguments.x.device, options)
    if isinstance(runner, Decision):
        return partial(run_reference, runner, by_reference)
    run, variant = runner
    of_x, of_weight, of_bias, of_state = wanted
    assert isinstance(call.problem, ConvProblem)
    count = pieces(variant, call.problem)
    reduce = _reduction(arguments, count, options) if of_weight or of_bias else None
    shape, packed = arguments.state_shape, arguments.cu_seqlens is not None
    width = arguments.weight.shape[1]
    new_x_grad, alike = _written_like(arguments.x, call)
    gaps = _gaps(arguments.weight, arguments.bias)
    new_partials, new_weight_grad, new_bias_grad = _new_sums(arguments, count)

    def plan(*tensors: Any) -> Any:
        x, weight, bias, state, seq_idx, cu_seqlens, grad, last = tensors
        inputs = {"x": x, "y_grad": grad}
        if call.copied:
            inputs = _copied(inputs, call)
        x_grad = new_x_grad()
        state_grad = weight_grad = bias_grad = partials = None
        last = None if last is None else last.contiguous()
        if of_state:
            state_grad = _new_state(shape, x, packed, last)
        if of_weight or of_bias:
            partials = new_partials()
        run(
            {
                **inputs,
                "weight": weight.contiguous() if gaps else weight,
                "bias": bias.contiguous() if gaps and bias is not None else bias,
                "initial_state": state,
                "seq_idx": seq_idx,
                "cu_seqlens": cu_seqlens,
                "final_state_grad": last,
                "x_grad": x_grad,
                "initial_state_grad": state_grad,
                "partials": partials,
            }
        )
        if partials is not None and reduce is not None:
            if of_weight:
                weight_grad = new_weight_grad()
            if of_bias:
                bias_grad = new_bias_grad()
            reduce({"partials": partials, "weight_grad": weight_grad, "bias_grad": bias_grad})
        elif partials is not None:
            sums = partials.sum(0)
            weight_grad = sums[:width].flip(0).T.to(weight.dtype).contiguous()
            bias_grad = sums[width].to(weight.dtype, copy=True)  # on 16 bytes, unlike a view
        return (
            (x_grad if alike else _like(x, x_grad)) if of_x else None,
            weight_grad if of_weight else None,
            bias_grad if of_bias else None,
            state_grad,
        )

    return plan


# --- Step by step -----------------------------------------------------------------------------


def update(arguments: UpdateArguments, options: UpdateOptions) -> Tensor:
    """y; the state is changed in place."""
    y: Tensor = plan_cache.run(plan_update, arguments, options)
    return y


def plan_update(*args: Any) -> Callable[..., Any]:
    """The plan of ``update``, from its tensors and options."""
    *tensors, options = args
    arguments = UpdateArguments(*tensors)
    if not arguments.x.numel():
        return lambda x, *_: torch.empty_like(x)

    def by_reference(*tensors: Any) -> Any:
        own = UpdateArguments(*tensors)
        return _like(own.x, reference.update(*own[:4], own.rows(options.pad_slot_id), options.silu))

    if _is_plain(arguments.x, options):
        return causal_conv1d_cpu.plan_update(arguments, options) or by_reference
    runner = _runner(make_update_call(arguments, options), arguments.x.device, options)
    if isinstance(runner, Decision):
        return partial(run_reference, runner, by_reference)
    run, _ = runner

    def plan(*tensors: Any) -> Any:
        named = UpdateArguments(*tensors)._asdict()
        bias, y = named["bias"], torch.empty_like(named["x"])
        named["weight"] = named["weight"].contiguous()
        named["bias"] = bias if bias is None else bias.contiguous()
        run({**named, "y": y})
        return y

    return plan
