"""Train small language models of characters with torch.nn's networks and with scan_registry.nn's.

    python tools/train_chars.py [--device cpu] [--steps N] [--json FILE] [--plot FILE]
    python tools/train_chars.py --from FILE --plot FILE

Two layers of an LSTM, by torch.nn and by ``scan_registry.nn``; then of an sLSTM of several heads and of Mamba,
which torch.nn has not: they are written out below in torch's operators, step by step, and torch differentiates
them. Each pair starts from the same parameters, in float32, and sees the same batches: pieces of the sources
of Python's standard library. Their losses have to agree. A picture needs matplotlib; of a run before, whose
numbers ``--json`` wrote, it needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from records import write_records
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import conv1d, cross_entropy, linear, logsigmoid, silu, softplus

from scan_registry import __version__, nn

# Short sequences: plain torch goes step by step, and launches some fifty kernels in each.
BATCH, TIME, WIDTH, LAYERS, HEADS = 64, 64, 256, 2, 4
CHARACTERS = 128
RATE = 1e-3  # at twice that, an LSTM's training makes more of every rounding error, step by step
WARM_UP = 5  # steps whose time does not count
#: How far two loss curves may be apart: rounding, which training amplifies step by step.
TOLERANCE = 1e-2


class Model(torch.nn.Module):
    """Characters to the logarithms of the next ones' odds."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(CHARACTERS, WIDTH)
        self.network = network
        self.head = torch.nn.Linear(WIDTH, CHARACTERS)

    def forward(self, characters: Tensor) -> Tensor:
        logits: Tensor = self.head(self.network(self.embedding(characters))[0])
        return logits


