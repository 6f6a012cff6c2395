"""Time steps of ``selective_state_update`` on a GPU beside copies of the same state.

    python tools/time_steps.py

Calls are recorded in a CUDA graph, each with a state of its own, so that none finds its state in the L2 cache. A line has the
case, as ``scan-registry bench selective_state_update`` takes it, then microseconds of a copy and of a step, and their ratio.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import torch

from scan_registry import selective_state_update
from scan_registry.ops.selective_state_update_bench import Case

BATCHES = (1, 64, 256)
KINDS = ("channels:{},5120,16", "heads:{},64,64,128")
DTYPES = ("float32", "bfloat16")
BYTES = 400_000_000  # of all states: several times the L2 cache
REPEATS = 15


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """The median of a call, of a graph of all."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(calls))
    return sorted(times)[REPEATS // 2]


def main() -> int:
    if not torch.cuda.is_available():
        print("torch sees no NVIDIA GPU", file=sys.stderr)
        return 2
    print(torch.cuda.get_device_name())
    for kind in KINDS:
        for batch in BATCHES:
            for dtype in DTYPES:
                case = Case.parse(f"{kind.format(batch)}:{dtype}")
                state, *others = case.tensors("cuda")
                size = prod(case.shape) * state.element_size()
                count = max(4, min(64, BYTES // size // 2 * 2))
                states = [state.clone() for _ in range(count)]
                pairs = zip(states[::2], states[1::2], strict=True)
                copies = [partial(to.copy_, source) for to, source in pairs]
                steps = [
                    partial(selective_state_update, state, *others, dt_softplus=True)
                    for state in states
                ]
                copy, step = microseconds(copies), microseconds(steps)
                print(f"{case}: {copy:.2f} {step:.2f} {step / copy:.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
