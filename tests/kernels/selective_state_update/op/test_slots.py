"""Slots of ``selective_state_update``: which calls are refused on the CPU, and what ``pad_slot_id`` counts for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from scan_registry import selective_state_update

DRAFTS = {"state_batch_indices": torch.tensor([[0, 1], [2, 3]])}


def token_inputs(tokens: int) -> dict[str, Tensor]:
    """All arguments but the state, of 4 heads of 3 channels and 8 states each, and slots."""
    return {
        "x": torch.randn(tokens, 4, 3),
        "dt": torch.rand(tokens, 4, 3) / 2,
        "A": -torch.rand(4, 3, 8) * 4,
        "B": torch.randn(tokens, 1, 8),
        "C": torch.randn(tokens, 1, 8),
        "D": torch.randn(4, 3),
        "z": torch.randn(tokens, 4, 3),
        "dt_bias": torch.rand(4, 3),
    }


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "slots out of range": (
        {"state_batch_indices": torch.tensor([0, 5])},
        ValueError,
        "state_batch_indices has the number 5, and the state 5 rows",
    ),
    "slots twice": (
        {"state_batch_indices": torch.tensor([1, 1])},
        ValueError,
        "state_batch_indices has the number 1 more than once",
    ),
    "targets twice": (
        {"dst_state_batch_indices": torch.tensor([1, 1])},
        ValueError,
        "dst_state_batch_indices has the number 1 more than once; accepted are 0 to 4, each once",
    ),
    "targets out of range": (
        {"dst_state_batch_indices": torch.tensor([1, 5])},
        ValueError,
        "dst_state_batch_indices has the number 5",
    ),
    "targets that others read": (
        {
            "state_batch_indices": torch.tensor([1, 2]),
            "dst_state_batch_indices": torch.tensor([2, 3]),
        },
        ValueError,
        "dst_state_batch_indices has the number 2 for sequence 0, and sequence 1 starts from that slot",
    ),
    "targets that others start from by their numbers": (
        {"state_batch_indices": None, "dst_state_batch_indices": torch.tensor([1, 4])}
        | {"cu_seqlens": torch.tensor([0, 1, 2])},
        ValueError,
        "dst_state_batch_indices has the number 1 for sequence 0, and sequence 1 starts from that slot",
    ),
    "drafts that others read": (
        {
            "state_batch_indices": torch.tensor([[0, 1], [1, 2]]),
            "num_accepted_tokens": torch.tensor([2, 1]),
        },
        ValueError,
        "state_batch_indices has the number 1 for sequence 1, and sequence 0 starts from that slot",
    ),
    "targets out of range of another pool": (
        {
            "dst_state": torch.zeros(3, 4, 3, 8),
            "dst_state_batch_indices": torch.tensor([1, 3]),
        },
        ValueError,
        "dst_state_batch_indices has the number 3, and dst_state 3 rows",
    ),
    "targets of others": (
        {"dst_state_batch_indices": torch.tensor([1, 2, 3])},
        ValueError,
        r"dst_state_batch_indices has shape \(3,\); there are 2 sequences",
    ),
    "drafts alone": (DRAFTS, ValueError, "need num_accepted_tokens, which is None"),
    "accepted alone": (
        {"num_accepted_tokens": torch.tensor([1, 1])},
        ValueError,
        r"num_accepted_tokens need state_batch_indices of shape \(batch, tokens\)",
    ),
    "more accepted than drafted": (
        DRAFTS | {"num_accepted_tokens": torch.tensor([1, 3])},
        ValueError,
        "num_accepted_tokens has the number 3; accepted are 0 to 2",
    ),
    "accepted of others": (
        DRAFTS | {"num_accepted_tokens": torch.tensor([1])},
        ValueError,
        r"num_accepted_tokens has shape \(1,\); it must be \(2,\)",
    ),
    "columns": (
        DRAFTS
        | {
            "num_accepted_tokens": torch.tensor([1, 1]),
            "dst_state_batch_indices": torch.tensor([[0], [1]]),
        },
        ValueError,
        r"dst_state_batch_indices has shape \(2, 1\), state_batch_indices \(2, 2\)",
    ),
    "falling bounds": (
        {"cu_seqlens": torch.tensor([0, 2, 1])},
        ValueError,
        "cu_seqlens falls from 2 to 1",
    ),
    "bounds beyond": (
        {"cu_seqlens": torch.tensor([0, 1, 3])},
        ValueError,
        "cu_seqlens runs from 0 to 3",
    ),
    "bounds with gaps": (
        {"cu_seqlens": torch.tensor([0, 0, 1, 0, 2, 0])[::2]},
        ValueError,
        r"cu_seqlens has the stride 2; .*cu_seqlens.contiguous\(\)",
    ),
    "too few slots": (
        {"state_batch_indices": None, "cu_seqlens": torch.tensor([0, 1, 2, 2, 2, 2, 2])},
        ValueError,
        r"state has shape \(5, 4, 3, 8\); 6 sequences need as many slots",
    ),
    "too few slots of another pool": (
        {
            "state_batch_indices": None,
            "cu_seqlens": torch.tensor([0, 1, 2]),
            "dst_state": torch.zeros(1, 4, 3, 8),
        },
        ValueError,
        r"dst_state has shape \(1, 4, 3, 8\); 2 sequences need as many slots",
    ),
    "dtype of bounds": (
        {"cu_seqlens": torch.tensor([0.0, 1, 2])},
        TypeError,
        "cu_seqlens has dtype float32; accepted are int32, int64",
    ),
    "dtype of another pool": (
        {"dst_state": torch.zeros(5, 4, 3, 8).bfloat16()},
        TypeError,
        "dst_state has dtype bfloat16; accepted are float32 with a state of float32",
    ),
    "shape of another pool": (
        {"dst_state": torch.zeros(5, 4, 3, 9)},
        ValueError,
        r"dst_state has shape \(5, 4, 3, 9\), state \(5, 4, 3, 8\)",
    ),
    "strides of another pool": (
        {"dst_state": torch.zeros(5, 4, 8, 3).transpose(2, 3)},
        ValueError,
        "dst_state has strides .* they may differ in the first dimension only",
    ),
    "seed for float32": (
        {"rand_seed": torch.tensor([1])},
        TypeError,
        "rand_seed is for states of bfloat16 and float16.*float32",
    ),
    "seeds": (
        {"rand_seed": torch.tensor([1, 2])},
        ValueError,
        r"rand_seed has shape \(2,\); it must have one element",
    ),
    "dtype of the seed": (
        {"rand_seed": torch.tensor([1]).int()},
        TypeError,
        "rand_seed has dtype int32; accepted are int64",
    ),
    "pad": ({"pad_slot_id": 0.5}, TypeError, "pad_slot_id is 0.5; it must be an int"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    """Before anything is written."""
    changes, error, words = REFUSED[name]
    call = token_inputs(2) | {"state_batch_indices": torch.tensor([3, 4])} | changes
    state = torch.randn(5, 4, 3, 8)
    before = state.clone()
    with pytest.raises(error, match=words):
        selective_state_update(state, **call)
    assert torch.equal(state, before)


def test_refuses_to_write_to_a_view_of_what_others_read() -> None:
    """A part of the state with the same first slot; not another pool."""
    state, call = torch.randn(5, 4, 3, 8), token_inputs(2)
    before = state.clone()
    slots = {
        "state_batch_indices": torch.tensor([1, 2]),
        "dst_state_batch_indices": torch.tensor([2, 3]),
    }
    with pytest.raises(ValueError, match="the number 2 for sequence 0, and sequence 1 starts"):
        selective_state_update(state, **call, **slots, dst_state=state[:4])
    assert torch.equal(state, before)
    selective_state_update(state, **call, **slots, dst_state=state.clone())
    assert torch.equal(state, before)


def test_a_sequence_without_tokens_starts_from_no_slot() -> None:
    """Nor does it write to any: its slots may be those of another one."""
    state, call = torch.randn(5, 4, 3, 8), token_inputs(1)
    before, accepted = state.clone(), torch.tensor([2, 1])
    call["cu_seqlens"] = torch.tensor([0, 0, 1])
    slots = torch.tensor([[0, 1], [1, 2]])
    selective_state_update(state, **call, state_batch_indices=slots, num_accepted_tokens=accepted)
    assert (state != before).flatten(1).any(1).tolist() == [False, True, False, False, False]


SERVED: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "bounds": {"cu_seqlens": torch.tensor([0, 1, 2, 3])},
    "a seed": {"rand_seed": torch.tensor([3])},
    "another pool": {"dst_state": torch.zeros(3, 4, 3, 8).bfloat16()},
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", SERVED)
def test_a_pad_slot_counts_for_no_sequence_without_indices(name: str, device: str) -> None:
    torch.manual_seed(0)
    call = token_inputs(3) | {n: t.clone() for n, t in SERVED[name].items()}
    call = {n: t.to(device) for n, t in call.items()}
    state = torch.randn(3, 4, 3, 8).bfloat16().to(device)
    written, outs = [], []
    for pad in (-1, 0, 1):
        own = {n: t.clone() for n, t in call.items()}
        copy = state.clone()
        outs.append(selective_state_update(copy, **own, pad_slot_id=pad))
        written.append(own.get("dst_state", copy))
    assert all((out != 0).flatten(1).any(1).all() for out in outs)
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert all(torch.equal(pool, written[0]) for pool in written)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("numbers", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("pad", [0, 2, 2**40])
def test_a_pad_slot_counts_for_targets_alone(pad: int, numbers: torch.dtype, device: str) -> None:
    """Sequences 0 and 2 start from the slots of their own numbers; only what is written to ``pad_slot_id`` is dropped."""
    torch.manual_seed(0)
    call = {n: t.to(device) for n, t in token_inputs(3).items()}
    state, pool = (torch.randn(3, 4, 3, 8).to(device) for _ in "ab")
    before, pool_before = state.clone(), pool.clone()
    targets = torch.tensor([0, 9, 2, 9, 1, 9], dtype=numbers).to(device)[::2]
    passed = targets.clone()
    expected, all_written = selective_state_update(state.clone(), **call), pool.clone()
    served = {"dst_state_batch_indices": targets}
    selective_state_update(state, **call, **served, dst_state=all_written)
    out = selective_state_update(state, **call, **served, dst_state=pool, pad_slot_id=pad)
    torch.testing.assert_close(out, expected)
    assert torch.equal(targets, passed)
    assert torch.equal(state, before)
    for slot in range(3):
        assert torch.equal(pool[slot], (pool_before if slot == pad else all_written)[slot])


def test_a_pad_slot_may_repeat() -> None:
    state = torch.randn(3, 4, 3, 8)
    before = state.clone()
    call = token_inputs(3)
    slots = torch.tensor([0, 2, 0])
    out = selective_state_update(state, **call, state_batch_indices=slots, pad_slot_id=0)
    assert (out[[0, 2]] == 0).all()
    assert torch.equal(state[:2], before[:2])
    assert not torch.equal(state[2], before[2])


def test_names_the_tensor_that_needs_a_derivative() -> None:
    state, call = torch.randn(2, 4, 3, 8), token_inputs(2)
    needing = call | {"dt_bias": call["dt_bias"].clone().requires_grad_()}
    with pytest.raises(RuntimeError, match="no derivative, and dt_bias requires one"):
        selective_state_update(state, **needing)
    with forward_ad.dual_level():
        dual = call | {"z": forward_ad.make_dual(call["z"], torch.ones(2, 4, 3))}
        with pytest.raises(RuntimeError, match="no derivative, and z has a tangent"):
            selective_state_update(state, **dual)
