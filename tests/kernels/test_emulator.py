"""The emulator of a GPU finds faults in a kernel's barriers."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import ModuleType

import pytest
from processes import captured

#: Two warps, of which the first says `times` times at barrier 1 that it has arrived. Then the second waits.
KERNEL = """
#include "../common/barrier.cuh"

extern "C" __global__ void arrive(long long times) {
    if (threadIdx.x < 32)
        for (int i = 0; i < times; i++) arrive_at<64>(1);
    else meet_at<64>(1);
}
"""
LAUNCH = """
import ctypes, sys
times, size = ctypes.c_int64(int(sys.argv[2])), 1 << 16
pointers = (ctypes.c_void_p * 1)(ctypes.addressof(times))
stacks = ctypes.create_string_buffer(64 * size)
kernel = ctypes.CDLL(sys.argv[1]).emulate
kernel(pointers, (ctypes.c_uint * 3)(1, 1, 1), 64, 0, 1, 0, stacks, ctypes.c_ulong(size))
"""


@pytest.mark.parametrize("times", [1, 2])
def test_a_thread_comes_to_a_barrier_once_before_it_opens(
    cuda_emulator: ModuleType, tmp_path: Path, times: int
) -> None:
    texts = {"arrive.cu": KERNEL, "../common/barrier.cuh": ""}
    library = cuda_emulator.library_of("arrive.cu", "arrive", texts, {}, tmp_path)
    words = [sys.executable, "-c", LAUNCH, str(library), str(times)]
    done = captured(words, cwd=tmp_path)
    fault = "a thread comes to a barrier twice before it opens" in done.stderr
    assert (done.returncode == 0, fault) == (times == 1, times == 2), done.stderr


def test_an_entry_point_with_other_parameters_is_refused(
    cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    """Where a spec and its source differ, before memory is read that holds no arguments."""
    texts = {"arrive.cu": KERNEL, "../common/barrier.cuh": ""}
    library = cuda_emulator.library_of("arrive.cu", "arrive", texts, {}, tmp_path)
    for count in (0, 2):
        with pytest.raises(ValueError, match=f"has 1 parameters.*has {count}$"):
            cuda_emulator.emulate(library, (ctypes.c_void_p * count)(), (1, 1, 1))
