"""Time a token of each sequence in a stack of Mamba or Mamba-2 layers, as one CUDA graph on pools of states.

    python examples/layer_steps.py [mamba mamba2] [--batch 1 16 64] [--width 2560] [--layers 8] [--device cpu]

Layers are a norm, a block of ``scan_registry.nn`` and a residual connection, without an embedding and a head. Their states stay where
they are, in pools of twice as many slots as sequences, and each step changes them in place. Steps take turns between two
halves of the pools: before a replay of the graph, the numbers of other slots are copied to where the graph reads them.

Printed for each block and batch: microseconds of a step for each layer, the same for each token, and bytes of weights and of states,
there and back, over the step's time. On a CPU there is no graph.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import torch
from model_steps import BLOCKS, Layer, recorded
from serve_mamba import Call, Pools, mamba, mamba2
from torch import Tensor

STEP = {"mamba": mamba, "mamba2": mamba2}
REPLAYS = 16  # timed together


class Stack(torch.nn.Module):
    """Layers one behind the other."""

    def __init__(self, name: str, width: int, layers: int) -> None:
        super().__init__()
        self.block_step = STEP[name]
        self.layers: Any = torch.nn.ModuleList(Layer(name, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Of whole sequences (batch, time, width)."""
        for layer in self.layers:
            x = layer(x, None)
        return x

    def pools(self, slots: int, dtype: torch.dtype) -> list[Pools]:
        """The states of so many sequences that have not begun, ``dtype`` being that of the scans' states."""
        pools = []
        for layer in self.layers:
            (channels, width), scan = layer.block.state_sizes
            weight = layer.block.conv1d.weight
            conv = weight.new_zeros(slots, channels, width - 1)
            pools.append(Pools(conv, weight.new_zeros(slots, *scan, dtype=dtype)))
        return pools

    def step(self, x: Tensor, pools: list[Pools], slots: Tensor) -> Tensor:
        """Of one token (batch, width) of each sequence, whose states are in those slots."""
        for layer, of_layer in zip(self.layers, pools, strict=True):
            x = x + self.block_step(layer.block, layer.norm(x), of_layer, Call(slots))
        return x


class Steps:
    """Steps of a stack on static memory: ``x``, ``slots`` and the pools are read, and ``y`` and the pools are written. On a GPU they
    are one graph, which is recorded with slots of which none is a row of the pools."""

    @torch.no_grad()
    def __init__(self, stack: Stack, batch: int, dtype: torch.dtype) -> None:
        weight = next(stack.parameters())
        self.stack, self.pools = stack, stack.pools(2 * batch, dtype)
        self.x = weight.new_zeros(batch, stack.layers[0].norm.weight.shape[0])
        self.y = torch.empty_like(self.x)
        self.slots = torch.full((batch,), -1, dtype=torch.int32, device=weight.device)
        self.replay: Callable[[], object] = self.step
        if weight.is_cuda:
            self.replay = recorded(self.step).replay

    def step(self) -> None:
        self.y.copy_(self.stack.step(self.x, self.pools, self.slots))

    @torch.no_grad()
    def run(self, slots: Tensor) -> None:
        """One step of the sequences in these slots."""
        self.slots.copy_(slots)
        self.replay()

    def bytes(self) -> int:
        """Of weights, and of the states of a step, there and back."""
        weights = sum(p.nbytes for p in self.stack.parameters())
        return weights + sum(state.nbytes for pools in self.pools for state in pools)


def seconds(call: Callable[[], object], gpu: bool, repeats: int) -> float:
    """The median time of a call, of ``repeats`` times ``REPLAYS`` calls."""
    times = []
    for _ in range(repeats):
        if gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(REPLAYS):
            call()
        if gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / REPLAYS)
    return statistics.median(times)


def rows(options: argparse.Namespace) -> Iterator[tuple[str, int, float, float]]:
    """Block, batch, seconds of a step, and bytes a second."""
    gpu = torch.device(options.device).type == "cuda"
    for name in options.blocks:
        torch.manual_seed(0)
        with torch.device(options.device):
            stack = Stack(name, options.width, options.layers).to(getattr(torch, options.dtype))
        for batch in options.batch:
            steps = Steps(stack, batch, getattr(torch, options.state_dtype))
            steps.x.normal_()
            halves = torch.randperm(2 * batch).int().to(options.device).chunk(2)
            run = partial(lambda turns, steps: steps.run(next(turns)), cycle(halves), steps)
            run()
            took = seconds(run, gpu, options.repeats)
            yield name, batch, took, steps.bytes() / took


def main(arguments: list[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("blocks", nargs="*", default=[*BLOCKS], help="default: both")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--width", type=int, default=2560)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16", help="of weights and inputs")
    parser.add_argument("--state-dtype", default="float32", help="of the scans' states")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    if unknown := {*options.blocks} - {*BLOCKS}:
        parser.error(f"expected {' or '.join(BLOCKS)}, got {', '.join(unknown)}")
    print("| block | batch | µs a layer | µs a layer and token | TB/s |")
    print("| --- | --- | --- | --- | --- |")
    for name, batch, took, rate in rows(options):
        microseconds = 1e6 * took / options.layers
        cells = (
            name,
            batch,
            f"{microseconds:.1f}",
            f"{microseconds / batch:.2f}",
            f"{rate / 1e12:.2f}",
        )
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
