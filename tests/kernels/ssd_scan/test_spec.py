"""Which variants of the ssd_scan kernels take which problems."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scan_registry.hardware.device import described
from scan_registry.kernels.ssd_scan.op.calls import cut
from scan_registry.kernels.ssd_scan.problem import DTYPES, SSDScanProblem
from scan_registry.kernels.ssd_scan.spec import FAMILY


def best(problem: SSDScanProblem) -> str:
    kernel = FAMILY.kernel(problem.direction, "cuda")
    accepted = [v for v in kernel.variants if kernel.rules.accepts(v, problem) is None]
    return str(min(accepted, key=lambda variant: kernel.cost(variant, problem)))


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "float32"])
def test_only_z_and_wide_D_take_what_is_compiled_for_them(dtype: str) -> None:
    plain = next(
        s.problem for s in FAMILY.samples if s.dtype == dtype and s.problem.kernel == "forward"
    )
    assert isinstance(plain, SSDScanProblem)
    for states in (64, 128, 256):
        problem = replace(plain, state_size=states)
        assert f"states={states}" in best(problem)
        assert "gated=0" in best(problem)
        assert "gated=1" in best(replace(problem, has_z=True))
        assert "gated=1" in best(replace(problem, wide_D=True))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)])
def test_samples_are_what_calls_pose_on_a_gpu(capability: tuple[int, int]) -> None:
    """The blocks of states of the backward pass are as large as shared memory has room for."""
    gpu = described(capability)
    for sample in FAMILY.samples:
        if sample.by_memory is not None:
            problem = sample.by_memory(gpu.shared_memory_per_block)
            assert isinstance(problem, SSDScanProblem)
            assert problem.block == cut(problem, gpu).block
