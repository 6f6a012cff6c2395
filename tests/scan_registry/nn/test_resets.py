"""Modules whose states start anew: against a call for each episode, in torch.nn where it has the cell."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from scan_registry import nn

#: The sizes of their states; "projected" is an LSTM with projections.
STATES = {"LSTM": (6, 6), "GRU": (6,), "RNN": (6,), "SLSTM": (6,) * 4, "projected": (4, 6)}
KINDS = (*STATES,)
DEEP = {"num_layers": 2, "bidirectional": True}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def module_of(kind: str, **options: Any) -> torch.nn.Module:
    if kind == "projected":
        kind, options["proj_size"] = "LSTM", STATES[kind][0]
    module: torch.nn.Module = getattr(nn, kind)(5, 6, dtype=torch.float64, **options)
    return module


def states_of(kind: str, rows: int, batch: int) -> Any:
    drawn = [
        torch.rand(rows, batch, size, dtype=torch.float64, requires_grad=True)
        for size in STATES[kind]
    ]
    return tuple(drawn) if len(drawn) > 1 else drawn[0]


def flat(states: Any) -> list[Tensor]:
    return [states] if isinstance(states, Tensor) else [*states]


def in_episodes(
    run: Any, x: Tensor, reset: Tensor, first: Any, anew: Any, *, backwards: bool
) -> tuple[Tensor, list[Tensor]]:
    """One sequence (T, I), each episode by a call of its own; h and the last states."""
    cuts = sorted({0, len(x), *reset.nonzero().flatten().tolist()})
    spans, parts = [*pairwise(cuts)], []
    for begin, end in reversed(spans) if backwards else spans:
        fresh = end < len(x) if backwards else bool(reset[begin])
        start = tuple(anew if fresh else first)
        part = x[begin:end].flip(0) if backwards else x[begin:end]
        out, last = run((part, start if len(start) > 1 else start[0]))
        parts.append(out.flip(0) if backwards else out)
    return torch.cat(parts[::-1] if backwards else parts), flat(last)


def episodes(
    module: Any, x: Tensor, hx: Any, reset: Tensor, anew: Any
) -> tuple[Tensor, list[Tensor]]:
    """Each layer, each sequence of x (T, B, I), each direction and each episode by a call of its own, without
    resets; h and the last states. A layer is a module of one layer and direction with its parameters."""
    ends: list[list[Tensor]] = [[] for _ in flat(hx)]
    for layer in range(module.num_layers):
        sides = []
        for side in range(2 if module.bidirectional else 1):
            row = layer * (2 if module.bidirectional else 1) + side
            options = {"num_heads": module.num_heads} if module.num_heads > 1 else {}
            if module.proj_size:
                options["proj_size"] = module.proj_size
            one = type(module)(x.shape[2], 6, dtype=torch.float64, **options)
            name = f"_l{layer}{'_reverse' if side else ''}"
            own = {n: p for n, p in module.named_parameters() if n.endswith(name)}
            inputs = {n.removesuffix(name) + "_l0": p for n, p in own.items()}
            rows = []
            for b in range(x.shape[1]):
                own = [[s[row, b].unsqueeze(0) for s in flat(states)] for states in (hx, anew)]
                run = partial(torch.func.functional_call, one, inputs)
                out, last = in_episodes(run, x[:, b], reset[:, b], *own, backwards=bool(side))
                rows.append(out)
                for state, item in zip(ends, last, strict=True):
                    state.append(item.squeeze(0))
            sides.append(torch.stack(rows, 1))
        x = torch.cat(sides, 2)
    size = x.shape[1]
    return x, [
        torch.stack([torch.stack([*s[k : k + size]]) for k in range(0, len(s), size)]) for s in ends
    ]


def alike(actual: Any, expected: Any, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(flat(actual[1]), flat(expected[1]))
    torch.testing.assert_close(actual[0], expected[0])
    grads = []
    for out, states in (actual, expected):
        outs = [out, *flat(states)]
        loss = sum((o * torch.linspace(-1, 2, o.numel()).view(o.shape)).sum() for o in outs)
        grads.append(torch.autograd.grad(loss, leaves))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("options", [{}, DEEP], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_resets(kind: str, options: dict[str, Any]) -> None:
    if kind == "SLSTM":
        options = options | {"num_heads": 2}
    module, rows = module_of(kind, **options), 4 if options.get("bidirectional") else 1
    hx, anew = states_of(kind, rows, 3), states_of(kind, rows, 3)
    x = torch.randn(7, 3, 5, dtype=torch.float64, requires_grad=True)
    reset = torch.rand(7, 3) < 0.3
    reset[0], reset[6, 1] = torch.tensor([True, False, True]), True
    leaves = [x, *module.parameters(), *flat(hx), *flat(anew)]
    actual = module(x, hx, reset=reset, reset_hx=anew)
    alike(actual, episodes(module, x, hx, reset, anew), leaves)
    # From zeros, batch first.
    zeros = [torch.zeros_like(s) for s in flat(hx)]
    module.batch_first = True
    out, last = module(x.transpose(0, 1), hx, reset=reset.T)
    expected = episodes(module, x, hx, reset, tuple(zeros) if len(zeros) > 1 else zeros[0])
    torch.testing.assert_close(out.transpose(0, 1), expected[0])
    torch.testing.assert_close(flat(last), expected[1])


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("kind", ["GRU", "SLSTM", "projected"])
def test_resets_of_packed_sequences(kind: str, sort: bool) -> None:
    """As each sequence by itself has them."""
    module, lengths = module_of(kind, **DEEP), [6, 4, 1] if sort else [4, 6, 1]
    hx, anew = states_of(kind, 4, 3), states_of(kind, 4, 3)
    x, reset = torch.randn(6, 3, 5, dtype=torch.float64), torch.rand(6, 3) < 0.4
    packed, marks = (
        pack_padded_sequence(t, torch.tensor(lengths), enforce_sorted=sort) for t in (x, reset)
    )
    out, last = module(packed, hx, reset=marks, reset_hx=anew)
    assert torch.equal(out.batch_sizes, packed.batch_sizes)
    padded, _ = pad_packed_sequence(out)
    for number, length in enumerate(lengths):
        own, restart = (tuple(s[:, number] for s in flat(states)) for states in (hx, anew))
        inputs = (own, restart) if len(own) > 1 else (own[0], restart[0])
        alone, end = module(
            x[:length, number], inputs[0], reset=reset[:length, number], reset_hx=inputs[1]
        )
        torch.testing.assert_close(padded[:length, number], alone)
        torch.testing.assert_close([s[:, number] for s in flat(last)], flat(end))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["GRU", "SLSTM"])
def test_the_default_device_does_not_matter(kind: str, packed: bool) -> None:
    """Nor does ``torch.set_default_device``, to a device whose tensors do not mix with those of the call."""
    module, anew = module_of(kind, **DEEP), states_of(kind, 4, 3)
    inputs: Any = torch.randn(6, 3, 5, dtype=torch.float64), torch.rand(6, 3) < 0.4
    if packed:
        inputs = [pack_padded_sequence(t, torch.tensor([6, 4, 1])) for t in inputs]
    x, reset = inputs
    wanted, _ = module(x, anew, reset=reset, reset_hx=anew)
    with torch.device("meta"):
        actual, _ = module(x, anew, reset=reset, reset_hx=anew)
    assert torch.equal(*((actual.data, wanted.data) if packed else (actual, wanted)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_in_pieces(kind: str) -> None:
    """A stream of experience: states handed on, learned states at each reset."""
    module = module_of(kind, num_layers=2)
    anew = states_of(kind, 2, 2)
    x, reset = torch.randn(11, 2, 5, dtype=torch.float64), torch.rand(11, 2) < 0.3
    whole, end = module(x, anew, reset=reset, reset_hx=anew)
    states, parts = anew, []
    for begin, stop in pairwise([0, 1, 5, 6, 11]):
        out, states = module(x[begin:stop], states, reset=reset[begin:stop], reset_hx=anew)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts), whole)
    torch.testing.assert_close(flat(states), flat(end))


@pytest.mark.parametrize("kind", ["LSTM", "projected"])
def test_nothing_that_is_not_finite_crosses_a_reset(kind: str) -> None:
    module = module_of(kind, **DEEP)
    x, reset = torch.randn(6, 2, 5, dtype=torch.float64), torch.zeros(6, 2, dtype=torch.bool)
    reset[3, 0] = True
    expected, _ = module(x, reset=reset)
    x[2, 0] = torch.nan
    actual, _ = module(x, reset=reset)
    assert actual[:3, 0].isnan().all(1).any()
    assert torch.equal(actual[3:, 0], expected[3:, 0])
    assert torch.equal(actual[:, 1], expected[:, 1])


def test_compile_without_a_break() -> None:
    module = module_of("GRU")
    x, reset = torch.randn(4, 2, 5, dtype=torch.float64), torch.rand(4, 2) < 0.4
    hx = states_of("GRU", 1, 2)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    actual, expected = (m(x, hx, reset=reset, reset_hx=hx) for m in (compiled, module))
    alike(actual, expected, [*module.parameters(), hx])


PACKED = pack_padded_sequence(torch.randn(4, 2, 5), torch.tensor([4, 2]))


@pytest.mark.parametrize(
    ("x", "arguments", "error", "words"),
    [
        (torch.zeros(4, 2, 5), {"reset": [True]}, TypeError, "reset to be a Tensor, got list"),
        (
            torch.zeros(4, 2, 5),
            {"reset": torch.zeros(4, 2)},
            ValueError,
            "reset of dtype torch.bool",
        ),
        (
            torch.zeros(4, 2, 5),
            {"reset": torch.zeros(2, 4).bool()},
            RuntimeError,
            r"reset of size \(4, 2\), got \(2, 4\)",
        ),
        (torch.zeros(4, 5), {"reset": torch.zeros(4, 1).bool()}, RuntimeError, r"of size \(4,\)"),
        (
            torch.zeros(4, 2, 5),
            {"reset_hx": torch.zeros(1, 2, 6)},
            ValueError,
            "Expected reset beside reset_hx, got reset_hx alone",
        ),
        (
            torch.zeros(4, 2, 5),
            {"reset": torch.zeros(4, 2).bool(), "reset_hx": torch.zeros(1, 3, 6)},
            RuntimeError,
            r"reset_hx of size \(1, 2, 6\), got \(1, 3, 6\)",
        ),
        (PACKED, {"reset": torch.zeros(6).bool()}, TypeError, "to be a PackedSequence"),
        (
            PACKED,
            {"reset": pack_padded_sequence(torch.zeros(4, 2).bool(), torch.tensor([3, 3]))},
            RuntimeError,
            "Expected reset packed as the input is",
        ),
    ],
)
def test_errors(x: Any, arguments: Any, error: type[Exception], words: str) -> None:
    assert isinstance(x, (Tensor, PackedSequence))
    with pytest.raises(error, match=words):
        nn.GRU(5, 6)(x, **arguments)
