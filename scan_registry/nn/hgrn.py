"""HGRN, with the parameters of flash-linear-attention's layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from scan_registry.kernels.gated_scan.op.arguments import channel_values
from scan_registry.kernels.gated_scan.op.kinds import hgrn
from scan_registry.nn.layer import Device, ScanLayer, advance_gated, map_states, wide
from scan_registry.nn.layer_checks import check_bools, check_bound, check_sizes
from scan_registry.nn.mamba_checks import check_positive
from scan_registry.nn.submodules import weights_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from scan_registry.dispatch.select import Backend
    from scan_registry.nn.layer import CallOptions

    class HGRNOptions(CallOptions, total=False):
        """What a call takes beside the input."""

        lower_bound: Tensor | float | None


class GatedNorm(nn.Module):
    """x over the root of its mean square, times ``weight`` and silu(gate); in float32."""

    def __init__(
        self, size: int, eps: float, affine: bool, device: Device, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype)) if affine else None

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Of the shape and the dtype of ``x``."""
        values = wide(x)
        normalised = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            normalised = normalised * self.weight.to(normalised.dtype)
        return (normalised * silu(gate.to(normalised.dtype))).to(x.dtype)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


class HGRN(ScanLayer):
    """A hierarchically gated recurrent network's layer: Qin et al., "Hierarchically gated recurrent neural network for
    sequence modeling" (2023), in its real form.

    With f = γ + (1 − γ) · σ(f_proj(x)) and γ the lower bound, h[t] = f · h[t−1] + (1 − f) · silu(i_proj(x)). The output
    is o_proj of the root-mean-square norm of h times silu(g_proj(x)).

    Parameters are those of flash-linear-attention's ``HGRNAttention``: ``i_proj.weight``, ``f_proj.weight``,
    ``g_proj.weight``, ``g_norm.weight`` and ``o_proj.weight``. The lower bound of a layer is an argument of each call, as
    a model learns those of all layers together; it is 0 for the first layer.

    Args:
        hidden_size: features of the input and of the output.
        expand_ratio: a state has ``int(hidden_size * expand_ratio)`` channels.
        elementwise_affine: whether the norm has a weight.
        norm_eps: what the norm adds to the mean square.
        batch_first, device, dtype: as for ``RGLRU``.
        backend: that of ``scan_registry.hgrn``.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """

    operators = ("hgrn",)

    def __init__(
        self,
        hidden_size: int,
        expand_ratio: float = 1,
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        *,
        batch_first: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        backend: Backend = "auto",
    ) -> None:
        check_sizes(hidden_size=hidden_size)
        check_bools(elementwise_affine=elementwise_affine)
        check_positive(expand_ratio=expand_ratio, norm_eps=norm_eps)
        channels = int(hidden_size * expand_ratio)
        if channels < 1:
            raise ValueError(
                f"hidden_size * expand_ratio must be 1 or more, got: {hidden_size} * {expand_ratio!r}"
            )
        super().__init__(batch_first, dtype, backend)
        self.features = self.hidden_size = hidden_size
        self.channels = self.input_dim = channels
        self.expand_ratio = expand_ratio
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.i_proj = nn.Linear(hidden_size, channels, bias=False, **place)
        self.f_proj = nn.Linear(hidden_size, channels, bias=False, **place)
        self.g_proj = nn.Linear(hidden_size, channels, bias=False, **place)
        self.g_norm = GatedNorm(channels, norm_eps, elementwise_affine, device, dtype)
        self.o_proj = nn.Linear(channels, hidden_size, bias=False, **place)

    @property
    def matrix(self) -> Tensor | None:
        weights = weights_of(self.i_proj)
        return None if weights is None else weights[0]

    if TYPE_CHECKING:
        # fmt: off
        @overload
        def __call__(
            self, x: Tensor, *,
            return_final_state: Literal[False] = False, **options: Unpack[HGRNOptions],
        ) -> Tensor: ...
        @overload
        def __call__(
            self, x: Tensor, *, return_final_state: Literal[True], **options: Unpack[HGRNOptions],
        ) -> tuple[Tensor, Tensor]: ...
        @overload
        def __call__(
            self, x: Tensor, *, return_final_state: bool, **options: Unpack[HGRNOptions],
        ) -> Tensor | tuple[Tensor, Tensor]: ...
        # fmt: on

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def forward(
        self, x: Tensor, *, lower_bound: Tensor | float | None = None,
        initial_state: Tensor | None = None, reset: Tensor | None = None, reverse: bool = False,
        cu_seqlens: Tensor | None = None, return_final_state: bool = False,
    ) -> Any:  # fmt: skip
        """The layer's output at every step.

        Args:
            x: (batch, time, hidden_size), or (time, batch, hidden_size) if not ``batch_first``; of the parameters' dtype,
                or under autocast of any.
            lower_bound: the least that a forget gate can be, from 0 to 1: a number, or (channels,), which has a
                derivative. None is 0. ``scan_registry.hgrn`` says when values of a tensor are checked.
            initial_state, reset, reverse, cu_seqlens, return_final_state: as for ``RGLRU``, as are results and errors.
        """
        how = initial_state, reset, reverse, cu_seqlens, return_final_state
        return self._run(x, *how, lower_bound=lower_bound)

    def step(
        self, x: Tensor, state: Tensor | None = None, *, lower_bound: Tensor | float | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """One step, for generation: what a call on the whole sequence gives there.

        Args:
            x: (batch, hidden_size).
            lower_bound: as in a call.
            state, reset: as for ``RGLRU``, as are results and errors.
        """
        return self._step(x, state, reset, lower_bound=lower_bound)

    def _sequence(
        self, x: Tensor, how: dict[str, Any], lower_bound: Tensor | float | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        results: Any = hgrn(self.i_proj(x), self.f_proj(x), lower_bound, **how)
        return map_states(results, lambda states: self._output(states, x))

    def _next(
        self,
        x: Tensor,
        state: Tensor | None,
        reset: Tensor | None,
        lower_bound: Tensor | float | None = None,
    ) -> tuple[Tensor, Tensor]:
        i = self.i_proj(x)
        bound: Any = channel_values("lower_bound", lower_bound, i.unsqueeze(1), 1)
        check_bound(self, bound, i)
        state = advance_gated("hgrn", (i, self.f_proj(x)), state, reset, (bound,))
        return self._output(state.to(i.dtype), x), state

    def _output(self, states: Tensor, x: Tensor) -> Tensor:
        output: Tensor = self.o_proj(self.g_norm(states, self.g_proj(x)))
        return output

    def extra_repr(self) -> str:
        """The sizes, and what else is not the default."""
        return self._extra(f"{self.hidden_size}, expand_ratio={self.expand_ratio}")
