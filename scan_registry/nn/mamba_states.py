"""What ``Mamba`` and ``Mamba2`` share: the states that they keep for generation, and how a call goes on from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from scan_registry.nn.exports import Exports
from scan_registry.nn.mamba_checks import DTYPES, as_pair, check_cache, check_hidden, check_states
from scan_registry.ops.checks import as_index
from scan_registry.ops.registration import register

if TYPE_CHECKING:
    from scan_registry.dispatch.select import Backend

Device = torch.device | str | int | None


class GeneratingBlock(Exports):
    """A block that keeps the last inputs of its convolution and the states of its scan."""

    d_model: int
    d_state: int
    d_conv: int
    expand: float
    layer_idx: int | None
    backend: Backend
    in_proj: nn.Linear
    conv1d: nn.Conv1d
    A_log: nn.Parameter

    if TYPE_CHECKING:

        @property
        def state_sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
            """Of one sequence's states: (channels, d_conv) of the convolution, and those of the scan."""

        def _weights(self) -> Any:
            """The parameters, checked, as ``_step`` takes them."""

        def _step(
            self, weights: Any, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor
        ) -> Tensor:
            """The output of one step, (batch, 1, d_model); the states are changed in place."""

    def _extra(self, *parts: str) -> str:
        """What ``extra_repr`` says: the sizes that all have, ``parts``, and what of the rest is not the default."""
        sizes = f"d_state={self.d_state}, d_conv={self.d_conv}, expand={self.expand}"
        more = [] if self.layer_idx is None else [f"layer_idx={self.layer_idx}"]
        more += [] if self.backend == "auto" else [f"backend={self.backend!r}"]
        return ", ".join([f"{self.d_model}, {sizes}", *parts, *more])

    def step(
        self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One step, for generation; the states are changed in place. It has no derivative.

        Args:
            hidden_states: (batch, 1, d_model).
            conv_state: that of the convolution, as ``allocate_inference_cache`` makes it.
            ssm_state: that of the scan, as ``allocate_inference_cache`` makes it.

        Returns:
            The output, (batch, 1, d_model), and both states.

        Raises:
            TypeError, ValueError: an argument is not as described.
        """
        check_hidden(self, hidden_states)
        check_states(self, hidden_states, hidden_states.shape[0], conv_state, ssm_state)
        if hidden_states.shape[1] != 1:
            raise ValueError(
                f"{type(self).__name__}: Expected hidden_states of one step, got {hidden_states.shape[1]}; "
                "for several, call the module with states=(conv_state, ssm_state)"
            )
        with torch.no_grad():
            y = self._step(self._weights(), hidden_states, conv_state, ssm_state)
        return y, conv_state, ssm_state

    def allocate_inference_cache(
        self,
        batch_size: int,
        max_seqlen: int,
        dtype: torch.dtype | None = None,
        *,
        device: Device = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """States of a sequence that has not begun: those of the convolution and of the scan.

        Args:
            batch_size: how many sequences.
            max_seqlen: taken and not used, as states do not grow.
            dtype: that of both. If None, that of the parameters for the convolution and float32 for the scan, so that
                generation computes what a call on the whole sequence does.
            device: where they are. None: ``A_log``'s device. Pass one if ``A_log`` is offloaded to ``meta``.
            **kwargs: taken and not used.

        Returns:
            Zeros: of ``Mamba`` (batch_size, channels, d_conv) and (batch_size, channels, d_state), of ``Mamba2``
            (batch_size, d_ssm + 2·ngroups·d_state, d_conv) and (batch_size, heads, headdim, d_state).

        Raises:
            TypeError, ValueError: an argument is not as described.
        """
        check_cache(self, batch_size, max_seqlen, dtype)
        own_dtype = self.parameters_dtype
        wide = torch.float64 if own_dtype == torch.float64 else torch.float32
        device = self.A_log.device if device is None else device
        conv_size, scan_size = self.state_sizes
        conv = torch.zeros(batch_size, *conv_size, dtype=dtype or own_dtype, device=device)
        return conv, torch.zeros(batch_size, *scan_size, dtype=dtype or wide, device=device)

    @property
    def parameters_dtype(self) -> torch.dtype:
        """The convolution's dtype, as ``A_log``, ``D`` and quantized projections may have others."""
        conv: nn.Module = self.conv1d
        if type(conv) is nn.Conv1d and (weight := conv._parameters.get("weight")) is not None:
            return weight.dtype  # at once, as steps ask for it, too
        inside = (parameter.dtype for parameter in conv.parameters())
        return next((dtype for dtype in inside if dtype in DTYPES), self.A_log.dtype)

    def _states_before(
        self, x: Tensor, sequences: int, inference_params: Any, states: Any
    ) -> tuple[Tensor, Tensor] | None:
        """The states that a call on x goes on from, checked: those of ``inference_params`` or ``states``, or None."""
        if inference_params is not None:
            if states is not None:
                raise ValueError(
                    f"{type(self).__name__}: Expected inference_params or states, got both"
                )
            states = self._states_from(inference_params, sequences)
        if states is None:
            return None
        pair = as_pair(self, states)
        check_states(self, x, sequences, *pair)
        if inference_params is not None and inference_params.seqlen_offset == 0:
            with torch.no_grad():
                for state in pair:
                    state.zero_()
        return pair

    def _states_from(self, params: Any, sequences: int) -> tuple[Tensor, Tensor]:
        for attribute in ("key_value_memory_dict", "seqlen_offset"):
            if not hasattr(params, attribute):
                raise TypeError(
                    f"{type(self).__name__}: Expected inference_params with the attributes key_value_memory_dict and "
                    f"seqlen_offset, as mamba_ssm's InferenceParams has them, got {type(params).__name__} without {attribute}"
                )
        as_index("inference_params.seqlen_offset", params.seqlen_offset)
        if self.layer_idx is None:
            raise ValueError(
                f"{type(self).__name__}: Expected layer_idx in the constructor for inference_params, got None"
            )
        kept: dict[Any, tuple[Tensor, Tensor]] = params.key_value_memory_dict
        if self.layer_idx not in kept:
            kept[self.layer_idx] = self.allocate_inference_cache(sequences, 0)
        return kept[self.layer_idx]


def wide(x: Tensor) -> Tensor:
    """x in float32, or in float64 if it is."""
    return x if x.dtype == torch.float64 else x.float()


def copied(state: Tensor) -> Tensor:
    """A copy for a backward pass, which must not change when the state does."""
    if torch.is_grad_enabled() and torch.compiler.is_compiling():
        # Inductor drops a clone whose source changes only after it was read, and the backward pass then reads the new state.
        return _operator(state.detach())  # type: ignore[no-any-return]
    return state.clone()


def _clone(state: Tensor) -> Tensor:
    return state.clone()


_operator = register(
    "state_copy(Tensor state) -> Tensor", __name__, {"device": "_clone", "Meta": "_clone"}
)


def remember(
    conv_state: Tensor,
    inputs: Tensor,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> None:
    """Write the last inputs (batch, channels, time) of a convolution to its state, those before them included."""
    width = conv_state.shape[-1]
    if cu_seqlens is not None:
        conv_state.copy_(_last_of_each(conv_state, inputs, cu_seqlens.long()))
        return
    whole = torch.cat([conv_state, inputs.to(conv_state.dtype)], -1)
    if seq_idx is not None and seq_idx.shape[1]:
        same = seq_idx == seq_idx[:, -1:]
        same = same.flip(1).cumprod(1).flip(1).bool()  # the last sequence, not others of its number
        same = torch.cat([same[:, :1].expand(-1, width), same], 1)
        whole = torch.where(same.unsqueeze(1), whole, torch.zeros_like(whole))
    conv_state.copy_(whole[..., -width:])


def _last_of_each(state: Tensor, inputs: Tensor, cu_seqlens: Tensor) -> Tensor:
    """(sequences, channels, width): the last inputs of packed sequences (1, channels, time), behind their states."""
    width = state.shape[-1]
    begins, ends = cu_seqlens[:-1].unsqueeze(1), cu_seqlens[1:].unsqueeze(1)
    back = torch.arange(-width, 0, device=state.device)
    steps, before = ends + back, ends - begins + back
    earlier = torch.gather(
        state, 2, (width + before).clamp(0, width - 1).unsqueeze(1).expand(state.shape)
    )
    if inputs.shape[2] == 0:
        return earlier
    later = inputs[0][:, steps.clamp(0, inputs.shape[2] - 1)].transpose(0, 1).to(state.dtype)
    return torch.where((before >= 0).unsqueeze(1), later, earlier)
