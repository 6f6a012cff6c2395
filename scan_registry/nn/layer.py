"""What the modules on scans share: how they are called, on a whole sequence or on one step, and what they say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import torch
from torch import Tensor

from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.nn.common_checks import check_reset
from scan_registry.nn.exports import Exports
from scan_registry.nn.layer_checks import check_common, check_input, check_state

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    from scan_registry.dispatch.select import Backend

    class CallOptions(TypedDict, total=False):
        """What every call takes beside the input."""

        initial_state: Tensor | None
        reset: Tensor | None
        reverse: bool
        cu_seqlens: Tensor | None


Device = torch.device | str | int | None


class ScanLayer(Exports):
    """A recurrent layer: a linear map, a scan over time, and a linear map back.

    A subclass has the parameters, and says in ``_sequence`` and ``_next`` what the layer computes.
    """

    #: Whether states are complex.
    is_complex: ClassVar[bool] = False
    #: Features of the input, and numbers of a state.
    features: int
    channels: int

    def __init__(self, batch_first: bool, dtype: torch.dtype | None, backend: Backend) -> None:
        check_common(batch_first, dtype, backend)
        super().__init__()
        self.batch_first = batch_first
        self.backend: Backend = backend

    @property
    def matrix(self) -> Tensor | None:
        """A parameter with the dtype and device that inputs must have; None if the submodule has to be called and checks them
        itself."""
        raise NotImplementedError

    def _sequence(self, x: Tensor, how: dict[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
        """The output of (batch, time, features), and the final state if it is asked for. ``how`` is what scans take."""
        raise NotImplementedError

    def _next(self, x: Tensor, state: Tensor | None, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output of one step, (batch, features), and the state after it."""
        raise NotImplementedError

    if TYPE_CHECKING:
        # fmt: off
        @overload
        def __call__(
            self, x: Tensor, *,
            return_final_state: Literal[False] = False, **options: Unpack[CallOptions],
        ) -> Tensor: ...
        @overload
        def __call__(
            self, x: Tensor, *, return_final_state: Literal[True], **options: Unpack[CallOptions],
        ) -> tuple[Tensor, Tensor]: ...
        @overload
        def __call__(
            self, x: Tensor, *, return_final_state: bool, **options: Unpack[CallOptions],
        ) -> Tensor | tuple[Tensor, Tensor]: ...
        # fmt: on

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def forward(
        self,
        x: Tensor,
        *,
        initial_state: Tensor | None = None,
        reset: Tensor | None = None,
        reverse: bool = False,
        cu_seqlens: Tensor | None = None,
        return_final_state: bool = False,
    ) -> Any:
        """The layer's output at every step.

        Args:
            x: (batch, time, features), or (time, batch, features) if not ``batch_first``; of the parameters' dtype, or
                under autocast of any.
            initial_state: (batch, channels), the state before the first step, or with ``reverse`` that after the last;
                zero if None. With ``cu_seqlens`` (batch, sequences, channels).
            reset: boolean, of the size of ``x`` without features. Where it is True the state starts anew: that of the
                step before counts as zero, with ``reverse`` that of the step after.
            reverse: go backwards in time.
            cu_seqlens: (sequences + 1,), where sequences that are packed along time begin, and where the last one ends.
            return_final_state: return the state after the last step, too.

        Returns:
            The output, laid out as ``x`` is, and if asked for the final state, as ``initial_state`` is described; in
            float32, or float64. Derivatives pass through both states.

        Raises:
            TypeError, ValueError: an argument is not as described.
        """
        return self._run(x, initial_state, reset, reverse, cu_seqlens, return_final_state)

    def _run(
        self,
        x: Tensor,
        initial_state: Tensor | None,
        reset: Tensor | None,
        reverse: bool,
        cu_seqlens: Tensor | None,
        return_final_state: bool,
        **more: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        check_input(self, x)
        check_reset(self, reset, x)
        if not self.batch_first:
            x = x.transpose(0, 1)
            reset = None if reset is None else reset.transpose(0, 1)
        how: dict[str, Any] = {
            "initial_state": initial_state,
            "dim": 1,
            "reverse": reverse,
            "cu_seqlens": cu_seqlens,
            "return_final_state": return_final_state,
            "backend": self.backend,
        }
        if reset is not None:
            how["reset"] = reset
        results = self._sequence(x, how, **more)
        if self.batch_first:
            return results
        if isinstance(results, tuple):
            return results[0].transpose(0, 1), results[1]
        return results.transpose(0, 1)

    def step(
        self, x: Tensor, state: Tensor | None = None, *, reset: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One step, for generation: what a call on the whole sequence gives there.

        Args:
            x: (batch, features).
            state: (batch, channels), as the last step or a call with ``return_final_state`` left it; zero if None.
            reset: (batch,), boolean: where it is True the state starts anew.

        Returns:
            The output, (batch, features), and the state after the step. ``state`` is not written to. Both have
            derivatives.

        Raises:
            TypeError, ValueError: an argument is not as described.
        """
        return self._step(x, state, reset)

    def _step(
        self, x: Tensor, state: Tensor | None, reset: Tensor | None, **more: Any
    ) -> tuple[Tensor, Tensor]:
        check_input(self, x, step=True)
        check_state(self, state, x)
        check_reset(self, reset, x)
        y, state = self._next(x, state, reset, **more)
        # An output that is changed in place, as by a residual connection, is not to change the state.
        return y.clone() if y is state else y, state

    def _extra(self, *parts: str) -> str:
        """What ``extra_repr`` says: ``parts``, and what of the rest is not the default."""
        more = [] if self.batch_first else ["batch_first=False"]
        more += [] if self.backend == "auto" else [f"backend={self.backend!r}"]
        return ", ".join([*parts, *more])


def wide(x: Tensor) -> Tensor:
    """``x`` in the dtype that states are computed in."""
    return x if x.dtype in (torch.float64, torch.complex64, torch.complex128) else x.float()


def map_states(
    results: Tensor | tuple[Tensor, Tensor], output: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """``output`` of the states that a scan returned; a final state beside them stays as it is."""
    if isinstance(results, tuple):
        return output(results[0]), results[1]
    return output(results)  # type: ignore[no-any-return]


def advance(gate: Tensor, token: Tensor, state: Tensor | None, reset: Tensor | None) -> Tensor:
    """gate · state + token, where ``reset`` is True the token alone."""
    if state is None:
        return token
    state = state.to(token.dtype)
    if reset is not None:
        state = state.masked_fill(reset.unsqueeze(-1), 0)
    return torch.addcmul(token, gate.expand_as(token), state)


def advance_gated(
    kind: str,
    inputs: tuple[Tensor, ...],
    state: Tensor | None,
    reset: Tensor | None,
    parameters: tuple[Tensor, ...] = (),
) -> Tensor:
    """The state after one step of a gated scan, each input (batch, channels)."""
    gate_inputs = [wide(tensor) for tensor in inputs]
    gate_inputs += [tensor.to(gate_inputs[0].dtype) for tensor in parameters]
    marks = None if reset is None else reset.unsqueeze(-1)
    return advance(*KINDS[kind].gates(*gate_inputs, reset=marks), state, reset)
