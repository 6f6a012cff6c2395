"""S5, with the parameters of s5-pytorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from scan_registry.kernels.linear_scan.op.function import linear_scan
from scan_registry.nn import layer_checks, mamba_checks
from scan_registry.nn.complex_maps import from_complex, into_complex, weight_from, weight_into
from scan_registry.nn.hippo import normal_hippo
from scan_registry.nn.layer import Device, ScanLayer, advance, wide
from scan_registry.nn.submodules import is_plain

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from scan_registry.dispatch.select import Backend
    from scan_registry.nn.layer import CallOptions

Initialisation = Literal["dense", "complex_normal"]
Discretisation = Literal["zoh", "bilinear"]

#: The states, of one scan or of two, and the final state if it is asked for; of decays and tokens.
Scan = Callable[[Tensor, Tensor], tuple[list[Tensor], Tensor | None]]

#: The deviation of standard normal numbers of which only those from -2 to 2 are kept.
_TRUNCATED = 0.87962566103423978


class S5SSM(nn.Module):
    """The parameters of a state space, and what they come to once time is discrete."""

    def __init__(
        self,
        width: int,
        state_width: int,
        block_count: int,
        dt_min: float,
        dt_max: float,
        bidir: bool,
        initialisation: Initialisation,
        discretisation: Discretisation,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.block_count = block_count
        self.steps = dt_min, dt_max
        self.bidir, self.initialisation, self.discretisation = bidir, initialisation, discretisation
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        precise = (torch.get_default_dtype() if dtype is None else dtype) == torch.float64
        states: dict[str, Any] = {
            "device": device,
            "dtype": torch.complex128 if precise else torch.complex64,
        }
        times = torch.float64 if precise else torch.float32
        outputs = state_width * (2 if bidir else 1)
        self.Lambda = nn.Parameter(torch.empty(state_width, **states))
        self.B = nn.Parameter(torch.empty(state_width, width, 2, **place))
        self.C = nn.Parameter(torch.empty(width, outputs, **states))
        self.D = nn.Parameter(torch.empty(width, **place))
        self.log_step = nn.Parameter(torch.empty(state_width, device=device, dtype=times))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values: HiPPO-N's eigenvalues for each block; B and C of random numbers in HiPPO's coordinates; step
        sizes spread evenly between the logarithms of ``dt_min`` and ``dt_max``."""
        states, width, _ = self.B.shape
        eigenvalues, vectors = normal_hippo(states // self.block_count, self.Lambda.device)
        basis = torch.block_diag(*[vectors] * self.block_count)
        with torch.no_grad():
            self.Lambda.copy_(eigenvalues.repeat(self.block_count))
            real = _truncated((states, width), 1 / math.sqrt(states), basis.device)
            self.B.copy_(torch.view_as_real(basis.mH @ real.to(basis.dtype)))
            for part in self.C.split(states, dim=1):
                if self.initialisation == "complex_normal":
                    part.copy_(torch.randn(width, states, dtype=basis.dtype, device=basis.device))
                else:
                    deviation = 1 / math.sqrt(states * width)
                    pairs = _truncated((width, states, 2), deviation, basis.device)
                    part.copy_(torch.view_as_complex(pairs) @ basis)
            self.D.normal_()
            self.log_step.uniform_(*map(math.log, self.steps))

    def discretised(self, step_scale: Tensor | float) -> tuple[Tensor, Tensor]:
        """Decays, and what multiplies B x, both (..., states) and complex; for the step sizes times ``step_scale``,
        a number or (..., 1)."""
        poles = self.Lambda
        steps = wide(self.log_step).exp()
        steps = steps * (
            step_scale.to(steps.dtype) if isinstance(step_scale, Tensor) else step_scale
        )
        if self.discretisation == "zoh":
            # Steps are short: a decay less 1 is a difference of numbers close to each other.
            return (poles * steps).exp(), torch.expm1(poles * steps) / poles
        halves = poles * (0.5 * steps)
        inverse = (1 - halves).reciprocal()
        return (1 + halves) * inverse, inverse * steps

    def forward(
        self, x: Tensor, step_scale: Tensor | float, scan: Scan
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and the final state if ``scan`` returns one."""
        decays, scale = self.discretised(step_scale)
        tokens = self.inputs(x, scale)
        states, final_state = scan(decays.to(tokens.dtype), tokens)
        return self.outputs(states, x), final_state

    def inputs(self, x: Tensor, scale: Tensor) -> Tensor:
        """scale · (B x), (..., states)."""
        real, imag = self.B.unbind(-1)
        if scale.dim() > 1:  # scales that are no channel's own
            return scale * into_complex(x, weight_into(real, imag))
        scaled = scale.unsqueeze(-1) * torch.complex(wide(real), wide(imag))
        return into_complex(x, weight_into(scaled.real, scaled.imag))

    def outputs(self, states: list[Tensor], x: Tensor) -> Tensor:
        """Re(C h) + D · x."""
        parts = self.C.chunk(len(states), dim=1)
        y: Tensor | float = 0
        for part, state in zip(parts, states, strict=True):
            y = y + from_complex(state, weight_from(part.real, part.imag), x)
        assert isinstance(y, Tensor)
        return y + (self.D * x).to(y.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> S5SSM:
        """Complex parameters change as pairs of real numbers: ``module.to(dtype)`` would drop their imaginary parts, and
        no complex dtype is as narrow as bfloat16."""

        def as_pairs(tensor: Tensor) -> Tensor:
            if not tensor.is_complex():
                return fn(tensor)
            return torch.view_as_complex(wide(fn(torch.view_as_real(tensor))))

        super()._apply(as_pairs, recurse)  # type: ignore[no-untyped-call]
        return self


class S5(ScanLayer):
    """A simplified state space layer: Smith et al., "Simplified state space layers for sequence modeling" (2023).

    x'(t) = Λ x(t) + B u(t) and y(t) = Re(C x(t)) + D · u(t), with diagonal complex Λ, made discrete with a step size for
    each state. States are complex64, or complex128 for float64, which a GPU has no kernel for.

    Parameters are those of s5-pytorch: ``seq.Lambda`` (state_width,) and ``seq.C`` (width, state_width), complex;
    ``seq.B`` (state_width, width, 2), pairs of real numbers; ``seq.D`` (width,) and ``seq.log_step`` (state_width,). With
    ``bidir``, ``seq.C`` is (width, 2 · state_width), forwards in time first. Every state has its conjugate beside it, as
    in s5-pytorch.

    Args:
        width: features of the input and of the output.
        state_width: complex numbers of a state; ``width`` if None.
        factor_rank: must be None.
        block_count: how many equal parts of the state begin with HiPPO's eigenvalues.
        dt_min: step sizes begin between it and ``dt_max``.
        dt_max: see ``dt_min``.
        liquid: must be False.
        degree: must be 1.
        bidir: whether a second scan, backwards in time, adds to the output. It has the same Λ and B. A state is then
            (batch, 2 · state_width), forwards in time first.
        bcInit: how C begins, ``"dense"`` or ``"complex_normal"``; ``"dense"`` if None.
        discretization: ``"zoh"``, a zero-order hold, or ``"bilinear"``.
        batch_first, device: as for ``RGLRU``.
        dtype: that of ``seq.B`` and ``seq.D``; the others are float32 and complex64, or float64 and complex128.
        backend: that of ``scan_registry.linear_scan``.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """

    is_complex, operators = True, ("linear_scan",)

    def __init__(
        self,
        width: int,
        state_width: int | None = None,
        factor_rank: None = None,
        block_count: int = 1,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        liquid: bool = False,
        degree: int = 1,
        bidir: bool = False,
        bcInit: Initialisation | None = None,
        *,
        discretization: Discretisation = "zoh",
        batch_first: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        backend: Backend = "auto",
    ) -> None:
        state_width = width if state_width is None else state_width
        layer_checks.check_sizes(width=width, state_width=state_width, block_count=block_count)
        layer_checks.check_divides("block_count", block_count, "state_width", state_width)
        mamba_checks.check_positive(dt_min=dt_min, dt_max=dt_max)
        layer_checks.check_bools(bidir=bidir)
        if dt_min > dt_max:
            raise ValueError(f"dt_min should be at most dt_max, got: {dt_min!r} and {dt_max!r}")
        layer_checks.check_absent(
            {"factor_rank": (factor_rank, None), "liquid": (liquid, False), "degree": (degree, 1)}
        )
        bcInit = "dense" if bcInit is None else bcInit
        layer_checks.check_choice("bcInit", bcInit, ("dense", "complex_normal"))
        layer_checks.check_choice("discretization", discretization, ("zoh", "bilinear"))
        super().__init__(batch_first, dtype, backend)
        self.features = self.width = width
        self.state_width = state_width
        self.channels = state_width * (2 if bidir else 1)
        self.block_count, self.bidir, self.discretization = block_count, bidir, discretization
        self.seq = S5SSM(
            *(width, state_width, block_count, dt_min, dt_max, bidir, bcInit),
            *(discretization, device, dtype),
        )

    @property
    def matrix(self) -> Tensor | None:
        return self.seq.B if is_plain(self.seq, S5SSM.forward) else None

    if TYPE_CHECKING:
        # fmt: off
        @overload
        def __call__(
            self, x: Tensor, step_scale: Tensor | float = 1.0, *,
            return_final_state: Literal[False] = False, **options: Unpack[CallOptions],
        ) -> Tensor: ...
        @overload
        def __call__(
            self, x: Tensor, step_scale: Tensor | float = 1.0, *,
            return_final_state: Literal[True], **options: Unpack[CallOptions],
        ) -> tuple[Tensor, Tensor]: ...
        @overload
        def __call__(
            self, x: Tensor, step_scale: Tensor | float = 1.0, *,
            return_final_state: bool, **options: Unpack[CallOptions],
        ) -> Tensor | tuple[Tensor, Tensor]: ...
        # fmt: on

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def forward(
        self, x: Tensor, step_scale: Tensor | float = 1.0, *,
        initial_state: Tensor | None = None, reset: Tensor | None = None, reverse: bool = False,
        cu_seqlens: Tensor | None = None, return_final_state: bool = False,
    ) -> Any:  # fmt: skip
        """The layer's output at every step.

        Args:
            x: (batch, time, width), or (time, batch, width) if not ``batch_first``; of the parameters' dtype, or under
                autocast of any.
            step_scale: what multiplies step sizes, for another resolution of time: a number, or a tensor of no dimension,
                (batch,), or the size of ``x`` without features.
            initial_state: (batch, states), complex, the state before the first step, or with ``reverse`` that after the
                last; zero if None. With ``cu_seqlens`` (batch, sequences, states).
            reset: boolean, of the size of ``x`` without features. Where it is True the state starts anew: that of the
                step before counts as zero, with ``reverse`` that of the step after. With ``bidir`` neither scan passes
                from one of these two steps to the other.
            reverse: go backwards in time, and forwards in the second scan.
            cu_seqlens: (sequences + 1,), where sequences that are packed along time begin, and where the last one ends.
            return_final_state: return the state after the last step, too.

        Returns:
            The output, laid out as ``x`` is, and if asked for the final state, as ``initial_state`` is described.
            Derivatives pass through both states.

        Raises:
            TypeError, ValueError: an argument is not as described.
        """
        how = initial_state, reset, reverse, cu_seqlens, return_final_state
        return self._run(x, *how, step_scale=step_scale)

    def step(
        self,
        x: Tensor,
        state: Tensor | None = None,
        step_scale: Tensor | float = 1.0,
        *,
        reset: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One step, for generation: what a call on the whole sequence gives there. Not with ``bidir``.

        Args:
            x: (batch, width).
            state: (batch, state_width), as the last step or a call with ``return_final_state`` left it; zero if None.
            step_scale: what multiplies step sizes: a number, or a tensor of no dimension or (batch,).
            reset: (batch,), boolean: where it is True the state starts anew.

        Returns:
            The output, (batch, width), and the state after the step. ``state`` is not written to. Both have derivatives.

        Raises:
            RuntimeError: the layer is bidirectional.
            TypeError, ValueError: an argument is not as described.
        """
        if self.bidir:
            raise RuntimeError(
                "S5: a bidirectional layer has no step, as its output depends on later steps"
            )
        return self._step(x, state, reset, step_scale=step_scale)

    def _scale(self, step_scale: Any, sizes: list[tuple[int, ...]], x: Tensor) -> Any:
        """``step_scale`` as it multiplies step sizes in tensors of the dimensions of ``x``."""
        layer_checks.check_scale(self, step_scale, sizes, x)
        if not isinstance(step_scale, Tensor):
            return float(step_scale)
        if step_scale.dim() == 0:
            return step_scale
        missing = x.dim() - step_scale.dim()
        return step_scale[(..., *[None] * missing)]

    def _sequence(
        self, x: Tensor, how: dict[str, Any], step_scale: Tensor | float = 1.0
    ) -> Tensor | tuple[Tensor, Tensor]:
        batch, time = x.shape[:2]
        sizes = [(batch,), (batch, time) if self.batch_first else (time, batch)]
        if isinstance(step_scale, Tensor) and step_scale.dim() == 2 and not self.batch_first:
            sizes, step_scale = [(batch,), (batch, time)], step_scale.transpose(0, 1)
        scale = self._scale(step_scale, sizes, x)
        if self.bidir:
            how["initial_state"] = self._halves(how["initial_state"])
        ways = _both_ways(how) if self.bidir else [how]

        def scan(decays: Tensor, tokens: Tensor) -> tuple[list[Tensor], Tensor | None]:
            results: list[Any] = [linear_scan(decays, tokens, **way) for way in ways]
            if not how["return_final_state"]:
                return results, None
            states, final_state = zip(*results, strict=True)
            return [*states], torch.cat(final_state, -1)

        y, final_state = self.seq(x, scale, scan)
        return y if final_state is None else (y, final_state)

    def _halves(self, state: Any) -> Any:
        """An initial state that has both scans' numbers in its last dimension, though it may broadcast there."""
        if state is None:
            return None
        if not isinstance(state, Tensor):
            raise TypeError(
                f"S5: Expected initial_state to be a Tensor, got {type(state).__name__}"
            )
        if state.dim() == 0 or state.shape[-1] == 1:
            return state.expand(*state.shape[:-1], self.channels)
        if state.shape[-1] != self.channels:
            raise ValueError(
                f"S5: Expected initial_state of {self.channels} numbers for both scans, got size "
                f"{tuple(state.shape)}"
            )
        return state

    def _next(
        self,
        x: Tensor,
        state: Tensor | None,
        reset: Tensor | None,
        step_scale: Tensor | float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        def scan(decays: Tensor, tokens: Tensor) -> tuple[list[Tensor], Tensor]:
            after = advance(decays, tokens, state, reset)
            return [after], after

        results: tuple[Tensor, Tensor] = self.seq(
            x, self._scale(step_scale, [(x.shape[0],)], x), scan
        )
        return results

    def extra_repr(self) -> str:
        """The sizes, and what else is not the default."""
        parts = [f"{self.width}, state_width={self.state_width}"]
        if self.block_count != 1:
            parts.append(f"block_count={self.block_count}")
        if self.bidir:
            parts.append("bidir=True")
        if self.discretization != "zoh":
            parts.append(f"discretization={self.discretization!r}")
        return self._extra(*parts)


def _both_ways(how: dict[str, Any]) -> list[dict[str, Any]]:
    """What the two scans take: each its own initial state, and resets at its own side of the same borders."""
    ways = [{**how}, {**how, "reverse": not how["reverse"]}]
    if how["initial_state"] is not None:
        for way, state in zip(ways, how["initial_state"].chunk(2, -1), strict=True):
            way["initial_state"] = state
    if (reset := how.get("reset")) is not None:
        none = torch.zeros_like(reset[:, :1])
        shifted = (none, reset[:, :-1]) if how["reverse"] else (reset[:, 1:], none)
        ways[1]["reset"] = torch.cat(shifted, 1)
    return ways


def _truncated(size: tuple[int, ...], deviation: float, device: torch.device) -> Tensor:
    """Normal numbers of which none is beyond two deviations, of that deviation; float64."""
    values = torch.empty(size, device=device, dtype=torch.float64)
    return nn.init.trunc_normal_(values, 0.0, 1.0, -2.0, 2.0) * (deviation / _TRUNCATED)
