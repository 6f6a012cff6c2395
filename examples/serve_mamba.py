"""Serve many sequences of a Mamba and Mamba-2 model from pools of states, and compare each with the sequence alone.

    python examples/serve_mamba.py [--sequences 64] [--running 16] [--device cpu]

It shows what a server does with recurrent states:

- continuous batching: sequences of all ages are packed into one call, and a new one takes the slot that another leaves;
- prefix reuse: while a prompt is read, the states after every few tokens are kept, and a prompt that begins alike starts there;
- speculative decoding: drafted tokens are verified several at a time, and the states after those that were wrong are dropped.

At the end the model reads each finished sequence as a whole, without states, and the logits have to agree.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from scan_registry import (
    StateRows,
    causal_conv1d,
    causal_conv1d_update,
    nn,
    selective_scan,
    selective_state_update,
    ssd_scan,
)

VOCABULARY, WIDTH = 24, 32
TOKENS = 4  # of a sequence in one step: the last one that is certain, and drafts
TEMPERATURE = 6.0  # of the choice of a token
BLOCK = 8  # tokens of a prompt between two states that are kept


class Call(NamedTuple):
    """What one pass through the model is for. All tokens are packed: sequence n has those from cu_seqlens[n] on.

    Each slot has one row of a convolution's pool, and ``TOKENS`` rows of a scan's pool, one for the state after each token
    of a step. Slots of kept prefixes use the first row alone. Where no tokens are drafted, each slot has one row of each pool.
    """

    slots: Tensor
    cu_seqlens: Tensor | None = None  # None: a step of one token of each sequence
    accepted: Tensor | None = None  # of a step: how many tokens of the last step count
    start: Tensor | None = None  # of prompts: the slot of the prefix, or -1 for none
    keep: Tensor | None = None  # of prompts: slots for the states after each block, or -1

    def columns(self) -> Tensor:
        """The rows of a scan's pool that the sequences' slots have."""
        if self.accepted is None:
            return self.slots
        return self.slots.unsqueeze(1) * TOKENS + torch.arange(TOKENS, device=self.slots.device)

    def rows(self, pool: Tensor, rows_of_slot: int) -> StateRows:
        """Of a prompt."""
        assert self.start is not None
        assert self.keep is not None
        return StateRows(
            *(pool, self.start * rows_of_slot, self.slots * rows_of_slot),
            checkpoint_interval=BLOCK,
            checkpoint_batch_indices=self.keep * rows_of_slot,
        )


class Pools(NamedTuple):
    """The states of one layer for all sequences. A convolution's row holds width - 2 inputs before a step and the step's."""

    conv: Tensor
    scan: Tensor


def convolve(x: Tensor, conv: torch.nn.Conv1d, pool: Tensor, call: Call) -> Tensor:
    """The convolution of (tokens, channels) and silu of it."""
    weight, width = conv.weight.squeeze(1), conv.weight.shape[-1]
    if call.start is None:
        return causal_conv1d_update(
            *(x, pool, weight, conv.bias, "silu"),
            conv_state_indices=call.slots,
            cu_seqlens=call.cu_seqlens,
            num_accepted_tokens=call.accepted,
        )
    y: Tensor = causal_conv1d(
        *(x.T.unsqueeze(0), weight, conv.bias),
        initial_state=call.rows(pool[..., : width - 1], 1),
        cu_seqlens=call.cu_seqlens,
        activation="silu",
    )
    return y[0].T


def mamba(block: nn.Mamba, hidden: Tensor, pools: Pools, call: Call) -> Tensor:
    """What the block makes of (tokens, width)."""
    x, z = block.in_proj(hidden).chunk(2, -1)
    x = convolve(x, block.conv1d, pools.conv, call)
    sizes = block.dt_rank, block.d_state, block.d_state
    dt, B, C = block.x_proj(x).split(sizes, -1)
    dt, A = linear(dt, block.dt_proj.weight), -torch.exp(block.A_log.float())
    if call.start is None:
        y = selective_state_update(
            *(pools.scan, x, dt, A, B, C, block.D, z, block.dt_proj.bias, True),
            state_batch_indices=call.columns(),
            cu_seqlens=call.cu_seqlens,
            num_accepted_tokens=call.accepted,
        )
    else:
        x, dt, B, C, z = (t.T.unsqueeze(0) for t in (x, dt, B, C, z))
        rows = call.rows(pools.scan, TOKENS)
        filters = block.D, z, block.dt_proj.bias, True, rows
        y = selective_scan(x, dt, A, B, C, *filters, cu_seqlens=call.cu_seqlens)[0].T
    out: Tensor = block.out_proj(y)
    return out


def mamba2(block: nn.Mamba2, hidden: Tensor, pools: Pools, call: Call) -> Tensor:
    """The same of Mamba-2."""
    features, states = block.d_inner, block.ngroups * block.d_state
    z, xBC, dt = block.in_proj(hidden).split((features, features + 2 * states, block.nheads), -1)
    xBC = convolve(xBC, block.conv1d, pools.conv, call)
    x, B, C = xBC.split((features, states, states), -1)
    x = x.unflatten(-1, (block.nheads, block.headdim))
    B, C = (t.unflatten(-1, (block.ngroups, block.d_state)) for t in (B, C))
    z = z.unflatten(-1, (block.nheads, block.headdim))
    A = -torch.exp(block.A_log.float())
    if call.start is None:
        of_head = block.nheads, block.headdim
        D, bias = (t.unsqueeze(-1).expand(of_head) for t in (block.D, block.dt_bias))
        y = selective_state_update(
            *(pools.scan, x, dt.unsqueeze(-1).expand(x.shape)),
            *(A[:, None, None].expand(*of_head, block.d_state), B, C, D, z, bias, True),
            state_batch_indices=call.columns(),
            cu_seqlens=call.cu_seqlens,
            num_accepted_tokens=call.accepted,
        )
    else:
        x, dt, B, C, z = (t.unsqueeze(0) for t in (x, dt, B, C, z))
        y = ssd_scan(
            *(x, dt, A, B, C, block.D, z),
            dt_bias=block.dt_bias,
            dt_softplus=True,
            initial_state=call.rows(pools.scan, TOKENS),
            cu_seqlens=call.cu_seqlens,
        )[0]
    # Kernels have applied the gate, which is before the norm.
    out: Tensor = block.out_proj(block.norm(y.flatten(-2)))
    return out


class Model(torch.nn.Module):
    """A block of each kind, and logits of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(3))
        self.mamba = nn.Mamba(WIDTH, d_state=8)
        self.mamba2 = nn.Mamba2(WIDTH, d_state=16, headdim=16, ngroups=2)

    def pools(self, slots: int, device: str) -> tuple[Pools, Pools]:
        """For so many slots."""
        pools = []
        for block in (self.mamba, self.mamba2):
            (channels, width), scan = block.state_sizes
            conv = torch.zeros(slots, channels, width - 2 + TOKENS, device=device)
            pools.append(Pools(conv, torch.zeros(slots * TOKENS, *scan, device=device)))
        return pools[0], pools[1]

    def serve(self, tokens: Tensor, pools: tuple[Pools, Pools], call: Call) -> Tensor:
        """Logits behind each of the packed tokens; the states are in the pools."""
        x = self.embedding(tokens)
        x = x + mamba(self.mamba, self.norms[0](x), pools[0], call)
        x = x + mamba2(self.mamba2, self.norms[1](x), pools[1], call)
        return linear(self.norms[2](x), self.embedding.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of a whole sequence, (1, time)."""
        x = self.embedding(tokens)
        x = x + self.mamba(self.norms[0](x))
        x = x + self.mamba2(self.norms[1](x))
        return linear(self.norms[2](x), self.embedding.weight)


@dataclass
class Sequence:
    """A prompt, the tokens behind it, and the logits that each of these was chosen by. ``noise`` makes choices random, and
    the same whether a token was drafted or not."""

    prompt: list[int]
    wanted: int
    arrival: int
    noise: Tensor
    slot: int = -1
    accepted: int = 1
    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def choose(self, logits: Tensor) -> int:
        """A likely token goes behind the others."""
        self.tokens.append(int((logits + self.noise[len(self.tokens)]).argmax()))
        self.logits.append(logits)
        return self.tokens[-1]

    def drafts(self) -> list[int]:
        """A guess of what comes next: what followed when the last token was there before."""
        past = self.prompt + self.tokens
        most = min(TOKENS - 1, self.wanted - len(self.tokens) - 1)
        for place in range(len(past) - 2, -1, -1):
            if past[place] == past[-1]:
                return past[place + 1 : place + 1 + most]
        return []


@dataclass
class Counts:
    """Of all sequences together."""

    steps: int = 0
    prompt_tokens: int = 0
    reused: int = 0
    drafted: int = 0
    right: int = 0


class Server:
    """Runs sequences in slots. The first ``running`` slots are for sequences, ``kept`` further ones for prefixes."""

    def __init__(self, model: Model, running: int, kept: int, device: str) -> None:
        self.model, self.device = model, device
        self.pools = model.pools(running + kept, device)
        self.free = list(range(running))
        self.free_for_prefixes = list(range(running, running + kept))
        self.prefixes: dict[tuple[int, ...], int] = {}
        self.active: list[Sequence] = []
        self.counts = Counts()

    def run(self, sequences: list[Sequence]) -> Counts:
        """Until all sequences are complete."""
        waiting = sorted(sequences, key=lambda sequence: sequence.arrival)
        while waiting or self.active:
            arrived = [s for s in waiting[: len(self.free)] if s.arrival <= self.counts.steps]
            waiting = waiting[len(arrived) :]
            if arrived:
                self.read_prompts(arrived)
            if self.active:
                self.step()
            self.counts.steps += 1
        return self.counts

    def numbers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def bounds(self, parts: list[list[int]]) -> Tensor:
        return self.numbers([0, *accumulate(map(len, parts))])

    def read_prompts(self, arrived: list[Sequence]) -> None:
        """All prompts at once, each behind the longest prefix whose states are kept."""
        parts, start, keep = [], [], []
        known = dict(self.prefixes)
        for sequence in arrived:
            prompt = sequence.prompt
            sequence.slot = self.free.pop()
            # One token at least is read, as its logits are wanted.
            cuts = range(BLOCK * ((len(prompt) - 1) // BLOCK), 0, -BLOCK)
            reused = next((cut for cut in cuts if tuple(prompt[:cut]) in known), 0)
            start.append(known[tuple(prompt[:reused])] if reused else -1)
            parts.append(prompt[reused:])
            keep.append(
                [
                    self.keep(tuple(prompt[:cut]))
                    for cut in range(reused + BLOCK, len(prompt), BLOCK)
                ]
            )
            self.counts.prompt_tokens += len(prompt)
            self.counts.reused += reused
        columns = max(map(len, keep))
        keep = [slots + [-1] * (columns - len(slots)) for slots in keep]
        call = Call(
            self.numbers([sequence.slot for sequence in arrived]),
            self.bounds(parts),
            start=self.numbers(start),
            keep=self.numbers([*chain(*keep)]).view(len(arrived), columns),
        )
        logits = self.logits(parts, call)
        for sequence, own in zip(arrived, logits, strict=True):
            sequence.choose(own[-1])
        self.active += arrived

    def keep(self, prefix: tuple[int, ...]) -> int:
        """A slot for its states; -1 if they are kept already, or there is none left."""
        if prefix in self.prefixes or not self.free_for_prefixes:
            return -1
        self.prefixes[prefix] = self.free_for_prefixes.pop()
        return self.prefixes[prefix]

    def step(self) -> None:
        """One pass for all sequences: each one's last token and its drafts. Drafts count as long as they are what the model
        would have chosen, and the logits behind the last one that counts give one token more."""
        parts = [[sequence.tokens[-1], *sequence.drafts()] for sequence in self.active]
        call = Call(
            self.numbers([sequence.slot for sequence in self.active]),
            self.bounds(parts),
            accepted=self.numbers([sequence.accepted for sequence in self.active]),
        )
        for sequence, part, logits in zip(
            self.active, parts, self.logits(parts, call), strict=True
        ):
            sequence.accepted = 1
            for number, own in enumerate(logits):
                chosen = sequence.choose(own)
                if number + 1 == len(part) or chosen != part[number + 1]:
                    break
                sequence.accepted += 1
            self.counts.drafted += len(part) - 1
            self.counts.right += sequence.accepted - 1
        for sequence in self.active:
            if len(sequence.tokens) >= sequence.wanted:
                self.free.append(sequence.slot)
        self.active = [s for s in self.active if len(s.tokens) < s.wanted]

    def logits(self, parts: list[list[int]], call: Call) -> list[Tensor]:
        tokens = self.numbers([token for part in parts for token in part])
        with torch.inference_mode():
            logits = self.model.serve(tokens, self.pools, call)
        return list(logits.cpu().split([*map(len, parts)]))


def drawn(count: int, seed: int) -> list[Sequence]:
    """Prompts of which many begin alike, and that arrive at different times."""
    numbers = random.Random(seed)

    def text(length: int) -> list[int]:
        return [numbers.randrange(VOCABULARY) for _ in range(length)]

    beginnings = [text(length) for length in (8, 19, 26, 40)]

    def noise(tokens: int) -> Tensor:
        gumbel = -torch.empty(tokens + TOKENS, VOCABULARY).exponential_().log()
        return gumbel * TEMPERATURE

    lengths = [numbers.randrange(1, 40) for _ in range(count)]
    return [
        Sequence(
            numbers.choice(beginnings) + text(numbers.randrange(1, 20)),
            wanted=wanted,
            arrival=numbers.randrange(count),
            noise=noise(wanted),
        )
        for wanted in lengths
    ]


def difference(model: Model, sequence: Sequence, device: str) -> float:
    """The largest between the served logits and those of the whole sequence, relative to the latter's largest."""
    whole = torch.tensor([sequence.prompt + sequence.tokens[:-1]], device=device)
    with torch.inference_mode():
        logits = model(whole)[0, len(sequence.prompt) - 1 :].cpu()
    served = torch.stack(sequence.logits)
    assert served.shape == logits.shape
    return float((served - logits).abs().max() / logits.abs().max())


def main(arguments: list[str] | None = None) -> float:
    """Print what was served, and return the largest difference."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--running", type=int, default=16, help="at most at the same time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    model = Model().to(options.device)
    sequences = drawn(options.sequences, options.seed)
    server = Server(model, options.running, kept=32, device=options.device)
    counts = server.run(sequences)
    tokens = sum(len(sequence.tokens) for sequence in sequences)
    largest = max(difference(model, sequence, options.device) for sequence in sequences)
    print(f"{tokens} tokens of {len(sequences)} sequences in {counts.steps} steps")
    print(f"{counts.reused} of {counts.prompt_tokens} tokens of prompts reused")
    print(f"{counts.right} of {counts.drafted} drafted tokens accepted")
    print(f"largest relative difference to each sequence alone: {largest:.1e}")
    return largest


if __name__ == "__main__":
    raise SystemExit(main() > 1e-4)
