"""Train a small language model of characters with MinGRU, and with torch.nn.GRU, and let it write.

    python examples/character_model.py [--steps 300] [--device cpu] [--json FILE]

The guide explains the model: https://scan-registry.github.io/scan-registry/guides/character-model/
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from scan_registry import nn

TEXT = "\n".join(topics[name] for name in sorted(topics))
ALPHABET = sorted(set(TEXT))
NUMBER = {character: i for i, character in enumerate(ALPHABET)}


class Block(torch.nn.Module):
    """Adds to its input what the recurrent layer makes of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.network: Any = nn.MinGRU(width, expansion_factor=2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.network(self.norm(x))

    def step(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The same for one more character, from the state that the last step returned."""
        y, state = self.network.step(self.norm(x), state)
        return x + y, state


class GRUBlock(Block):
    """The same with torch.nn.GRU, which has as many weights."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.network = torch.nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.network(self.norm(x))[0]


class Model(torch.nn.Module):
    def __init__(self, block: type[Block] = Block, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(len(ALPHABET), width)
        self.blocks = torch.nn.ModuleList(block(width) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, len(ALPHABET))

    def forward(self, characters: Tensor) -> Tensor:
        x = self.embedding(characters)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def step(self, characters: Tensor, states: list[Any]) -> tuple[Tensor, list[Any]]:
        x, after = self.embedding(characters), []
        for block, state in zip(self.blocks, states, strict=True):
            x, new = block.step(x, state)
            after.append(new)
        return self.head(self.norm(x)), after


def train(model: Model, steps: int, device: str, batch: int = 16, length: int = 128) -> list[float]:
    """The losses of training on pieces from anywhere in the text."""
    corpus = torch.tensor([NUMBER[character] for character in TEXT])
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(corpus) - length, (batch, 1), generator=generator)
        pieces = corpus[starts + torch.arange(length + 1)].to(device)
        loss = cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def write(model: Model, text: str, count: int, device: str) -> str:
    """``text`` and so many more characters, each drawn from the model's prediction."""
    states: list[Any] = [None] * len(model.blocks)
    for i in range(len(text) + count - 1):
        logits, states = model.step(torch.tensor([NUMBER[text[i]]], device=device), states)
        if i + 1 == len(text):
            text += ALPHABET[int(torch.multinomial(logits.softmax(-1)[0], 1))]
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="default: 300")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write every loss to this file")
    options = parser.parse_args()
    runs = []
    for name, block in (("scan_registry.nn.MinGRU", Block), ("torch.nn.GRU", GRUBlock)):
        torch.manual_seed(0)
        model = Model(block).to(options.device)
        begin = time.process_time()
        losses = train(model, options.steps, options.device)
        seconds = round(time.process_time() - begin, 1)
        weights = sum(parameter.numel() for parameter in model.parameters())
        runs.append({"network": name, "weights": weights, "cpu_seconds": seconds, "losses": losses})
        print(f"{name}: {weights} weights, loss {losses[-1]:.3f}, {seconds} s of CPU time")
        if block is Block:  # a terminal may not show all characters of the text
            print(write(model, "The ", 200, options.device).encode("ascii", "replace").decode())
    if options.json:
        where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
        record = {"device": where, "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
        options.json.write_text(json.dumps({**record, "runs": runs}, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
