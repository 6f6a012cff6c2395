"""MinGRU and MinLSTM, with the parameters of minGRU-pytorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from scan_registry.kernels.gated_scan.op.kinds import min_gru, min_lstm
from scan_registry.nn.layer import Device, ScanLayer, advance_gated, map_states
from scan_registry.nn.layer_checks import (
    check_bools,
    check_choice,
    check_previous,
    check_sizes,
)
from scan_registry.nn.mamba_checks import check_positive
from scan_registry.nn.submodules import weights_of
from scan_registry.ops.checks import as_bool

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from scan_registry.dispatch.select import Backend
    from scan_registry.nn.layer import CallOptions

Activation = Literal["positive", "identity"]


#: Whole numbers above it are taken for sizes.
_MOST_FACTOR = 8


def _check_factor(name: str, dim: int, factor: float) -> None:
    """Refuse what is likely to be meant as a size, such as that of torch.nn.GRU's second argument."""
    if isinstance(factor, int) and factor > _MOST_FACTOR:
        raise ValueError(
            f"expansion_factor is a factor, and {name}({dim}, {factor}) would have {dim * factor} channels. For {factor} "
            f"channels pass {name}({dim}, expansion_factor={factor / dim:g}), and for {dim * factor} "
            f"{name}({dim}, expansion_factor={float(factor)})"
        )


