"""CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def recorded(step: Callable[[], Result], warm_ups: int = 1) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of ``step``, and the result that a replay writes anew. Calls on a stream of their own come first: they load what
    a graph cannot, and torch wants them before a capture of a backward pass."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result
