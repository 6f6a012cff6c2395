"""The compiled code of ``rnn`` for the CPU: clips, extremes, rounding, threads, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Call, close, results
from recurring import draw
from refusing import check_refused
from torch import Tensor
from watched import levels, using

from scan_registry import rnn
from scan_registry.kernels.rnn import reference
from scan_registry.kernels.rnn.op import cpu as rnn_cpu
from scan_registry.kernels.rnn.op.arguments import Options
from scan_registry.kernels.rnn.problem import SIZES, Function
from scan_registry.ops import _cpu

FUNCTIONS: list[Function] = [*SIZES]
CLIPS: list[dict[str, Any]] = [
    {},
    {"forward_clipval": 0.3, "gradient_recurrent_clipval": 0.1},
    {"forward_clipval": 0.5, "gradient_recurrent_cut": True},
]
#: Products with R have tiles of 1 to 6 rows, whatever the function is; a task has 48 rows at most.
SHAPES = ((3, 6, 2, 20), *((rows, 3, 1, 33) for rows in (2, 5, 6, 8, 11)), (50, 3, 1, 64))


def drawn(function: Function, shape: tuple[int, int, int, int], **options: Any) -> Call:
    names = "Wx", "R", "b", "states"
    tensors = dict(zip(names, draw(function, shape, torch.float32), strict=True))
    call = Call(tensors, {"function": function, **options}).changed(lambda t: t.detach())
    call.tensors["states"].add_(1)  # the normaliser of sLSTM is at least 1 after a step
    return call


@pytest.mark.parametrize("clips", CLIPS, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_clips_and_tiles_of_rows(function: Function, clips: dict[str, Any]) -> None:
    """Against the reference in float64, which says what gradients of clips are. The operator calls compiled code."""
    for shape in SHAPES[: 2 if clips else len(SHAPES)]:
        call = drawn(function, shape, **clips)
        expected = results(lambda **how: rnn(**how, backend="reference"), call.wide())
        for level in levels():
            with using(level):
                actual = results(rnn, call)
            close(
                actual, expected, lambda name, _: 2e-6 if "output" in name else 1e-5, (shape, level)
            )


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("shape", [(100, 22, 1, 128), (1, 220, 3, 128)], ids=str)
def test_threads_share_rows_and_heads(function: Function, shape: Any) -> None:
    """So many elements that they are worth some threads; with one, rows go in tasks, too."""
    call = drawn(function, shape, reset=torch.rand(shape[:2]) < 0.4)
    usual, runs = torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            runs.append(results(rnn, call))
        finally:
            torch.set_num_threads(usual)
    close(runs[1], runs[0], lambda *_: 1e-5)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes(function: Function, dtype: torch.dtype) -> None:
    """States are rounded where they are written, and not where they are carried."""
    x, r, b, states = (t.to(dtype) for t in drawn(function, (3, 20, 2, 20)).tensors.values())
    tensors: list[Tensor] = [x, r, b, states.squeeze(2)]
    out = rnn_cpu.forward(tensors, Options(function), False)[0]
    expected, _ = reference.forward(function, *(t.double() for t in tensors))
    assert out.dtype == dtype
    error = (out.double() - expected.to(dtype).double()).abs().max() / expected.abs().max()
    assert error < torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_far_from_zero(function: Function) -> None:
    """Where exponents overflow unless that is provided for."""
    inputs = torch.tensor([-300.0, -90, -20, -1e-4, 1e-4, 20, 90, 300])
    sizes = SIZES[function]
    x = inputs.expand(sizes.inputs, 8, 8)
    # Each gate takes the values in another order.
    x = torch.stack([x[k].roll(3 * k, -1).roll(k) for k in range(sizes.inputs)]).permute(1, 0, 2)
    x = x.reshape(1, 8, sizes.inputs, 1, 8).contiguous()
    recurrent, bias = torch.zeros(sizes.recurrent, 1, 8, 8), torch.zeros(sizes.bias, 1, 8)
    expected, _ = reference.forward(function, x.double(), recurrent.double(), bias.double())
    for level in levels():
        with using(level):
            found = rnn_cpu.forward((x, recurrent, bias, None), Options(function), False)[0]
        # sLSTM has exponents of hundreds, whose last digit in float32 is 3e-5.
        torch.testing.assert_close(found.double(), expected, rtol=5e-5, atol=1e-7)


FORWARD = ("lstm", (1024,) * 10, (2, 3, 1, 4, *[0] * 12), 1.0, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({0: "rnn"}, "cell 'rnn'; accepted are lstm, gru, elman, slstm"),
        ({1: (1024,) * 7}, "takes 10 pointers, got 7"),
        ({1: (None,) * 10}, "a pointer of rnn_forward is null"),
        ({2: (2, 3, 1, 4)}, "takes 16 scalars, got 4"),
        ({2: (2, -3, 1, 4, *[0] * 12)}, "size 1 is -3"),
        ({2: (2, 3, 1, 4, 2, *[0] * 11)}, "sequences are packed, and batch is 2"),
        ({4: 0}, "threads is 0"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[int, Any], words: str) -> None:
    check_refused(_cpu.rnn_forward, FORWARD, changes, words)


def test_offsets_must_rise() -> None:
    x, offsets = torch.zeros(1, 4, 4), torch.tensor([0, 3, 2])
    pointers = (*[x.data_ptr()] * 6, offsets.data_ptr(), *[x.data_ptr()] * 3)
    with pytest.raises(ValueError, match="offsets do not rise from 0 to time, 4"):
        _cpu.rnn_forward("lstm", pointers, (1, 4, 1, 1, 2, *[0] * 11), 1.0, 1)
