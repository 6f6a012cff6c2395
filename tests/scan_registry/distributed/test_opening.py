"""Openings on a GPU, as far as a CPU can tell: what streams share, what CUDA graphs record, and what is kept meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import distributed_openings as cases
import pytest
import torch
from rank_pool import RankPool

from scan_registry.distributed import opening
from scan_registry.distributed.group import Session
from scan_registry.distributed.headers import HEADER, Terms
from scan_registry.distributed.opening import Opening


def test_a_stream_needs_no_other_stream_to_have_written_its_header(ranks: RankPool) -> None:
    ranks.run(2, cases.another_stream)


def test_streams_share_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a group of gloo and NCCL exchanges headers in CPU memory."""
    gpu, streams = torch.device("cuda", 0), [3, 4, 3]
    monkeypatch.setattr(opening, "_stream", lambda place: streams.pop(0) if place == gpu else 0)
    monkeypatch.setattr(opening, "is_capturing", lambda place: False)
    monkeypatch.setattr(opening, "Message", Made)
    members: Any = SimpleNamespace(session=Session(frozenset({"cpu", "cuda"})))
    of_call = Opening(members, Terms("a call", ()), gpu, 5)
    assert of_call.place.type == "cpu"
    first, second, again = (of_call._message() for _ in range(3))
    assert first is again
    assert first is not second


class Made:
    """Stands for a message."""

    def __init__(self, *_: Any) -> None:
        self.written = 0

    def write(self, header: bytes) -> None:
        self.written = len(header)


@pytest.mark.parametrize("stream", [1, 2])
def test_a_call_can_be_recorded_in_a_cuda_graph(ranks: RankPool, stream: int) -> None:
    # Forward and backward, the graph copies a header from a message of the calls before. It sends none of their messages.
    assert ranks.run(2, cases.recorded, stream) == [2, 2]


def test_a_call_whose_headers_are_read_cannot_be_recorded(ranks: RankPool) -> None:
    for text in ranks.run(2, cases.unsure):
        assert "CUDA graph cannot record this call" in text
        assert "torch.no_grad()" in text


def test_large_rows_are_not_kept(ranks: RankPool) -> None:
    assert ranks.run(2, cases.large) == [2 * HEADER] * 2


def test_the_default_device_does_not_matter(ranks: RankPool) -> None:
    """Not even if no tensor there can be read or pinned."""
    ranks.run(2, cases.elsewhere)
    with torch.device("meta"):
        flag: Any = opening._Flag(torch.device("cpu"))
    assert flag._memory.is_cpu


def test_a_flag_comes_by_the_stream_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by that of the current device, on which nothing has run."""
    streams: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    flag: Any = opening._Flag(torch.device("cpu"))
    flag._event = SimpleNamespace(record=lambda stream=None: streams.append(stream))
    flag.come(torch.tensor(True))
    assert streams == [torch.device("cpu")]
    assert flag.value
