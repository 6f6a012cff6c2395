"""Scans that start from rows of a pool and leave their final states there, against each sequence by itself in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from graphs import recorded
from torch import Tensor

import scan_registry
from scan_registry import StateRows

SLOTS, SEQUENCES = 19, 6
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 3e-2}
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Operator:
    """An operator, the shape of its states in the pool, its time dimension, and random arguments of a batch and time."""

    run: Callable[..., Any]
    row: tuple[int, ...]
    dim: int
    draw: Callable[[int, int], tuple[Tensors, Tensors]]


def sizes(*names: str, channels: int = 3) -> Callable[[int, int], tuple[Tensors, Tensors]]:
    def draw(batch: int, time: int) -> tuple[Tensors, Tensors]:
        return {name: torch.randn(batch, channels, time) for name in names}, {}

    return draw


def of_selective_scan(batch: int, time: int) -> tuple[Tensors, Tensors]:
    timed = {name: torch.randn(batch, 4, time) for name in ("u", "delta", "z")}
    timed |= {name: torch.randn(batch, 2, 5, time) for name in "BC"}
    return timed, {"A": -torch.rand(4, 5) - 0.1, "D": torch.randn(4), "delta_bias": torch.randn(4)}


def of_ssd_scan(batch: int, time: int) -> tuple[Tensors, Tensors]:
    timed = {"x": torch.randn(batch, time, 4, 8), "dt": torch.randn(batch, time, 4)}
    timed |= {name: torch.randn(batch, time, 2, 16) for name in "BC"}
    return timed, {"A": -torch.rand(4) - 0.1, "D": torch.randn(4)}


def of_convolution(batch: int, time: int) -> tuple[Tensors, Tensors]:
    return {"x": torch.randn(batch, 3, time)}, {"weight": torch.randn(3, 4)}


def of_rg_lru(batch: int, time: int) -> tuple[Tensors, Tensors]:
    names = "x", "recurrence_gate", "input_gate"
    timed = {name: torch.randn(batch, time, 3) for name in names}
    return timed, {"a_param": torch.randn(3)}


OPERATORS = {
    "selective_scan": Operator(
        partial(scan_registry.selective_scan, delta_softplus=True), (4, 5), -1, of_selective_scan
    ),
    "ssd_scan": Operator(
        partial(scan_registry.ssd_scan, dt_softplus=True), (4, 8, 16), 1, of_ssd_scan
    ),
    "causal_conv1d": Operator(
        partial(scan_registry.causal_conv1d, activation="silu"), (3, 3), -1, of_convolution
    ),
    "min_gru": Operator(scan_registry.min_gru, (3,), -1, sizes("gate", "hidden")),
    "min_lstm": Operator(scan_registry.min_lstm, (3,), -1, sizes("forget", "input", "hidden")),
    "rg_lru": Operator(partial(scan_registry.rg_lru, dim=1), (3,), 1, of_rg_lru),
}


@dataclass
class Prompts:
    """Prompts of a server: a pool of random states, and random sequences, packed or of one length."""

    name: str
    dtype: torch.dtype
    device: str
    packed: bool
    time: int = 11

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.operator = OPERATORS[self.name]
        self.lengths = [self.time] * SEQUENCES
        if self.packed:
            self.lengths = [5, 0, 12, 1, 4, 9]
        self.bounds = torch.tensor([0, *self.lengths]).cumsum(0)
        batch, time = (1, sum(self.lengths)) if self.packed else (SEQUENCES, self.time)
        timed, fixed = self.operator.draw(batch, time)
        # Both the operator and the loop take what the dtype has rounded.
        self.timed = {name: tensor.to(self.dtype) for name, tensor in timed.items()}
        self.fixed = {name: tensor.to(self.wide) for name, tensor in fixed.items()}
        self.pool = torch.randn(SLOTS, *self.operator.row).to(self.wide).to(self.device)
        if self.name == "causal_conv1d":
            self.pool = self.pool.to(self.dtype)

    @property
    def wide(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def run(self, rows: StateRows) -> list[Tensor]:
        """The outputs of all sequences."""
        arguments = {name: t.to(self.device) for name, t in {**self.timed, **self.fixed}.items()}
        bounds = {"cu_seqlens": self.bounds.to(self.device)} if self.packed else {}
        out = self.operator.run(**arguments, **bounds, initial_state=rows).cpu()
        return list(out.split(self.lengths, self.operator.dim) if self.packed else out.split(1))

    def alone(self, number: int, state: Tensor, steps: int | None = None) -> tuple[Tensor, Tensor]:
        """Output and final state of the first ``steps`` steps of one sequence in float64."""
        dim, length = self.operator.dim, self.lengths[number]
        arguments = {name: tensor.double() for name, tensor in self.fixed.items()}
        for name, tensor in self.timed.items():
            of_it = tensor
            if self.packed:
                of_it = tensor.narrow(dim, int(self.bounds[number]), length)
            else:
                of_it = tensor[number : number + 1]
            arguments[name] = of_it.narrow(dim, 0, length if steps is None else steps).double()
        out, final = self.operator.run(
            **arguments, initial_state=state.double().unsqueeze(0), return_final_state=True
        )
        return out, final[0]

    def close(self, one: Tensor, other: Tensor) -> bool:
        error = (one.double() - other).norm()
        return bool(error <= TOLERANCE[self.dtype] * max(float(other.norm()), 1e-3))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("apart", [False, True], ids=["in place", "to other rows"])
@pytest.mark.parametrize("name", OPERATORS)
def test_starts_from_rows_and_leaves_final_states(
    name: str, apart: bool, packed: bool, dtype: torch.dtype, device: str
) -> None:
    """Drawn rows, and none; other rows keep their bits."""
    prompts = Prompts(name, dtype, device, packed)
    order = torch.randperm(SLOTS)
    read, written = order[:SEQUENCES].clone(), order[SEQUENCES : 2 * SEQUENCES].clone()
    read[2], padding = -1, int(read[4])
    if apart:
        read[5] = read[0]
        written[3] = -7
    else:
        written = read
    before = prompts.pool.cpu().clone()
    rows = StateRows(
        prompts.pool,
        read.int().to(device),
        written.to(device) if apart else None,
        pad_slot_id=padding,
    )
    outs = prompts.run(rows)
    expected = before.clone()
    for number in range(SEQUENCES):
        row, target = int(read[number]), int(written[number])
        state = torch.zeros(before.shape[1:]) if row in (-1, padding) else before[row]
        out, final = prompts.alone(number, state)
        assert prompts.close(outs[number], out), number
        if target >= 0 and target != padding:
            assert prompts.close(prompts.pool[target].cpu(), final), number
            expected[target] = prompts.pool[target].cpu()
    assert torch.equal(prompts.pool.cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("interval", [1, 3, 4, 11])
@pytest.mark.parametrize("name", OPERATORS)
def test_keeps_states_on_the_way(name: str, interval: int, packed: bool, device: str) -> None:
    """After each few steps, where a row is named; what has no such step, or no row, writes none."""
    prompts = Prompts(name, torch.float32, device, packed)
    prompts.pool = torch.cat([prompts.pool, torch.randn_like(prompts.pool)])
    order, before = torch.randperm(2 * SLOTS), prompts.pool.cpu().clone()
    read = order[:SEQUENCES]
    columns = order[SEQUENCES : 4 * SEQUENCES].view(SEQUENCES, 3).clone()
    columns[0, 0] = columns[4, 1] = -1
    rows = StateRows(
        *(prompts.pool, read.to(device)),
        checkpoint_interval=interval,
        checkpoint_batch_indices=columns.to(device),
    )
    outs = prompts.run(rows)
    expected = before.clone()
    for number in range(SEQUENCES):
        out, final = prompts.alone(number, before[read[number]])
        assert prompts.close(outs[number], out), number
        states = {int(read[number]): final}
        for column, row in enumerate(columns[number].tolist()):
            steps = interval * (column + 1)
            if row >= 0 and steps <= prompts.lengths[number]:
                states[row] = prompts.alone(number, before[read[number]], steps)[1]
        for row, state in states.items():
            assert prompts.close(prompts.pool[row].cpu(), state), (number, row)
            expected[row] = prompts.pool[row].cpu()
    assert torch.equal(prompts.pool.cpu(), expected)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_prompt_goes_on_from_a_checkpoint(name: str) -> None:
    """With the outputs of the prompt that wrote it."""
    prompts = Prompts(name, torch.float32, "cpu", packed=False, time=8)
    columns = torch.arange(SEQUENCES, 2 * SEQUENCES).view(-1, 1)
    fresh = torch.full((SEQUENCES,), -1)
    first = prompts.run(
        StateRows(
            prompts.pool,
            fresh,
            torch.arange(SEQUENCES),
            checkpoint_interval=5,
            checkpoint_batch_indices=columns,
        )
    )
    dim = prompts.operator.dim
    prompts.timed = {name: tensor.narrow(dim, 5, 3) for name, tensor in prompts.timed.items()}
    rest = prompts.run(StateRows(prompts.pool, columns.flatten()))
    for one, other in zip(first, rest, strict=True):
        assert torch.equal(one.narrow(dim, 5, 3), other)
    assert torch.equal(prompts.pool[:SEQUENCES], prompts.pool[SEQUENCES : 2 * SEQUENCES])


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_a_narrower_pool_is_rounded(name: str, narrow: torch.dtype) -> None:
    prompts = Prompts(name, torch.float32, "cpu", packed=True)
    prompts.pool = prompts.pool.to(narrow)
    wide = prompts.pool.float()
    read = torch.arange(SEQUENCES)
    outs = prompts.run(StateRows(prompts.pool, read))
    for number, out in enumerate(outs):
        expected, final = prompts.alone(number, wide[number])
        assert prompts.close(out, expected)
        torch.testing.assert_close(
            prompts.pool[number].double(),
            final,
            rtol=2**-7 if narrow == torch.bfloat16 else 2**-10,
            atol=1e-6,
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_linear_step(dtype: torch.dtype, device: str) -> None:
    """Of the sequences' rows; those of others keep their bits, and a sequence without a row starts from zeros."""
    torch.manual_seed(0)
    pool = torch.randn(SLOTS, 7).to(dtype)
    gate, token = (torch.rand(SEQUENCES, 7).to(dtype) for _ in "ab")
    read, written = torch.tensor([3, -1, 9, 3, 0, 12]), torch.tensor([1, 2, -1, 3, 18, 12])
    entering = pool[read.clamp(min=0)].double() * (read >= 0).unsqueeze(1)
    expected, after = gate.double() * entering + token.double(), pool.to(device)
    rows = StateRows(after, read.to(device), written.to(device))
    states = scan_registry.linear_scan_step(rows, gate.to(device), token.to(device)).cpu()
    torch.testing.assert_close(states, expected.to(dtype))
    stored = written >= 0
    right = pool.index_copy(0, written[stored], states[stored])
    assert torch.equal(after.cpu(), right)


