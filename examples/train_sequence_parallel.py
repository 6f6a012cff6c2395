"""Train a language model with FSDP2 on sequences that are cut along time, and compare with one process.

    torchrun --nproc-per-node 4 examples/train_sequence_parallel.py [--time-ranks 2] [--device cpu] [--dtype float64]

With 4 ranks and ``--time-ranks 2`` there are two groups of two ranks. Each group has half of the batch, and each of its ranks
has half of every sequence. FSDP2 shards the parameters over all 4 ranks, or with ``--replicate`` over the ranks that share
sequences. Every rank then trains the same model alone on the whole batch. The first rank prints losses and gradient norms of
both. The exit status is 1 if losses, norms or final weights differ by more than the tolerance of the dtype.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scan_registry import distributed

#: The model learns to predict the bytes of this file.
TEXT = torch.tensor(list(Path(__file__).read_bytes()))
ROWS, STEPS, WIDTH, STATES, RANK = 4, 130, 32, 8, 4
#: The largest relative difference of a loss, of a norm, or of a parameter's final values.
TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 2e-2}


class MambaBlock(nn.Module):
    """A selective scan, as in Mamba. ``group`` holds the ranks that share a sequence."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.norm = nn.RMSNorm(WIDTH)
        self.enter = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.filters = nn.Parameter(torch.randn(2 * WIDTH, 4) / 2)
        self.project = nn.Linear(2 * WIDTH, RANK + 2 * STATES, bias=False)
        self.step = nn.Linear(RANK, 2 * WIDTH)
        self.log_rates = nn.Parameter(torch.arange(1.0, STATES + 1).log().repeat(2 * WIDTH, 1))
        self.skip = nn.Parameter(torch.ones(2 * WIDTH))
        self.leave = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.enter(self.norm(x)).transpose(1, 2).chunk(2, dim=1)
        u = distributed.causal_conv1d(
            u, self.filters.to(u.dtype), activation="silu", group=self.group
        )
        low, B, C = self.project(u.transpose(1, 2)).split([RANK, STATES, STATES], dim=2)
        y = distributed.selective_scan(
            *(u, self.step(low).transpose(1, 2), -self.log_rates.exp()),
            *(B.transpose(1, 2), C.transpose(1, 2), self.skip, z),
            delta_softplus=True,
            group=self.group,
        )
        return x + self.leave(y.transpose(1, 2))


