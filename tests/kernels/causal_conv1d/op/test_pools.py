"""``causal_conv1d_update`` as servers call it: rows of a pool, packed sequences, drafts that may be taken back."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from graphs import recorded
from torch import Tensor
from torch.nn import functional

from scan_registry import causal_conv1d, causal_conv1d_update

CHANNELS, SLOTS, SEQUENCES = 5, 17, 6
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}


@dataclass
class Server:
    """A pool of convolution states, and what each sequence's inputs have been so far."""

    width: int
    length: int
    dtype: torch.dtype
    device: str

    def __post_init__(self) -> None:
        self.pool = torch.randn(SLOTS, CHANNELS, self.length, dtype=torch.float64).to(self.dtype)
        self.pool = self.pool.to(self.device)
        self.weight = torch.randn(CHANNELS, self.width, dtype=self.wide)
        self.bias = torch.randn(CHANNELS, dtype=self.wide)

    @property
    def wide(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def update(self, x: Tensor, **options: Any) -> Tensor:
        options = {
            name: value.to(self.device) if isinstance(value, Tensor) else value
            for name, value in options.items()
        }
        filters = self.weight.to(self.device), self.bias.to(self.device)
        y = causal_conv1d_update(x.to(self.device), self.pool, *filters, "silu", **options)
        return y.cpu()

    def loop(self, before: Tensor, x: Tensor) -> Tensor:
        """(tokens, channels) after ``before``, (channels, width - 1), one output at a time in float64."""
        inputs = torch.cat([before.double(), x.double().T], 1)
        weight, bias = self.weight.double(), self.bias.double()
        outputs = [
            functional.silu((inputs[:, t : t + self.width] * weight).sum(1) + bias)
            for t in range(x.shape[0])
        ]
        return torch.stack(outputs) if outputs else x.double()

    def check(self, y: Tensor, expected: Tensor) -> None:
        error = (y.double() - expected).norm()
        assert error <= TOLERANCE[self.dtype] * expected.norm()


def drawn_lengths(most: int) -> list[int]:
    lengths = torch.randint(0, most + 1, (SEQUENCES,)).tolist()
    lengths[1] = 0
    return lengths


def bounds_of(lengths: list[int], dtype: torch.dtype) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("apart", [False, True], ids=["in place", "to other rows"])
@pytest.mark.parametrize(("width", "length"), [(4, 4), (4, 3), (2, 1), (8, 9), (3, 6)])
def test_packed_sequences(
    width: int, length: int, apart: bool, dtype: torch.dtype, device: str
) -> None:
    """Of drawn lengths, none among them, in drawn rows, one of which is no row, all in integers of 32 or 64 bits. Other rows
    keep their bits."""
    torch.manual_seed(width + 2 * apart)
    server = Server(width, length, dtype, device)
    order = torch.randperm(SLOTS)
    read = order[:SEQUENCES].clone()
    written = order[SEQUENCES : 2 * SEQUENCES].clone() if apart else read
    lengths, padding = drawn_lengths(5), int(read[2])
    lengths[2] = 3
    integers = torch.int64 if apart else torch.int32
    bounds = bounds_of(lengths, integers)
    before = server.pool.cpu().clone()
    x = torch.randn(int(bounds[-1]) + 2, CHANNELS, dtype=torch.float64).to(dtype)
    rows = {"dst_conv_state_indices": written.to(integers)} if apart else {}
    if apart:
        read[4] = read[3]  # a prefix that two sequences share
    y = server.update(
        x, conv_state_indices=read.to(integers), cu_seqlens=bounds, pad_slot_id=padding, **rows
    )
    expected, after = torch.zeros(x.shape, dtype=torch.float64), before.clone()
    for number, (start, end) in enumerate(pairwise(bounds.tolist())):
        if number == 2 or start == end:
            continue
        row = before[read[number]]
        expected[start:end] = server.loop(row[:, length - width + 1 :], x[start:end])
        after[written[number]] = torch.cat([row, x[start:end].T], 1)[:, -length:]
    server.check(y, expected)
    assert (y[int(bounds[-1]) :] == 0).all()
    assert torch.equal(server.pool.cpu(), after)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [2, 3, 4, 8])
