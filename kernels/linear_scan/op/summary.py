"""``linear_scan_summary``: what a whole scan does to the state before it, in one read and without states.

The kernels summarize. Derivatives are those of two scans: of the final state from a state of zero, and of the final
state from a state of one without tokens, which is the product of the gates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scan_registry.dispatch import policy
from scan_registry.dispatch.select import Backend
from scan_registry.kernels.linear_scan.op import plans
from scan_registry.kernels.linear_scan.op.arguments import Options, normalised
from scan_registry.kernels.linear_scan.op.autograd import first_derivative, in_front, scan
from scan_registry.kernels.linear_scan.op.problems import StateLayout
from scan_registry.ops import flops
from scan_registry.ops.call import has_tangents, unobserved
from scan_registry.ops.registration import below_autograd, record, register

__all__ = ["linear_scan_summary"]

_is_compiling = torch.compiler.is_compiling


def linear_scan_summary(
    gates: Tensor,
    tokens: Tensor,
    *,
    dim: int = -1,
    reverse: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """The affine map of the whole linear recurrence x[t] = gates[t] * x[t-1] + tokens[t] along ``dim``.

    After the last step, the state is ``final_gate * initial_state + final_state``. So a sequence that is cut into pieces
    can be scanned piece by piece, on as many GPUs: the summaries of the pieces before one give the state that it
    starts from. A summary reads gates and tokens once and writes no states.

    Args:
        gates: as for ``linear_scan``.
        tokens: as for ``linear_scan``.
        dim: the time dimension, as for ``linear_scan``.
        reverse: summarize x[t] = gates[t] * x[t+1] + tokens[t] instead.
        backend: as for ``linear_scan``. There are CUDA kernels, and none in Triton.

    Returns:
        ``(final_gate, final_state)``, in the shape of a state: that of ``tokens`` without ``dim``. ``final_gate`` is the
        product of all gates, and ``final_state`` the state after the last step if the one before the first is zero;
        without steps they are 1 and 0. Both are float32, or float64 or complex64 for such tokens. Results are the
        same in every run on one GPU. Differentiable in gates and tokens, any number of times, in both modes. The
        derivatives take one scan for each of the two results, forward and backward.

    Raises:
        TypeError: an argument is not a tensor, or a dtype is not supported or does not mix.
        ValueError: shapes do not broadcast, devices differ, or ``dim`` or ``backend`` is out of range.
        NoKernelError: ``require``, ``SCAN_REGISTRY_REQUIRE`` or ``backend`` allows nothing that runs on this GPU.
        ProviderError: an installed package of archives does not go with this version.
        DriverError: the driver failed; the message names the kernel, its variant and the launch.

    Warns:
        FallbackWarning: once per kernel, where it is compiled here or plain torch stands in for it.
    """
    options = Options(dim, reverse, False, backend)
    gates, tokens, _, _, options = normalised(gates, tokens, None, None, options)
    if not _is_compiling() and unobserved(gates, tokens):
        if torch.is_grad_enabled() and (gates.requires_grad or tokens.requires_grad):
            return LinearScanSummary.apply(gates, tokens, options, True)  # type: ignore[no-any-return, no-untyped-call]
        return plans.summary(gates, tokens, options)
    if not _is_compiling():
        flops.announce()
    return _op(gates, tokens, *_own_options(options))  # type: ignore[no-any-return]


def _own_options(options: Options) -> tuple[int, bool, str]:
    """The operator's own options."""
    return options.dim, options.reverse, options.backend


def _options(dim: int, reverse: bool, backend: str) -> Options:
    """Of the scans that the derivatives take."""
    return Options(dim, reverse, True, backend)