class RecurrentBlock(nn.Module):
    """An RG-LRU, as in RecurrentGemma. ``group`` holds the ranks that share a sequence."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.norm = nn.RMSNorm(WIDTH)
        self.enter, self.branch, self.recurrence_gate, self.input_gate, self.leave = (
            nn.Linear(WIDTH, WIDTH) for _ in range(5)
        )
        self.filters = nn.Parameter(torch.randn(WIDTH, 4) / 2)
        self.decay = nn.Parameter(torch.linspace(-4.0, -1.0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x, rest = self.norm(x), x
        u = self.enter(x).transpose(1, 2)
        u = distributed.causal_conv1d(u, self.filters.to(u.dtype), group=self.group).transpose(1, 2)
        gates = self.recurrence_gate(u), self.input_gate(u)
        h = distributed.gated_scan("rg_lru", u, *gates, self.decay, dim=1, group=self.group)
        return rest + self.leave(h.to(u.dtype) * F.gelu(self.branch(x)))


class Model(nn.Module):
    """Blocks of both kinds between an embedding and a classifier of bytes."""

    def __init__(self, group: Any, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList([MambaBlock(group), RecurrentBlock(group)])
        self.classifier = nn.Linear(WIDTH, 256)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The sum of the losses of all predictions."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits = self.classifier(x).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction="sum")


def build(options: argparse.Namespace, group: Any) -> Any:
    """A model that has the same weights on every rank. Under autocast, parameters stay in float32."""
    torch.manual_seed(0)
    dtype = torch.float64 if options.dtype == "float64" else torch.float32
    return Model(group, options.checkpoint).to(options.device, dtype)


def train(
    model: Any, options: argparse.Namespace, rows: range, steps: range, ranks: Any
) -> list[tuple[float, float]]:
    """Loss and gradient norm of each update. This process has these rows and time steps of every batch. ``ranks`` is the group
    of all processes that train the model."""
    # A large eps: AdamW would otherwise amplify the rounding of gradients near 0.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6)
    generator, updates = torch.Generator().manual_seed(1), []
    for _ in range(options.steps):
        begins = torch.randint(len(TEXT) - STEPS, (ROWS,), generator=generator).tolist()
        # The target after the last step of a part is the first input of the next part.
        texts = [TEXT[begins[row] + steps.start : begins[row] + steps.stop + 1] for row in rows]
        ids = torch.stack(texts).to(options.device)
        with torch.autocast(ids.device.type, torch.bfloat16, options.dtype == "bfloat16"):
            loss = model(ids[:, :-1], ids[:, 1:])
        loss = loss / (ROWS * STEPS)  # the sum over ranks is the mean over the batch
        # The gradient of this sum is the sum of the ranks' gradients. FSDP2 computes their mean.
        (loss * dist.get_world_size(ranks)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total, group=ranks)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        updates.append((float(total), float(norm)))
    return updates


def cut(count: int, parts: int, part: int) -> range:
    """One of so many contiguous parts, whose lengths differ by at most one."""
    return range(count * part // parts, count * (part + 1) // parts)


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Losses and gradient norms over all ranks, those of this process alone, and how far they are apart."""
    ranks, kind = dist.get_world_size(), torch.device(options.device).type
    sizes = ranks // (options.time_ranks or ranks), options.time_ranks or ranks
    mesh = init_device_mesh(kind, sizes, mesh_dim_names=("data", "time"))
    model = build(options, mesh["time"])
    # Over a mesh of two dimensions FSDP2 shards along the second one, and replicates along the first one.
    over = mesh if options.replicate else init_device_mesh(kind, (ranks,))
    for block in model.blocks:
        if options.compile:
            block.compile(backend=options.compile)
        fully_shard(block, mesh=over)
    fully_shard(model, mesh=over)
    rows = cut(ROWS, mesh["data"].size(), mesh.get_local_rank("data"))
    steps = cut(STEPS, mesh["time"].size(), mesh.get_local_rank("time"))
    shared = train(model, options, rows, steps, dist.group.WORLD)

    alone, _ = dist.new_subgroups(
        group_size=1
    )  # operators in a group of one rank do not communicate
    single = build(options, alone)
    wanted = train(single, options, range(ROWS), range(STEPS), alone)
    pair = torch.tensor([shared, wanted], dtype=torch.float64)
    far = (pair[0] / pair[1] - 1).abs().amax(dim=0).tolist()
    with torch.no_grad():
        pairs = zip(model.parameters(), single.parameters(), strict=True)
        weights = max(float((a.full_tensor() - b).norm() / b.norm()) for a, b in pairs)
    apart = {"loss": far[0], "norm": far[1], "weights": weights}
    return {"mesh": sizes, "ranks": shared, "alone": wanted, "apart": apart}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--time-ranks", type=int, help="ranks that share a sequence; default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtype", choices=TOLERANCE, default="float32", help="default: float32")
    parser.add_argument("--steps", type=int, default=20, help="updates of the weights; default: 20")
    parser.add_argument("--replicate", action="store_true", help="shard over --time-ranks only")
    parser.add_argument("--checkpoint", action="store_true", help="activation checkpointing")
    parser.add_argument("--compile", metavar="BACKEND", help="torch.compile each block")
    parser.add_argument("--json", type=Path, help="write every number to this file")
    options = parser.parse_args()
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    record = compare(options)
    if dist.get_rank() == 0:
        print("update: loss, of one process; gradient norm, of one process")
        for n, (here, one) in enumerate(zip(record["ranks"], record["alone"], strict=True)):
            print(f"{n}: {here[0]:.9f}, {one[0]:.9f}; {here[1]:.9f}, {one[1]:.9f}")
        far = ", ".join(f"{name} {apart:.1e}" for name, apart in record["apart"].items())
        print(f"mesh {record['mesh']}, {options.dtype}: largest relative differences: {far}")
        if options.json:
            options.json.write_text(json.dumps(record), encoding="utf-8")
    dist.destroy_process_group()
    return 0 if max(record["apart"].values()) <= TOLERANCE[options.dtype] else 1


if __name__ == "__main__":
    sys.exit(main())
