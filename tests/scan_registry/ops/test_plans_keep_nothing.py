"""Plans stay for as long as the process does. The tensors that they were made from do not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import scan_registry as sr

B, D, T, N = 2, 4, 6, 3


@pytest.fixture(scope="module", autouse=True)
def _only_new_objects_are_looked_through() -> None:
    """What earlier tests have left stays, and would be looked through again for each call: a second's work in a whole run."""
    gc.collect()
    gc.freeze()


def some(device: str, *shape: int) -> Tensor:
    return torch.rand(shape, device=device, requires_grad=True)


def network(function: str, gates: int) -> Callable[[str], tuple[Any, list[Tensor]]]:
    def call(device: str) -> tuple[Any, list[Tensor]]:
        tensors = [some(device, gates, B, T, 1, 8), some(device, gates, 1, 8, 8)]
        inputs = tensors[0].permute(1, 2, 0, 3, 4)
        return sr.rnn(inputs, tensors[1], None, function=function)[0], tensors

    return call


def scan(device: str) -> tuple[Any, list[Tensor]]:
    tensors = [some(device, B, T, D), some(device, B, T, D), some(device, B, D)]
    return sr.linear_scan(*tensors, dim=1), tensors


def gated(device: str) -> tuple[Any, list[Tensor]]:
    tensors = [some(device, B, T, D), some(device, B, T, D)]
    return sr.min_gru(*tensors), tensors


def selective(device: str) -> tuple[Any, list[Tensor]]:
    tensors = [some(device, B, D, T), some(device, B, D, T), some(device, D, N)]
    tensors += [some(device, B, N, T), some(device, B, N, T)]
    return sr.selective_scan(*tensors), tensors


def convolution(device: str) -> tuple[Any, list[Tensor]]:
    tensors = [some(device, B, D, T), some(device, D, 4)]
    return sr.causal_conv1d(*tensors), tensors


CALLS: dict[str, Callable[[str], tuple[Any, list[Tensor]]]] = {
    "linear_scan": scan,
    "gated_scan": gated,
    "selective_scan": selective,
    "causal_conv1d": convolution,
    "lstm": network("lstm", 4),
    "gru": network("gru", 3),
    "slstm": network("slstm", 4),
    "elman": network("elman", 1),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", CALLS)
def test_tensors_of_a_call_are_freed(name: str, device: str) -> None:
    for _ in range(2):  # the call that makes the plans, and one that finds them
        result, tensors = CALLS[name](device)
        before = tensors[0] * 1  # a node of the graph before the operator
        (result.sum() + before.sum()).backward()
        watched = [weakref.ref(tensor) for tensor in (result, before, *tensors)]
        del result, before, tensors
        gc.collect()
        alive = [place for place, ref in enumerate(watched) if ref() is not None]
        assert alive == []