class _Minimal(ScanLayer):
    """What both have: one projection to all that the scan takes, and one back."""

    projection: str
    kind: str
    parts: int

    def __init__(
        self, dim: int, expansion_factor: float, proj_out: bool | None, activation: Activation,
        batch_first: bool, device: Device, dtype: torch.dtype | None, backend: Backend,
    ) -> None:  # fmt: skip
        check_sizes(dim=dim)
        check_positive(expansion_factor=expansion_factor)
        _check_factor(type(self).__name__, dim, expansion_factor)
        check_choice("activation", activation, ("positive", "identity"))
        channels = int(dim * expansion_factor)
        if channels < 1:
            raise ValueError(
                f"dim * expansion_factor must be 1 or more, got: {dim} * {expansion_factor!r}"
            )
        if proj_out is None:
            proj_out = expansion_factor != 1.0
        check_bools(proj_out=proj_out)
        if not proj_out and channels != dim:
            raise ValueError(
                f"proj_out should be True or None for an expansion_factor other than 1, got: {proj_out!r} "
                f"with {expansion_factor!r}"
            )
        super().__init__(batch_first, dtype, backend)
        self.features, self.channels = dim, channels
        self.expansion_factor = expansion_factor
        self.activation: Activation = activation
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        into = nn.Linear(dim, self.parts * channels, bias=False, **place)
        self.add_module(self.projection, into)
        self.to_out: nn.Module = (
            nn.Linear(channels, dim, bias=False, **place) if proj_out else nn.Identity()
        )

    @property
    def matrix(self) -> Tensor | None:
        weights = weights_of(self.get_submodule(self.projection))
        return None if weights is None else weights[0]

    if TYPE_CHECKING:
        # fmt: off
        @overload
        def __call__(
            self, x: Tensor, prev_hidden: Tensor | None = None,
            return_next_prev_hidden: Literal[False] = False, *,
            return_final_state: Literal[False] = False, **options: Unpack[CallOptions],
        ) -> Tensor: ...
        @overload
        def __call__(
            self, x: Tensor, prev_hidden: Tensor | None = None, *,
            return_next_prev_hidden: Literal[True], **options: Unpack[CallOptions],
        ) -> tuple[Tensor, Tensor]: ...
        @overload
        def __call__(
            self, x: Tensor, *, return_final_state: Literal[True], **options: Unpack[CallOptions],
        ) -> tuple[Tensor, Tensor]: ...
        @overload
        def __call__(
            self, x: Tensor, prev_hidden: Tensor | None = None,
            return_next_prev_hidden: bool = False, *,
            return_final_state: bool = False, **options: Unpack[CallOptions],
        ) -> Tensor | tuple[Tensor, Tensor]: ...
        # fmt: on
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def forward(
        self, x: Tensor, prev_hidden: Tensor | None = None, return_next_prev_hidden: bool = False, *,
        initial_state: Tensor | None = None, reset: Tensor | None = None, reverse: bool = False,
        cu_seqlens: Tensor | None = None, return_final_state: bool = False,
    ) -> Any:  # fmt: skip
        """The layer's output at every step.

        Args:
            x: (batch, time, dim), or (time, batch, dim) if not ``batch_first``; of the parameters' dtype, or under
                autocast of any.
            prev_hidden: the initial state as minGRU-pytorch has it, (batch, 1, channels), or with ``cu_seqlens``
                (batch, sequences, channels); instead of ``initial_state``.
            return_next_prev_hidden: return the final state in that shape, too; instead of ``return_final_state``.
            initial_state, reset, reverse, cu_seqlens, return_final_state: as for ``RGLRU``, as are results and errors.
        """
        name = type(self).__name__
        if prev_hidden is not None:
            if initial_state is not None:
                raise ValueError(f"{name}: Expected prev_hidden or initial_state, got both")
            check_previous(self, prev_hidden, packed=cu_seqlens is not None)
            initial_state = prev_hidden if cu_seqlens is not None else prev_hidden.squeeze(1)
        return_next_prev_hidden = as_bool("return_next_prev_hidden", return_next_prev_hidden)
        final = as_bool("return_final_state", return_final_state) or return_next_prev_hidden
        results = self._run(x, initial_state, reset, reverse, cu_seqlens, final)
        if return_next_prev_hidden and cu_seqlens is None:
            return results[0], results[1].unsqueeze(1)
        return results

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the scan takes, in its order: the projection has ``hidden`` first."""
        hidden, *gates = self.get_submodule(self.projection)(x).chunk(self.parts, dim=-1)
        return *gates, hidden

    def _sequence(self, x: Tensor, how: dict[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
        scan: Any = {"min_gru": min_gru, "min_lstm": min_lstm}[self.kind]
        return map_states(scan(*self._parts(x), activation=self.activation, **how), self.to_out)

    def _next(self, x: Tensor, state: Tensor | None, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        kind = self.kind if self.activation == "positive" else f"{self.kind}_identity"
        parts = self._parts(x)
        state = advance_gated(kind, parts, state, reset)
        return self.to_out(state.to(parts[0].dtype)), state

    def extra_repr(self) -> str:
        """The sizes, and what else is not the default."""
        parts = [f"{self.features}, expansion_factor={self.expansion_factor}"]
        if self.activation != "positive":
            parts.append(f"activation={self.activation!r}")
        return self._extra(*parts)


class MinGRU(_Minimal):
    """A minimal GRU: Feng et al., "Were RNNs all we needed?" (2024).

    With z the sigmoid of ``gate``, h[t] = (1 − z) · h[t−1] + z · g(hidden); both come from one projection of the input,
    ``hidden`` first. Parameters are those of minGRU-pytorch, ``to_hidden_and_gate.weight`` and, where there is a
    projection back, ``to_out.weight``. A call may be as there, with ``prev_hidden`` and
    ``return_next_prev_hidden``.

    Args:
        dim: features of the input and of the output.
        expansion_factor: a state has ``int(dim * expansion_factor)`` channels. An integer above 8 is refused, as it is
            likely to be meant as a size; a float is not.
        proj_out: whether states are projected to the output; if None, where ``expansion_factor`` is not 1.
        activation: ``"positive"``, g(x) = x + ½ from 0 on and sigmoid(x) below, or ``"identity"``, the paper's first
            form.
        batch_first, device, dtype: as for ``RGLRU``.
        backend: that of ``scan_registry.min_gru``.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """

    projection, kind, parts = "to_hidden_and_gate", "min_gru", 2
    operators = ("min_gru",)

    def __init__(
        self,
        dim: int,
        expansion_factor: float = 1.0,
        proj_out: bool | None = None,
        *,
        activation: Activation = "positive",
        batch_first: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        backend: Backend = "auto",
    ) -> None:
        options = activation, batch_first, device, dtype, backend
        super().__init__(dim, expansion_factor, proj_out, *options)


class MinLSTM(_Minimal):
    """A minimal LSTM: Feng et al., "Were RNNs all we needed?" (2024).

    With f and i the sigmoids of ``forget`` and ``input``, h[t] = f / (f + i) · h[t−1] + i / (f + i) · g(hidden); all
    three come from one projection of the input, in the order hidden, forget, input. Parameters are those of
    minGRU-pytorch's ``minLSTM``, ``to_hidden_and_f_i_gate.weight`` and, where there is a projection back,
    ``to_out.weight``. An initial state is taken as it is; minGRU-pytorch applies g to it.

    Args:
        dim, expansion_factor, proj_out, activation, batch_first, device, dtype: as for ``MinGRU``.
        backend: that of ``scan_registry.min_lstm``.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """

    projection, kind, parts = "to_hidden_and_f_i_gate", "min_lstm", 3
    operators = ("min_lstm",)

    def __init__(
        self, dim: int, expansion_factor: float = 1.0, proj_out: bool | None = None, *,
        activation: Activation = "positive", batch_first: bool = True, device: Device = None,
        dtype: torch.dtype | None = None, backend: Backend = "auto",
    ) -> None:  # fmt: skip
        options = activation, batch_first, device, dtype, backend
        super().__init__(dim, expansion_factor, proj_out, *options)
