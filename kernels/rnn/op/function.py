"""``rnn``: LSTM, GRU, Elman and sLSTM with a recurrent matrix for each head, differentiable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from scan_registry.dispatch.select import Backend
from scan_registry.kernels.model import Problem
from scan_registry.kernels.rnn.op import autograd as rnn_derivatives
from scan_registry.kernels.rnn.op import layout as rnn_layout
from scan_registry.kernels.rnn.op import plans as rnn_plans
from scan_registry.kernels.rnn.op import problems as rnn_problems
from scan_registry.kernels.rnn.op import resets as rnn_resets
from scan_registry.kernels.rnn.op import segments as rnn_segments
from scan_registry.kernels.rnn.op.arguments import (
    BACKENDS,
    Options,
    Resets,
    clips_of,
    normalised,
)
from scan_registry.kernels.rnn.problem import Direction, Function, RnnBackend
from scan_registry.ops.operator import Unfused, describes

__all__ = ["BACKENDS", "describe", "rnn"]


def rnn(
    Wx: Tensor,
    R: Tensor,
    b: Tensor | None,
    states: Tensor | None = None,
    *,
    reset: Tensor | None = None,
    reset_states: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    function: Function = "lstm",
    backend: RnnBackend = "auto",
    gradient_recurrent_cut: bool = False,
    gradient_recurrent_clipval: float | None = None,
    forward_clipval: float | None = None,
) -> tuple[Tensor, Tensor]:
    """States of a recurrent network whose heads do not see each other, for inputs ``Wx``.

    With B batches, T steps, N heads of D units, S states, and a gate's pre-activation p = Wx + R·h + b,
    of the state h before the step (σ is the logistic function):

        lstm    c = σ(f)·c + σ(i)·tanh(z); h = σ(o)·tanh(c). Gates i, f, z, o; states h, c.
        gru     g = R·h + b; h = σ(z)·h + (1 − σ(z))·tanh(n + σ(r)·g), where n has no R·h. Gates of R
                are g, r, z; of Wx r, z, n; of b all four in that order. State h.
        elman   h = tanh(p). One gate; state h.
        slstm   m' = max(i, log σ(f) + m), or i where n is 0; c = exp(log σ(f) + m − m')·c +
                exp(i − m')·tanh(z); n likewise with 1 for tanh(z), and at least 1; h = σ(o)·c/n. Gates
                i, f, z, o; states h, c, n, m.

    Args:
        Wx: (B, T, gates, N, D), what the inputs contribute to each gate. Any strides; where time or
            batch come first does not matter. float32, bfloat16 or float16; float64 in plain torch.
        R: (gates, N, D, D), the recurrent matrix of each gate and head: ``R[g, n, new, previous]``. Any D
            from 1 up.
        b: (gates, N, D); None for zeros.
        states: (S, B, 1, N, D), the states before the first step; None for zeros. With ``cu_seqlens`` (S, B,
            sequences, N, D).
        reset: (B, T), bool: at a step where it is True, the states start anew. The states before that step
            have no effect on it, even if they are infinite or NaN, and get no gradient from it.
        reset_states: shaped as ``states``: the states that a reset starts from; None for zeros. If a network
            starts from learned states, pass those here, and as ``states`` what the last call returned.
        cu_seqlens: (sequences + 1,), int32 or int64, on the device of ``Wx`` or on the CPU: where sequences
            that are packed along time begin, and where the last one ends: 0, …, T. Sequences may be empty.
            Sequences of similar lengths run beside one another, as rows of a batch.
        max_seqlen: the most steps that a sequence has. With it, values of ``cu_seqlens`` on a GPU are not
            read, unless a ``reset`` is, so that the CPU does not wait for the GPU. ``torch.compile`` then
            makes one graph. All sequences are padded to ``max_seqlen`` steps. Longer
            sequences are refused if ``cu_seqlens`` is on the CPU, and under ``SCAN_REGISTRY_DEBUG=1`` on a GPU;
            else their states are wrong.
        function: ``"lstm"``, ``"gru"``, ``"elman"`` or ``"slstm"``.
        backend: ``"auto"`` takes the best that this GPU has; ``"cuda_fused"`` takes all steps in one
            launch, ``"cuda_alternating"`` a product of matrices and a launch at each step, and
            ``"cuda"`` either; ``"triton"`` all steps in one launch, too; ``"reference"`` is plain torch
            on any device. On the CPU ``"auto"`` runs compiled C.
        gradient_recurrent_cut: the gradient does not pass from a step through R to the one before.
        gradient_recurrent_clipval: it does, and is clipped to ± this at every step.
        forward_clipval: h is clipped to ± this after every step; its gradient passes as if it were not.

    Returns:
        The states after each step, (S, B, T, N, D), and after the last one, laid out as ``states``, in the dtype
        of ``Wx`` (autocast's, where that is on), to which R and the initial states are converted. Sums
        and the states that are carried are in float32 where that dtype is narrower. Differentiable in
        all tensors, any number of times and in both modes; the first derivative is a kernel, others
        are plain torch.

    Raises:
        TypeError: an argument is not a tensor, or a dtype is not supported or does not mix.
        ValueError: a shape is not as described, devices differ, or an option is out of range;
            ``reset_states`` without ``reset``, or ``max_seqlen`` without ``cu_seqlens``; or a clip or cut
            under ``torch.func`` or in forward mode.
        RuntimeError: a second derivative with a clip or cut, which change what the first one is.
        NoKernelError: ``require``, ``SCAN_REGISTRY_REQUIRE`` or ``backend`` allows nothing that runs
            on this GPU; the message lists what there is.
        DriverError: the driver failed; the message names the kernel, its variant and the launch.

    Warns:
        FallbackWarning: once per kernel, where it is compiled here or plain torch stands in for it.
    """
    clips = clips_of(forward_clipval, gradient_recurrent_clipval, gradient_recurrent_cut)
    resets = Resets(reset, reset_states, cu_seqlens, max_seqlen)
    arguments, options = normalised(Wx, R, b, states, function, backend, clips, resets)
    if (reset is not None or resets.packed) and (
        (cut := rnn_resets.cuts_at_resets(arguments, options)) or resets.packed
    ):
        return rnn_segments.rnn(arguments, options, resets, cut)
    every, last = rnn_derivatives.rnn(arguments, options)
    return every, last.unsqueeze(2)


@dataclass(frozen=True)
class Pass(Unfused):
    """One direction of a call: its problems, in whatever backend, and the inputs copied first."""

    direction: Direction
    options: Options
    tensors: dict[str, Tensor]
    training: bool
    copied: tuple[str, ...]
    resets: bool

    def alternatives(self, backend: Any) -> tuple[tuple[Problem, Backend], ...]:
        """The problems that would do, as ``backend`` tries them, and what may solve each."""
        options = self.options._replace(backend=backend)
        facts = self.tensors, self.training, self.resets
        return rnn_problems.alternatives(self.direction, options, *facts)


def _present(arguments: NamedTuple) -> list[str]:
    return [name for name, tensor in arguments._asdict().items() if tensor is not None]


@describes(rnn)
def describe(call: Any) -> dict[str, Pass]:
    """The problems that a call of ``rnn`` with these arguments poses, by direction; that of derivatives
    only if they are asked for; of packed sequences, those of their first batch of rows, which has the longest.
    Nothing is computed."""
    clips = clips_of(
        call.forward_clipval, call.gradient_recurrent_clipval, call.gradient_recurrent_cut
    )
    reset, reset_states, function = call.reset, call.reset_states, call.function
    resets = Resets(reset, reset_states, call.cu_seqlens, call.max_seqlen)
    own = call.Wx, call.R, call.b, call.states
    arguments, options = normalised(*own, function, call.backend, clips, resets)
    if arguments.inputs.numel() == 0:
        return {}
    wanted = any(t is not None and t.requires_grad for t in (*own, reset_states))
    cut = reset_states is not None or call.backend == "triton"
    in_rows = (cut and reset is not None) or resets.packed
    resets_left = reset is not None and not cut
    if in_rows:
        arguments = arguments._replace(inputs=rnn_segments.first_batch(arguments, resets, cut))
    tensors = rnn_plans.forward_tensors(arguments.inputs, function, wanted)
    padded = bool(arguments.inputs.shape[-1] % rnn_layout.UNITS)
    copied = ["inputs"] if in_rows or tensors["inputs"] is not arguments.inputs else []
    if padded:
        copied = _present(arguments._replace(reset=None, reset_states=None))
    passes = {"forward": Pass("forward", options, tensors, wanted, tuple(copied), resets_left)}
    if wanted:
        states, _, cache = rnn_plans.empty_outputs(arguments.inputs.to("meta"), function, True)
        tensors = rnn_plans.backward_tensors(states, cache, states, function)
        copied = ["recurrent", "states", "cache", "states_grad"] if padded else []
        passes["backward"] = Pass("backward", options, tensors, True, tuple(copied), resets_left)
    return passes