def test_returns_final_states_too() -> None:
    prompts = Prompts("ssd_scan", torch.float32, "cpu", packed=True)
    arguments = {**prompts.timed, **prompts.fixed, "cu_seqlens": prompts.bounds}
    read = torch.arange(SEQUENCES)
    rows = StateRows(prompts.pool, read)
    _, final = prompts.operator.run(**arguments, initial_state=rows, return_final_state=True)
    assert final.shape == (1, SEQUENCES, 4, 8, 16)
    assert torch.equal(final[0], prompts.pool[:SEQUENCES])


def test_a_pool_without_a_row_for_anybody_stays() -> None:
    """Not even row 0 gets other bits."""
    prompts = Prompts("min_gru", torch.float32, "cpu", packed=False)
    before = prompts.pool.clone()
    prompts.run(StateRows(prompts.pool, torch.full((SEQUENCES,), -1)))
    assert torch.equal(prompts.pool, before)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.thorough] if n in ("min_gru", "min_lstm") else [])
        for n in OPERATORS  # of gated scans one
    ],
)
def test_compiles(name: str) -> None:
    prompts = Prompts(name, torch.float32, "cpu", packed=True)
    read, copy = torch.tensor([3, 1, -1, 7, 2, 0]), prompts.pool.clone()
    arguments = {**prompts.timed, **prompts.fixed, "cu_seqlens": prompts.bounds}

    def run(pool: Tensor, read: Tensor) -> Tensor:
        out: Tensor = prompts.operator.run(**arguments, initial_state=StateRows(pool, read))
        return out

    out = torch.compile(run, backend="eager", fullgraph=True)(copy, read)
    torch.testing.assert_close(out, run(prompts.pool, read))
    torch.testing.assert_close(copy, prompts.pool)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("name", OPERATORS)
