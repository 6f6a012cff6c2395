"""The Triton kernels of linear_scan on the CPU: in Triton's interpreter, and as they are compiled."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from interpreting import interpret

from scan_registry.aot.compile import compile_variant
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan import columns
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import Kernel

COLUMNS = [FAMILY.kernel(f"channel_last_{way}", "triton") for way in ("forward", "backward")]
SCRIPT = Path(__file__).with_name("interpret_linear_scan.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("few", "forward", "backward", "reduction"),
        pytest.param(("forward", "reduction"), marks=pytest.mark.thorough),
        pytest.param(("backward",), marks=pytest.mark.thorough),
    ],
    ids=" ".join,
)
def test_matches_the_reference(words: tuple[str, ...]) -> None:
    interpret(SCRIPT, *words)


@pytest.mark.parametrize("kernel", COLUMNS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(
    ("dtype", "access", "copied"), [("bfloat16", "aligned", 8), ("float32", "generic", 4)]
)
def test_rows_of_a_group_stay_in_its_threads(
    kernel: Kernel, dtype: str, access: str, copied: int
) -> None:
    """Where things lie is the compiler's choice, which is not asked but led: were rows or channels
    elsewhere, threads would have to ask each other, and copies be of another size."""
    pytest.importorskip("triton")
    variant = next(
        v for v in kernel.variants if (v.text("dtype"), v.text("access")) == (dtype, access)
    )
    ptx = compile_variant(variant, Target.parse("compute_80"))[1].decode()
    copies = re.findall(r"cp\.async\.ca\.shared\.global \[.*?\], \[.*?\], (\w+)", ptx)
    assert {int(size, 0) for size in copies} == {copied}
    assert "shfl" not in ptx


@pytest.mark.parametrize("kernel", COLUMNS, ids=lambda kernel: kernel.name)
def test_threads_of_a_program_are_whole_groups(kernel: Kernel) -> None:
    for variant in kernel.every:
        side_by_side, rest = divmod(variant.number("channels"), variant.number("vector"))
        assert rest == 0
        assert columns.groups(variant) * side_by_side == 32 * variant.number("warps")
        assert columns.times(variant) == columns.groups(variant) * variant.number("steps")
