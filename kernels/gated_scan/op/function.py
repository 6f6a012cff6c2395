"""``gated_scan``: h[t] = gate[t]·h[t-1] + token[t], with gates and tokens computed from a network's outputs.

``gated_scan_kinds`` has one function for each kind of gates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from scan_registry.dispatch.select import BACKENDS, Backend
from scan_registry.kernels.gated_scan.op import autograd as gated_scan_derivatives
from scan_registry.kernels.gated_scan.op.arguments import Options, normalised
from scan_registry.kernels.gated_scan.op.autograd import fast_scan
from scan_registry.ops.call import unwatched
from scan_registry.ops.checks import as_bool, as_index
from scan_registry.ops.pools import StateRows, refuse_checkpoints, scan_rows, timed
from scan_registry.ops.sharded import call_sharded

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class CommonOptions(TypedDict, total=False):
        """What gated scans take by name, with and without ranks."""

        reset: Tensor | None
        dim: int
        reverse: bool
        cu_seqlens: Tensor | None
        backend: Backend

    class GatedScanOptions(CommonOptions, total=False):
        """Likewise of one process, beside ``return_final_state``."""

        initial_state: Tensor | StateRows | None


__all__ = ["BACKENDS", "gated_scan"]

_is_compiling = torch.compiler.is_dynamo_compiling


# fmt: off
@overload
def gated_scan(
    kind: str, *inputs: Tensor,
    return_final_state: Literal[False] = False, **options: Unpack[GatedScanOptions],
) -> Tensor: ...
@overload
def gated_scan(
    kind: str, *inputs: Tensor,
    return_final_state: Literal[True], **options: Unpack[GatedScanOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def gated_scan(
    kind: str, *inputs: Tensor, return_final_state: bool, **options: Unpack[GatedScanOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on


def gated_scan(
    kind: str, *inputs: Tensor, initial_state: Tensor | StateRows | None = None,
    reset: Tensor | None = None, dim: int = -1, reverse: bool = False,
    cu_seqlens: Tensor | None = None, return_final_state: bool = False, backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """States of h[t] = gate[t]·h[t-1] + token[t] along ``dim``. ``kind`` says how gate and token follow from the inputs.

    With σ the sigmoid, and g(x) = x + ½ for x ≥ 0, else σ(x):

    | kind | sequences; channel parameters | gate | token |
    |---|---|---|---|
    | `linear` | gates, tokens | gates | tokens |
    | `min_gru` | gate, hidden | 1 − σ(gate) | σ(gate)·g(hidden) |
    | `min_gru_identity` | gate, hidden | 1 − σ(gate) | σ(gate)·hidden |
    | `min_lstm` | forget, input, hidden | f = σ(forget) / (σ(forget) + σ(input)) | (1 − f)·g(hidden) |
    | `min_lstm_identity` | forget, input, hidden | f | (1 − f)·hidden |
    | `rg_lru` | x, recurrence_gate, input_gate; a_param | a = exp(−8·σ(recurrence_gate)·softplus(a_param)) | √(1 − a²)·σ(input_gate)·x |
    | `hgrn` | x, forget; lower_bound | f = lower_bound + (1 − lower_bound)·σ(forget) | (1 − f)·silu(x) |

    Args:
        kind: a name in the table's first column.
        inputs: the tensors in the table's second column, in that order. Sequences: (batch, channels, time), or with
            ``dim=1`` (batch, time, channels), of one shape and one dtype: float32, bfloat16, float16 or float64. Channel
            parameters: (channels,), one value for each channel, float32 or narrower, or float64 with sequences of float64.
        initial_state: h[-1], or with ``reverse`` h[T]: broadcasts to the state's shape; zero if None. A state
            has the shape of the sequences without ``dim``; with ``cu_seqlens``, that shape with ``dim``
            counting sequences. Or ``StateRows``, rows (channels,) of a pool, which final states are written to; with
            ``cu_seqlens`` the batch is 1 then.
        reset: bool, (batch, time): where a state starts anew. The state that the scan brings to such a step counts as
            zero, even if it is infinite or NaN.
        dim: the time dimension, -1 or 2, or 1 or -2.
        reverse: compute h[t] = gate[t]·h[t+1] + token[t] instead.
        cu_seqlens: (sequences + 1,), int32 or int64: where sequences that are packed along ``dim`` begin, and where
            the last one ends: 0, …, T; as for ``linear_scan``.
        return_final_state: return the state after the last step, too.
        backend: ``"auto"`` takes the best that this device has; ``"cuda"`` pins the family's own kernels;
            ``"triton"`` computes gates and tokens by torch's operators, and scans them with ``linear_scan``'s
            Triton kernels; ``"reference"`` is plain torch on any device.

    Returns:
        The states, in the shape and dtype of the sequences, and if asked for the final state in float32, or float64 with
        sequences of float64. Gates, tokens and states are computed in float32, or in float64, under autocast
        as well. Differentiable in all tensors but ``reset`` and ``cu_seqlens``, any number of times, in forward and in
        reverse mode; for a backward pass only inputs and states are kept. Where no kernel fits, and on the CPU in
        float64, gates and tokens are computed by torch's operators and the rest by ``linear_scan``.

    Raises:
        TypeError: there are too many tensors or too few, an argument is not a tensor, or a dtype is not supported or
            does not mix.
        ValueError: there is no such kind, a shape is not as described, devices differ, or ``dim``, ``cu_seqlens`` or
            ``backend`` is out of range.
        NoKernelError: ``require``, ``SCAN_REGISTRY_REQUIRE`` or ``backend`` allows nothing that runs
            on this GPU; the message lists what there is.
        DriverError: the driver failed; the message names the kernel, its variant and the launch.

    Warns:
        FallbackWarning: once per kernel, where it is compiled here or plain torch stands in for it.
    """
    options = Options(kind, dim, reverse, return_final_state, backend)
    return run(kind, inputs, reset, initial_state, cu_seqlens, options)


def run(
    kind: Any, inputs: Any, reset: Any, initial_state: Any, cu_seqlens: Any, options: Options
) -> Tensor | tuple[Tensor, Tensor]:
    """What ``gated_scan`` returns. The arguments are not checked yet."""
    if isinstance(initial_state, StateRows):
        both = _scan_rows(kind, inputs, reset, initial_state, cu_seqlens, options)
        return both if as_bool("return_final_state", options.final) else both[0]
    if not _is_compiling() and unwatched():
        outputs = fast_scan((*inputs, initial_state, reset, cu_seqlens), options)
        if outputs is not None:
            return outputs  # type: ignore[no-any-return]
    tensors = *inputs, initial_state, cu_seqlens, reset
    if (sharded := call_sharded("gated_scan", tensors, options)) is not None:
        return sharded  # type: ignore[no-any-return]
    arguments = normalised(kind, inputs, reset, initial_state, cu_seqlens, options)
    states, final_state = gated_scan_derivatives.scan(*arguments)
    return states if final_state is None else (states, final_state)


def _scan_rows(
    kind: Any, inputs: Any, reset: Any, rows: StateRows, cu_seqlens: Any, options: Options
) -> tuple[Tensor, Tensor]:
    """States and final states of a scan from rows of a pool."""
    dim = as_index("dim", options.dim)
    sequences = {
        str(number): (tensor, dim)
        for number, tensor in enumerate(inputs)
        if not isinstance(tensor, Tensor) or tensor.dim() == 3
    }
    along = timed(**sequences, reset=(reset, 1))
    refuse_checkpoints(rows, reverse=options.reverse)

    def scan(parts: Mapping[str, Any], states: Tensor, bounds: Any) -> tuple[Tensor, Tensor]:
        own = tuple(parts.get(str(number), tensor) for number, tensor in enumerate(inputs))
        wanted = options._replace(final=True)
        out, final_state = run(kind, own, parts.get("reset"), states, bounds, wanted)
        return out, final_state

    operator = kind if isinstance(kind, str) else "gated_scan"
    return scan_rows(
        *(operator, rows, scan, along, dim, cu_seqlens), sequences_dim=dim, others=tuple(inputs)
    )