class PlainSLSTM(nn.SLSTM):
    """The same parameters and the same function in torch's operators."""

    def forward(self, input: Tensor, hx: None = None) -> tuple[Tensor, Tensor]:
        """(B, T, I) to h at every step and at the last one, from states of zero."""
        out = input
        for layer in range(self.num_layers):
            out = self._steps(out, f"l{layer}")
        return out, out[:, -1]

    def _steps(self, x: Tensor, layer: str) -> Tensor:
        of_inputs, of_h, b_inputs, b_h = (
            getattr(self, f"{name}_{layer}")
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        batch, time, _ = x.shape
        heads, dim = self.num_heads, self.hidden_size // self.num_heads
        # By step and head: (T, N, B, gates · D) and (N, previous, gates · new).
        given = linear(x, of_inputs, b_inputs + b_h).view(batch, time, 4, heads, dim)
        given = given.permute(1, 3, 0, 2, 4).reshape(time, heads, batch, 4 * dim)
        recurrent = of_h.view(4, heads, dim, dim).permute(1, 3, 0, 2).reshape(heads, dim, 4 * dim)
        h = c = n = given.new_zeros(heads, batch, dim)
        m = torch.full_like(h, -math.inf)  # so that at first i decides
        every = []
        for own in given.unbind():  # the gradient of an index would be as large as all steps
            gates = torch.baddbmm(own, h, recurrent).view(heads, batch, 4, dim)
            i, f, z, o = gates.unbind(2)
            kept = logsigmoid(f) + m
            most = torch.maximum(kept, i)
            old, new, m = (kept - most).exp(), (i - most).exp(), most
            c, n = old * c + new * z.tanh(), (old * n + new).clamp_min(1)
            h = o.sigmoid() * c / n
            every.append(h)
        return torch.stack(every).permute(2, 0, 1, 3).reshape(batch, time, heads * dim)


class PlainMamba(nn.Mamba):
    """The same parameters and the same function in torch's operators."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """(B, T, d_model) to the same shape, from states of zero."""
        x, z = self.in_proj(hidden_states).mT.chunk(2, 1)
        x = conv1d(
            *(x, self.conv1d.weight, self.conv1d.bias),
            padding=self.d_conv - 1,
            groups=self.d_inner,
        )
        x = silu(x[..., : hidden_states.shape[1]]).mT
        steps, b, c = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], -1)
        sizes, a = softplus(self.dt_proj(steps)), -self.A_log.exp()
        h = x.new_zeros(len(x), self.d_inner, self.d_state)
        every = []
        for sizes_now, u, b_now, c_now in zip(
            *(t.unbind(1) for t in (sizes, x, b, c)), strict=True
        ):
            size = sizes_now.unsqueeze(-1)
            h = torch.exp(size * a) * h + size * b_now.unsqueeze(1) * u.unsqueeze(-1)
            every.append((h @ c_now.unsqueeze(-1)).squeeze(-1) + self.D * u)
        result: Tensor = self.out_proj(torch.stack(every, 1) * silu(z.mT))
        return result


class Blocks(torch.nn.Module):
    """Layers of Mamba, each with a norm before it and its input added; called as a recurrent network is."""

    def __init__(self, kind: type[nn.Mamba]) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.layers = torch.nn.ModuleList(kind(WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x, None


@dataclass(frozen=True)
class Run:
    """The losses of each step, and the median ms of a step after the warm-up."""

    model: str
    name: str
    losses: list[float]
    ms: float


def text() -> Tensor:
    """The standard library's modules of the top level, as ASCII."""
    folder = Path(argparse.__file__).parent
    parts = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    kept = [byte for byte in b"\n".join(parts) if byte < CHARACTERS]
    return torch.tensor(kept, dtype=torch.uint8)


def batches(corpus: Tensor, seed: int) -> Iterator[Tensor]:
    """(B, T + 1) characters, anywhere in the text."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(corpus) - TIME - 1, (BATCH, 1), generator=generator)
        yield corpus[starts + torch.arange(TIME + 1)].long()


def pairs() -> Iterator[tuple[str, dict[str, Any]]]:
    """For each model its networks, the first of which the others are held against."""
    size = {"input_size": WIDTH, "hidden_size": WIDTH, "num_layers": LAYERS, "batch_first": True}
    yield "LSTM", {"torch.nn": torch.nn.LSTM(**size), "scan_registry.nn": nn.LSTM(**size)}
    yield (
        "sLSTM",
        {
            "plain torch": PlainSLSTM(**size, num_heads=HEADS),
            "scan_registry.nn": nn.SLSTM(**size, num_heads=HEADS),
        },
    )
    yield "Mamba", {"plain torch": Blocks(PlainMamba), "scan_registry.nn": Blocks(nn.Mamba)}


def train(
    names: tuple[str, str], model: Model, corpus: Tensor, steps: int, device: torch.device
) -> Run:
    """Steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses, times = [], []
    for _, characters in zip(range(steps), batches(corpus, seed=1), strict=False):
        there = characters.to(device)
        begin = time.perf_counter()
        logits = model(there[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), there[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))  # which waits for the GPU
        times.append(1e3 * (time.perf_counter() - begin))
    return Run(*names, losses, statistics.median(times[WARM_UP:] or times))


def runs(steps: int, device: torch.device) -> Iterator[Run]:
    """Every network of every pair, from the parameters of the pair's first."""
    corpus = text()
    for kind, networks in pairs():
        torch.manual_seed(0)
        start = Model(next(iter(networks.values()))).state_dict()
        start = {name: value.clone() for name, value in start.items()}
        for name, network in networks.items():
            model = Model(network)
            model.load_state_dict(start)
            yield train((kind, name), model.to(device), corpus, steps, device)


def apart(run: Run, first: Run) -> float:
    """The largest difference of two loss curves; infinite if one is not finite."""
    if not all(map(math.isfinite, run.losses)):
        return math.inf
    return max(abs(a - b) for a, b in zip(run.losses, first.losses, strict=True))


def draw(done: list[Run], path: Path) -> None:
    """The losses over the steps, a panel for each model."""
    from scan_registry.bench.plot import load

    kinds = list(dict.fromkeys(run.model for run in done))
    figure = load().Figure(figsize=(6.4 * len(kinds), 4.8), layout="constrained")
    for panel, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        for number, run in enumerate(run for run in done if run.model == kind):
            label = f"{run.name}, {run.ms:.1f} ms per step"
            panel.plot(run.losses, label=label, linestyle="--" if number else "-")
        panel.set(title=kind, xlabel="step", ylabel="loss")
        panel.legend()
    figure.savefig(path)


def show(done: list[Run], where: str) -> float:
    """Print a table; how far apart the losses of a model are at most."""
    table = Table(title=f"{where}: ({BATCH}, {TIME}), {len(done[0].losses)} steps")
    for column in ("model", "by", "first loss", "last loss", "largest difference", "ms per step"):
        table.add_column(column, justify="left" if column in ("model", "by") else "right")
    worst = 0.0
    for run in done:
        first = next(other for other in done if other.model == run.model)
        worst = max(worst, apart(run, first))
        ends = f"{run.losses[0]:.4f}", f"{run.losses[-1]:.4f}"
        table.add_row(run.model, run.name, *ends, f"{apart(run, first):.1e}", f"{run.ms:.1f}")
    Console(width=110).print(table)
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda:0", help="default: cuda:0")
    parser.add_argument("--steps", type=int, default=200, help="default: 200")
    parser.add_argument("--json", type=Path, help="write every number to this file")
    parser.add_argument("--plot", type=Path, help="draw the losses into this file")
    parser.add_argument(
        "--from", type=Path, dest="before", help="train nothing; show what --json wrote"
    )
    args = parser.parse_args()
    if args.before:
        record = json.loads(args.before.read_text(encoding="utf-8"))
        done, where = [Run(**run) for run in record["runs"]], record["device"]
    else:
        device = torch.device(args.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            print(
                "train_chars needs an NVIDIA GPU or --device cpu; torch sees none", file=sys.stderr
            )
            return 2
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        done = []
        for run in runs(args.steps, device):
            done.append(run)
            print(f"{run.model}, {run.name}: {run.ms:.1f} ms per step", file=sys.stderr, flush=True)
    worst = show(done, where)
    if args.json:
        record = {
            "device": where,
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "scan_registry": __version__,
            "runs": [asdict(run) for run in done],
        }
        write_records(args.json, record)
    if args.plot:
        draw(done, args.plot)
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
