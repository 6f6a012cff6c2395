"""ci/vectors.py: vector instructions are found in loops alone, and what has none is named."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from ci import cross, vectors
from scan_registry.ops import _cpu

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "scan_registry" / "csrc"
GCC = shutil.which("aarch64-linux-gnu-gcc")

FMLA, FMADD, RET = 0x4E22CC20, 0x1F020C20, 0xD65F03C0  # fmla v0.4s, v1.4s, v2.4s; fmadd s0, …
BACK = 0x54FFFFE1  # b.ne to the instruction before
AHEAD = 0x54000041  # b.ne to the next but one


def function(name: str, *words: int) -> vectors.Function:
    return vectors.decoded(name, struct.pack(f"<{len(words)}I", *words), 0x1000)


def test_only_loops_count() -> None:
    wanted = r"fmla\.4s"
    assert function("f", RET, FMLA, BACK).computes(wanted)
    assert not function("f", FMLA, FMADD, BACK).computes(wanted)  # before the loop
    assert not function("f", AHEAD, FMLA, RET).computes(wanted)  # a branch and no loop
    assert not function("f", FMADD, BACK, RET).computes(wanted)


def test_what_has_none_is_named() -> None:
    wanted = {"(forward|backward)_f": (2, r"fmla\.4s")}
    able = function("forward_f", FMLA, BACK)
    assert list(vectors.scalar([able, function("backward_f.isra.0", FMLA, BACK)], wanted)) == []
    (text,) = vectors.scalar([able, function("backward_f", FMADD, BACK)], wanted)
    assert text.endswith("of 1 functions (forward|backward)_f, not 2; without: backward_f")
    (text,) = vectors.scalar([able, function("other", FMLA, BACK)], wanted)
    assert text.endswith("not 2; without: none")


def test_another_machines_code() -> None:
    """The library of the machine that runs this test, or a header that says x86-64."""
    library = Path(_cpu.__file__).read_bytes()
    if cross.foreign({"_cpu.so": library}, "aarch64"):
        with pytest.raises(ValueError, match=r"is machine code for .*, not for AArch64"):
            vectors.functions(library)
    else:
        assert list(vectors.scalar(vectors.functions(library))) == []


@pytest.mark.skipif(GCC is None, reason="needs aarch64-linux-gnu-gcc")
def test_the_kernels_compute_in_vectors(tmp_path: Path) -> None:
    def made(*flags: str) -> list[str]:
        headers = cross.headers_in(tmp_path)
        sources = [CSRC / "cpu.c", *sorted(ROOT.glob("kernels/*/cpu/*.c"))]
        words = ["-DPy_LIMITED_API=0x030A0000", "-std=gnu11", "-O3", "-fPIC", "-shared", *flags]
        library = tmp_path / "_cpu.so"
        subprocess.run(
            [
                GCC,
                *words,
                *(f"-I{item}" for item in (headers, CSRC, ROOT / "kernels")),
                *sources,
                "-o",
                library,
            ],
            check=True,
        )
        return list(vectors.scalar(vectors.functions(library.read_bytes())))

    assert made() == []
    # What the sources leave to the compiler's own vectorisation.
    assert any("widen_bfloat16" in text for text in made("-fno-tree-vectorize"))
    # Without NEON's conversions of float16, which no compiler finds by itself.
    assert any("widen_float16" in text for text in made("-U__aarch64__"))
