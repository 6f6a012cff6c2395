"""``nn.LSTM`` with ``proj_size``: against torch.nn's, by torch's function and step by step; resets against episodes."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from scan_registry import nn
from scan_registry.nn import torch_cells

INPUTS, HIDDEN, PROJECTED, BATCH, TIME = 5, 7, 3, 4, 6
#: Each pair of values is in one of them.
OPTIONS: list[dict[str, Any]] = [
    {"num_layers": layers, "bidirectional": both, "batch_first": first, "bias": bias}
    for layers, both, first, bias in (
        (1, False, False, True),
        (1, True, True, False),
        (3, False, True, False),
        (3, True, False, False),
        (3, True, True, True),
    )
]
BACKENDS = ("auto", "reference")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pair(backend: str, **options: Any) -> tuple[Any, Any]:
    options = {"dtype": torch.float64, "proj_size": PROJECTED, **options}
    theirs = torch.nn.LSTM(INPUTS, HIDDEN, **options)
    ours = nn.LSTM(INPUTS, HIDDEN, backend=backend, **options)  # type: ignore[arg-type]
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def states_of(module: Any, *batch: int) -> tuple[Tensor, Tensor]:
    rows = module.num_layers * (2 if module.bidirectional else 1)
    h, c = (
        torch.randn(rows, *batch, units, dtype=torch.float64, requires_grad=True)
        for units in (PROJECTED, HIDDEN)
    )
    return h, c


def flat(result: Any) -> list[Tensor]:
    out, (h, c) = result
    return [out.data if isinstance(out, PackedSequence) else out, h, c]


def alike(theirs: Any, ours: Any, x: Any, hx: Any = None) -> None:
    """Equal results and gradients."""
    of = [x.data if isinstance(x, PackedSequence) else x, *(hx or ())]
    grads = []
    expected, actual = theirs(x, hx), ours(x, hx)
    torch.testing.assert_close(flat(actual), flat(expected))
    assert [t.stride() for t in flat(actual)] == [t.stride() for t in flat(expected)]
    for module, result in ((theirs, expected), (ours, actual)):
        loss = sum((t * torch.arange(t.numel()).view(t.shape).cos()).sum() for t in flat(result))
        grads.append(torch.autograd.grad(loss, [*of, *module.parameters()]))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_as_torch(options: dict[str, Any], backend: str) -> None:
    theirs, ours = pair(backend, **options)
    shape = (BATCH, TIME) if options["batch_first"] else (TIME, BATCH)
    x = torch.randn(*shape, INPUTS, dtype=torch.float64, requires_grad=True)
    alike(theirs, ours, x)
    alike(theirs, ours, x, states_of(ours, BATCH))
    one = torch.randn(TIME, INPUTS, dtype=torch.float64, requires_grad=True)
    alike(theirs, ours, one)
    alike(theirs, ours, one, states_of(ours))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [(6, 4, 4, 1), (1, 6, 2, 4)])
@pytest.mark.parametrize("both", [False, True])
def test_packed_sequences(both: bool, lengths: tuple[int, ...], backend: str) -> None:
    theirs, ours = pair(backend, num_layers=2, bidirectional=both)
    x = torch.randn(TIME, BATCH, INPUTS, dtype=torch.float64)
    packed = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=lengths[0] == 6)
    packed.data.requires_grad_()
    alike(theirs, ours, packed)
    alike(theirs, ours, packed, states_of(ours, BATCH))


@pytest.mark.parametrize("both", [False, True])
def test_state_dicts_parameters_and_repr(both: bool) -> None:
    modules = []
    for home in (torch.nn, nn):
        torch.manual_seed(1)
        modules.append(home.LSTM(INPUTS, HIDDEN, 2, bidirectional=both, proj_size=PROJECTED))
    theirs, ours = modules
    assert "weight_hr_l0" in ours.state_dict()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    assert repr(ours) == repr(theirs)
    x = torch.randn(TIME, BATCH, INPUTS)
    torch.testing.assert_close(copy.deepcopy(ours)(x), theirs(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout(backend: str) -> None:
    theirs, ours = pair(backend, num_layers=2, dropout=0.5)
    x = torch.randn(TIME, BATCH, INPUTS, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    expected = theirs(x)[0]
    torch.manual_seed(1)
    torch.testing.assert_close(ours(x)[0], expected)
    assert not torch.equal(ours(x)[0], ours(x)[0])
    alike(theirs.eval(), ours.eval(), x)


def test_torch_computes_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    run = torch_cells.run
    monkeypatch.setattr(torch_cells, "run", lambda *inputs: calls.append(1) or run(*inputs))
    x = torch.randn(TIME, BATCH, INPUTS)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        _, ours = pair("auto", dtype=dtype)
        assert ours(x.to(dtype))[0].dtype == dtype
    assert len(calls) == 3
    _, ours = pair("auto", dtype=torch.float32)
    ours(x, reset=torch.zeros(TIME, BATCH, dtype=torch.bool))
    torch.func.jvp(lambda x: ours(x)[0], (x,), (x,))
    pair("reference", dtype=torch.float32)[1](x)
    assert len(calls) == 3


def episodes(ours: Any, x: Tensor, hx: Any, mark: Tensor, anew: Any) -> Any:
    """One sequence (T, I) by calls of torch's function, one for each episode, through a single layer."""
    parts, state = [], hx
    for begin, end in pairwise(sorted({0, mark.shape[0], *mark.nonzero().flatten().tolist()})):
        if mark[begin]:
            state = anew
        out, state = ours(x[begin:end], state)
        parts.append(out)
    return torch.cat(parts), state


