"""``rnn`` with resets as a GPU has them, cut into rows, and with sequences that are packed along time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Call, results
from recurring import draw, gradients
from torch import Tensor

from scan_registry import explain, rnn
from scan_registry.kernels.rnn.op import resets as rnn_resets
from scan_registry.kernels.rnn.op import segments as rnn_segments
from scan_registry.kernels.rnn.op.arguments import FUNCTIONS
from scan_registry.kernels.rnn.problem import Function

BOUNDS = torch.tensor([0, 0, 4, 5, 5, 12, 13, 13])  # of T = 13; three are empty


def _drawn(function: Function, **options: Any) -> Call:
    wx, r, b, start = (t.detach() for t in draw(function, (2, 13, 2, 3)))
    states = start.repeat(1, 1, 7, 1, 1) if "cu_seqlens" in options else start
    reset = torch.rand(2, 13) < 0.3
    reset[0, 0] = reset[-1, -1] = True
    return Call(
        {"Wx": wx, "R": r, "b": b, "states": states},
        {"function": function, "reset": reset, **options},
    )


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_rows_between_resets(
    function: Function, packed: bool, anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results and gradients are those of resets within rows; nor does NaN cross a reset."""
    call = _drawn(function, **({"cu_seqlens": BOUNDS} if packed else {}))
    if anew:
        call.tensors["reset_states"] = call.tensors["states"] + 1  # type: ignore[index]
    spoilt = call.leaves([])
    spoilt.tensors["states"][:, 0, 0] = torch.nan
    spoilt.others["reset"][0, 0] = True
    runs = []
    for cut in (False, True):
        monkeypatch.setattr(rnn_resets, "cuts_at_resets", lambda *_, cut=cut: cut)
        runs.append((results(rnn, call), rnn(**spoilt.arguments)[0]))
    torch.testing.assert_close(*runs, rtol=1e-11, atol=1e-11, equal_nan=True)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_length_of_the_longest_sequence(
    function: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With it packed sequences are one batch; without, in batches of similar lengths. So it is under FakeTensor and on GPUs."""
    call = _drawn(function, cu_seqlens=BOUNDS, reset=None)
    expected = results(rnn, call)
    torch.testing.assert_close(results(lambda **how: rnn(**how, max_seqlen=9), call), expected)
    monkeypatch.setattr(
        rnn_segments,
        "layout_of",
        lambda x, reset, known, cut: rnn_segments._layout_of_length(x, reset, known.cu_seqlens, 8),
    )
    torch.testing.assert_close(results(rnn, call), expected)
    call.others["cu_seqlens"] = BOUNDS.int()  # type: ignore[index]
    torch.testing.assert_close(results(rnn, call), expected)


@pytest.mark.parametrize("lengths", [[5], [1] * 50, [64] + [1] * 30, [*range(1, 40)], [3, 2, 1000]])
def test_less_than_half_is_padding(lengths: list[int]) -> None:
    rows = [
        torch.tensor(lengths)[chosen] for chosen in rnn_segments._buckets(torch.tensor(lengths))
    ]
    assert sorted(torch.cat(rows).tolist()) == sorted(lengths)
    assert sum(len(each) * int(each.max()) for each in rows) <= 2 * sum(lengths)
    assert len(rows) <= max(lengths).bit_length()


def test_clips_and_cuts_go_with_resets() -> None:
    """A sequence with a reset is what two are."""
    wx, r, b, start = draw("lstm", (1, 8, 1, 3))
    reset = torch.arange(8).eq(5).unsqueeze(0)
    how: dict[str, Any] = {"forward_clipval": 0.2, "gradient_recurrent_clipval": 0.01}
    one = rnn(wx, r, b, start, reset=reset, **how)[0]
    both = [rnn(wx[:, :5], r, b, start, **how)[0], rnn(wx[:, 5:], r, b, **how)[0]]
    two = torch.cat(both, 2)
    assert torch.equal(one, two)
    grads = (gradients([out], (wx, r, b, start)) for out in (one, two))
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_compiled_code_that_reads_bounds() -> None:
    wx, r, b, _ = draw("gru", dtype=torch.float32, grad=False)

    def call(bounds: Tensor) -> Any:
        return rnn(wx, r, b, cu_seqlens=bounds, function="gru")[0] * 2

    bounds = torch.tensor([0, 2, 5])
    torch.testing.assert_close(torch.compile(call, backend="eager")(bounds), call(bounds))


def test_explain_of_rows() -> None:
    """Of packed sequences, and of pieces between resets to given states, it names the batch of the longest."""
    wx, r, b, _ = draw("gru", (1, 13, 1, 16), torch.float32, grad=False)
    reset = torch.zeros(1, 13, dtype=torch.bool)
    reset[0, 5] = True
    for given, size in (
        ({"cu_seqlens": BOUNDS}, (2, 7)),
        ({"cu_seqlens": BOUNDS, "max_seqlen": 7}, (7, 7)),
        ({"reset": reset}, (1, 13)),
        ({"reset": reset, "reset_states": torch.zeros(1, 1, 1, 1, 16)}, (2, 8)),
    ):
        call = explain(rnn, wx, r, b, **given, function="gru")
        problem = call.steps[0].decision.problem
        assert (problem.batch, problem.time) == size