def test_drafts(width: int, dtype: torch.dtype, packed: bool, device: str) -> None:
    """After a prefill, rounds of four drafted tokens of which drawn numbers are accepted: outputs are those of the tokens
    that count, one after another."""
    torch.manual_seed(width)
    tokens = 4
    server = Server(width, width - 2 + tokens, dtype, device)
    rows = torch.randperm(SLOTS)[:SEQUENCES].int()
    others = torch.tensor([row for row in range(SLOTS) if row not in rows.tolist()])
    guarded = server.pool[others].clone()
    taken = [torch.randn(9, CHANNELS, dtype=torch.float64).to(dtype) for _ in rows]
    for row, inputs in zip(rows.tolist(), taken, strict=True):
        server.pool[row, :, : width - 1] = inputs[-(width - 1) :].T.to(device)
    accepted, lengths = torch.ones(SEQUENCES, dtype=torch.int32), [tokens] * SEQUENCES
    for _ in range(5):
        if packed:
            lengths = torch.randint(1, tokens + 1, (SEQUENCES,)).tolist()
        drafts = [torch.randn(n, CHANNELS, dtype=torch.float64).to(dtype) for n in lengths]
        options = {"conv_state_indices": rows, "num_accepted_tokens": accepted}
        if packed:
            bounds = bounds_of(lengths, torch.int64)
            y = server.update(torch.cat(drafts), cu_seqlens=bounds, **options)
            outputs = list(y.split(lengths))
        else:
            outputs = list(server.update(torch.stack(drafts).mT, **options).mT)
        counts = [int(torch.randint(1, n + 1, ())) for n in lengths]
        for number, y in enumerate(outputs):
            before = taken[number][len(taken[number]) - (width - 1) :].T
            server.check(y, server.loop(before, drafts[number]))
            taken[number] = torch.cat([taken[number], drafts[number][: counts[number]]])
        accepted = torch.tensor(counts, dtype=torch.int32)
    assert torch.equal(server.pool[others], guarded)


