"""Mamba as mamba_ssm has it: a module with the same constructor, parameters and state dict."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from scan_registry.kernels.selective_state_update.op.function import selective_state_update
from scan_registry.nn.mamba_checks import (
    check_convolution,
    check_hidden,
    check_layer,
    check_linear,
    check_options,
    check_parameter,
    check_positive,
    check_ranks,
    check_sizes,
)
from scan_registry.nn.mamba_inner import (
    States,
    Weights,
    convolve_and_scan,
    convolve_step,
    mapped,
    projected,
)
from scan_registry.nn.mamba_states import Device, GeneratingBlock, copied, remember, wide
from scan_registry.nn.submodules import weights_of

if TYPE_CHECKING:
    from scan_registry.dispatch.select import Backend


class Mamba(GeneratingBlock):
    """``mamba_ssm.Mamba``: a projection, a causal convolution, a selective scan, a gate and a projection back.

    Parameters have mamba_ssm's names, shapes and initial values; with the same seed, in float32, the very same.

    Args:
        d_model: features of the input and of the output.
        d_state: states of each channel, up to 256.
        d_conv: the convolution's width, from 2 to 8.
        expand: channels are ``int(expand * d_model)``.
        dt_rank: the rank of the projection to step sizes; ``"auto"`` is ``d_model / 16``, rounded up.
        dt_min: step sizes begin between it and ``dt_max``.
        dt_max: see ``dt_min``.
        dt_init: ``"random"`` or ``"constant"``, how the weights of that projection begin.
        dt_scale: what multiplies their size.
        dt_init_floor: the least step size to begin with.
        conv_bias: whether the convolution has a bias.
        bias: whether the two outer projections have one.
        use_fast_path: taken and kept; there is one path.
        layer_idx: the key of this layer's states in ``inference_params``.
        device: where parameters are.
        dtype: that of parameters, but for ``A_log`` and ``D``, which are float32.
        backend: that of ``scan_registry.selective_scan``.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """

    operators = ("causal_conv1d", "selective_scan")

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: float = 2,
        dt_rank: int | Literal["auto"] = "auto",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: Literal["random", "constant"] = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        conv_bias: bool = True,
        bias: bool = False,
        use_fast_path: bool = True,
        layer_idx: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        backend: Backend = "auto",
    ) -> None:
        check_sizes(
            {"d_model": d_model, "d_state": d_state, "d_conv": d_conv},
            {"expand": expand, "dt_min": dt_min, "dt_max": dt_max},
            dtype,
            backend,
        )
        check_layer(layer_idx)
        check_ranks(dt_rank, dt_init)
        check_positive(dt_scale=dt_scale, dt_init_floor=dt_init_floor)
        check_options(dt_min, dt_max, conv_bias=conv_bias, bias=bias, use_fast_path=use_fast_path)
        super().__init__()
        self.d_model = d_model
        self.d_state = d_state
        self.d_conv = d_conv
        self.expand = expand
        self.d_inner = int(expand * d_model)
        self.dt_rank = math.ceil(d_model / 16) if dt_rank == "auto" else dt_rank
        self.use_fast_path = use_fast_path
        self.layer_idx = layer_idx
        self.activation = "silu"
        self.backend: Backend = backend

        # In this order, as mamba_ssm's are: the same seed gives the same parameters.
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=bias, **place)
        self.conv1d = nn.Conv1d(
            *(self.d_inner, self.d_inner, d_conv),
            padding=d_conv - 1,
            groups=self.d_inner,
            bias=conv_bias,
            **place,
        )
        self.x_proj = nn.Linear(self.d_inner, self.dt_rank + 2 * d_state, bias=False, **place)
        self.dt_proj = nn.Linear(self.dt_rank, self.d_inner, bias=True, **place)
        self._reset_step_sizes(dt_min, dt_max, dt_init, dt_scale, dt_init_floor)
        rates = torch.arange(1, d_state + 1, dtype=torch.float32, device=device)
        self.A_log = nn.Parameter(rates.log().repeat(self.d_inner, 1))
        self.D = nn.Parameter(torch.ones(self.d_inner, device=device, dtype=torch.float32))
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **place)
        # What training programs ask parameters for, to leave them out of weight decay or of a new initialisation.
        self.A_log._no_weight_decay = True  # type: ignore[attr-defined]
        self.D._no_weight_decay = True  # type: ignore[attr-defined]
        self.dt_proj.bias._no_reinit = True  # type: ignore[attr-defined]

    def _reset_step_sizes(
        self, least: float, most: float, init: str, scale: float, floor: float
    ) -> None:
        """Step sizes that are spread evenly between the logarithms of ``least`` and ``most``."""
        size = scale / math.sqrt(self.dt_rank)
        with torch.no_grad():
            if init == "constant":
                self.dt_proj.weight.fill_(size)
            else:
                self.dt_proj.weight.uniform_(-size, size)
            uniform = torch.rand(self.d_inner, device=self.dt_proj.bias.device, dtype=torch.float32)
            low, high = math.log(least), math.log(most)
            steps = torch.exp(uniform * (high - low) + low).clamp(min=floor)
            # Their softplus is to be ``steps``: its inverse is log(exp(steps) - 1).
            self.dt_proj.bias.copy_(steps + torch.log(-torch.expm1(-steps)))

    def extra_repr(self) -> str:
        """The sizes, and what else is not the default."""
        return self._extra(f"dt_rank={self.dt_rank}")

    if TYPE_CHECKING:  # spelled out, since pyright does not see the types of ``__call__ = forward``

        def __call__(
            self,
            hidden_states: Tensor,
            inference_params: Any = None,
            *,
            states: tuple[Tensor, Tensor] | None = None,
        ) -> Tensor: ...

    def forward(
        self,
        hidden_states: Tensor,
        inference_params: Any = None,
        *,
        states: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The block's output at every step.

        Args:
            hidden_states: (batch, L, d_model).
            inference_params: mamba_ssm's way to generate: an object whose ``key_value_memory_dict`` has, or gets, the
                states of this layer at ``layer_idx``. Where its ``seqlen_offset`` is 0 the sequence begins anew, else it
                goes on.
            states: our way: what ``allocate_inference_cache`` returned, zeros or what an earlier call left. The sequence
                goes on from them, by any number of steps, and they are changed in place to those after the last step.
                Derivatives end at them.

        Returns:
            (batch, L, d_model), in the dtype of ``hidden_states``, or in autocast's.

        Raises:
            TypeError, ValueError: an argument is not as described.
        """
        check_hidden(self, hidden_states)
        weights = self._weights()  # checked before states are changed
        before = self._states_before(
            hidden_states, hidden_states.shape[0], inference_params, states
        )
        if before is None:
            y, _ = convolve_and_scan(*self._projected(hidden_states), weights, backend=self.backend)
            return self._output(y.transpose(1, 2))
        if hidden_states.shape[1] == 1 and not torch.is_grad_enabled():
            return self._step(weights, hidden_states, *before)
        return self._continued(weights, hidden_states, *before)

    @property
    def state_sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of one sequence's states: (channels, d_conv) and (channels, d_state)."""
        return (self.d_inner, self.d_conv), (self.d_inner, self.d_state)

    def _weights(self) -> Weights:
        A_log: Tensor = self.A_log
        D: Tensor = self.D
        if self.parameters_dtype == torch.float64:  # which does not mix with narrower ones
            A_log, D = A_log.double(), D.double()
        check_convolution(self, self.d_inner)
        conv: tuple[Any, Tensor | None] = self.conv1d, None
        if weights := weights_of(self.conv1d):
            conv = weights[0].squeeze(1), weights[1]
        # The scan adds this bias in float32. A projection that has to be called adds its own.
        steps: tuple[Any, Tensor | None] = self.dt_proj, None
        if weights := weights_of(self.dt_proj):
            matrix, bias = weights
            # A function: some weight classes support only ``linear``, with positional arguments.
            steps = lambda x: linear(x, matrix), bias
            check_parameter(self, "dt_proj.weight", matrix, (self.d_inner, self.dt_rank))
            check_linear(self, "dt_proj", self.dt_rank, self.d_inner)
            if bias is not None:
                check_parameter(self, "dt_proj.bias", bias, (self.d_inner,))
        check_parameter(self, "A_log", A_log, (self.d_inner, self.d_state))
        check_parameter(self, "D", D, (self.d_inner,))
        check_linear(self, "x_proj", self.d_inner, self.dt_rank + 2 * self.d_state)
        check_linear(self, "out_proj", self.d_inner, self.d_model)
        return Weights(
            *(*conv, self.dt_rank, self.x_proj, *steps, -torch.exp(wide(A_log)), D),
        )

    def _projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """The convolution's input and the gate, (batch, channels, L), whose channels lie without gaps.

        They are parted before they are transposed: so their gradients are joined without a transposed copy.
        """
        x, z = self.in_proj(hidden_states).chunk(2, -1)
        return x.transpose(1, 2), z.transpose(1, 2)

    def _output(self, y: Tensor) -> Tensor:
        return self.out_proj(y)  # type: ignore[no-any-return]

    def _continued(
        self, weights: Weights, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor
    ) -> Tensor:
        x, z = self._projected(hidden_states)
        before = States(copied(conv_state[..., 1:]), copied(ssm_state))
        y, after = convolve_and_scan(
            x, z, weights, before=before, return_state=True, backend=self.backend
        )
        assert after is not None
        output = self._output(y.transpose(1, 2))  # which may raise: then states are as they were
        with torch.no_grad():
            # One input more than the convolution looks back, as mamba_ssm keeps it.
            remember(conv_state, x)
            ssm_state.copy_(after)
        return output

    def _step(
        self, weights: Weights, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor
    ) -> Tensor:
        x, z = self.in_proj(hidden_states).squeeze(1).chunk(2, -1)
        u = convolve_step(x, conv_state, weights.conv, weights.conv_bias, backend=self.backend)
        steps, B, C = projected(u, weights, 2).split([self.dt_rank, self.d_state, self.d_state], -1)
        y = selective_state_update(
            *(ssm_state, u, mapped(steps, weights.dt_proj), weights.A, B, C, weights.D, z),
            *(weights.dt_bias, True),
            backend=self.backend,
        )
        return self._output(y).unsqueeze(1)
