"""The kinds of ``gated_scan`` as functions of their own: minGRU, minLSTM, RG-LRU and HGRN."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor

from scan_registry.dispatch.select import Backend
from scan_registry.kernels.gated_scan.op.arguments import Options, channel_values, with_activation
from scan_registry.kernels.gated_scan.op.function import run
from scan_registry.ops.pools import StateRows

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    from scan_registry.kernels.gated_scan.op.function import GatedScanOptions

    class MinOptions(GatedScanOptions, total=False):
        """What ``min_gru`` and ``min_lstm`` take by name, beside ``return_final_state``."""

        activation: Activation

    class RGLRUOptions(TypedDict, total=False):
        """What ``rg_lru`` takes by name alone, beside ``return_final_state``."""

        initial_state: Tensor | StateRows | None
        dim: int
        reverse: bool
        cu_seqlens: Tensor | None
        backend: Backend


__all__ = ["hgrn", "min_gru", "min_lstm", "rg_lru"]

Activation = Literal["positive", "identity"]


# fmt: off
@overload
def min_gru(
    gate: Tensor, hidden: Tensor, *,
    return_final_state: Literal[False] = False, **options: Unpack[MinOptions],
) -> Tensor: ...
@overload
def min_gru(
    gate: Tensor, hidden: Tensor, *,
    return_final_state: Literal[True], **options: Unpack[MinOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def min_gru(
    gate: Tensor, hidden: Tensor, *, return_final_state: bool, **options: Unpack[MinOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on


def min_gru(
    gate: Tensor, hidden: Tensor, *, activation: Activation = "positive",
    initial_state: Tensor | StateRows | None = None, reset: Tensor | None = None, dim: int = -1,
    reverse: bool = False, cu_seqlens: Tensor | None = None, return_final_state: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """States of minGRU: with z = σ(gate), h[t] = (1 − z)·h[t-1] + z·g(hidden).

    By Feng et al., "Were RNNs all we needed?" (2024), https://arxiv.org/abs/2410.01201, section 3.1 and appendix B.

    Args:
        gate: before the sigmoid. (batch, channels, time), or with ``dim=1`` (batch, time, channels); float32, bfloat16,
            float16 or float64.
        hidden: the candidate state, of the shape and dtype of ``gate``.
        activation: ``"positive"`` takes g(x) = x + ½ for x ≥ 0, else σ(x), as the paper's appendix does;
            ``"identity"`` takes g(x) = x, as its section 3.1 does.
        initial_state, reset, dim, reverse, cu_seqlens, return_final_state, backend: as for ``gated_scan``.

    Returns:
        The states, and if asked for the final state, as ``gated_scan`` does, which also says what is raised.
    """
    kind = with_activation("min_gru", activation)
    options = Options(kind, dim, reverse, return_final_state, backend)
    return run(kind, (gate, hidden), reset, initial_state, cu_seqlens, options)


# fmt: off
@overload
def min_lstm(
    forget: Tensor, input: Tensor, hidden: Tensor, *,
    return_final_state: Literal[False] = False, **options: Unpack[MinOptions],
) -> Tensor: ...
@overload
def min_lstm(
    forget: Tensor, input: Tensor, hidden: Tensor, *,
    return_final_state: Literal[True], **options: Unpack[MinOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def min_lstm(
    forget: Tensor, input: Tensor, hidden: Tensor, *,
    return_final_state: bool, **options: Unpack[MinOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on


def min_lstm(
    forget: Tensor, input: Tensor, hidden: Tensor, *, activation: Activation = "positive",
    initial_state: Tensor | StateRows | None = None, reset: Tensor | None = None, dim: int = -1,
    reverse: bool = False, cu_seqlens: Tensor | None = None, return_final_state: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """States of minLSTM: with f = σ(forget) / (σ(forget) + σ(input)), h[t] = f·h[t-1] + (1 − f)·g(hidden).

    By Feng et al., "Were RNNs all we needed?" (2024), https://arxiv.org/abs/2410.01201, section 3.2 and appendix B. The
    quotient is right where both sigmoids round to 0, and 1 − f has all its digits where f is close to 1.

    Args:
        forget: before the sigmoid. (batch, channels, time), or with ``dim=1`` (batch, time, channels); float32, bfloat16,
            float16 or float64.
        input: before the sigmoid, of the shape and dtype of ``forget``.
        hidden: the candidate state, of the shape and dtype of ``forget``.
        activation: ``"positive"`` takes g(x) = x + ½ for x ≥ 0, else σ(x), as the paper's appendix does;
            ``"identity"`` takes g(x) = x, as its section 3.2 does.
        initial_state, reset, dim, reverse, cu_seqlens, return_final_state, backend: as for ``gated_scan``.

    Returns:
        The states, and if asked for the final state, as ``gated_scan`` does, which also says what is raised.
    """
    kind = with_activation("min_lstm", activation)
    options = Options(kind, dim, reverse, return_final_state, backend)
    return run(kind, (forget, input, hidden), reset, initial_state, cu_seqlens, options)


# fmt: off
@overload
def rg_lru(
    x: Tensor, recurrence_gate: Tensor, input_gate: Tensor, a_param: Tensor,
    reset: Tensor | None = None, *,
    return_final_state: Literal[False] = False, **options: Unpack[RGLRUOptions],
) -> Tensor: ...
@overload
def rg_lru(
    x: Tensor, recurrence_gate: Tensor, input_gate: Tensor, a_param: Tensor,
    reset: Tensor | None = None, *,
    return_final_state: Literal[True], **options: Unpack[RGLRUOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def rg_lru(
    x: Tensor, recurrence_gate: Tensor, input_gate: Tensor, a_param: Tensor,
    reset: Tensor | None = None, *,
    return_final_state: bool, **options: Unpack[RGLRUOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on


def rg_lru(
    x: Tensor, recurrence_gate: Tensor, input_gate: Tensor, a_param: Tensor,
    reset: Tensor | None = None, *, initial_state: Tensor | StateRows | None = None, dim: int = -1,
    reverse: bool = False, cu_seqlens: Tensor | None = None, return_final_state: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """States of RG-LRU, the recurrence of Griffin and RecurrentGemma.

    With a = exp(−8·σ(recurrence_gate)·softplus(a_param)), h[t] = a·h[t-1] + √(1 − a²)·σ(input_gate)·x; where ``reset`` is
    true, h[t] = σ(input_gate)·x. By De et al., "Griffin" (2024), https://arxiv.org/abs/2402.19427, section 2.4. As in the
    implementations that models were trained with, the square root's derivative counts as 1000 where it is larger.
    1 − a² is computed by expm1, so that it is right for a near 1.

    Args:
        x: (batch, channels, time), or with ``dim=1`` (batch, time, channels); float32, bfloat16, float16 or float64.
        recurrence_gate: before the sigmoid, of the shape and dtype of ``x``.
        input_gate: before the sigmoid, of the shape and dtype of ``x``.
        a_param: (channels,), before the softplus; float32 or narrower, or float64 if ``x`` is.
        reset: bool, (batch, time): where a state starts anew, as at the first token of a document.
        initial_state, dim, reverse, cu_seqlens, return_final_state, backend: as for ``gated_scan``. The first step of
            a sequence is no reset unless ``reset`` says so. In the published models it is one.

    Returns:
        The states, and if asked for the final state, as ``gated_scan`` does, which also says what is raised.
    """
    options = Options("rg_lru", dim, reverse, return_final_state, backend)
    return run(
        "rg_lru",
        (x, recurrence_gate, input_gate, a_param),
        reset,
        initial_state,
        cu_seqlens,
        options,
    )


# fmt: off
@overload
def hgrn(
    x: Tensor, forget: Tensor, lower_bound: Tensor | float | None = None, *,
    return_final_state: Literal[False] = False, **options: Unpack[GatedScanOptions],
) -> Tensor: ...
@overload
def hgrn(
    x: Tensor, forget: Tensor, lower_bound: Tensor | float | None = None, *,
    return_final_state: Literal[True], **options: Unpack[GatedScanOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def hgrn(
    x: Tensor, forget: Tensor, lower_bound: Tensor | float | None = None, *,
    return_final_state: bool, **options: Unpack[GatedScanOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on


def hgrn(
    x: Tensor, forget: Tensor, lower_bound: Tensor | float | None = None, *,
    initial_state: Tensor | StateRows | None = None, reset: Tensor | None = None, dim: int = -1,
    reverse: bool = False, cu_seqlens: Tensor | None = None, return_final_state: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """States of HGRN: with f = γ + (1 − γ)·σ(forget), h[t] = f·h[t-1] + (1 − f)·silu(x).

    By Qin et al., "Hierarchically gated recurrent neural network for sequence modeling" (2023),
    https://arxiv.org/abs/2311.04823, in the form with real states that flash-linear-attention's layer has. γ is
    ``lower_bound``. 1 − f has all its digits where f is close to 1.

    Args:
        x: (batch, channels, time), or with ``dim=1`` (batch, time, channels); float32, bfloat16, float16 or float64.
        forget: before the sigmoid, of the shape and dtype of ``x``.
        lower_bound: the least that f can be: a number from 0 to 1, or a tensor (channels,), float32 or narrower, or float64
            if ``x`` is. Values of a tensor that are NaN, or further from this range than four times its dtype's ``eps``,
            are refused on the CPU, and under ``SCAN_REGISTRY_DEBUG=1`` on a GPU; else states may grow without bound.
            None counts as 0.
        initial_state, reset, dim, reverse, cu_seqlens, return_final_state, backend: as for ``gated_scan``.

    Returns:
        The states, and if asked for the final state, as ``gated_scan`` does, which also says what is raised.
    """
    bound = channel_values("lower_bound", lower_bound, x, dim)
    options = Options("hgrn", dim, reverse, return_final_state, backend)
    return run("hgrn", (x, forget, bound), reset, initial_state, cu_seqlens, options)
