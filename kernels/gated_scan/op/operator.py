"""``gated_scan`` as commands know it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any

from scan_registry.kernels.gated_scan import PUBLIC
from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.ops import operator

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from scan_registry.kernels.gated_scan.op.arguments import Arguments, Options
    from scan_registry.kernels.gated_scan.op.bench import Case
    from scan_registry.kernels.gated_scan.problem import GatedScanProblem

USUAL_KIND = "min_gru"


class GatedScan(operator.Operator):
    """Its kernels are not tuned."""

    name = "gated_scan"
    shape = "batch, channels and time"
    others = {name: {"kind": name} for name in PUBLIC if name in KINDS}  # noqa: RUF012  # as options
    instead = operator.WITHOUT_DIM
    kinds = tuple(name for name in KINDS if name not in PUBLIC)
    options = (
        operator.Option(
            "--kind",
            metavar="X",
            help=f"of gates: {', '.join(KINDS)}; default: {USUAL_KIND}",
        ),
        operator.CHANNEL_LAST,
        operator.Option("--reset", action="store_true", help="states start anew at some steps"),
        operator.Option("--reverse", action="store_true", help="scan from the end"),
    )

    def describe(
        self, kind: Any, *inputs: Any, initial_state: Any = None, reset: Any = None, dim: Any = -1,
        reverse: Any = False, cu_seqlens: Any = None, return_final_state: Any = False,
        backend: Any = "auto",
    ) -> Mapping[str, operator.KernelCall]:  # fmt: skip
        """The kernel calls by direction. Kind ``linear`` without resets is described by ``linear_scan``."""
        import torch

        from scan_registry.kernels.gated_scan.op.arguments import Options, normalised
        from scan_registry.kernels.gated_scan.op.problems import describe, is_linear
        from scan_registry.kernels.linear_scan.op import function as linear_scan
        from scan_registry.ops.pools import stand_in

        initial_state = stand_in(initial_state, cu_seqlens is not None, dim)
        options = Options(kind, dim, reverse, return_final_state, backend)
        arguments, options = normalised(kind, inputs, reset, initial_state, cu_seqlens, options)
        wanted = any(t is not None and t.requires_grad for t in (*inputs, initial_state))
        if is_linear(arguments, options):
            return linear_scan.describe(
                inputs[0],
                inputs[1],
                initial_state,
                dim=dim,
                reverse=reverse,
                cu_seqlens=cu_seqlens,
                return_final_state=return_final_state,
                backend=backend,
            )
        with torch.no_grad():
            return describe(arguments, options, wanted)

    def call_of(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        from scan_registry.kernels.gated_scan.op import kinds
        from scan_registry.kernels.gated_scan.op.arguments import channel_values, with_activation

        bound = signature(getattr(kinds, name)).bind(*args, **kwargs)
        bound.apply_defaults()
        values, kind = dict(bound.arguments), KINDS[name]
        inputs = [values.pop(of) for of in kind.inputs]
        parameters = [
            channel_values(of, values.pop(of), inputs[0], values["dim"]) for of in kind.parameters
        ]
        if "activation" in values:
            name = with_activation(name, values.pop("activation"))
        return (name, *inputs, *parameters), values

    def family_of(self, call: operator.KernelCall) -> str:
        from scan_registry.kernels.gated_scan.op import calls as gated_scan_calls

        return self.name if isinstance(call, gated_scan_calls.KernelCall) else "linear_scan"

    def parse(self, dtype: str, shape: tuple[int, ...], args: Namespace) -> operator.ParsedCall:
        import torch

        batch, channels, time = operator.sequence_sizes(self, shape, args)
        name = USUAL_KIND if args.kind is None else operator.known("--kind", args.kind, [*KINDS])
        kind, wide = KINDS[name], "float64" if dtype == "float64" else "float32"
        tensors = (
            *(operator.described_sequence(shape, dtype, args) for _ in kind.inputs),
            *(operator.described_tensor((channels,), wide) for _ in kind.parameters),
        )
        reset = None
        if args.reset:
            reset = torch.empty((batch, time), dtype=torch.bool, device="meta")
        record = {"kind": name, "channel_last": bool(args.channel_last)}
        how = {"reverse": args.reverse}
        return operator.ParsedCall(
            (name, *tensors), {**how, "reset": reset}, {**record, **how, "reset": args.reset}
        )

    def run_on_cpu(self, problem: GatedScanProblem, tensors: Mapping[str, Tensor | None]) -> None:
        from scan_registry.kernels.gated_scan.op import plans

        arguments, options = _arguments(problem, tensors)
        if problem.direction == "forward":
            states, final_state = plans.forward(arguments, options._replace(final=True))
            for name, result in (("states", states), ("final_state", final_state)):
                _put(tensors.get(name), result)
            return
        targets = _gradients(problem, tensors)
        wanted = tuple(target is not None for target in targets)
        gradients = plans.backward(
            arguments,
            tensors["states"],  # type: ignore[arg-type]
            tensors["states_grad"],
            tensors.get("final_state_grad"),
            options,
            wanted,
        )
        for target, grad in zip(targets, gradients, strict=True):
            _put(target, grad)

    def posed(self, case: Case, direction: str) -> tuple[GatedScanProblem, ...]:
        from scan_registry.kernels.gated_scan.op.problems import describe

        arguments, options = _of_case(case, "meta")
        calls = describe(arguments, options, direction != operator.PASSES[0])
        return (calls[direction].problem,)

    def tensors(
        self, case: Case, problem: GatedScanProblem, device: torch.device | str
    ) -> dict[str, Tensor | None]:
        """Random tensors to time a kernel with. The states of a backward pass are random, too, so its results mean nothing."""
        import torch

        inputs, parameters = case.tensors(device)
        named: dict[str, Tensor | None] = {f"input{n}": x for n, x in enumerate(inputs)}
        if parameters:
            named["parameters"] = torch.stack(parameters)
        if problem.direction == "forward":
            return {**named, "states": torch.empty_like(inputs[0])}
        named |= {"states": case.sequence(device), "states_grad": case.sequence(device)}
        for name in self.outputs(case, problem):
            named[name] = torch.empty_like(inputs[0])
        if parameters:
            shape = problem.most_parts, *torch.stack(parameters).shape
            named["parameters_grad"] = torch.empty(shape, device=device)
        return named

    def outputs(self, case: Case, problem: GatedScanProblem) -> tuple[str, ...]:
        if problem.direction == "forward":
            return ("states",)
        return tuple(f"input{n}_grad" for n in range(problem.inputs))


def _gradients(
    problem: GatedScanProblem, tensors: Mapping[str, Tensor | None]
) -> list[Tensor | None]:
    """The tensors that gradients are written to, in the order of the operator's arguments. The first part of a channel
    parameter's gradient gets the whole sum; the other parts are zero."""
    targets = [tensors.get(f"input{n}_grad") for n in range(problem.inputs)]
    sums = tensors.get("parameters_grad")
    if sums is not None:
        sums.zero_()
    targets += [None if sums is None else sums[0, n] for n in range(problem.parameters)]
    return [*targets, tensors.get("initial_state_grad")]


