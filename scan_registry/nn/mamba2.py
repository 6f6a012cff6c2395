"""Mamba-2 as mamba_ssm has it: a module with the same constructor, parameters and state dict."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from scan_registry.nn import mamba2_inner
from scan_registry.nn.gated_norm import RMSNormGated
from scan_registry.nn.mamba2_checks import (
    check_ranges,
    check_split,
    folded,
    packed_sequences,
    unfolded,
)
from scan_registry.nn.mamba2_inner import Sizes, Weights
from scan_registry.nn.mamba_checks import (
    check_convolution,
    check_hidden,
    check_layer,
    check_linear,
    check_options,
    check_parameter,
    check_sizes,
)
from scan_registry.nn.mamba_inner import States
from scan_registry.nn.mamba_states import Device, GeneratingBlock, copied, remember, wide
from scan_registry.nn.submodules import weights_of

if TYPE_CHECKING:
    from scan_registry.dispatch.select import Backend


class Mamba2(GeneratingBlock):
    """``mamba_ssm.Mamba2``: a projection, a causal convolution, the state space dual scan, a gated norm and a projection back.

    Parameters have mamba_ssm's names, shapes and initial values; with the same seed, in float32, the very same. The names
    are those of transformers' mixers of Mamba-2, too.

    Args:
        d_model: features of the input and of the output.
        d_state: states of each channel, up to 256.
        d_conv: the convolution's width, from 2 to 8.
        conv_init: weights of the convolution begin between it and its negative; None: as torch's do.
        expand: features inside the block are ``int(expand * d_model)``.
        headdim: channels of a head.
        d_ssm: how many of those features the scan takes; the others go a gated linear path. None: all.
        ngroups: groups of heads that share B and C.
        A_init_range: between which numbers the negative of A begins.
        D_has_hdim: whether D has a number for each channel, not for each head.
        rmsnorm: whether a norm is around the gate.
        norm_before_gate: whether the gate multiplies the norm, not its input.
        dt_min: step sizes begin between it and ``dt_max``.
        dt_max: see ``dt_min``.
        dt_init_floor: the least step size to begin with.
        dt_limit: the least and the greatest step size of any call, those of ``step`` included.
        bias: whether the two outer projections have one.
        conv_bias: whether the convolution has a bias.
        chunk_size: taken and kept; kernels choose for themselves.
        use_mem_eff_path: taken and kept; there is one path.
        layer_idx: the key of this layer's states in ``inference_params``.
        process_group: None. Tensor parallelism is left to ``torch.distributed.tensor.parallel``.
        sequence_parallel: taken and kept, as it says how to use a ``process_group``.
        device: where parameters are.
        dtype: that of parameters, but for ``D``, which is float32.
        backend: that of ``scan_registry.ssd_scan``.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """

    operators = ("causal_conv1d", "ssd_scan")

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: float = 2,
        headdim: int = 64,
        d_ssm: int | None = None,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        process_group: Any = None,
        sequence_parallel: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        backend: Backend = "auto",
    ) -> None:
        if process_group is not None:
            raise ValueError(
                f"process_group should be None, got: {process_group!r}; tensor parallelism is left to "
                "torch.distributed.tensor.parallel"
            )
        check_sizes(
            {
                "d_model": d_model,
                "d_state": d_state,
                "d_conv": d_conv,
                "headdim": headdim,
                "ngroups": ngroups,
                "chunk_size": chunk_size,
            },
            {"expand": expand, "dt_min": dt_min, "dt_max": dt_max},
            dtype,
            backend,
        )
        check_layer(layer_idx)
        flags = {"D_has_hdim": D_has_hdim, "rmsnorm": rmsnorm, "norm_before_gate": norm_before_gate}
        check_options(dt_min, dt_max, bias=bias, conv_bias=conv_bias, **flags)
        check_ranges(conv_init, A_init_range, dt_limit, dt_init_floor)
        check_split(int(expand * d_model), d_ssm, headdim, ngroups)
        super().__init__()
        self.d_model = d_model
        self.d_state = d_state
        self.d_conv = d_conv
        self.conv_init = conv_init
        self.expand = expand
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel
        self.d_inner = int(expand * d_model)
        self.headdim = headdim
        self.d_ssm = self.d_inner if d_ssm is None else d_ssm
        self.ngroups = ngroups
        self.nheads = self.d_ssm // headdim
        self.D_has_hdim = D_has_hdim
        self.rmsnorm = rmsnorm
        self.norm_before_gate = norm_before_gate
        self.dt_limit = (float(dt_limit[0]), float(dt_limit[1]))
        self.activation = "silu"
        self.chunk_size = chunk_size
        self.use_mem_eff_path = use_mem_eff_path
        self.layer_idx = layer_idx
        self.backend: Backend = backend
        self._sizes = Sizes(self.nheads, headdim, ngroups, d_state, self.d_inner - self.d_ssm)

        # In this order, as mamba_ssm's are: the same seed gives the same parameters.
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        channels = self._sizes.channels
        self.in_proj = nn.Linear(d_model, self._sizes.projected, bias=bias, **place)
        self.conv1d = nn.Conv1d(
            *(channels, channels, d_conv),
            padding=d_conv - 1,
            groups=channels,
            bias=conv_bias,
            **place,
        )
        if conv_init is not None:
            nn.init.uniform_(self.conv1d.weight, -conv_init, conv_init)
        low, high = math.log(dt_min), math.log(dt_max)
        uniform = torch.rand(self.nheads, **place)
        steps = torch.exp(uniform * (high - low) + low).clamp(min=dt_init_floor)
        # Their softplus is to be ``steps``: its inverse is log(exp(steps) - 1).
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))
        rates = torch.empty(self.nheads, device=device, dtype=torch.float32).uniform_(*A_init_range)
        self.A_log = nn.Parameter(rates.log().to(dtype=dtype))
        width = self.d_ssm if D_has_hdim else self.nheads
        self.D = nn.Parameter(torch.ones(width, device=device, dtype=torch.float32))
        # What training programs ask parameters for, to leave them out of weight decay.
        for parameter in (self.dt_bias, self.A_log, self.D):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]
        if rmsnorm:
            self.norm = RMSNormGated(
                self.d_ssm,
                eps=1e-5,
                norm_before_gate=norm_before_gate,
                group_size=self.d_ssm // ngroups,
                **place,
            )
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **place)

    def extra_repr(self) -> str:
        """The sizes, and what else is not the default."""
        part = [] if self.d_ssm == self.d_inner else [f"d_ssm={self.d_ssm}"]
        return self._extra(f"headdim={self.headdim}, ngroups={self.ngroups}", *part)

    @property
    def state_sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of one sequence's states: (channels, d_conv) and (heads, headdim, d_state)."""
        sizes = self._sizes
        return (sizes.channels, self.d_conv), (sizes.heads, sizes.head_size, sizes.states)

    if TYPE_CHECKING:  # spelled out, since pyright does not see the types of ``__call__ = forward``

        def __call__(
            self, u: Tensor, seqlen: int | None = None, seq_idx: Tensor | None = None,
            cu_seqlens: Tensor | None = None, inference_params: Any = None, *,
            states: tuple[Tensor, Tensor] | None = None,
        ) -> Tensor: ...  # fmt: skip

    def forward(
        self, u: Tensor, seqlen: int | None = None, seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None, inference_params: Any = None, *,
        states: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """The block's output at every step.

        Args:
            u: (batch, L, d_model); with ``seqlen`` (batch · seqlen, d_model).
            seqlen: L, if ``u`` has batch and time in one dimension.
            seq_idx: (batch, L) integers. A sequence ends, for the convolution and for the scan, where the number changes.
                Below zero they mark padding. With ``cu_seqlens`` it is not read: both say the same.
            cu_seqlens: (sequences + 1,), bounds of sequences that are packed along the time of one batch row, from 0 to L.
                Each has states of its own.
            inference_params: mamba_ssm's way to generate: an object whose ``key_value_memory_dict`` has, or gets, the
                states of this layer at ``layer_idx``. Where its ``seqlen_offset`` is 0 the sequence begins anew, else it
                goes on.
            states: our way: what ``allocate_inference_cache`` returned, zeros or what an earlier call left; with
                ``cu_seqlens`` of as many rows as sequences. The sequence goes on from them, by any number of steps, and they
                are changed in place to those after the last step. Derivatives end at them.

        Returns:
            A tensor of the shape of ``u``, in its dtype, or in autocast's.

        Raises:
            TypeError, ValueError: an argument is not as described.
        """
        u = unfolded(self, u, seqlen)
        check_hidden(self, u, "u")
        sequences = packed_sequences(self, u, seq_idx, cu_seqlens)
        weights = self._weights()  # checked before states are changed
        before = self._states_before(u, sequences, inference_params, states)
        packed = seq_idx is not None or cu_seqlens is not None
        if before is not None and u.shape[1] == 1 and not (packed or torch.is_grad_enabled()):
            return folded(self._step(weights, u, *before), seqlen)
        projected = self.in_proj(u)
        earlier = None if before is None else copied(before[0][..., 1:])
        y, after = mamba2_inner.convolve_and_scan(
            *(projected, weights, self._sizes, self.norm if self.rmsnorm else None),
            earlier=earlier,
            initial_state=None if before is None else copied(before[1]),
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
            return_state=before is not None,
            backend=self.backend,
        )
        output = folded(self.out_proj(y), seqlen)  # which may raise: then states are as they were
        if before is not None and after is not None:
            with torch.no_grad():
                # One input more than the convolution looks back, as mamba_ssm keeps it.
                inputs = self._sizes.split(projected)[3].transpose(1, 2)
                remember(before[0], inputs, seq_idx, cu_seqlens)
                before[1].copy_(after)
        return output

    def _weights(self) -> Weights:
        A_log: Tensor = self.A_log
        D: Tensor = self.D
        dt_bias: Tensor = self.dt_bias
        if self.parameters_dtype == torch.float64:  # which does not mix with narrower ones
            A_log, D, dt_bias = A_log.double(), D.double(), dt_bias.double()
        check_convolution(self, self._sizes.channels)
        conv: tuple[Any, Tensor | None] = self.conv1d, None
        if weights := weights_of(self.conv1d):
            conv = weights[0].squeeze(1), weights[1]
        check_parameter(self, "A_log", A_log, (self.nheads,))
        check_parameter(self, "D", D, (self.d_ssm if self.D_has_hdim else self.nheads,))
        check_parameter(self, "dt_bias", dt_bias, (self.nheads,))
        check_linear(self, "out_proj", self.d_inner, self.d_model)
        if self.D_has_hdim:
            D = D.view(self.nheads, self.headdim)
        return Weights(*conv, -torch.exp(wide(A_log)), D, dt_bias, self.dt_limit)

    def _step(
        self, weights: Weights, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor
    ) -> Tensor:
        y = mamba2_inner.step(
            *(self.in_proj(hidden_states.squeeze(1)), weights, self._sizes),
            *(self.norm if self.rmsnorm else None, States(conv_state, ssm_state)),
            backend=self.backend,
        )
        return self.out_proj(y).unsqueeze(1)  # type: ignore[no-any-return]
