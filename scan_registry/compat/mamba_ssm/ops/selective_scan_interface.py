"""Stands in for ``mamba_ssm.ops.selective_scan_interface``: the selective scan, and the block of Mamba around it.

What the functions do differently from those that they replace: tensors of any strides; groups of B and C with every
option; CPU tensors; gradients that are the same in every run, of the last state too, and of any order. Those that end
in ``_ref`` compute the same in plain torch, step after step. Like the originals they take 0 and 1 for bools.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.nn.functional import linear

from scan_registry.compat.arguments import as_flag, check_dtypes
from scan_registry.dispatch.select import Backend
from scan_registry.kernels.selective_scan.op.function import selective_scan
from scan_registry.nn.mamba_inner import Norms, Weights, convolve_and_scan
from scan_registry.ops.checks import check_tensors, is_autocast

if TYPE_CHECKING:
    from typing import Protocol

    class _SelectiveScan(Protocol):
        """``selective_scan_fn`` and ``selective_scan_ref``."""

        __name__: str
        __module__: str

        # fmt: off
        @overload
        def __call__(
            self, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
            z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
            return_last_state: Literal[False] = False,
        ) -> Tensor: ...
        @overload
        def __call__(
            self, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
            z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
            *, return_last_state: Literal[True],
        ) -> tuple[Tensor, Tensor]: ...
        @overload
        def __call__(
            self, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
            z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
            return_last_state: bool = False,
        ) -> Tensor | tuple[Tensor, Tensor]: ...
        # fmt: on


__all__ = ["mamba_inner_fn", "mamba_inner_ref", "selective_scan_fn", "selective_scan_ref"]


def _typed(function: Callable[..., Any]) -> _SelectiveScan:
    """The function, with result types that follow from ``return_last_state``."""
    return function


@_typed
def selective_scan_fn(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """h[t] = exp(δ·A)·h[t-1] + δ·B·u and y = (C·h + D·u)·silu(z), with δ = softplus(delta + delta_bias).

    As ``mamba_ssm.ops.selective_scan_interface.selective_scan_fn``; ``scan_registry.selective_scan`` is the same with an
    initial state and packed sequences.

    Args:
        u: (batch, channels, L).
        delta: like ``u``.
        A: (channels, N), float32 or complex64.
        B: (channels, N), (batch, N, L) or (batch, groups, N, L); of a complex ``A`` pairs along L, 2·L of them.
        C: of the shapes that ``B`` may have.
        D: (channels,).
        z: like ``u``; None for no gate.
        delta_bias: (channels,).
        delta_softplus: whether δ is the softplus, or ``delta + delta_bias`` itself.
        return_last_state: return the state after the last step, too.

    Returns:
        The output in the shape and the dtype of ``u``, and if asked for the last state, (batch, channels, N), in float32
        or complex64.

    Raises:
        TypeError, ValueError: the arguments are not as described.
        NoKernelError: ``require`` or ``SCAN_REGISTRY_REQUIRE`` allows nothing that runs on this GPU.
    """
    delta, z = (_laid_out_like(u, tensor) for tensor in (delta, z))
    return selective_scan(
        *(u, delta, A, B, C, D, z, delta_bias, as_flag("delta_softplus", delta_softplus)),
        return_final_state=as_flag("return_last_state", return_last_state),
    )


#: From this size on, in elements, a copy costs less than strided reads in the kernel.
_WORTH_A_COPY = 1 << 20


def _laid_out_like(u: Any, x: Any) -> Any:
    """``x``. If it is large: with unit stride along channels if ``u`` has that, else along time; a copy if need be.

    transformers' Mamba gives step sizes along time beside inputs along channels.
    """
    for tensor in (u, x):
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.dim() != 3:
            return x  # absent, or for the operator to refuse
    if x.numel() < _WORTH_A_COPY:
        return x
    if u.stride(1) == 1 and u.stride(2) != 1:
        return x if x.stride(1) == 1 else x.mT.contiguous().mT
    return x if x.stride(2) == 1 else x.contiguous()


@_typed
def selective_scan_ref(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """``selective_scan_fn`` in plain torch."""
    return selective_scan(
        *(u, delta, A, B, C, D, z, delta_bias, as_flag("delta_softplus", delta_softplus)),
        return_final_state=as_flag("return_last_state", return_last_state),
        backend="reference",
    )


def mamba_inner_fn(
    xz: Tensor, conv1d_weight: Tensor, conv1d_bias: Tensor | None, x_proj_weight: Tensor,
    delta_proj_weight: Tensor, out_proj_weight: Tensor, out_proj_bias: Tensor | None, A: Tensor,
    B: Tensor | None = None, C: Tensor | None = None, D: Tensor | None = None,
    delta_bias: Tensor | None = None, B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None, delta_softplus: bool = True, checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None, c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None, b_c_dt_rms_eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """A block of Mamba behind its first projection: convolution, selective scan, gate, and the last projection.

    As ``mamba_ssm.ops.selective_scan_interface.mamba_inner_fn``, except that

    - where channels of ``xz`` lie without gaps, as behind a linear layer, nothing is copied;
    - the weights of the norms have gradients;
    - ``checkpoint_lvl`` changes nothing: torch's own ``checkpoint`` trades time for memory where that is wanted.

    Args:
        xz: (batch, 2·channels, L): the input of the convolution, then the gate.
        conv1d_weight: (channels, 1, width).
        conv1d_bias: (channels,).
        x_proj_weight: (ranks + 2·N, channels), of a complex ``A`` (ranks + 4·N, channels): rows are step sizes, B, C.
        delta_proj_weight: (channels, ranks).
        out_proj_weight: (features, channels).
        out_proj_bias: (features,).
        A: (channels, N), float32 or complex64.
        B: as in ``selective_scan_fn``; None to take that of ``x_proj_weight``.
        C: as in ``selective_scan_fn``; None to take that of ``x_proj_weight``.
        D: (channels,).
        delta_bias: (channels,).
        B_proj_bias: (N,), of a complex ``A`` (2·N,); added where ``B`` is None.
        C_proj_bias: in the shape of ``B_proj_bias``; added where ``C`` is None.
        delta_softplus: whether step sizes are the softplus.
        checkpoint_lvl: 0 or 1.
        b_rms_weight: (N,), of a root-mean-square norm of B.
        c_rms_weight: (N,), of C.
        dt_rms_weight: (channels,), of step sizes, behind their projection and before ``delta_bias`` is added.
        b_c_dt_rms_eps: what these norms add to the mean square.

    Returns:
        (batch, L, features), in the dtype of ``xz``, or in autocast's.

    Raises:
        TypeError, ValueError: the arguments are not as described.
        NoKernelError: ``require`` or ``SCAN_REGISTRY_REQUIRE`` allows nothing that runs on this GPU.
    """
    if checkpoint_lvl not in (0, 1):
        raise ValueError(f"checkpoint_lvl is {checkpoint_lvl!r}; accepted are 0 and 1")
    norms = Norms(b_rms_weight, c_rms_weight, dt_rms_weight, b_c_dt_rms_eps)
    return _inner(
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias,
        A, B, C, D, delta_bias, B_proj_bias, C_proj_bias, delta_softplus, norms, "auto",
    )  # fmt: skip


def mamba_inner_ref(
    xz: Tensor, conv1d_weight: Tensor, conv1d_bias: Tensor | None, x_proj_weight: Tensor,
    delta_proj_weight: Tensor, out_proj_weight: Tensor, out_proj_bias: Tensor | None, A: Tensor,
    B: Tensor | None = None, C: Tensor | None = None, D: Tensor | None = None,
    delta_bias: Tensor | None = None, B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None, delta_softplus: bool = True,
) -> Tensor:  # fmt: skip
    """``mamba_inner_fn`` in plain torch, without norms. ``delta_softplus=False`` is heeded, which the original does not."""
    return _inner(
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias,
        A, B, C, D, delta_bias, B_proj_bias, C_proj_bias, delta_softplus, Norms(), "reference",
    )  # fmt: skip


def _inner(
    xz: Tensor, conv1d_weight: Tensor, conv1d_bias: Tensor | None, x_proj_weight: Tensor,
    delta_proj_weight: Tensor, out_proj_weight: Tensor, out_proj_bias: Tensor | None, A: Tensor,
    B: Tensor | None, C: Tensor | None, D: Tensor | None, delta_bias: Tensor | None,
    B_proj_bias: Tensor | None, C_proj_bias: Tensor | None, delta_softplus: bool, norms: Norms,
    backend: Backend,
) -> Tensor:  # fmt: skip
    named = {
        "xz": xz,
        "conv1d_weight": conv1d_weight,
        "x_proj_weight": x_proj_weight,
        "delta_proj_weight": delta_proj_weight,
        "out_proj_weight": out_proj_weight,
        "A": A,
    }
    optional = {
        "conv1d_bias": conv1d_bias,
        "out_proj_bias": out_proj_bias,
        "B": B,
        "C": C,
        "D": D,
        "delta_bias": delta_bias,
        "B_proj_bias": B_proj_bias,
        "C_proj_bias": C_proj_bias,
        "b_rms_weight": norms.B,
        "c_rms_weight": norms.C,
        "dt_rms_weight": norms.dt,
    }
    taken = (B is None) + (C is None)
    _check(named, {name: value for name, value in optional.items() if value is not None}, taken)
    for name, projected, weight in (("B", B, norms.B), ("C", C, norms.C)):
        if weight is not None and projected is not None and projected.dim() == 2:
            raise ValueError(
                f"{name} does not change with time, so {name.lower()}_rms_weight must be None"
            )
    weights = Weights(
        conv=conv1d_weight.squeeze(1),
        conv_bias=conv1d_bias,
        rank=delta_proj_weight.shape[1],
        x_proj=x_proj_weight,
        dt_proj=delta_proj_weight,
        dt_bias=delta_bias,
        A=A,
        D=D,
        B=B,
        C=C,
        B_bias=B_proj_bias,
        C_bias=C_proj_bias,
    )
    y, _ = convolve_and_scan(
        *_halves(xz),
        weights,
        norms,
        delta_softplus=as_flag("delta_softplus", delta_softplus),
        backend=backend,
    )
    bias = out_proj_bias
    if bias is not None and not is_autocast(y):
        bias = bias.to(y.dtype)
    return linear(y.transpose(1, 2), out_proj_weight, bias)


def _halves(xz: Tensor) -> tuple[Tensor, Tensor]:
    """Two halves of the channels. Where these lie without gaps, the derivative of the views makes no transposed copy."""
    if xz.stride(1) != 1 or xz.stride(2) == 1:
        x, z = xz.chunk(2, 1)
        return x, z
    x, z = xz.mT.chunk(2, -1)
    return x.mT, z.mT


def _check(named: dict[str, Any], optional: dict[str, Any], taken: int) -> None:
    """Refuse shapes and dtypes that do not fit together, in the names of ``mamba_inner_fn``; operators check A, B and C.
    ``taken`` is how many of B and C come from the projection."""
    present = named | optional
    check_tensors(present)
    xz, A, ranks = named["xz"], named["A"], named["delta_proj_weight"]
    if xz.dim() != 3 or xz.shape[1] % 2:
        raise ValueError(f"xz has shape {tuple(xz.shape)}; it must be (batch, 2 * channels, time)")
    channels = xz.shape[1] // 2
    if A.dim() != 2 or A.shape[0] != channels:
        raise ValueError(
            f"A has shape {tuple(A.shape)}; for {channels} channels it must be ({channels}, states)"
        )
    if ranks.dim() != 2 or ranks.shape[0] != channels:
        raise ValueError(
            f"delta_proj_weight has shape {tuple(ranks.shape)}; for {channels} channels it must be ({channels}, ranks)"
        )
    if A.is_complex() and not optional.keys().isdisjoint({"b_rms_weight", "c_rms_weight"}):
        raise ValueError("A is complex; b_rms_weight and c_rms_weight must be None then")
    states = A.shape[1] * (2 if A.is_complex() else 1)
    conv, features = named["conv1d_weight"], named["out_proj_weight"]
    outside = features.shape[0] if features.dim() == 2 else "features"
    rows, least = named["x_proj_weight"].shape[:1], ranks.shape[1] + taken * states
    expected = {
        "conv1d_weight": (channels, 1, conv.shape[2] if conv.dim() == 3 else "width"),
        "conv1d_bias": (channels,),
        "x_proj_weight": (max([*rows, least]), channels),
        "D": (channels,),
        "delta_bias": (channels,),
        "out_proj_weight": (outside, channels),
        "out_proj_bias": (outside,),
        "B_proj_bias": (states,),
        "C_proj_bias": (states,),
        "b_rms_weight": (states,),
        "c_rms_weight": (states,),
        "dt_rms_weight": (channels,),
    }
    sizes = f"{channels} channels, {states} rows of B and C and {ranks.shape[1]} ranks"
    _check_shapes(present, expected, sizes)
    real = {name: value for name, value in present.items() if name not in ("A", "B", "C")}
    check_dtypes("xz", real, ("x_proj_weight", "delta_proj_weight", "out_proj_weight"))


def _check_shapes(named: dict[str, Any], expected: dict[str, tuple[Any, ...]], sizes: str) -> None:
    for name, value in named.items():
        if name in expected and tuple(value.shape) != expected[name]:
            shape = ", ".join(map(str, expected[name])) + "," * (len(expected[name]) == 1)
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}; for {sizes} it must be ({shape})"
            )
