"""The CPU kernels next to pages that cannot be touched. Run as a program, this file makes the calls."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import sys
from pathlib import Path

import pytest
import torch
import watched
from forked import captured
from torch import Tensor
from watched import MIXES, Case, Memory, levels, using


@pytest.mark.slow
def test_nothing_outside_is_touched() -> None:
    folders = [str(Path(watched.__file__).parent), *os.environ.get("PYTHONPATH", "").split(":")]
    shared = {**os.environ, "PYTHONPATH": ":".join(filter(None, folders))}
    done = captured([sys.executable, __file__], env=shared)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "untouched\n"


class Guarded(Memory):
    """Tensors that end, or begin, where memory that may be used does."""

    def __init__(self, at_end: bool) -> None:
        super().__init__()
        self.at_end = at_end
        self.maps: list[mmap.mmap] = []

    def _room(self, dtype: torch.dtype, count: int) -> Tensor:
        page = mmap.PAGESIZE
        usable = -(-count * dtype.itemsize // page) * page
        whole = mmap.mmap(-1, usable + 2 * page)
        self.maps.append(whole)
        space = torch.frombuffer(memoryview(whole)[page : page + usable], dtype=torch.uint8)
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        for guard in (space.data_ptr() - page, space.data_ptr() + usable):
            if protect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        elements = space.view(dtype)
        return elements[-count:] if self.at_end else elements[:count]


def touch_everything() -> None:
    """Runs that end the process if they touch what they should not."""
    chosen = random.Random(0)
    for i in range(100):
        dtype, gates_dtype = MIXES[i % len(MIXES)]
        time = chosen.choice((1, 5, 8, 61, 130, 1100))
        case = Case(
            dtype=dtype,
            gates_dtype=gates_dtype,
            sizes=(chosen.choice((1, 2)), 1, chosen.choice((1, 3, 8, 17, 70)), time),
            reverse=chosen.random() < 0.5,
            bounds=chosen.choice((None, (0, time // 2, time // 2, time))),
            orders=(chosen.choice(((0, 1, 2, 3), (0, 1, 3, 2), (3, 0, 2, 1))),) * 3,
            steps=(1, chosen.choice((1, 1, 3)), 1),
            repeat=chosen.choice(("", "", "c", "t")),
        )
        with using(chosen.choice(levels())):
            for at_end in (False, True):
                tensors = case.make(Guarded(at_end))
                case.run("forward", tensors)
                case.run("backward", tensors)


if __name__ == "__main__":
    touch_everything()
    print("untouched")
