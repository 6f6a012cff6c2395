"""The Triton kernels of gated_scan on the CPU: in Triton's interpreter, and as they are compiled."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from interpreting import interpret

from scan_registry.aot.compile import compile_variant
from scan_registry.aot.triton import Triton
from scan_registry.hardware.target import SHARED_MEMORY, Target
from scan_registry.kernels.gated_scan.problem import HEADERS
from scan_registry.kernels.gated_scan.spec import FAMILY
from scan_registry.kernels.linear_scan import columns
from scan_registry.kernels.model import Kernel, Variant

KERNELS = [kernel for kernel in FAMILY.kernels if kernel.language == "triton"]
COLUMNS = [kernel for kernel in KERNELS if kernel.name.startswith("channel_last")]
SCRIPT = Path(__file__).with_name("interpret_gated_scan.py")


def variant_of(kernel: Kernel, kind: str, dtype: str, access: str) -> Variant:
    wanted = {("kind", kind), ("dtype", dtype), ("access", access)}
    return next(variant for variant in kernel.every if wanted <= {*variant.statics})


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_matches_the_definition(direction: str) -> None:
    interpret(SCRIPT, direction)


@pytest.mark.parametrize("kernel", COLUMNS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(
    ("kind", "access", "copied"), [("rg_lru", "aligned", 8), ("linear", "generic", 4)]
)
def test_rows_of_a_group_stay_in_its_threads(
    kernel: Kernel, kind: str, access: str, copied: int
) -> None:
    """Were rows or channels elsewhere, threads would have to ask each other, and copies be of another size."""
    pytest.importorskip("triton")
    variant = variant_of(kernel, kind, "float32", access)
    ptx = compile_variant(variant, Target.parse("compute_80"))[1].decode()
    copies = re.findall(r"cp\.async\.ca\.shared\.global \[.*?\], \[.*?\], (\w+)", ptx)
    assert {int(size, 0) for size in copies} == {copied}
    assert "shfl" not in ptx


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_there_is_a_variant_for_every_kind(kernel: Kernel) -> None:
    """In wheels, the one that takes everything."""
    found = [(v.text("kind"), v.text("dtype"), v.text("access")) for v in kernel.variants]
    dtypes = ("float32", "bfloat16", "float16")
    assert sorted(found) == sorted((k, d, "generic") for k in HEADERS for d in dtypes)


@pytest.mark.parametrize("kernel", COLUMNS, ids=lambda kernel: kernel.name)
def test_threads_of_a_program_are_whole_groups(kernel: Kernel) -> None:
    for variant in kernel.every:
        side_by_side, rest = divmod(variant.number("channels"), variant.number("vector"))
        assert rest == 0
        assert columns.groups(variant) * side_by_side == 32 * variant.number("warps")


def test_stages_fit_the_least_shared_memory() -> None:
    """A tile of each tensor that is read, for each stage."""
    least = min(SHARED_MEMORY.values())
    for kernel in COLUMNS:
        for variant in kernel.every:
            tensors = len(HEADERS[variant.text("kind")].inputs) + 2 * ("backward" in kernel.name)
            size = 4 if variant.text("dtype") == "float32" else 2
            tile = 32 * variant.number("warps") * variant.number("vector") * variant.number("steps")
            assert tile * size * tensors * variant.number("stages") <= least


def test_a_recipe_depends_on_what_comes_from_linear_scan() -> None:
    for kernel in KERNELS:
        sources = Triton().sources(kernel)
        assert {"triton_kinds.py", "triton_scans.py", kernel.code.source} <= {*sources}
        assert "linear_scan/triton_tiles.py" in sources