def test_a_ring_takes_drafts_back() -> None:
    """When ``cache_seqlens`` counts fewer inputs."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 9), torch.randn(3, 4)
    ring, wrong = torch.zeros(2, 3, 6), torch.randn(2, 3, 3)
    steps = (x[..., :3], 0), (wrong, 3), (x[..., 3:6], 3), (wrong, 6), (x[..., 6:], 6)
    outputs = [
        causal_conv1d_update(drafts, ring, weight, None, None, torch.full((2,), count))
        for drafts, count in steps
    ]
    torch.testing.assert_close(torch.cat(outputs[::2], -1), causal_conv1d(x, weight))


def test_a_destination_that_is_no_row_leaves_the_pool() -> None:
    x, pool, weight = torch.randn(2, 3), torch.randn(4, 3, 4), torch.randn(3, 4)
    before, read = pool.clone(), torch.tensor([3, 1])
    y = causal_conv1d_update(
        x, pool, weight, conv_state_indices=read, dst_conv_state_indices=torch.tensor([-1, 2])
    )
    expected = causal_conv1d_update(x, before[read], weight)
    torch.testing.assert_close(y, expected)
    assert torch.equal(pool[[0, 1, 3]], before[[0, 1, 3]])
    assert torch.equal(pool[2, :, -1], x[1])


@pytest.mark.parametrize("device", DEVICES)
def test_a_destination_that_is_the_pad_slot_leaves_the_pool(device: str) -> None:
    """Also without indices to read by, whose own numbers are no padding."""
    server = Server(4, 5, torch.float32, device)
    server.pool, bounds = server.pool[:2].clone(), torch.tensor([0, 4, 4])
    before = server.pool.clone()
    rows = {"dst_conv_state_indices": torch.tensor([1, 0])}
    server.update(torch.randn(4, CHANNELS), cu_seqlens=bounds, pad_slot_id=1, **rows)
    assert torch.equal(server.pool, before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_no_tokens_change_no_row(packed: bool, device: str) -> None:
    """However rows are laid out, and wherever they are written to."""
    server = Server(4, 7, torch.float32, device)
    before = server.pool.clone()
    x = torch.randn(0, CHANNELS) if packed else torch.randn(2, CHANNELS, 0)
    bounds = {"cu_seqlens": torch.zeros(3, dtype=torch.int32)} if packed else {}
    for options in ({}, {"num_accepted_tokens": NUMBERS}, {"dst_conv_state_indices": NUMBERS + 5}):
        y = server.update(x, conv_state_indices=NUMBERS, **bounds, **options)
        assert y.shape == x.shape
        assert torch.equal(server.pool, before)


NUMBERS = torch.tensor([0, 2])
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a ring of drafts": (
        {"cache_seqlens": NUMBERS, "num_accepted_tokens": NUMBERS + 1},
        ValueError,
        "num_accepted_tokens does not go with cache_seqlens",
    ),
    "a ring elsewhere": (
        {"cache_seqlens": NUMBERS, "dst_conv_state_indices": NUMBERS},
        ValueError,
        "dst_conv_state_indices does not go with cache_seqlens",
    ),
    "more accepted than a row holds": (
        {"num_accepted_tokens": NUMBERS + 2},
        ValueError,
        "num_accepted_tokens has the value 4; accepted are values from 0 to 3",
    ),
    "more tokens than a row takes": (
        {"x": torch.randn(2, 3, 4), "num_accepted_tokens": NUMBERS + 1},
        ValueError,
        "conv_state has 5 inputs of each channel; with num_accepted_tokens, 4 steps",
    ),
    "more packed tokens than a row takes": (
        {
            "x": torch.randn(5, 3),
            "cu_seqlens": torch.tensor([0, 4, 5]),
            "num_accepted_tokens": NUMBERS + 1,
        },
        ValueError,
        "cu_seqlens has a sequence of 4 tokens",
    ),
    "one destination of two": (
        {"dst_conv_state_indices": torch.tensor([1, 1])},
        ValueError,
        "dst_conv_state_indices has the number 1 more than once",
    ),
    "bounds beyond the tokens": (
        {"cu_seqlens": torch.tensor([0, 1, 3])},
        ValueError,
        "cu_seqlens runs from 0 to 3",
    ),
    "batches of packed tokens": (
        {"x": torch.randn(2, 3, 1), "cu_seqlens": torch.tensor([0, 1, 2])},
        ValueError,
        r"x has shape \(2, 3, 1\); with cu_seqlens, it must be \(tokens, channels\)",
    ),
    "padding that is no number": (
        {"pad_slot_id": None},
        TypeError,
        "pad_slot_id is None; it must be an int",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    changes, error, words = REFUSED[name]
    arguments = {
        "x": torch.randn(2, 3),
        "conv_state": torch.randn(4, 3, 5),
        "weight": torch.randn(3, 4),
        "conv_state_indices": torch.tensor([2, 0]),
    }
    before = arguments["conv_state"].clone()
    for _ in range(2):  # also where a call of this kind was seen before
        with pytest.raises(error, match=words):
            causal_conv1d_update(**{**arguments, **changes})
    assert torch.equal(arguments["conv_state"], before)


def test_refuses_tangents() -> None:
    pool, weight = torch.randn(2, 3, 4), torch.randn(3, 4)
    x, before = torch.randn(2, 3), pool.clone()
    with pytest.raises(RuntimeError, match="a tensor has a tangent"):
        torch.func.jvp(lambda x: causal_conv1d_update(x, pool, weight), (x,), (x,))
    assert torch.equal(pool, before)


def test_compiles() -> None:
    """All options in a graph of torch.compile, whose results are those of eager calls."""
    torch.manual_seed(0)
    x, weight, bounds = torch.randn(5, 3), torch.randn(3, 4), torch.tensor([0, 2, 5])
    rows, taken = torch.tensor([3, 1], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)

    def step(x: Tensor, pool: Tensor) -> Tensor:
        return causal_conv1d_update(
            *(x, pool, weight),
            conv_state_indices=rows,
            cu_seqlens=bounds,
            num_accepted_tokens=taken,
            pad_slot_id=0,
        )

    pool = torch.randn(4, 3, 5)
    copy = pool.clone()
    y = torch.compile(step, backend="eager", fullgraph=True)(x, copy)
    assert torch.equal(y, step(x, pool))
    assert torch.equal(copy, pool)


OF_SEQUENCES: dict[str, dict[str, Tensor]] = {
    "nothing else": {},
    "bounds": {"cu_seqlens": torch.tensor([0, 2, 3, 5, 5, 6, 6])},
    "rings": {"cache_seqlens": torch.arange(SEQUENCES, dtype=torch.int32)},
    "counts": {"num_accepted_tokens": torch.ones(SEQUENCES, dtype=torch.int32)},
}
OF_SEQUENCES["counts and bounds"] = OF_SEQUENCES["bounds"] | OF_SEQUENCES["counts"]
OF_SEQUENCES["rings and bounds"] = OF_SEQUENCES["bounds"] | OF_SEQUENCES["rings"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OF_SEQUENCES)
def test_a_pad_slot_counts_for_no_sequence_without_indices(name: str, device: str) -> None:
    torch.manual_seed(0)
    server = Server(4, 8, torch.float32, device)
    x, pool, outs, pools = torch.randn(SEQUENCES, CHANNELS), server.pool[:SEQUENCES], [], []
    for padding in (-1, 0, 2):
        server.pool = pool.clone()
        outs.append(server.update(x, pad_slot_id=padding, **OF_SEQUENCES[name]))
        pools.append(server.pool)
    assert all((out != 0).any(1).all() for out in outs)
    for out, after in zip(outs, pools, strict=True):
        torch.testing.assert_close(out, outs[0])
        assert torch.equal(after, pools[0])


@pytest.mark.gpu
def test_a_graph_reads_rows_and_counts_anew() -> None:
    """One captured call, replayed with other rows, bounds and accepted counts."""
    torch.manual_seed(0)
    tokens, sequences, width = 24, 8, 4
    x = torch.randn(tokens, 256, device="cuda")
    pool = torch.randn(SLOTS, 256, 8, device="cuda")
    weight = torch.randn(256, width, device="cuda")
    rows = torch.arange(sequences, dtype=torch.int32, device="cuda")
    bounds = torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * 3
    accepted = torch.ones(sequences, dtype=torch.int32, device="cuda")

    def update(pool: Tensor) -> Tensor:
        return causal_conv1d_update(
            *(x, pool, weight, None, "silu"),
            conv_state_indices=rows,
            cu_seqlens=bounds,
            num_accepted_tokens=accepted,
        )

    graph, captured = recorded(lambda: update(pool))
    for _ in range(4):
        x.copy_(torch.randn_like(x))
        rows.copy_(torch.randperm(SLOTS)[:sequences])
        rows[0] = -1
        bounds.copy_(torch.randint(1, 4, (sequences + 1,)).cumsum(0) - 1)
        bounds[0] = 0
        accepted.copy_(torch.randint(1, 4, (sequences,)))
        before = pool.clone()
        graph.replay()
        assert torch.equal(captured, update(before))
        assert torch.equal(pool, before)