def test_is_explained_as_a_call_with_a_tensor(name: str, packed: bool) -> None:
    prompts = Prompts(name, torch.float32, "cpu", packed)
    arguments = {**prompts.timed, **prompts.fixed}
    bounds = {"cu_seqlens": prompts.bounds} if packed else {}
    operator = getattr(scan_registry, name)
    options = {"dim": 1} if name == "rg_lru" else {}
    before = prompts.pool.clone()
    rows = StateRows(prompts.pool, torch.arange(SEQUENCES))
    states = before[:SEQUENCES]
    if packed and name != "causal_conv1d":
        states = states.unsqueeze(0)
        states = states.transpose(1, 2) if name in ("min_gru", "min_lstm") else states
    one, other = (
        scan_registry.explain(operator, **arguments, **options, **bounds, initial_state=of)
        for of in (rows, states)
    )
    assert one.to_json() == other.to_json()
    assert torch.equal(prompts.pool, before)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATORS)
def test_a_graph_reads_rows_anew(name: str) -> None:
    """One captured prefill, replayed with other rows, padding among them."""
    prompts = Prompts(name, torch.float32, "cuda", packed=True)
    arguments = {n: t.cuda() for n, t in {**prompts.timed, **prompts.fixed}.items()}
    arguments["cu_seqlens"] = prompts.bounds.cuda()
    read, written = torch.arange(SEQUENCES).cuda(), torch.arange(SEQUENCES).cuda() + SEQUENCES

    def run(pool: Tensor) -> Tensor:
        rows = StateRows(pool, read, written)
        out: Tensor = prompts.operator.run(**arguments, initial_state=rows)
        return out

    run(prompts.pool.clone())
    graph, captured = recorded(lambda: run(prompts.pool), warm_ups=0)
    for _ in range(3):
        order = torch.randperm(SLOTS)
        read.copy_(order[:SEQUENCES])
        written.copy_(order[SEQUENCES : 2 * SEQUENCES])
        read[1] = written[2] = -1
        before = prompts.pool.clone()
        graph.replay()
        torch.testing.assert_close(captured, run(before))
        torch.testing.assert_close(prompts.pool, before)


@pytest.mark.gpu
def test_rows_are_copied_in_one_launch_each_way() -> None:
    prompts = Prompts("ssd_scan", torch.float32, "cuda", packed=False)
    arguments = {n: t.cuda() for n, t in {**prompts.timed, **prompts.fixed}.items()}
    slots = torch.arange(SEQUENCES, dtype=torch.int32, device="cuda")

    def run(rows: StateRows | None) -> list[str]:
        for _ in range(2):
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA]
            ) as profile:
                prompts.operator.run(**arguments, initial_state=rows)
                torch.cuda.synchronize()
        on_gpu = torch.autograd.DeviceType.CUDA
        return [event.name for event in profile.events() if event.device_type == on_gpu]

    names = run(StateRows(prompts.pool, slots))
    assert names.count("state_rows") == 2
    assert (names[0], names[-1]) == ("state_rows", "state_rows")
