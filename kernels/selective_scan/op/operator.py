"""``selective_scan`` as commands know it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from scan_registry.kernels.selective_scan.problem import MOST_STATES
from scan_registry.ops.operator import (
    CHANNEL_LAST,
    PASSES,
    WITHOUT_DIM,
    Operator,
    Option,
    ParsedCall,
    described_sequence,
    described_tensor,
    sequence_sizes,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from scan_registry.kernels.selective_scan.op.arguments import Arguments, Options
    from scan_registry.kernels.selective_scan.op.bench import Case
    from scan_registry.kernels.selective_scan.problem import SelectiveScanProblem

_USUAL_STATES = 16
GATES = ("silu", "none")
#: Of the gradients of u, delta, A, B, C, D, z, delta_bias and initial_state, the names of the kernels' pointers.
_GRADIENTS = (
    *("u_grad", "delta_grad", "A_grad", "B_grad", "C_grad", "D_grad", "z_grad", "bias_grad"),
    "initial_grad",
)
#: Those that the kernels leave as sums of parts; others are whole.
_PARTIAL = ("A_grad", "B_grad", "C_grad", "D_grad", "bias_grad")


class SelectiveScan(Operator):
    """Its kernels are not tuned."""

    name = "selective_scan"
    shape = "batch, channels and time"
    instead = WITHOUT_DIM
    options = (
        Option("--states", type=int, metavar="N", help=f"of a channel; default: {_USUAL_STATES}"),
        Option("--groups", type=int, metavar="N", help="that B and C come in; default: 1"),
        CHANNEL_LAST,
    )

    def parse(self, dtype: str, shape: tuple[int, ...], args: Namespace) -> ParsedCall:
        batch, channels, time = sequence_sizes(self, shape, args)
        states = _USUAL_STATES if args.states is None else args.states
        if not 1 <= states <= MOST_STATES:
            raise ValueError(f"--states is {states}; accepted are 1 to {MOST_STATES}")
        groups = 1 if args.groups is None else args.groups
        if groups < 1 or channels % groups:
            raise ValueError(f"--groups is {groups}; accepted are divisors of {channels} channels")
        complex_numbers = dtype == "complex64"
        real = "float32" if complex_numbers else dtype
        wide = "float64" if real == "float64" else "float32"

        sequence = partial(described_sequence, shape, real, args)
        length = 2 * time if complex_numbers else time
        projections = [described_tensor((batch, groups, states, length), real) for _ in "BC"]
        tensors = (
            *(sequence(), sequence()),
            described_tensor((channels, states), "complex64" if complex_numbers else wide),
            *projections,
            described_tensor((channels,), wide),
            sequence(),
            described_tensor((channels,), wide),
        )
        record = {"states": states, "groups": groups, "channel_last": bool(args.channel_last)}
        return ParsedCall(tensors, {"delta_softplus": True}, record)

    def run_on_cpu(
        self, problem: SelectiveScanProblem, tensors: Mapping[str, Tensor | None]
    ) -> None:
        from scan_registry.kernels.selective_scan.op import plans

        arguments, options = _arguments(problem, tensors)
        if problem.direction == "forward":
            outputs = plans.forward(arguments, options, True)
            for name, of_call in (("out", outputs.out), ("final_state", outputs.last)):
                kept = tensors[name]
                assert kept is not None
                kept.copy_(of_call.view(kept.shape))
            return
        out_grad, final_grad = tensors["out_grad"], tensors.get("final_grad")
        assert out_grad is not None
        if final_grad is not None and arguments.cu_seqlens is None:
            final_grad = final_grad.squeeze(1)
        checkpoints = plans.forward(arguments, options, True).checkpoints
        wanted = tuple(tensors.get(name) is not None for name in _GRADIENTS)
        gradients = plans.backward(arguments, checkpoints, out_grad, final_grad, options, wanted)
        for name, grad in zip(_GRADIENTS, gradients, strict=True):
            kept = tensors.get(name)
            if kept is None or grad is None:
                continue
            if name not in _PARTIAL:
                kept.copy_(grad.view(kept.shape) if name == "initial_grad" else grad)
                continue
            # All of the sum in the first part.
            kept.zero_()
            while kept.dim() > grad.dim():
                kept = kept[0]
            kept.copy_(grad)

    def posed(self, case: Case, direction: str) -> tuple[SelectiveScanProblem, ...]:
        from scan_registry.kernels.selective_scan.op.problems import describe

        arguments, options = _of_case(case, "meta")
        training = direction != PASSES[0]
        calls = describe(arguments, options, training)
        return tuple(
            call.problem
            for name, call in calls.items()
            if (name not in ("forward", "states")) == training
        )

    def tensors(
        self, case: Case, problem: SelectiveScanProblem, device: torch.device | str
    ) -> dict[str, Tensor | None]:
        """Results are not to be believed: the backward pass gets states that no scan has made."""
        from scan_registry.kernels.selective_scan.op import plans

        arguments, _ = _of_case(case, device)
        return plans.new_tensors(arguments, problem, case.sequence(device))

    def outputs(self, case: Case, problem: SelectiveScanProblem) -> tuple[str, ...]:
        if problem.direction == "adjoint":
            return "adjoints", "sizes"
        if problem.direction == "forward":
            return ("out",)
        gated = ("z_grad",) if case.gate == GATES[0] else ()
        return "u_grad", "delta_grad", *_PARTIAL, *gated


def _of_case(case: Case, device: torch.device | str) -> tuple[Arguments, Options]:
    from scan_registry.kernels.selective_scan.op.arguments import Options, normalised

    arguments = normalised(*case.inputs(device), None, None, True, "auto")
    return arguments, Options(True)


def _arguments(
    problem: SelectiveScanProblem, tensors: Mapping[str, Tensor | None]
) -> tuple[Arguments, Options]:
    """The operator's, from those of a kernel."""
    import torch

    from scan_registry.kernels.selective_scan.op.arguments import Arguments, Options

    pointers = [tensors.get(name) for name in Arguments._fields]
    arguments = Arguments(*pointers)  # type: ignore[arg-type]
    left = tensors.get("initial_grad")
    if arguments.initial_state is None and left is not None:  # zeros have a gradient, too
        arguments = arguments._replace(initial_state=torch.zeros_like(left))
    if arguments.cu_seqlens is None and arguments.initial_state is not None:
        arguments = arguments._replace(initial_state=arguments.initial_state.squeeze(1))
    return arguments, Options(problem.softplus)


OPERATOR = SelectiveScan()
