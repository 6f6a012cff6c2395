"""``rnn`` as commands know it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, get_args

from scan_registry.kernels.rnn.problem import SIZES, RnnBackend, RnnProblem
from scan_registry.ops.operator import Operator, Option, ParsedCall, described_tensor, known

if TYPE_CHECKING:
    from torch import Tensor

_USUAL = next(iter(SIZES))


class Rnn(Operator):
    """Its kernels are not tuned."""

    name = "rnn"
    shape = "batch, time, heads and units of a head"
    backends = get_args(RnnBackend)
    options = (Option("--function", metavar="X", help=f"{' '.join(SIZES)}; default: {_USUAL}"),)

    def parse(self, dtype: str, shape: tuple[int, ...], args: Namespace) -> ParsedCall:
        if len(shape) != 4:
            raise ValueError(
                f"--shape is {args.shape!r}; rnn takes batch, time, heads and units, such as 16,1024,1,768"
            )
        batch, time, heads, dim = shape
        function = known("--function", args.function or _USUAL, [*SIZES])
        sizes = next(sizes for name, sizes in SIZES.items() if name == function)
        shapes = (
            (batch, time, sizes.inputs, heads, dim),
            (sizes.recurrent, heads, dim, dim),
            (sizes.bias, heads, dim),
        )
        tensors = tuple(described_tensor(of_tensor, dtype) for of_tensor in shapes)
        return ParsedCall(tensors, {"function": function}, {"function": function})

    def run_on_cpu(self, problem: RnnProblem, tensors: Mapping[str, Tensor | None]) -> None:
        """What the function calls for tensors on the CPU."""
        from scan_registry.kernels.rnn.op import plans as rnn_plans
        from scan_registry.kernels.rnn.op.arguments import Arguments, Options

        options = Options(problem.function, "auto", problem.clips)
        present = {name: t for name, t in tensors.items() if t is not None}
        if problem.direction == "forward":
            parameters = present["recurrent"], present["bias"]
            optional = tensors.get("initial"), tensors.get("reset")
            arguments = Arguments(present["inputs"], *parameters, *optional)
            outputs = rnn_plans.forward(arguments, options, True)
            present["states"].copy_(outputs.states)
            if "cache" in present:
                present["cache"].copy_(outputs.cache)
            return
        cache = present.get("cache", present["states"].new_empty(0))
        gradients = rnn_plans.backward(
            *(present["recurrent"], present["states"], tensors.get("initial"), cache),
            *(present["states_grad"], tensors.get("final_grad"), options, tensors.get("reset")),
        )
        for name, gradient in zip(("gates_grad", "initial_grad"), gradients, strict=True):
            present[name].copy_(gradient)


OPERATOR = Rnn()