def test_resets() -> None:
    _, ours = pair("auto")
    hx, anew = states_of(ours, BATCH), states_of(ours, BATCH)
    x = torch.randn(TIME, BATCH, INPUTS, dtype=torch.float64, requires_grad=True)
    mark = torch.rand(TIME, BATCH) < 0.4
    mark[0], mark[-1, 1] = torch.tensor([True, False, True, False]), True
    actual = ours(x, hx, reset=mark, reset_hx=anew)
    rows = [
        episodes(ours, x[:, b], [s[:, b] for s in hx], mark[:, b], [s[:, b] for s in anew])
        for b in range(BATCH)
    ]
    expected = (
        torch.stack([row[0] for row in rows], 1),
        tuple(torch.stack([row[1][k] for row in rows], 1) for k in (0, 1)),
    )
    torch.testing.assert_close(flat(actual), flat(expected))
    leaves = [x, *hx, *anew, *ours.parameters()]
    grads = [
        torch.autograd.grad(sum((t.sin() ** 2).sum() for t in flat(result)), leaves)
        for result in (actual, expected)
    ]
    torch.testing.assert_close(*grads)
    with torch.no_grad():
        x[:2, 1] = float("nan")
        mark[2, 1] = True
        assert ours(x, reset=mark)[0][2:].isfinite().all()


def test_resets_of_packed_batch_first_and_unbatched_sequences() -> None:
    _, ours = pair("auto", num_layers=2, bidirectional=True)
    x, mark = torch.randn(TIME, BATCH, INPUTS, dtype=torch.float64), torch.rand(TIME, BATCH) < 0.4
    hx, anew, lengths = states_of(ours, BATCH), states_of(ours, BATCH), [1, 6, 2, 4]
    of = {"lengths": torch.tensor(lengths), "enforce_sorted": False}
    packed, marks = (pack_padded_sequence(t, **of) for t in (x, mark))  # type: ignore[arg-type]
    out, last = ours(packed, hx, reset=marks, reset_hx=anew)
    padded, _ = torch.nn.utils.rnn.pad_packed_sequence(out)
    for b, length in enumerate(lengths):
        result, state = ours(
            x[:length, b],
            tuple(s[:, b] for s in hx),
            reset=mark[:length, b],
            reset_hx=tuple(s[:, b] for s in anew),
        )
        torch.testing.assert_close(padded[:length, b], result)
        torch.testing.assert_close(tuple(s[:, b] for s in last), state)
    first = copy.deepcopy(ours)
    first.batch_first = True
    out, last = first(x.transpose(0, 1), hx, reset=mark.T, reset_hx=anew)
    result = ours(x, hx, reset=mark, reset_hx=anew)
    torch.testing.assert_close((out.transpose(0, 1), last), result)


@pytest.mark.parametrize("size", [True, 2.0, None, -1, HIDDEN])
def test_sizes_that_are_refused(size: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="proj_size"):
        nn.LSTM(INPUTS, HIDDEN, proj_size=size)


@pytest.mark.parametrize("backend", ["cuda", "cuda_fused", "triton"])
def test_kernels_have_no_projections(backend: Any) -> None:
    with pytest.raises(ValueError, match=f"'auto' or 'reference' with proj_size, got: '{backend}'"):
        nn.LSTM(INPUTS, HIDDEN, proj_size=PROJECTED, backend=backend)
    nn.LSTM(INPUTS, HIDDEN, backend=backend)


def test_states_of_other_sizes() -> None:
    _, ours = pair("auto")
    h, c = states_of(ours, BATCH)
    x = torch.randn(TIME, BATCH, INPUTS, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"hx\[0\] \(h\) of size \(1, 4, 3\), got \(1, 4, 7\)"):
        ours(x, (c, c))
    with pytest.raises(RuntimeError, match=r"hx\[1\] \(c\) of size \(1, 4, 7\), got \(1, 4, 3\)"):
        ours(x, (h, h))


@pytest.mark.parametrize("backend", BACKENDS)
def test_torch_2_6_has_no_word_for_exports(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compiler.is_exporting came with torch 2.7."""
    monkeypatch.delattr(torch.compiler, "is_exporting")
    theirs, ours = pair(backend)
    alike(theirs, ours, torch.randn(TIME, BATCH, INPUTS, dtype=torch.float64, requires_grad=True))
