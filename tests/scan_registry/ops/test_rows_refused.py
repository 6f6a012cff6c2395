"""What scans from rows of a pool refuse: wrong rows, checkpoints and bounds, and calls that need derivatives."""

from __future__ import annotations

import sys

import pytest
import torch

import scan_registry
from scan_registry import StateRows
from scan_registry.ops.pools import scan_rows, timed

POOL, READ = torch.zeros(4, 3), torch.tensor([2, 0])
REFUSED: dict[str, tuple[StateRows, type[Exception], str]] = {
    "no pool": (StateRows([1.0], READ), TypeError, "pool must be a torch.Tensor, not list"),  # type: ignore[arg-type]
    "no indices": (
        StateRows(POOL, [1, 2]),
        TypeError,
        "state_batch_indices must be a torch.Tensor",
    ),  # type: ignore[arg-type]
    "float indices": (StateRows(POOL, READ.float()), TypeError, "state_batch_indices has dtype"),
    "more indices": (
        StateRows(POOL, torch.arange(3)),
        ValueError,
        r"must be \(2,\) for 2 sequences",
    ),
    "too large": (
        StateRows(POOL, READ + 2),
        ValueError,
        "state_batch_indices has the number 4, and the pool 4 rows",
    ),
    "twice": (
        StateRows(POOL, READ * 0),
        ValueError,
        "state_batch_indices has the number 0 more than once",
    ),
    "destinations twice": (
        StateRows(POOL, READ, READ * 0),
        ValueError,
        "dst_state_batch_indices has the number 0 more",
    ),
    "another row": (StateRows(torch.zeros(4, 5), READ), ValueError, "initial_state has shape"),
    "shared elements": (
        StateRows(torch.zeros(1, 3).expand(4, 3), READ),
        ValueError,
        "pool is expanded",
    ),
    "sparse": (StateRows(POOL.to_sparse(), READ), TypeError, "pool is sparse"),
    "no padding": (StateRows(POOL, READ, pad_slot_id=None), TypeError, "pad_slot_id is None"),  # type: ignore[arg-type]
    "an interval alone": (
        StateRows(POOL, READ, checkpoint_interval=2),
        ValueError,
        "checkpoint_batch_indices is None",
    ),
    "no steps": (
        StateRows(POOL, READ, checkpoint_interval=0, checkpoint_batch_indices=READ.view(2, 1)),
        ValueError,
        "checkpoint_interval is 0",
    ),
    "checkpoints in rows of final states": (
        StateRows(POOL, READ, checkpoint_interval=1, checkpoint_batch_indices=READ.view(2, 1)),
        ValueError,
        "checkpoint_batch_indices has the number 2, and state_batch_indices, too",
    ),
    "checkpoints in destinations": (
        StateRows(
            *(POOL, READ, torch.tensor([3, 1])),
            checkpoint_interval=1,
            checkpoint_batch_indices=torch.tensor([[2, -1], [0, 1]]),
        ),
        ValueError,
        "checkpoint_batch_indices has the number 1, and dst_state_batch_indices, too",
    ),
    "flat checkpoints": (
        StateRows(POOL, READ, checkpoint_interval=1, checkpoint_batch_indices=READ),
        ValueError,
        r"must be \(2, checkpoints\) for 2 sequences",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    rows, error, words = REFUSED[name]
    gate = torch.randn(2, 3, 5)
    with pytest.raises(error, match=words):
        scan_registry.min_gru(gate, gate, initial_state=rows)
    assert not POOL.any()


def test_a_checkpoint_may_go_to_a_row_that_is_only_read() -> None:
    """And indices that stand for no row may be those of a destination, too."""
    gate, pool = torch.randn(2, 3, 5), torch.randn(5, 3)
    columns = torch.tensor([[2, -1], [0, 4]])
    rows = StateRows(
        *(pool, READ, torch.tensor([-1, 4])),
        pad_slot_id=4,
        checkpoint_interval=1,
        checkpoint_batch_indices=columns,
    )
    before = pool.clone()
    scan_registry.min_gru(gate, gate, initial_state=rows)
    assert (pool != before).any(1).tolist() == [True, False, True, False, False]


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ([0, 0, 0], "cu_seqlens runs from 0 to 0; it must rise from 0 to the 5 steps"),
        ([0, 2, 4], "cu_seqlens runs from 0 to 4"),
        ([1, 2, 5], "cu_seqlens runs from 1 to 5"),
        ([0, 3, 2, 5], "cu_seqlens falls from 3 to 2"),
    ],
)
def test_bounds_that_checkpoints_read_are_checked(
    bounds: list[int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a call leaves the bounds unchecked, as on a GPU; before anything is written."""
    for name in [name for name in sys.modules if name.startswith("scan_registry.")]:
        if hasattr(sys.modules[name], "check_cu_seqlens"):
            monkeypatch.setattr(sys.modules[name], "check_cu_seqlens", lambda *_: None)
    check_refused_bounds(bounds, words, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("bounds", [[0, 0, 0], [0, 2, 4], [1, 2, 5], [0, 3, 2, 5]], ids=str)
def test_bounds_that_checkpoints_read_are_checked_on_a_gpu(bounds: list[int]) -> None:
    check_refused_bounds(bounds, "cu_seqlens (runs|falls) from", "cuda")


def check_refused_bounds(bounds: list[int], words: str, device: str) -> None:
    gate, pool = torch.randn(1, 3, 5).to(device), torch.zeros(9, 3).to(device)
    read = torch.arange(len(bounds) - 1).to(device)
    columns = (read + 4).view(-1, 1)
    rows = StateRows(pool, read, checkpoint_interval=2, checkpoint_batch_indices=columns)
    cu_seqlens = torch.tensor(bounds).to(device)
    with pytest.raises(ValueError, match=words):
        scan_registry.min_gru(gate, gate, cu_seqlens=cu_seqlens, initial_state=rows)
    assert not pool.any()


def test_refuses_what_has_no_time() -> None:
    with pytest.raises(ValueError, match=r"gate has shape \(5,\); it needs batch and time"):
        scan_rows("scan", StateRows(POOL, READ), pytest.fail, timed(gate=(torch.ones(5), 0)), 0)
    gate = torch.randn(2, 5)
    words = r"min_gru takes tensors .*; passed is a tensor of shape \(2, 5\), a tensor of"
    with pytest.raises(TypeError, match=words):
        scan_registry.min_gru(gate, gate, initial_state=StateRows(POOL, READ))


def test_refuses_derivatives_and_checkpoints_of_reversed_time() -> None:
    gate = torch.randn(2, 3, 5, requires_grad=True)
    words = "min_gru has no derivative with rows of a pool, and input 0 requires one"
    with pytest.raises(RuntimeError, match=words):
        scan_registry.min_gru(gate, gate, initial_state=StateRows(POOL, READ))
    needed = StateRows(torch.zeros(4, 3, 3, requires_grad=True), READ)
    with pytest.raises(RuntimeError, match=r"causal_conv1d has no .*, and pool requires one"):
        scan_registry.causal_conv1d(gate.detach(), torch.randn(3, 4), initial_state=needed)
    rows = StateRows(
        POOL, READ, checkpoint_interval=1, checkpoint_batch_indices=READ.view(2, 1) + 1
    )
    with pytest.raises(ValueError, match="checkpoint_interval does not go with reverse"):
        scan_registry.min_gru(gate.detach(), gate.detach(), initial_state=rows, reverse=True)
    x, numbers = torch.randn(2, 3, 5), torch.zeros(2, 5, dtype=torch.int32)
    rows = rows._replace(pool=torch.zeros(4, 3, 3))
    with pytest.raises(ValueError, match="checkpoint_interval does not go with seq_idx"):
        scan_registry.causal_conv1d(x, torch.randn(3, 4), seq_idx=numbers, initial_state=rows)


def test_a_linear_step_has_no_checkpoints() -> None:
    rows = StateRows(POOL, READ, checkpoint_interval=1, checkpoint_batch_indices=READ.view(2, 1))
    gate = torch.rand(2, 3)
    with pytest.raises(ValueError, match="checkpoint_interval does not go with single steps"):
        scan_registry.linear_scan_step(rows, gate, gate)
    words = r"linear_scan_step has no derivative.* a tensor of shape \(2, 3\) requires one"
    with pytest.raises(RuntimeError, match=words):
        scan_registry.linear_scan_step(StateRows(POOL, READ), gate.requires_grad_(), gate)
