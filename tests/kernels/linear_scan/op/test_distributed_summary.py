"""A summary of a part of a linear scan, as a row that ranks exchange."""

from __future__ import annotations

import pytest
import torch

from scan_registry.kernels.linear_scan.op import plans
from scan_registry.kernels.linear_scan.op.arguments import Options
from scan_registry.kernels.linear_scan.op.distributed_summary import summary_into


@pytest.mark.parametrize("time_last", [False, True])
@pytest.mark.parametrize("shape", [(1, 6, 4), (2, 5, 3), (3, 0, 2)], ids=str)
def test_a_summary_is_written_in_the_order_of_states(
    time_last: bool, shape: tuple[int, ...]
) -> None:
    gates, tokens = (torch.rand(shape, dtype=torch.float64) for _ in range(2))
    if time_last:  # of other memory, with time contiguous
        gates, tokens = (x.mT.contiguous().mT for x in (gates, tokens))
    options = Options(-2, False, False, "auto")
    row = torch.full((2 * shape[0] * shape[2],), torch.nan, dtype=torch.float64)
    summary_into(row, gates, tokens, options)
    expected = plans.summary(gates, tokens, options)
    torch.testing.assert_close(row, torch.cat([each.reshape(-1) for each in expected]))
