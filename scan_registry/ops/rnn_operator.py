"""``rnn`` as commands know it."""

from __future__ import annotations

from argparse import Namespace
from typing import get_args

from scan_registry.kernels.rnn.problem import SIZES, RnnBackend
from scan_registry.ops.benchmark import Option, known
from scan_registry.ops.operator import Operator, ParsedCall, described_tensor
from scan_registry.ops.rnn_bench import BENCHMARK

_USUAL = next(iter(SIZES))


class Rnn(Operator):
    """Its kernels are not tuned."""

    name = "rnn"
    shape = "batch, time, heads and units of a head"
    benchmark = BENCHMARK
    backends = get_args(RnnBackend)
    options = (Option("--function", metavar="X", help=f"{' '.join(SIZES)}; default: {_USUAL}"),)

    def parse(self, dtype: str, shape: tuple[int, ...], given: Namespace) -> ParsedCall:
        if len(shape) != 4:
            raise ValueError(
                f"--shape is {given.shape!r}; rnn takes batch, time, heads and units, such as 16,1024,1,768"
            )
        batch, time, heads, dim = shape
        function = known("--function", given.function or _USUAL, [*SIZES])
        sizes = next(sizes for name, sizes in SIZES.items() if name == function)
        shapes = (
            (batch, time, sizes.inputs, heads, dim),
            (sizes.recurrent, heads, dim, dim),
            (sizes.bias, heads, dim),
        )
        tensors = tuple(described_tensor(each, dtype) for each in shapes)
        return ParsedCall(tensors, {"function": function}, {"function": function})


OPERATOR = Rnn()
