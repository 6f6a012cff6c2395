"""Chunks of time of a selective scan: how many there are, that they are views, and what they make of a state."""

from __future__ import annotations

import pytest
import torch

from scan_registry.kernels.selective_scan.op import distributed_chunks as selective_chunks
from scan_registry.kernels.selective_scan.op.arguments import Arguments


class OnGpu(torch.Tensor):
    """Stands for a tensor on a GPU, of which only shape and strides are read."""

    is_cuda = True


def arguments_of(batch: int, channels: int, time: int, *, channel_last: bool = False) -> Arguments:
    u = torch.empty(batch, channels, time, device="meta")
    if channel_last:
        u = torch.empty(batch, time, channels, device="meta").transpose(1, 2)
    u = u.as_subclass(OnGpu)
    A, B = torch.empty(channels, 16), torch.empty(batch, 1, 16, time, device="meta")
    return Arguments(u, u, A, B, B, None, u, None, None, None)


@pytest.mark.parametrize(
    ("shape", "channel_last", "count"),
    [
        ((1, 5120, 65_536), False, 4),
        ((1, 5120, 65_536), True, 4),
        ((1, 5120, 65_536 + 64), False, 2),  # chunks of whole tiles
        ((1, 5120, 65_536 + 8), False, 1),
        ((1, 16_384, 65_536), False, 1),
        ((1, 64, 65_536), False, 8),
        ((1, 64, 1024), False, 4),  # chunks of 256 steps
        ((2, 5120, 65_536), False, 1),  # no views
        ((2, 5120, 65_536), True, 2),
    ],
)
def test_chunks_fill_a_gpu(shape: tuple[int, int, int], channel_last: bool, count: int) -> None:
    arguments = arguments_of(*shape, channel_last=channel_last)
    assert selective_chunks.chunk_count(arguments) == count
    if count > 1:
        u = arguments.u.as_subclass(torch.Tensor)
        assert selective_chunks.chunked(u, count)._is_view()


def test_chunks_are_views_and_come_back() -> None:
    x = torch.arange(2 * 3 * 12.0).view(2, 12, 3).transpose(1, 2)
    cut = selective_chunks.chunked(x, 4)
    assert cut.data_ptr() == x.data_ptr()
    assert torch.equal(cut[4 + 1], x[1, :, 3:6])
    assert torch.equal(selective_chunks.joined(cut, 4), x)
    # Of memory like theirs, the whole is a view.
    assert selective_chunks.joined(torch.empty_like(cut), 4)._is_view()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_states_between_chunks(count: int, backward: bool) -> None:
    torch.manual_seed(1)
    products, totals = torch.randn(2, 2, count, 3, 4)
    first = torch.randn(2, 3, 4)
    summary = selective_chunks.Summary(products, totals, backward)
    before = summary.before(first).unflatten(0, (2, count))
    state = first
    for chunk in reversed(range(count)) if backward else range(count):
        assert torch.equal(before[:, chunk], state)
        state = torch.addcmul(totals[:, chunk], products[:, chunk], state)
    row = torch.empty(2 * state.numel())
    summary.write(row)
    product, total = (x.view(state.shape) for x in row.chunk(2))
    torch.testing.assert_close(total + product * first, state)
    from_zero = summary.before(None).unflatten(0, (2, count))
    assert torch.equal(from_zero[:, -1 if backward else 0], torch.zeros_like(first))
