"""Compare outputs of ``selective_state_update`` whose states are in narrow formats with those of float64 states, on the CPU.

    python tools/state_formats.py [--tokens 1 64 1024] [--seed 0]

Steps are computed in float32, and states are rounded after a prompt and after each token, or after every eighth where a format says
so, as if the tokens between were of one call. Formats of 8 bits have a float32 scale for each row of states, by which the largest
state of the row becomes the format's largest number. ``stochastic`` rounds up or down at random, so that states are right in the mean.

Printed for rows of each decay, which is what a token leaves of a row's slowest state: relative errors of the outputs of up to
``READ`` tokens, without D and z, of all rows together and, in brackets, of the row at the 99th percentile after the last token.
"""

from __future__ import annotations

import argparse
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

READ = 16
PROMPT = 3000
DECAYS = 0.9, 0.99, 0.999
LARGEST_INT8, LARGEST_E4M3 = 127.0, 448.0

Rounding = Callable[[Tensor], Tensor]


class Layer(NamedTuple):
    """(heads, channels, states) for each decay. ``tied``: Mamba-2, with one A and one step size for each head and with B and C
    behind a convolution and silu; else Mamba, with A from -1 to -states."""

    heads: int
    channels: int
    states: int
    tied: bool


LAYERS = {
    "Mamba-2, rows of 128 states": Layer(8, 16, 128, tied=True),
    "Mamba, rows of 16 states": Layer(1, 256, 16, tied=False),
}


def inputs(layer: Layer) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """What multiplies the states of each token, what is added to them, and C; (decays, heads, channels, states)."""
    heads, channels, states, tied = layer
    if tied:
        A = -1 - 15 * torch.rand(heads, 1, 1, dtype=torch.float64)
    else:
        A = -torch.arange(1.0, states + 1, dtype=torch.float64).expand(channels, -1)
    decays = torch.tensor(DECAYS, dtype=torch.float64).view(-1, 1, 1, 1)
    size = -torch.log(decays) / -A.amax(-1, keepdim=True).expand(heads, 1 if tied else channels, 1)
    bias = size + torch.log(-torch.expm1(-size))  # whose softplus is ``size``
    through = silu if tied else torch.nn.Identity()
    while True:
        x = silu(torch.randn(len(DECAYS), heads, channels, 1))
        delta = softplus(bias + 0.5 * torch.randn(bias.shape))
        B, C = (through(torch.randn(states)).double() for _ in "BC")
        yield torch.exp(delta * A), delta * x * B, C


def exact(x: Tensor) -> Tensor:
    return x


def nearest(dtype: torch.dtype) -> Rounding:
    return lambda x: x.to(dtype).float()


def stochastic(fraction: int, least: int) -> Rounding:
    """To floats whose fraction has so many bits, with a least exponent."""

    def rounded(x: Tensor) -> Tensor:
        exponent = torch.frexp(x)[1].clamp_min(least + 1) - 1
        gap = torch.ldexp(torch.ones_like(x), exponent - fraction)
        return torch.floor(x / gap + torch.rand_like(x)) * gap

    return rounded


def stochastic_integer(x: Tensor) -> Tensor:
    return torch.floor(x + torch.rand_like(x))


def scaled(largest: float, rounding: Rounding) -> Rounding:
    """With a scale for each row."""

    def rounded(x: Tensor) -> Tensor:
        most = x.abs().amax(-1, keepdim=True)
        scale = torch.where(most > 0, most / largest, torch.ones_like(most))
        return rounding(x / scale).clamp(-largest, largest) * scale

    return rounded


#: How states are rounded, and after how many tokens.
FORMATS: dict[str, tuple[Rounding, int]] = {
    "float32": (exact, 1),
    "float16": (nearest(torch.float16), 1),
    "float16, stochastic": (stochastic(10, -14), 1),
    "bfloat16": (nearest(torch.bfloat16), 1),
    "bfloat16, stochastic": (stochastic(7, -126), 1),
    "int8": (scaled(LARGEST_INT8, torch.round), 1),
    "int8, stochastic": (scaled(LARGEST_INT8, stochastic_integer), 1),
    "int8, stochastic, every 8 tokens": (scaled(LARGEST_INT8, stochastic_integer), 8),
    "float8_e4m3": (scaled(LARGEST_E4M3, nearest(torch.float8_e4m3fn)), 1),
    "float8_e4m3, stochastic": (scaled(LARGEST_E4M3, stochastic(3, -6)), 1),
}


def errors(layer: Layer, tokens: list[int]) -> dict[str, dict[int, Tensor]]:
    """By format and number of tokens the sums of squares of errors and of outputs, (2, decays, rows)."""
    tokens_of, state = inputs(layer), torch.zeros(())
    for _ in range(PROMPT):
        gates, added, C = next(tokens_of)
        state = gates * state + added
    narrow = {name: rounding(state.float()) for name, (rounding, _) in FORMATS.items()}
    squares: dict[str, deque[Tensor]] = {name: deque(maxlen=READ) for name in FORMATS}
    sums: dict[str, dict[int, Tensor]] = {name: {} for name in FORMATS}
    for t in range(1, max(tokens) + 1):
        gates, added, C = next(tokens_of)
        state = gates * state + added
        y = state @ C
        for name, (rounding, every) in FORMATS.items():
            new = gates.float() * narrow[name] + added.float()
            error = (new @ C.float()).double() - y
            narrow[name] = rounding(new) if t % every == 0 else new
            squares[name].append(torch.stack([error, y]).square().flatten(2))
            if t in tokens:
                sums[name][t] = torch.stack([*squares[name]]).sum(0)
    return sums


def table(layer: Layer, tokens: list[int]) -> Iterator[tuple[str, list[list[float]]]]:
    """By format for each decay the errors after each number of tokens, and that of the row at the 99th percentile."""
    for name, by_tokens in errors(layer, tokens).items():
        sums = [by_tokens[t] for t in sorted(tokens)]
        rows = (sums[-1][0] / sums[-1][1]).quantile(0.99, -1)
        whole = [s[0].sum(-1) / s[1].sum(-1) for s in sums]
        yield name, [list(map(math.sqrt, of_decay)) for of_decay in torch.stack([*whole, rows], -1)]


def main(arguments: list[str] | None = None) -> None:
    """Print a table for each layer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 1024])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for title, layer in LAYERS.items():
        torch.manual_seed(options.seed)
        heads = [f"decay {decay}" for decay in DECAYS]
        print(f"\n| {title}; after {options.tokens} tokens | {' | '.join(heads)} |")
        print("| --- " * (1 + len(heads)) + "|")
        for name, by_decay in table(layer, options.tokens):
            cells = (" ".join(f"{e:.1e}" for e in of[:-1]) + f" ({of[-1]:.1e})" for of in by_decay)
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