class LinearScanSummary(torch.autograd.Function):
    """Saves gates and tokens, and scans again for a derivative. ``direct`` goes round the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, tokens: Tensor, options: Options, direct: bool
    ) -> tuple[Tensor, Tensor]:
        if direct:
            final_gate, final_state = plans.summary(gates, tokens, options)
        else:
            with below_autograd():
                final_gate, final_state = _op(gates, tokens, *_own_options(options))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(gates, tokens)
        ctx.options, ctx.required = options, policy.required.get()
        return final_gate, final_state

    @staticmethod
    def backward(ctx: Any, gate_grad: Tensor | None, state_grad: Tensor | None) -> Any:
        unwrap = torch._C._functorch.unwrap_if_dead
        gates, tokens = map(unwrap, ctx.saved_tensors)
        options, required, needs = ctx.options, ctx.required, ctx.needs_input_grad[:2]
        if _is_compiling():
            return (
                *_gradients(gates, tokens, gate_grad, state_grad, options, needs, None),
                None,
                None,
            )
        with policy.as_required(required):
            gradients = _gradients(gates, tokens, gate_grad, state_grad, options, needs, required)
        return *gradients, None, None


def _gradients(
    gates: Tensor,
    tokens: Tensor,
    gate_grad: Tensor | None,
    state_grad: Tensor | None,
    options: Options,
    wanted: tuple[bool, bool],
    required: Any,
) -> tuple[Tensor | None, Tensor | None]:
    """Those of gates and of tokens, in differentiable operators or by kernels."""
    options = _options(*_own_options(options))
    zero = tokens.new_zeros(()).expand(tokens.shape)

    def backward(
        tokens: Tensor, initial: Tensor | None, grad: Tensor, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        states = scan(gates, tokens, initial, None, options)[0] if wanted[0] else None
        tensors = gates, states, zero, initial, grad, None
        return first_derivative(tensors, options, (*wanted, False), required)[:2]

    gates_grad = tokens_grad = None
    if state_grad is not None:
        gates_grad, tokens_grad = backward(tokens, None, state_grad, wanted)
    if gate_grad is not None and wanted[0]:
        of_product, _ = backward(zero, torch.ones_like(gate_grad), gate_grad, (True, False))
        assert of_product is not None
        gates_grad = of_product if gates_grad is None else gates_grad + of_product
    return gates_grad, tokens_grad


def _composed(gates: Tensor, tokens: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """In operators that torch differentiates in both modes."""
    options = _options(*_own_options(options))
    zero = tokens.new_zeros(()).expand(tokens.shape)
    _, final_state = scan(gates, tokens, None, None, options)
    assert final_state is not None
    _, final_gate = scan(gates, zero, torch.ones_like(final_state), None, options)
    assert final_gate is not None
    return final_gate, final_state


# --- Registration -----------------------------------------------------------------------------


def _summary(gates: Tensor, tokens: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return plans.summary(gates, tokens, _options(*options))


def _summary_fake(gates: Tensor, tokens: Tensor, dim: int, *_: Any) -> tuple[Tensor, Tensor]:
    layout = StateLayout.of(tokens, dim, None)
    return layout.empty(), layout.empty()


def _summary_autograd(gates: Tensor, tokens: Tensor, *options: Any) -> Any:
    if has_tangents(gates, tokens):
        return _composed(gates, tokens, _options(*options))
    if torch.is_grad_enabled() and (gates.requires_grad or tokens.requires_grad):
        return record(LinearScanSummary, gates, tokens, _options(*options), False)
    with torch._C._AutoDispatchBelowAutograd():
        return _op(gates, tokens, *options)


def _summary_mapped(info: Any, in_dims: Any, *args: Any) -> Any:
    """The rule of ``torch.vmap``: one summary with a dimension more."""
    gates, tokens, *options = args
    gates, tokens = in_front(info.batch_size, gates, tokens, *in_dims[:2])
    return _op(gates, tokens, *options), (0, 0)


_op = register(
    "linear_scan_summary(Tensor gates, Tensor tokens, int dim, bool reverse, str backend) -> (Tensor, Tensor)",
    __name__,
    {
        "device": "_summary",
        "Autograd": "_summary_autograd",
        "Meta": "_summary_fake",
        "FuncTorchBatched": "_summary_mapped",
    },
)
# For graphs of torch.compile, which call the operator by itself.
flops.announce()
