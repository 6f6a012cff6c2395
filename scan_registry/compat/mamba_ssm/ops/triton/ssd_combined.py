"""Stands in for ``mamba_ssm.ops.triton.ssd_combined``: the scan of Mamba-2, and the block of Mamba-2 around it.

What the functions do differently from those that they replace:

- tensors of any strides, and any number of steps;
- ``chunk_size`` and ``state_dtype`` change nothing: kernels choose their chunks, and add up states in float32;
- ``cu_seqlens`` separates sequences by itself, also without ``seq_idx`` and ``return_varlen_states``, and the states after
  each of them have derivatives, too;
- initial states precede the first sequence, whatever its number in ``seq_idx`` is;
- CPU tensors; gradients that are the same in every run, and derivatives of any order.

Like the originals they take 0 and 1 for bools.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from scan_registry.compat.arguments import as_flag, check_dtypes, check_initial_states
from scan_registry.kernels.ssd_scan.op.function import ssd_scan
from scan_registry.nn.gated_norm import gated_norm
from scan_registry.nn.mamba2_inner import Sizes, Weights, convolve_and_scan
from scan_registry.ops.checks import check_dense, check_tensors, is_autocast

__all__ = ["mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"]

_NO_LIMIT = (0.0, float("inf"))
#: Of what ``mamba_split_conv1d_scan_combined`` takes its sizes from: how many dimensions there may be, and which.
_SHAPES = {
    "zxbcdt": ((3,), "(batch, L, features)"),
    "conv1d_weight": ((2,), "(channels + 2 * ngroups * states, width)"),
    "D": ((1, 2), "(heads,) or (heads, headdim)"),
}


def mamba_chunk_scan_combined(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int,
    D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None, seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMIT, return_final_states: bool = False,
    return_varlen_states: bool = False, state_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """s[t] = exp(δ·A)·s[t-1] + δ·x ⊗ B and y = (s·C + D·x)·silu(z), with δ = dt + dt_bias or its softplus, in ``dt_limit``.

    As ``mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined``, with the differences that this module names.

    Args:
        x: (batch, L, heads, P).
        dt: (batch, L, heads).
        A: (heads,).
        B: (batch, L, groups, N).
        C: like ``B``.
        chunk_size: taken and not used.
        D: (heads,) or (heads, P).
        z: like ``x``; None for no gate.
        dt_bias: (heads,).
        initial_states: (batch, heads, P, N), before the first step.
        seq_idx: (batch, L) integers. A sequence ends where the number changes.
        cu_seqlens: (sequences + 1,), bounds of sequences that are packed along the time of one batch row, from 0 to L.
        dt_softplus: whether δ is the softplus.
        dt_limit: the least and the greatest δ.
        return_final_states: return the states after the last step, too; with ``cu_seqlens`` those of the last sequence.
        return_varlen_states: return the states after each sequence of ``cu_seqlens``, too.
        state_dtype: taken and not used.

    Returns:
        The output, in the shape and the dtype of ``x``; then, if asked for, the final states, (batch, heads, P, N), and the
        states after each sequence, (sequences, heads, P, N), in float32, or in float64 if ``x`` is.

    Raises:
        TypeError, ValueError: the arguments are not as described.
        NoKernelError: ``require`` or ``SCAN_REGISTRY_REQUIRE`` allows nothing that runs on this GPU.
    """
    final = as_flag("return_final_states", return_final_states)
    varlen = as_flag("return_varlen_states", return_varlen_states)
    softplus = as_flag("dt_softplus", dt_softplus)
    if varlen and cu_seqlens is None:
        raise ValueError("cu_seqlens is None; return_varlen_states needs it")
    check_dense("x", x)
    initial = _initial(x, B, initial_states, cu_seqlens)
    result: Any = ssd_scan(
        *(x, dt, A, B, C, D, z, dt_bias, softplus, dt_limit, initial),
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        return_final_state=final or varlen,
    )
    if not (final or varlen):
        return result
    out, states = result
    if cu_seqlens is None:
        return out, states
    after = states.squeeze(0)
    return (out, *([after[-1:]] if final else []), *([after] if varlen else []))


def _initial(x: Tensor, B: Any, states: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | None:
    """The checked initial states, as ``ssd_scan`` takes them."""
    if cu_seqlens is not None:
        if x.dim() and x.shape[0] != 1:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; with cu_seqlens it must be (1, time, heads, size of a head)"
            )
        return _before_each(states, cu_seqlens)
    if states is not None:
        known = isinstance(B, Tensor) and x.dim() == B.dim() == 4
        shape = (x.shape[0], *x.shape[2:], B.shape[3]) if known else None
        check_initial_states(states, x, shape, "(batch, heads, size of a head, states)")
    return states


def _before_each(states: Tensor | None, cu_seqlens: Tensor) -> Tensor | None:
    """(1, sequences, …): ``states`` (1, …) before the first sequence, zeros before the others."""
    check_dense("cu_seqlens", cu_seqlens)
    if states is None:
        return None
    check_initial_states(states, cu_seqlens, None, "")
    if states.dim() != 4 or states.shape[0] != 1:
        raise ValueError(
            f"initial_states has shape {tuple(states.shape)}; with cu_seqlens it must be (1, heads, size of a head, "
            "states), before the first sequence"
        )
    others = states.new_zeros(max(cu_seqlens.numel() - 2, 0), *states.shape[1:])
    return torch.cat([states, others]).unsqueeze(0)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor, conv1d_weight: Tensor, conv1d_bias: Tensor | None, dt_bias: Tensor, A: Tensor,
    D: Tensor, chunk_size: int, initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None, dt_limit: tuple[float, float] = _NO_LIMIT,
    return_final_states: bool = False, activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None, rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None, outproj_bias: Tensor | None = None,
    headdim: int | None = None, ngroups: int = 1, norm_before_gate: bool = True,
) -> Any:  # fmt: skip
    """A block of Mamba-2 behind its first projection: convolution, scan, gate, norm, and the last projection.

    As ``mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined``, with the differences that this module names.

    Args:
        zxbcdt: (batch, L, 2·beside + 2·channels + 2·ngroups·N + heads), with channels = heads·headdim: gate and input of a
            linear path beside the scan, whose features may be none; the scan's gate; the convolution's input, which becomes
            x, B and C; step sizes.
        conv1d_weight: (channels + 2·ngroups·N, width).
        conv1d_bias: (channels + 2·ngroups·N,).
        dt_bias: (heads,).
        A: (heads,).
        D: (heads,) or (heads, headdim).
        chunk_size: taken and not used.
        initial_states: (batch, heads, headdim, N), before the first step.
        seq_idx: (batch, L) integers. A sequence ends, for the convolution and for the scan, where the number changes.
        dt_limit: the least and the greatest step size.
        return_final_states: return the scan's states after the last step, too.
        activation: behind the convolution: None, ``"silu"`` or ``"swish"``.
        rmsnorm_weight: (channels,), of a root-mean-square norm in each of ``ngroups`` groups; None for no norm.
        rmsnorm_eps: what the norm adds to the mean square.
        outproj_weight: (features, beside + channels); None for no projection.
        outproj_bias: (features,).
        headdim: channels of a head; not needed where D has them.
        ngroups: groups of heads that share B and C.
        norm_before_gate: whether the gate multiplies the norm, not its input.

    Returns:
        (batch, L, features), or without the projection (batch, L, beside + channels), in the dtype of ``zxbcdt`` or in
        autocast's; and if asked for the final states, (batch, heads, headdim, N), in float32, or in float64 if ``zxbcdt`` is.

    Raises:
        TypeError, ValueError: the arguments are not as described.
        NoKernelError: ``require`` or ``SCAN_REGISTRY_REQUIRE`` allows nothing that runs on this GPU.
    """
    required = {
        "zxbcdt": zxbcdt,
        "conv1d_weight": conv1d_weight,
        "dt_bias": dt_bias,
        "A": A,
        "D": D,
    }
    optional = {
        "conv1d_bias": conv1d_bias,
        "rmsnorm_weight": rmsnorm_weight,
        "outproj_weight": outproj_weight,
        "outproj_bias": outproj_bias,
    }
    sizes = _sizes(required, optional, headdim, ngroups)
    if initial_states is not None:
        shape = zxbcdt.shape[0], sizes.heads, sizes.head_size, sizes.states
        check_initial_states(initial_states, zxbcdt, shape, "(batch, heads, headdim, states)")
        check_dtypes("zxbcdt", {"zxbcdt": zxbcdt, "initial_states": initial_states}, ())
    final = as_flag("return_final_states", return_final_states)
    before_gate = as_flag("norm_before_gate", norm_before_gate)

    def norm(y: Tensor, z: Tensor | None) -> Tensor:
        assert rmsnorm_weight is not None
        return gated_norm(
            *(y, rmsnorm_weight, None, z),
            eps=rmsnorm_eps,
            group_size=sizes.features // sizes.groups,
            norm_before_gate=before_gate,
        )

    y, states = convolve_and_scan(
        zxbcdt,
        Weights(conv1d_weight, conv1d_bias, A, D, dt_bias, dt_limit),
        sizes,
        None if rmsnorm_weight is None else norm,
        initial_state=initial_states,
        activation=activation,
        seq_idx=seq_idx,
        return_state=final,
    )
    if outproj_weight is not None:
        bias = outproj_bias
        if bias is not None and not is_autocast(y):
            bias = bias.to(y.dtype)
        y = linear(y, outproj_weight, bias)
    return y if states is None else (y, states)


def _sizes(required: dict[str, Any], optional: dict[str, Any], headdim: Any, ngroups: Any) -> Sizes:
    """Of the block. Refuses shapes and dtypes that do not fit together; operators check the others."""
    present = required | {name: value for name, value in optional.items() if value is not None}
    check_tensors(present)
    for name, (ranks, shape) in _SHAPES.items():
        if required[name].dim() not in ranks:
            raise ValueError(f"{name} has shape {tuple(required[name].shape)}; it must be {shape}")
    # The size of a head is D's, if it has one.
    heads, size = (*required["D"].shape, headdim)[:2]
    for name, number in {"headdim": size, "ngroups": ngroups}.items():
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} is {number!r}; it must be an integer of 1 or more")
    if heads % ngroups:
        raise ValueError(f"ngroups is {ngroups}; it must divide the {heads} heads of D")
    states, rest = divmod(required["conv1d_weight"].shape[0] - heads * size, 2 * ngroups)
    if states < 1 or rest:
        raise ValueError(
            f"conv1d_weight has shape {tuple(required['conv1d_weight'].shape)}; for {heads} heads of {size} and {ngroups} "
            f"groups it must be ({heads * size} + {2 * ngroups} * states, width)"
        )
    sizes = Sizes(heads, size, ngroups, states)
    linear, rest = divmod(required["zxbcdt"].shape[-1] - sizes.projected, 2)
    if linear < 0 or rest:
        raise ValueError(
            f"zxbcdt has shape {tuple(required['zxbcdt'].shape)}; its last dimension must be {sizes.projected}, or that and "
            "an even number of features for a linear path"
        )
    sizes = sizes._replace(linear=linear)
    _check_rest(present, sizes)
    check_dtypes("zxbcdt", present, ("outproj_weight",))
    return sizes


def _check_rest(present: dict[str, Any], sizes: Sizes) -> None:
    """Refuse other weights that do not go with the sizes."""
    if "outproj_bias" in present and "outproj_weight" not in present:
        raise ValueError("outproj_bias is there without outproj_weight; it must be None then")
    projection = present.get("outproj_weight")
    features = projection.shape[0] if projection is not None and projection.dim() else "features"
    expected = {
        "conv1d_bias": (sizes.channels,),
        "dt_bias": (sizes.heads,),
        "A": (sizes.heads,),
        "rmsnorm_weight": (sizes.features,),
        "outproj_weight": (features, sizes.linear + sizes.features),
        "outproj_bias": (features,),
    }
    for name, shape in expected.items():
        if name in present and tuple(present[name].shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(present[name].shape)}; for {sizes.heads} heads of {sizes.head_size} and "
                f"{sizes.linear} features beside them it must be {shape}"
            )