def _put(target: Tensor | None, result: Tensor | None) -> None:
    if target is not None and result is not None:
        target.copy_(result)


def _of_case(case: Case, device: torch.device | str) -> tuple[Arguments, Options]:
    from scan_registry.kernels.gated_scan.op.arguments import Arguments, Options

    inputs, parameters = case.tensors(device)
    return Arguments(tuple(inputs), tuple(parameters)), Options(case.kind)


def _arguments(
    problem: GatedScanProblem, tensors: Mapping[str, Tensor | None]
) -> tuple[Arguments, Options]:
    """The operator's arguments, from the tensors of a kernel."""
    from scan_registry.kernels.gated_scan.op.arguments import Arguments, Options

    inputs = [t for n in range(problem.inputs) if (t := tensors[f"input{n}"]) is not None]
    parameters, initial = tensors.get("parameters"), tensors.get("initial_state")
    left = tensors.get("initial_state_grad")
    if initial is None and left is not None:  # zeros have a gradient, too
        initial = left.new_zeros(left.shape)
    arguments = Arguments(
        tuple(inputs),
        () if parameters is None else tuple(parameters.unbind()),
        tensors.get("reset"),
        initial,
        tensors.get("offsets"),
    )
    name = next(
        kind.name
        for kind in KINDS.values()
        if (kind.source, kind.option) == (problem.kind, problem.option)
    )
    return arguments, Options(name, -1, problem.reverse)


OPERATOR = GatedScan()
